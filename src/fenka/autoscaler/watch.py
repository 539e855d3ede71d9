"""The cluster as the autoscaler follows it: objects with the fields that it reads, indexes, informers."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from fenka.cluster import autoscaling, objects
from fenka.cluster.compact import MAX_RESOURCES, kept_annotations, kept_labels, limit_pod
from fenka.cluster.objects import Node
from fenka.cluster.pod_groups import POD_GROUPS_PATH, TOPOLOGY_ANNOTATIONS, PodGroup, group_name
from fenka.cluster.pod_preemption import BUDGETS_PATH, PodDisruptionBudget
from fenka.cluster.state import ClusterState
from fenka.core.request import MAX_HOST
from fenka.core.units import MIB
from fenka.dialects.base import CARDS, Dialect, InvalidRecord, parse_milli, parse_quantity
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.informer import Informer, Informers, NullListener, PodGroupIndex

DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_READ_ANNOTATIONS = frozenset(
    (
        *TOPOLOGY_ANNOTATIONS,
        *(autoscaling.PLANNED, autoscaling.INTERRUPTIBLE, DO_NOT_DISRUPT, SAFE_TO_EVICT),
        objects.MIRROR,
    )
)
DAEMON_SETS_PATH = "/apis/apps/v1/daemonsets"


class ElasticPort(objects.Object):
    """A port of a container."""

    host_port: int | None = None


class ElasticContainer(objects.Container):
    """A container with its ports."""

    ports: tuple[ElasticPort, ...] = ()


class Present(objects.Object):
    """Something of which only the presence matters."""


class PodTerms(objects.Object):
    """Affinity or anti-affinity to pods."""

    required_during_scheduling_ignored_during_execution: tuple[Present, ...] = ()


class ElasticAffinity(objects.Affinity):
    """All affinity of a pod."""

    pod_affinity: PodTerms | None = None
    pod_anti_affinity: PodTerms | None = None


class TopologySpread(objects.Object):
    """A rule that spreads pods over nodes or zones."""

    when_unsatisfiable: str = ""


class ElasticVolume(objects.Object):
    """A volume of a pod. host_path, empty_dir: None if it is of another kind."""

    name: str = ""
    host_path: dict[str, Any] | None = None
    empty_dir: dict[str, Any] | None = None


class ElasticPodSpec(objects.PodSpec):
    """A pod's spec with everything that restricts where it may run, or whether it may be moved."""

    affinity: ElasticAffinity | None = None
    containers: tuple[ElasticContainer, ...] = ()
    init_containers: tuple[ElasticContainer, ...] = ()
    overhead: Mapping[str, str | int] = {}
    topology_spread_constraints: tuple[TopologySpread, ...] = ()
    resource_claims: tuple[Present, ...] = ()
    volumes: tuple[ElasticVolume, ...] = ()


def _limit_elastic_spec(spec: ElasticPodSpec) -> None:
    """Keep of lists of any length only whether they have what is asked for."""
    for container in (*spec.containers, *spec.init_containers):
        container.image = ""
        container.ports = tuple(port for port in container.ports if port.host_port)[:1]
    if spec.affinity is not None:
        for terms in (spec.affinity.pod_affinity, spec.affinity.pod_anti_affinity):
            if terms is not None:
                required = terms.required_during_scheduling_ignored_during_execution[:1]
                terms.required_during_scheduling_ignored_during_execution = required
    spread = spec.topology_spread_constraints
    spec.topology_spread_constraints = tuple(
        rule for rule in spread if rule.when_unsatisfiable == "DoNotSchedule"
    )[:1]
    spec.resource_claims = spec.resource_claims[:1]
    local = any(
        volume.host_path is not None or volume.empty_dir is not None for volume in spec.volumes
    )
    spec.volumes = (ElasticVolume(empty_dir={}),) if local else ()
    if len(spec.overhead) > MAX_RESOURCES:
        spec.overhead = {}


class ElasticPodStatus(objects.PodStatus):
    """A pod's status. nominated_node_name: where preemption makes room for it."""

    nominated_node_name: str = ""


class ElasticPod(objects.Pod):
    """A pod as the autoscaler keeps it."""

    spec: ElasticPodSpec = msgspec.field(default_factory=ElasticPodSpec)
    status: ElasticPodStatus = msgspec.field(default_factory=ElasticPodStatus)

    def __post_init__(self) -> None:
        _limit_elastic_spec(self.spec)
        limit_pod(self, only_cards=False)
        meta = self.metadata
        meta.labels = kept_labels(meta.labels, for_budgets=True)
        meta.annotations = kept_annotations(meta.annotations, _READ_ANNOTATIONS)

    @property
    def is_pending(self) -> bool:
        """Return whether it has no node and does not end."""
        return not (self.spec.node_name or self.is_ending)

    @property
    def is_ending(self) -> bool:
        """Return whether it has finished or is being deleted."""
        return self.finished or self.metadata.deletion_timestamp is not None

    @property
    def of_daemon_set(self) -> bool:
        """Return whether a DaemonSet keeps it on its node."""
        return any(owner.kind == "DaemonSet" for owner in self.metadata.owner_references)

    @property
    def mirrors_file(self) -> bool:
        """Return whether the kubelet runs it from a file, so that nothing else can end it."""
        return objects.MIRROR in self.metadata.annotations

    def host_amounts(self) -> dict[str, int]:
        """Return what kube-scheduler counts of it: `cpu` in thousandths, `memory` in MiB, other names whole.

        Init containers run before the others, one after the other, except for sidecars.
        """
        spec = self.spec
        return dict(
            _amounts(msgspec.json.encode((spec.containers, spec.init_containers, spec.overhead)))
        )


