"""A thousand nodes of eight cards: a canvas for the eyes, words and a table for everybody."""

import re

from playwright.sync_api import Page, expect

from tests.web.browser import Watched
from tests.web.conftest import Serve
from tools.page import worlds

COUNT_COLOURS = """() => new Promise((resolve) => requestAnimationFrame(() => {
    const { width, height } = document.querySelector("canvas");
    const context = document.querySelector("canvas").getContext("2d");
    const words = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
    resolve(new Set(words).size);
}))"""


def _words(number: int, card: int) -> re.Pattern[str]:
    """Return what the page says of a card, from the bytes of the message."""
    _, fleet = worlds.thousand_nodes(0.0)
    held, busy, flags = fleet.cards[3 * (8 * number + card) :][:3]
    words = [f"gpu-{number:04} card {card}", f"{_percent(held)} held"]
    words.append("busy not known" if busy == 255 else r"\d+ % busy")
    names = ((1, "lost"), (2, "cordoned"), (4, "idle"), (8, "hot"))
    words += [name for bit, name in names if flags & bit]
    return re.compile(", ".join(words))


def _percent(byte: int) -> str:
    return f"{int(100 * byte / 254 + 0.5)} %"


def _map(page: Page) -> None:
    page.get_by_role("application", name=re.compile("8,000 cards of 1,000 nodes")).focus()


def test_thousand_nodes_are_told_card_by_card(serve: Serve, watched: Watched) -> None:
    """The arrow keys go from card to card; a live region says each."""
    page = watched.page
    page.goto(serve("thousand").entry)
    expect(page.locator("h1")).to_have_text("1,000 nodes, 8,000 cards")
    said = page.get_by_role("main").get_by_role("status")
    _map(page)
    expect(said).to_contain_text(_words(0, 0))
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    expect(said).to_contain_text(_words(1, 1))
    page.keyboard.press("End")
    expect(said).to_contain_text(_words(999, 7))
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    expect(said).not_to_contain_text("gpu-0000")
    expect(said).to_contain_text(re.compile(r"card 0, "))


def test_canvas_shows_the_message(serve: Serve, watched: Watched) -> None:
    """Where a card is held there is its colour, and the ground where it is not."""
    page = watched.page
    page.goto(serve("thousand").entry)
    expect(page.locator("canvas")).to_be_visible()
    colours = page.evaluate(COUNT_COLOURS)
    assert colours > 6
    size = page.locator("canvas").bounding_box()
    assert size
    assert size["height"] > 1000


def test_enter_opens_the_card(serve: Serve, watched: Watched) -> None:
    """Only then the cards of its node are asked for."""
    page = watched.page
    page.goto(serve("thousand").entry)
    _map(page)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("gpu-0000 card 1")
    expect(page.get_by_role("listitem").filter(has_text="35000 of 40960 MiB")).to_be_visible()
    page.get_by_role("link", name="gpu-0000", exact=False).first.click()
    expect(page.get_by_role("article")).to_have_count(8)


def test_nodes_are_a_table_too(serve: Serve, watched: Watched) -> None:
    """A hundred at a time, in any order, filtered by words."""
    page = watched.page
    page.goto(serve("thousand").entry)
    page.get_by_role("link", name="as a table").click()
    rows = page.get_by_role("region", name="Nodes").get_by_role("row")
    expect(rows).to_have_count(101)
    expect(rows.nth(1)).to_contain_text("gpu-0000")
    page.get_by_role("button", name="Next").click()
    expect(rows.nth(1)).to_contain_text("gpu-0100")
    page.get_by_label("Filter").fill("gpu-042 H100")
    expect(rows.nth(1)).to_contain_text(re.compile(r"gpu-042\d"))
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name=re.compile("lost")).click()
    expect(rows.nth(1)).to_contain_text(re.compile(r"\d lost"))


def test_few_cards_begin_as_a_table(serve: Serve, watched: Watched) -> None:
    """A map of sixteen squares says less than five rows."""
    server = serve("cluster")
    watched.page.goto(server.entry)
    expect(watched.page.locator("h1")).to_be_visible()
    watched.page.goto(f"{server.url}#/nodes")
    rows = watched.page.get_by_role("region", name="Nodes").get_by_role("row")
    expect(rows).to_have_count(6)
    expect(rows.filter(has_text="gpu-17")).to_contain_text("1 lost, 1 idle")
    expect(rows.filter(has_text="gpu-18")).to_contain_text("the next pass removes it")
