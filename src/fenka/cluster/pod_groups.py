"""Reads which pods belong together: by Kubernetes' own PodGroup, or by the label of co-scheduling.

How close together a gang's pods want to be is read from the annotations of Kueue's topology-aware scheduling.

Wire facts: scheduling.k8s.io/v1beta1 (PodGroup, with the pod's spec.schedulingGroup, behind the feature gate
GenericWorkload); the labels of scheduler-plugins' co-scheduling, as ACK and arena write them;
the annotations kueue.x-k8s.io/podset-…-topology.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from fenka.cluster.objects import Object, ObjectMeta, Pod, drop_notes
from fenka.core.topology.domains import Proximity, Topology
from fenka.dialects.base import InvalidRecord

NAME_LABELS = (
    "pod-group.scheduling.sigs.k8s.io/name",
    "pod-group.scheduling.sigs.k8s.io",
    "scheduling.x-k8s.io/pod-group",
)
"""Pod labels with the gang's name; the first that is set counts."""
MINIMUM_LABEL = "pod-group.scheduling.sigs.k8s.io/min-available"
"""Pod label: the number of pods that start together."""

REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
UNCONSTRAINED_TOPOLOGY = "kueue.x-k8s.io/podset-unconstrained-topology"
TOPOLOGY_ANNOTATIONS = (REQUIRED_TOPOLOGY, PREFERRED_TOPOLOGY, UNCONSTRAINED_TOPOLOGY)
"""Pod annotations: the node label of which all pods of the gang must or should share a value; or `true`."""

POD_GROUPS_PATH = "/apis/scheduling.k8s.io/v1beta1/podgroups"


class GangPolicy(Object):
    """The number of pods that start together or not at all."""

    min_count: int = 0


class SchedulingPolicy(Object):
    """The policy of a PodGroup; without a gang its pods are placed one by one."""

    gang: GangPolicy | None = None


class PodGroupSpec(Object):
    """The spec of a PodGroup."""

    scheduling_policy: SchedulingPolicy = msgspec.field(default_factory=SchedulingPolicy)


class PodGroup(Object):
    """A PodGroup of scheduling.k8s.io."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodGroupSpec = msgspec.field(default_factory=PodGroupSpec)

    def __post_init__(self) -> None:
        drop_notes(self.metadata)

    @property
    def full_name(self) -> str:
        """Return namespace/name."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


@dataclass(frozen=True, slots=True)
class PodGang:
    """Pods that start together. minimum: fewer of them never start."""

    namespace: str
    name: str
    minimum: int

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return f"{self.namespace}/{self.name}"


def group_name(pod: Pod) -> str | None:
    """Return the name of a pod's gang, None if it names none."""
    group = pod.spec.scheduling_group
    if group is not None and group.pod_group_name:
        return group.pod_group_name
    labels = pod.metadata.labels
    # The loop takes a third of the time of next(), and runs for each pod of a cluster.
    for label in NAME_LABELS:
        name = labels.get(label)
        if name:
            return name
    return None


def names_pod_group(pod: Pod) -> bool:
    """Return whether the pod's gang is a PodGroup of Kubernetes, whose size is in that object."""
    group = pod.spec.scheduling_group
    return group is not None and bool(group.pod_group_name)


def group_key(pod: Pod) -> str | None:
    """Return namespace/name of a pod's gang, None if it names none."""
    name = group_name(pod)
    return f"{pod.metadata.namespace}/{name}" if name else None


class GangPods:
    """The pods that name a gang.

    Attributes:
        by_uid: all of them.
        by_gang: those of each gang, by its key and their UID.
    """

    def __init__(self, pods: Iterable[Pod] = ()) -> None:
        self.by_uid: dict[str, Pod] = {}
        self.by_gang: dict[str, dict[str, Pod]] = {}
        self.replace(pods)

    def replace(self, pods: Iterable[Pod]) -> None:
        """Keep those of these pods alone."""
        self.by_uid.clear()
        self.by_gang.clear()
        for pod in pods:
            self.set(pod)

    def set(self, pod: Pod) -> None:
        """Keep a pod as it is now, if it names a gang."""
        uid, key = pod.metadata.uid, group_key(pod)
        known = self.by_uid.get(uid)
        if known is not None and group_key(known) != key:
            self.forget(uid)
        if key is not None:
            self.by_uid[uid] = pod
            self.by_gang.setdefault(key, {})[uid] = pod

    def forget(self, uid: str) -> None:
        """Forget a pod."""
        pod = self.by_uid.pop(uid, None)
        key = None if pod is None else group_key(pod)
        if key is not None:
            del self.by_gang[key][uid]
            if not self.by_gang[key]:
                del self.by_gang[key]


def pod_group(pod: Pod, groups: Mapping[str, PodGroup]) -> PodGang | None:
    """Return the gang that a pod is in, None if it is in none.

    Args:
        groups: the cluster's PodGroups by namespace/name.

    Raises:
        InvalidRecord: the gang's size is unknown.
    """
    name, namespace = group_name(pod), pod.metadata.namespace
    if name is None:
        return None
    if names_pod_group(pod):
        group = groups.get(f"{namespace}/{name}")
        if group is None:
            raise InvalidRecord(f"its PodGroup {name} does not exist")
        policy = group.spec.scheduling_policy.gang
        return PodGang(namespace, name, policy.min_count) if policy else None
    text = pod.metadata.labels.get(MINIMUM_LABEL, "")
    if not text.isdecimal() or len(text) > 5 or not 1 <= int(text) <= 10_000:
        raise InvalidRecord(
            f"it is in the gang {name}, and its label {MINIMUM_LABEL} is {text!r}: "
            "set it to the number of pods that start together"
        )
    return PodGang(namespace, name, int(text))


def gang_proximity(
    pods: Iterable[Pod], topology: Topology | None, beside: frozenset[str] = frozenset()
) -> Proximity | None:
    """Return how close together the pods of a gang are placed, None if that does not matter.

    Args:
        pods: pods of the gang.
        topology: the topology of the cluster, None if no levels are configured.
        beside: nodes of members that have started.

    Raises:
        InvalidRecord: a pod requires a level that is not configured.
    """
    if topology is None:
        return None
    wanted = list[tuple[bool, int]]()
    unconstrained = False
    for pod in pods:
        annotations = pod.metadata.annotations
        unconstrained |= annotations.get(UNCONSTRAINED_TOPOLOGY) == "true"
        for name, required in ((REQUIRED_TOPOLOGY, True), (PREFERRED_TOPOLOGY, False)):
            label = annotations.get(name)
            if label in topology.levels:
                wanted.append((required, topology.levels.index(label)))
            elif label is not None and required:
                raise InvalidRecord(
                    f"annotation {name} is {label[:80]!r}, no topology level: write one of "
                    f"{', '.join(topology.levels)}"
                )
    if not wanted and unconstrained:
        return None
    return Proximity.of(topology, wanted, beside)
