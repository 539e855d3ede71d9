"""Answers the page about a cluster. Nothing can be changed: the dashboard's account has no right to write."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from aiohttp import web

from fenka.cluster.explain import PodExplanation, explain
from fenka.cluster.objects import Event, Pod, seconds
from fenka.cluster.pod_groups import group_key
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.guard import AnswerRefused
from fenka.dashboard.page_server import NOT_YET, File, PageServer, body, json, number
from fenka.dashboard.prometheus import Prometheus
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.kubernetes.reader import read_scheduler_options
from fenka.views.board import HistoryAnswer, ProgramDetail, WhatIf, World
from fenka.views.cluster_what_if import InvalidClusterQuestion, what_if
from fenka.views.pod_explanations import explain_growth, explanation_lines

LONGEST_S = 31 * 86_400
NO_PROMETHEUS = "figures over time need a Prometheus: name it with --prometheus URL"


class ClusterPages(PageServer):
    """Answers for one cluster."""

    def __init__(
        self,
        shown: ClusterLive,
        files: Mapping[str, File],
        prometheus: Prometheus | None = None,
    ) -> None:
        super().__init__(shown, files)
        self._live, self._prometheus = shown, prometheus

    def frames(self, request: web.Request) -> AsyncGenerator[bytes]:
        """Return the messages for one viewer, and with `?node=NAME` that node's cards."""
        name = request.query.get("node", "")
        return self._with_node(name) if name else super().frames(request)

    async def _with_node(self, name: str) -> AsyncGenerator[bytes]:
        sent = b""
        with self._live.looking_at(name):
            async for frame in self._live.fanout.frames():
                yield frame
                cards = self._live.node(name)
                if cards != sent:
                    sent = cards
                    yield b"event: node\ndata: %s\n\n" % cards

    async def program(self, request: web.Request) -> web.Response:
        """Return one pod in full."""
        shown = self._live.world()
        if shown is None:
            raise AnswerRefused(503, NOT_YET)
        pod = self._pod(request.match_info["id"])
        try:
            events, _ = await self._live.api.list(
                f"/api/v1/namespaces/{pod.metadata.namespace}/events",
                Event,
                fieldSelector=f"involvedObject.uid={pod.metadata.uid}",
            )
        except (ApiError, ApiUnreachable):
            events = []
        return json(self._detail(pod, events, shown))

    def _pod(self, id_: str) -> Pod:
        """Return the pod of a program's id, or of a waiting request's. Raises AnswerRefused."""
        pods = self._live.informers.pods.objects
        named = pods.get(id_) or next((pod for pod in pods.values() if pod.full_name == id_), None)
        # A gang that waits has its name; the first of its pods explains it.
        group = named or next((pod for pod in pods.values() if group_key(pod) == id_), None)
        if group is None:
            raise AnswerRefused(404, "no program has this id: it has ended")
        return group

    def _detail(self, pod: Pod, events: Sequence[Event], shown: World) -> ProgramDetail:
        uid, name = pod.metadata.uid, pod.full_name
        line = next((line for line in self._live.programs() if line.id == uid), None)
        group = f"{pod.metadata.namespace}/{line.group}" if line and line.group else ""
        ids = {name, group, group_key(pod) or ""}
        return ProgramDetail(
            program=line,
            waiting=next((row for row in shown.waiting if row.id in ids), None),
            explanation=explanation_lines(self._explain(pod, events), _rows),
            events=[
                (seconds(event.at) or 0.0, f"{event.reason}: {event.message}")
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

    def _explain(self, pod: Pod, events: Sequence[Event]) -> PodExplanation:
        now, known = self._live.clock(), self._live.autoscaler
        explanation = explain(pod, self._live.snapshot(), events)
        published = None if known is None else (known.status, known.orders)
        explain_growth(explanation, pod, published, events, now)
        return explanation

    async def history(self, request: web.Request) -> web.Response:
        """Return figures over time."""
        query, now = request.query, self._live.clock()
        span_s = number(request, "span", 3600, LONGEST_S)
        if ("program" in query) == ("card" in query):
            raise AnswerRefused(400, "say either program=ID or card=ID")
        if self._prometheus is None:
            return json(HistoryAnswer([], problem=NO_PROMETHEUS))
        if "program" in query:
            meta = self._pod(query["program"]).metadata
            return json(await self._prometheus.program(meta.namespace, meta.name, span_s, now))
        node, _, index = query["card"].rpartition("/")
        if not (node and index.isascii() and index.isdecimal()):
            raise AnswerRefused(400, "a card's id is NODE/INDEX")
        return json(await self._prometheus.card(node, int(index[:4]), span_s, now))

    async def logs(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """Refuse: pods' logs are their namespace's."""
        raise AnswerRefused(403, "use `kubectl logs`: this page has no right to read logs")

    async def what_if(self, request: web.Request) -> web.Response:
        """Return which requests would start."""
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


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's rows as lines, without its titles."""
    return [": ".join(row) for row in rows[1:]]
