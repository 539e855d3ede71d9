"""What a pod holds, by its record and by its node's report, on cards that may have changed since."""

from dataclasses import replace

import pytest

from fenka.cluster.state import (
    lingering_allocation,
    on_present_cards,
    read_allocation,
    reported_placements,
)
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Placement, Slice
from fenka.dialects.base import SharedNode, invented_id
from fenka.dialects.lease_records import Lingering
from tests.builders import T4_MIB, a_pod, on_card

FOUR = 4308  # 15079 * 4 // 14


def shared(*uuids: str) -> SharedNode:
    """Return node n with a T4 for each of these ids, in GiB."""
    cards = tuple(
        Card(index, DeviceId(uuid), "Tesla T4", T4_MIB) for index, uuid in enumerate(uuids)
    )
    return SharedNode(Node("n", cards))


TWO = shared("GPU-n-0", "GPU-n-1")
INVENTED = shared(invented_id("n", 0), invented_id("n", 1))


def part(index: int, uuid: str, mib: int = 100, compute: int = 0) -> Slice:
    """Return a slice of the card with this index and id."""
    return Slice(index, DeviceId(uuid), mib, compute)


@pytest.mark.parametrize(
    ("node", "recorded", "present"),
    [
        # the card is where it was
        (TWO, part(1, "GPU-n-1"), "GPU-n-1"),
        # the node has no third card any more
        (TWO, part(2, "GPU-n-2"), None),
        # another card has its index
        (TWO, part(1, "GPU-former"), None),
        # recorded before the plugin named cards: the index stands for the card
        (TWO, part(1, "n/1"), "GPU-n-1"),
        # recorded by name, and the plugin names none any more
        (INVENTED, part(1, "GPU-n-1"), "n/1"),
        (INVENTED, part(1, "n/1"), "n/1"),
    ],
)
def test_slice_counts_only_when_its_card_is_present(
    node: SharedNode, recorded: Slice, present: str | None
) -> None:
    """An index is no identity where the driver's UUID is known."""
    found = on_present_cards(node, Placement("n", (recorded,), cpu_milli=5))
    assert [it.uuid for it in found.slices] == ([present] if present else [])
    assert found.cpu_milli == 5


def test_only_missing_cards_are_dropped_when_a_placement_has_several() -> None:
    """The other slices stay."""
    placement = Placement("n", (part(0, "GPU-n-0"), part(1, "GPU-former")))
    assert on_present_cards(TWO, placement).slices == (part(0, "GPU-n-0"),)


@pytest.mark.parametrize("uuid", ["GPU-n-0", "MIG-first", "MIG-second"])
def test_slices_count_when_the_card_shares_its_index_with_instances(uuid: str) -> None:
    """A card and its instances have one index."""
    (card, _) = TWO.node.cards
    instances = (
        replace(card, uuid=DeviceId(each), parent=card.uuid) for each in ("MIG-first", "MIG-second")
    )
    node = SharedNode(Node("n", (card, *instances)))
    recorded = Placement("n", (part(0, uuid),))
    assert on_present_cards(node, recorded) == recorded
    former = Placement("n", (part(0, "MIG-former"), part(0, "GPU-former")))
    assert on_present_cards(node, former).slices == ()


WHOLE = part(0, "GPU-n-0", T4_MIB, 100)
SLICE = part(1, "GPU-n-1", FOUR, 20)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ((), [(False, ())]),
        ((SLICE,), [(False, (SLICE,))]),
        ((WHOLE,), [(True, (WHOLE,))]),
        ((WHOLE, SLICE), [(True, (WHOLE,)), (False, (SLICE,))]),
        # all memory without all compute is a slice, and the reverse
        ((part(0, "GPU-n-0", T4_MIB, 99),), [(False, (part(0, "GPU-n-0", T4_MIB, 99),))]),
        ((part(0, "GPU-n-0", 1, 100),), [(False, (part(0, "GPU-n-0", 1, 100),))]),
        # of a card that is not there nothing counts, whole or not
        ((part(1, "GPU-former", T4_MIB, 100),), [(False, ())]),
    ],
)
def test_report_is_whole_only_when_all_of_a_card_is_reported(
    reported: tuple[Slice, ...], expected: list[tuple[bool, tuple[Slice, ...]]]
) -> None:
    """Nobody shares a whole card, so it is a placement of its own."""
    found = reported_placements(TWO, reported)
    assert [(it.whole, it.slices) for it in found] == expected
    assert {it.node for it in found} == {"n"}


def test_lingering_pod_keeps_the_name_of_the_report_when_it_is_gone() -> None:
    """The API server has no such pod any more."""
    held = lingering_allocation(TWO, "u", Lingering("team/p", (SLICE,)))
    assert (held.pod.full_name, held.pod.metadata.uid) == ("team/p", "u")
    assert (held.lingering, held.slices, held.node) == (True, (SLICE,), "n")


def test_pod_holds_nothing_when_it_requests_nothing() -> None:
    """Also with a record: a tenant's annotation takes no card."""
    assert read_allocation(TWO, a_pod("p", 0, node="n", annotations=on_card(0, 4))) is None


@pytest.mark.parametrize(
    ("amount", "annotations", "held", "error"),
    [
        (4, on_card(1, 4), [(1, FOUR)], None),
        # no record: the first card, and the reason
        (4, {}, [(0, FOUR)], "it was not placed by fenka's scheduler"),
        # a record of a card that the node does not have
        (4, on_card(7, 4), [(0, FOUR)], "the pod's card 7"),
        # a request that no node can serve holds nothing
        ("four", on_card(0, 4), [], "'four' is no quantity"),
        # more than a card has: all of it, and no more
        (99, {}, [(0, T4_MIB)], "it was not placed by fenka's scheduler"),
    ],
)
def test_pod_holds_what_it_requests_when_its_record_is_odd(
    amount: int | str, annotations: dict[str, str], held: list[tuple[int, int]], error: str | None
) -> None:
    """On the card of its record if that can be read, else on the first."""
    found = read_allocation(TWO, a_pod("p", amount, node="n", annotations=annotations))
    assert found is not None
    assert [(it.card, it.memory_mib) for it in found.slices] == held
    assert (error in (found.error or "")) if error else found.error is None
