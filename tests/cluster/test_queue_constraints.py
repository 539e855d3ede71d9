"""What the queue withholds from a pod."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.placement import NO_CONSTRAINTS, HeldPlacement, QueueConstraints
from fenka.core.inventory import DeviceId
from fenka.core.request import Placement, Slice


def held(entry: str, node: str, *cards: str) -> HeldPlacement:
    """Return what an entry gets of these cards of a node."""
    slices = (Slice(number, DeviceId(card), 1024, 0) for number, card in enumerate(cards))
    return HeldPlacement(entry, Placement(node, tuple(slices)))


@pytest.mark.parametrize(
    ("reserved", "placements", "expected"),
    [
        ([], [], set()),
        (["A"], [], {"A"}),
        ([], [held("e", "n", "B")], {"B"}),
        (["A"], [held("e", "n", "B")], {"A", "B"}),
        # one card may be reserved for one entry and held in part for another
        (["A"], [held("e", "n", "A")], {"A"}),
        ([], [held("e", "n", "B", "C"), held("f", "n", "C", "D")], {"B", "C", "D"}),
        # an entry without a slice holds CPU only
        ([], [held("e", "n")], set()),
    ],
)
def test_all_cards_are_those_reserved_and_those_held(
    reserved: list[str], placements: list[HeldPlacement], expected: set[str]
) -> None:
    """On one node."""
    constraints = QueueConstraints(
        frozenset(map(DeviceId, reserved)), {"n": tuple(placements)} if placements else {}
    )
    assert constraints.all_cards == expected


@given(
    st.frozensets(st.sampled_from("ABCDEF"), max_size=4),
    st.dictionaries(
        st.sampled_from("nmo"),
        st.lists(st.lists(st.sampled_from("ABCDEF"), max_size=3), max_size=3),
    ),
)
def test_no_card_is_forgotten_when_several_nodes_hold_several(
    reserved: frozenset[str], nodes: dict[str, list[list[str]]]
) -> None:
    """The set is that of counting by hand."""
    placements = {
        node: tuple(held(f"e{number}", node, *cards) for number, cards in enumerate(entries))
        for node, entries in nodes.items()
    }
    expected = {*reserved}
    for entries in nodes.values():
        for cards in entries:
            expected.update(cards)
    constraints = QueueConstraints(frozenset(map(DeviceId, reserved)), placements)
    assert constraints.all_cards == expected


def test_nothing_is_withheld_when_there_is_no_queue() -> None:
    """A position of 0 of 0 is not shown."""
    assert NO_CONSTRAINTS.all_cards == frozenset()
    assert (NO_CONSTRAINTS.position, NO_CONSTRAINTS.total) == (0, 0)
