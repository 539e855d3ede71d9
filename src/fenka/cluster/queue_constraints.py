"""What the queue withholds from a pod: an argument of its evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fenka.core.inventory import DeviceId
from fenka.core.request import Placement


@dataclass(frozen=True, slots=True)
class HeldPlacement:
    """What an entry of the queue gets once kube-scheduler retries it. namespace: its pods'."""

    entry_id: str
    placement: Placement
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class QueueConstraints:
    """What is not available to a pod, because entries before it in the queue have it or get it.

    Attributes:
        reserved: cards that are reserved until enough of them is free.
        held: what fits for others now, by node.
        nodes: the nodes of both.
        position: the pod's position in the queue.
        total: the number of entries, its own included; 0 if there is no queue.
    """

    reserved: frozenset[DeviceId] = frozenset()
    held: Mapping[str, tuple[HeldPlacement, ...]] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    position: int = 0
    total: int = 0

    @property
    def all_cards(self) -> frozenset[DeviceId]:
        """Return the cards on which anything is reserved or held."""
        placements = (it.placement for held in self.held.values() for it in held)
        return self.reserved.union(piece.uuid for it in placements for piece in it.slices)


NO_CONSTRAINTS = QueueConstraints()
