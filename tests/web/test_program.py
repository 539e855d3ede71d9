"""What one program did, what may be done to it, and the tables of who has how much."""

import csv
import re
from pathlib import Path
from typing import Any

import msgspec
from playwright.sync_api import Page, expect

from fenka.views.board import Fleet, World
from tests.web.browser import Watched
from tests.web.conftest import Serve
from tools.page import worlds

SCRIPT = "<img src=x onerror=globalThis.ran=1>"


def _open(watched: Watched, url: str, screen: str) -> Page:
    page = watched.page
    page.goto(url)
    expect(page.locator("h1")).to_be_visible()
    page.evaluate("screen => { location.hash = `#/${screen}`; }", screen)
    return page


def test_program_tells_all_of_it(serve: Serve, watched: Watched) -> None:
    """Held, used and busy are three numbers; refusals are marks in the history."""
    page = _open(watched, serve("workstation").entry, "program/job-0")
    expect(page.locator("h1")).to_have_text("tf-notebook")
    figures = page.locator("dl").first
    for text in ("4 = 4308 MiB", "4307 of 4308 MiB", "38 %", "40 % hard", "1 ×"):
        expect(figures).to_contain_text(text)
    expect(
        page.get_by_role("img", name=re.compile(r"Memory\. memory: .* of 4308 MiB"))
    ).to_be_visible()
    expect(page.get_by_role("region", name="History")).to_contain_text("refused: 512 MiB beyond")
    expect(page.get_by_role("region", name="Events")).to_contain_text("resized from 3 to 4")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


def test_page_says_so_when_its_charts_cannot_be_loaded(serve: Serve, watched: Watched) -> None:
    """They are files of their own, and the server may end before a page asks for them."""
    watched.expected.append("ERR_FAILED")
    watched.page.route("**/Chart-*", lambda route: route.abort())
    page = _open(watched, serve("workstation").entry, "program/job-0")
    history = page.get_by_role("region", name="History")
    expect(history).to_contain_text("The charts could not be loaded")
    expect(history).to_contain_text("refused: 512 MiB beyond")


def test_waiting_program_has_the_whole_explanation(serve: Serve, watched: Watched) -> None:
    """It is that of `fenka why`."""
    page = _open(watched, serve("workstation").entry, "program/job-3")
    why = page.get_by_role("region", name="Why it waits")
    expect(why).to_contain_text("tf-notebook-4 waits at position 1 of 1.")
    expect(why).to_contain_text("no GPU fits: 1 of 1 has too little memory")
    expect(why).to_contain_text("fenka why tf-notebook-4")


def test_members_of_a_gang_lead_to_each_other(serve: Serve, watched: Watched) -> None:
    """They start and end together."""
    page = _open(watched, serve("cluster").entry, "program/gang-a")
    page.get_by_role("region", name="With it in gang").get_by_role("link", name="gang-b").click()
    expect(page.locator("h1")).to_have_text("gang-b")


def test_memory_of_a_card_is_drawn_by_program(serve: Serve, watched: Watched) -> None:
    """The card's own figure has a chart beside it, with the whole as its limit."""
    page = _open(watched, serve("workstation").entry, "card/0")
    expect(
        page.get_by_role("img", name=re.compile(r"^Memory\. memory: .* of 15079 MiB$"))
    ).to_be_visible()
    parts = page.get_by_role(
        "img", name=re.compile(r"^Memory by program\. tf-notebook: .* tf-notebook-2: ")
    )
    expect(parts).to_be_visible()


def test_own_program_is_stopped_by_keyboard(serve: Serve, watched: Watched) -> None:
    """A question comes first, and Escape takes it back."""
    server = serve("workstation")
    page = _open(watched, server.entry, "program/job-1")
    page.get_by_role("button", name="Stop tf-notebook-2").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Stop tf-notebook-2?")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert server.server.posted == []
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    assert server.server.posted == [("/api/stop/job-1", {})]


