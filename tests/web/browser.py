"""A real browser, and the page in it: what it asks from elsewhere and what it reports fails the test."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tools.page.server import PAGE, TOKEN, Look, PageServer

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE *.localhost",
)

WAIT_MS = 60_000
"""The limit of each wait, for a machine that is busy with other work."""

T = TypeVar("T")


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Start the browser of the system. Without it, or without the built page, the tests are skipped."""
    if not CHROMIUM.exists():
        pytest.skip("no chromium: apt-get install --no-install-recommends chromium")
    if not (PAGE / "index.html").exists():
        pytest.skip("the page is not built: make web")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page whose requests and errors are kept.

    Attributes:
        expected: Parts of messages of the console that a test causes, such as an answer 404.
    """

    page: Page
    expected: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Begin to keep them."""
        self.page.on("request", self._requested)
        self.page.on("console", self._printed)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def check(self) -> None:
        """Fail if the page has asked another host, or has reported an error."""
        assert all(host == "127.0.0.1" or host.endswith(".localhost") for host in self.hosts)
        unexpected = [
            text for text in self.errors if not any(part in text for part in self.expected)
        ]
        assert unexpected == []

    def _requested(self, request: Request) -> None:
        if not request.url.startswith("blob:"):
            self.hosts.add(urlsplit(request.url).hostname or "")

    def _printed(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[Watched]:
    """Open a page in a context of its own, and check it at the end."""
    context = browser.new_context(locale="en-GB", **options)
    context.set_default_timeout(WAIT_MS)
    watched = Watched(context.new_page())
    watched.watch()
    yield watched
    context.close()
    watched.check()


class Served:
    """The server of a made-up world, in a thread of its own."""

    def __init__(self, look: Look) -> None:
        self.server = PageServer(look)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="page server")
        self._ready = threading.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Return the address without a token."""
        return f"http://127.0.0.1:{self.port}/"

    @property
    def entry(self) -> str:
        """Return the address with the token, as `fenka dashboard` prints it."""
        return f"{self.url}#token={TOKEN}"

    def start(self) -> None:
        """Start, and wait until it listens."""
        self._thread.start()
        assert self._ready.wait(30)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the server's thread, and return its result."""

        async def called() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(30)

    def show(self, look: Look) -> None:
        """Show another world from now on, at once."""

        def change() -> None:
            self.server.look = look
            self.server.changed()

        self.call(change)

    def disconnect(self) -> None:
        """End all connections, and accept no more."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)

    def close(self) -> None:
        """Stop."""
        self.disconnect()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _listen(self) -> None:
        self._runner = web.AppRunner(self.server.app(), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
