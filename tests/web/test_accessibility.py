"""The page by keyboard and for screen readers, in light and dark."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.web.browser import Watched
from tests.web.conftest import Serve
from tools.page.server import PAGE

AXE = PAGE.parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"

SCREENS = {
    "workstation": ("cards", "queue", "program/job-1", "program/job-3", "card/0", "idle", "people",
                    "what-if", "workloads", "nothing"),
    "cluster": ("cards", "nodes", "nodes/squares", "node/gpu-17", "queue", "workloads", "idle", "people"),
    "thousand": ("nodes", "nodes/table", "node/gpu-0003", "card/gpu-0003/2"),
    "empty": ("cards", "queue", "workloads", "idle", "people", "what-if"),
}  # fmt: skip


FINDINGS = """async () => {
    const { violations } = await axe.run({ resultTypes: ["violations"] });
    const places = (rule) => rule.nodes.map((node) => node.html.slice(0, 160) + node.failureSummary);
    return violations.map((rule) => `${rule.id}: ${places(rule).join(" | ")}`);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("world", SCREENS)
def test_axe_finds_nothing(world: str, scheme: str, serve: Serve, watched: Watched) -> None:
    """axe-core checks names, roles, contrast and structure of each screen."""
    page = watched.page
    page.emulate_media(
        color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce"
    )
    server = serve(world)
    page.goto(server.entry)
    for screen in SCREENS[world]:
        page.goto(f"{server.url}#/{screen}")
        expect(page.locator("h1")).to_be_visible()
        if screen.startswith(("card/", "program/job-1")):
            expect(page.get_by_role("figure").first).to_be_visible()
        assert _violations(page) == [], screen


def _violations(page: Page) -> list[str]:
    """Return the findings of axe-core. It is injected past the page's policy, which forbids it."""
    if not page.evaluate("'axe' in globalThis"):
        page.evaluate(AXE.read_text() + "\n;null")
    found = page.evaluate(FINDINGS)
    assert isinstance(found, list)
    return found


def test_axe_finds_what_is_wrong(serve: Serve, watched: Watched) -> None:
    """The check above is worth nothing if it finds nothing."""
    page = watched.page
    page.goto(serve("workstation").entry)
    expect(page.locator("h1")).to_be_visible()
    page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert any(text.startswith("button-name") for text in _violations(page))


def test_every_screen_is_reached_by_keyboard(serve: Serve, watched: Watched) -> None:
    """Tab to the navigation, Enter; the focus is always visible."""
    page = watched.page
    page.goto(serve("workstation").entry)
    expect(page.locator("h1")).to_be_visible()
    for name in ("Queue", "Workloads", "Idle", "People", "What if"):
        link = page.get_by_role("navigation").get_by_role("link", name=name)
        _tab_to(page, link.element_handle())
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(link).to_have_attribute("aria-current", "page")


def _tab_to(page: Page, element: object) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(60):
        if page.evaluate("element => document.activeElement === element", element):
            return
        page.keyboard.press("Tab")
    pytest.fail("the element cannot be reached with Tab")


def test_slice_and_card_are_opened_by_keyboard(serve: Serve, watched: Watched) -> None:
    """Each slice is a link to its program, which links to its card."""
    page = watched.page
    page.goto(serve("workstation").entry)
    slice_link = page.get_by_role("link", name="tf-notebook-2")
    expect(slice_link).to_be_visible()
    _tab_to(page, slice_link.element_handle())
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("tf-notebook-2")
    _tab_to(page, page.get_by_role("main").get_by_role("link", name="Card 0").element_handle())
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Card 0")


def test_motion_is_reduced_when_asked(serve: Serve, watched: Watched) -> None:
    """Bars change at once for those whom motion makes unwell."""
    page = watched.page
    page.goto(serve("workstation").entry)
    bar = page.locator(".meter i").first
    expect(bar).to_be_attached()
    assert bar.evaluate("bar => getComputedStyle(bar).transitionDuration") != "0s"
    page.emulate_media(reduced_motion="reduce")
    assert bar.evaluate("bar => getComputedStyle(bar).transitionDuration") == "0s"


def test_lock_file_names_the_public_registry_only() -> None:
    """A mirror of one machine would be of no use to others."""
    lock = (PAGE.parents[2] / "web" / "package-lock.json").read_text()
    places = [line.split('"')[3] for line in lock.splitlines() if '"resolved"' in line]
    assert places
    assert [place for place in places if not place.startswith("https://registry.npmjs.org/")] == []


def test_licences_of_what_is_bundled_are_in_the_page() -> None:
    """They are shown at the foot of each screen."""
    if not (PAGE / "LICENSES.txt").exists():
        pytest.skip("the page is not built: make web")
    text = (PAGE / "LICENSES.txt").read_text()
    assert all(f"{name} " in text for name in ("svelte", "uplot"))
    assert "Permission is hereby granted" in text


def test_page_loads_nothing_from_elsewhere() -> None:
    """No address of another host is in the page's own files but in texts of licences and of namespaces."""
    html = Path(PAGE / "index.html")
    if not html.exists():
        pytest.skip("the page is not built: make web")
    # The icon is part of the page, and names a namespace.
    text = html.read_text().replace("xmlns='http://www.w3.org/2000/svg'", "")
    assert "http" not in text
