"""The input of the columnar form of a policy: all nodes that fit a request."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np

from fenka.core.columns import (
    CARD_COMPUTE,
    CLASS,
    CPU,
    CPU_USED,
    FREE_COMPUTE,
    FREE_MEMORY,
    HOLDERS,
    Bools,
    Ints,
    NodeColumns,
)
from fenka.core.policies import levels
from fenka.core.policies.candidates import FULL, PolicyTarget
from fenka.core.request import NEVER, Request

MAX_REQUESTS, MAX_KNOWN = 512, 4096
"""Requests, and states of nodes for each, whose scores are remembered, at most."""


class NodeScores:
    """Nodes that fit a request, before they are ordered.

    Attributes:
        card_fits: bool, by card: whether the card fits by itself.
        slots: those of the nodes that fit.
    """

    def __init__(
        self,
        columns: NodeColumns,
        request: Request,
        card_fits: Bools,
        slots: Ints,
        target: PolicyTarget | None,
    ) -> None:
        self.columns, self.request, self.slots = columns, request, slots
        self.card_fits, self.target = card_fits, target

    @cached_property
    def known(self) -> "SlotStates":
        """Levels, free CPU and numbers of states, which all requests share."""
        return slot_states(self.columns)

    @cached_property
    def levels(self) -> Ints:
        """The free part of each card, in thousandths."""
        return self.known.levels

    @cached_property
    def cpu(self) -> Ints:
        """The free CPU of each of the slots."""
        return self.known.cpu[self.slots]

    def by_state(
        self, known_by_request: "dict[Request, KnownScores]", score: Callable[[Ints], Ints]
    ) -> Ints:
        """Return a score of each of the slots, which is computed once for nodes of equal state.

        Args:
            known_by_request: scores by request and state, to which those are added that are computed.
            score: computes those of some slots.
        """
        known = known_by_request.get(self.request)
        if known is None or len(known.by_state) > MAX_KNOWN:
            if len(known_by_request) >= MAX_REQUESTS:
                known_by_request.clear()
            known = known_by_request[self.request] = KnownScores()
        states = self.states()
        scores, changed = known.read(self.slots, states, self.known.cpu.size)
        if changed.size:
            names = states[changed]
            names, first, of_slot = np.unique(names, return_index=True, return_inverse=True)
            slots = self.slots[changed[first]]
            of_state = known.of_states(names.tolist(), slots, score)
            scores[changed] = of_state[of_slot]
            known.write(self.slots[changed], states[changed], scores[changed])
        return scores

    def by_slot(self, of_cards: Ints | Bools) -> Ints:
        """Return the sum over the cards of each of the slots."""
        sums = np.add.reduceat(of_cards, self.columns.starts, dtype=np.int64)
        found: Ints = sums[self.slots]
        return found

    def states(self) -> Ints:
        """Return a number for each slot, which is equal for nodes of equal cards, levels and free CPU.

        Each number is the sum of scrambled numbers of the cards, so the order of equal cards does not matter.
        """
        known = self.known
        of_card = np.where(self.card_fits, known.fitting, known.unfit)
        return self.by_slot(of_card) + known.of_cpu[self.slots]


def first_of_equal(rows: Ints) -> Bools:
    """Return which columns of these rows differ from the one before."""
    different = np.ones(rows.shape[1], np.bool_)
    different[1:] = (rows[:, 1:] != rows[:, :-1]).any(axis=0)
    return different


class ScoredPart:
    """Some slots of all, with their cards.

    Attributes:
        request: the request that is placed.
        starts: the first card of each slot.
        of_slot: by card, the place of its slot among the slots.
        classes, before: by card, the number of its class and its level.
        fits: bool, by card: whether it fits by itself.
        after: by card, its level after placing: on this card, or on the first that fit for several.
        cpu, cpu_after: by slot, what is free.
    """

    def __init__(self, on: NodeScores, slots: Ints) -> None:
        columns, request = on.columns, on.request
        self.request = request
        cards, self.starts = columns.columns_of(slots)
        self.of_slot = np.arange(slots.size).repeat(columns.sizes[slots])
        self.classes, self.before = columns.cards[CLASS, cards], on.levels[cards]
        self.fits = taken = on.card_fits[cards]
        if not request.of_one_card:
            places = taken.cumsum()
            places = places - (places - taken)[self.starts][self.of_slot]
            taken = taken & (places <= request.cards)
        needs = [levels.need(card_class, request) for card_class in columns.classes] or [0]
        left = np.maximum(self.before - np.array(needs, np.int64)[self.classes], 0)
        self.after: Ints = np.where(taken, left, self.before)
        self.cpu = on.known.cpu[slots]
        self.cpu_after: Ints = np.maximum(self.cpu - request.cpu_milli, 0)


class KnownScores:
    """The scores for one request.

    Attributes:
        by_state: by state of the node.
    """

    def __init__(self) -> None:
        self.by_state: dict[int, int] = {}
        self._states = self._scores = np.zeros(0, np.int64)
        """The last state of each slot, and its score."""

    def read(self, slots: Ints, states: Ints, count: int) -> tuple[Ints, Ints]:
        """Return the last scores of these slots, and the places of those whose state is another one.

        count: of all slots.
        """
        if self._states.size != count:
            self._states, self._scores = np.zeros((2, count), np.int64)
            return np.zeros(slots.size, np.int64), np.arange(slots.size)
        return self._scores[slots], np.flatnonzero(self._states[slots] != states)

    def write(self, slots: Ints, states: Ints, scores: Ints) -> None:
        """Remember the scores of these slots."""
        self._states[slots], self._scores[slots] = states, scores

    def of_states(self, names: list[int], slots: Ints, score: Callable[[Ints], Ints]) -> Ints:
        """Return the score of each state. slots: one in each of the states, of which `score` is computed."""
        missing = [place for place, state in enumerate(names) if state not in self.by_state]
        if missing:
            scores = score(slots[missing]).tolist()
            self.by_state.update(zip([names[place] for place in missing], scores, strict=True))
        return np.array([self.by_state[state] for state in names], np.int64)


class Followed(ABC):
    """Figures of each slot of columns, which are computed again where something has changed."""

    def __init__(self, columns: NodeColumns) -> None:
        self._last_change, self._sizes = columns.last_change, _sizes(columns)

    def follow(self, columns: NodeColumns) -> bool:
        """Bring those of the slots up to date that have changed; return whether that is possible."""
        if self._sizes != _sizes(columns):
            return False
        if self._last_change != columns.last_change:
            slots = columns.changed_since(self._last_change)
            self._last_change = columns.last_change
            self._renew(columns, slots)
        return True

    @abstractmethod
    def _renew(self, columns: NodeColumns, slots: Ints) -> None: ...


def _sizes(columns: NodeColumns) -> tuple[int, int]:
    return columns.starts.size, columns.exists.size


class SlotStates(Followed):
    """Levels, free CPU and numbers of states of slots, which all requests share.

    Attributes:
        levels: by card, in thousandths.
        cpu: by slot, what is free.
        fitting, unfit: by card, its part of the number of its node's state, if it fits and if not.
        of_cpu: by slot, the part of its free CPU.
    """

    def __init__(self, columns: NodeColumns) -> None:
        super().__init__(columns)
        every = np.arange(columns.starts.size)
        self.levels, self.fitting, self.unfit = np.zeros((3, columns.exists.size), np.int64)
        self.cpu, self.of_cpu = np.zeros((2, every.size), np.int64)
        self._renew(columns, every)

    def _renew(self, columns: NodeColumns, slots: Ints) -> None:
        cards, _ = columns.columns_of(slots)
        classes = columns.cards[CLASS, cards]
        self.levels[cards] = free = _levels(columns, cards)
        self.cpu[slots] = cpu = _host_cpu(columns, slots)
        self.of_cpu[slots] = _scrambled(cpu)
        numbers = np.array([_scrambled_class(kind) for kind in columns.classes] or [0])[classes]
        numbers += free << 1
        # Without the columns of nodes that have gone.
        exists = columns.exists[cards]
        self.unfit[cards] = np.where(exists, _scrambled(numbers), 0)
        self.fitting[cards] = np.where(exists, _scrambled(numbers + 1), 0)


def slot_states(columns: NodeColumns) -> SlotStates:
    """Return what is known of the slots of these columns for all requests."""
    known: SlotStates | None = columns.computed.get("states")
    if known is None or not known.follow(columns):
        known = columns.computed["states"] = SlotStates(columns)
    return known


def _scrambled_class(card_class: object) -> int:
    return (hash(card_class) & ((1 << 48) - 1)) << 12


def _scrambled(numbers: Ints) -> Ints:
    """Return 64 bits for each number that look random: the finalizer of the generator SplitMix64."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    found: Ints = mixed.view(np.int64)
    return found


def _levels(columns: NodeColumns, cards: Ints) -> Ints:
    usage = columns.usage[:, cards]
    memory_mib = np.array([card_class.memory_mib for card_class in columns.classes] or [0])
    total = memory_mib[columns.cards[CLASS, cards]]
    # Rounded down, these quotients of numbers below 2**53 are exact, and faster than integers.
    memory = usage[FREE_MEMORY] * FULL / np.maximum(total, 1)
    memory[total == 0] = FULL
    compute = usage[FREE_COMPUTE] * FULL / np.maximum(columns.cards[CARD_COMPUTE, cards], 1)
    free = np.minimum(np.minimum(memory, compute), FULL - (usage[HOLDERS] > 0))
    found: Ints = (free * columns.open[cards]).astype(np.int64)
    return found


def _host_cpu(columns: NodeColumns, slots: Ints) -> Ints:
    total, used = columns.hosts[CPU, slots], columns.hosts[CPU_USED, slots]
    free: Ints = np.where(total >= NEVER, levels.MANY_CPU, np.maximum(total - used, 0))
    return free
