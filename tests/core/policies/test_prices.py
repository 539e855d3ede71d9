"""Bid prices: the value of a part of a card, and what is expected to fill it."""

from functools import cache
from math import exp, log

import numpy as np
import pytest

from fenka.core.columns import Columns
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.candidates import FULL
from fenka.core.policies.prices import PARTS, SMOOTH, UNIT, BidPrices
from fenka.core.policies.target_scores import SCALE
from fenka.core.policies.workload import Typical
from fenka.core.request import CardClass, Memory, Placement, Request, Slice

SLICES = (300, 450, 810)
WORKLOAD = tuple(
    [Typical(Request(Memory(parts)), 10 - number) for number, parts in enumerate(SLICES)]
    + [
        Typical(Request(Memory(450), models=frozenset({"T4"})), 3),
        Typical(Request(cards=2, whole=True), 2),
    ]
)


def _node(number: int, model: str) -> Node:
    cards = tuple(
        Card(index, DeviceId(f"{number}-{index}"), model, FULL) for index in range(2 + number)
    )
    return Node(f"node-{number}", cards, unit_mib=1)


@pytest.fixture
def columns() -> Columns:
    """Two nodes of different models, with slices on one card of each."""
    nodes = [_node(0, "T4"), _node(1, "A10")]
    columns = Columns(nodes)
    for node, parts in zip(nodes, (250, 550), strict=True):
        columns.add(Placement(node.name, (Slice(0, node.cards[0].uuid, parts, 0),)))
    return columns


@pytest.fixture
def prices(columns: Columns) -> BidPrices:
    """Prices after some corrections."""
    prices = BidPrices(WORKLOAD)
    prices.improve(columns, steps=12)
    return prices


@pytest.mark.parametrize("model", ["T4", "A10"])
def test_value_of_a_part_is_that_of_all_orders_in_which_requests_fill_it(
    prices: BidPrices, model: str
) -> None:
    """SMOOTH * log of the sum over orders of exp(gain / SMOOTH), by recursion over the last request."""
    fitting = [
        (typical.request.memory.nominal_mib(1) // UNIT, price)
        for typical, price in zip(WORKLOAD, prices.host_prices.tolist(), strict=True)
        if typical.request.memory
        and (not typical.request.models or model in typical.request.models)
    ]

    @cache
    def orders(part: int) -> float:
        return 1 + sum(
            exp(price / SMOOTH) * orders(part - taken) for taken, price in fitting if taken <= part
        )

    row = prices.classes[CardClass(FULL, 1, 100, model)]
    for part in range(PARTS + 1):
        # Without CPU in the requests its price, of which there are several, does not matter.
        value = prices.values[row, part, 0] / SCALE
        assert value == pytest.approx(SMOOTH * log(orders(part)), abs=2 / SCALE)


@pytest.mark.parametrize("number", range(len(WORKLOAD)))
def test_supply_is_what_the_value_grows_by_with_the_price(
    prices: BidPrices, columns: Columns, number: int
) -> None:
    """A request that is worth one more adds its expected number to the value of all nodes."""
    changed = prices.supply(columns)[number]
    before = prices.host_prices.copy()
    values = []
    for step in (-0.5, 0.5):
        prices.host_prices = before.copy()
        prices.host_prices[number] += step
        prices.revalue(columns)
        sums, _ = prices.of_nodes(columns, np.arange(2))
        values.append(sums.min(axis=1).sum() / SCALE)
    assert values[1] - values[0] == pytest.approx(changed, rel=0.01, abs=0.02)
