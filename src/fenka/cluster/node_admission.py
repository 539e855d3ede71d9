"""Which requests a node's mode admits, and which its cards could ever hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fenka.cluster.node_pins import Pin
from fenka.cluster.objects import Pod
from fenka.cluster.spot_nodes import SpotRule
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import restored
from fenka.core.gangs import place_gang
from fenka.core.inventory import Node
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import Request
from fenka.core.usage import EmptyUsage
from fenka.dialects import node_modes
from fenka.dialects.base import InvalidRecord, SliceRequest


def labels(cluster: ClusterState, name: str) -> Mapping[str, str]:
    """Return the labels of a node; none for an unknown one."""
    node = cluster.node(name)
    return node.metadata.labels if node else {}


def resident_compute(cluster: ClusterState, name: str) -> set[bool]:
    """Return whether pods with memory of this node have compute too; empty if its mode does not matter."""
    if node_modes.MODE_LABEL not in labels(cluster, name):
        return set()
    return {
        any(piece.compute for piece in it.slices) or it.pod.demand(cluster.dialects).weight > 0
        for it in cluster.allocations(name)
        if it.slices and not any(placement.whole for placement in it.placements)
    }


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why a pod does not fit a node.

    Attributes:
        sentence: the reason.
        unresolvable: it would not fit either if nothing were allocated on the node.
        rejection: the reason of each card, if cards are the reason.
    """

    sentence: str
    unresolvable: bool
    rejection: NodeRejection | None = None


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """What decides which requests a node admits, whatever its cards have free. A cluster has few rules.

    Attributes:
        error: why it admits nothing.
        labels: those of its mode.
        residents: whether pods with memory have compute too; empty if the mode does not ask.
        pin: whom it admits at first, None for anybody.
        spot: which pods it admits because it is taken back, None for any.
    """

    error: str | None
    labels: tuple[tuple[str, str], ...]
    residents: frozenset[bool]
    pin: Pin | None = None
    spot: SpotRule | None = None

    def rejection_of(
        self, pod: Pod, parts: Sequence[SliceRequest], now: float
    ) -> Infeasible | None:
        """Return why the node does not admit this pod beside its pods; None if it does.

        now: seconds since 1970.
        """
        excluded = _exclusion(self.pin, self.spot, pod, now)
        if excluded is not None:
            # No pod is evicted to make room that this one could not use.
            return Infeasible(excluded, unresolvable=True)
        return self.rejection(parts)

    def rejection(self, parts: Sequence[SliceRequest]) -> Infeasible | None:
        """Return why the node does not admit the requests beside its pods; None if it does."""
        if self.error is not None:
            return Infeasible(self.error, unresolvable=True)
        # If only its present pods exclude these requests, they may wait for their end.
        return self.rejection_by_mode(parts) or self._rejection(parts, self.residents)

    def rejection_by_mode(self, parts: Sequence[SliceRequest]) -> Infeasible | None:
        """Return why the node would not admit the requests either if it had no pods."""
        return self._rejection(parts, frozenset())

    def _rejection(
        self, parts: Sequence[SliceRequest], residents: frozenset[bool]
    ) -> Infeasible | None:
        try:
            node_modes.check_admission(dict(self.labels), parts, residents)
        except InvalidRecord as why:
            return Infeasible(str(why), unresolvable=not residents)
        return None


def admission_rule(cluster: ClusterState, name: str) -> AdmissionRule:
    """Return the rule of a node."""
    return AdmissionRule(
        cluster.node_error(name),
        mode_labels(labels(cluster, name)),
        frozenset(resident_compute(cluster, name)),
        cluster.pins.get(name),
        cluster.spot.get(name),
    )


def _exclusion(pin: Pin | None, spot: SpotRule | None, pod: Pod, now: float) -> str | None:
    if pin is not None and pod.metadata.uid not in pin.pods:
        return pin.sentence
    if spot is not None and not spot.admits(pod, now):
        return spot.sentence
    return None


def exclusion(cluster: ClusterState, name: str, pod: Pod) -> str | None:
    """Return why the node admits other pods only, whatever they request; None if it admits this one."""
    return _exclusion(cluster.pins.get(name), cluster.spot.get(name), pod, cluster.spot.now)


def excluded_nodes(cluster: ClusterState, pod: Pod) -> frozenset[str]:
    """Return the nodes that admit other pods only."""
    return cluster.pins.excluded(pod.metadata.uid) | cluster.spot.excluded(pod)


def mode_labels(present: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return those of a node's labels that decide what it admits."""
    return tuple((key, present[key]) for key in node_modes.MODE_LABELS if key in present)


def admits(cluster: ClusterState, name: str, parts: Sequence[SliceRequest]) -> bool:
    """Return whether the node admits the requests beside its pods."""
    return admission_rule(cluster, name).rejection(parts) is None


NodeKind = tuple[tuple[int, int, int, str, str, bool, bool, bool], ...]
"""For each card memory, that of no lease, compute, model, profile, whether it is divided, healthy and
cordoned."""


def node_kind(node: Node, *, repaired: bool = False) -> NodeKind:
    """Return what decides what the node could hold when empty, with its unit.

    repaired: as `restored` makes cards.
    """
    return tuple(
        (
            card.memory_mib,
            0 if repaired else card.unleased_mib,
            card.compute,
            card.model,
            card.profile,
            card.divided,
            card.healthy or repaired,
            card.cordoned and not repaired,
        )
        for card in node.cards
    )


def fits_when_empty(requests: Sequence[Request], node: Node, *, repaired: bool = False) -> bool:
    """Return whether the requests would fit the node together if nothing were allocated.

    repaired: as `restored` makes cards.
    """
    candidate = restored(node) if repaired else node
    placed = place_gang(EmptyUsage(), requests, "binpack", (candidate,))
    return not isinstance(placed, Unschedulable)
