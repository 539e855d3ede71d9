"""Which requests a node's mode admits, and which its cards could ever hold.

Decides which nodes a pod may go to whatever they have free, by taints, selectors and affinity.

These are kube-scheduler's own rules about nodes as such. The scheduler applies them when it reserves cards
for pending pods, and `fenka why` when it explains what excludes a pod from a node.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fenka.cluster.node_pins import Pin
from fenka.cluster.objects import Node as KubernetesNode
from fenka.cluster.objects import NodeSelectorTerm, Pod, SelectorRequirement
from fenka.cluster.spot_nodes import SpotRule
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import restored
from fenka.core.gangs import place_gang
from fenka.core.inventory import STRICT_EFFECTS, Node, Taint, tolerates
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import Request
from fenka.core.usage import EmptyUsage
from fenka.dialects import nodes
from fenka.dialects.base import InvalidRecord, SliceRequest


def labels(cluster: ClusterState, name: str) -> Mapping[str, str]:
    """Return the labels of a node; none for an unknown one."""
    node = cluster.node(name)
    return node.metadata.labels if node else {}


def resident_compute(cluster: ClusterState, name: str) -> set[bool]:
    """Return whether pods with memory of this node have compute too; empty if its mode does not matter."""
    if nodes.MODE_LABEL not in labels(cluster, name):
        return set()
    return {
        any(piece.compute for piece in allocation.slices)
        or allocation.pod.demand(cluster.dialects).weight > 0
        for allocation in cluster.allocations(name)
        if allocation.slices and not any(placement.whole for placement in allocation.placements)
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
    """The properties of a node that decide which requests it admits, whatever its cards have free. A cluster
    has few rules.

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
            nodes.check_admission(dict(self.labels), parts, residents)
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
    return tuple((key, present[key]) for key in nodes.MODE_LABELS if key in present)


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


NO_SCHEDULE = "NoSchedule"

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")


def ineligibility_reasons(pod: Pod, node: KubernetesNode) -> list[str]:
    """Return a sentence for each reason that excludes the pod from the node."""
    # A node's own condition is also a taint, or will be in a moment, and can be tolerated like one.
    reasons = [
        sentence
        for sentence, key in _conditions(node)
        if not _any_tolerates(pod, Taint(key=key, effect=NO_SCHEDULE))
    ]
    for taint in node.spec.taints:
        # The node controller's own taints repeat a condition.
        repeated = taint.key.startswith("node.kubernetes.io/") and reasons
        if taint.effect in STRICT_EFFECTS and not repeated and not _any_tolerates(pod, taint):
            value = f"={taint.value}" if taint.value else ""
            reasons.append(f"taint {taint.key}{value}:{taint.effect} is not tolerated")
    labels = node.metadata.labels
    missing = [
        f"{key}={value}"
        for key, value in pod.spec.node_selector.items()
        if labels.get(key) != value
    ]
    if missing:
        reasons.append(f"the pod wants nodes labelled {', '.join(missing)}")
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    required = affinity.required_during_scheduling_ignored_during_execution if affinity else None
    if required and not any(_term_matches(term, node) for term in required.node_selector_terms):
        reasons.append("the pod's node affinity excludes it")
    return reasons


def _conditions(node: KubernetesNode) -> Iterator[tuple[str, str]]:
    """Yield what the node's own state says against it, and the key of the taint that it comes with."""
    if node.spec.unschedulable:
        yield "cordoned", "node.kubernetes.io/unschedulable"
    if not node.ready:
        taint = "not-ready" if node.readiness == "False" else "unreachable"
        yield "not ready", f"node.kubernetes.io/{taint}"


def _any_tolerates(pod: Pod, taint: Taint) -> bool:
    return any(tolerates(toleration, taint) for toleration in pod.spec.tolerations)


def _term_matches(term: NodeSelectorTerm, node: KubernetesNode) -> bool:
    # A term without requirements selects no node.
    fields = {"metadata.name": node.metadata.name}
    return bool(term.match_expressions or term.match_fields) and (
        all(matches(requirement, node.metadata.labels) for requirement in term.match_expressions)
        and all(matches(requirement, fields) for requirement in term.match_fields)
    )


def matches(requirement: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    """Evaluate a requirement as Kubernetes does; return True for an operator that is unknown here."""
    value, values = labels.get(requirement.key), requirement.values
    match requirement.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            bound = values[0] if values else None
            return _is_less(*((bound, value) if requirement.operator == "Gt" else (value, bound)))
    return True


def _is_less(low: str | None, high: str | None) -> bool:
    """Compare whole numbers as Go parses them. Anything else is neither less nor more."""
    if low is None or high is None or not all(map(_WHOLE_NUMBER.fullmatch, (low, high))):
        return False
    return int(low) < int(high)
