"""`fenka top --watch`: what it draws of a World, and its keys, driven as a user would."""

from collections.abc import AsyncIterator

import pytest
from textual.widgets import DataTable, Input, Static

from fenka.cli.screens.top_screen import (
    UNKNOWN,
    TopScreen,
    card_bar,
    card_names,
    card_title,
    program_cells,
    summary,
)
from fenka.core.errors import INVALID_INPUT
from fenka.views.board import CardTile, ProgramLine, SliceTile, WaitingLine, World
from tests.cli.command import fenka

MIB = 15079
FOUR = 4308


def card(*slices: SliceTile, **given: object) -> CardTile:
    """Return a T4 with these slices."""
    values: dict[str, object] = {
        "id": "0",
        "node": "n",
        "index": 0,
        "uuid": "GPU-0",
        "model": "Tesla T4",
        "memory_mib": MIB,
        "units": 14,
        "free_units": 14 - 4 * len(slices),
        "healthy": True,
        "held_mib": FOUR * len(slices),
        "slices": list(slices),
        **given,
    }
    return CardTile(**values)  # type: ignore[arg-type]


def piece(name: str, used_mib: int | None) -> SliceTile:
    """Return a slice of 4 units."""
    return SliceTile(name, name, "ada", FOUR, used_mib)


def line(name: str, **given: object) -> ProgramLine:
    """Return a program that has run for 60 s."""
    values: dict[str, object] = {
        "id": name,
        "name": name,
        "user": "ada",
        "kind": "run",
        "state": "running",
        "asks": "4",
        "requested_at": 0.0,
        "started_at": 40.0,
        "cards": ["0"],
        "held_mib": FOUR,
        **given,
    }
    return ProgramLine(**values)  # type: ignore[arg-type]


def world(*programs: ProgramLine, cards: list[CardTile] | None = None, **given: object) -> World:
    """Return a World at second 100."""
    values: dict[str, object] = {
        "at": 100.0,
        "place": "workstation",
        "name": "lab",
        "version": "1",
        "simulated": True,
        "unit_mib": 1024,
        "cards": cards if cards is not None else [card(piece("a", FOUR))],
        "programs": list(programs),
        "waiting": [],
        "waiting_total": 0,
        **given,
    }
    return World(**values)  # type: ignore[arg-type]


def test_bar_is_as_wide_as_slices_and_as_full_as_they_are_used() -> None:
    """70 cells: 4308 of 15079 MiB are 20 of them, one of them a gap; half used are 10 of 19, nothing is 0."""
    bar = card_bar(card(piece("a", FOUR), piece("b", FOUR // 2), piece("c", 0)), 76).plain
    assert bar == "    ▕" + "█" * 19 + " " + "█" * 10 + "░" * 9 + " " + "░" * 19 + " " * 11 + "▏"


def test_names_stand_below_their_slices() -> None:
    """A name that has no room is cut with an ellipsis."""
    names = card_names(card(piece("a", 1), piece("a-name-of-more-than-20", 1)), 76).plain
    assert names == "     " + "a".ljust(20) + "a-name-of-more-tha…".ljust(20)


def test_title_says_what_is_not_known() -> None:
    """A dash, and never 0."""
    assert card_title(card()).plain == (
        f"  0  Tesla T4  held 0/14  used – of {MIB} MiB  busy –  –  –"
    )
    known = card(used_mib=12924, busy=0.62, temperature_c=49, power_w=29.4, power_limit_w=70.0)
    assert card_title(known).plain == (
        f"  0  Tesla T4  held 0/14  used 12924 of {MIB} MiB  busy 62 %  49 °C  29 of 70 W"
    )


def test_cells_of_a_program() -> None:
    """It has run for 60 s, is idle for 31 minutes, and exceeds a limit."""
    shown = line("a", busy=0.4, used_mib=12, compute=40, idle_s=1860.0, violations=["x"])
    expected = ("a !", "ada", "run", "0", "4308", "12", "40 %", "40 hard", "31m", "1m")
    assert program_cells(shown, 100.0) == expected
    assert program_cells(line("b", state="starting", started_at=None), 100.0)[5:7] == (
        UNKNOWN,
        UNKNOWN,
    )


def test_terminal_gets_no_escape_sequence_from_a_name() -> None:
    """Names are other users', and a terminal executes what it reads."""
    hostile = "\x1b]0;title\x07"
    assert "\x1b" not in summary(world(name=hostile)).plain
    assert "\x1b" not in program_cells(line(hostile, user=hostile), 1.0)[0]
    assert "\x1b" not in card_names(card(piece(hostile, 1)), 200).plain
    assert "\x1b" not in card_title(card(model=hostile, note=hostile)).plain


def test_markup_in_a_name_is_text() -> None:
    """`[red]` is shown as it is written."""
    assert "[red]x" in summary(world(name="[red]x")).plain


def names(app: TopScreen) -> list[str]:
    """Return the first column of the table."""
    table = app.query_one(DataTable)
    return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]


async def once(*worlds: World) -> AsyncIterator[World]:
    """Yield these worlds and no more."""
    for shown in worlds:
        yield shown


PROGRAMS = (
    line("big", held_mib=9000, busy=0.1, user="ben", cards=["1"]),
    line("idle", held_mib=100, idle_s=7200.0, own=True, cards=["2"]),
    line("small", held_mib=10, busy=0.9, cards=["0"]),
)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("c", ["small", "big", "idle"]),
        ("m", ["big", "idle", "small"]),
        ("b", ["small", "big", "idle"]),
        ("i", ["idle", "big", "small"]),
        ("u", ["idle", "small", "big"]),
        ("o", ["idle"]),
        ("oo", ["small", "big", "idle"]),
    ],
)
async def test_key_sorts_or_selects(keys: str, expected: list[str]) -> None:
    """Each letter as the line at the bottom names it."""
    app = TopScreen(lambda: once(world(*PROGRAMS)))
    async with app.run_test(size=(100, 40)) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        assert names(app) == expected


