"""The dashboard's HTTP server: the page, what it reads, and what its user may change.

- GET `api/live`: server-sent events, each a `world`.
- GET `api/world`: the last of them.
- GET `api/program/ID`: one program in full.
- GET `api/history?program=ID` or `?card=ID`, `&span=SECONDS`: figures over time.
- GET `api/logs/ID?lines=200`, `&follow`: the output of one's own program.
- POST `api/what-if`: which requests would start.
- POST `api/stop/ID`: ends one's own program.
- POST `api/resize/ID`: changes its slice.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web

from fenka.core.errors import FenkaError
from fenka.core.request import ComputeMode
from fenka.dashboard import live
from fenka.dashboard.guard import MAX_BODY_BYTES, AnswerRefused, Guard, add_headers
from fenka.dashboard.live import Live
from fenka.local import board_details
from fenka.server.listener import LISTENER
from fenka.views.board import Timeline, WhatIf
from fenka.workstation import protocol
from fenka.workstation.client import DaemonUnavailable
from fenka.workstation.paths import Runtime

T = TypeVar("T")

STOP_GRACE_S = 10.0

MAX_STREAMS = 64
"""Pages and logs that are followed at a time."""

MAX_LOG_LINES = 10_000

TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
"""Content types of the page's files. Files with other suffixes are not served."""

FOREVER = "max-age=31536000, immutable"
"""For files with a hash in their names."""

