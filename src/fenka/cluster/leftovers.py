"""What fenka's programs leave in a cluster when its chart is uninstalled, and the patches that remove it."""

from collections.abc import Mapping
from typing import Any

from fenka.cluster.autoscaling import KEPT_FROM_OTHERS, ORDER, ORDERS_MAP, SHAPES_MAP, STATUS_MAP
from fenka.cluster.objects import Node
from fenka.dialects.gpushare import COUNT

PREFIX = "fenka.io/"
"""Of all labels, annotations and taints that fenka writes on nodes, or reads there."""

SHARING_LABELS = ("gpushare", "cgpu")
"""Labels of nodes that share their cards. gpushare and cGPU read them, too."""


def written_objects(release: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the names of the objects that programs have created, by API and plural.

    Args:
        release: The prefix of the chart's names.
    """
    scheduler = f"{release}-scheduler"
    return {
        ("apis/coordination.k8s.io/v1", "leases"): (
            scheduler,
            f"{release}-autoscaler",
            f"{release}-second-scheduler",
        ),
        ("api/v1", "configmaps"): (ORDERS_MAP, SHAPES_MAP, STATUS_MAP),
        ("api/v1", "secrets"): (
            *(f"{scheduler}-{kind}" for kind in ("authority", "server", "client")),
            f"{release}-metrics-adapter-server",
        ),
    }


def is_bought(node: Node) -> bool:
    """Return whether the autoscaler has bought the node."""
    return ORDER in node.metadata.labels


def own_taints(node: Node) -> list[str]:
    """Return the keys of fenka's taints of the node."""
    return sorted({taint.key for taint in node.spec.taints if taint.key.startswith(PREFIX)})


def cleaning_patch(node: Node) -> dict[str, dict[str, None]]:
    """Return the merge patch of the metadata that removes fenka's labels and annotations."""
    labels, annotations = node.metadata.labels, node.metadata.annotations
    foreign = KEPT_FROM_OTHERS if is_bought(node) else {}
    patch = {
        "labels": [it for it in labels if it in SHARING_LABELS or it.startswith(PREFIX)],
        "annotations": [it for it in annotations if it in foreign or it.startswith(PREFIX)],
    }
    return {field: dict.fromkeys(names) for field, names in patch.items() if names}


def status_patch(node: Node) -> Mapping[str, Any] | None:
    """Return the merge patch of the status that removes the number of cards; None if it has none.

    Amounts of device plugins are the kubelet's, which sets them to 0 by itself.
    """
    if COUNT not in node.status.capacity and COUNT not in node.status.allocatable:
        return None
    return {"status": {"capacity": {COUNT: None}, "allocatable": {COUNT: None}}}
