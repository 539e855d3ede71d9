"""Together or not at all: the search, and plans that hold whole or not."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import Policy, place
from fenka.core.gangs import place_gang
from fenka.core.inventory import Node
from fenka.core.ledger import Ledger
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
