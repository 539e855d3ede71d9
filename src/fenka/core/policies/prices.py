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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenka.core.columns import CLASS, SLOT, Ints, NodeColumns
from fenka.core.policies import levels
from fenka.core.policies.candidates import FULL
from fenka.core.policies.node_scores import (
    Followed,
    KnownScores,
    NodeScores,
    ScoredPart,
    first_of_equal,
    slot_states,
)
from fenka.core.policies.target_scores import RANK_CARD, RANK_CPU, SCALE
from fenka.core.policies.workload import Workload
from fenka.core.request import CardClass, Request

Floats = npt.NDArray[np.float64]

PARTS = 100
"""Free parts of a card are valued in hundredths."""
UNIT = FULL // PARTS
CPU_PRICES = np.array([0, 4, 10, 20, 35, 60, 100, 200], np.int64)
"""Thousandths of a card for 1,000 thousandths of a core. A whole G2 card with 12 cores costs 83 of them."""
_PRICES: list[int] = CPU_PRICES.tolist()
SMOOTH = 15.0
"""Sets of requests whose values differ by this (thousandths of a card) are nearly as probable."""
DEMAND = 1.05
"""Expected demand, compared with what is free."""
FIRST_STEPS = 300
STEP, FIRST_STEP, DECAY = 0.025, 0.1, 50
"""Corrections are this part of the possible price; the first ones are larger at first."""
CAUTION = 0.9
"""The first prices, compared with what a request takes."""


