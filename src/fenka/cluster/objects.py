"""What fenka reads of Kubernetes' objects: just the fields it needs, decoded by msgspec.

Unknown fields are passed over, so that newer servers are no trouble; nothing is ever written back whole.
"""

from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from fenka.cluster.pod_demand import PodDemand
from fenka.dialects.base import ContainerKind, ContainerRequest, Dialect, InvalidRecord, PodRequest
from fenka.dialects.gpushare import peak_units
from fenka.dialects.registry import WITH_HAMI

QUEUE_GATE = "fenka.io/queue"
"""The scheduling gate that the chart's admission policy puts on pods that ask for cards. While a pod has it,
kube-scheduler does not try it. The leader removes it."""


class Object(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """Kubernetes' names are in camel case."""


class OwnerReference(Object):
    """Who made an object."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class ObjectMeta(Object):
    """metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


class ResourceRequirements(Object):
    """Of a container. Quantities are strings, seldom numbers."""

    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class Container(Object):
    """A container as it is asked for."""

    name: str = ""
    image: str = ""
    resources: ResourceRequirements = msgspec.field(default_factory=ResourceRequirements)
    restart_policy: str | None = None


class SchedulingGroup(Object):
    """Which PodGroup a pod belongs to."""

    pod_group_name: str = ""


class SchedulingGate(Object):
    """Whoever put it there keeps the pod from being scheduled."""

    name: str = ""


class Toleration(Object):
    """Of a pod."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class SelectorRequirement(Object):
    """One condition on a label."""

    key: str = ""
    operator: str = ""
    values: list[str] = []


class NodeSelectorTerm(Object):
    """Conditions on labels, and on fields of the node, that hold together."""

    match_expressions: list[SelectorRequirement] = []
    match_fields: list[SelectorRequirement] = []


class NodeSelector(Object):
    """Terms of which one must hold."""

    node_selector_terms: list[NodeSelectorTerm] = []


class NodeAffinity(Object):
    """Which nodes a pod wants."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(Object):
    """Of a pod."""

    node_affinity: NodeAffinity | None = None


class PodSpec(Object):
    """spec of a pod."""

    node_name: str = ""
    scheduler_name: str = ""
    runtime_class_name: str | None = None
    priority: int | None = None
    priority_class_name: str = ""
    active_deadline_seconds: int | None = None
    scheduling_group: SchedulingGroup | None = None
    termination_grace_period_seconds: int | None = None
    scheduling_gates: list[SchedulingGate] = []
    tolerations: list[Toleration] = []
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    containers: list[Container] = []
    init_containers: list[Container] = []


class Condition(Object):
    """Of a node or a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    """Go writes null for a time that was never set."""


class ContainerStateWaiting(Object):
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


class ContainerState(Object):
    """The state of a container; fenka reads only why it waits."""

    waiting: ContainerStateWaiting | None = None


class ContainerStatus(Object):
    """A container as the kubelet reports it."""

    name: str = ""
    container_id: str = msgspec.field(default="", name="containerID")
    ready: bool = False
    restart_count: int = 0
    state: ContainerState = msgspec.field(default_factory=ContainerState)


class PodStatus(Object):
    """The status of a pod."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str = ""
    """When the kubelet heard of it: activeDeadlineSeconds count from then."""
    conditions: list[Condition] = []
    container_statuses: list[ContainerStatus] = []
    init_container_statuses: list[ContainerStatus] = []


class Pod(Object, dict=True):
    """A pod."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def finished(self) -> bool:
        """It holds nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def ended_at(self) -> str:
        """Return when its containers stopped being ready, for a pod that has finished; empty if unknown."""
        times = (it.last_transition_time for it in self.status.conditions if it.type == "Ready")
        return next(times, None) or ""

    @property
    def unschedulable(self) -> str | None:
        """What kube-scheduler said when it last found no node; None where it has not said that."""
        for it in self.status.conditions:
            if it.type == "PodScheduled" and it.status == "False" and it.reason == "Unschedulable":
                return it.message
        return None

    def gated_by(self, gate: str) -> bool:
        """Whether this scheduling gate is on it."""
        return any(it.name == gate for it in self.spec.scheduling_gates)

    @cached_property
    def request(self) -> PodRequest:
        """Return the fields by which dialects recognise a request."""
        inits = (
            ContainerRequest(
                it.name,
                it.resources.limits,
                ContainerKind.SIDECAR if _stays(it) else ContainerKind.INIT,
            )
            for it in self.spec.init_containers
        )
        apps = (ContainerRequest(it.name, it.resources.limits) for it in self.spec.containers)
        return PodRequest((*inits, *apps), self.metadata.labels, self.metadata.annotations)

    @cached_property
    def _demands(self) -> dict[tuple[Dialect, ...], PodDemand]:
        return {}

    def demand(self, dialects: tuple[Dialect, ...] = WITH_HAMI) -> PodDemand:
        """Return what the pod requests by these dialects' names. It is parsed once."""
        demand = self._demands.get(dialects)
        if demand is None:
            demand = self._demands[dialects] = PodDemand(self.request, dialects)
        return demand

    def amount(self, resource: str) -> int:
        """Return how much of a resource the pod needs at its peak; 0 if that cannot be read."""
        containers = (*self.spec.containers, *self.spec.init_containers)
        # Most pods have none; that need not be parsed.
        if not any(resource in it.resources.limits for it in containers):
            return 0
        try:
            return peak_units(self.request.container_units(resource))
        except InvalidRecord:
            return 0

    @property
    def full_name(self) -> str:
        """namespace/name."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def path(self) -> str:
        """Of the API server."""
        return pod_path(self.metadata.namespace, self.metadata.name)


def pod_path(namespace: str, name: str) -> str:
    """Of the API server."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _stays(init: Container) -> bool:
    return init.restart_policy == "Always"


class Taint(Object):
    """Of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Object):
    """spec of a node."""

    unschedulable: bool = False
    taints: list[Taint] = []


class NodeAddress(Object):
    """Of a node."""

    type: str = ""
    address: str = ""


class NodeStatus(Object):
    """status of a node."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    addresses: list[NodeAddress] = []
    conditions: list[Condition] = []


class Node(Object):
    """A node."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)

    @property
    def readiness(self) -> str:
        """What its Ready condition says: True, False, or Unknown."""
        return next((it.status for it in self.status.conditions if it.type == "Ready"), "Unknown")

    @property
    def ready(self) -> bool:
        """Whether it says True."""
        return self.readiness == "True"

    @property
    def address(self) -> str:
        """Its InternalIP, or `unknown`."""
        found = (it.address for it in self.status.addresses if it.type == "InternalIP")
        return next(found, "unknown")


class EventSeries(Object):
    """An event that was repeated."""

    last_observed_time: str = ""


class Event(Object):
    """An event on an object."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    series: EventSeries | None = None

    @property
    def at(self) -> str:
        """Return when it happened last, in ISO 8601, so that it sorts."""
        repeated = self.series.last_observed_time if self.series else ""
        created = self.metadata.creation_timestamp
        return repeated or self.last_timestamp or self.event_time or created


class ConfigMap(Object):
    """A ConfigMap."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    data: dict[str, str] = {}


class Secret(Object):
    """A Secret. data: in base64."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    data: dict[str, str] = {}


class Status(Object):
    """How the API server says no."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


@lru_cache(maxsize=65_536)
def seconds(moment: str) -> float | None:
    """Since 1970, of a time as Kubernetes writes it; None for what is none."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None


def micro_time(moment: datetime) -> str:
    """As Kubernetes writes a MicroTime; the moment is in UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
