"""Answers the page about a cluster. The dashboard's account has no right to write.

Where viewers sign in with tokens of the API server, they change things and read logs with these.
"""

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import replace

import msgspec
from aiohttp import web

from fenka.cluster.explain import PodExplanation, explain
from fenka.cluster.objects import Event, Pod, seconds
from fenka.cluster.pod_groups import group_key, names_pod_group
from fenka.core.errors import FenkaError
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.guard import AnswerRefused, Handler
from fenka.dashboard.page_server import (
    NOT_YET,
    File,
    PageServer,
    Resize,
    body,
    json,
    json_bytes,
    number,
    usage_sums,
)
from fenka.dashboard.prometheus import Prometheus
from fenka.dashboard.sign_in import Namespaces, OpenSignIn, SignedInViewer, SignIn
from fenka.dialects.base import GIB_MIB, ContainerKind, InvalidRecord
from fenka.dialects.resize_records import FINAL, REFUSED, REQUEST, encode_request
from fenka.formats.quantities import parse_memory
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.reader import read_pod_groups, read_scheduler_options, read_usage
from fenka.views.board import HistoryAnswer, ProgramDetail, Sums, WhatIf, World
from fenka.views.board_sums import first_days
from fenka.views.cluster_what_if import InvalidClusterQuestion, what_if
from fenka.views.pod_explanations import explain_growth, explanation_lines
from fenka.views.visible_board import Visibility
from fenka.workstation.protocol import UsageRead

LONGEST_S = 31 * 86_400
MAX_LOG_LINES = 10_000
ALL_NAMESPACES = "this names requests of all namespaces, and you may not list pods in all of them"
OPEN = OpenSignIn()

_WORLD = b"event: world\ndata: "
_encode = msgspec.json.Encoder().encode
NO_USAGE = (
    "nothing records the usage of this cluster: `dashboard.page.usage.enabled` of fenka's chart"
)
NO_PROMETHEUS = "figures over time need a Prometheus: name it with --prometheus URL"


