"""A tab outlives its dashboard, and another program takes the port: it gets nothing, and runs nothing."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from fenka.views.board import MESSAGES
from tests.web.browser import Watched
from tests.web.test_live import HIDE
from tests.web.test_workstation import dashboard_process, station
from tests.workstation.conftest import Workstation

__all__ = ["station"]

MARKER = "/the-test-itself"

LOGIN = "a-notebooks-login"

TAKEN_OVER = b"<!doctype html><script>fetch('/stolen?' + localStorage.length)</script>"


class Stranger:
    """Another user's server at the port of a dashboard that has ended. It answers what harms the most.

    Attributes:
        asked: The paths of all requests, with their fields.
    """

    def __init__(self, port: int) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        stranger = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stranger.asked.append((self.path, dict(self.headers.items())))
                path = urlsplit(self.path).path
                kind, body = "text/html", TAKEN_OVER
                if path == "/api/proof":
                    kind, body = "application/json", json.dumps({"proof": "0" * 64}).encode()
                elif path == "/api/live":
                    world = {"type": "world", "at": 1, "messages": MESSAGES + 1, "problems": []}
                    kind, body = (
                        "text/event-stream",
                        f"event: world\ndata: {json.dumps(world)}\n\n".encode(),
                    )
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)

    @property
    def paths(self) -> list[str]:
        """Return the paths of the page's own requests, until the test has asked."""
        return [urlsplit(path).path for path, _ in self.asked if path != MARKER]


@contextlib.contextmanager
def stranger_at(port: int) -> Iterator[Stranger]:
    stranger = Stranger(port)
    thread = threading.Thread(target=stranger.server.serve_forever)
    thread.start()
    try:
        yield stranger
    finally:
        stranger.server.shutdown()
        thread.join()
        stranger.server.server_close()


def _open(page: Page, url: str) -> int:
    """Open the dashboard in a browser that is logged in to a notebook of 127.0.0.1. Return its port."""
    page.context.add_cookies([{"name": "login", "value": LOGIN, "url": "http://127.0.0.1/"}])
    page.clock.install()
    page.goto(url)
    expect(page.locator("header").get_by_role("status")).to_have_text("live")
    return urlsplit(url).port or 0


def _pass_time(page: Page) -> None:
    """Let all timers of the next minutes fire, and wait until what they have sent has arrived."""
    page.clock.run_for(180_000)
    page.evaluate("path => fetch(path).then(() => null)", MARKER)


def test_stranger_gets_nothing_when_a_dashboard_has_ended(
    station: Workstation, watched: Watched
) -> None:
    """The server's last message says that it ends, so the page does not even ask who is there."""
    watched.expected += ["ERR_", "Failed to load"]
    with dashboard_process(station) as (process, url):
        port = _open(watched.page, url)
        process.terminate()
        process.wait()
    expect(watched.page.get_by_role("alert")).to_contain_text("the dashboard has ended")
    with stranger_at(port) as stranger:
        _pass_time(watched.page)
        watched.page.goto(f"{watched.page.url.partition('#')[0]}#/queue")
        _pass_time(watched.page)
        assert stranger.paths == []
        assert {path for path, _ in stranger.asked} == {MARKER}
        assert LOGIN not in str(stranger.asked)


@pytest.mark.parametrize("hidden", [False, True], ids=["in sight", "hidden"])
def test_stranger_is_asked_for_a_proof_alone_when_a_dashboard_was_killed(
    station: Workstation, watched: Watched, hidden: bool
) -> None:
    """Neither token nor cookies come, and after a wrong answer nothing more, whatever it says."""
    watched.expected += ["ERR_", "Failed to load"]
    page = watched.page
    page.add_init_script(HIDE)
    with dashboard_process(station) as (process, url):
        port = _open(page, url)
        if hidden:
            page.evaluate("globalThis.hide(true)")
        process.send_signal(signal.SIGKILL)
        process.wait()
    token = urlsplit(url).fragment.removeprefix("token=")
    with stranger_at(port) as stranger:
        if hidden:
            page.evaluate("globalThis.hide(false)")
        else:
            page.clock.run_for(10_000)
        expect(page.get_by_role("alert")).to_contain_text("another server answers at this address")
        _pass_time(page)
        page.goto(f"{page.url.partition('#')[0]}#/idle")
        page.evaluate("globalThis.hide(true)")
        page.evaluate("globalThis.hide(false)")
        _pass_time(page)
        assert stranger.paths == ["/api/proof"]
        assert token not in str(stranger.asked)
        assert LOGIN not in str(stranger.asked)
        own = [fields for path, fields in stranger.asked if path != MARKER]
        assert not {"Authorization", "Cookie"} & {name.title() for name in own[0]}


def test_page_goes_on_by_itself_when_the_same_server_answers_again(
    station: Workstation, watched: Watched
) -> None:
    """A tunnel that was cut is no reason to open the page again: the server proves who it is."""
    page = watched.page
    page.add_init_script(HIDE)
    with dashboard_process(station) as (_, url):
        _open(page, url)
        with page.expect_request("**/api/proof?**"):
            page.evaluate("globalThis.hide(true)")
            page.evaluate("globalThis.hide(false)")
        expect(page.locator("header").get_by_role("status")).to_have_text("live")
        expect(page.get_by_role("alert")).to_have_count(0)


def test_nothing_is_registered_that_the_next_server_could_use(
    station: Workstation, watched: Watched
) -> None:
    """No cookie, no service worker, no cache; the rest is kept for this name, which never comes again."""
    with dashboard_process(station) as (_, url):
        _open(watched.page, url)
        kept = watched.page.evaluate(
            """async () => [
                (await navigator.serviceWorker.getRegistrations()).length,
                (await caches.keys()).length,
                (await indexedDB.databases()).length,
                document.cookie,
            ]"""
        )
        assert kept == [0, 0, 0, ""]
        names = {cookie["name"] for cookie in watched.page.context.cookies()}
        assert names == {"login"}
        assert Path(station.root / "dashboard").read_text().strip() == url
