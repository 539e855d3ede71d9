"""Nodes that are labelled to share their cards and offer none: without a driver, CDI, or fenka's program."""

from fenka.cluster.objects import Node
from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare, nodes
from fenka.dialects.base import InvalidRecord

UNOFFERED = (
    f"its kubelet offers no {gpushare.MEMORY}: the node's events and the log of fenka's node pod there say "
    "why"
)
"""The end of a sentence about such a node."""


def offers_nothing(node: Node, state: ClusterState) -> bool:
    """Return whether a ready node is labelled to share its cards, and offers none to the kubelet."""
    meta = node.metadata
    if not nodes.has_mode_label(meta.labels) or not node.ready:
        return False
    if state.shared_node(meta.name) is not None or state.node_error(meta.name):
        return False
    try:
        return nodes.node_mode(meta.labels).memory
    except InvalidRecord:
        return False
