"""Kubernetes' objects, with the fields that fenka reads, decoded by msgspec.

Unknown fields are ignored, so newer servers are supported. Nothing is ever written back whole.

A pod's request for GPUs is parsed once and kept with the pod (`Pod.demand`).
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import msgspec

from fenka.cluster.mappings import SharedValues
from fenka.core.inventory import Taint, Toleration
from fenka.core.request import ComputeMode
from fenka.core.units import mib_to_units
from fenka.dialects import base, gpushare, nvidia
from fenka.dialects.card_records import nominal_mib
from fenka.dialects.gpushare import peak_units
from fenka.dialects.mig_records import INSIDE
from fenka.dialects.registry import WITH_HAMI, detect, names_any, option_names


class PodDemand:
    """A pod's request, in the first dialect that matches it.

    Attributes:
        dialects: those that were tried.
        dialect: None if the pod requests nothing, or `error` says why it cannot be read.
        refused: whether the pod is not served in any dialect, for what else it has.
    """

    refused = False

    def __init__(self, request: base.PodRequest, dialects: tuple[base.Dialect, ...]) -> None:
        self._request, self.dialects = request, dialects
        self._result: tuple[tuple[base.SliceRequest, ...], str | None] | None = None
        self._inside: tuple[str, PodDemand] | None = None
        """The same inside instances of a profile; nearly all nodes have the same."""
        self.error: str | None = None
        self.dialect: base.Dialect | None = None
        try:
            self.dialect = detect(request, dialects)
        except base.InvalidRecord as why:
            self.error = str(why)

    @property
    def requests_gpu(self) -> bool:
        """Return whether the pod requests anything of a card, readable or not."""
        return self.dialect is not None or self.error is not None

    @property
    def parts(self) -> tuple[base.SliceRequest, ...]:
        """Return what the pod requests; empty for nothing. Raises InvalidRecord."""
        parts, invalid = self._parsed
        if invalid is not None:
            raise base.InvalidRecord(invalid)
        return parts

    @property
    def invalid(self) -> str | None:
        """Return why `parts` cannot be read; None if they can."""
        return self._parsed[1]

    @property
    def in_instances(self) -> bool:
        """Return whether the pod requests instances of divided cards, or slices in them."""
        return bool(self.instance)

    @property
    def instance(self) -> str:
        """Return the first profile of which the pod requests instances, ANY_INSTANCE; empty for cards."""
        parts = self._parsed[0]
        return parts[0].request.instance if parts else ""

    @property
    def of_single_cards(self) -> bool:
        """Return whether the pod requests slices of one card each, and nothing else of cards or instances."""
        requests = [part.request for part in self._parsed[0]]
        return bool(requests) and not any(
            request.whole or request.instance or request.cards > 1 for request in requests
        )

    def inside(self, profile: str) -> "PodDemand":
        """Return the same request inside instances, as with the annotation. profile: or ANY_INSTANCE."""
        if self._inside is None or self._inside[0] != profile:
            annotations = {**self._request.annotations, INSIDE: profile}
            request = msgspec.structs.replace(self._request, annotations=annotations)
            self._inside = profile, PodDemand(request, self.dialects)
        return self._inside[1]

    @property
    def served_by_kubelet(self) -> bool:
        """Return whether the kubelet of a node that does not share gives what the pod requests, too."""
        whole = all(part.request.whole for part in self._parsed[0])
        return self.dialect is nvidia or (self.in_instances and whole)

    @property
    def weight(self) -> int:
        """Return the sum of the pod's weights of compute; 0 for none."""
        return sum([part.weight * part.request.cards for part in self._parsed[0]])

    @property
    def core_mode(self) -> ComputeMode:
        """Return the meaning of the compute that the pod requests; hard if it requests none."""
        modes = [part.core_mode for part in self._parsed[0]]
        return next((mode for mode in modes if mode != "hard"), "hard")

    @property
    def _parsed(self) -> tuple[tuple[base.SliceRequest, ...], str | None]:
        # Faster than cached_property, which locks until Python 3.12.
        if self._result is None:
            self._result = self._parse()
        return self._result

    def _parse(self) -> tuple[tuple[base.SliceRequest, ...], str | None]:
        if self.dialect is None:
            return (), self.error
        try:
            return self.dialect.parse(self._request), None
        except base.InvalidRecord as why:
            return (), str(why)

    @cached_property
    def amounts(self) -> dict[str, int]:
        """Return the kubelet's amount of each resource of the dialect. Raises InvalidRecord."""
        if self.error is not None:
            raise base.InvalidRecord(self.error)
        names = self._request.requested_resources(self.dialect.RESOURCES) if self.dialect else ()
        return {name: gpushare.peak_units(self._request.container_units(name)) for name in names}

    def amount(self, resource: str) -> int:
        """Return the amount of one resource; 0 if the request cannot be read."""
        return 0 if self.error is not None else self.amounts.get(resource, 0)

    def units(self, node: base.SharedNode) -> float:
        """Return the units of the node's memory that the pod requests; 0 if that cannot be read."""
        try:
            if gpushare.MEMORY in self.amounts:
                return self.amounts[gpushare.MEMORY]
            parts = self.parts
        except base.InvalidRecord:
            return 0
        card = node.node.cards[0]
        return sum(
            part.request.cards
            * mib_to_units(
                nominal_mib(part.request, node.node, card), card.memory_mib, node.unit_mib
            )
            for part in parts
        )


