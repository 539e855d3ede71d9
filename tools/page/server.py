"""Serves the built page with a made-up world: `python -m tools.page.server [WORLD] [PORT]`.

It answers the routes of the dashboard's server with its headers. A path without `api/` is a file of the page.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
from aiohttp import web

from fenka.dashboard.guard import proof
from fenka.views.board import Fleet, WhatIf, WhatIfAnswer, World
from tools.page import worlds

PAGE = Path(__file__).parents[2] / "src" / "fenka" / "_web"
TOKEN = "a-token-of-the-tests"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}
"""Those of the dashboard's guard that a page may break."""

Look = Callable[[float, int], tuple[World, Fleet | None]]
"""What is shown at a time. The number counts the messages of a stream."""

WORLDS: dict[str, Look] = {
    "workstation": lambda at, _: (worlds.workstation(at), None),
    "empty": lambda at, _: (worlds.empty(at), None),
    "cluster": lambda at, _: (worlds.cluster(at), None),
    "thousand": lambda at, count: worlds.thousand_nodes(at, seed=count),
}


class PageServer:
    """Serves one world.

    Attributes:
        look: What is shown; a test may replace it, and `changed` sends it.
        posted: Paths and bodies of what the page has asked to change.
        streams: How many streams are open.
        period_s: Between two messages of a stream, if nothing has changed.
        token: What callers of `api/` must have.
    """

    def __init__(self, look: Look, clock: Callable[[], float] = time.time) -> None:
        self.look, self.clock, self.token = look, clock, TOKEN
        self.posted: list[tuple[str, object]] = []
        self.streams = 0
        self._changed = asyncio.Event()
        self.period_s = 2.0

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application()
        app.on_response_prepare.append(_add_headers)
        api: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "live": self._live,
            "world": self._world,
            "program/{id}": self._program,
            "history": self._history,
            "sums": self._sums,
            "logs/{id}": self._logs,
        }
        app.add_routes([web.get(f"/api/{path}", self._guarded(verb)) for path, verb in api.items()])
        app.router.add_get("/api/proof", self._prove)
        app.router.add_post("/api/what-if", self._guarded(self._what_if))
        app.router.add_post("/api/{verb:stop|resize|prioritize}/{id}", self._guarded(self._change))
        app.router.add_get("/{path:.*}", self._file)
        return app

    def changed(self) -> None:
        """Send a message to all streams at once."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _guarded(
        self, verb: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                return _problem(401, "the token is missing or of an earlier start")
            return await verb(request)

        return guarded

    async def _prove(self, request: web.Request) -> web.Response:
        return web.json_response({"proof": proof(self.token, request.query["challenge"])})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.streams += 1
        count = 0
        try:
            while True:
                for name, data in self._messages(count, request.query.get("node", "")):
                    await response.write(b"event: %s\ndata: %s\n\n" % (name.encode(), data))
                count += 1
                try:
                    async with asyncio.timeout(self.period_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        except ConnectionError:
            return response
        finally:
            self.streams -= 1

    def _messages(self, count: int, node: str) -> Iterable[tuple[str, bytes]]:
        world, fleet = self.look(self.clock(), count)
        yield "world", msgspec.json.encode(world)
        if fleet:
            yield "fleet", msgspec.json.encode(fleet)
            if node:
                yield "node", msgspec.json.encode(worlds.node_cards(world, node))

    def _now(self) -> World:
        return self.look(self.clock(), 0)[0]

    async def _world(self, _: web.Request) -> web.Response:
        return _json(self._now())

    async def _program(self, request: web.Request) -> web.Response:
        detail = worlds.detail(self._now(), request.match_info["id"])
        return _json(detail) if detail else _problem(404, "no program has this id")

    async def _history(self, request: web.Request) -> web.Response:
        world, query = self._now(), request.query
        if "program" in query:
            line = next((row for row in world.programs if row.id == query["program"]), None)
            return _json(worlds.timeline(world.at, int(query["span"]), line))
        tile = next((card for card in world.cards if card.id == query["card"]), None)
        return _json(worlds.timeline(world.at, int(query["span"]), tile))

    async def _sums(self, _: web.Request) -> web.Response:
        return _json(worlds.sums(self._now()))

    async def _logs(self, _: web.Request) -> web.Response:
        lines = [f"epoch {number} loss {2.4 / (1 + number / 4):.3f}" for number in range(1, 31)]
        return web.Response(text="\n".join(lines) + "\n")

    async def _what_if(self, request: web.Request) -> web.Response:
        question = msgspec.json.decode(await request.read(), type=WhatIf)
        waiting = self._now().waiting
        starts = [row.name for row in waiting[: len(question.end) + sum(question.add.values())]]
        waits = [(row.name, row.why) for row in waiting if row.name not in starts]
        sentence = f"{len(starts)} of {len(waiting)} start: {', '.join(starts) or 'none'}"
        return _json(WhatIfAnswer(starts, waits, sentence))

    async def _change(self, request: web.Request) -> web.Response:
        self.posted.append((request.path, await request.json()))
        return web.json_response({})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        file = PAGE / (request.match_info["path"] or "index.html")
        if not file.is_file():
            return _problem(404, "there is nothing here")
        return web.FileResponse(file)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _json(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")


def _problem(status: int, sentence: str) -> web.Response:
    return web.json_response({"problem": sentence}, status=status)


def main(arguments: list[str]) -> None:
    """Serve until interrupted."""
    name, port = [*arguments, *("workstation", "8099")[len(arguments) :]]
    print(f"http://127.0.0.1:{port}/#token={TOKEN}", flush=True)
    web.run_app(PageServer(WORLDS[name]).app(), host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
