"""What a policy scores: a node and its cards, with their usage, for a request."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Request
from fenka.core.usage import NO_USAGE, CardUsage

if TYPE_CHECKING:
    from fenka.core.policies.target import Target


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


NO_CARD = Candidate(Card(0, DeviceId(""), "", 0, compute=0), NO_USAGE, 0)
"""Stands for the card of a request that takes none."""


class NodeCandidate(NamedTuple):
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
    target: "Target | None" = None


Score = tuple[float, ...]
ScoreFunction = Callable[[NodeCandidate, Candidate], Score]
"""Returns what sorts nodes, and the cards of a node: the smallest is the best. Of equal cards the first is
taken, of equal nodes the first by name."""


class TargetPolicy(str):
    """The name of a policy, with what it knows of the expected workload."""

    target: "Target"

    def __new__(cls, name: str, target: "Target") -> "TargetPolicy":
        """Return the name, which equals a plain one."""
        policy = super().__new__(cls, name)
        policy.target = target
        return policy


def target_of(policy: str) -> "Target | None":
    """Return what a policy knows of the expected workload, None for a plain name."""
    return policy.target if isinstance(policy, TargetPolicy) else None
