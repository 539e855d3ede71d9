"""The columnar twin of `availability.Timeline`.

Each card goes through states as its allocations end, in the order that `availability` defines. All states of
all cards stand in one table, so that the first state in which a request fits is starts for all cards at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fenka.core.availability import Start, Timeline, card_states, needs_host
from fenka.core.columnar import CardJudgement
from fenka.core.columns import INDEX, SLOT, Bools, CardClass, CardColumns, Ints, amounts_of
from fenka.core.inventory import Node
from fenka.core.queue import Allocation
from fenka.core.request import Request

Floats = npt.NDArray[np.float64]


class _Block(NamedTuple):
    """The states of the cards of one node, and what they were made of."""

    node: Node
    allocations: Sequence[Allocation]
    at: Floats
    states: Ints
    """Rows: uncertain ends, `CardColumns.usage`, `CardColumns.cards` (SLOT is the card's number on the node),
    unhealthy, cordoned."""


class CardStates(CardColumns):
    """The states of all cards of all nodes, kept from one scheduling pass to the next. Groups are cards.

    Attributes:
        at: float64, when each state begins, in the caller's time; infinite if unknown.
        uncertain: int64, how many allocations without a deadline have ended by then.
        names: the nodes.
        node_of_card: int64, the position in `names` of each card's node.
        first_cards: int64, the first card of each node.
    """

    def __init__(self) -> None:
        self.classes: dict[CardClass, int] = {}
        self.at: Floats = np.zeros(0)
        self.names: list[str] = []
        self._blocks: dict[str, _Block] = {}

    def refresh(
        self, nodes: Mapping[str, Node], allocations: Mapping[str, Sequence[Allocation]]
    ) -> None:
        """Take all nodes, and what is allocated on them. Only nodes that differ from the last call's cost."""
        changed = self._blocks.keys() - nodes.keys()
        for name in changed:
            del self._blocks[name]
        for name, node in nodes.items():
            block, on_node = self._blocks.get(name), allocations.get(name, ())
            if not node.cards or (
                block is not None
                and (block.node is node or block.node == node)
                and (block.allocations is on_node or block.allocations == on_node)
            ):
                continue
            self._blocks[name] = self._block(node, on_node)
            changed.add(name)
        if changed:
            self._join()

    def _block(self, node: Node, allocations: Sequence[Allocation]) -> _Block:
        times, rows = [], []
        for number, (card, states) in enumerate(
            zip(node.cards, card_states(node, allocations), strict=True)
        ):
            of_card = self.class_of(node, card), card.index, number, card.memory_mib, card.compute
            for at, uncertain, usage in states:
                used = amounts_of(usage)
                free = max(card.memory_mib - used[0], 0), max(card.compute - used[1], 0)
                times.append(at)
                rows.append((uncertain, *used, *free, *of_card, not card.healthy, card.cordoned))
        return _Block(node, allocations, np.array(times), np.array(rows, np.int64).T)

    def _join(self) -> None:
        """Put all blocks side by side."""
        blocks = list(self._blocks.values())
        self.names = list(self._blocks)
        self.at = np.concatenate([block.at for block in blocks]) if blocks else np.zeros(0)
        states = (
            np.concatenate([block.states for block in blocks], axis=1)
            if blocks
            else np.zeros((14, 0), np.int64)
        )
        self.uncertain, self.usage, self.cards = states[0], states[1:7], states[7:12].copy()
        self.unhealthy, self.cordoned = states[12].astype(np.bool_), states[13].astype(np.bool_)
        self.exists = np.ones(self.at.shape, np.bool_)
        counts = np.array([len(block.node.cards) for block in blocks], np.int64)
        self.first_cards = np.cumsum(counts) - counts
        self.node_of_card = np.repeat(np.arange(len(blocks)), counts)
        sizes = np.array([block.at.size for block in blocks], np.int64)
        self.cards[SLOT] += np.repeat(self.first_cards, sizes)
        self.starts = np.flatnonzero(np.diff(self.cards[SLOT], prepend=-1))
        in_order = np.argsort(np.array(self.names, np.str_)) if blocks else np.zeros(0, np.int64)
        self.rank = np.empty_like(in_order)
        self.rank[in_order] = np.arange(len(blocks))


class ColumnarTimeline(Timeline):
    """Decides as `Timeline` does. Nodes on which the pass has added anything are left to the definition."""

    def __init__(
        self,
        nodes: Iterable[Node],
        allocations: Mapping[str, Sequence[Allocation]],
        now: float,
        states: CardStates,
    ) -> None:
        """states: kept from the last pass, brought up to date here."""
        super().__init__(nodes, allocations, now)
        states.refresh(self.nodes, allocations)
        self._states = states

    def earliest(self, request: Request, among: frozenset[str] | None = None) -> Start | None:
        """Return where the request can start first; None if it fits no node that is empty."""
        states, plain = self._states, self._plain_nodes(request)
        best = super().earliest(request, frozenset(plain if among is None else plain & among))
        at, uncertain = self._starts(request)
        possible = self._possible(plain, among) & (uncertain >= 0)
        if not possible.any():
            return best
        nodes = np.flatnonzero(possible)
        for order in (np.maximum(at, self._now), uncertain, states.rank):
            values = order[nodes]
            nodes = nodes[values == values.min()]
        start = self.start_on(request, self.nodes[states.names[nodes[0]]])
        assert start is not None
        return start if best is None else min(start, best, key=Start.order)

    def by_start(
        self, requests: Sequence[Request], among: frozenset[str] | None = None
    ) -> list[str]:
        """Return the nodes on which each request alone can start, by when the last of them can."""
        plain = set[str]().union(*(self._plain_nodes(request) for request in requests))
        latest = np.full(len(self._states.names), -inf)
        possible = self._possible(plain, among)
        for request in requests:
            at, uncertain = self._starts(request)
            latest = np.maximum(latest, np.maximum(at, self._now))
            possible &= uncertain >= 0
        starts = self.starts_on(requests, plain if among is None else plain & among)
        starts += [
            (float(latest[node]), self._states.names[node])
            for node in np.flatnonzero(possible).tolist()
        ]
        return [name for _, name in sorted(starts)]

    def _plain_nodes(self, request: Request) -> set[str]:
        """Return the nodes that the definition decides about."""
        plain = {name for name, added in self._added.items() if added}
        if request.cpu_milli or request.host_memory_mib:
            plain |= {name for name, node in self.nodes.items() if needs_host(request, node)}
        return plain

    def _possible(self, plain: set[str], among: frozenset[str] | None) -> Bools:
        names = self._states.names
        if among is None:
            return np.array([name not in plain for name in names], np.bool_)
        return np.array([name in among and name not in plain for name in names], np.bool_)

    def _starts(self, request: Request) -> tuple[Floats, Ints]:
        """Return for each node when it has enough cards, and after how many uncertain ends; -1 if never."""
        states, nodes = self._states, len(self._states.names)
        at, uncertain = np.full(nodes, inf), np.full(nodes, -1)
        if not nodes:
            return at, uncertain
        fits = CardJudgement(states, request).fits
        first = np.minimum.reduceat(np.where(fits, np.arange(fits.size), fits.size), states.starts)
        cards = np.flatnonzero(first < fits.size)
        first = first[cards]
        node = states.node_of_card[cards]
        in_order = np.lexsort(
            (states.cards[INDEX, first], states.uncertain[first], states.at[first], node)
        )
        first, node = first[in_order], node[in_order]
        # The cards of a node stand together, the earliest first.
        begin = np.flatnonzero(np.diff(node, prepend=-1))
        enough = np.diff(begin, append=node.size) >= request.cards
        begin, node = begin[enough], node[begin[enough]]
        ends = np.concatenate(([0], np.cumsum(states.uncertain[first])))
        at[node] = states.at[first[begin + request.cards - 1]]
        uncertain[node] = ends[begin + request.cards] - ends[begin]
        return at, uncertain
