"""Together or not at all: the search, and plans that hold whole or not."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import Policy, place
from fenka.core.gang_reservations import GangReservation, GangReservations
from fenka.core.gangs import PlainPlacer, place_gang
from fenka.core.inventory import Node
from fenka.core.ledger import Conflict, Ledger
from fenka.core.reasons import Unschedulable
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import EmptyUsage, UsageOverlay
from tests.core.builders import (
    GIB,
    T4_MIB,
    clusters,
    device,
    exact,
    holding,
    node,
    piece,
    placement,
    requests,
    units,
    whole,
)

SMALL = clusters(most_nodes=2, most_cards=3)
GANG = st.lists(requests(), min_size=1, max_size=4)
A, B = node(T4_MIB, T4_MIB), node(T4_MIB, T4_MIB, name="b")


def where(found: tuple[Placement, ...] | Unschedulable) -> list[str]:
    """a0: card 0 of node a."""
    assert not isinstance(found, Unschedulable), found.sentence()
    return ["+".join(f"{it.node}{piece.card}" for piece in it.slices) for it in found]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        # four halves of 7 of 14 units: two a card, the fullest node first
        ([units(7)] * 4, ["a0", "a0", "a1", "a1"]),
        # 8 + 8 > 14: one a card, over both nodes
        ([units(8)] * 4, ["a0", "a1", "b0", "b1"]),
        # in their order the small ones come first: 6 + 6 on a0, then 8 + 6 on the next
        ([units(6), units(6), units(8), units(8)], ["a0", "a0", "a1", "b0"]),
        # a whole pair has a node for itself
        ([units(2), whole(2), whole()], ["a0", "b0+b1", "a1"]),
        ([whole(), whole(2), units(2)], ["a0", "b0+b1", "a1"]),
    ],
)
def test_gang_is_placed_over_two_nodes(members: list[Request], expected: list[str]) -> None:
    """Two nodes of two T4 each."""
    assert where(place_gang(EmptyUsage(), members, "binpack", [A, B])) == expected


def test_gang_is_placed_by_binpack_when_its_policy_fails() -> None:
    """10000 and 12000 MiB free, 5000 · 2 and 4000 · 3: `spread` leaves 1000 and 3000 for the last 4000.

    Packed, the largest first, they fit: 5000 + 5000 on the first, 4000 · 3 on the second.
    """
    members = [exact(5000)] * 2 + [exact(4000)] * 3
    found = place_gang(EmptyUsage(), members, "spread", [node(10000, 12000)])
    assert where(found) == ["a0", "a0", "a1", "a1", "a1"]


def test_gang_is_placed_by_search_when_no_order_works() -> None:
    """7000 and 11000 MiB free, 6 + 5 + 3 + 2 + 2 thousand.

    Packed, the largest first: 6 → 7 (1 left), 5 → 11 (6), 3 → 6 (3), 2 → 3 (1), 2 → no.
    There is 5 + 2 on the first and 6 + 3 + 2 on the second.
    """
    members = [exact(each * 1000) for each in (6, 5, 3, 2, 2)]
    found = place_gang(EmptyUsage(), members, "binpack", [node(7000, 11000)])
    assert where(found) == ["a1", "a0", "a1", "a0", "a1"]


def test_equal_members_may_share_a_card() -> None:
    """8000 and 13000 MiB free, 5 + 4 + 4 + 4 + 4 thousand: 5 → 8 and all is lost; 4 + 4 | 5 + 4 + 4."""
    members = [exact(5000)] + [exact(4000)] * 4
    found = place_gang(EmptyUsage(), members, "binpack", [node(8000, 13000)])
    assert where(found) == ["a1", "a0", "a0", "a1", "a1"]


def test_gang_rejection_says_how_many_members_would_fit() -> None:
    """The reasons are those of the first that found no place."""
    found = place_gang(EmptyUsage(), [units(8)] * 5, "binpack", [A, B])
    assert isinstance(found, Unschedulable)
    assert found.sentence() == (
        "0/4 GPUs fit: 4 too little memory; 4 of the gang's 5 would fit together"
    )


def possible(view: UsageOverlay, members: list[Request], nodes: tuple[Node, ...]) -> bool:
    """By trying every choice of cards for every member, with the ledger as the judge."""
    if not members:
        return True
    first, *rest = members
    for each in nodes:
        for cards in combinations(each.cards, first.cards):
            alone = replace(each, cards=cards)
            found = place(view, first, "binpack", [alone])
            if isinstance(found, Placement):
                view.add(found)
                done = possible(view, rest, nodes)
                view.remove(found)
                if done:
                    return True
    return False


@settings(deadline=None, max_examples=150)
@given(
    nodes=SMALL,
    held=st.lists(requests(), max_size=4),
    members=GANG,
    policy=st.sampled_from(["binpack", "spread"]),
)
def test_a_gang_of_four_is_placed_exactly_when_it_can_be(
    nodes: tuple[Node, ...], held: list[Request], members: list[Request], policy: Policy
) -> None:
    """All at once without overcommitting, as the ledger sees it; and a no is true."""
    ledger = Ledger(nodes)
    for number, request in enumerate(held):
        found = place(ledger, request, "spread", nodes)
        if isinstance(found, Placement):
            ledger.assume(f"held{number}", found, 1)
    plan = place_gang(ledger, members, policy, nodes)
    assert isinstance(plan, tuple) == possible(UsageOverlay(ledger), members, nodes)
    if isinstance(plan, tuple):
        assert [len(it.slices) for it in plan] == [request.cards for request in members]
        for number, it in enumerate(plan):
            ledger.assume(f"member{number}", it, 1)


def test_overlay_removes_placements() -> None:
    """What is taken away was in the view under it."""
    held = placement(piece(0, 4000, 20))
    stacked = UsageOverlay(holding(held))
    stacked.remove(held)
    stacked.add(placement(piece(1, 100)))
    assert stacked.card_usage("a", device(0)) == EmptyUsage().card_usage("a", device(0))
    assert stacked.card_usage("a", device(1)).memory_mib == 100


# ---- plans ----


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


def test_memory_of_two_units_may_be_mixed_in_a_gang() -> None:
    """Members may be unequal in every way."""
    mixed = [Request(Memory(24, 256), compute=40), Request(Memory(4, GIB)), Request(compute=60)]
    assert where(place_gang(EmptyUsage(), mixed, "binpack", [A])) == ["a0", "a0", "a0"]


def test_gang_spans_nodes_of_different_units() -> None:
    """12 units are 12924 MiB of a T4 in GiB, and 3119 MiB of one in units of 256 MiB: 15079 * 12 // 58."""
    coarse, fine = node(T4_MIB, name="a"), replace(node(T4_MIB, name="b"), unit_mib=256)
    member = Request(Memory(12, None))
    placements = place_gang(EmptyUsage(), [member] * 5, "binpack", (coarse, fine))
    assert isinstance(placements, tuple)
    assert sorted((it.node, it.slices[0].memory_mib) for it in placements) == [
        ("a", 12924),
        *[("b", 3119)] * 4,
    ]
    assert isinstance(
        place_gang(EmptyUsage(), [member] * 6, "binpack", (coarse, fine)), Unschedulable
    )