_HOST = tuple[tuple[ElasticContainer, ...], tuple[ElasticContainer, ...], Mapping[str, str | int]]
"""The parts of a pod that decide its amounts: containers, init containers and overhead."""


@lru_cache(maxsize=4096)
def _amounts(encoded: bytes) -> tuple[tuple[str, int], ...]:
    """Return the amounts of equal pods, computed once."""
    containers, init_containers, overhead = msgspec.json.decode(encoded, type=_HOST)
    running: dict[str, int] = {}
    for container in containers:
        _add(running, container)
    peak, sidecars = dict[str, int](), dict[str, int]()
    for container in init_containers:
        at_once = dict(sidecars)
        _add(at_once, container)
        if container.restart_policy == "Always":
            _add(running, container)
            sidecars = at_once
        for name, amount in at_once.items():
            peak[name] = max(peak.get(name, 0), amount)
    total = {name: max(running.get(name, 0), peak.get(name, 0)) for name in {*running, *peak}}
    for name, quantity in overhead.items():
        total[name] = total.get(name, 0) + host_amount(name, quantity)
    return tuple(sorted((name, amount) for name, amount in total.items() if amount))


def _add(sums: dict[str, int], container: ElasticContainer) -> None:
    # Without a request the limit is the request.
    resources = {**container.resources.limits, **container.resources.requests}
    for name, quantity in resources.items():
        sums[name] = sums.get(name, 0) + host_amount(name, quantity)


