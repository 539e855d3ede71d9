"""Kubernetes' objects with the fields that only the autoscaler reads."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from fenka.cluster.autoscaling import INTERRUPTIBLE, PLANNED
from fenka.cluster.objects import (
    MIRROR,
    Affinity,
    Container,
    Node,
    NodeSpec,
    Object,
    ObjectMeta,
    Pod,
    PodSpec,
    PodStatus,
    drop_notes,
)
from fenka.cluster.pod_limits import (
    MAX_RESOURCES,
    kept_annotations,
    kept_labels,
    limit_pod,
)
from fenka.core.request import MAX_HOST
from fenka.dialects.base import InvalidRecord, parse_quantity

MIB = 1024 * 1024
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_READ_ANNOTATIONS = frozenset((PLANNED, INTERRUPTIBLE, DO_NOT_DISRUPT, SAFE_TO_EVICT, MIRROR))
DAEMON_SETS_PATH = "/apis/apps/v1/daemonsets"


class ContainerPort(Object):
    """A port of a container."""

    host_port: int | None = None


class ElasticContainer(Container):
    """A container with its ports."""

    ports: tuple[ContainerPort, ...] = ()


class Present(Object):
    """Something of which only the presence matters."""


class PodTerms(Object):
    """Affinity or anti-affinity to pods."""

    required_during_scheduling_ignored_during_execution: tuple[Present, ...] = ()


class ElasticAffinity(Affinity):
    """All affinity of a pod."""

    pod_affinity: PodTerms | None = None
    pod_anti_affinity: PodTerms | None = None


class TopologySpread(Object):
    """A rule that spreads pods over nodes or zones."""

    when_unsatisfiable: str = ""


class Volume(Object):
    """A volume of a pod. host_path, empty_dir: None if it is of another kind."""

    name: str = ""
    host_path: dict[str, Any] | None = None
    empty_dir: dict[str, Any] | None = None


class ElasticPodSpec(PodSpec):
    """A pod's spec with everything that restricts where it may run, or whether it may be moved."""

    affinity: ElasticAffinity | None = None
    containers: tuple[ElasticContainer, ...] = ()
    init_containers: tuple[ElasticContainer, ...] = ()
    overhead: Mapping[str, str | int] = {}
    topology_spread_constraints: tuple[TopologySpread, ...] = ()
    resource_claims: tuple[Present, ...] = ()
    volumes: tuple[Volume, ...] = ()


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
    spec.volumes = (Volume(empty_dir={}),) if local else ()
    if len(spec.overhead) > MAX_RESOURCES:
        spec.overhead = {}


class ElasticPodStatus(PodStatus):
    """A pod's status. nominated_node_name: where preemption makes room for it."""

    nominated_node_name: str = ""


class ElasticPod(Pod):
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
    def of_daemon_set(self) -> bool:
        """Return whether a DaemonSet keeps it on its node."""
        return any(owner.kind == "DaemonSet" for owner in self.metadata.owner_references)

    @property
    def mirrors_file(self) -> bool:
        """Return whether the kubelet runs it from a file, so that nothing else can end it."""
        return MIRROR in self.metadata.annotations

    def host_amounts(self) -> dict[str, int]:
        """Return what kube-scheduler counts of it: `cpu` in thousandths, `memory` in MiB, other names whole.

        Init containers run before the others, one after the other, except for sidecars.
        """
        return dict(_amounts(msgspec.json.encode(_host(self))))


class _Host(Object):
    containers: tuple[ElasticContainer, ...]
    init_containers: tuple[ElasticContainer, ...]
    overhead: Mapping[str, str | int]


def _host(pod: ElasticPod) -> _Host:
    spec = pod.spec
    return _Host(
        containers=spec.containers, init_containers=spec.init_containers, overhead=spec.overhead
    )


@lru_cache(maxsize=4096)
def _amounts(encoded: bytes) -> tuple[tuple[str, int], ...]:
    """Return the amounts of equal pods, computed once."""
    host = msgspec.json.decode(encoded, type=_Host)
    running: dict[str, int] = {}
    for container in host.containers:
        _add(running, container)
    peak, sidecars = dict[str, int](), dict[str, int]()
    for container in host.init_containers:
        at_once = dict(sidecars)
        _add(at_once, container)
        if container.restart_policy == "Always":
            _add(running, container)
            sidecars = at_once
        for name, amount in at_once.items():
            peak[name] = max(peak.get(name, 0), amount)
    total = {name: max(running.get(name, 0), peak.get(name, 0)) for name in {*running, *peak}}
    for name, quantity in host.overhead.items():
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
            return bounded(_milli(quantity))
        amount = parse_quantity(quantity)
    except InvalidRecord:
        return 0
    return bounded(-(-amount // MIB) if name in ("memory", "ephemeral-storage") else amount)


def bounded(amount: int) -> int:
    """Return the amount within what a case may have: one pod or node must not make a case invalid."""
    return min(max(amount, 0), MAX_HOST)


def _milli(quantity: str | int) -> int:
    text = str(quantity).strip()
    if text.endswith("m"):
        return parse_quantity(text[:-1])
    # A suffix or exponent is never used for CPU, but allowed; decimals are.
    whole, dot, decimals = text.partition(".")
    if dot and decimals.isdecimal() and (whole.isdecimal() or not whole):
        return int(f"{whole or 0}{decimals[:3]:0<3}") + bool(decimals[3:].strip("0"))
    return parse_quantity(text) * 1000


def allocatable(node: Node) -> Iterator[tuple[str, int]]:
    """Yield what pods may request of a node: CPU in thousandths, memory in MiB rounded down, others whole."""
    for name, quantity in node.status.allocatable.items():
        if name == "memory":
            try:
                yield name, bounded(parse_quantity(quantity) // MIB)
            except InvalidRecord:
                yield name, 0
        else:
            yield name, host_amount(name, quantity)


class ElasticNodeSpec(NodeSpec):
    """A node's spec. provider_id: the machine's name in the cloud's words."""

    provider_id: str = msgspec.field(default="", name="providerID")


class ElasticNode(Node):
    """A node as the autoscaler keeps it."""

    spec: ElasticNodeSpec = msgspec.field(default_factory=ElasticNodeSpec)


class PodTemplate(Object):
    """The pods of a DaemonSet."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ElasticPodSpec = msgspec.field(default_factory=ElasticPodSpec)


class DaemonSetSpec(Object):
    """The spec of a DaemonSet."""

    template: PodTemplate = msgspec.field(default_factory=PodTemplate)


class DaemonSet(Object):
    """A DaemonSet, whose pods every new node receives."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: DaemonSetSpec = msgspec.field(default_factory=DaemonSetSpec)

    def __post_init__(self) -> None:
        drop_notes(self.metadata)
        template = self.spec.template
        # Tenants may write DaemonSets, too. The limits are those of the pod that is made of it.
        drop_notes(template.metadata)
        ElasticPod(spec=template.spec)
