"""Cards that belong together: distances, the best set of cards, and the filter."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.backfill import Timeline
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columns import Columns
from fenka.core.evaluate import Fit, evaluate, never_fits, place
from fenka.core.gangs import PlainPlacer, place_gang
from fenka.core.inventory import Card, Distance, Links, Node, matrix_of
from fenka.core.queue import Allocation
from fenka.core.reasons import ReasonCode, Unschedulable
from fenka.core.request import InvalidRequest, Placement, Request
from fenka.core.topology.card_links import choose, cost_of, ring
from fenka.core.usage import EmptyUsage
from tests.core.builders import (
    T4_MIB,
    device,
    holding,
    linked,
    links,
    node,
    piece,
    placement,
    units,
    whole,
)

PAIRS = linked(
    node(*[T4_MIB] * 8),
    [
        "01446666",
        "10446666",
        "44016666",
        "44106666",
        "66660144",
        "66661044",
        "66664401",
        "66664410",
    ],
)
"""Two sockets with four cards each, of which two and two have an NVLink bridge."""
MESH = linked(
    node(*[T4_MIB] * 8),
    [
        "01111666",
        "10116166",
        "11016616",
        "11106661",
        "16660111",
        "61661011",
        "66161101",
        "66611110",
    ],
)
"""NVLink among four and four cards, and between the cards i and i + 4."""


def taken(*indexes: int, name: str = "a") -> Placement:
    """These cards, whole."""
    pieces = [piece(index, T4_MIB, 100, name=name) for index in indexes]
    return placement(*pieces, name=name, whole=True)


def cards_of(where: Node, request: Request, *held: int, policy: str = "binpack") -> list[int]:
    """The indexes that the request gets when some cards are taken; none if it does not fit."""
    verdict = place(holding(taken(*held)), request, policy, (where,))
    return [it.card for it in verdict.slices] if isinstance(verdict, Placement) else []


@pytest.mark.parametrize(
    ("where", "count", "held", "cards"),
    [
        # All pairs with a bridge are equal, and the cards in order.
        (PAIRS, 2, (), [0, 1]),
        # Card 1 has lost its pair.
        (PAIRS, 2, (0,), [2, 3]),
        # 1 with 2 or 3 is 4 apart, 1 with 4 is 6.
        (PAIRS, 2, (0, 2, 5, 7), [1, 3]),
        # Only 6 and 7 are a pair, and 5 is 4 + 4 from them: 1 + 4 + 4. 1 and 3 with any other are more.
        (PAIRS, 3, (0, 2, 4), [5, 6, 7]),
        # Two pairs of a socket: 1 + 1 + 4 x 4 = 18, two of two sockets: 1 + 1 + 4 x 6 = 26.
        (PAIRS, 4, (0,), [4, 5, 6, 7]),
        # Six cards are three pairs.
        (PAIRS, 6, (3,), [0, 1, 4, 5, 6, 7]),
        (PAIRS, 8, (), [0, 1, 2, 3, 4, 5, 6, 7]),
        # Four of a side have 6 links; 0 1 4 5 would have 4.
        (MESH, 4, (0,), [4, 5, 6, 7]),
        # With 0 and 7 taken, 1 2 3 have 3 links among each other, and 4 has none to them; 5 has one to 1.
        (MESH, 4, (0, 7), [1, 2, 3, 5]),
        (MESH, 2, (1, 2, 3, 5, 6, 7), [0, 4]),
    ],
)
def test_cards_are_those_that_belong_together(
    where: Node, count: int, held: tuple[int, ...], cards: list[int]
) -> None:
    """With the least cost; the sums are in the table."""
    assert cards_of(where, whole(count), *held) == cards


def test_rest_stays_connected_when_sets_are_equal() -> None:
    """One more card beside a pair: 2 has no partner, as 3 is taken; 4 to 7 keep both pairs."""
    assert cards_of(PAIRS, whole(3), 3) == [0, 1, 2]
    # The free cards are 1, 2, 3, 5, 6, 7. Both {1 2 3} and {5 6 7} cost 1 + 4 + 4, and leave a pair.
    assert cards_of(PAIRS, whole(3), 0, 4) == [1, 2, 3]
    # Of 0 1 2 3 with 4 5 6 taken: the pair 0 1 with 2 breaks the pair 2 3, as all others do.
    assert cards_of(PAIRS, whole(3), 4, 5, 6) == [0, 1, 2]


def test_policy_orders_equal_sets() -> None:
    """Binpack takes the fuller pair, spread the emptier one."""
    held = holding(placement(piece(2, 1000), piece(3, 1000)))
    for policy, cards in (("binpack", [2, 3]), ("spread", [0, 1])):
        verdict = place(held, units(4, cards=2), policy, (PAIRS,))
        assert isinstance(verdict, Placement)
        assert [it.card for it in verdict.slices] == cards


def test_cards_are_in_order_when_distances_are_unknown() -> None:
    """As before distances were read, and on nodes of releases that do not publish them."""
    assert cards_of(replace(PAIRS, links=None), whole(2), 0) == [1, 2]


def test_instances_are_where_their_card_is() -> None:
    """Each row has the distances of the cards that the devices are on."""
    parts = tuple(
        Card(index, device(index * 10 + start), "", 1000, parent=device(index), start=start)
        for index, start in ((0, 0), (0, 4), (2, 0))
    )
    assert replace(PAIRS, cards=parts).distances == bytes([0, 0, 4, 0, 0, 4, 4, 4, 0])


def test_rows_must_be_complete() -> None:
    """Otherwise positions would be those of other cards."""
    with pytest.raises(ValueError, match="a row of distances is missing"):
        Links(("a", "b"), bytes(3))


# ---- required ----


@pytest.mark.parametrize(
    ("where", "count", "held", "cards"),
    [
        (PAIRS, 2, (0, 2), [4, 5]),
        (MESH, 4, (), [0, 1, 2, 3]),
        # A side has three free cards.
        (MESH, 4, (0, 7), []),
        (MESH, 3, (0, 7), [1, 2, 3]),
        (PAIRS, 2, (0, 2, 4, 6), []),
        (PAIRS, 3, (), []),
        (replace(PAIRS, links=None), 2, (), []),
    ],
)
def test_required_links_are_a_filter(
    where: Node, count: int, held: tuple[int, ...], cards: list[int]
) -> None:
    """Each two of the cards must have NVLink."""
    assert cards_of(where, replace(whole(count), linked=True), *held) == cards


def test_sentence_names_the_missing_links() -> None:
    """0 2 4 6 are taken; the four others fit by themselves, and no two of them are linked."""
    request = replace(whole(2), linked=True)
    verdict = place(holding(taken(0, 2, 4, 6)), request, "binpack", (PAIRS,))
    assert isinstance(verdict, Unschedulable)
    assert verdict.sentence() == (
        "no GPU fits: 4 of 8 are taken whole, 4 are without NVLink to enough others"
    )
    (reason, *_) = [it for it in verdict.reasons if it.code is ReasonCode.NOT_LINKED]
    assert (reason.needed, reason.available) == (2, 0)


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        (PAIRS, "NVLink connects no more than 2 cards that fit, ask for fewer"),
        (
            replace(PAIRS, links=None),
            "no node is known to have cards with NVLink, leave out the required topology",
        ),
    ],
)
def test_hint_says_how_many_cards_are_linked(where: Node, hint: str) -> None:
    """PAIRS has two and two."""
    refused = never_fits(replace(whole(3), linked=True), (where,))
    assert refused is not None
    assert refused.hint == hint


def test_instances_cannot_be_required_to_have_nvlink() -> None:
    """They have none."""
    with pytest.raises(InvalidRequest, match="MIG instances have no NVLink"):
        Request(whole=True, instance="1g.5gb", cards=2, linked=True)


def test_reservation_is_of_linked_cards() -> None:
    """Cards 1 and 2 are free first, at 10; 3 follows at 20, and is linked to 2."""
    ends = {0: 30.0, 1: 10.0, 2: 10.0, 3: 20.0, **dict.fromkeys(range(4, 8), 50.0)}
    held = [Allocation(taken(index), end) for index, end in ends.items()]
    timeline = Timeline((PAIRS,), {"a": held}, 0.0)
    start = timeline.earliest(replace(whole(2), linked=True))
    assert start is not None
    assert (start.at, [it.index for it in start.cards]) == (20.0, [2, 3])
    start = timeline.earliest(whole(2))
    assert start is not None
    assert (start.at, [it.index for it in start.cards]) == (10.0, [1, 2])


def test_gang_search_finds_linked_cards_for_all() -> None:
    """Three members take a pair each. Binpack would give the single card 0 first, and leave two pairs."""
    pair = replace(whole(2), linked=True)
    placed = place_gang(holding(taken(6, 7)), [whole(), pair, pair, whole()], "binpack", (PAIRS,))
    assert not isinstance(placed, Unschedulable)
    assert sorted(sorted(it.card for it in each.slices) for each in placed[1:3]) in (
        [[0, 1], [2, 3]],
        [[2, 3], [4, 5]],
        [[0, 1], [4, 5]],
    )


# ---- ranks ----


@pytest.mark.parametrize(
    ("where", "cards", "order"),
    [
        # 0 1 4 5 are two pairs: 1 + 6 + 1 + 6, and not 6 + 1 + 6 + 1.
        (PAIRS, (0, 1, 4, 5), (0, 1, 4, 5)),
        (PAIRS, (0, 4, 1, 5), (0, 1, 5, 4)),
        # 3 has no link to 4, but to 7: eight links.
        (MESH, tuple(range(8)), (0, 1, 2, 3, 7, 6, 5, 4)),
        (MESH, (1, 6, 2), (1, 2, 6)),
    ],
)
def test_ring_has_the_least_cost(
    where: Node, cards: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """From the first card on, in the direction of the closer neighbours."""
    assert where.distances is not None
    found = ring(where.distances, cards)
    assert cost_of_ring(where, found) == cost_of_ring(where, order)
    assert found[0] == cards[0]
    assert sorted(found) == sorted(cards)


def cost_of_ring(where: Node, cards: tuple[int, ...]) -> list[int]:
    """The distances from each card to the next."""
    assert where.links
    uuids = [where.cards[index].uuid for index in (*cards, cards[0])]
    return [where.links.distance(*pair) for pair in pairwise(uuids)]


def test_ring_of_many_cards_takes_the_nearest() -> None:
    """Of nine cards in a row, of which neighbours are linked, but for two."""
    distances = bytes(
        0 if one == other else 1 if {one, other} in ({0, 8}, {8, 3}) or abs(one - other) == 1 else 6
        for one in range(9)
        for other in range(9)
    )
    assert ring(distances, (0, 8, 3, 1, 2, 4, 5, 6, 7)) == (0, 8, 3, 2, 1, 4, 5, 6, 7)


def test_ranks_of_a_gang_follow_the_links() -> None:
    """On the mesh 1 2 3 7 6 5 is a ring of links; the two other members follow on the other node."""
    nodes = (MESH, linked(node(*[T4_MIB] * 2, name="b"), ["01", "10"]))
    placed = place_gang(holding(taken(0, 4)), [whole()] * 8, "binpack", nodes)
    assert not isinstance(placed, Unschedulable)
    ranks = [(it.node, it.slices[0].card) for it in placed]
    assert ranks == [("a", card) for card in (1, 2, 3, 7, 6, 5)] + [("b", 0), ("b", 1)]


def test_ranks_of_other_sizes_stay_where_they_are() -> None:
    """Only equal requests are exchanged: the second member has two cards."""
    placed = place_gang(EmptyUsage(), [whole(), whole(2), whole()], "binpack", (PAIRS,))
    assert not isinstance(placed, Unschedulable)
    assert [[it.card for it in each.slices] for each in placed] == [[0], [2, 3], [1]]


# ---- between nodes ----


def pairs_named(name: str) -> Node:
    """Four cards of this node, in two pairs."""
    return linked(node(*[T4_MIB] * 4, name=name), ["0166", "1066", "6601", "6610"])


@pytest.mark.parametrize(
    ("near", "held", "where"),
    [
        # The fuller node has 1 and 3, at 6; the emptier one has pairs.
        (False, {"a": (0, 2), "b": ()}, "a"),
        (True, {"a": (0, 2), "b": ()}, "b"),
        # Both have a pair: the policy decides.
        (True, {"a": (0,), "b": ()}, "a"),
        # Unknown distances count as the longest.
        (True, {"c": (0, 1), "b": (0,)}, "b"),
        (False, {"c": (0, 1), "b": (0,)}, "c"),
    ],
)
@pytest.mark.parametrize("columnar", [False, True])
def test_connections_choose_the_node_when_preferred(
    near: bool, held: dict[str, tuple[int, ...]], where: str, columnar: bool
) -> None:
    """Otherwise the policy does, and connections choose the cards on it."""
    nodes = [
        pairs_named(name) if name != "c" else replace(pairs_named(name), links=None)
        for name in held
    ]
    view = holding(*(taken(*indexes, name=name) for name, indexes in held.items()))
    placer = ColumnarPlacer(Columns(nodes, view)) if columnar else PlainPlacer(nodes, view)
    placed = placer.place(replace(whole(2), near=near), "binpack")
    assert isinstance(placed, Placement)
    assert placed.node == where


# ---- any distances ----


@st.composite
def linked_nodes(draw: st.DrawFn) -> Node:
    """Draw up to seven equal cards with any distances."""
    made = node(*[T4_MIB] * draw(st.integers(2, 7)))
    return replace(made, links=draw(links(made)))


def nvlink_pairs(where: Node, cards: list[int]) -> int:
    """The number of pairs with NVLink."""
    assert where.links
    pairs = combinations((where.cards[index].uuid for index in cards), 2)
    return sum(where.links.distance(*pair) == Distance.NVLINK for pair in pairs)


@settings(deadline=None)
@given(where=linked_nodes(), data=st.data())
def test_empty_node_gives_no_fewer_linked_pairs_than_first_fit(
    where: Node, data: st.DataObject
) -> None:
    """And no set of as many cards costs less."""
    count = data.draw(st.integers(1, len(where.cards)))
    cards = cards_of(where, whole(count))
    assert nvlink_pairs(where, cards) >= nvlink_pairs(where, list(range(count)))
    distances = where.distances
    assert distances is not None
    costs = [cost_of(distances, it) for it in combinations(range(len(where.cards)), count)]
    assert cost_of(distances, cards) == min(costs)


@settings(deadline=None)
@given(where=linked_nodes(), data=st.data())
def test_required_is_refused_only_if_no_set_is_linked(where: Node, data: st.DataObject) -> None:
    """By all sets."""
    count = data.draw(st.integers(2, len(where.cards)))
    (verdict,) = evaluate(EmptyUsage(), replace(whole(count), linked=True), "binpack", (where,))
    most = max(nvlink_pairs(where, list(it)) for it in combinations(range(len(where.cards)), count))
    assert isinstance(verdict, Fit) == (most == count * (count - 1) // 2)


def test_sets_of_many_cards_are_those_around_each_card() -> None:
    """6 of 21 cards can be chosen in 54,264 ways. A whole group has 15 links, the part of one has 3."""
    distances = bytes(
        0 if one == other else 1 if one // 6 == other // 6 else 6
        for one in range(24)
        for other in range(24)
    )
    chosen = choose(distances, tuple(range(3, 24)), 6)
    assert chosen == tuple(range(6, 12))
    assert choose(distances, tuple(range(24)), 7, linked=True) is None


def test_many_devices_have_no_distances() -> None:
    """A set of them is no number of 64 bits."""
    devices = tuple(map(str, range(63)))
    assert matrix_of(Links(devices, bytes(63 * 63)), devices) is None
