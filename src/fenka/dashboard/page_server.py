"""The dashboard's HTTP server: the page, what it reads, and what its user may change.

- GET `api/live`: server-sent events, each a `world`.
- GET `api/proof?challenge=HEX`: proves that the server has the page's token.
- GET `api/world`: the last of them.
- GET `api/program/ID`: one program in full.
- GET `api/history?program=ID` or `?card=ID`, `&span=SECONDS`: figures over time.
- GET `api/sums`: usage and cost of this month and today, and how requests waited for 24 hours.
- GET `api/logs/ID?lines=200`, `&follow`: the output of one's own program.
- POST `api/what-if`: which requests would start.
- POST `api/stop/ID`: ends one's own program.
- POST `api/resize/ID`: changes its slice.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import hdrs, web

from fenka.core.metering import DAY_S
from fenka.core.request import ComputeMode
from fenka.dashboard.guard import MAX_BODY_BYTES, PROOF, AnswerRefused, Guard, Handler, add_headers
from fenka.dashboard.stream import Fanout
from fenka.history.series import UsageGroup
from fenka.server.listener import LISTENER
from fenka.views.board import Sums, WaitSums
from fenka.views.board_sums import usage_lines
from fenka.workstation.protocol import UsageRead

T = TypeVar("T")

NOT_YET = "nothing is known yet: try again in a moment"

DEADLINE_S = 3.0
"""For a body."""

MAX_STREAMS = 64
"""Pages and logs that are followed at a time."""

MAX_STREAMS_OF_VIEWER = 8
"""Of those, where viewers sign in: nobody takes all of them."""

UNREAD_S = 30.0
"""For which a stream is kept whose viewer reads nothing. It would hold its place indefinitely."""

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


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `api/resize`: as of `fenka resize`."""

    gpu_mem: str = ""
    gpu_core: int | None = None
    gpu_core_mode: ComputeMode | None = None


