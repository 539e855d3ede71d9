"""The start page: who has what of which card."""

import re
from collections.abc import Callable

import msgspec
import pytest
from playwright.sync_api import Page, expect

from fenka.views.board import Fleet, World
from tests.web.browser import Watched
from tests.web.conftest import Serve
from tools.page import worlds
from tools.page.server import Look


def _open(watched: Watched, url: str) -> Page:
    watched.page.goto(url)
    expect(watched.page.locator("h1")).to_be_visible()
    return watched.page


def test_slices_are_items_as_wide_as_they_are(serve: Serve, watched: Watched) -> None:
    """Three notebooks of 4308 of 15079 MiB, and two free units."""
    page = _open(watched, serve("workstation").entry)
    items = page.get_by_role("list", name="Slices of Card 0").get_by_role("listitem")
    expect(items).to_have_count(4)
    for number, text in enumerate(
        (
            r"tf-notebook\b.*anna · 40 % at most.*4307 of 4308 MiB",
            r"tf-notebook-2.*ben.*3344 of 4308 MiB",
            r"tf-notebook-3.*ben · idle 3 h 1 m.*12 of 4308 MiB",
        )
    ):
        expect(items.nth(number)).to_have_text(re.compile(text, re.DOTALL))
    expect(items.nth(3)).to_contain_text("free 2")
    bar = page.get_by_role("list", name="Slices of Card 0").bounding_box()
    assert bar
    for number in range(3):
        box = items.nth(number).bounding_box()
        assert box
        assert box["width"] / bar["width"] == pytest.approx(4308 / 15079, abs=0.002)


def test_waiting_request_has_its_reason_and_what_helps(serve: Serve, watched: Watched) -> None:
    """The sentences are the server's, unchanged."""
    page = _open(watched, serve("workstation").entry)
    item = page.get_by_role("listitem").filter(has_text="tf-notebook-4").last
    expect(item).to_contain_text("asks 4")
    expect(item).to_contain_text("since 5 m")
    expect(item).to_contain_text("no GPU fits: 1 of 1 has too little memory")
    expect(item).to_contain_text("helps: the end of tf-notebook, tf-notebook-2 or tf-notebook-3")
    expect(item).to_contain_text(re.compile(r"kept for it: card 0, free in \d+ m at the latest"))


def test_end_of_a_program_is_shown_without_a_reload(serve: Serve, watched: Watched) -> None:
    """The next message takes its slice away."""
    server = serve("workstation")
    page = _open(watched, server.entry)
    items = page.get_by_role("list", name="Slices of Card 0").get_by_role("listitem")
    expect(items.first).to_contain_text("tf-notebook")

    def later(at: float, _: int) -> tuple[World, Fleet | None]:
        world = worlds.workstation(at)
        (card,) = world.cards
        card = msgspec.structs.replace(card, slices=card.slices[1:], free_units=6)
        return msgspec.structs.replace(world, cards=[card], waiting=[], waiting_total=0), None

    server.show(later)
    expect(items).to_have_count(3)
    expect(items.first).to_contain_text("tf-notebook-2")
    expect(items.last).to_contain_text("free 6")
    expect(page.get_by_text("asks 4")).to_have_count(0)


def test_figures_that_are_not_known_are_dashes(serve: Serve, watched: Watched) -> None:
    """A lost card has no figures; 0 would be a lie."""
    page = _open(watched, serve("cluster").entry)
    card = page.get_by_role("article", name="gpu-17 card 3")
    expect(card).to_contain_text("✕ lost")
    expect(card).to_contain_text("– of 15079 MiB")
    expect(card).to_contain_text("XID 79")


def test_empty_machine_says_how_to_begin(serve: Serve, watched: Watched) -> None:
    """Each empty screen names a command that changes it."""
    server = serve("empty")
    page = _open(watched, server.entry)
    expect(page.locator("pre")).to_have_text("fenka run --gpu-mem 4 -- python3 train.py")
    for screen in ("queue", "workloads", "idle", "people", "what-if"):
        page.goto(f"{server.url}#/{screen}")
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("pre").first).to_contain_text("fenka ")


