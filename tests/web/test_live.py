"""The stream behind the page: what it shows of its age, of failures, and of who may read it."""

import re

import msgspec
from playwright.sync_api import Page, expect

from fenka.views.board import MESSAGES, Fleet, World
from tests.waiting import wait_until
from tests.web.browser import Served, Watched
from tests.web.conftest import Serve
from tools.page import worlds
from tools.page.server import TOKEN

HIDE = """
let hidden = false;
Object.defineProperty(document, "hidden", { get: () => hidden });
globalThis.hide = (value) => {
    hidden = value;
    document.dispatchEvent(new Event("visibilitychange"));
};
"""


def _state(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.locator("header").get_by_role("status")).to_have_text(text)


def test_token_leaves_the_address_bar_and_is_kept(serve: Serve, watched: Watched) -> None:
    """A second visit needs no token; the address is in the browser's history without it."""
    server = serve("workstation")
    watched.page.goto(server.entry)
    _state(watched.page, "live")
    assert TOKEN not in watched.page.url
    watched.page.goto("about:blank")
    watched.page.goto(server.url)
    _state(watched.page, "live")


def test_missing_token_is_asked_for(serve: Serve, watched: Watched) -> None:
    """The page says where to find it, and goes on with a right one."""
    watched.expected.append("401")
    server = serve("workstation")
    watched.page.goto(server.url)
    expect(watched.page.get_by_role("heading", level=1)).to_have_text(
        "This dashboard needs a token"
    )
    expect(watched.page.get_by_text("fenka dashboard", exact=True)).to_be_visible()
    watched.page.get_by_label("Token").fill(TOKEN)
    watched.page.get_by_label("Token").press("Enter")
    _state(watched.page, "live")


def test_new_address_unlocks_an_open_page(serve: Serve, watched: Watched) -> None:
    """The server was started again: its new address is opened in the old tab."""
    watched.expected.append("401")
    server = serve("workstation")
    watched.page.goto(f"{server.url}#token=of-yesterday")
    expect(watched.page.get_by_text("This dashboard needs a token")).to_be_visible()
    watched.page.goto(server.entry)
    _state(watched.page, "live")
    expect(watched.page.get_by_text("4307 of 4308 MiB")).to_be_visible()


def test_age_is_shown_when_nothing_comes(serve: Serve, watched: Watched) -> None:
    """After five seconds the figures are of a time, and not live."""
    server = serve("workstation")
    server.server.period_s = 3600
    watched.page.clock.install()
    watched.page.goto(server.entry)
    _state(watched.page, "live")
    watched.page.clock.fast_forward(6000)
    _state(watched.page, re.compile(r"as of \d\d:\d\d:\d\d"))
    server.call(server.server.changed)
    _state(watched.page, "live")


def test_cards_stay_with_a_banner_when_the_server_is_gone(serve: Serve, watched: Watched) -> None:
    """What was known last is better than nothing."""
    watched.expected.append("ERR_")
    server = serve("workstation")
    watched.page.goto(server.entry)
    _state(watched.page, "live")
    server.disconnect()
    expect(watched.page.get_by_role("alert")).to_contain_text("the dashboard does not answer")
    _state(watched.page, re.compile("as of"))
    expect(watched.page.get_by_text("4307 of 4308 MiB")).to_be_visible()


def test_problems_of_the_server_are_a_banner(serve: Serve, watched: Watched) -> None:
    """Its sentences are shown as they are."""

    def broken(at: float, _: int) -> tuple[World, Fleet | None]:
        problem = "the fenka daemon does not answer: what is shown is old"
        return msgspec.structs.replace(worlds.workstation(at), problems=[problem]), None

    watched.page.goto(serve(broken).entry)
    expect(watched.page.get_by_role("alert")).to_have_text(
        "the fenka daemon does not answer: what is shown is old"
    )


def test_hidden_tab_closes_its_stream(serve: Serve, watched: Watched) -> None:
    """Browsers open six connections to a server, and a seventh tab would hang."""
    server = serve("workstation")
    watched.page.add_init_script(HIDE)
    watched.page.goto(server.entry)
    _state(watched.page, "live")
    _hide(watched.page, True)
    wait_until(lambda: _streams(server) == 0)
    _hide(watched.page, False)
    wait_until(lambda: _streams(server) == 1)


def _hide(page: Page, hidden: bool) -> None:
    page.evaluate("hidden => globalThis.hide(hidden)", hidden)


def _streams(server: Served) -> int:
    server.call(server.server.changed)
    return server.server.streams


def test_page_of_another_release_says_so_after_one_reload(serve: Serve, watched: Watched) -> None:
    """An old page in an open tab loads the new one; if that does not help, it does not try again."""

    def newer(at: float, _: int) -> tuple[World, Fleet | None]:
        return msgspec.structs.replace(worlds.workstation(at), messages=MESSAGES + 1), None

    loads: list[str] = []
    watched.page.on("load", lambda page: loads.append(page.url))
    watched.page.goto(serve(newer).entry)
    expect(watched.page.get_by_text("reload the page")).to_be_visible()
    expect(watched.page.get_by_text("4307 of 4308 MiB")).to_be_visible()
    assert len(loads) == 2


def test_colours_are_chosen_and_kept(serve: Serve, watched: Watched) -> None:
    """Auto follows the system."""
    page = watched.page
    page.emulate_media(color_scheme="dark")
    server = serve("workstation")
    page.goto(server.entry)
    button = page.get_by_role("button", name="Colours")
    dark = page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    button.click()
    expect(button).to_have_accessible_name("Colours: light")
    light = page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    assert light != dark
    page.reload()
    expect(button).to_have_accessible_name("Colours: light")
    assert page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor") == light