class Prioritize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `api/prioritize`: as of `fenka prioritize`."""

    priority: int


class Source(Protocol):
    """The present state, and the viewers that are told of it. encoded: the last World as JSON."""

    @property
    def fanout(self) -> Fanout:
        """Return the viewers."""

    @property
    def encoded(self) -> bytes | None:
        """Return the last World as JSON; None before anything was read."""


class PageServer(ABC):
    """Answers the requests of one server: the page, and what it reads of one workstation or cluster.

    Attributes:
        source: what is shown.
        files: of the page.
    """

    def __init__(self, source: Source, files: Mapping[str, File]) -> None:
        self.source, self._files = source, files
        self._streams = Counter[str]()

    def app(self, guard: Guard, prefix: str = "/") -> web.Application:
        """Return the application. prefix: the path of all its URLs, with a slash at both ends."""
        app = web.Application(
            middlewares=[_protected, guard.middleware], client_max_size=MAX_BODY_BYTES
        )
        app.on_response_prepare.append(add_headers)
        app.on_shutdown.append(self._end_streams)
        read: dict[str, Handler] = {
            PROOF: guard.prove,
            "live": self.follow,
            "world": self.world,
            "program/{id}": self.program,
            "history": self.history,
            "sums": self.sums,
            "logs/{id}": self.logs,
        }
        app.add_routes([web.get(f"{prefix}api/{path}", verb) for path, verb in read.items()])
        asked = {"what-if": self.what_if, **self.changes()}
        app.add_routes([web.post(f"{prefix}api/{path}", verb) for path, verb in asked.items()])
        app.router.add_get(f"{prefix}{{path:.*}}", self.file)
        if prefix != "/":
            app.router.add_get(prefix.rstrip("/"), _redirect(prefix))
        return app

    async def _end_streams(self, _: web.Application) -> None:
        self.source.fanout.close()

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

    async def world(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return what the stream sent last."""
        if self.source.encoded is None:
            raise AnswerRefused(503, NOT_YET)
        return json_bytes(self.source.encoded)

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Send the stream of messages."""
        return await self.stream(request, self.frames(request), "text/event-stream")

    @abstractmethod
    async def program(self, request: web.Request) -> web.Response:
        """Return one program in full."""

    @abstractmethod
    async def history(self, request: web.Request) -> web.Response:
        """Return figures over time."""

    @abstractmethod
    async def sums(self, request: web.Request) -> web.Response:
        """Return the sums of usage, and how requests waited."""

    @abstractmethod
    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Send the last lines of a program's log, and with `follow` what it prints then."""

    @abstractmethod
    async def what_if(self, request: web.Request) -> web.Response:
        """Return which requests would start."""

    # ---- for all of them ----

    def changes(self) -> Mapping[str, Handler]:
        """Return what answers requests that change something, by path; nothing where the page only reads."""
        return {}

    def frames(self, request: web.Request) -> AsyncGenerator[bytes]:  # noqa: ARG002
        """Return the messages for one viewer."""
        return self.source.fanout.frames()

    async def stream(
        self,
        request: web.Request,
        parts: AsyncGenerator[bytes],
        content_type: str,
        viewer: str = "",
    ) -> web.StreamResponse:
        """Send parts as they come, until they end, or the caller leaves or stops to read.

        Args:
            request: The request.
            parts: What is sent.
            content_type: Of it.
            viewer: Whose stream it is; empty where viewers do not sign in.

        Raises:
            AnswerRefused: There are as many streams as may be, of all viewers or of this one.
        """
        self._check_streams(viewer)
        headers = {hdrs.CONTENT_TYPE: f"{content_type}; charset=utf-8", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        self._streams[viewer] += 1
        try:
            await response.prepare(request)
            async for part in parts:
                async with asyncio.timeout(UNREAD_S):
                    await response.write(part)
        except ConnectionError:
            pass  # The caller has left.
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams[viewer] -= 1
            self._streams += Counter()  # Drops viewers without streams.
            await parts.aclose()
        return response

    def _check_streams(self, viewer: str) -> None:
        if viewer and self._streams[viewer] >= MAX_STREAMS_OF_VIEWER:
            raise AnswerRefused(
                429, f"you follow {MAX_STREAMS_OF_VIEWER} pages and logs already: close some"
            )
        if self._streams.total() >= MAX_STREAMS:
            raise AnswerRefused(
                429, f"{MAX_STREAMS} pages and logs are followed already: close some"
            )


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


def left(request: web.Request) -> bool:
    """Return whether the caller has closed the connection."""
    return request.transport is None or request.transport.is_closing()


async def body(request: web.Request, kind: type[T]) -> T:
    """Decode a request's body. Raises AnswerRefused."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as why:
        raise AnswerRefused(400, f"the body is not understood: {why}") from None
    except TimeoutError:
        raise AnswerRefused(408, "the body did not come") from None


def usage_sums(
    month: UsageRead,
    today: UsageRead,
    by: UsageGroup,
    waits: WaitSums | None,
    sees: Callable[[str], bool] = lambda _: True,
) -> Sums:
    """Return the sums of two readings of usage. sees: whether the viewer sees what this name held."""
    of_month, of_today = (
        [
            line
            for line in usage_lines(read.records, by, read.prices)
            if line.kind != "held" or sees(line.name)
        ]
        for read in (month, today)
    )
    since = None if month.since_day is None else month.since_day * DAY_S
    return Sums(of_month, of_today, month.currency, since, waits, month.problem)


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number of the query. Raises AnswerRefused if it is not from 1 to the most."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) <= most):
        raise AnswerRefused(400, f"{name} is a number from 1 to {most}")
    return int(text)


def json(message: msgspec.Struct) -> web.Response:
    """Return a message as an answer."""
    return json_bytes(_encode(message))


def json_bytes(data: bytes) -> web.Response:
    """Return JSON as an answer."""
    return web.Response(body=data, content_type="application/json")