@pytest.mark.parametrize("size", [(80, 10), (60, 8), (40, 6)])
async def test_each_card_is_shown_when_the_terminal_becomes_small(size: tuple[int, int]) -> None:
    """By its title alone, in one line: bars of the former width would wrap, and hide the next card."""
    cards = [card(piece("a", FOUR), id=str(index), index=index) for index in range(2)]
    app = TopScreen(lambda: once(world(line("a"), cards=cards)))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.resize_terminal(*size)
        await pilot.pause()
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        rows = ["".join(part.text for part in strip) for strip in strips]
        shown = [row.split()[0] for row in rows if "Tesla T4" in row]
        assert (len(rows), shown) == (size[1], ["0", "1"])


async def test_filter_keeps_what_it_names_until_escape() -> None:
    """By name or user; Enter leaves the field, Esc shows all again; q quits."""
    app = TopScreen(lambda: once(world(*PROGRAMS)))
    async with app.run_test(size=(100, 40)) as pilot:
        await pilot.pause()
        await pilot.press("slash", *"ben")
        assert names(app) == ["big"]
        await pilot.press("enter")
        assert names(app) == ["big"]
        assert not app.query_one(Input).has_focus
        await pilot.press("escape")
        assert len(names(app)) == 3
        await pilot.press("q")
    assert app.return_code == 0


async def test_screen_shows_cards_queue_and_problems() -> None:
    """With the sentence of why a request waits, and what helps."""
    waiting = WaitingLine(
        "w", 1, "late", "ada", "4", 0, 40.0, why="no room", helps=["the end of a"]
    )
    shown = world(
        line("a"), waiting=[waiting], waiting_total=3, problems=["the fenka daemon does not answer"]
    )
    app = TopScreen(lambda: once(world(), shown))
    async with app.run_test(size=(100, 40)) as pilot:
        await pilot.pause()
        queue = str(app.query_one("#waiting-lines", Static).render())
        assert "late  ada  asks 4  since 1m" in queue
        assert "helps: the end of a" in queue
        assert "and 2 more" in queue
        top = str(app.query_one("#summary", Static).render())
        assert "the fenka daemon does not answer" in top
        assert "simulated cards" in top


def test_watching_without_a_terminal_is_refused() -> None:
    """A pipe would receive escape sequences."""
    result = fenka("top", "--watch")
    assert result.exit_code == INVALID_INPUT
    assert "--watch needs a terminal: `fenka top node` prints once" in result.stderr
