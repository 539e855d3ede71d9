"""The columnar twin of `availability.Timeline`.

Each card goes through states as its allocations end, in the order that `availability` defines. All states of
all cards stand in one table, so that the first state in which a request fits is starts for all cards at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from fenka.core.backfill import EarliestStart, Timeline, card_states, needs_host
from fenka.core.columnar import CardJudgement
from fenka.core.columns import (
    CARD_COMPUTE,
    CARD_MEMORY,
    SLOT,
    Bools,
    CardColumns,
    Ints,
    amounts_of,
)
from fenka.core.inventory import Node
from fenka.core.queue import Allocation
from fenka.core.request import CardClass, Request

Floats = npt.NDArray[np.float64]
SmallInts = npt.NDArray[np.int32]


SPARE = 8
"""Columns that a node has to spare for more states, beside half as many as it has."""
_STATE_ROWS = 12
"""Rows of a block's states: uncertain ends, `CardColumns.usage`, `CardColumns.cards`."""
_CARD_SLOT, _FLAGS, _EXISTS = 7 + SLOT, 4, 2
_MOST = (1 << 31) - 1
"""Larger amounts, which no hardware has, count as this one: so all states take half the memory."""


@dataclass(frozen=True, slots=True)
class _Block:
    """The states of the cards of one node, and what they were made of.

    The arrays are parts of the whole table once that is made, and have columns to spare.
    """

    node: Node
    allocations: Sequence[Allocation]
    at: Floats
    states: SmallInts
    flags: Bools
    """Rows: unhealthy, cordoned, whether the column has a state, and whether such a card may be used."""
    starts: Ints
    """The first column of each card, in the block."""


