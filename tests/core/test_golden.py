"""What the systems that fenka replaces decided, and the scenarios' pictures, decided by the core."""

import pytest
from core_kit import GIB, T4_MIB, V100_MIB, exact, holding, node, piece, placement, units, whole

from fenka.core.cards import Card, Node
from fenka.core.evaluate import place
from fenka.core.ledger import Ledger, Tally
from fenka.core.reasons import Rejected
from fenka.core.requests import Memory, Placement, Request, Slice
from fenka.core.units import card_units, mib_to_units, percent

SIXTEEN = 16 * GIB


def placed(view: Tally | Ledger, request: Request, *nodes: Node) -> Placement:
    """The placement, which there must be."""
    verdict = place(view, request, "binpack", nodes)
    assert isinstance(verdict, Placement), verdict
    return verdict


def in_turn(view: Tally, requests: list[Request], *nodes: Node) -> list[tuple[str, int]]:
    """Node and first card of each request, each placed on what the ones before it leave."""
    found = []
    for request in requests:
        verdict = placed(view, request, *nodes)
        view.add(verdict)
        found.append((verdict.node, verdict.slices[0].card))
    return found


def allocated(view: Tally, *nodes: Node) -> list[float]:
    """Units held of the first card of each node, as the screens show them."""
    return [
        mib_to_units(view.used(each.name, 0).memory_mib, each.cards[0].memory_mib, GIB)
        for each in nodes
    ]


# gpushare's extender, 4 cards of 16 units.
USED_4_8_12_0 = (piece(0, 4 * GIB), piece(1, 8 * GIB), piece(2, 12 * GIB))


@pytest.mark.parametrize(
    ("held", "amounts", "cards"),
    [
        # free 12, 8, 4, 16: the smallest that is at least 8 is card 1, now 12, 0, 4, 16;
        # at least 12 is card 0, now 0, 0, 4, 16; at least 4 is card 2
        (USED_4_8_12_0, [8, 12, 4], [1, 0, 2]),
        # free 16, 16, 16, 16: the tie goes to card 0, which then has 12, the smallest
        ((), [4, 4], [0, 0]),
        # 4 x 4 fill card 0, the fifth opens card 1
        ((), [4, 4, 4, 4, 4], [0, 0, 0, 0, 1]),
        # free 4, 16, 16, 16: 4 fits exactly; the rest goes on with card 1
        ((piece(0, 12 * GIB),), [4, 4], [0, 1]),
    ],
)
def test_gpushare_chooses_the_same_card(
    held: tuple[Slice, ...], amounts: list[int], cards: list[int]
) -> None:
    """The card with the smallest sufficient free memory; ties to the lowest index."""
    view = holding(placement(*held))
    four = node(SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN)
    assert in_turn(view, [units(amount) for amount in amounts], four) == [
        ("a", card) for card in cards
    ]


def test_gpushare_design_example() -> None:
    """Its design page: free 12207, 8138, 4069, 16276 MiB; 8138 fits exactly on card 1."""
    # 16276 - 12207 = 4069; 16276 - 8138 = 8138; 16276 - 4069 = 12207
    view = holding(placement(piece(0, 4069), piece(1, 8138), piece(2, 12207)))
    cards = node(16276, 16276, 16276, 16276)
    assert placed(view, exact(8138), cards).slices == (piece(1, 8138),)


def test_gpushare_does_not_add_up_cards() -> None:
    """Its design page again: 8138 MiB free in two halves of 4069 are not 8138 on one card."""
    # 16276 - 12207 = 4069 on each of the two cards
    view = holding(placement(piece(0, 12207), piece(1, 12207)))
    verdict = place(view, exact(8138), "binpack", [node(16276, 16276)])
    assert isinstance(verdict, Rejected)
    assert verdict.sentence() == "0/2 GPUs fit: 2 too little memory"


def test_an_overcommitted_card_has_nothing_free() -> None:
    """gpushare's defect (a): 20 of 16 units used made 16 - 20 a huge number, and 100 units fitted."""
    view = holding(placement(piece(0, 20 * GIB)))
    for amount in (1, 16):
        verdict = place(view, units(amount), "binpack", [node(SIXTEEN)])
        assert isinstance(verdict, Rejected)
        # max(16 - 20, 0) = 0
        assert [reason.available for reason in verdict.reasons] == [0]


