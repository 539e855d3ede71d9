"""Which nodes a pod may go to, whatever they have free: cordons, readiness, taints, selectors, affinity.

Of kube-scheduler's own rules those that are about nodes as such. The scheduler goes by them when it keeps
cards for pods that wait, `fenka why` when it says what keeps a pod from a node.
"""

from collections.abc import Iterator, Mapping

from fenka.cluster.objects import (
    Node,
    NodeSelectorTerm,
    Pod,
    SelectorRequirement,
    Taint,
    Toleration,
)

STRICT = "NoSchedule"


def ineligibility_reasons(pod: Pod, node: Node) -> list[str]:
    """What keeps the pod from the node, in sentences; nothing where it may go there."""
    # What is wrong with a node itself is a taint, or will be in a moment, and can be tolerated too.
    reasons = [
        said
        for said, key in _conditions(node)
        if not _any_tolerates(pod, Taint(key=key, effect=STRICT))
    ]
    for taint in node.spec.taints:
        # The node controller's own taints repeat what was said.
        said = taint.key.startswith("node.kubernetes.io/") and reasons
        strict = taint.effect in (STRICT, "NoExecute")
        if strict and not said and not _any_tolerates(pod, taint):
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
    if required and not any(_term_matches(it, node) for it in required.node_selector_terms):
        reasons.append("the pod's node affinity excludes it")
    return reasons


def _conditions(node: Node) -> Iterator[tuple[str, str]]:
    """What the node's own state says against it, and the key of the taint that it comes with."""
    if node.spec.unschedulable:
        yield "cordoned", "node.kubernetes.io/unschedulable"
    if not node.ready:
        which = "not-ready" if node.readiness == "False" else "unreachable"
        yield "not ready", f"node.kubernetes.io/{which}"


def _any_tolerates(pod: Pod, taint: Taint) -> bool:
    return any(tolerates(it, taint) for it in pod.spec.tolerations)


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Whether a pod with this toleration does not mind the taint."""
    return (
        (not toleration.key or toleration.key == taint.key)
        and (not toleration.effect or toleration.effect == taint.effect)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
    )


def _term_matches(term: NodeSelectorTerm, node: Node) -> bool:
    # A term without conditions chooses no node.
    fields = {"metadata.name": node.metadata.name}
    return bool(term.match_expressions or term.match_fields) and (
        all(matches(it, node.metadata.labels) for it in term.match_expressions)
        and all(matches(it, fields) for it in term.match_fields)
    )


def matches(condition: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    """As Kubernetes judges it; True for an operator that is not known here."""
    value, values = labels.get(condition.key), condition.values
    match condition.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" if value is not None and values:
            low, high = sorted((value, values[0]), key=_number)
            return low != high and high == (value if condition.operator == "Gt" else values[0])
    return condition.operator not in ("Gt", "Lt")


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() else 0
