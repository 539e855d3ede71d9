"""Answers the page about this machine, with the rights of the user who runs the dashboard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from fenka.core.errors import FenkaError
from fenka.core.metering import DAY_S
from fenka.dashboard import live
from fenka.dashboard.guard import AnswerRefused, Handler
from fenka.dashboard.live import Live
from fenka.dashboard.page_server import (
    NOT_YET,
    File,
    PageServer,
    Prioritize,
    Resize,
    body,
    json,
    left,
    number,
    usage_sums,
)
from fenka.local import board_details, board_history
from fenka.views.board import HistoryAnswer, Sums, WhatIf
from fenka.views.board_sums import first_days, wait_sums
from fenka.workstation import protocol
from fenka.workstation.client import DaemonUnavailable
from fenka.workstation.paths import Runtime

T = TypeVar("T")

STOP_GRACE_S = 10.0

MAX_LOG_LINES = 10_000

LONGEST_S = 31 * 86400
"""Span of figures over time."""

POINTS = 500
"""Of a chart."""


class MachinePages(PageServer):
    """Answers for the daemon of one directory."""

    def __init__(
        self, runtime: Runtime, shown: Live, files: Mapping[str, File], *, acts: bool
    ) -> None:
        super().__init__(shown, files)
        self._runtime, self._live, self._acts = runtime, shown, acts

    async def program(self, request: web.Request) -> web.Response:
        """Return one program in full."""
        snapshot, shown = self._live.snapshot, self._live.world()
        if snapshot is None or shown is None:
            raise AnswerRefused(503, NOT_YET)
        name = request.match_info["id"]
        detail = board_details.detail(snapshot, shown, self._live.viewer.uid, name)
        if detail is None:
            ended = await self._ask(protocol.GetEnded(), protocol.EndedJobs)
            detail = board_details.ended_detail(ended.jobs, self._live.viewer.uid, name)
        if detail is None:
            raise AnswerRefused(404, "no program has this id")
        return json(detail)

    async def history(self, request: web.Request) -> web.Response:
        """Return figures over time."""
        query, until = request.query, time.time()
        since = until - number(request, "span", 3600, LONGEST_S)
        if ("program" in query) == ("card" in query):
            raise AnswerRefused(400, "say either program=ID or card=ID")
        if "program" in query:
            subject, lines = query["program"], board_history.PROGRAM
            question = protocol.GetHistory(since, until, job=subject, points=POINTS)
        else:
            subject, lines = self._card_uuid(query["card"]), board_history.CARD
            question = protocol.GetHistory(since, until, card=subject, points=POINTS)
        try:
            read = await self._ask(question, protocol.HistoryRead)
        except AnswerRefused as why:
            return json(HistoryAnswer([], problem=why.sentence))
        return json(board_history.timeline(read, subject, lines))

    async def sums(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the sums of usage by user, and how requests waited."""
        now = time.time()
        (month, today), since = first_days(now), now - DAY_S
        try:
            read = [
                await self._ask(protocol.GetUsage("user", day, today + 1), protocol.UsageRead)
                for day in (month, today)
            ]
            # A request that was granted today may be older.
            question = protocol.GetHistory(since - LONGEST_S, now, points=1)
            known = await self._ask(question, protocol.HistoryRead)
        except AnswerRefused as why:
            return json(Sums(problem=why.sentence))
        return json(usage_sums(read[0], read[1], "user", wait_sums(known.events, since)))

    def _card_uuid(self, index: str) -> str:
        cards = self._live.snapshot.cards if self._live.snapshot else ()
        for card in cards:
            if str(card.index) == index:
                return card.uuid
        raise AnswerRefused(404, "no card has this number")

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Send the last lines of a program's log, and with `follow` what it prints then."""
        lines = number(request, "lines", 200, MAX_LOG_LINES)
        log = await self._log(request.match_info["id"])
        if log is None:
            raise AnswerRefused(404, "there is no log of this program that you may read")
        follow = "follow" in request.query
        parts = board_details.log_parts(log, lines, lambda: follow and not left(request))
        return await self.stream(request, parts, "text/plain")

    async def _log(self, id_: str) -> Path | None:
        snapshot, shown, uid = self._live.snapshot, self._live.world(), self._live.viewer.uid
        if snapshot and shown and any(job.id == id_ for job in snapshot.jobs):
            return board_details.log_of(snapshot, shown, uid, id_)
        ended = await self._ask(protocol.GetEnded(), protocol.EndedJobs)
        return board_details.ended_log(ended.jobs, uid, id_)

    async def what_if(self, request: web.Request) -> web.Response:
        """Return which requests would start."""
        question = await body(request, WhatIf)
        answered = await self._ask(protocol.AskWhatIf(question), protocol.WhatIfAnswered)
        return json(answered.answer)

    # ---- changing ----

    def changes(self) -> Mapping[str, Handler]:
        """Return what changes programs, unless nothing may be changed."""
        if not self._acts:
            return {}
        return {
            "stop/{id}": self.stop,
            "resize/{id}": self.resize,
            "prioritize/{id}": self.prioritize,
        }

    async def stop(self, request: web.Request) -> web.Response:
        """End a program."""
        message = protocol.StopJob([request.match_info["id"]], STOP_GRACE_S)
        answer = await self._ask(message, protocol.JobsStopped, STOP_GRACE_S + live.DEADLINE_S)
        if answer.failures:
            raise AnswerRefused(409, "; ".join(answer.failures))
        return json(answer)

    async def resize(self, request: web.Request) -> web.Response:
        """Change the limits of a program."""
        wanted = await body(request, Resize)
        message = protocol.ResizeJob(
            request.match_info["id"], wanted.gpu_mem, wanted.gpu_core, wanted.gpu_core_mode
        )
        return json(await self._ask(message, protocol.Done))

    async def prioritize(self, request: web.Request) -> web.Response:
        """Change the priority of a program, or of its gang."""
        wanted = await body(request, Prioritize)
        message = protocol.PrioritizeJob(request.match_info["id"], wanted.priority)
        return json(await self._ask(message, protocol.Done))

    async def _ask(
        self, message: msgspec.Struct, expected: type[T], timeout_s: float = live.DEADLINE_S
    ) -> T:
        """Return the daemon's answer. Raises AnswerRefused with its sentence."""
        try:
            return await live.request(self._runtime, message, expected, timeout_s)
        except DaemonUnavailable as why:
            raise AnswerRefused(503, str(why)) from None
        except FenkaError as why:
            raise AnswerRefused(409, str(why)) from None