def test_s1_three_notebooks_and_a_fourth() -> None:
    """S1: 4 + 4 + 4 of a T4's 14 units fit, a fourth 4 does not, and 2 still do."""
    t4 = node(T4_MIB)
    view = holding()
    assert in_turn(view, [units(4)] * 3, t4) == [("a", 0)] * 3
    # 3 x 4308 = 12924; 15079 - 12924 = 2155 < 4308
    assert view.used("a", 0).memory_mib == 12924
    refused = place(view, units(4), "binpack", [t4])
    assert isinstance(refused, Rejected)
    assert [(reason.needed, reason.available) for reason in refused.reasons] == [(4308, 2155)]
    # 15079 * 2 // 14 = 2154
    assert placed(view, units(2), t4).slices == (piece(0, 2154),)
    view.remove(placement(piece(0, 4308)))
    assert placed(view, units(4), t4).slices == (piece(0, 4308),)


def test_s2_binpack_on_two_nodes() -> None:
    """S2: four steps on two T4 nodes; the article's 04 and 05 are b and a here, which is immaterial."""
    nodes = node(T4_MIB, name="a"), node(T4_MIB, name="b")
    view = holding()
    steps = []
    for amounts in ([2], [8, 8], [2], [5]):
        in_turn(view, [units(amount) for amount in amounts], *nodes)
        first, second = allocated(view, *nodes)
        steps.append((second, first, percent(first + second, 28)))
    assert steps == [
        # 2 goes to the first by name: 2 / 28 = 7 %
        (0, 2, 7),
        # 8 to the fuller, 2 + 8 = 10; the other 8 has room only on the other: 18 / 28 = 64 %
        (8, 10, 64),
        # 14 - 10 = 4 are enough for 2, and that one is the fuller: 20 / 28 = 71 %
        (8, 12, 71),
        # 14 - 12 = 2 are not enough for 5, 14 - 8 = 6 are: 25 / 28 = 89 %
        (13, 12, 89),
    ]


def test_s5_two_halves_share_the_first_card() -> None:
    """S5.1: two jobs of 8065 MiB on two V100 of 16130: both land on card 0, which is then full."""
    cards = node(V100_MIB, V100_MIB)
    view = holding()
    # 2 x 8065 = 16130
    assert in_turn(view, [exact(8065)] * 3, cards) == [("a", 0), ("a", 0), ("a", 1)]


def test_s5_compute_and_memory() -> None:
    """S5.2: job1 has a card alone; job2 with 40 % and 24 x 256 MiB and job3 with 30 % share the other."""
    cards = node(SIXTEEN, SIXTEEN)
    shares = [Request(Memory(24, 256), compute=percentage) for percentage in (40, 30)]
    view = holding()
    assert in_turn(view, [whole(), *shares], cards) == [("a", 0), ("a", 1), ("a", 1)]
    # 2 x 24 x 256 = 12288 MiB, 40 + 30 = 70 %
    used = view.used("a", 1)
    assert (used.memory_mib, used.compute, used.holders) == (12288, 70, 2)


def test_ack_shares_of_several_cards() -> None:
    """Contract 1.6: gpu-mem 8 with gpu-count 2 is 8 / 2 = 4 units on each of 2 cards of one node."""
    cards = node(SIXTEEN, SIXTEEN, SIXTEEN)
    # free 12, 16, 4: the two smallest that are at least 4 are cards 2 and 0
    view = holding(placement(piece(0, 4 * GIB), piece(2, 12 * GIB)))
    verdict = placed(view, units(8 // 2, cards=2), cards)
    assert verdict.slices == (piece(0, 4 * GIB), piece(2, 4 * GIB))


def test_unequal_cards_count_their_own_units() -> None:
    """gpushare's defect (d): with cards of 7 and 14 units, 8 units fit only on the second."""
    # 7611 // 1024 = 7 and 15079 // 1024 = 14; 15079 * 8 // 14 = 8616
    cards = node(7611, T4_MIB)
    assert [card_units(each.memory_mib, GIB) for each in cards.cards] == [7, 14]
    assert placed(holding(), units(8), cards).slices == (piece(1, 8616),)
    # both fit 4 units: the smaller card is the tighter, 7611 * 4 // 7 = 4349
    assert placed(holding(), units(4), cards).slices == (piece(0, 4349),)


def test_cards_of_a_node_may_change() -> None:
    """gpushare's defect (b): a node that shrank from 4 cards to 2 has 2 in the next decision."""
    four = node(SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN)
    two = Node("a", four.cards[:2])
    verdict = place(holding(), units(1, cards=3), "binpack", [two])
    assert isinstance(verdict, Rejected)
    assert {reason.card for reason in verdict.reasons} == {0, 1}


def test_a_card_index_is_not_its_place() -> None:
    """A card that fell off the bus leaves a gap: index 2 stays 2."""
    cards = (Card(0, "GPU-a-0", "T4", T4_MIB, healthy=False), Card(2, "GPU-a-2", "T4", T4_MIB))
    assert placed(holding(), units(4), Node("a", cards)).slices == (piece(2, 4308),)