def test_history_of_each_card_is_behind_the_spans(serve: Serve, watched: Watched) -> None:
    """A chart has its summary as its name, and its figures as a table."""
    page = _open(watched, serve("workstation").entry)
    expect(page.get_by_role("img", name=re.compile("Memory"))).to_have_count(0)
    page.get_by_role("button", name="24 h").click()
    chart = page.get_by_role("img", name=re.compile(r"Temperature\. temperature: last \d+ °C"))
    expect(chart).to_be_visible()
    figure = page.get_by_role("figure").filter(has_text="Power")
    figure.get_by_text("As a table").click()
    expect(figure.get_by_role("row")).to_have_count(241)


@pytest.mark.parametrize("world", ["workstation", "cluster", "thousand"])
def test_no_screen_is_wider_than_a_small_phone(world: str, serve: Serve, watched: Watched) -> None:
    """Tables scroll in their frames; the page does not."""
    watched.expected.append("404")
    server = serve(world)
    watched.page.set_viewport_size({"width": 320, "height": 640})
    page = _open(watched, server.entry)
    for screen in (
        "",
        "nodes",
        "queue",
        "workloads",
        "idle",
        "people",
        "what-if",
        "card/0",
        "program/job-0",
    ):
        page.goto(f"{server.url}#/{screen}")
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, screen


def _changed(look: Callable[[World], World]) -> Look:
    return lambda at, _: (look(worlds.workstation(at)), None)


def test_rest_of_a_card_is_no_place_when_it_is_less_than_a_unit(
    serve: Serve, watched: Watched
) -> None:
    """A T4 of 14 units of 1077 MiB has 1 MiB beside them; all that is drawn is within the card."""

    def full(world: World) -> World:
        (card,) = world.cards
        first, *others = card.slices
        first = msgspec.structs.replace(
            first, held_mib=15078 - sum(slice_.held_mib for slice_ in others)
        )
        filled = msgspec.structs.replace(card, free_units=0, slices=[first, *others])
        return msgspec.structs.replace(world, cards=[filled])

    page = _open(watched, serve(_changed(full)).entry)
    items = page.get_by_role("list", name="Slices of Card 0").get_by_role("listitem")
    expect(items).to_have_count(3)
    panel = page.get_by_role("article", name="Card 0").bounding_box()
    assert panel
    for item in items.all():
        box = item.bounding_box()
        assert box
        assert box["x"] + box["width"] <= panel["x"] + panel["width"]


def test_idle_says_what_it_knows_when_nobody_is_idle_for_long(
    serve: Serve, watched: Watched
) -> None:
    """That a program holds a slice and was not idle for half an hour is no word that it computes."""

    def none_idle(world: World) -> World:
        programs = [msgspec.structs.replace(line, idle_s=None, busy=0.0) for line in world.programs]
        return msgspec.structs.replace(world, programs=programs)

    page = _open(watched, f"{serve(_changed(none_idle)).entry}")
    page.get_by_role("link", name="Idle").click()
    expect(
        page.get_by_text("No program has been without card time for half an hour")
    ).to_be_visible()


def test_state_is_not_live_when_the_daemon_is_down(serve: Serve, watched: Watched) -> None:
    """The stream of the dashboard goes on, and what it shows is old."""

    def down(world: World) -> World:
        return msgspec.structs.replace(world, problems=["no fenka daemon answers"])

    page = _open(watched, serve(_changed(down)).entry)
    expect(page.locator("header").get_by_role("status")).to_have_text(re.compile("as of"))


def test_empty_workloads_name_commands_of_a_cluster_on_its_page(
    serve: Serve, watched: Watched
) -> None:
    """None of them is for a workstation."""

    def empty(at: float, _: int) -> tuple[World, Fleet | None]:
        return msgspec.structs.replace(worlds.cluster(at), workloads=[]), None

    page = _open(watched, serve(empty).entry)
    page.get_by_role("link", name="Workloads").click()
    expect(page.get_by_text("--image IMAGE").first).to_be_visible()
    expect(page.get_by_text("--local")).to_have_count(0)