class RefusedDemand(PodDemand):
    """The demand of a pod that requests cards and is not served. error: the sentence for its user."""

    refused = True

    def __init__(self, why: str) -> None:
        super().__init__(base.PodRequest(()), ())
        self.error = why

    def inside(self, _: str) -> PodDemand:
        """Return the same: it is not served in instances either."""
        return self


def shared_demand(request: base.PodRequest, dialects: tuple[base.Dialect, ...]) -> PodDemand:
    """Return what is requested by these dialects' names.

    New versions of a pod, and pods of one workload, share what was parsed for the first of them.
    """
    if not names_any([container.resources for container in request.containers], dialects):
        return _nothing(dialects)
    names = option_names(dialects)
    labels, annotations = _only(request.labels, names), _only(request.annotations, names)
    request = base.PodRequest(request.containers, labels, annotations)
    key, demands = msgspec.json.encode(request), _recent_demands(dialects)
    demand = demands.get(key)
    if demand is None:
        demand = demands[key] = PodDemand(request, dialects)
    return demand


def _only(given: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    # Most pods have none of them.
    return {} if names.isdisjoint(given) else {name: given[name] for name in names if name in given}


@lru_cache(maxsize=8)
def _recent_demands(_: tuple[base.Dialect, ...]) -> SharedValues[PodDemand]:
    return SharedValues()


@lru_cache(maxsize=8)
def _nothing(dialects: tuple[base.Dialect, ...]) -> PodDemand:
    return PodDemand(base.PodRequest(()), dialects)


V = TypeVar("V")

QUEUE_GATE = "fenka.io/queue"
"""The scheduling gate that the chart's admission policy puts on pods that request cards.

kube-scheduler does not try a pod that has it. The leading extender removes it."""

BACKFILL_CLASS = "fenka-backfill"
"""The chart's PriorityClass for jobs that use what others leave idle."""

PREEMPTED = "PreemptionByScheduler"
"""The reason of the condition that kube-scheduler writes on a pod before it evicts it for another one."""

MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a pod that the kubelet runs from a file."""


class Object(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True, gc=False):
    """Base of all objects. Kubernetes' names are in camel case. None refers to itself, so none needs gc."""


class OwnerReference(Object):
    """A reference to the object that created this one."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class ObjectMeta(Object):
    """The metadata of an object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None


def drop_notes(meta: ObjectMeta) -> None:
    """Drop the labels, annotations and owners of an object of which nobody reads them."""
    meta.labels = meta.annotations = {}
    meta.owner_references = ()


class ResourceRequirements(Object):
    """The limits and requests of a container. Quantities are strings, seldom numbers."""

    limits: Mapping[str, str | int] = {}
    requests: Mapping[str, str | int] = {}


class Container(Object):
    """A container of a pod's spec."""

    name: str = ""
    image: str = ""
    resources: ResourceRequirements = msgspec.field(default_factory=ResourceRequirements)
    restart_policy: str | None = None


class SchedulingGroup(Object):
    """The PodGroup that a pod belongs to."""

    pod_group_name: str = ""


class SchedulingGate(Object):
    """A gate: the pod is not scheduled until its owner removes it."""

    name: str = ""


class SelectorRequirement(Object):
    """One requirement on a label or field."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class NodeSelectorTerm(Object):
    """Requirements on labels, and on fields of the node, all of which must match."""

    match_expressions: tuple[SelectorRequirement, ...] = ()
    match_fields: tuple[SelectorRequirement, ...] = ()


class NodeSelector(Object):
    """Terms of which one must match."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class NodeAffinity(Object):
    """The nodes that a pod requires."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(Object):
    """The affinity of a pod."""

    node_affinity: NodeAffinity | None = None


class PodSpec(Object):
    """The spec of a pod."""

    node_name: str = ""
    scheduler_name: str = ""
    runtime_class_name: str | None = None
    priority: int | None = None
    priority_class_name: str = ""
    active_deadline_seconds: int | None = None
    scheduling_group: SchedulingGroup | None = None
    termination_grace_period_seconds: int | None = None
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    node_selector: Mapping[str, str] = {}
    affinity: Affinity | None = None
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()


class Condition(Object):
    """A condition of a node or pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    """Go writes null for a time that was never set."""


def _find(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


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
    nominated_node_name: str = ""
    """Where kube-scheduler has evicted pods for this one."""
    start_time: str = ""
    """When the kubelet accepted the pod: activeDeadlineSeconds count from then."""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class _Demanding:
    __slots__ = ("_demand",)
    _demand: PodDemand


class Pod(_Demanding, Object):
    """A pod."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def finished(self) -> bool:
        """Return whether the pod has ended and holds nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def ended_at(self) -> str:
        """Return when its containers stopped being ready, for a pod that has finished; empty if unknown."""
        ready = self.condition("Ready")
        return (ready and ready.last_transition_time) or ""

    @property
    def unschedulable(self) -> str | None:
        """Return kube-scheduler's message if it found no node the last time, else None."""
        scheduled = self.condition("PodScheduled")
        if scheduled is None or (scheduled.status, scheduled.reason) != ("False", "Unschedulable"):
            return None
        return scheduled.message

    def condition(self, type_: str) -> Condition | None:
        """Return the condition of this type, if the pod has one."""
        return _find(self.status.conditions, type_)

    def gated_by(self, gate: str) -> bool:
        """Return whether the pod has this scheduling gate."""
        return any(present.name == gate for present in self.spec.scheduling_gates)

    @property
    def request(self) -> base.PodRequest:
        """Return the fields by which dialects recognise a request."""
        containers = [
            base.ContainerRequest(
                container.name,
                _dict(container.resources.limits),
                base.ContainerKind.SIDECAR
                if container.restart_policy == "Always"
                else base.ContainerKind.INIT,
            )
            for container in self.spec.init_containers
        ]
        containers += [
            base.ContainerRequest(container.name, _dict(container.resources.limits))
            for container in self.spec.containers
        ]
        meta = self.metadata
        return base.PodRequest(tuple(containers), meta.labels, _dict(meta.annotations))

    def demand(
        self, dialects: tuple[base.Dialect, ...] = WITH_HAMI, request: base.PodRequest | None = None
    ) -> PodDemand:
        """Return what the pod requests by these dialects' names. It is parsed once.

        request: the property of that name, if the caller has read it already.
        """
        known: PodDemand | None = getattr(self, "_demand", None)
        if known is None or (known.dialects is not dialects and not known.refused):
            known = self._demand = shared_demand(request or self.request, dialects)
        return known

    def refuse(self, why: str) -> None:
        """Have its demand be one that cannot be served. why: the sentence for the pod's user."""
        self._demand = RefusedDemand(why)

    def amount(self, resource: str) -> int:
        """Return how much of a resource the pod needs at its peak; 0 if that cannot be read."""
        containers = (*self.spec.containers, *self.spec.init_containers)
        # Most pods have none; that need not be parsed.
        if not any(resource in container.resources.limits for container in containers):
            return 0
        try:
            return peak_units(self.request.container_units(resource))
        except base.InvalidRecord:
            return 0

    @property
    def full_name(self) -> str:
        """Return namespace/name."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def path(self) -> str:
        """Return the pod's path at the API server."""
        return pod_path(self.metadata.namespace, self.metadata.name)


def _dict(mapping: Mapping[str, V]) -> dict[str, V]:
    return mapping if isinstance(mapping, dict) else dict(mapping.items())


def pod_path(namespace: str, name: str) -> str:
    """Return a pod's path at the API server."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def node_path(name: str) -> str:
    """Return a node's path at the API server."""
    return f"/api/v1/nodes/{name}"


class NodeSpec(Object):
    """The spec of a node."""

    provider_id: str = msgspec.field(default="", name="providerID")
    """The cloud's name of its machine."""
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeAddress(Object):
    """An address of a node."""

    type: str = ""
    address: str = ""


class NodeStatus(Object):
    """The status of a node."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    addresses: tuple[NodeAddress, ...] = ()
    conditions: tuple[Condition, ...] = ()


class Node(Object):
    """A node."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)

    @property
    def readiness(self) -> str:
        """Return the status of its Ready condition: True, False or Unknown."""
        ready = _find(self.status.conditions, "Ready")
        return ready.status if ready else "Unknown"

    @property
    def ready(self) -> bool:
        """Return whether its Ready condition is True."""
        return self.readiness == "True"

    @property
    def address(self) -> str:
        """Return its InternalIP, or `unknown`."""
        internal = (
            address.address for address in self.status.addresses if address.type == "InternalIP"
        )
        return next(internal, "unknown")


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
    """A Secret, with its data in base64."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    data: dict[str, str] = {}


class ApiStatus(Object):
    """The API server's answer to a request that fails."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


@lru_cache(maxsize=4096)
def seconds(moment: str) -> float | None:
    """Return a time that Kubernetes wrote as seconds since 1970, None if it is no time."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None


def micro_time(moment: datetime) -> str:
    """Return a moment in UTC as Kubernetes writes a MicroTime."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
