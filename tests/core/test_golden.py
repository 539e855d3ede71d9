"""Decisions of the systems that fenka replaces, and the scenarios' screens, reproduced by the core."""

from fenka.core.evaluate import place
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.ledger import Ledger
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.units import mib_to_units, percent
from fenka.core.usage import UsageTotals
from tests.core.builders import GIB, T4_MIB, device, holding, node, piece, placement, units

SIXTEEN = 16 * GIB


def placed(view: UsageTotals | Ledger, request: Request, *nodes: Node) -> Placement:
    """Return the placement, which must exist."""
    verdict = place(view, request, "binpack", nodes)
    assert isinstance(verdict, Placement), verdict
    return verdict


def in_turn(view: UsageTotals, requests: list[Request], *nodes: Node) -> list[tuple[str, int]]:
    """Return node and first card of each request, placed one after the other."""
    found = []
    for request in requests:
        verdict = placed(view, request, *nodes)
        view.add(verdict)
        found.append((verdict.node, verdict.slices[0].card))
    return found


def allocated(view: UsageTotals, *nodes: Node) -> list[float]:
    """Return the units held of the first card of each node, as the screens show them."""
    return [
        mib_to_units(
            view.card_usage(each.name, device(0, each.name)).memory_mib,
            each.cards[0].memory_mib,
            GIB,
        )
        for each in nodes
    ]


# gpushare's extender, 4 cards of 16 units.


def test_fourth_notebook_is_rejected_when_three_have_12_of_14_units() -> None:
    """Scenario S1: three of 4 units fit, a fourth does not, and 2 units still do."""
    t4 = node(T4_MIB)
    view = holding()
    assert in_turn(view, [units(4)] * 3, t4) == [("a", 0)] * 3
    # 3 x 4308 = 12924; 15079 - 12924 = 2155 < 4308
    assert view.card_usage("a", device(0)).memory_mib == 12924
    refused = place(view, units(4), "binpack", [t4])
    assert isinstance(refused, Unschedulable)
    assert [(reason.needed, reason.available) for reason in refused.reasons] == [(4308, 2155)]
    # 15079 * 2 // 14 = 2154
    assert placed(view, units(2), t4).slices == (piece(0, 2154),)
    view.remove(placement(piece(0, 4308)))
    assert placed(view, units(4), t4).slices == (piece(0, 4308),)


def test_fuller_node_is_filled_first_when_jobs_are_packed() -> None:
    """Scenario S2: four steps on two T4 nodes. The article's 04 and 05 are b and a here."""
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


def test_cards_get_equal_shares_when_ack_requests_two_of_them() -> None:
    """gpu-mem 8 with gpu-count 2 is 8 / 2 = 4 units on each of two cards of one node."""
    cards = node(SIXTEEN, SIXTEEN, SIXTEEN)
    # free 12, 16, 4: the two smallest that are at least 4 are cards 2 and 0
    view = holding(placement(piece(0, 4 * GIB), piece(2, 12 * GIB)))
    verdict = placed(view, units(8 // 2, cards=2), cards)
    assert verdict.slices == (piece(0, 4 * GIB), piece(2, 4 * GIB))


def test_removed_cards_are_not_used_when_a_node_shrinks() -> None:
    """gpushare's defect (b): a node that shrank from 4 cards to 2 has 2 at the next decision."""
    four = node(SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN)
    two = Node("a", four.cards[:2])
    verdict = place(holding(), units(1, cards=3), "binpack", [two])
    assert isinstance(verdict, Unschedulable)
    assert {reason.card for reason in verdict.reasons} == {0, 1}


def test_card_keeps_its_index_when_another_is_missing() -> None:
    """A card that fell off the bus leaves a gap: index 2 stays 2."""
    cards = (
        Card(0, DeviceId("GPU-a-0"), "T4", T4_MIB, healthy=False),
        Card(2, DeviceId("GPU-a-2"), "T4", T4_MIB),
    )
    assert placed(holding(), units(4), Node("a", cards)).slices == (piece(2, 4308),)
