"""The input of a policy: a node and its cards, with their usage, for a request.

No module that `scores.py` imports may import numpy, whose threads a command in a lease cannot have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.workload import Workload
from fenka.core.request import CardClass, Request
from fenka.core.usage import NO_USAGE, CardUsage

if TYPE_CHECKING:
    from fenka.core.columns import NodeColumns


class PolicyTarget(Protocol):
    """The expected workload, and all that policies compute from it: `target.ExpectedWorkload`.

    Attributes:
        turn: the number of the request that is placed, from which the random policy draws.
        seed: of the random policy.
        fragments: for `fragments.py`.
        prices: for `prices.py`.
    """

    turn: int
    seed: int
    workload: Workload
    fragments: Any
    prices: Any

    def expect(self, workload: Workload) -> None:
        """Expect another workload from now on."""

    def next(self, columns: "NodeColumns", policy: str) -> None:
        """Prepare for the next request, which this policy places on these nodes."""


FULL = 1000
"""The level of an idle card."""


class Candidate(NamedTuple):
    """A card that is evaluated: what is allocated of it, and what the request would take."""

    card: Card
    usage: CardUsage
    requested_mib: int | None
    """None if the card has fewer units than requested; 0 for a request of compute alone."""
    nominal_mib: int = 0
    """The requested units times the unit, which a reason states for a card that has fewer units."""

    @property
    def free_mib(self) -> int:
        """Return the free memory; 0 for an overcommitted card."""
        return max(self.card.available_mib - self.usage.memory_mib, 0)

    @property
    def free_compute(self) -> int:
        """Return the free compute in percent; 0 for an overcommitted card."""
        return max(self.card.compute - self.usage.compute, 0)

    @property
    def free(self) -> tuple[int, int]:
        """Return free memory and free compute; compute first for a request of compute alone."""
        if self.requested_mib == 0:
            return self.free_compute, self.free_mib
        return self.free_mib, self.free_compute

    @property
    def level(self) -> int:
        """Return what is free, in thousandths; less than FULL if it is not idle, 0 if it takes no slices."""
        card, usage = self.card, self.usage
        if not card.open:
            return 0
        memory = self.free_mib * FULL // card.memory_mib if card.memory_mib else FULL
        compute = self.free_compute * FULL // max(card.compute, 1)
        return min(memory, compute, FULL - bool(usage.holders))


NO_CARD = Candidate(Card(0, DeviceId(""), "", 0, compute=0), NO_USAGE, 0)
"""Stands for the card of a request that takes none."""


@dataclass(eq=False)
class NodeCandidate:
    """A node that is being scored: the request, and all its cards with what is allocated of them.

    Attributes:
        free_share: the free part of the cards that take slices, in memory; in compute for a request of
            compute alone.
        fitting: the positions in `cards` of those that fit.
        cpu_milli: the free CPU in thousandths of a core, None if that is not counted.
        target: what the policy knows of the expected workload, None if nothing.
    """

    node: Node
    request: Request
    cards: Sequence[Candidate]
    free_share: float
    fitting: Sequence[int] = ()
    cpu_milli: int | None = None
    target: PolicyTarget | None = None

    @cached_property
    def levels(self) -> list[tuple[CardClass, int]]:
        """The class and the level of each card."""
        return [(CardClass.of(self.node, card.card), card.level) for card in self.cards]

    @cached_property
    def scores(self) -> dict[tuple[object, CardClass, int], tuple[float, ...]]:
        """The scores of cards by policy, class and level, where policies remember them."""
        return {}

    @cached_property
    def free_cards(self) -> int:
        """The sum of the levels."""
        return sum(level for _, level in self.levels)


Score = tuple[float, ...]
ScoreFunction = Callable[[NodeCandidate, Candidate], Score]
"""Returns what sorts nodes, and the cards of a node: the smallest is the best. Of equal cards the first is
taken, of equal nodes the first by name."""


class TargetPolicy(str):
    """The name of a policy, with what it knows of the expected workload."""

    target: PolicyTarget

    def __new__(cls, name: str, target: PolicyTarget) -> "TargetPolicy":
        """Return the name, which equals a plain one."""
        policy = super().__new__(cls, name)
        policy.target = target
        return policy


_ANY = CardClass(0, 0, 0, ""), 0


def by_level(score: ScoreFunction) -> ScoreFunction:
    """Return the same score, computed once for the cards of a node that are of equal class and level."""

    def remembered(on: NodeCandidate, card: Candidate) -> Score:
        # For several cards, or for none, the score does not depend on the card.
        of_card = on.request.of_one_card
        kind, level = (CardClass.of(on.node, card.card), card.level) if of_card else _ANY
        key = score, kind, level
        if key not in on.scores:
            on.scores[key] = score(on, card)
        return on.scores[key]

    return remembered


def in_effect(policy: str) -> str:
    """Return the policy that decides now: `binpack` in place of a `bid-price` without a known workload."""
    if policy != "bid-price":
        return policy
    target = target_of(policy)
    return policy if target is not None and target.prices.classes else "binpack"


def target_of(policy: str) -> PolicyTarget | None:
    """Return what a policy knows of the expected workload, None for a plain name."""
    return policy.target if isinstance(policy, TargetPolicy) else None
