"""Fragmentation gradient descent (FGD): place where the least free capacity becomes useless to others.

Source: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent", USENIX ATC 2023. Amounts are thousandths of a card, weights are integers, so that the plain and the
columnar form compute the same numbers.
"""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import numpy as np

from fenka.core.columns import CLASS, SLOT, Ints, NodeColumns
from fenka.core.policies import levels
from fenka.core.policies.candidates import FULL
from fenka.core.policies.node_scores import NodeScores, column_levels, host_cpu
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

    cards: Ints
    free: Ints
    all_free: Ints


class Fragments:
    """Computes how much of a node's free capacity typical requests cannot use."""

    def __init__(self, workload: Workload) -> None:
        self.requests = [typical.request for typical in workload]
        self.weights = np.array([typical.weight for typical in workload], np.int64)
        self.cards = np.array([request.cards for request in self.requests], np.int64)
        self.cpu = np.array([request.cpu_milli for request in self.requests], np.int64)
        self.total = max(int(self.weights.sum()), 1)
        self._rows = list(
            zip(self.weights.tolist(), self.cards.tolist(), self.cpu.tolist(), strict=True)
        )
        self._needs: dict[CardClass, tuple[int, ...]] = {}
        self._known: dict[tuple[int, tuple[tuple[CardClass, int], ...]], int] = {}
        self._scores: dict[Request, dict[int, int]] = {}

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
        return on.by_state(self._scores, lambda slots: self._slot_scores(on.part(slots)))

    def _slot_scores(self, on: NodeScores) -> Ints:
        columns, starts = on.columns, on.columns.starts
        of_slot, classes = columns.cards[SLOT], columns.cards[CLASS]
        needs = np.array([self.needs(card_class) for card_class in columns.classes])[classes]
        before, after = self._usable(on.levels, needs), self._usable(on.left(), needs)
        cpu_after = np.maximum(on.cpu - on.request.cpu_milli, 0)
        nodes = _Usable(*(np.add.reduceat(amounts, starts) for amounts in before))
        was = self._sum(nodes, on.cpu)
        if not on.request.of_one_card:
            left = _Usable(*(np.add.reduceat(amounts, starts) for amounts in after))
            return self._rounded(was - self._sum(left, cpu_after))
        # Only the card itself changes.
        rows = zip(nodes, before, after, strict=True)
        left = _Usable(*(of_node[of_slot] + new - old for of_node, old, new in rows))
        gained = was[of_slot] - self._sum(left, cpu_after[of_slot])
        scores = np.where(on.card_fits, self._rounded(gained), -1)
        best: Ints = np.maximum.reduceat(scores, starts)
        return best

    def share(self, columns: NodeColumns) -> float:
        """Return the part of all free capacity that typical requests cannot use; 0 if nothing is free."""
        free = column_levels(columns)
        if not free.any() or not self.requests:
            return 0.0
        needs = np.array([self.needs(card_class) for card_class in columns.classes])
        usable = self._usable(free, needs[columns.cards[CLASS]])
        nodes = _Usable(*(np.add.reduceat(amounts, columns.starts) for amounts in usable))
        fragment = int(self._sum(nodes, host_cpu(columns)).sum())
        return fragment / self.total / int(free.sum())

    @staticmethod
    def _usable(free: Ints, needs: Ints) -> "_Usable":
        usable = (free[:, None] >= needs).astype(np.int64)
        return _Usable(usable, usable * free[:, None], free)

    def _sum(self, nodes: "_Usable", cpu: Ints) -> Ints:
        """Return the fragments of nodes with this free CPU."""
        runs = (self.cards > 0) & (nodes.cards >= self.cards) & (cpu[:, None] >= self.cpu)
        sums: Ints = (nodes.all_free[:, None] - np.where(runs, nodes.free, 0)) @ self.weights
        return sums

    def _rounded(self, gained: Ints) -> Ints:
        scores = 100 / (1 + np.exp(-gained / self.total / FULL))
        rounded: Ints = scores.astype(np.int64)
        return rounded


def column_keys(on: NodeScores) -> tuple[Ints, ...]:
    """Return the twin of `target_scores.fgd` for all slots."""
    if on.target is None or not on.target.workload:
        return (on.by_slot(on.levels),)
    fragments: Fragments = on.target.fragments
    return (-fragments.node_scores(on),)
