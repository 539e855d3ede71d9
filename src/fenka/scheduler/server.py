"""The extender over HTTP, at gpushare's paths, and what users may read who may not list pods and nodes.

kube-scheduler is answered with 200, and errors in `Error`. A verb whose answer has no such field fails with
503, or with 400 if the request is not one of the protocol. The leader decides; other replicas forward the
verbs to it.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, starmap
from math import ceil
from typing import Any

import msgspec
from aiohttp import web

from fenka import __version__
from fenka.cluster.objects import Pod
from fenka.cluster.placement import FilterResult
from fenka.cluster.pod_groups import PodGroup
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.core.columnar_placer import count_reasons
from fenka.core.errors import FenkaError
from fenka.core.units import MIB
from fenka.dialects import gpushare
from fenka.dialects.base import SharedNode
from fenka.kubernetes.leadership import Leadership
from fenka.scheduler import extender_api
from fenka.scheduler.binder import Binder
from fenka.scheduler.extender import Extender
from fenka.scheduler.leader_proxy import FORWARDED, Credentials, LeaderProxy, LeaderUnreachable
from fenka.scheduler.metrics import SchedulerMetrics
from fenka.scheduler.queue_controller import QueueController
from fenka.server.listener import LISTENER, ThrottledText
from fenka.server.pod_spans import PodSpans, pod_attributes
from fenka.server.probes import add_probes
from fenka.views.cluster_queue import queue_rows, unschedulable
from fenka.views.node_rows import node_rows
from fenka.views.unqueued_rows import unqueued_steps
from fenka.views.workloads import QueueRow

Groups = Callable[[], Mapping[str, PodGroup]]
"""Returns all PodGroups, by namespace/name."""


def inspect_text(cluster: ClusterState) -> Iterator[bytes]:
    """Yield the JSON of all sharing nodes, in parts."""
    opening = b'{"nodes":['
    for shared in cluster.shared_nodes():
        yield opening + msgspec.json.encode(inspect(cluster, shared))
        opening = b","
    yield b"]}" if opening == b"," else opening + b"]}"


def inspect(cluster: ClusterState, shared: SharedNode) -> dict[str, Any]:
    """Return one sharing node."""
    node = shared.node
    pods: dict[int, list[dict[str, Any]]] = {card.index: [] for card in shared.physical_cards}
    for allocation in cluster.allocations(node.name):
        for index, units in gpushare.shown_units(shared, allocation.slices).items():
            meta = allocation.pod.metadata
            held = {"name": meta.name, "namespace": meta.namespace, "usedGPU": ceil(units)}
            pods[index].append(held)
    devices = [
        {
            "id": card.index,
            "totalGPU": shared.card_units(card.index),
            "usedGPU": sum(pod["usedGPU"] for pod in pods[card.index]),
            "pods": pods[card.index],
        }
        for card in shared.physical_cards
    ]
    return {
        "name": node.name,
        "totalGPU": shared.total_units,
        "usedGPU": sum(device["usedGPU"] for device in devices),
        "devs": devices,
    }


MAX_ENTRIES = 2000
"""Of the queue; each costs a sentence about all cards."""


def queue_text(
    state: ClusterState,
    queue: QueueController,
    pods: Callable[[], list[Pod]],
    groups: Groups = dict,
) -> Callable[[], Iterator[bytes]]:
    """Return what yields the JSON of the queue's first entries, in parts. Some are empty.

    Pods that wait for something else than the queue come after them.

    Args:
        state: the cluster.
        queue: its queue.
        pods: returns all pods.
        groups: returns all PodGroups, by namespace/name.
    """

    def parts() -> Iterator[bytes]:
        snapshot = queue.state.snapshot
        for _ in count_reasons(unschedulable(snapshot, MAX_ENTRIES)):
            yield b""
        yield from _array(
            chain(
                islice(queue_rows(snapshot, state), MAX_ENTRIES),
                _unqueued_steps(state, queue, pods(), groups()),
            )
        )

    return parts


def _unqueued_steps(
    state: ClusterState, queue: QueueController, pods: list[Pod], groups: Mapping[str, PodGroup]
) -> Iterator[QueueRow | None]:
    now = queue.now()
    paused = {entry.id: refusal.sentence(now) for entry, refusal in queue.state.paused_entries(now)}
    snapshot, has_nodes = queue.state.snapshot, queue.state.has_nodes
    return unqueued_steps(pods, snapshot, state, has_nodes, paused, now, MAX_ENTRIES, groups)


def nodes_text(state: ClusterState, pods: Callable[[], list[Pod]]) -> Callable[[], Iterator[bytes]]:
    """Return what yields the JSON of all nodes, in parts. pods: returns all pods."""
    return lambda: _array(node_rows(ClusterSnapshot(state.nodes(), pods(), state)))


def _array(rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield JSON. Rows that are None are steps on the way to the next one."""
    opening = b"["
    for row in rows:
        if row is None:
            yield b""
            continue
        yield opening + msgspec.json.encode(row)
        opening = b","
    yield b"]" if opening == b"," else b"[]"


