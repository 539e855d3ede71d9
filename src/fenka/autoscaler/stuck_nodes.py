"""Nodes that were bought for pods which never start: a wrong image, a missing Secret or volume. Pure.

A scheduler places such a pod, so its node is in use, and another one is bought for the next of them. A tenant
gets some nodes so, and then none until those pods have started or are gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.watch import ElasticPod
from fenka.cluster.objects import seconds

NEVER_STARTED_S = 1800.0
"""After which a pod that has had no container counts as one that never starts. Large images take minutes."""

MAX_STUCK = 3
"""Nodes of a namespace on which none of its pods starts, and for which it may still get others."""


@dataclass(slots=True)
class _Stuck:
    nodes: int
    pod: str


def stuck_namespaces(snapshot: Snapshot) -> Mapping[str, str]:
    """Return why no node is bought for some namespaces: too many bought ones started none of their pods."""
    found: dict[str, _Stuck] = {}
    for node in snapshot.own_nodes():
        pods = [
            pod
            for pod in snapshot.pods_on.get(node.metadata.name, ())
            if pod.demand(snapshot.state.dialects).requests_gpu
        ]
        if pods and all(_never_starts(pod, snapshot.now) for pod in pods):
            for namespace, pod in {pod.metadata.namespace: pod for pod in pods}.items():
                found.setdefault(namespace, _Stuck(0, pod.full_name)).nodes += 1
    return {
        namespace: f"{stuck.nodes} nodes were bought for pods of this namespace that have not started for "
        f"{NEVER_STARTED_S / 60:g} minutes, such as {stuck.pod}: mend or delete them"
        for namespace, stuck in found.items()
        if stuck.nodes >= MAX_STUCK
    }


def _never_starts(pod: ElasticPod, now: float) -> bool:
    """Return whether the kubelet has tried for long to start the pod, and made no container."""
    since, status = seconds(pod.status.start_time), pod.status
    if since is None or now - since < NEVER_STARTED_S or status.phase != "Pending":
        return False
    containers = (*status.container_statuses, *status.init_container_statuses)
    return not any(container.container_id for container in containers)
