"""A browser for each module of tests, a server and a page for each test."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

from tests.web.browser import Served, Watched, opened, started_browser
from tools.page.server import WORLDS, Look


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the browser."""
    with started_browser() as browser:
        yield browser


Serve = Callable[[str | Look], Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves a world, by its name or as a function."""
    servers: list[Served] = []

    def start(world: str | Look) -> Served:
        server = Served(WORLDS[world] if isinstance(world, str) else world)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """Open an empty page."""
    with opened(browser, viewport={"width": 1280, "height": 900}) as watched:
        yield watched