def test_own_program_is_resized(serve: Serve, watched: Watched) -> None:
    """Only what was typed is changed."""
    server = serve("workstation")
    page = _open(watched, server.entry, "program/job-1")
    page.get_by_role("button", name="Resize").click()
    # The command takes both.
    label = page.get_by_role("dialog").locator("label[for=resize-memory]")
    expect(label).to_have_text("Memory, as for fenka run --gpu-mem: units, or 6GiB")
    # What the program has asked for may have further words, as `4 50%`.
    memory = page.get_by_role("textbox", name=re.compile("^Memory"))
    assert re.fullmatch("[0-9]+MiB", memory.get_attribute("placeholder") or "")
    page.get_by_role("textbox", name=re.compile("^Memory")).fill("6GiB")
    page.get_by_role("textbox", name=re.compile("^Memory")).press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert server.server.posted == [("/api/resize/job-1", {"gpu_mem": "6GiB", "gpu_core": None})]


def test_own_program_that_waits_is_prioritized(serve: Serve, watched: Watched) -> None:
    """By keyboard; what others have has no button, and nothing is sent before a number is there."""
    server = serve(_waiting_is_own)
    page = _open(watched, server.entry, "program/job-3")
    page.get_by_role("button", name="Prioritize").click()
    dialog = page.get_by_role("dialog", name="Prioritize tf-notebook-4")
    number = dialog.get_by_role("spinbutton", name="Priority")
    send = dialog.get_by_role("button", name="Prioritize")
    expect(send).to_be_disabled()
    number.fill("3")
    number.fill("")
    expect(send).to_be_disabled()
    number.fill("-3")
    number.press("Enter")
    expect(dialog).to_be_hidden()
    assert server.server.posted == [("/api/prioritize/job-3", {"priority": -3})]
    expect(page.get_by_role("button", name="Resize")).to_have_count(0)
    page.goto(f"{server.url}#/program/job-0")
    expect(page.locator("h1")).to_have_text("tf-notebook")
    expect(page.get_by_role("button", name="Prioritize")).to_have_count(0)


def _waiting_is_own(at: float, _: int) -> tuple[World, Fleet | None]:
    world = worlds.workstation(at)
    programs = [
        msgspec.structs.replace(line, own=line.own or line.state == "waiting")
        for line in world.programs
    ]
    return msgspec.structs.replace(world, programs=programs), None


def test_output_of_an_own_program_is_shown(serve: Serve, watched: Watched) -> None:
    """That of others is not offered."""
    server = serve("workstation")
    page = _open(watched, server.entry, "program/job-1")
    expect(page.get_by_role("log", name="Output")).to_contain_text("epoch 30 loss 0.282")
    page.goto(f"{server.url}#/program/job-0")
    expect(page.locator("h1")).to_have_text("tf-notebook")
    expect(page.get_by_role("log")).to_have_count(0)


def test_unknown_program_leads_back(serve: Serve, watched: Watched) -> None:
    """A link may be older than its program."""
    watched.expected.append("404")
    page = _open(watched, serve("workstation").entry, "program/gone%20%2F")
    expect(page.locator("h1")).to_have_text("There is no program “gone /”")
    page.get_by_role("link", name="Back to the start").click()
    expect(page.get_by_text("4307 of 4308 MiB")).to_be_visible()


def test_script_in_names_is_text(serve: Serve, watched: Watched) -> None:
    """Names, users and sentences come from others."""

    def hostile(at: float, _: int) -> tuple[World, Fleet | None]:
        data = msgspec.json.encode(worlds.workstation(at)).decode()
        for word in ("tf-notebook-4", "tf-notebook-3", '"ben"', "too little memory"):
            data = data.replace(word, SCRIPT if word[0] != '"' else f'"{SCRIPT}"')
        return msgspec.json.decode(data, type=World), None

    server = serve(hostile)
    page = _open(watched, server.entry, "cards")
    expect(page.get_by_role("link", name=SCRIPT).first).to_be_visible()
    for screen in ("queue", "program/job-2", "idle", "people", "workloads", "what-if"):
        page.goto(f"{server.url}#/{screen}")
        expect(page.get_by_text(SCRIPT).first).to_be_attached()
    assert page.evaluate("globalThis.ran") is None
    assert page.locator("main img").count() == 0