@dataclass(frozen=True)
class _Shapes:
    """The parts that requests for a part of one card take, once for all classes on which they take the same.

    Attributes:
        requests: these requests, by number.
        of_class: the shape of each class.
        sizes: the parts that some request takes on some shape, ascending, then PARTS + 1 for never.
        size_of: by shape and request: the place of what the request takes in `sizes`.
        has_size: 1 by shape, size and request, if the request takes that on that shape; otherwise 0.
    """

    requests: Ints
    of_class: Ints
    sizes: Ints
    size_of: Ints
    has_size: Floats

    @classmethod
    def of(cls, taken: Ints, together: Ints) -> "_Shapes":
        """Return those of these classes. taken, together: as `BidPrices` has them."""
        requests = np.flatnonzero(together == 1)
        of_requests = np.clip(taken[:, requests], 1, PARTS + 1)
        shapes, of_class = np.unique(of_requests, axis=0, return_inverse=True)
        sizes = np.unique(np.append(shapes, PARTS + 1))
        size_of = np.searchsorted(sizes, shapes)
        has_size = (size_of[:, None] == np.arange(sizes.size)[:, None]).astype(float)
        return cls(requests, of_class.reshape(-1), sizes, size_of, has_size)

    def blocks(self) -> Iterator[Ints]:
        """Yield the parts from 1 to PARTS in blocks, of which none depends on another one of its block."""
        step = int(self.sizes[0])
        for first in range(1, PARTS + 1, step):
            yield np.arange(first, min(first + step, PARTS + 1))

    def zeros(self) -> Floats:
        """Return zeros by part, shape and CPU price. Parts beyond PARTS, and below 0, stand for none."""
        return np.zeros((2 * (PARTS + 1), len(self.size_of), CPU_PRICES.size))


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
        self._shapes = _Shapes.of(self._taken, self._together)
        self._ways = self._weights = self._of_sizes = np.zeros((0, 0, CPU_PRICES.size))
        self.version = 0
        self._known: tuple[int, dict[Request, KnownScores]] = (0, {})
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
        alone = self.values[tuple(zip(*known, strict=True))].sum(axis=0) if known else 0
        of_cards: list[int] = (self.more[rows[0][0], idle] + alone).tolist()
        return min(price * cpu + value for price, value in zip(_PRICES, of_cards, strict=True))

    def _show(self, values: Floats, more: Floats) -> None:
        """Take these values as exact numbers. more: of idle cards together, beyond each by itself."""
        self.values, self.more = (
            np.rint(array * SCALE).astype(np.int64) for array in (values, more)
        )
        self._idle = self.more.shape[1]
        self.version += 1

    # ---- correcting ----

    def improve(self, columns: NodeColumns, steps: int) -> None:
        """Correct the prices by some steps, for what these nodes have free now."""
        if not self.workload or not columns.classes:
            return
        if self._learn_classes(columns):
            self.revalue(columns)
        free = slot_states(columns).levels
        demand = self._demand(free)
        for _ in range(steps):
            early = self._steps < FIRST_STEPS
            step = FIRST_STEP / (1 + self._steps / DECAY) if early else STEP
            supply = self.supply(columns)
            missing = (demand - supply) / (demand + supply + 1e-3)
            change = step * self._worth * missing
            self.host_prices = np.clip(self.host_prices + change, 0, self._worth)
            self.revalue(columns)
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
        self._shapes = _Shapes.of(self._taken, self._together)
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

    def revalue(self, columns: NodeColumns) -> None:
        """Compute the values of all parts of cards.

        The value of a part is SMOOTH times the logarithm of a sum over all orders in which requests can fill
        it, of exp(gain / SMOOTH). The sum of a part follows from those of what each request leaves of it.
        """
        gain = self.host_prices[:, None] - self._cpu[:, None] * (CPU_PRICES / SCALE)
        shapes = self._shapes
        # No request is worth more than it takes, so sums that are scaled by this stay within range.
        growth = UNIT / SMOOTH + np.log1p(shapes.requests.size) / 2
        scale = np.exp(-growth * shapes.sizes)[:, None]
        weights = np.where(gain > 0, np.exp(gain / SMOOTH), 0)[shapes.requests]
        self._weights = weights * scale[shapes.size_of]
        of_sizes = self._of_sizes = (shapes.has_size @ weights * scale).swapaxes(0, 1)
        empty = np.exp(-growth * np.arange(PARTS + 1))[:, None, None]
        ways = self._ways = shapes.zeros()
        ways[0] = 1
        for parts in shapes.blocks():
            # To leave the part empty is one of the choices.
            filled = (of_sizes * ways[parts[:, None] - shapes.sizes]).sum(axis=1)
            ways[parts] = filled + empty[parts]
        logarithms = np.log(ways[: PARTS + 1]) + growth * np.arange(PARTS + 1)[:, None, None]
        values = SMOOTH * logarithms.swapaxes(0, 1)[shapes.of_class]
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

    def supply(self, columns: NodeColumns) -> Floats:
        """Return how many requests of each kind what is free would host at these prices."""
        free, prices, count = slot_states(columns).levels, CPU_PRICES.size, len(self.workload)
        rows = self._rows_of_classes(columns)[columns.cards[CLASS]]
        parts = free // UNIT
        sums, _ = self.of_slots(columns, np.arange(columns.starts.size))
        of_node = sums.argmin(axis=1)
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
        supply[self._shapes.requests] += self._filled(flow)
        return supply

    def _filled(self, flow: Floats) -> Floats:
        """Return how often each request for a part of one card is expected to fill these parts.

        flow: the number of these parts, by class, part and CPU price.
        """
        shapes, ways = self._shapes, self._ways
        # A request fills a part with probability weight * ways[rest] / ways[part]; the rest is filled then.
        left, parts = shapes.zeros(), np.arange(PARTS + 1)
        np.add.at(left[: PARTS + 1].swapaxes(0, 1), shapes.of_class, flow)
        left[: PARTS + 1] /= ways[: PARTS + 1]
        for block in reversed(list(shapes.blocks())):
            larger = left[block[:, None] + shapes.sizes]
            left[block] += (self._of_sizes * larger).sum(axis=1)
        rests = ways[parts[1:, None] - shapes.sizes]
        of_sizes = (rests * left[1 : PARTS + 1, None]).sum(axis=0)
        hosted = of_sizes[shapes.size_of, np.arange(len(shapes.size_of))[:, None]] * self._weights
        filled: Floats = hosted.sum(axis=(0, 2))
        return filled

    def _rows_of_classes(self, columns: NodeColumns) -> Ints:
        """Return the row in `values` of each class, -1 for an unknown one."""
        known = [self.classes.get(card_class, -1) for card_class in columns.classes] or [-1]
        return np.array(known, np.int64)

    # ---- the columnar twin ----

    def of_nodes(self, columns: NodeColumns, slots: Ints) -> tuple[Ints, Ints]:
        """Compute the value of these slots' nodes at each CPU price, and the number of their idle cards."""
        cards, starts = columns.columns_of(slots)
        states = slot_states(columns)
        rows = self._rows_of_classes(columns)[columns.cards[CLASS, cards]]
        sums, idle = self._sums(rows, states.levels[cards] // UNIT, starts)
        sums += states.cpu[slots][:, None] * CPU_PRICES
        return sums, idle

    def _sums(self, rows: Ints, parts: Ints, starts: Ints) -> tuple[Ints, Ints]:
        """Return the value of the cards of each node, and the number of those that are idle.

        Args:
            rows: in `values`, of each card.
            parts: what is free of each card.
            starts: the first card of each node.
        """
        of_cards = self.values[rows, parts]
        of_cards[rows < 0] = 0
        idle = np.add.reduceat((parts == PARTS) & (rows >= 0), starts, dtype=np.int64)
        sums: Ints = np.add.reduceat(of_cards, starts)
        sums += self.more[rows[starts], np.minimum(idle, self._idle - 1)]
        return sums, idle

    def losses(self, on: NodeScores) -> Ints:
        """Return how much value each slot's node loses with the best card, in thousandths of a card."""
        if self._known[0] != self.version:
            self._known = self.version, {}
        return on.by_state(self._known[1], lambda slots: self._losses(on, slots))

    def _losses(self, on: NodeScores, slots: Ints) -> Ints:
        part, columns = ScoredPart(on, slots), on.columns
        of_class = self._rows_of_classes(columns)
        rows, before, after = of_class[part.classes], part.before, part.after
        sums, idle = self.of_slots(columns, slots)
        cpu_lost = (part.cpu - part.cpu_after)[:, None] * CPU_PRICES
        first = rows[part.starts]
        if not part.request.of_one_card:
            sums_after, _ = self._sums(rows, after // UNIT, part.starts)
            sums_after += part.cpu_after[:, None] * CPU_PRICES
            return self._rounded(sums.min(axis=1) - sums_after.min(axis=1))
        # Equal cards of a node lose the same.
        cards = np.flatnonzero(part.fits)
        of_slot = part.of_slot[cards]
        states = np.array((of_slot, part.classes[cards], before[cards]))
        different = first_of_equal(states)
        cards, of_slot = cards[different], of_slot[different]
        rows, before, after = rows[cards], before[cards], after[cards]
        best = (sums - cpu_lost)[of_slot]
        known = rows >= 0
        change = self.values[rows, after // UNIT]
        change -= self.values[rows, before // UNIT]
        change[~known] = 0
        best += change
        most, first, idle = self._idle - 1, first[of_slot], idle[of_slot]
        idle_after = idle - ((before == FULL) & known & (after < FULL))
        fewer = np.flatnonzero(idle_after < idle)
        more = self.more[first[fewer], np.minimum(idle_after[fewer], most)]
        best[fewer] += more - self.more[first[fewer], np.minimum(idle[fewer], most)]
        lost = self._rounded(sums.min(axis=1)[of_slot] - best.min(axis=1))
        starts = np.flatnonzero(first_of_equal(of_slot[None]))
        least: Ints = np.minimum.reduceat(lost, starts)
        return least

    def of_slots(self, columns: NodeColumns, slots: Ints) -> tuple[Ints, Ints]:
        """Return the value of these slots' nodes at each CPU price, and the number of their idle cards."""
        known: _SlotValues | None = columns.computed.get("prices")
        if known is None or known.of != (self, self.version) or not known.follow(columns):
            known = columns.computed["prices"] = _SlotValues(self, columns)
        return known.sums[slots], known.idle[slots]

    @staticmethod
    def _rounded(lost: Ints) -> Ints:
        rounded: Ints = (lost + SCALE // 2) // SCALE
        return rounded


class _SlotValues(Followed):
    """The values of all slots.

    Attributes:
        of: the prices, with their version.
        sums: the value of each slot's node at each CPU price.
        idle: the number of its idle cards.
    """

    def __init__(self, prices: BidPrices, columns: NodeColumns) -> None:
        super().__init__(columns)
        self.of = prices, prices.version
        self.sums, self.idle = prices.of_nodes(columns, np.arange(columns.starts.size))

    def _renew(self, columns: NodeColumns, slots: Ints) -> None:
        self.sums[slots], self.idle[slots] = self.of[0].of_nodes(columns, slots)


def column_keys(on: NodeScores) -> tuple[Ints | Floats, ...]:
    """Return the twin of `target_scores.bid_price` for all slots."""
    free = on.cpu / RANK_CPU + on.by_slot(on.levels) / RANK_CARD
    if on.target is None or not on.target.prices.classes:
        return (free,)
    prices: BidPrices = on.target.prices
    return prices.losses(on), free