SMALL = 64 * 1024
"""Bodies up to this size never wait for larger ones; the number of connections bounds them."""
WAIT_S = 4.0
"""A body waits this long for others to be answered; kube-scheduler waits 5 s in total."""


class BodyRejected(FenkaError):
    """The body is not read. status: HTTP's. The message is for kube-scheduler's event."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits in bytes. largest: of one body; together: of all bodies that are read or answered at a time."""

    largest: int = 8 * MIB
    together: int = 64 * MIB


class BodyReader:
    """Reads the bodies of one server.

    Limits hold for each body, and for all bodies at a time. They are checked before anything is read if
    Content-Length gives the size, else while the body is read.
    """

    def __init__(self, bounds: BodyLimits) -> None:
        self._bounds = bounds
        self._held = 0
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Return the number of bytes that are reserved now."""
        return self._held

    @contextlib.asynccontextmanager
    async def reading(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the body; its reservation ends with the block. Raises BodyRejected."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise BodyRejected(415, "the request's body is compressed: send it uncompressed")
        reserved = 0
        try:
            length = request.content_length
            # The size of a chunked body is known only at its end.
            reserved = await self._reserve(0, length or 0)
            # A list of parts of one byte each would be large.
            body = bytearray()
            async for part in request.content.iter_any():
                body += part
                reserved = await self._reserve(reserved, len(body))
            yield bytes(body)
        finally:
            if reserved:
                self._held -= reserved
                async with self._freed:
                    self._freed.notify_all()

    async def _reserve(self, reserved: int, size: int) -> int:
        """Return the number of bytes that are reserved for a body of this size."""
        if size > self._bounds.largest:
            raise BodyRejected(
                413,
                f"the request's body has more than {self._bounds.largest // MIB} MiB: set nodeCacheCapable: "
                "true in kube-scheduler's configuration, or raise scheduler.bodies.largestMiB of the chart",
            )
        if size <= max(SMALL, reserved):
            return reserved
        try:
            async with asyncio.timeout(WAIT_S), self._freed:
                await self._freed.wait_for(
                    lambda: self._held - reserved + size <= self._bounds.together
                )
                self._held += size - reserved
        except TimeoutError:
            raise BodyRejected(
                503, f"requests of {self._bounds.together // MIB} MiB are being answered: try again"
            ) from None
        return size


log = logging.getLogger(__name__)

PREFIX = "/gpushare-scheduler"
KEEP_ALIVE_S = 600.0
"""Longer than kube-scheduler keeps a connection: whoever closes it first loses no request."""

UNAVAILABLE = 503

_ENCODER = msgspec.json.Encoder()
_JSON = {"Content-Type": "application/json"}

Verb = Callable[[bytes], Awaitable[Any]]
Failure = Callable[[str, int], web.Response]
"""Makes a verb's answer that carries an error, from the sentence and the status."""


@dataclass(frozen=True, slots=True)
class Access:
    """The routes of a server, by caller.

    Attributes:
        bounds: limits of request bodies.
        inspect: whether callers without a certificate may read `/inspect`, `/queue` and `/nodes`.
        metrics: whether callers without a certificate may read the metrics.
        credentials: certificates, also for forwarded calls; None for plain HTTP.
    """

    bounds: BodyLimits = field(default_factory=BodyLimits)
    inspect: bool = True
    metrics: bool = True
    credentials: Credentials | None = None


