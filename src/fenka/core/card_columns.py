"""Cards as arrays: the rows of these, and what requests are compared with."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fenka.core.inventory import Card, Node
from fenka.core.request import Request
from fenka.core.usage import CardUsage

AnyInts = npt.NDArray[np.signedinteger[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MEMORY, COMPUTE, HOLDERS, WHOLE, FREE_MEMORY, FREE_COMPUTE = range(6)
"""Rows of `Columns.usage`."""
CLASS, INDEX, SLOT, CARD_MEMORY, CARD_COMPUTE = range(5)
"""Rows of `Columns.cards`."""
(
    FREE_MEMORY_SUM,
    FREE_COMPUTE_SUM,
    CPU_USED,
    HOST_MEMORY_USED,
    MEMORY_SUM,
    COMPUTE_SUM,
    CPU,
    HOST_MEMORY,
    CARD_POLICY,
) = range(9)
"""Rows of `Columns.hosts`. The sums are over the open cards of the node."""

MAX_INDEX = (1 << 13) - 1
"""Of `Card.rank`. Cards with larger ones, which no hardware has, count as equal in scores."""

NEVER = 1 << 60
"""More than any card or host has."""


class CardClass(NamedTuple):
    """What a request is compared with, apart from usage and health. A cluster has few classes."""

    memory_mib: int
    unit_mib: int
    compute: int
    model: str
    profile: str = ""
    divided: bool = False
    drawn_mib: int = 0

    def needs(self, request: Request) -> tuple[int, int, bool, bool]:
        """Return memory, compute, and whether model and kind are others: the definition decides.

        The memory is NEVER for a card with too few units.
        """
        memory: int | None = max(self.memory_mib - self.drawn_mib, 0) if request.whole else 0
        if request.memory is not None:
            memory = request.memory.mib_on(self.memory_mib, self.unit_mib)
        return (
            NEVER if memory is None else memory,
            self.compute if request.whole else request.compute,
            bool(request.models) and self.model not in request.models,
            not request.is_for(self.profile, divided=self.divided),
        )


class Needs(NamedTuple):
    """What a request takes of a card, by class."""

    memory: Ints
    compute: Ints
    other_model: Bools
    other_kind: Bools


class CardColumns:
    """Cards as arrays, in groups: the cards of a node each, or the states of a card over time each.

    Attributes:
        usage: the rows MEMORY to FREE_COMPUTE, a column for each card. FREE_ rows are never negative.
        cards: the rows CLASS to CARD_COMPUTE, a column for each card. SLOT is the card's group, CARD_MEMORY
            what leases can have.
        unhealthy, cordoned: bool, one for each card.
        exists: bool, False for a column that no card has now.
        open: bool, True for cards that exist and are `Card.open`.
        starts: int64, the first column of each group.
        hosts: int64, the rows FREE_MEMORY_SUM to CARD_POLICY, a column for each group.
        classes: the number of each class of cards.
    """

    usage: AnyInts
    cards: AnyInts
    unhealthy: Bools
    cordoned: Bools
    exists: Bools
    open: Bools
    starts: Ints
    hosts: Ints
    classes: dict[CardClass, int]

    def needs(self, request: Request) -> Needs:
        """Return what the request takes of a card of each class."""
        # The columns of nodes without cards are of class 0 too, which must exist then.
        by_class = [each.needs(request) for each in self.classes] or [(NEVER, 0, False, False)]
        memory, compute, other_model, other_kind = zip(*by_class, strict=True)
        return Needs(
            np.array(memory, np.int64),
            np.array(compute, np.int64),
            np.array(other_model, np.bool_),
            np.array(other_kind, np.bool_),
        )

    def class_of(self, node: Node, card: Card) -> int:
        """Return the number of the card's class, a new one if there is none."""
        each = CardClass(
            *(card.memory_mib, node.unit_mib, card.compute, card.model),
            *(card.profile, card.divided, card.drawn_mib),
        )
        return self.classes.setdefault(each, len(self.classes))


def amounts_of(usage: CardUsage) -> tuple[int, int, int, int]:
    """Return memory, compute, holders and whole. What a node reports may exceed 64 bits."""
    memory, compute, holders, whole = usage
    # Nearly always it is this, which takes half of the time of min().
    if memory < NEVER > compute:
        return usage
    return min(memory, NEVER), min(compute, NEVER), holders, whole
