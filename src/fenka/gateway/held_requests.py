"""Requests that wait for a replica. Envoy requests permission for each, and is answered when it may go on.

Envoy keeps the request meanwhile; only its head comes here.
"""

import asyncio
from collections import Counter
from collections.abc import Set
from pathlib import Path

from aiohttp import web

from fenka.gateway.envoy_config import BACKLOG, REFUSED

MAX_HEAD_BYTES = 256 << 10
"""Envoy has bounded heads before; escaped they may be larger."""


class HeldRequests:
    """Holds requests by the port that they came to.

    Attributes:
        held: How many were held so far.
        refused: How many could not be held, or for too long, by reason.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        """Hold requests.

        Args:
            most: The number of requests that wait at a time.
            wait_s: Seconds that each waits.
        """
        self._most, self._wait_s = most, wait_s
        self._waiting = dict[asyncio.Future[None], str]()
        self.held = 0
        self.refused = Counter[str]()
        self.arrived = asyncio.Event()
        """Set while requests wait."""

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def ports(self) -> set[str]:
        """Return the ports of which requests wait."""
        return {*self._waiting.values()}

    def release(self, ports: Set[str]) -> None:
        """Let the requests of these ports go on, the earliest first."""
        for waiting in [waiting for waiting, port in self._waiting.items() if port in ports]:
            if not waiting.done():
                waiting.set_result(None)

    async def serve(self, path: Path) -> web.AppRunner:
        """Answer Envoy at a Unix socket. Return the server, which the caller ends. Raises OSError."""
        app = web.Application()
        app.router.add_route("*", "/{port}{target:.*}", self._hold)
        runner = web.AppRunner(
            app,
            access_log=None,
            # A client that hangs up waits no longer.
            handler_cancellation=True,
            max_field_size=MAX_HEAD_BYTES,
            max_line_size=MAX_HEAD_BYTES,
            keepalive_timeout=3600,
        )
        await runner.setup()
        await web.UnixSite(runner, path, backlog=BACKLOG).start()
        return runner

    async def _hold(self, request: web.Request) -> web.Response:
        if len(self._waiting) >= self._most:
            return self._refuse("buffer_full", "too many requests wait for a replica")
        waiting = asyncio.get_running_loop().create_future()
        # The path begins with the port's name, which has no slash.
        self._waiting[waiting] = request.match_info["port"].partition("/")[0]
        self.held += 1
        self.arrived.set()
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting
        except TimeoutError:
            sentence = f"no replica was ready within {self._wait_s:g} s"
            return self._refuse("buffer_timeout", sentence)
        finally:
            del self._waiting[waiting]
            if not self._waiting:
                self.arrived.clear()
        return web.Response()

    def _refuse(self, reason: str, sentence: str) -> web.Response:
        self.refused[reason] += 1
        return web.Response(status=REFUSED, text=f"{sentence}\n")