class CardStates(CardColumns):
    """The states of all cards of all nodes, kept from one scheduling pass to the next. Groups are cards.

    Attributes:
        at: float64, when each state begins, in the caller's time; infinite if unknown.
        uncertain: int32, how many allocations without a deadline have ended by then.
        names: the nodes.
        position: of each node in `names`.
        node_of_card: int64, the position in `names` of each card's node.
    """

    def __init__(self) -> None:
        self.classes: dict[CardClass, int] = {}
        self._blocks: dict[str, _Block] = {}
        self._join()

    def refresh(
        self, nodes: Mapping[str, Node], allocations: Mapping[str, Sequence[Allocation]]
    ) -> None:
        """Take all nodes, and what is allocated on them. Only nodes that differ from the last call's cost."""
        nodes = {name: node for name, node in nodes.items() if node.cards}
        gone = self._blocks.keys() - nodes.keys()
        for name in gone:
            del self._blocks[name]
        misfits = bool(gone)
        for name, node in nodes.items():
            block, on_node = self._blocks.get(name), allocations.get(name, ())
            if (
                block is not None
                and (block.allocations is on_node or block.allocations == on_node)
                and (block.node is node or block.node == node)
            ):
                continue
            made = self._block(node, on_node)
            if block is not None and not misfits and self._write(name, block, made):
                continue
            self._blocks[name], misfits = made, True
        if misfits:
            self._join()

    def _block(self, node: Node, allocations: Sequence[Allocation]) -> _Block:
        times, starts = list[float](), list[int]()
        cards, rows = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for card, states in zip(node.cards, card_states(node, allocations), strict=True):
            starts.append(len(rows))
            size = card.available_mib, card.compute
            flags = not card.healthy, card.cordoned, 1, card.open
            cards.append((self.class_of(node, card), card.rank, 0, *size, *flags))
            for begin, uncertain, usage in states:
                times.append(begin)
                rows.append((uncertain, *amounts_of(usage)))
        changing = np.array(rows, np.int64).T
        counts = [end - start for start, end in pairwise((*starts, len(rows)))]
        lasting = np.array(cards, np.int64).repeat(counts, axis=0).T
        free = np.maximum(lasting[CARD_MEMORY : CARD_COMPUTE + 1] - changing[1:3], 0)
        room = SPARE + len(rows) * 3 // 2
        table = np.zeros((_STATE_ROWS + _FLAGS, room), np.int32)
        table[:, : len(rows)] = np.minimum(np.concatenate((changing, free, lasting)), _MOST)
        at = np.zeros(room)
        at[: len(rows)] = times
        return _Block(
            node,
            allocations,
            at,
            table[:_STATE_ROWS],
            table[_STATE_ROWS:].astype(np.bool_),
            np.array(starts, np.int64),
        )

    def _write(self, name: str, block: _Block, made: _Block) -> bool:
        """Write a node's states in the place of its last ones. Return False if that has no room for them."""
        count, room = np.count_nonzero(made.flags[_EXISTS]), block.at.size
        if count > room or made.starts.size != block.starts.size:
            return False
        block.at[:count], block.states[:, :count] = made.at[:count], made.states[:, :count]
        block.flags[:] = False
        block.flags[:, :count] = made.flags[:, :count]
        first, cards = self._first[name], made.starts.size
        column = self.starts[first]
        self.starts[first : first + cards] = column + made.starts
        sizes = np.diff(made.starts, append=room)
        block.states[_CARD_SLOT] = np.repeat(np.arange(first, first + cards), sizes)
        self._blocks[name] = replace(
            block, node=made.node, allocations=made.allocations, starts=made.starts
        )
        return True

    def _join(self) -> None:
        """Put all blocks side by side."""
        blocks = self._blocks.values()
        self.names = list(self._blocks)
        self.position = {name: number for number, name in enumerate(self.names)}
        at = [np.zeros(0), *(block.at for block in blocks)]
        states = [np.zeros((_STATE_ROWS, 0), np.int32), *(block.states for block in blocks)]
        flags = [np.zeros((_FLAGS, 0), np.bool_), *(block.flags for block in blocks)]
        self.at, table = np.concatenate(at), np.concatenate(states, axis=1)
        marks = np.concatenate(flags, axis=1)
        self.uncertain, self.usage, self.cards = table[0], table[1:7], table[7:]
        self.unhealthy, self.cordoned, self.exists, self.open = marks
        counts = [block.starts.size for block in blocks]
        self.node_of_card = np.repeat(np.arange(len(counts)), counts)
        starts, column, card = [np.zeros(0, np.int64)], 0, 0
        self._first = {}
        for name, block in self._blocks.items():
            columns = slice(column, column + block.at.size)
            self._blocks[name] = replace(
                block, at=self.at[columns], states=table[:, columns], flags=marks[:, columns]
            )
            starts.append(block.starts + column)
            self._first[name] = card
            column, card = columns.stop, card + block.starts.size
        self.starts = np.concatenate(starts)
        self.cards[SLOT] = np.repeat(np.arange(card), np.diff(self.starts, append=column))
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
        self._among: dict[frozenset[str] | None, Bools] = {}
        """Which nodes are eligible, by their names."""

    def earliest(
        self, request: Request, among: frozenset[str] | None = None
    ) -> EarliestStart | None:
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
        return start if best is None else min(start, best, key=EarliestStart.order)

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
        if request.linked and request.by_links:
            return set(self.nodes)
        plain = {name for name, added in self._added.items() if added}
        if request.cpu_milli or request.host_memory_mib:
            plain |= {name for name, node in self.nodes.items() if needs_host(request, node)}
        return plain

    def _possible(self, plain: set[str], among: frozenset[str] | None) -> Bools:
        states = self._states
        possible = self._among.get(among)
        if possible is None:
            names = states.position if among is None else among
            possible = np.zeros(len(states.names), np.bool_)
            possible[[states.position[name] for name in names if name in states.position]] = True
            self._among[among] = possible
        possible = possible.copy()
        possible[[states.position[name] for name in plain if name in states.position]] = False
        return possible

    def _starts(self, request: Request) -> tuple[Floats, Ints]:
        """Return for each node when it has enough cards, and after how many uncertain ends; -1 if never."""
        states, nodes = self._states, len(self._states.names)
        at, uncertain = np.full(nodes, inf), np.full(nodes, -1)
        # The first state of each card in which it fits.
        first = np.flatnonzero(CardJudgement(states, request).fits)
        card = states.cards[SLOT, first]
        is_first = np.diff(card, prepend=-1) != 0
        first, card = first[is_first], card[is_first]
        # The cards of a node stand together.
        node = states.node_of_card[card]
        begin = np.flatnonzero(np.diff(node, prepend=-1))
        count = np.diff(begin, append=node.size)
        exact, more = count == request.cards, count > request.cards
        if exact.any():
            # All of them are needed.
            names = node[begin[exact]]
            at[names] = np.maximum.reduceat(states.at[first], begin)[exact]
            uncertain[names] = np.add.reduceat(states.uncertain[first], begin)[exact]
        if more.any():
            choice = more.repeat(count)
            first, node = first[choice], node[choice]
            # The earliest first. Equal cards have equal ends.
            in_order = np.lexsort((states.uncertain[first], states.at[first], node))
            first, begin = first[in_order], np.flatnonzero(np.diff(node, prepend=-1))
            ends = np.concatenate(([0], np.cumsum(states.uncertain[first])))
            names = node[begin]
            at[names] = states.at[first[begin + request.cards - 1]]
            uncertain[names] = ends[begin + request.cards] - ends[begin]
        return at, uncertain
