"""The extender over HTTP, at gpushare's paths.

kube-scheduler is answered with 200, and errors in `Error`. A verb whose answer has no such field fails with
503, or with 400 if the request is not one of the protocol. The leader decides; other replicas forward the
verbs to it.

There are two applications: `app` has all routes and is for kube-scheduler, `readable` has the routes that
change nothing and is for everybody.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import msgspec
from aiohttp import web

from fenka import __version__
from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.kubernetes.http_listener import LISTENER, ThrottledText
from fenka.kubernetes.leadership import Leadership
from fenka.scheduler.binder import Binder
from fenka.scheduler.credentials import Credentials
from fenka.scheduler.extender import Extender
from fenka.scheduler.extender_api import (
    ExtenderFilterResult,
    HostPriority,
    InvalidExtenderRequest,
    filter_result,
    preemption_result,
    read_args,
    read_binding,
    read_preemption,
)
from fenka.scheduler.inspect import inspect, inspect_text
from fenka.scheduler.leader_proxy import FORWARDED, LeaderProxy, LeaderUnreachable
from fenka.scheduler.metrics import Metrics
from fenka.scheduler.queue_controller import QueueController
from fenka.scheduler.request_bodies import BodyLimits, BodyReader, BodyRejected
from fenka.scheduler.screens import nodes_text, queue_text

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
    """What a server offers to whom.

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
    """Answers for one replica."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        cluster: ClusterState,
        queue: QueueController,
        extender: Extender,
        binder: Binder,
        leadership: Leadership,
        metrics: Metrics,
        access: Access,
        pods: Callable[[], list[Pod]] = list,
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
        """
        self._cluster, self._queue = cluster, queue
        self._extender, self._binder = extender, binder
        self._leadership, self._metrics, self._access = leadership, metrics, access
        self._proxy = LeaderProxy(leadership.election.identity, access.credentials)
        self._bodies = BodyReader(access.bounds)
        self._inspect_text = ThrottledText(lambda: inspect_text(cluster))
        self._screens = {
            "queue": ThrottledText(queue_text(cluster, lambda: queue.state.snapshot)),
            "nodes": ThrottledText(nodes_text(cluster, pods)),
        }
        self._metrics_text = ThrottledText(metrics.text)

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
        app.router.add_get("/healthz", _healthz)
        app.router.add_get("/readyz", self._readyz)
        if metrics:
            app.router.add_get("/metrics", self._serve_metrics)
        return app

    # ---- verbs ----

    async def filter(self, body: bytes) -> ExtenderFilterResult:
        """Return which nodes fit, and why the others do not."""
        args = read_args(body)
        return filter_result(args, self._extender.filter(args.pod, args.names))

    async def prioritize(self, body: bytes) -> list[HostPriority]:
        """Return a score for each node."""
        args = read_args(body)
        return list(starmap(HostPriority, self._extender.prioritize(args.pod, args.names)))

    async def bind(self, body: bytes) -> dict[str, str]:
        """Bind one pod."""
        args = read_binding(body)
        error = await self._binder.bind(args)
        log.info("%s/%s to %s: %s", args.namespace, args.name, args.node, error or "bound")
        return {"Error": error}

    async def preempt(self, body: bytes) -> dict[str, Any]:
        """Return which pods to evict, on nodes where that makes room."""
        args = read_preemption(body)
        return preemption_result(args, self._extender.preempt(args.pod, args.victims, args.pods))

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
        except InvalidExtenderRequest as why:
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

    async def _readyz(self, _: web.Request) -> web.Response:
        if self._leadership.ready:
            return web.Response(text="ok")
        return web.Response(status=503, text=f"not ready: {self._leadership.unready_reason}")

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        body = await self._metrics_text()
        return web.Response(body=body, content_type="text/plain", charset="utf-8")


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(body=_ENCODER.encode(answer), status=status, headers=_JSON)


def _filter_error(sentence: str, _: int) -> web.Response:
    return _json(ExtenderFilterResult(error=sentence))


def _error_field(sentence: str, _: int) -> web.Response:
    return _json({"Error": sentence})


def _error_text(sentence: str, status: int) -> web.Response:
    return web.Response(status=status, text=sentence)


async def _version(_: web.Request) -> web.Response:
    return web.Response(text=__version__)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")