class ClusterPages(PageServer):
    """Answers for one cluster."""

    def __init__(
        self,
        shown: ClusterLive,
        files: Mapping[str, File],
        prometheus: Prometheus | None = None,
        sign_in: SignIn = OPEN,
    ) -> None:
        super().__init__(shown, files)
        self._live, self._prometheus, self._sign_in = shown, prometheus, sign_in
        self._encoded: dict[Visibility, tuple[World, bytes]] = {}

    async def _viewer(self, request: web.Request) -> tuple[SignedInViewer, Visibility]:
        """Return who sent a request and what they see. Raises AnswerRefused."""
        known = self._live.namespaces
        viewer = await self._sign_in.viewer(
            request, Namespaces(known, self._live.namespaces_of_pods)
        )
        return viewer, Visibility(known, viewer.namespaces, self._sign_in.acts)

    async def world(self, request: web.Request) -> web.Response:
        """Return what the stream sent last."""
        _, seen = await self._viewer(request)
        return json_bytes(self._world(seen))

    def _world(self, seen: Visibility) -> bytes:
        """Return the last World for these rights, encoded once for all with them. Raises AnswerRefused."""
        world, encoded = self._live.world(), self._live.encoded
        if world is None or encoded is None:
            raise AnswerRefused(503, NOT_YET)
        if seen.namespaces is None and not seen.acts:
            return encoded
        made_of, made = self._encoded.get(seen, (None, b""))
        if made_of is not world:
            made = _encode(seen.world(world))
            # Encodings of earlier Worlds are dropped.
            self._encoded = {
                rights: kept for rights, kept in self._encoded.items() if kept[0] is world
            } | {seen: (world, made)}
        return made

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Send the stream of messages."""
        viewer, _ = await self._viewer(request)
        frames = self.frames(request)
        return await self.stream(request, frames, "text/event-stream", viewer.person)

    async def frames(self, request: web.Request) -> AsyncGenerator[bytes]:
        """Yield the messages for one viewer, and with `?node=NAME` that node's cards.

        It ends when the viewer's rights do.
        """
        name, sent = request.query.get("node", ""), b""
        with self._live.looking_at(name) if name else contextlib.nullcontext():
            async for frame in self._live.fanout.frames():
                try:
                    _, seen = await self._viewer(request)
                    restricted = seen.namespaces is not None or seen.acts
                    if restricted and frame.startswith(_WORLD):
                        yield b"%s%s\n\n" % (_WORLD, self._world(seen))
                    else:
                        yield frame
                except AnswerRefused:
                    return
                cards = _encode(seen.tiles(self._live.node(name))) if name else b""
                if cards != sent:
                    sent = cards
                    yield b"event: node\ndata: %s\n\n" % cards

    async def program(self, request: web.Request) -> web.Response:
        """Return one pod in full."""
        shown = self._live.world()
        if shown is None:
            raise AnswerRefused(503, NOT_YET)
        _, seen = await self._viewer(request)
        pod = self._pod(request.match_info["id"], seen)
        try:
            events, _ = await self._live.api.list(
                f"/api/v1/namespaces/{pod.metadata.namespace}/events",
                Event,
                fieldSelector=f"involvedObject.uid={pod.metadata.uid}",
            )
        except (ApiError, ApiUnreachable):
            events = []
        explanation = await self._explain(pod, events)
        return json(self._detail(pod, events, explanation, seen.world(shown), seen))

    def _pod(self, id_: str, seen: Visibility) -> Pod:
        """Return the pod of a program's id, or of a waiting request's. Raises AnswerRefused."""
        pods = self._live.informers.pods.objects
        named = pods.get(id_) or next((pod for pod in pods.values() if pod.full_name == id_), None)
        # A gang that waits has its name; the first of its pods explains it.
        group = named or next((pod for pod in pods.values() if group_key(pod) == id_), None)
        if group is None or not seen.sees(group.metadata.namespace):
            raise AnswerRefused(404, "no program has this id: it has ended")
        return group

    def _detail(
        self,
        pod: Pod,
        events: Sequence[Event],
        explanation: PodExplanation,
        shown: World,
        seen: Visibility,
    ) -> ProgramDetail:
        uid, name = pod.metadata.uid, pod.full_name
        line = next((line for line in self._live.programs() if line.id == uid), None)
        if line is not None and seen.acts:
            line = msgspec.structs.replace(line, own=True)
        group = f"{pod.metadata.namespace}/{line.group}" if line and line.group else ""
        ids = {name, group, group_key(pod) or ""}
        return ProgramDetail(
            program=line,
            waiting=next((row for row in shown.waiting if row.id in ids), None),
            explanation=[seen.sentence(text) for text in explanation_lines(explanation, _rows)],
            logs=seen.acts,
            events=[
                (seconds(event.at) or 0.0, seen.sentence(f"{event.reason}: {event.message}"))
                for event in sorted(events, key=lambda event: event.at)
            ],
            mates=[
                other.id
                for other in self._live.programs()
                if line
                and line.group
                and other.group == line.group
                and other.user == line.user
                and other.id != uid
            ],
        )

    async def _explain(self, pod: Pod, events: Sequence[Event]) -> PodExplanation:
        now, known, snapshot = self._live.clock(), self._live.autoscaler, self._live.snapshot()
        if names_pod_group(pod) and not pod.spec.node_name:
            with contextlib.suppress(ApiError, ApiUnreachable):
                groups = await read_pod_groups(self._live.api, pod.metadata.namespace)
                snapshot = replace(snapshot, groups=groups)
        explanation = explain(pod, snapshot, events)
        published = None if known is None else (known.status, known.orders)
        explain_growth(explanation, pod, published, events, now)
        return explanation

    async def history(self, request: web.Request) -> web.Response:
        """Return figures over time."""
        query, now = request.query, self._live.clock()
        span_s = number(request, "span", 3600, LONGEST_S)
        if ("program" in query) == ("card" in query):
            raise AnswerRefused(400, "say either program=ID or card=ID")
        _, seen = await self._viewer(request)
        if self._prometheus is None:
            return json(HistoryAnswer([], problem=NO_PROMETHEUS))
        if "program" in query:
            meta = self._pod(query["program"], seen).metadata
            return json(await self._prometheus.program(meta.namespace, meta.name, span_s, now))
        node, _, index = query["card"].rpartition("/")
        if not (node and index.isascii() and index.isdecimal()):
            raise AnswerRefused(400, "a card's id is NODE/INDEX")
        return json(await self._prometheus.card(node, int(index[:4]), span_s, now))

    async def sums(self, request: web.Request) -> web.Response:
        """Return the sums of usage by namespace, and how requests waited."""
        _, seen = await self._viewer(request)
        waits = None
        if self._prometheus is not None and seen.namespaces is None:
            waits = await self._prometheus.waits()
        month, today = first_days(self._live.clock())
        try:
            read = [await self._usage(day, today + 1) for day in (month, today)]
        except (ApiError, ApiUnreachable, InvalidRecord) as why:
            return json(Sums(waits=waits, problem=f"usage is not known: {why}"))
        known = [one for one in read if one is not None]
        if len(known) < len(read):
            return json(Sums(waits=waits, problem=NO_USAGE))
        return json(usage_sums(known[0], known[1], "namespace", waits, seen.sees))

    async def _usage(self, since: int, until: int) -> UsageRead | None:
        """Return the usage of some days; None if nobody records it. Raises ApiError, ApiUnreachable."""
        if self._live.meter is not None:
            return await self._live.meter.read(since, until, "namespace")
        return await read_usage(self._live.api, UsageRead, since=since, until=until, by="namespace")

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Send the last lines of a pod's log by the viewer's right, and with `follow` what it prints then."""
        viewer, seen = await self._viewer(request)
        if not viewer.token:
            raise AnswerRefused(403, "use `kubectl logs`: this page has no right to read logs")
        lines = number(request, "lines", 200, MAX_LOG_LINES)
        pod = self._pod(request.match_info["id"], seen)
        container = next(one for one in pod.request.containers if one.kind is ContainerKind.APP)
        query: dict[str, str | int] = {"container": container.name, "tailLines": lines}
        if "follow" in request.query:
            query["follow"] = "true"
        async with self._live.api.as_user(viewer.token) as api:
            parts = api.stream(f"{pod.path}/log", **query)
            try:
                first = await anext(parts, b"")
            except (ApiError, ApiUnreachable) as why:
                raise _refusal(why) from None
            return await self.stream(request, _log(first, parts), "text/plain", viewer.person)

    # ---- changing, by the viewer's own rights ----

    def changes(self) -> Mapping[str, Handler]:
        """Return what deletes and resizes pods, if viewers have tokens of the API server."""
        return {"stop/{id}": self.stop, "resize/{id}": self.resize} if self._sign_in.acts else {}

    async def stop(self, request: web.Request) -> web.Response:
        """Delete a pod. Its Job or Deployment may start another one."""
        return await self._change(
            request,
            lambda api, pod: api.delete(pod.path, {"preconditions": {"uid": pod.metadata.uid}}),
        )

    async def resize(self, request: web.Request) -> web.Response:
        """Request another size of a pod's slice, which its node grants if it has room."""
        wanted = await body(request, Resize)
        if wanted.gpu_core_mode is not None:
            raise AnswerRefused(400, "a pod's mode is read when it starts: change its manifest")
        try:
            if wanted.gpu_mem:
                parse_memory(wanted.gpu_mem, GIB_MIB)
            text = encode_request("", wanted.gpu_mem, wanted.gpu_core)
        except (FenkaError, InvalidRecord) as why:
            raise AnswerRefused(400, str(why)) from None

        async def annotate(api: Api, pod: Pod) -> None:
            annotations = {REQUEST: text, REFUSED: None, FINAL: None}
            meta = {"uid": pod.metadata.uid, "annotations": annotations}
            await api.patch(pod.path, msgspec.Raw, {"metadata": meta})

        return await self._change(request, annotate)

    async def _change(
        self, request: web.Request, change: Callable[[Api, Pod], Awaitable[None]]
    ) -> web.Response:
        """Change a pod by the viewer's token. Raises AnswerRefused."""
        viewer, seen = await self._viewer(request)
        pod = self._pod(request.match_info["id"], seen)
        try:
            async with self._live.api.as_user(viewer.token) as api:
                await change(api, pod)
        except (ApiError, ApiUnreachable) as why:
            raise _refusal(why) from None
        return json(Changed(pod.full_name))

    async def what_if(self, request: web.Request) -> web.Response:
        """Return which requests would start."""
        _, seen = await self._viewer(request)
        if seen.namespaces is not None:
            raise AnswerRefused(403, ALL_NAMESPACES)
        question = await body(request, WhatIf)
        if not self._live.informers.synced:
            raise AnswerRefused(503, NOT_YET)
        try:
            options = await read_scheduler_options(self._live.api)
        except (ApiError, ApiUnreachable) as why:
            raise AnswerRefused(503, str(why)) from None
        snapshot, now = self._live.snapshot(), self._live.clock()
        try:
            # With thousands of nodes it takes seconds. It copies what it needs at its beginning.
            return json(await asyncio.to_thread(what_if, snapshot, options, question, now))
        except InvalidClusterQuestion as why:
            raise AnswerRefused(400, str(why)) from None


class Changed(msgspec.Struct, frozen=True):
    """text: the pod that was changed."""

    text: str


def _refusal(why: ApiError | ApiUnreachable) -> AnswerRefused:
    """Return the API server's sentence about a viewer's request."""
    status = why.status if isinstance(why, ApiError) and 400 <= why.status < 500 else 503
    # 401 would have the page ask for another token.
    return AnswerRefused(403 if status == 401 else status, str(why))


async def _log(first: bytes, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield a log, as long as the API server sends it."""
    yield first
    with contextlib.suppress(ApiError, ApiUnreachable):
        async for part in parts:
            yield part


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's rows as lines, without its titles."""
    return [": ".join(row) for row in rows[1:]]
