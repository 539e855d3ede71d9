"""What keeps a node from ending, or a pod where it is. Pure: each function is one rule and its words."""

from collections import Counter
from collections.abc import Iterable, Sequence

from fenka.autoscaler.objects import DO_NOT_DISRUPT, SAFE_TO_EVICT, ElasticNode, ElasticPod
from fenka.autoscaler.view import View
from fenka.cluster.autoscaling import KEEP
from fenka.cluster.disruption import budgets_for
from fenka.cluster.spot_nodes import is_interruptible


def why_node_is_kept(node: ElasticNode) -> str:
    """Return why nobody but people may end the node, empty if that is not so.

    Other autoscalers' annotations on nodes are no reason: every node that was bought has them, so that they
    leave it alone.
    """
    meta = node.metadata
    return KEEP if "true" in (meta.labels.get(KEEP), meta.annotations.get(KEEP)) else ""


def why_pods_are_kept(view: View, pods: Sequence[ElasticPod]) -> str:
    """Return why some of these pods may not be evicted now, empty if all may."""
    for pod in pods:
        why = _why_pod_is_kept(pod)
        if why:
            return f"{pod.full_name} {why}"
    return _exhausted_budget(view, pods)


def _why_pod_is_kept(pod: ElasticPod) -> str:
    annotations, owners = pod.metadata.annotations, pod.metadata.owner_references
    if annotations.get(DO_NOT_DISRUPT) == "true":
        return f"has {DO_NOT_DISRUPT}"
    if annotations.get(SAFE_TO_EVICT) == "false":
        return f"has {SAFE_TO_EVICT}=false"
    if not any(owner.controller and owner.kind != "Node" for owner in owners):
        return "has no controller that would make it anew"
    if not is_interruptible(pod) and any(
        volume.empty_dir is not None or volume.host_path is not None for volume in pod.spec.volumes
    ):
        return "has a local volume"
    return ""


def _exhausted_budget(view: View, pods: Sequence[ElasticPod]) -> str:
    """Return the budget that does not allow to evict all these pods at once."""
    allowed, needed = dict[str, int](), Counter[str]()
    for pod in pods:
        for budget in budgets_for(pod, view.budgets):
            allowed[budget.name] = budget.allowed
            needed[budget.name] += 1
    name = next((name for name, count in needed.items() if count > allowed[name]), None)
    return f"disruption budget {name} is exhausted" if name else ""


def holds_cards(view: View, pods: Iterable[ElasticPod]) -> bool:
    """Return whether any of the pods requests something of a card."""
    return any(
        pod.demand(view.state.dialects).requests_gpu
        or any(
            name.startswith("nvidia.com/")
            for container in (*pod.spec.containers, *pod.spec.init_containers)
            for name in container.resources.limits
        )
        for pod in pods
    )
