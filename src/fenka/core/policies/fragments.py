"""Fragmentation gradient descent (FGD): place where the least free capacity becomes useless to others.

Source: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent", USENIX ATC 2023. Amounts are thousandths of a card, weights are integers, so that the plain and the
columnar form compute the same numbers.
"""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import numpy as np

from fenka.core.columns import CLASS, AnyInts, Ints, NodeColumns
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
from fenka.core.policies.workload import Workload
from fenka.core.request import CardClass, Request

MAX_KNOWN = 20_000
"""Fragments of states that are remembered, at most."""

Levels = Sequence[tuple[CardClass, int]]


class _Usable(NamedTuple):
    """The free parts of cards or nodes that each typical request can use.

    Attributes:
        cards: the number of cards, a column for each request.
        free: what is free of these, a column for each request.
        all_free: what is free of all cards.
    """

    cards: AnyInts
    free: AnyInts
    all_free: AnyInts


class Fragments:
    """Computes how much of a node's free capacity typical requests cannot use."""

    def __init__(self, workload: Workload) -> None:
        self.requests = [typical.request for typical in workload]
        self.weights = np.array([typical.weight for typical in workload], np.int64)
        self.cards = np.array([request.cards for request in self.requests], np.int64)
        self.cpu = np.array([request.cpu_milli for request in self.requests], np.int64)
        self._all = int(self.weights.sum())
        self.total, self._exact = max(self._all, 1), self.weights.astype(np.float64)
        self._rows = list(
            zip(self.weights.tolist(), self.cards.tolist(), self.cpu.tolist(), strict=True)
        )
        self._needs: dict[CardClass, tuple[int, ...]] = {}
        self._known: dict[tuple[int, tuple[tuple[CardClass, int], ...]], int] = {}
        self._scores: dict[Request, KnownScores] = {}

    def needs(self, card_class: CardClass) -> tuple[int, ...]:
        """Return what each typical request takes of a card of this class."""
        if card_class not in self._needs:
            self._needs[card_class] = tuple(
                levels.need(card_class, request) if request.cards else levels.UNUSABLE
                for request in self.requests
            )
        return self._needs[card_class]

    def fragment(self, cpu: int, cards: Levels) -> int:
        """Return the free capacity that typical requests cannot use, times the sum of the weights."""
        state = cpu, tuple(sorted(cards))
        if state not in self._known:
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
            self._known[state] = self._fragment(*state)
        return self._known[state]

    def _fragment(self, cpu: int, cards: Levels) -> int:
        free = sum(level for _, level in cards)
        by_card = [(level, self.needs(card_class)) for card_class, level in cards if level]
        sum_of_all = 0
        for number, (weight, count, needed_cpu) in enumerate(self._rows):
            usable = [level for level, needs in by_card if level >= needs[number]]
            runs = count and len(usable) >= count and cpu >= needed_cpu
            sum_of_all += weight * (free - sum(usable) if runs else free)
        return sum_of_all

    def score(self, gained: int) -> int:
        """Return FGD's score, 0 to 100, for a reduction of the fragment."""
        return int(100 / (1 + exp(-gained / self.total / FULL)))

    # ---- the columnar twin ----

    def node_scores(self, on: NodeScores) -> Ints:
        """Return the score of the best card of each slot."""
        return on.by_state(self._scores, lambda slots: self._slot_scores(on, slots))

    def _slot_scores(self, on: NodeScores, slots: Ints) -> Ints:
        part = ScoredPart(on, slots)
        nodes, was = self.of_slots(on.columns, slots)
        needs = self._class_needs(on.columns)[part.classes]
        if not part.request.of_one_card:
            left = self._of_nodes(part.after, needs, part.starts)
            return self._rounded(was - self._sum(left, part.cpu_after))
        # Only the card itself changes, and equal cards of a node leave the same.
        cards = np.flatnonzero(part.fits)
        rows = np.array((part.of_slot[cards], part.classes[cards], part.before[cards]))
        cards = cards[first_of_equal(rows)]
        of_slot, needs = part.of_slot[cards], needs[cards]
        old = self._usable(part.before[cards], needs)
        new = self._usable(part.after[cards], needs)
        changes = zip(nodes, old, new, strict=True)
        left = _Usable(*(of_node[of_slot] + more - less for of_node, less, more in changes))
        gained = was[of_slot] - self._sum(left, part.cpu_after[of_slot])
        starts = np.flatnonzero(first_of_equal(of_slot[None]))
        best: Ints = np.maximum.reduceat(self._rounded(gained), starts)
        return best

    def of_slots(self, columns: NodeColumns, slots: Ints) -> tuple["_Usable", Ints]:
        """Return what these slots have free, and their fragments."""
        known: _SlotFragments | None = columns.computed.get("fragments")
        if known is None or known.of is not self or not known.follow(columns):
            known = columns.computed["fragments"] = _SlotFragments(self, columns)
        return _Usable(*(amounts[slots] for amounts in known.usable)), known.sums[slots]

    def _class_needs(self, columns: NodeColumns) -> Ints:
        """Return what each typical request takes of cards, a row for each class."""
        return np.array([self.needs(card_class) for card_class in columns.classes], np.int32)

    def of_nodes(self, columns: NodeColumns, slots: Ints) -> tuple["_Usable", Ints]:
        """Compute what these slots have free, and their fragments."""
        cards, starts = columns.columns_of(slots)
        states, needs = slot_states(columns), self._class_needs(columns)
        usable = self._of_nodes(states.levels[cards], needs[columns.cards[CLASS, cards]], starts)
        return usable, self._sum(usable, states.cpu[slots])

    def _of_nodes(self, free: Ints, needs: Ints, starts: Ints) -> "_Usable":
        """Return the sums over the cards of each node."""
        usable = self._usable(free, needs)
        return _Usable(*(np.add.reduceat(amounts, starts) for amounts in usable))

    def share(self, columns: NodeColumns) -> float:
        """Return the part of all free capacity that typical requests cannot use; 0 if nothing is free."""
        free = slot_states(columns).levels
        if not free.any() or not self.requests:
            return 0.0
        _, fragments = self.of_slots(columns, np.arange(columns.starts.size))
        fragment = int(fragments.sum())
        return fragment / self.total / int(free.sum())

    @staticmethod
    def _usable(free: Ints, needs: Ints) -> "_Usable":
        free = free.astype(np.int32)
        usable = (free[:, None] >= needs).astype(np.int32)
        return _Usable(usable, usable * free[:, None], free)

    def _sum(self, nodes: "_Usable", cpu: Ints) -> Ints:
        """Return the fragments of nodes with this free CPU."""
        runs = (self.cards > 0) & (nodes.cards >= self.cards) & (cpu[:, None] >= self.cpu)
        # Sums of numbers below 2**53 are exact, and faster than those of integers.
        used = (runs * nodes.free).astype(np.float64) @ self._exact
        sums: Ints = nodes.all_free * np.int64(self._all) - used.astype(np.int64)
        return sums

    def _rounded(self, gained: Ints) -> Ints:
        scores = 100 / (1 + np.exp(-gained / self.total / FULL))
        rounded: Ints = scores.astype(np.int64)
        return rounded


class _SlotFragments(Followed):
    """The free capacity of all slots that typical requests can use, and their fragments.

    Attributes:
        of: the workload's.
        usable: of each slot.
        sums: the fragments.
    """

    def __init__(self, of: Fragments, columns: NodeColumns) -> None:
        super().__init__(columns)
        self.of = of
        self.usable, self.sums = of.of_nodes(columns, np.arange(columns.starts.size))

    def _renew(self, columns: NodeColumns, slots: Ints) -> None:
        usable, self.sums[slots] = self.of.of_nodes(columns, slots)
        for amounts, new in zip(self.usable, usable, strict=True):
            amounts[slots] = new


def column_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `target_scores.fgd` for all slots."""
    if on.target is None or not on.target.workload:
        return (on.by_slot(on.levels),)
    fragments: Fragments = on.target.fragments
    return (-fragments.node_scores(on),)
