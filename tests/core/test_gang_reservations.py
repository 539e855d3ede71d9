"""Reservations of gangs: all members or none, counted once from the start until the last has started."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.gangs import (
    GangReservation,
    GangReservations,
    PlacementLimits,
    PlainPlacer,
    place_gang,
)
from fenka.core.inventory import Node
from fenka.core.ledger import Conflict, Ledger
from fenka.core.reasons import Unschedulable
from fenka.core.request import Memory, Request
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage
from tests.core.builders import GIB, T4_MIB, device, node, piece, placement, units, whole

A, B = node(T4_MIB, T4_MIB), node(T4_MIB, T4_MIB, name="b")
CARDS = [(name, index) for name in "ab" for index in (0, 1)]


def over(made: GangReservations) -> PlainPlacer:
    """Both nodes, with what is reserved."""
    return PlainPlacer([A, B], made.usage)


def plans(ledger: Ledger | None = None) -> GangReservations:
    """Over two nodes."""
    return GangReservations(ledger or Ledger([A, B]))


def members(count: int, request: Request) -> dict[str, Request]:
    """m0, m1, …."""
    return {f"m{number}": request for number in range(count)}


def expired(made: GangReservations, now: float) -> dict[str, frozenset[str]]:
    """End what has expired. Return its members that had started."""
    reservations = {gang: made.get(gang) for gang in made.overdue(now)}
    for gang in reservations:
        made.release(gang)
    return {gang: each.started for gang, each in reservations.items() if each}


def test_gang_reservation_counts_from_the_start() -> None:
    """Of two gangs that each need three of four cards one is planned, the other not at all."""
    made = plans()
    assert isinstance(
        made.reserve("first", members(3, whole()), "binpack", over(made), 60),
        GangReservation,
    )
    refused = made.reserve("second", members(3, whole()), "binpack", over(made), 60)
    assert isinstance(refused, Unschedulable)
    assert made.get("second") is None
    assert expired(made, 59.9) == {}
    assert expired(made, 60) == {"first": frozenset()}
    assert isinstance(
        made.reserve("second", members(3, whole()), "binpack", over(made), 120),
        GangReservation,
    )


def test_gang_reservation_is_unchanged_when_reserved_again() -> None:
    """Each member asks: they get the same answer, and what is held is counted once."""
    made = plans()
    first = made.reserve("g", members(2, units(14)), "binpack", over(made), 60)
    assert made.reserve("g", members(2, units(14)), "binpack", over(made), 90) is first
    assert made.usage.card_usage("a", device(0)).holders == 1


def test_started_member_leaves_the_reservation() -> None:
    """It is held once all the time; with the last one the plan ends."""
    ledger = Ledger([A, B])
    made = plans(ledger)
    plan = made.reserve("g", members(2, units(8)), "binpack", over(made), 60)
    assert isinstance(plan, GangReservation)
    for member, cards in (("m0", 0), ("m1", 1)):
        ledger.adopt(member, plan.placements[member])
        made.mark_started("g", member)
        made.mark_started("g", member) if made.get("g") else None
        assert [made.usage.card_usage("a", device(card)).holders for card in (0, 1)] == [1, 1], (
            cards
        )
    assert made.get("g") is None


def test_expired_reservation_returns_its_started_members() -> None:
    """The caller is told whom to evict: a gang is never left half."""
    made = plans()
    made.reserve("g", members(3, units(8)), "binpack", over(made), 60)
    made.mark_started("g", "m1")
    assert expired(made, 60) == {"g": frozenset({"m1"})}
    made.release("g")
    assert all(
        made.usage.card_usage(name, device(card, name)).holders == 0
        for name, card in product("ab", (0, 1))
        if (name, card) != ("a", 1)
    )


def check(
    nodes: tuple[Node, ...],
    gangs: dict[str, dict[str, Request]],
    ledger: Ledger,
    made: GangReservations,
) -> None:
    """Each gang holds all or nothing: what is planned and what runs, counted from scratch."""
    everything = Ledger(nodes)
    for entry_id, entry in ledger.entries.items():
        everything.adopt(entry_id, entry.placement)
    for gang, of_gang in gangs.items():
        plan = made.get(gang)
        waiting = (
            {}
            if plan is None
            else {k: v for k, v in plan.placements.items() if k not in plan.started}
        )
        for member, each in waiting.items():
            everything.adopt(f"{gang}/{member}", each)
        held = [it for it in everything.entries if it.startswith(f"{gang}/")]
        assert len(held) in (0, len(of_gang))
    for it in nodes:
        for card in it.cards:
            assert made.usage.card_usage(it.name, card.uuid) == everything.card_usage(
                it.name, card.uuid
            )


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_gangs_are_never_left_half_placed(data: st.DataObject) -> None:
    """Whatever comes first, starts, expires or ends: each gang holds all its cards or none, nothing is
    overcommitted, and when all that runs has ended whoever fits an empty cluster is planned."""
    nodes = (A, B)
    sizes = data.draw(
        st.lists(
            st.sampled_from([units(5), units(8), whole(), units(4, cards=2)]),
            min_size=2,
            max_size=4,
        )
    )
    gangs = {
        f"g{number}": members(data.draw(st.integers(1, 4)), size)
        for number, size in enumerate(sizes)
    }
    ledger, now = Ledger(nodes), 0.0
    made = GangReservations(ledger)
    for _ in range(data.draw(st.integers(5, 30))):
        now += data.draw(st.integers(0, 3))
        name = data.draw(st.sampled_from(sorted(gangs)))
        event = data.draw(st.sampled_from(["make", "start", "start", "expire", "end"]))
        running = [it for it in ledger.entries if it.startswith(f"{name}/")]
        if event == "make" and not running:
            made.reserve(name, gangs[name], "binpack", PlainPlacer(nodes, made.usage), now + 5)
        elif event == "start" and (plan := made.get(name)) is not None:
            member = data.draw(st.sampled_from(sorted(set(gangs[name]) - plan.started)))
            ledger.adopt(f"{name}/{member}", plan.placements[member])
            made.mark_started(name, member)
        elif event == "expire":
            for gang, started in expired(made, now).items():
                for member in started:
                    ledger.release(f"{gang}/{member}")
        elif event == "end" and len(running) == len(gangs[name]):
            for entry in running:
                ledger.release(entry)
        check(nodes, gangs, ledger, made)
    expired(made, now + 5)
    fresh = GangReservations(Ledger(nodes))
    for name, of_gang in gangs.items():
        again = fresh.reserve(name, of_gang, "binpack", PlainPlacer(nodes, fresh.usage), 1)
        assert isinstance(again, GangReservation) == isinstance(
            place_gang(EmptyUsage(), list(of_gang.values()), "binpack", nodes), tuple
        )
        fresh.release(name)


def test_the_ledger_agrees_that_parts_are_not_a_gang() -> None:
    """Two half gangs on one card would be a conflict in the ledger, so that the test above can see it."""
    ledger = Ledger([A])
    ledger.adopt("one", placement(piece(0, 10000)))
    with pytest.raises(Conflict):
        ledger.adopt("two", placement(piece(0, 10000)))


# ---- tables and stories ----


def used(made: GangReservations) -> list[int]:
    """Return the number of slices on a0, a1, b0 and b1."""
    return [made.usage.card_usage(name, device(index, name)).holders for name, index in CARDS]


def reserved(
    made: GangReservations,
    gang: str,
    count: int,
    request: Request,
    limits: PlacementLimits | None = None,
) -> str:
    """Reserve for equal members until 60. Return their cards, or the sentence of the rejection."""
    result = made.reserve(
        gang, members(count, request), "binpack", over(made), 60, limits or PlacementLimits()
    )
    if isinstance(result, Unschedulable):
        return result.sentence()
    return " ".join(
        f"{it.node}{part.card}" for it in result.placements.values() for part in it.slices
    )


@pytest.mark.parametrize(
    ("count", "request_", "limits", "expected", "slices"),
    [
        # 7 of 14 units: two a card
        (3, units(7), PlacementLimits(), "a0 a0 a1", [2, 1, 0, 0]),
        (3, units(8), PlacementLimits(), "a0 a1 b0", [1, 1, 1, 0]),
        (2, units(4, cards=2), PlacementLimits(), "a0 a1 a0 a1", [2, 2, 0, 0]),
        (2, whole(2), PlacementLimits(), "a0 a1 b0 b1", [1, 1, 1, 1]),
        # reserved for others: of a1 and b0 the lower index, then the fuller node; and not eligible
        (2, units(8), PlacementLimits(frozenset({device(0)})), "b0 b1", [0, 0, 1, 1]),
        (2, units(8), PlacementLimits(among=frozenset({"b"})), "b0 b1", [0, 0, 1, 1]),
        (
            3,
            units(8),
            PlacementLimits(among=frozenset({"b"})),
            "no GPU fits: 2 of 2 have too little memory; 2 of the gang's 3 would fit together",
            [0, 0, 0, 0],
        ),
        (
            4,
            units(8),
            PlacementLimits(frozenset({device(1, "b")})),
            "no GPU fits: 3 of 4 have too little memory, 1 is reserved for requests before it; "
            "3 of the gang's 4 would fit together",
            [0, 0, 0, 0],
        ),
        (
            2,
            units(15),
            PlacementLimits(),
            "no GPU fits: 4 of 4 have too little memory; 0 of the gang's 2 would fit together",
            [0, 0, 0, 0],
        ),
    ],
)
def test_reservation_holds_all_cards_at_once_or_none(
    count: int, request_: Request, limits: PlacementLimits, expected: str, slices: list[int]
) -> None:
    """Two nodes of two T4 each, on which nothing is held."""
    made = plans()
    assert reserved(made, "g", count, request_, limits) == expected
    assert used(made) == slices
    assert (made.get("g") is not None) == (sum(slices) > 0)
    made.release("g")
    assert used(made) == [0, 0, 0, 0]
    assert made.outstanding() == {}


def test_reservation_has_the_member_of_each_placement() -> None:
    """Members of different sizes, in the order in which they are given: 2, 14 and 8 units."""
    made = plans()
    sizes = {"small": units(2), "large": units(14), "middle": units(8)}
    plan = made.reserve("g", sizes, "binpack", over(made), 60)
    assert isinstance(plan, GangReservation)
    # 15079 * 2 // 14 = 2154, 15079 * 8 // 14 = 8616
    assert {name: it.slices for name, it in plan.placements.items()} == {
        "small": (piece(0, 2154),),
        "large": (piece(1, T4_MIB),),
        "middle": (piece(0, 8616),),
    }
    assert made.outstanding() == {"g": tuple(plan.placements.values())}
    assert made.usage.card_usage("a", device(0)) == CardUsage(10770, 0, 2, 0)


def test_host_is_reserved_with_the_cards() -> None:
    """4 cores and 8000 MiB: two members of 2 cores and 3000 MiB leave no core for a third."""
    host = replace(A, cpu_milli=4000, memory_mib=8000)
    made = GangReservations(Ledger([host]))
    placer = PlainPlacer([host], made.usage)
    member = Request(Memory(1, GIB), cpu_milli=2000, host_memory_mib=3000)
    plan = made.reserve("g", members(2, member), "binpack", placer, 60)
    assert isinstance(plan, GangReservation)
    assert made.usage.host_usage("a") == (4000, 6000)
    refused = made.reserve("h", members(1, member), "binpack", placer, 60)
    assert isinstance(refused, Unschedulable)
    assert refused.sentence() == (
        "no GPU fits: 2 of 2 have too little CPU; 0 of the gang's 1 would fit together"
    )
    made.mark_started("g", "m0")
    assert made.usage.host_usage("a") == (2000, 3000)


def test_story_of_two_gangs_of_which_one_is_late() -> None:
    """The first starts one of its two and expires at 60; the second is planned on what it leaves."""
    ledger = Ledger([A, B])
    made = plans(ledger)
    assert reserved(made, "first", 2, whole(2)) == "a0 a1 b0 b1"
    assert reserved(made, "second", 1, units(1)).startswith("no GPU fits: 4 of 4 are taken whole")
    plan = made.get("first")
    assert plan is not None
    ledger.adopt("first/m1", plan.placements["m1"])
    made.mark_started("first", "m1")
    plan = made.get("first")
    assert plan is not None
    assert plan.started == {"m1"}
    assert [it.node for it in plan.outstanding] == ["a"]
    assert made.outstanding() == {"first": plan.outstanding}
    # Reserved again it is the same plan, with the old end.
    assert made.reserve("first", members(2, whole(2)), "binpack", over(made), 999) == plan
    assert (made.overdue(59.9), made.overdue(60)) == ([], ["first"])
    made.release("first")
    # m1 still runs on b.
    assert used(made) == [0, 0, 1, 1]
    assert reserved(made, "second", 2, units(14)) == "a0 a1"
    ledger.release("first/m1")
    assert used(made) == [1, 1, 0, 0]
    # The first comes again, as a whole, and has to wait for the second.
    assert reserved(made, "first", 2, whole(2)).endswith("1 of the gang's 2 would fit together")
    made.release("second")
    assert reserved(made, "first", 2, whole(2)) == "a0 a1 b0 b1"


def test_overdue_gangs_are_those_whose_time_is_over() -> None:
    """Each has an end of its own, and stays until it is released."""
    made = plans()
    for number, until in enumerate((30.0, 10.0, 20.0)):
        made.reserve(f"g{number}", members(1, units(2)), "binpack", over(made), until)
    assert made.overdue(9.9) == []
    assert made.overdue(10) == ["g1"]
    assert made.overdue(25) == ["g1", "g2"]
    made.release("g1")
    assert made.overdue(1e9) == ["g0", "g2"]
    assert used(made) == [2, 0, 0, 0]


def test_start_is_an_error_when_gang_or_member_is_unknown() -> None:
    """Nothing is released then."""
    made = plans()
    reserved(made, "g", 2, units(14))
    for gang, member in (("h", "m0"), ("g", "m2"), ("", "")):
        with pytest.raises(KeyError):
            made.mark_started(gang, member)
    assert used(made) == [1, 1, 0, 0]
    made.release("h")
    assert used(made) == [1, 1, 0, 0]


def test_member_counts_once_when_it_is_marked_twice() -> None:
    """An informer may report its start again."""
    made = plans()
    reserved(made, "g", 3, units(14))
    made.mark_started("g", "m1")
    made.mark_started("g", "m1")
    assert used(made) == [1, 0, 1, 0]
    assert made.usage.card_usage("a", device(1)) == NO_USAGE


def test_reservation_names_the_nodes_that_it_changes() -> None:
    """For whoever keeps columns of them."""
    made, changed = plans(), set[str]()
    made.usage.watch(changed)
    reserved(made, "g", 3, units(8))
    assert changed == {"a", "b"}
    changed.clear()
    made.mark_started("g", "m2")
    assert changed == {"b"}
    changed.clear()
    made.release("g")
    assert changed == {"a"}
