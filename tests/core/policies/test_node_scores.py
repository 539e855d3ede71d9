"""What policies know of nodes for all requests follows each change of these nodes."""

from collections.abc import Callable

import numpy as np
import pytest

from fenka.core.columns import Columns, Ints
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.fragments import Fragments
from fenka.core.policies.node_scores import SlotStates, slot_states
from fenka.core.policies.prices import BidPrices
from fenka.core.policies.workload import Typical
from fenka.core.request import Memory, Placement, Request, Slice

MEMORY_MIB = 1000
PLACED = Placement("b", (Slice(0, DeviceId("b-0"), 400, 0),), cpu_milli=500)
REQUEST = Request(Memory(300), cpu_milli=100)
WORKLOAD = (Typical(REQUEST, 3), Typical(Request(cards=1, whole=True), 1))


def _node(name: str, cards: int = 2, model: str = "T4") -> Node:
    return Node(
        name,
        tuple(
            Card(index, DeviceId(f"{name}-{index}"), model, MEMORY_MIB) for index in range(cards)
        ),
        cpu_milli=4000,
        unit_mib=1,
    )


CHANGES: dict[str, Callable[[Columns], object]] = {
    "add": lambda columns: columns.add(PLACED),
    "remove": lambda columns: columns.remove(PLACED),
    "take": lambda columns: columns.take(np.array([3]), REQUEST, columns.needs(REQUEST)),
    "another card": lambda columns: columns.set_node(_node("b", model="A10")),
    "more cards": lambda columns: columns.set_node(_node("b", cards=3)),
    "new node": lambda columns: columns.set_node(_node("d")),
    "removed node": lambda columns: columns.remove_node("b"),
}


def _arrays(columns: Columns, fragments: Fragments, prices: BidPrices) -> list[Ints]:
    """Return all that is known of the slots, for the columns and not computed again."""
    every, states = np.arange(columns.starts.size), slot_states(columns)
    usable, sums = fragments.of_slots(columns, every)
    of_prices = prices.of_slots(columns, every)
    of_states = states.levels, states.fitting, states.unfit, states.cpu, states.of_cpu
    return [*of_states, *usable, sums, *of_prices]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_known_of_slots_is_current_after_a_change(change: str) -> None:
    """As if it were computed now for the first time."""
    columns = Columns([_node("a"), _node("b"), _node("c", cards=1)])
    columns.add(PLACED)
    fragments, prices = Fragments(WORKLOAD), BidPrices(WORKLOAD)
    prices.improve(columns, steps=3)
    before = [array.copy() for array in _arrays(columns, fragments, prices)]
    CHANGES[change](columns)
    after = [array.copy() for array in _arrays(columns, fragments, prices)]
    columns.computed.clear()
    fresh = _arrays(columns, fragments, prices)
    assert all(np.array_equal(known, new) for known, new in zip(after, fresh, strict=True))
    # The change is one that these figures show.
    assert not all(np.array_equal(old, new) for old, new in zip(before, fresh, strict=True))


def test_a_copy_changes_independently() -> None:
    """What is known of the columns is not that of their copy."""
    columns = Columns([_node("a"), _node("b")])
    before = slot_states(columns).levels.copy()
    twin = columns.copy()
    twin.add(PLACED)
    assert slot_states(twin).levels.tolist() == SlotStates(twin).levels.tolist()
    assert slot_states(twin).levels.tolist() != before.tolist()
    assert slot_states(columns).levels.tolist() == before.tolist()
