"""Bid prices: place where the requests that are expected lose the least value.

A linear program assigns expected requests to what is free: each kind of request comes as often as the
workload says, until demand exceeds the free capacity a little. Its dual values are prices: of hosting one
request of each kind, and of a thousandth of a core. A card with a given free part is worth the best set of
requests that fit it, less the CPU that they take. A node is worth the sum over its cards, and its CPU, at the
CPU price where that is least. The best placement reduces the value of its node least. Source of the idea:
bid-price control (Talluri and van Ryzin, Management Science 44, 1998).

Prices are corrected by steps towards the dual optimum. Sets of requests are chosen with probabilities (a
softmax), which makes values smooth: parts that many sets fill are worth more than parts that one set fills.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fenka.core.columns import CLASS, SLOT, Ints, NodeColumns
from fenka.core.policies import levels
from fenka.core.policies.candidates import FULL
from fenka.core.policies.node_scores import NodeScores, column_levels, host_cpu
from fenka.core.policies.target_scores import RANK_CARD, RANK_CPU, SCALE
from fenka.core.policies.workload import Workload
from fenka.core.request import CardClass, Request

Floats = npt.NDArray[np.float64]

PARTS = 100
"""Free parts of a card are valued in hundredths."""
UNIT = FULL // PARTS
CPU_PRICES = np.array([0, 4, 10, 20, 35, 60, 100, 200], np.int64)
"""Thousandths of a card for 1,000 thousandths of a core. A whole G2 card with 12 cores costs 83 of them."""
SMOOTH = 15.0
"""Sets of requests whose values differ by this (thousandths of a card) are nearly as probable."""
DEMAND = 1.05
"""Expected demand, compared with what is free."""
FIRST_STEPS = 300
STEP, FIRST_STEP, DECAY = 0.025, 0.1, 50
"""Corrections are this part of the possible price; the first ones are larger at first."""
CAUTION = 0.9
"""The first prices, compared with what a request takes."""


class _Singles(NamedTuple):
    """Requests for a part of one card, or for one card. parts: by class and request; PARTS + 1 for never."""

    parts: Ints
    valid: npt.NDArray[np.bool_]


class BidPrices:
    """The prices for an expected workload, and the values of cards and nodes at these prices."""

    def __init__(self, workload: Workload, earlier: "BidPrices | None" = None) -> None:
        """earlier: prices for another workload, which are kept for the requests that both have."""
        self._earlier: dict[Request, float] = {}
        self._steps = 0
        """The number of corrections up to now."""
        if earlier is not None:
            requests_before = [typical.request for typical in earlier.workload]
            prices: list[float] = earlier.host_prices.tolist()
            self._earlier = dict(zip(requests_before, prices, strict=True))
            self._steps = earlier._steps
        self.workload: Workload = tuple(typical for typical in workload if typical.request.cards)
        total = max(sum(typical.weight for typical in workload), 1)
        self._often = np.array([typical.weight / total for typical in self.workload])
        requests = [typical.request for typical in self.workload]
        # Slices on several cards count as so many requests; whole cards are looked for together.
        self._together = np.array([request.cards if request.whole else 1 for request in requests])
        self._often = self._often * [1 if request.whole else request.cards for request in requests]
        self._cpu = np.array(
            [request.cpu_milli / (1 if request.whole else request.cards) for request in requests]
        )
        self.classes: dict[CardClass, int] = {}
        self._taken = np.zeros((0, len(requests)), np.int64)
        self._worth = np.zeros(len(requests))
        """The most that a request can be worth."""
        self.host_prices: Floats = np.zeros(len(requests))
        self._priced = False
        self._probabilities: list[Floats] = []
        self.version = 0
        self._known: tuple[int, dict[Request, dict[int, int]]] = (0, {})
        """The losses of nodes, by request and state of the node, with the version of the prices."""
        self._show(np.zeros((0, PARTS + 1, CPU_PRICES.size)), np.zeros((0, 1, CPU_PRICES.size)))

    # ---- reading ----

    def value(self, cpu: int, cards: Sequence[tuple[CardClass, int]]) -> int:
        """Return the value of a node with this free CPU and these levels, in 1/SCALE of a thousandth."""
        if not self.classes or not cards:
            return 0
        rows = [(self.classes.get(card_class, -1), level) for card_class, level in cards]
        known = [(row, level // UNIT) for row, level in rows if row >= 0]
        idle = min(sum(part == PARTS for _, part in known), self._idle - 1)
        together: list[int] = self._more[rows[0][0]][idle]
        sums: list[int] = [
            price * cpu
            + together[number]
            + sum(self._values[row][part][number] for row, part in known)
            for number, price in enumerate(CPU_PRICES.tolist())
        ]
        return min(sums)

    def _show(self, values: Floats, more: Floats) -> None:
        """Take these values as exact numbers. more: of idle cards together, beyond each by itself."""
        self.values, self.more = (
            np.rint(array * SCALE).astype(np.int64) for array in (values, more)
        )
        self._values, self._more = self.values.tolist(), self.more.tolist()
        self._idle = self.more.shape[1]
        self.version += 1

    # ---- correcting ----

    def improve(self, columns: NodeColumns, steps: int) -> None:
        """Correct the prices by some steps, for what these nodes have free now."""
        if not self.workload or not columns.classes:
            return
        if self._learn_classes(columns):
            self._value(columns)
        free = column_levels(columns)
        demand = self._demand(free)
        for _ in range(steps):
            early = self._steps < FIRST_STEPS
            step = FIRST_STEP / (1 + self._steps / DECAY) if early else STEP
            supply = self._supply(columns, free)
            missing = (demand - supply) / (demand + supply + 1e-3)
            change = step * self._worth * missing
            self.host_prices = np.clip(self.host_prices + change, 0, self._worth)
            self._value(columns)
            self._steps += 1

    def _learn_classes(self, columns: NodeColumns) -> bool:
        """Read what requests take of each class of cards; return whether values must be computed again."""
        new = [card_class for card_class in columns.classes if card_class not in self.classes]
        for card_class in new:
            self.classes[card_class] = len(self.classes)
        if not new and columns.most_cards < self._idle:
            return False
        requests = [typical.request for typical in self.workload]
        needs = np.array(
            [[levels.need(kind, request) for request in requests] for kind in self.classes],
            np.int64,
        )
        self._taken = -(-needs // UNIT)
        never = needs >= levels.UNUSABLE
        smallest = np.where(never, levels.UNUSABLE, needs).min(axis=0)
        self._worth = np.where(never.all(axis=0), 0, smallest * self._together).astype(float)
        known = dict(zip(requests, self.host_prices.tolist(), strict=True)) if self._priced else {}
        known = self._earlier | known
        prices = [
            known.get(request, CAUTION * worth)
            for request, worth in zip(requests, self._worth.tolist(), strict=True)
        ]
        self.host_prices = np.minimum(prices, self._worth)
        self._priced = True
        return True

    def _demand(self, free: Ints) -> Floats:
        """Return how often each kind of request is expected until demand exceeds what is free."""
        of_one = float(self._often @ self._worth)
        demand: Floats = self._often * (DEMAND * float(free.sum()) / max(of_one, 1e-9))
        return demand

    def _value(self, columns: NodeColumns) -> None:
        """Compute the values of all parts of cards, with the probabilities of what fills them first."""
        classes, count = len(self.classes), len(self.workload)
        gain = self.host_prices[:, None] - self._cpu[:, None] * (CPU_PRICES / SCALE)
        single = (self._together == 1)[None, :, None] & (gain > 0)[None]
        values = np.zeros((classes, PARTS + 1, CPU_PRICES.size))
        rows = np.arange(classes)[:, None]
        self._probabilities = [np.zeros((classes, count, CPU_PRICES.size))]
        gains = np.where(single, gain[None] / SMOOTH, -np.inf)
        for part in range(1, PARTS + 1):
            rest = part - self._taken
            fits = (rest >= 0)[:, :, None]
            sums = np.where(fits, gains + values[rows, np.maximum(rest, 0)], -np.inf)
            # To leave the part empty is one of the choices.
            most = np.maximum(sums.max(axis=1), 0)
            weights = np.exp(sums - most[:, None])
            total = weights.sum(axis=1) + np.exp(-most)
            values[:, part] = most + np.log(total)
            self._probabilities.append(weights / total[:, None])
        values *= SMOOTH
        self._show(values, self._value_together(values, gain, columns.most_cards))

    def _value_together(self, values: Floats, gain: Floats, most_cards: int) -> Floats:
        """Return the value of a node's idle cards beyond the sum of each, for requests of several cards."""
        classes = len(self.classes)
        best = np.zeros((classes, most_cards + 1, CPU_PRICES.size))
        self._first = np.full((classes, most_cards + 1, CPU_PRICES.size), -1)
        several = [(number, int(cards)) for number, cards in enumerate(self._together) if cards > 1]
        for idle in range(1, most_cards + 1):
            best[:, idle] = best[:, idle - 1] + values[:, PARTS]
            for number, cards in several:
                if cards > idle:
                    continue
                allowed = (self._taken[:, number] <= PARTS)[:, None] & (gain[number] > 0)
                sums = np.where(allowed, gain[number] + best[:, idle - cards], -np.inf)
                better = sums > best[:, idle] + 1e-9
                best[:, idle] = np.where(better, sums, best[:, idle])
                self._first[:, idle][better] = number
        more: Floats = best - np.arange(most_cards + 1)[None, :, None] * values[:, PARTS][:, None]
        return more

    def _supply(self, columns: NodeColumns, free: Ints) -> Floats:
        """Return how many requests of each kind what is free would host at these prices."""
        prices, count = CPU_PRICES.size, len(self.workload)
        rows = self.rows(columns)
        parts = free // UNIT
        of_node = self.node_sums(columns, rows, parts).argmin(axis=1)
        of_card = of_node[columns.cards[SLOT]]
        idle_cards = (free == FULL) & (rows >= 0)
        used = (rows >= 0) & (parts > 0) & ~idle_cards
        shape = len(self.classes), PARTS + 1, prices
        flow = np.zeros(shape)
        np.add.at(flow, (rows[used], parts[used], of_card[used]), 1.0)
        supply = np.zeros(count)
        idle = np.add.reduceat(idle_cards, columns.starts, dtype=np.int64)
        sets = np.zeros((len(self.classes), self._idle, prices))
        has = idle > 0
        np.add.at(sets, (rows[columns.starts][has], idle[has], of_node[has]), 1.0)
        for number in range(self._idle - 1, 0, -1):
            first = self._first[:, number]
            alone = np.where(first < 0, sets[:, number], 0)
            flow[:, PARTS] += alone
            sets[:, number - 1] += alone
            for request in np.unique(first[first >= 0]).tolist():
                hosted = np.where(first == request, sets[:, number], 0)
                supply[request] += hosted.sum()
                sets[:, number - int(self._together[request])] += hosted
        base = np.arange(len(self.classes))[:, None, None] * (PARTS + 1)
        numbers = np.arange(prices)[None, None, :]
        size = flow.size
        for part in range(PARTS, 0, -1):
            if not flow[:, part].any():
                continue
            hosted = self._probabilities[part] * flow[:, part][:, None]
            supply += hosted.sum(axis=(0, 2))
            rest = np.maximum(part - self._taken, 0)[:, :, None]
            places = (base + rest) * prices + numbers
            flow += np.bincount(places.ravel(), hosted.ravel(), size).reshape(shape)
        return supply

    def rows(self, columns: NodeColumns) -> Ints:
        """Return the row in `values` of each card, -1 for an unknown class."""
        known = [self.classes.get(card_class, -1) for card_class in columns.classes] or [-1]
        found: Ints = np.array(known, np.int64)[columns.cards[CLASS]]
        return found

    # ---- the columnar twin ----

    def node_sums(self, columns: NodeColumns, rows: Ints, parts: Ints) -> Ints:
        """Return the value of each slot's node at each CPU price. parts: the free part of each card."""
        of_cards = np.where((rows >= 0)[:, None], self.values[rows, parts], 0)
        idle = np.add.reduceat((parts == PARTS) & (rows >= 0), columns.starts, dtype=np.int64)
        together = self.more[rows[columns.starts], np.minimum(idle, self._idle - 1)]
        cpu = host_cpu(columns)[:, None] * CPU_PRICES
        sums: Ints = np.add.reduceat(of_cards, columns.starts) + cpu + together
        return sums

    def losses(self, on: NodeScores) -> Ints:
        """Return how much value each slot's node loses with the best card, in thousandths of a card."""
        if self._known[0] != self.version:
            self._known = self.version, {}
        return on.by_state(self._known[1], lambda slots: self._losses(on, slots))

    def _losses(self, on: NodeScores, slots: Ints) -> Ints:
        part = on.part(slots)
        columns, request = part.columns, on.request
        rows, before = self.rows(columns), part.levels
        sums = self.node_sums(columns, rows, before // UNIT)
        after = part.left()
        cpu = host_cpu(columns)
        cpu_lost = (cpu - np.maximum(cpu - request.cpu_milli, 0))[:, None] * CPU_PRICES
        if not request.of_one_card:
            sums_after = self.node_sums(columns, rows, after // UNIT) - cpu_lost
            return self._rounded(sums.min(axis=1) - sums_after.min(axis=1))
        of_card = columns.cards[SLOT]
        known = (rows >= 0)[:, None]
        change = np.where(
            known, self.values[rows, after // UNIT] - self.values[rows, before // UNIT], 0
        )
        was_idle = (before == FULL) & (rows >= 0)
        idle = np.add.reduceat(was_idle, columns.starts, dtype=np.int64)[of_card]
        idle_after = idle - (was_idle & (after < FULL))
        first = rows[columns.starts][of_card]
        change += self.more[first, np.minimum(idle_after, self._idle - 1)]
        change -= self.more[first, np.minimum(idle, self._idle - 1)]
        best = (sums - cpu_lost)[of_card] + change
        lost = self._rounded(sums.min(axis=1)[of_card] - best.min(axis=1))
        lost = np.where(part.card_fits, lost, np.iinfo(np.int64).max)
        least: Ints = np.minimum.reduceat(lost, columns.starts)
        return least

    @staticmethod
    def _rounded(lost: Ints) -> Ints:
        rounded: Ints = (lost + SCALE // 2) // SCALE
        return rounded


def column_keys(on: NodeScores) -> tuple[Ints | Floats, ...]:
    """Return the twin of `target_scores.bid_price` for all slots."""
    free = on.cpu / RANK_CPU + on.by_slot(on.levels) / RANK_CARD
    if on.target is None or not on.target.prices.classes:
        return (free,)
    prices: BidPrices = on.target.prices
    return prices.losses(on), free
