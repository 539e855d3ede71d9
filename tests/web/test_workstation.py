"""The page of a real daemon and a real dashboard, with programs that hold memory of a simulated card."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.browser import Watched
from tests.workstation.conftest import HOLD, Program, Workstation, kill, workstation_at

NAMES = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")


@pytest.fixture
def station() -> Iterator[Workstation]:
    """A workstation with one T4."""
    with workstation_at([]) as station:
        station.start("--simulate", "T4")
        yield station


@contextmanager
def dashboard_process(
    station: Workstation, *options: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `fenka dashboard`, and yield it with the address that it prints."""
    with subprocess.Popen(
        [station.interpreter, "-m", "fenka", "dashboard", "--no-open", *options],
        env=station.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def _dashboard(station: Workstation, *options: str) -> Iterator[str]:
    """Run `fenka dashboard`, and yield the address that it prints."""
    with dashboard_process(station, *options) as (_, url):
        yield url


def _hold(station: Workstation, name: str, mib: int = 4307) -> Program:
    return station.run("--gpu-mem", "4", "--name", name, "--", *HOLD, str(mib))


def _three(station: Workstation) -> dict[str, Program]:
    """Start three programs, each of which has allocated 4307 MiB by the driver's own word."""
    programs = {name: _hold(station, name) for name in NAMES}
    for program in programs.values():
        (card,) = program.report()["cards"]
        assert card["result"] == 0
        assert card["total"] == 4308
    return programs


def _slices(page: Page) -> Locator:
    return page.get_by_role("list", name="Slices of Card 0").get_by_role("listitem")


def _slice(page: Page, name: str) -> Locator:
    return _slices(page).filter(has=page.get_by_text(name, exact=True))


def test_three_notebooks_share_a_card_and_a_fourth_follows(
    station: Workstation, watched: Watched
) -> None:
    """One is killed: its bar goes, and the one that has waited comes, without a reload."""
    programs = _three(station)
    fourth = _hold(station, "tf-notebook-4")
    with _dashboard(station) as url:
        page = watched.page
        page.goto(url)
        for name in NAMES:
            expect(_slice(page, name)).to_contain_text("4308 of 4308 MiB")
            share = _slice(page, name).evaluate("item => item.style.width")
            assert float(share.rstrip("%")) == pytest.approx(28.57, abs=0.01)
        expect(_slices(page).last).to_contain_text("free 2")
        waiting = page.get_by_role("listitem").filter(has_text="tf-notebook-4").last
        (row,) = (line for line in station.ok("queue").splitlines() if "tf-notebook-4" in line)
        reason = "no GPU fits: 1 of 1 has too little memory"
        assert reason in row
        expect(waiting).to_contain_text(reason)

        kill(programs["tf-notebook-2"].pid)
        expect(_slice(page, "tf-notebook-4")).to_contain_text("4308 of 4308 MiB")
        expect(_slice(page, "tf-notebook-2")).to_have_count(0)
        expect(_slices(page)).to_have_count(4)
        expect(page.get_by_text(reason)).to_have_count(0)
        assert fourth.report()["cards"][0]["result"] == 0


def test_more_than_the_slice_is_refused_and_shown(station: Workstation, watched: Watched) -> None:
    """CUDA's error is the program's; the page tells that there was one."""
    program = _hold(station, "greedy", 4400)
    assert program.report()["cards"][0]["result"] == 2
    # The page may still load its charts when the server ends.
    watched.expected.append("ERR_CONNECTION_")
    with _dashboard(station) as url:
        page = watched.page
        page.goto(url)
        _slice(page, "greedy").get_by_role("link").click()
        expect(page.locator("h1")).to_have_text("greedy")
        expect(page.locator("dl").first).to_contain_text(re.compile(r"refused memory\s*1 ×"))


def test_bars_stay_while_the_daemon_is_away(station: Workstation, watched: Watched) -> None:
    """A banner says so; a new daemon has the same programs."""
    _three(station)
    with _dashboard(station) as url:
        page = watched.page
        page.goto(url)
        expect(_slice(page, "tf-notebook")).to_contain_text("4308 of 4308 MiB")
        station.kill_daemon()
        expect(page.get_by_role("alert")).to_contain_text("daemon")
        expect(_slice(page, "tf-notebook")).to_contain_text("4308 of 4308 MiB")
        station.start("--simulate", "T4")
        expect(page.get_by_role("alert")).to_have_count(0)
        for name in NAMES:
            expect(_slice(page, name)).to_contain_text("4308 of 4308 MiB")


def test_own_program_is_stopped_from_the_page(station: Workstation, watched: Watched) -> None:
    """The daemon ends it for the dashboard's user; with --read-only there is no button."""
    program = _hold(station, "mine", 100)
    program.report()
    page = watched.page
    with _dashboard(station, "--read-only") as url:
        page.goto(url)
        _slice(page, "mine").get_by_role("link").click()
        expect(page.locator("h1")).to_have_text("mine")
        expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    watched.expected += ["ERR_", "401"]
    with _dashboard(station) as url:
        page.goto("about:blank")
        page.goto(url)
        _slice(page, "mine").get_by_role("link").click()
        page.get_by_role("button", name="Resize").click()
        page.get_by_role("textbox", name=re.compile("^Memory")).fill("6")
        page.get_by_role("dialog").get_by_role("button", name="Resize").click()
        expect(page.locator("dl").first).to_contain_text("100 of 6462 MiB")
        page.get_by_role("button", name="Stop mine").click()
        page.get_by_role("button", name="Stop it").click()
        expect(page.get_by_text("ended", exact=True)).to_be_visible()
    assert program.process.wait() != 0


def test_own_requests_are_prioritized_and_stopped_from_the_page(
    station: Workstation, watched: Watched
) -> None:
    """The last becomes the first, and starts when there is room; a program that runs changes, too."""
    station.run("--gpu-mem", "14", "--name", "holder", "--", *HOLD, "100").report()
    for name in ("first", "second"):
        station.run("--gpu-mem", "14", "--name", name, "--", *HOLD, "100").says()
    # The refusal, and the page may still load its charts when the server ends.
    watched.expected += ["409", "ERR_CONNECTION_"]
    with _dashboard(station) as url:
        page = watched.page
        page.goto(url)
        waiting = page.get_by_role("listitem").filter(has_text="asks 14")
        expect(waiting).to_have_count(2)
        expect(waiting.first).to_contain_text("first")
        waiting.last.get_by_role("link", name="second").click()
        expect(page.locator("h1")).to_have_text("second")
        page.get_by_role("button", name="Prioritize").click()
        dialog = page.get_by_role("dialog", name="Prioritize second")
        number = dialog.get_by_role("spinbutton", name="Priority")
        number.fill("1000001")
        number.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text(
            "--priority must be from -1000000 to 1000000, not 1000001"
        )
        number.fill("5")
        number.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.get_by_text("second waits at position 1 of 2")).to_be_visible()
        expect(page.get_by_text("Its priority is 5.")).to_be_visible()
        page.get_by_role("button", name="Stop second").click()
        page.get_by_role("button", name="Stop it").click()
        expect(page.get_by_text("second has ended: never started; stopped by")).to_be_visible()
        page.goto(f"{url.partition('#')[0]}#/program/{station.jobs()['holder']['id']}")
        expect(page.locator("h1")).to_have_text("holder")
        page.get_by_role("button", name="Prioritize").click()
        page.get_by_role("spinbutton", name="Priority").fill("-7")
        page.get_by_role("spinbutton", name="Priority").press("Enter")
        expect(page.locator("dl").first).to_contain_text(re.compile(r"priority\s*-7"))
    assert station.jobs()["holder"]["priority"] == -7
