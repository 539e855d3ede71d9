"""Which pods a gang consists of, and how many of them lack a card."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fenka.cluster.node_admission import admits
from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import Gang, PodGroup, group_key, group_name, pod_group
from fenka.cluster.state import ClusterState
from fenka.core.mig.instances import GANG_IN_INSTANCES
from fenka.dialects.base import InvalidRecord, SliceRequest


@dataclass(frozen=True, slots=True)
class GangStatus:
    """The state of a gang's pods.

    Attributes:
        alive: pods that have not ended, the oldest first.
        succeeded: the number of pods that have succeeded. They count as present.
        missing: the number of pods that still need a node; 0 or less if the gang is complete.
    """

    alive: tuple[Pod, ...]
    succeeded: int
    missing: int

    @property
    def present(self) -> int:
        """Return the number of pods that exist or have succeeded."""
        return len(self.alive) + self.succeeded


class GangMembers:
    """Looks gangs up among the pods of the cluster."""

    def __init__(
        self,
        cluster: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        groups: Callable[[], Mapping[str, PodGroup]],
    ) -> None:
        """Args:
        cluster: the nodes.
        pods: returns all pods that name a gang, by UID.
        groups: returns all PodGroups, by namespace/name.
        """
        self._cluster, self._pods, self._groups = cluster, pods, groups

    def gang(self, pod: Pod) -> Gang | None:
        """Return the pod's gang; None for a pod that requests nothing of fenka. Raises InvalidRecord."""
        in_gang = group_name(pod) is not None and self.requests_cards(pod)
        if in_gang and pod.demand(self._cluster.dialects).in_instances:
            raise InvalidRecord(GANG_IN_INSTANCES)
        return pod_group(pod, self._groups()) if in_gang else None

    def gang_or_none(self, pod: Pod) -> Gang | None:
        """Return the pod's gang; None also if its size cannot be read."""
        try:
            return self.gang(pod)
        except InvalidRecord:
            return None

    def requests_cards(self, pod: Pod) -> bool:
        """Return whether fenka places the pod. Whole cards and instances only on nodes that share."""
        demand = pod.demand(self._cluster.dialects)
        if not demand.served_by_kubelet:
            return demand.requests_gpu
        nodes = (shared.node.name for shared in self._cluster.shared_nodes())
        return any(
            self._cluster.shares_with(name, demand) and admits(self._cluster, name, demand.parts)
            for name in nodes
        )

    def part(self, pod: Pod) -> SliceRequest:
        """Return what the one container of the pod requests. Raises InvalidRecord."""
        parts = pod.demand(self._cluster.dialects).parts
        if len(parts) != 1:
            raise InvalidRecord(
                f"pod {pod.metadata.name} of a gang requests cards in {len(parts)} containers: "
                "let one container of each of its pods request them"
            )
        return parts[0]

    def of(self, key: str) -> list[Pod]:
        """Return all pods of a gang, with those that request no card."""
        return [pod for pod in self._pods().values() if group_key(pod) == key]

    def exist(self, uids: Iterable[str]) -> bool:
        """Return whether all these pods exist."""
        pods = self._pods()
        return all(uid in pods for uid in uids)

    def names(self, uids: Iterable[str]) -> list[str]:
        """Return the names of those of these pods that exist, sorted."""
        pods = self._pods()
        return sorted(pods[uid].metadata.name for uid in uids if uid in pods)

    def by_gang(self) -> dict[Gang, list[Pod]]:
        """Return all pods of each gang whose size can be read."""
        by_key: dict[str, list[Pod]] = {}
        for pod in self._pods().values():
            if (key := group_key(pod)) is not None:
                by_key.setdefault(key, []).append(pod)
        gangs = {}
        for pods in by_key.values():
            gang = next(filter(None, map(self.gang_or_none, reversed(pods))), None)
            if gang is not None:
                gangs[gang] = pods
        return gangs

    def status(self, gang: Gang, pods: Iterable[Pod] | None = None) -> GangStatus:
        """Return the state of the gang. pods: all of its pods, if the caller has them.

        Members that request no card count as soon as they exist: kube-scheduler places them.
        """
        alive, succeeded, placed = list[Pod](), 0, 0
        for pod in self.of(gang.key) if pods is None else pods:
            succeeded += pod.status.phase == "Succeeded"
            if not pod.finished and pod.metadata.deletion_timestamp is None:
                alive.append(pod)
                placed += bool(pod.spec.node_name) or not self.requests_cards(pod)
        alive.sort(key=lambda pod: (pod.metadata.creation_timestamp, pod.metadata.name))
        return GangStatus(tuple(alive), succeeded, gang.minimum - placed - succeeded)

    def is_placeable(self, pod: Pod) -> bool:
        """Return whether kube-scheduler will ask where to place the pod."""
        gated = bool(pod.spec.scheduling_gates) or pod.metadata.deletion_timestamp is not None
        return not (pod.spec.node_name or pod.finished or gated) and self.requests_cards(pod)

    def all_exist(self, pods: Sequence[Pod]) -> bool:
        """Return whether enough pods of a gang exist to start it. pods: some of them."""
        try:
            gang = self.gang(pods[0])
        except InvalidRecord:
            return False
        return gang is None or self.status(gang).present >= gang.minimum
