"""Nodes that came for a part of a gang, of which the rest cannot be had. Pure."""

from fenka.autoscaler.view import View, coming
from fenka.cluster.autoscaling import Slot
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import group_key


def is_useless_half(view: View, slot: Slot) -> bool:
    """Return whether a slot's node has waiting members of gangs alone, and their rest is not on its way."""
    if slot.state != "offering" or not slot.pods:
        return False
    waiting = view.waiting(slot)
    gangs = {group_key(pod) for pod in waiting}
    if not waiting or None in gangs or _is_used(view, slot.node):
        return False
    arriving = {group_key(pod) for *_, other in coming(view.orders) for pod in view.waiting(other)}
    return gangs.isdisjoint(arriving)


def _is_used(view: View, node: str) -> bool:
    """Return whether pods are there that would have to be moved."""
    return any(
        not (pod.of_daemon_set or pod.mirrors_file or pod.finished)
        for pod in view.pods_on.get(node, ())
    )


def waiting_gangs(view: View, offered: frozenset[str]) -> frozenset[str]:
    """Return the gangs of which members have no node yet, so that none of their pods may start.

    offered: UIDs of pods whose nodes offer their cards.
    """
    gangs = (
        group_key(pod) for uid, pod in view.pods.items() if is_open(pod) and uid not in offered
    )
    return frozenset(gang for gang in gangs if gang is not None)