_encode = msgspec.json.Encoder().encode


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `api/resize`: as of `fenka resize`."""

    gpu_mem: str = ""
    gpu_core: int | None = None
    gpu_core_mode: ComputeMode | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    body: bytes
    content_type: str
    cache: str


def page_files() -> dict[str, File]:
    """Return the built page by path; empty if this installation has none."""
    root = resources.files("fenka") / "_web"
    return dict(_files(root, "")) if root.is_dir() else {}


def _files(directory: Traversable, prefix: str) -> "list[tuple[str, File]]":
    found = []
    for entry in directory.iterdir():
        path = f"{prefix}{entry.name}"
        suffix = f".{entry.name.rpartition('.')[2]}"
        if entry.is_dir():
            found += _files(entry, f"{path}/")
        elif suffix in TYPES:
            cache = FOREVER if prefix.startswith("assets/") else "no-cache"
            found.append((path, File(entry.read_bytes(), TYPES[suffix], cache)))
    return found


class Dashboard:
    """Answers the requests of one server. acts: whether it has routes that change something."""

    def __init__(
        self, runtime: Runtime, shown: Live, files: Mapping[str, File], *, acts: bool
    ) -> None:
        self._runtime, self._live, self._files, self._acts = runtime, shown, files, acts
        self._streams = 0

    def app(self, guard: Guard, prefix: str = "/") -> web.Application:
        """Return the application. prefix: the path of all its URLs, with a slash at both ends."""
        app = web.Application(
            middlewares=[_protected, guard.middleware], client_max_size=MAX_BODY_BYTES
        )
        app.on_response_prepare.append(add_headers)
        app.on_shutdown.append(self._end_streams)
        read = {
            "live": self.follow,
            "world": self.world,
            "program/{id}": self.program,
            "history": self.history,
            "logs/{id}": self.logs,
        }
        app.add_routes([web.get(f"{prefix}api/{path}", verb) for path, verb in read.items()])
        asked = {"what-if": self.what_if}
        if self._acts:
            asked |= {"stop/{id}": self.stop, "resize/{id}": self.resize}
        app.add_routes([web.post(f"{prefix}api/{path}", verb) for path, verb in asked.items()])
        app.router.add_get(f"{prefix}{{path:.*}}", self.file)
        if prefix != "/":
            app.router.add_get(prefix.rstrip("/"), _redirect(prefix))
        return app

    async def _end_streams(self, _: web.Application) -> None:
        self._live.fanout.close()

    # ---- reading ----

    async def file(self, request: web.Request) -> web.Response:
        """Return a file of the page."""
        path = request.match_info["path"] or "index.html"
        if not self._files:
            raise AnswerRefused(503, "this installation has no page: `make build` makes it")
        file = self._files.get(path)
        if file is None:
            raise AnswerRefused(404, "there is nothing here")
        return web.Response(
            body=file.body,
            content_type=file.content_type,
            charset="utf-8" if file.content_type.startswith("text/") else None,
            headers={hdrs.CACHE_CONTROL: file.cache},
        )

    async def world(self, _: web.Request) -> web.Response:
        """Return what the stream sent last."""
        if self._live.encoded is None:
            raise AnswerRefused(503, "the fenka daemon has not answered yet")
        return _json_bytes(self._live.encoded)

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Send the stream of messages."""
        frames = self._live.fanout.frames()
        return await self._stream(request, frames, "text/event-stream")

    async def program(self, request: web.Request) -> web.Response:
        """Return one program in full."""
        snapshot, shown = self._live.snapshot, self._live.world()
        if snapshot is None or shown is None:
            raise AnswerRefused(503, "the fenka daemon has not answered yet")
        name = request.match_info["id"]
        detail = board_details.detail(snapshot, shown, self._live.viewer.uid, name)
        if detail is None:
            ended = await self._ask(protocol.GetEnded(), protocol.EndedJobs)
            detail = board_details.ended_detail(ended.jobs, self._live.viewer.uid, name)
        if detail is None:
            raise AnswerRefused(404, "no program has this id")
        return _json(detail)

    async def history(self, request: web.Request) -> web.Response:
        """Return figures over time."""
        query = request.query
        if ("program" in query) == ("card" in query):
            raise AnswerRefused(400, "say either program=ID or card=ID")
        return _json(Timeline([], problem="this daemon keeps no history"))

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Send the last lines of a program's log, and with `follow` what it prints then."""
        lines = _number(request, "lines", 200, MAX_LOG_LINES)
        log = await self._log(request.match_info["id"])
        if log is None:
            raise AnswerRefused(404, "there is no log of this program that you may read")
        follow = "follow" in request.query
        parts = board_details.log_parts(log, lines, lambda: follow and not _left(request))
        return await self._stream(request, parts, "text/plain")

    async def _log(self, id_: str) -> Path | None:
        snapshot, shown, uid = self._live.snapshot, self._live.world(), self._live.viewer.uid
        if snapshot and shown and any(job.id == id_ for job in snapshot.jobs):
            return board_details.log_of(snapshot, shown, uid, id_)
        ended = await self._ask(protocol.GetEnded(), protocol.EndedJobs)
        return board_details.ended_log(ended.jobs, uid, id_)

    async def what_if(self, request: web.Request) -> web.Response:
        """Return which requests would start."""
        question = await _body(request, WhatIf)
        answered = await self._ask(protocol.AskWhatIf(question), protocol.WhatIfAnswered)
        return _json(answered.answer)

    # ---- changing ----

    async def stop(self, request: web.Request) -> web.Response:
        """End a program."""
        message = protocol.StopJob([request.match_info["id"]], STOP_GRACE_S)
        answer = await self._ask(message, protocol.JobsStopped, STOP_GRACE_S + live.DEADLINE_S)
        if answer.failures:
            raise AnswerRefused(409, "; ".join(answer.failures))
        return _json(answer)

    async def resize(self, request: web.Request) -> web.Response:
        """Change the limits of a program."""
        wanted = await _body(request, Resize)
        message = protocol.ResizeJob(
            request.match_info["id"], wanted.gpu_mem, wanted.gpu_core, wanted.gpu_core_mode
        )
        return _json(await self._ask(message, protocol.Done))

    async def _stream(
        self, request: web.Request, parts: AsyncGenerator[bytes], content_type: str
    ) -> web.StreamResponse:
        """Send parts as they come, until they end or the caller leaves."""
        if self._streams >= MAX_STREAMS:
            raise AnswerRefused(
                429, f"{MAX_STREAMS} pages and logs are followed already: close some"
            )
        headers = {hdrs.CONTENT_TYPE: f"{content_type}; charset=utf-8", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        self._streams += 1
        try:
            await response.prepare(request)
            async for part in parts:
                await response.write(part)
        except ConnectionError:
            pass  # The caller has left.
        finally:
            self._streams -= 1
            await parts.aclose()
        return response

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


@web.middleware
async def _protected(request: web.Request, handler: Any) -> web.StreamResponse:
    """Keep the connection of a request that is being answered."""
    with request.app[LISTENER].protect(request):
        answer: web.StreamResponse = await handler(request)
        return answer


def _redirect(path: str) -> Any:
    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=308, headers={hdrs.LOCATION: path})

    return redirect


def _left(request: web.Request) -> bool:
    """Return whether the caller has closed the connection."""
    return request.transport is None or request.transport.is_closing()


async def _body(request: web.Request, kind: type[T]) -> T:
    """Decode a request's body. Raises AnswerRefused."""
    try:
        async with asyncio.timeout(live.DEADLINE_S):
            return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as why:
        raise AnswerRefused(400, f"the body is not understood: {why}") from None
    except TimeoutError:
        raise AnswerRefused(408, "the body did not come") from None


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text[:9]) <= most:
        raise AnswerRefused(400, f"{name} is a number from 1 to {most}")
    return int(text)


def _json(message: msgspec.Struct) -> web.Response:
    return _json_bytes(_encode(message))


def _json_bytes(data: bytes) -> web.Response:
    return web.Response(body=data, content_type="application/json")
