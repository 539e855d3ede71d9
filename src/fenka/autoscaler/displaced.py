"""Which pods of nodes that are taken back need room elsewhere before their controllers have made them anew.

A new node takes minutes, and a notice is as short. So these pods are planned for as if they were pending,
until their successors are. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fenka.autoscaler.objects import ElasticNode, ElasticPod
from fenka.autoscaler.reclaim import evictable, has_taint
from fenka.cluster.autoscaling import RECLAIMED
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import group_key

Owner = tuple[str, str, str]
"""Namespace, kind and name: a JobSet makes its Jobs anew by the same names."""


def displaced_pods(
    nodes: Mapping[str, ElasticNode],
    pods_on: Mapping[str, Sequence[ElasticPod]],
    pods: Mapping[str, ElasticPod],
) -> frozenset[str]:
    """Return UIDs of pods that will be made anew: as many of each controller as have no successor yet.

    Args:
        nodes: by name.
        pods_on: pods that are bound and not finished, by node.
        pods: all, by UID.
    """
    leaving = [
        pod
        for name, node in nodes.items()
        if has_taint(node, RECLAIMED)
        for pod in evictable(pods_on.get(name, ()))
    ]
    if not leaving:
        return frozenset()
    leaving += _rest_of_gangs(leaving, pods.values())
    successors = Counter(_owner(pod) for pod in pods.values() if is_open(pod))
    displaced = []
    for pod in sorted(leaving, key=lambda each: each.metadata.uid):
        owner = _owner(pod)
        if owner is None:
            continue
        if successors[owner]:
            successors[owner] -= 1
        else:
            displaced.append(pod.metadata.uid)
    return frozenset(displaced)


def _rest_of_gangs(leaving: Sequence[ElasticPod], pods: Iterable[ElasticPod]) -> list[ElasticPod]:
    """Return the members elsewhere that end because a gang ends whole."""
    gangs = {group_key(pod) for pod in leaving} - {None}
    known = {pod.metadata.uid for pod in leaving}
    return [
        pod
        for pod in pods
        if group_key(pod) in gangs
        and pod.metadata.uid not in known
        and pod.spec.node_name
        and not pod.finished
        and pod.metadata.deletion_timestamp is not None
    ]


def _owner(pod: ElasticPod) -> Owner | None:
    return next(
        (
            (pod.metadata.namespace, owner.kind, owner.name)
            for owner in pod.metadata.owner_references
            if owner.controller
        ),
        None,
    )