class Server:
    """Answers for one replica.

    There are two applications: `app` has all routes and is for kube-scheduler, `readable` has the routes
    that change nothing and is for everybody. Screens show names, requests and cards: no command, no
    variable, no label of a pod.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        cluster: ClusterState,
        queue: QueueController,
        extender: Extender,
        binder: Binder,
        leadership: Leadership,
        metrics: SchedulerMetrics,
        access: Access,
        pods: Callable[[], list[Pod]] = list,
        spans: PodSpans | None = None,
        groups: Groups = dict,
    ) -> None:
        """Args:
        cluster: what `/inspect` shows.
        queue: leaves time to answer.
        extender: answers filter, prioritize and preempt.
        binder: answers bind.
        leadership: whether this replica decides, and where the leader is.
        metrics: what `/metrics` shows.
        access: who may do what.
        pods: returns all pods, of which `/nodes` shows those with whole cards.
        spans: gets a span of each filter and bind; None: nobody does.
        groups: returns all PodGroups by namespace/name, of which `/queue` names incomplete ones.
        """
        self._spans = spans
        self._cluster, self._queue = cluster, queue
        self._extender, self._binder = extender, binder
        self._leadership, self._metrics, self._access = leadership, metrics, access
        self._proxy = LeaderProxy(leadership.election.identity, access.credentials)
        self._bodies = BodyReader(access.bounds)
        self._inspect_text = ThrottledText(lambda: inspect_text(cluster))
        self._screens = {
            "queue": ThrottledText(queue_text(cluster, queue, pods, groups)),
            "nodes": ThrottledText(nodes_text(cluster, pods)),
        }

    def app(self) -> web.Application:
        """Return an application with all routes. If it has certificates, only their holders reach it."""
        trusted = self._access.credentials is not None
        app = self._application(
            inspect=trusted or self._access.inspect, metrics=trusted or self._access.metrics
        )
        app.cleanup_ctx.append(self._proxy.running)
        verbs: dict[str, tuple[Verb, Failure]] = {
            "filter": (self.filter, _filter_error),
            "prioritize": (self.prioritize, _error_text),
            "bind": (self.bind, _error_field),
            "preempt": (self.preempt, _error_text),
        }
        for name, (verb, fail) in verbs.items():
            app.router.add_post(f"{PREFIX}/{name}", self._handler(name, verb, fail))
        return app

    def readable(self) -> web.Application:
        """Return an application with the routes that change nothing."""
        return self._application(inspect=self._access.inspect, metrics=self._access.metrics)

    def _application(self, *, inspect: bool, metrics: bool) -> web.Application:
        slashes = web.normalize_path_middleware(
            append_slash=False, remove_slash=True, redirect_class=web.HTTPTemporaryRedirect
        )
        app = web.Application(middlewares=[slashes])
        if inspect:
            app.router.add_get(f"{PREFIX}/inspect", self._inspect)
            app.router.add_get(f"{PREFIX}/inspect/{{node}}", self._inspect)
            app.router.add_get(f"{PREFIX}/{{screen:queue|nodes}}", self._screen)
        app.router.add_get("/version", _version)
        shown = self._metrics.text if metrics else None
        add_probes(app, lambda: self._leadership.problem, shown)
        return app

    # ---- verbs ----

    async def filter(self, body: bytes) -> extender_api.ExtenderFilterResult:
        """Return which nodes fit, and why the others do not."""
        args, begun_ns = extender_api.read_args(body), time.time_ns()
        await self._queue.prepare()
        result = self._extender.filter(args.pod, args.names)
        log.debug("filter %s: %s", args.pod.full_name, result)
        if self._spans is not None:
            attributes = _filter_attributes(args.pod, result)
            self._spans.add(args.pod.metadata.uid, "filter", begun_ns, attributes)
        return extender_api.filter_result(args, result)

    async def prioritize(self, body: bytes) -> list[extender_api.HostPriority]:
        """Return a score for each node."""
        args = extender_api.read_args(body)
        return list(
            starmap(extender_api.HostPriority, self._extender.prioritize(args.pod, args.names))
        )

    async def bind(self, body: bytes) -> dict[str, str]:
        """Bind one pod."""
        args, begun_ns = extender_api.read_binding(body), time.time_ns()
        error = await self._binder.bind(args)
        if self._spans is not None:
            attributes = {**pod_attributes(args.namespace, args.name), "k8s.node.name": args.node}
            self._spans.add(args.uid, "bind", begun_ns, attributes, error)
        log.info("%s/%s to %s: %s", args.namespace, args.name, args.node, error or "bound")
        return {"Error": error}

    async def preempt(self, body: bytes) -> dict[str, Any]:
        """Return which pods to evict, on nodes where that makes room."""
        args = extender_api.read_preemption(body)
        return extender_api.preemption_result(
            args, self._extender.preempt(args.pod, args.victims, args.pods)
        )

    # ---- HTTP ----

    def _handler(
        self, name: str, verb: Verb, fail: Failure
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        observe = self._metrics.requests.labels(name).observe

        async def handle(request: web.Request) -> web.StreamResponse:
            begun = time.perf_counter()
            try:
                with self._queue.answering():
                    async with self._bodies.reading(request) as body:
                        with request.app[LISTENER].protect(request):
                            forwarded = FORWARDED in request.headers
                            answer = await self._respond(name, verb, fail, body, forwarded)
            except BodyRejected as why:
                answer = fail(f"fenka: {why}", why.status)
                answer.force_close()
            finally:
                observe(time.perf_counter() - begun)
            if self._leadership.ending:
                # The Service sends the next call to a replica that stays.
                answer.force_close()
            return answer

        return handle

    async def _respond(
        self, name: str, verb: Verb, fail: Failure, body: bytes, forwarded: bool
    ) -> web.Response:
        if not body:
            return web.Response(status=400, text="Please send a request body")
        if self._leadership.leading:
            return await self._answer(verb, fail, body)
        if forwarded:
            leader = self._leadership.other_leader or "nobody yet"
            return fail(f"not the leader: that is {leader}", UNAVAILABLE)
        return await self._forward(name, fail, body)

    async def _forward(self, name: str, fail: Failure, body: bytes) -> web.Response:
        leader = self._leadership.other_leader
        if not leader:
            return fail("fenka: no replica leads now; one will within seconds", UNAVAILABLE)
        address = self._leadership.election.leader_address
        if not address:
            sentence = f"fenka: the leader {leader} has not published its address"
            return fail(sentence, UNAVAILABLE)
        try:
            answer = await self._proxy.post(f"{address}{PREFIX}/{name}", body)
        except LeaderUnreachable as why:
            return fail(f"fenka: the leader {leader} does not answer: {why}", UNAVAILABLE)
        self._metrics.forwarded.labels(name).inc()
        return answer

    async def _answer(self, verb: Verb, fail: Failure, body: bytes) -> web.Response:
        try:
            return _json(await verb(body))
        except extender_api.InvalidExtenderRequest as why:
            return fail(str(why), 400)
        except Exception:
            # A bug: this request fails, the next one is served.
            log.exception("a request failed")
            return fail("fenka failed at this request: its log has the reason", UNAVAILABLE)

    async def _inspect(self, request: web.Request) -> web.Response:
        name = request.match_info.get("node")
        if name is None:
            return web.Response(body=await self._inspect_text(), content_type="application/json")
        shared = self._cluster.shared_node(name)
        if shared is None:
            return _json({"nodes": [], "error": f'node "{name}" not found'}, status=404)
        return _json({"nodes": [inspect(self._cluster, shared)]})

    async def _screen(self, request: web.Request) -> web.Response:
        text = self._screens[request.match_info["screen"]]
        return web.Response(body=await text(), content_type="application/json")


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(body=_ENCODER.encode(answer), status=status, headers=_JSON)


def _filter_error(sentence: str, _: int) -> web.Response:
    return _json(extender_api.ExtenderFilterResult(error=sentence))


def _error_field(sentence: str, _: int) -> web.Response:
    return _json({"Error": sentence})


def _error_text(sentence: str, status: int) -> web.Response:
    return web.Response(status=status, text=sentence)


async def _version(_: web.Request) -> web.Response:
    return web.Response(text=__version__)


def _filter_attributes(pod: Pod, result: FilterResult) -> dict[str, str | int]:
    """Return what the span of a filter says: how many nodes fit, and why most of the others do not."""
    reasons = Counter([*result.failed.values(), *result.unresolvable.values()])
    attributes = {
        **pod_attributes(pod.metadata.namespace, pod.metadata.name),
        "fenka.nodes.feasible": len(result.fitting),
        "fenka.nodes.infeasible": reasons.total(),
    }
    if reasons:
        attributes["fenka.reason"] = reasons.most_common(1)[0][0]
    return attributes