def test_idle_programs_name_whom_they_keep_waiting(serve: Serve, watched: Watched) -> None:
    """One's own can be stopped from there."""
    page = _open(watched, serve("workstation").entry, "idle")
    expect(page.locator("h1")).to_have_text("1 program holds 4.2 GiB and computes nothing")
    row = page.get_by_role("row").filter(has_text="tf-notebook-3")
    expect(row).to_contain_text("3 h 1 m")
    expect(row.get_by_role("link", name="tf-notebook-4")).to_be_visible()
    expect(row.get_by_role("button", name="Stop tf-notebook-3")).to_be_visible()


def _saved(page: Page, tmp_path: Path) -> list[dict[str, Any]]:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save as CSV").click()
    file = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(file)
    return [*csv.DictReader(file.open(newline=""))]


def test_people_are_saved_as_csv(serve: Serve, watched: Watched, tmp_path: Path) -> None:
    """The page makes the file; a name that a spreadsheet would run is quoted."""

    def formula(at: float, _: int) -> tuple[World, Fleet | None]:
        world = worlds.workstation(at)
        first = msgspec.structs.replace(world.people[0], user='=HYPERLINK("x"),1')
        return msgspec.structs.replace(world, people=[first, *world.people[1:]]), None

    page = _open(watched, serve(formula).entry, "people")
    rows = _saved(page, tmp_path)
    assert [row["user"] for row in rows] == ["ben", '\'=HYPERLINK("x"),1', "cara"]
    assert rows[0]["held MiB"] == "8616"
    assert rows[2]["waiting"] == "1"


def test_people_have_their_usage_and_cost(serve: Serve, watched: Watched, tmp_path: Path) -> None:
    """Of this month and of today; idle time is nobody's, and the file has all lines."""
    page = _open(watched, serve("workstation").entry, "people")
    usage = page.get_by_role("region", name="Usage")
    expect(usage.get_by_role("row", name="ben")).to_contain_text("155.00")
    expect(usage.get_by_role("row", name="ben")).to_contain_text("54.25 EUR")
    expect(usage.get_by_role("row", name="idle")).to_contain_text("36.17 EUR")
    page.get_by_role("button", name="today").click()
    expect(usage.get_by_role("row", name="ben")).to_contain_text("5.50")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save usage as CSV").click()
    download.value.save_as(tmp_path / "usage.csv")
    saved = (tmp_path / "usage.csv").read_text().splitlines()
    assert saved[0].startswith("User,card hours")
    assert saved[-1].startswith("unobserved,")


def test_queue_says_how_long_requests_waited(serve: Serve, watched: Watched) -> None:
    """Of the last 24 hours."""
    page = _open(watched, serve("workstation").entry, "queue")
    expect(page.locator("[data-part=waits]")).to_have_text(
        "In 24 hours 12 requests were granted; 5 of them waited, 3 m on average, 20 m at most."
    )


def test_what_if_asks_and_answers(serve: Serve, watched: Watched) -> None:
    """Cards are added and programs ended on paper; each can be taken back."""
    page = _open(watched, serve("workstation").entry, "what-if")
    page.get_by_role("button", name="Add").click()
    answer = page.get_by_role("region", name="Answer")
    expect(answer).to_contain_text("1 of 1 start: tf-notebook-4")
    page.get_by_role("button", name="Take Tesla T4 back").click()
    expect(answer).to_have_count(0)
    page.get_by_label("Program").select_option("job-2")
    page.get_by_role("button", name="End").click()
    expect(answer).to_contain_text("1 of 1 start: tf-notebook-4")
    expect(page.get_by_role("list", name="Asked")).to_contain_text("tf-notebook-3 ended")


def test_workloads_have_loss_address_and_requests(serve: Serve, watched: Watched) -> None:
    """Trainings, notebooks and services, each with what matters of it."""
    page = _open(watched, serve("cluster").entry, "workloads")
    trainings = page.get_by_role("region", name="Trainings")
    expect(trainings.get_by_role("listitem").filter(has_text="resnet-worker-0")).to_contain_text(
        "loss 1.448 at step 19,500"
    )
    chat = page.get_by_role("region", name="Services").get_by_role("listitem").first
    for text in ("chat v2", "3 of 5", "212.4 /s", "37"):
        expect(chat).to_contain_text(text)
    expect(page.get_by_role("link", name="http://notebook.default.example.org")).to_be_visible()
