"""Together or not at all: the search, and plans that hold whole or not."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import Policy, place
from fenka.core.gangs import (
    NO_LIMITS,
    PlacementLimits,
    PlainPlacer,
    place_all,
    place_gang,
    request_size,
)
from fenka.core.inventory import Node
from fenka.core.ledger import Ledger
from fenka.core.reasons import Unschedulable
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import NO_USAGE, EmptyUsage, UsageOverlay
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
        "no GPU fits: 4 of 4 have too little memory; 4 of the gang's 5 would fit together"
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


@pytest.mark.parametrize(
    ("limit", "placed"),
    [
        # nothing is tried
        (0, False),
        # a few nodes and cards are not enough for five members
        (5, False),
        (2000, True),
    ],
)
def test_search_gives_up_when_it_has_tried_too_much(
    limit: int, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rejection may be wrong then; it is that of the members in their order."""
    monkeypatch.setattr("fenka.core.gangs.SEARCH_LIMIT", limit)
    five = [exact(each * 1000) for each in (6, 5, 3, 2, 2)]
    placer = PlainPlacer([node(7000, 11000)], EmptyUsage())
    found = place_all(placer, five, "binpack")
    assert isinstance(found, tuple) is placed
    if isinstance(found, Unschedulable):
        # 6 + 5 + 3 + 2 thousand of 18, and 2 are left: one on each card
        assert found.sentence() == (
            "no GPU fits: 2 of 2 have too little memory; 4 of the gang's 5 would fit together"
        )
    assert all(placer.card_usage("a", device(it)) == NO_USAGE for it in (0, 1))


@pytest.mark.parametrize(
    ("request_", "size"),
    [
        # whole cards, cards, MiB if a unit is 1 GiB, percent
        (whole(3), (3, 3, 0, 0)),
        (units(4, cards=2), (0, 2, 4096, 0)),
        (Request(Memory(4, 256), compute=7), (0, 1, 1024, 7)),
        # in the node's units, which are not known yet
        (Request(Memory(4, None)), (0, 1, 4096, 0)),
        (exact(4096, compute=100), (0, 1, 4096, 100)),
        (Request(compute=30, cards=2), (0, 2, 0, 30)),
    ],
)
def test_size_is_by_whole_cards_then_cards_memory_and_compute(
    request_: Request, size: tuple[int, int, int, int]
) -> None:
    """The largest is placed first where the given order fails."""
    assert request_size(request_) == size


@pytest.mark.parametrize(
    ("members", "reserved", "expected"),
    [
        # 8 + 6 on each of the cards that are left
        ([units(8), units(6), units(8), units(6)], "b1", ["a0", "a0", "a1", "a1"]),
        ([units(8)] * 3, "a0", ["a1", "b0", "b1"]),
        ([whole(2), units(1)], "a0", ["b0+b1", "a1"]),
        ([units(4, cards=2)] * 2, "b0", ["a0+a1", "a0+a1"]),
        ([Request(compute=60)] * 3, "b1", ["a0", "a1", "b0"]),
    ],
)
def test_no_member_is_on_a_reserved_card(
    members: list[Request], reserved: str, expected: list[str]
) -> None:
    """The others are where they would be anyway, or on the next card."""
    kept = {device(int(reserved[1:]), reserved[0])}
    assert where(place_gang(EmptyUsage(), members, "binpack", [B, A], kept)) == expected
    alone = place_gang(EmptyUsage(), members, "binpack", [A, B])
    assert len(where(alone)) == len(expected)


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_gang_is_placed_in_whatever_order_its_members_are_listed(policy: Policy) -> None:
    """Also one without members; an unknown policy is an error."""
    assert place_gang(EmptyUsage(), [], policy, [A]) == ()
    sizes = [units(3), units(9), units(5), units(11)]
    places = {
        tuple(sorted(where(place_gang(EmptyUsage(), order, policy, [A, B]))))
        for order in (sizes, sizes[::-1], [sizes[2], sizes[0], sizes[3], sizes[1]])
    }
    assert all(len(each) == 4 for each in places)
    with pytest.raises(KeyError, match="nonsense"):
        place_gang(EmptyUsage(), sizes, "nonsense", [A])


def test_rejection_is_at_once_when_the_largest_fits_nowhere_alone() -> None:
    """No other order is tried, and the reasons are those of the given one."""
    tried: list[Request] = []

    class Watched(PlainPlacer):
        def place(
            self, request: Request, policy: Policy, limits: PlacementLimits = NO_LIMITS
        ) -> Placement | Unschedulable:
            """Record, and place."""
            tried.append(request)
            return super().place(request, policy, limits)

    found = place_all(Watched([A], EmptyUsage()), [units(2), units(3), units(15)], "spread")
    assert isinstance(found, Unschedulable)
    assert found.hint == "2 of the gang's 3 would fit together"
    # in their order alone: no card has room for the largest
    assert tried == [units(2), units(3), units(15)]


@settings(deadline=None, max_examples=60)
@given(
    free=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    chance=st.randoms(use_true_random=False),
)
def test_whether_a_gang_fits_does_not_depend_on_the_order_of_its_members(
    free: list[int], sizes: list[int], chance: random.Random
) -> None:
    """Nor on that of the nodes: the search is exact for six members on three cards."""
    nodes = [node(each * 1000, name=f"n{number}") for number, each in enumerate(free)]
    gang = [exact(each * 1000) for each in sizes]
    first = place_gang(EmptyUsage(), gang, "binpack", nodes)
    chance.shuffle(gang)
    chance.shuffle(nodes)
    again = place_gang(EmptyUsage(), gang, "spread", nodes)
    assert isinstance(first, tuple) == isinstance(again, tuple)
    assert isinstance(first, tuple) == packs(sorted(sizes, reverse=True), free)


def packs(sizes: list[int], free: list[int]) -> bool:
    """Return whether all sizes have room, by trying every card for each."""
    if not sizes:
        return True
    return any(
        sizes[0] <= room and packs(sizes[1:], [*free[:at], room - sizes[0], *free[at + 1 :]])
        for at, room in enumerate(free)
    )