def host_amount(name: str, quantity: str | int) -> int:
    """Return an amount: CPU in thousandths of a core, memory in MiB, rounded up; 0 if it cannot be read."""
    try:
        if name == "cpu":
            return bounded(parse_milli(quantity))
        amount = parse_quantity(quantity)
    except InvalidRecord:
        return 0
    return bounded(-(-amount // MIB) if name in ("memory", "ephemeral-storage") else amount)


def bounded(amount: int) -> int:
    """Return the amount within what a case may have: one pod or node must not make a case invalid."""
    return min(max(amount, 0), MAX_HOST)


def allocatable(node: objects.Node) -> Iterator[tuple[str, int]]:
    """Yield what pods may request of a node: CPU in thousandths, memory in MiB rounded down, others whole."""
    for name, quantity in node.status.allocatable.items():
        if name == "memory":
            try:
                yield name, bounded(parse_quantity(quantity) // MIB)
            except InvalidRecord:
                yield name, 0
        else:
            yield name, host_amount(name, quantity)


class ElasticTemplate(objects.Object):
    """The pods of a DaemonSet."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: ElasticPodSpec = msgspec.field(default_factory=ElasticPodSpec)


class DaemonSetSpec(objects.Object):
    """The spec of a DaemonSet."""

    template: ElasticTemplate = msgspec.field(default_factory=ElasticTemplate)


class DaemonSet(objects.Object):
    """A DaemonSet, whose pods every new node receives."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: DaemonSetSpec = msgspec.field(default_factory=DaemonSetSpec)

    def __post_init__(self) -> None:
        objects.drop_notes(self.metadata)
        template = self.spec.template
        # Tenants may write DaemonSets, too. The limits are those of the pod that is made of it.
        objects.drop_notes(template.metadata)
        ElasticPod(spec=template.spec)


class PodIndex:
    """Pods by node. Wakes the loop when one comes or goes that may need a new node."""

    def __init__(self, state: ClusterState, wake: asyncio.Event) -> None:
        self._state, self._wake = state, wake
        self.by_uid: dict[str, ElasticPod] = {}
        self.by_node: dict[str, list[ElasticPod]] = {}

    def on_replace(self, objects: Sequence[ElasticPod]) -> None:
        """Replace all pods."""
        self._state.replace_pods(objects)
        self.by_uid, self.by_node = {}, {}
        for pod in objects:
            self._add(pod)
        self._wake.set()

    def on_upsert(self, obj: ElasticPod) -> None:
        """Set a pod."""
        self._state.set_pod(obj)
        known = self._remove(obj.metadata.uid)
        self._add(obj)
        if known is None or _is_waiting(known) or _is_waiting(obj):
            self._wake_for(obj)

    def on_delete(self, obj: ElasticPod) -> None:
        """Remove a pod."""
        self._state.forget_pod(obj.metadata.uid)
        self._remove(obj.metadata.uid)
        self._wake_for(obj)

    def _wake_for(self, pod: ElasticPod) -> None:
        if group_name(pod) is not None or pod.demand(self._state.dialects).requests_gpu:
            self._wake.set()

    def _add(self, pod: ElasticPod) -> None:
        self.by_uid[pod.metadata.uid] = pod
        if pod.spec.node_name and not pod.finished:
            self.by_node.setdefault(pod.spec.node_name, []).append(pod)

    def _remove(self, uid: str) -> ElasticPod | None:
        pod = self.by_uid.pop(uid, None)
        if pod is not None and pod.spec.node_name and not pod.finished:
            others = [other for other in self.by_node[pod.spec.node_name] if other is not pod]
            self.by_node[pod.spec.node_name] = others
            if not others:
                del self.by_node[pod.spec.node_name]
        return pod


def _is_waiting(pod: ElasticPod) -> bool:
    return not pod.spec.node_name and not pod.finished


class NodeIndex:
    """Nodes by name. Wakes the loop for changes by which anything is decided."""

    def __init__(self, state: ClusterState, wake: asyncio.Event) -> None:
        self._state, self._wake = state, wake
        self.by_name: dict[str, Node] = {}

    def on_replace(self, objects: Sequence[Node]) -> None:
        """Replace all nodes."""
        self._state.replace_nodes(objects)
        self.by_name = {node.metadata.name: node for node in objects}
        self._wake.set()

    def on_upsert(self, obj: Node) -> None:
        """Set a node."""
        known = self.by_name.get(obj.metadata.name)
        self._state.set_node(obj)
        self.by_name[obj.metadata.name] = obj
        if known is None or _facts(known) != _facts(obj):
            self._wake.set()

    def on_delete(self, obj: Node) -> None:
        """Remove a node, unless another one already has its name."""
        known = self.by_name.get(obj.metadata.name)
        if known is None or known.metadata.uid == obj.metadata.uid:
            self._state.forget_node(obj.metadata.name)
            self.by_name.pop(obj.metadata.name, None)
            self._wake.set()


def _facts(node: Node) -> object:
    """Return what is decided by; kubelets report other things all the time."""
    annotations = node.metadata.annotations
    return (
        node.metadata.uid,
        node.metadata.labels,
        annotations.get(CARDS),
        annotations.get(autoscaling.RECLAIM_AT),
        annotations.get(autoscaling.SPOT_ADMIT),
        annotations.get(autoscaling.PROTECTED_UNTIL),
        node.spec,
        node.ready,
        node.status.allocatable,
    )


class ElasticCluster(Informers):
    """All informers of the autoscaler. `run` is their task.

    Attributes:
        changed: set when something has changed by which anything is decided.
    """

    def __init__(
        self, api: Api, dialects: tuple[Dialect, ...], topology_levels: tuple[str, ...] = ()
    ) -> None:
        self.changed = asyncio.Event()
        self.state = ClusterState(dialects=dialects)
        self.state.topology_levels = topology_levels
        self.pods = PodIndex(self.state, self.changed)
        self.nodes = NodeIndex(self.state, self.changed)
        self._groups = PodGroupIndex()
        self._pod_informer = Informer(api, "/api/v1/pods", ElasticPod, self.pods)
        self._node_informer = Informer(api, "/api/v1/nodes", Node, self.nodes)
        self._budgets: Informer[PodDisruptionBudget] = Informer(
            api, BUDGETS_PATH, PodDisruptionBudget, NullListener(), optional=True
        )
        self._daemons: Informer[DaemonSet] = Informer(
            api, DAEMON_SETS_PATH, DaemonSet, NullListener()
        )
        self.by_collection: dict[str, Informer[Any]] = {
            "nodes": self._node_informer,
            "pods": self._pod_informer,
            "daemonsets": self._daemons,
            "podgroups": Informer(api, POD_GROUPS_PATH, PodGroup, self._groups, optional=True),
            "poddisruptionbudgets": self._budgets,
        }

    @property
    def groups(self) -> Mapping[str, PodGroup]:
        """Return the PodGroups by namespace/name."""
        return self._groups.by_name

    @property
    def budgets(self) -> Sequence[PodDisruptionBudget]:
        """Return all PodDisruptionBudgets."""
        return tuple(self._budgets.objects.values())

    @property
    def daemons(self) -> Sequence[DaemonSet]:
        """Return all DaemonSets."""
        return tuple(self._daemons.objects.values())

    async def read(self) -> None:
        """Read what plans need once, without following it. Raises ApiError, ApiUnreachable."""
        informers = self.by_collection.values()
        needed = (informer.read() for informer in informers if informer is not self._budgets)
        await asyncio.gather(*needed)

    async def relist(self) -> None:
        """Read nodes and pods again, as of now."""
        await asyncio.gather(self._node_informer.relist(), self._pod_informer.relist())
