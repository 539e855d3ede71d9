"""Decides which nodes a pod may go to whatever they have free, by taints, selectors and affinity.

These are kube-scheduler's own rules about nodes as such. The scheduler applies them when it reserves cards
for pending pods, and `fenka why` when it explains what excludes a pod from a node.
"""

import re
from collections.abc import Iterator, Mapping

from fenka.cluster.objects import (
    Node,
    NodeSelectorTerm,
    Pod,
    SelectorRequirement,
    Taint,
)
from fenka.core.taints import STRICT_EFFECTS, tolerates

NO_SCHEDULE = "NoSchedule"

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")


def ineligibility_reasons(pod: Pod, node: Node) -> list[str]:
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


def _conditions(node: Node) -> Iterator[tuple[str, str]]:
    """Yield what the node's own state says against it, and the key of the taint that it comes with."""
    if node.spec.unschedulable:
        yield "cordoned", "node.kubernetes.io/unschedulable"
    if not node.ready:
        taint = "not-ready" if node.readiness == "False" else "unreachable"
        yield "not ready", f"node.kubernetes.io/{taint}"


def _any_tolerates(pod: Pod, taint: Taint) -> bool:
    return any(tolerates(toleration, taint) for toleration in pod.spec.tolerations)


def _term_matches(term: NodeSelectorTerm, node: Node) -> bool:
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
