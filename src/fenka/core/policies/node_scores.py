"""The input of the columnar form of a policy: all nodes that fit a request."""

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
    SLOT,
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
    def levels(self) -> Ints:
        """The free part of each card, in thousandths."""
        return column_levels(self.columns)

    @cached_property
    def cpu(self) -> Ints:
        """The free CPU of each of the slots."""
        return host_cpu(self.columns)[self.slots]

    def left(self) -> Ints:
        """Return the level of each card after placing: on this card, or on the first that fit for several."""
        columns, request = self.columns, self.request
        taken = self.card_fits
        if not self.request.of_one_card:
            places = taken.cumsum()
            places = places - (places - taken)[columns.starts][columns.cards[SLOT]]
            taken = taken & (places <= request.cards)
        needs = [levels.need(card_class, request) for card_class in columns.classes] or [0]
        needed = np.array(needs, np.int64)[columns.cards[CLASS]]
        left: Ints = np.where(taken, np.maximum(self.levels - needed, 0), self.levels)
        return left

    def part(self, slots: Ints) -> "NodeScores":
        """Return the same for some of the slots, with columns of these alone."""
        part = self.columns.part(slots)
        return NodeScores(
            *(part, self.request, self.card_fits[part.columns]),
            *(np.arange(slots.size), self.target),
        )

    def by_state(
        self, known_by_request: dict[Request, dict[int, int]], score: Callable[[Ints], Ints]
    ) -> Ints:
        """Return a score of each of the slots, which is computed once for nodes of equal state.

        Args:
            known_by_request: scores by request and state, to which those are added that are computed.
            score: computes those of some slots.
        """
        known = known_by_request.get(self.request)
        if known is None or len(known) > MAX_KNOWN:
            if len(known_by_request) >= MAX_REQUESTS:
                known_by_request.clear()
            known = known_by_request[self.request] = {}
        states, first, of_slot = np.unique(self.states(), return_index=True, return_inverse=True)
        names = states.tolist()
        missing = [place for place, state in enumerate(names) if state not in known]
        if missing:
            scores = score(self.slots[first[missing]]).tolist()
            known.update(zip([names[place] for place in missing], scores, strict=True))
        of_state = np.array([known[state] for state in names], np.int64)
        found: Ints = of_state[of_slot]
        return found

    def by_slot(self, of_cards: Ints | Bools) -> Ints:
        """Return the sum over the cards of each of the slots."""
        sums = np.add.reduceat(of_cards, self.columns.starts, dtype=np.int64)
        found: Ints = sums[self.slots]
        return found

    def states(self) -> Ints:
        """Return a number for each slot, which is equal for nodes of equal cards, levels and free CPU.

        Each number is the sum of scrambled numbers of the cards, so the order of equal cards does not matter.
        """
        numbers = np.array([_scrambled_class(card_class) for card_class in self.columns.classes])
        if not numbers.size:
            return np.zeros(self.slots.size, np.int64)
        of_card = numbers[self.columns.cards[CLASS]] + (self.levels << 1) + self.card_fits
        # Without the columns of nodes that have gone.
        of_card = np.where(self.columns.exists, _scrambled(of_card), 0)
        return self.by_slot(of_card) + _scrambled(self.cpu)


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


def column_levels(columns: NodeColumns) -> Ints:
    """Return the level of each card."""
    usage = columns.usage
    memory_mib = np.array([card_class.memory_mib for card_class in columns.classes] or [0])
    total = memory_mib[columns.cards[CLASS]]
    # Rounded down, these quotients of numbers below 2**53 are exact, and faster than integers.
    memory = usage[FREE_MEMORY] * FULL / np.maximum(total, 1)
    memory[total == 0] = FULL
    compute = usage[FREE_COMPUTE] * FULL / np.maximum(columns.cards[CARD_COMPUTE], 1)
    free = np.minimum(np.minimum(memory, compute), FULL - (usage[HOLDERS] > 0))
    found: Ints = (free * columns.open).astype(np.int64)
    return found


def host_cpu(columns: NodeColumns) -> Ints:
    """Return the free CPU of each slot's node."""
    total, used = columns.hosts[CPU], columns.hosts[CPU_USED]
    free: Ints = np.where(total >= NEVER, levels.MANY_CPU, np.maximum(total - used, 0))
    return free
