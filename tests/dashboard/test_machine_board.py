"""A machine as the page shows it: three numbers of a slice, who owns what, what is idle."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.units import units_to_mib
from fenka.local.machine_board import Surroundings, Viewer, free_units, world
from fenka.local.views import queue_rows
from fenka.views.board import World
from fenka.workstation.protocol import CardView, JobView, MachineSnapshot, SliceView
from tests.dashboard.machines import card, machine, program

ANNA = Viewer(1000)


def seen(snapshot: MachineSnapshot, viewer: Viewer = ANNA, now: float = 5000.0) -> World:
    """The page's view of a machine."""
    return world(snapshot, viewer, Surroundings(), now)


def test_three_notebooks_and_the_fourth_as_in_the_article() -> None:
    """12 of 14 units are held, two are free, and the fourth has the sentence of `fenka queue`."""
    reason = "no GPU fits: 1 of 1 has too little memory"
    fourth = program("nb4", position=1, reason=reason, reserved=[0], helps=["the end of nb1"])
    snapshot = machine(*(program(f"nb{n}") for n in (1, 2, 3)), fourth)
    shown = seen(snapshot)
    (tile,) = shown.cards
    assert [(s.name, s.used_mib, s.held_mib) for s in tile.slices] == [
        (name, 4307, 4308) for name in ("nb1", "nb2", "nb3")
    ]
    assert (tile.units, tile.free_units, tile.held_mib) == (14, 2, 12924)
    assert tile.note == "kept for nb4"
    (line,) = shown.waiting
    assert (line.why, line.helps, line.reserved) == (reason, ["the end of nb1"], ["0"])
    assert [line.why] == [row.why for row in queue_rows(snapshot)]
    # The card is kept for the fourth, so nothing starts at once, although something is free.
    assert (shown.free_mib, shown.largest_mib) == (2154, 0)
    assert [(person.user, person.held_mib, person.waiting) for person in shown.people] == [
        ("anna", 12924, 1)
    ]


def test_arguments_of_commands_are_nowhere() -> None:
    """Neither others' nor one's own: passwords stand there."""
    snapshot = machine(program("a"), program("b", uid=1001, user="ben"))
    assert b"secret" not in msgspec.json.encode(seen(snapshot))


def test_only_own_programs_can_be_stopped() -> None:
    """Others' names are shown; root may stop all."""
    snapshot = machine(program("a"), program("b", uid=1001, user="ben"))
    assert [line.own for line in seen(snapshot).programs] == [True, False]
    assert [line.own for line in seen(snapshot, Viewer(0)).programs] == [True, True]
    assert not seen(snapshot, Viewer(1000, acts=False)).actions


@pytest.mark.parametrize(
    ("started_at", "last_active", "idle_s"),
    [
        (1000.0, 1000.0, 4000.0),  # never had any card time since its granting
        (1000.0, 3200.0, 1800.0),
        (1000.0, 3201.0, None),  # not yet 30 min
        (1000.0, 5000.0, None),
        (4401.0, 1000.0, None),  # held for less than 10 min
        (1000.0, None, None),  # not known, as on an instance
    ],
)
def test_program_is_idle_when_it_holds_and_computes_nothing(
    started_at: float, last_active: float | None, idle_s: float | None
) -> None:
    """From 10 min of holding and 30 min without card time on; not known is not idle."""
    snapshot = machine(program("a", started_at=started_at, last_active=last_active))
    shown = seen(snapshot)
    assert shown.programs[0].idle_s == idle_s
    assert shown.people[0].idle_mib == (4308 if idle_s else 0)


def test_unknown_figures_stay_unknown_in_sums() -> None:
    """One slice of two that the driver does not measure makes the sum unknown, never smaller."""
    unknown = [SliceView(0, "GPU-0", 4308, None, busy=None)]
    known = [SliceView(0, "GPU-0", 4308, 0, busy=0.25)]
    shown = seen(machine(program("a", slices=unknown), program("b", slices=known)))
    assert [line.used_mib for line in shown.programs] == [None, 0]
    assert [line.busy for line in shown.programs] == [None, 0.25]
    (anna,) = shown.people
    assert (anna.used_mib, anna.busy) == (None, None)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"healthy": False, "free_mib": 0}, "takes no new programs: lost or unhealthy"),
        ({"cordoned": True, "free_mib": 0}, "its layout is to change: takes no new programs"),
        ({}, ""),
    ],
)
def test_card_says_why_it_takes_nothing(fields: dict[str, object], note: str) -> None:
    """Such a card adds nothing to what is free."""
    shown = seen(machine(cards=[card(0, **fields)]))
    assert shown.cards[0].note == note
    assert (shown.largest_mib == 0) == bool(note)


def test_lost_card_has_unknown_figures_and_a_reason() -> None:
    """Its figures are not 0."""
    (tile,) = seen(machine(cards=[card(0, healthy=False, used_mib=None, utilisation=None)])).cards
    assert (tile.used_mib, tile.busy) == (None, None)
    assert tile.readable == "the driver does not answer for this card"


@given(st.integers(1, 200_000), st.integers(0, 200_000), st.sampled_from([1, 256, 1024]))
def test_free_units_are_the_most_that_fit(total: int, free: int, unit: int) -> None:
    """One more would not fit, by the rounding of the ledger."""
    some: CardView = card(0, memory_mib=total, free_mib=min(free, total))
    units = free_units(some, unit)
    if total < unit:
        assert units == 0
        return
    assert units_to_mib(units, total, unit) <= min(free, total)
    assert units_to_mib(units + 1, total, unit) > min(free, total)


def test_long_queue_is_cut_and_counted() -> None:
    """A page shows the first 200."""
    waits: list[JobView] = [program(f"w{n}", position=n + 1) for n in range(250)]
    shown = seen(machine(*waits))
    assert (len(shown.waiting), shown.waiting_total) == (200, 250)
    assert shown.people[0].waiting == 250
