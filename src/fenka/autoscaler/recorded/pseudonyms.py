"""Rebuilds the objects of a cluster without names: only what placement needs is kept, under pseudonyms.

Objects are made anew of known fields, so that a field that nobody has thought of is left out. Pseudonyms are
numbered in the order of the names. So ties that names decide stay as they are, and a cluster that has not
changed gets the same ones again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from fenka.autoscaler.watch import (
    DaemonSet,
    DaemonSetSpec,
    ElasticAffinity,
    ElasticContainer,
    ElasticPod,
    ElasticPodSpec,
    ElasticPodStatus,
    ElasticPort,
    ElasticTemplate,
)
from fenka.cloud.port import TYPE_LABEL
from fenka.cluster import autoscaling, objects
from fenka.cluster.objects import Node, ObjectMeta, Pod, SelectorRequirement
from fenka.cluster.pod_groups import (
    MINIMUM_LABEL,
    NAME_LABELS,
    TOPOLOGY_ANNOTATIONS,
    PodGroup,
    group_name,
)
from fenka.cluster.state import ClusterState
from fenka.core.inventory import Card, DeviceId, Links, Taint, Toleration, card_of
from fenka.core.nodes.case import HOSTNAME_LABEL
from fenka.core.nodes.problem import ZONE_LABEL
from fenka.core.policies.scores import SCORES
from fenka.core.request import Slice
from fenka.dialects import gpushare, lease_records, nodes
from fenka.dialects.base import CARDS, NVIDIA_GPU, InvalidRecord, SharedNode
from fenka.dialects.lease_records import LeaseReport, Lingering, Refusal
from fenka.dialects.mig_records import INSIDE, INSTANCES, decode_instances, encode_instances
from fenka.dialects.registry import WITH_HAMI, node_resources, option_names, resource_names

UNREADABLE = "unreadable"
"""Stands for a value that is written wrongly: what was written may be anything."""

_NUMERIC = ("Gt", "Lt")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", *_NUMERIC)
_EFFECTS = ("NoSchedule", "NoExecute", "PreferNoSchedule", "")
_OWNERS = ("DaemonSet", "ReplicaSet", "StatefulSet", "Job", "Node")
_ALWAYS = (ZONE_LABEL, autoscaling.GROUP)
"""Labels that nodes keep even if no pod selects them."""
_HOST = ("cpu", "memory", "ephemeral-storage", "pods")
_QUANTITY = re.compile(r"[0-9.]{1,30}(?:[eE][0-9]{1,3}|[numkKMGTPE]i?)?")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_HUGE_PAGES = re.compile(r"hugepages-[0-9]{1,4}[KMG]i")
_CONDITIONS = ("not-ready", "unreachable", "unschedulable", "memory-pressure", "disk-pressure")
_KNOWN_KEYS = frozenset(
    (
        *(HOSTNAME_LABEL, ZONE_LABEL, TYPE_LABEL, "topology.kubernetes.io/region"),
        *("kubernetes.io/os", "kubernetes.io/arch", NVIDIA_GPU),
        *(f"node.kubernetes.io/{name}" for name in _CONDITIONS),
        *(autoscaling.GROUP, autoscaling.CAPACITY, autoscaling.ENDING, autoscaling.RECLAIMED),
        *(nodes.PLACEMENT_LABEL, nodes.DISABLE_ISOLATION_LABEL, *nodes.MODE_LABELS),
    )
)
"""Keys of labels and taints that say nothing of the cluster's owner."""
_VALUES = {
    **dict.fromkeys(nodes.SHARING_LABELS, "true|false|enable|disable"),
    **dict.fromkeys((nodes.WHOLE_LABEL, nodes.DISABLE_ISOLATION_LABEL), "true|false"),
    nodes.PLACEMENT_LABEL: "|".join(map(re.escape, SCORES)),
    nodes.MODE_LABEL: "|".join(nodes.MODES),
    nodes.MIG_LABEL: r"off|static|on-demand[.:,_0-9-]{0,40}",
    nodes.MIG_TENANCY: "|".join(nodes.TENANCIES),
    INSIDE: r"mig|[0-9]{1,2}(?:c\.[0-9]{1,2})?g\.[0-9]{1,4}gb(?:[.+]me)?",
    autoscaling.CAPACITY: "spot|on-demand",
}
"""Labels of nodes whose values are words of fenka's or ACK's, and what such words look like."""


class _Names:
    """Pseudonyms of one kind. The empty name stays empty."""

    def __init__(self, prefix: str, names: Iterable[str]) -> None:
        ordered = sorted({*names} - {""})
        width = len(str(len(ordered)))
        self._known = {name: f"{prefix}-{n:0{width}}" for n, name in enumerate(ordered, start=1)}
        self._prefix = prefix

    def __getitem__(self, name: str) -> str:
        return self._known.get(name, f"{self._prefix}-0") if name else ""


class Pseudonyms:
    """The pseudonyms of one cluster, and its objects under them."""

    def __init__(
        self,
        state: ClusterState,
        pods: Sequence[ElasticPod],
        groups: Sequence[PodGroup],
        daemons: Sequence[DaemonSet],
    ) -> None:
        """Args:
        state: has the nodes, and what is held of their cards.
        pods: all of them.
        groups: the PodGroups.
        daemons: the DaemonSets.
        """
        self._state = state
        specs = [pod.spec for pod in pods] + [daemon.spec.template.spec for daemon in daemons]
        everything: tuple[ElasticPod | PodGroup | DaemonSet, ...] = (*pods, *groups, *daemons)
        metas = [owner.metadata for owner in everything]
        lingering = [
            held.pod.metadata
            for node in state.nodes()
            for held in state.allocations(node.metadata.name)
            if held.lingering
        ]
        on = [name for spec in specs for name in (spec.node_name, *_field_names(spec))]
        nominated = [pod.status.nominated_node_name for pod in pods]
        self._nodes = _Names(
            "node", chain((node.metadata.name for node in state.nodes()), on, nominated)
        )
        self._namespaces = _Names("namespace", (meta.namespace for meta in (*metas, *lingering)))
        self._names = _Names("pod", (_full(meta) for meta in (*metas, *lingering)))
        self._uids = _Names(
            "uid", (meta.uid for meta in (*metas, *lingering, *(n.metadata for n in state.nodes())))
        )
        self._gangs = _Names(
            "gang",
            chain(
                (group_name(pod) or "" for pod in pods), (group.metadata.name for group in groups)
            ),
        )
        self._schedulers = _Names("scheduler", (spec.scheduler_name for spec in specs))
        self._set_rules(specs)

    def _set_rules(self, specs: Sequence[ElasticPodSpec]) -> None:
        """Find the keys and values of labels and taints, and the resources."""
        all_nodes = self._state.nodes()
        requirements = [rule for spec in specs for rule in _requirements(spec)]
        selected = [(*item,) for spec in specs for item in spec.node_selector.items()]
        self._selected = {
            *(key for key, _ in selected),
            *(rule.key for rule in requirements),
            *self._state.topology_levels,
        }
        taints = [taint for node in all_nodes for taint in node.spec.taints]
        tolerations = [rule for spec in specs for rule in spec.tolerations]
        keys = chain(
            self._selected, (taint.key for taint in taints), (rule.key for rule in tolerations)
        )
        self._keys = _Names("key", (key for key in keys if key not in _KNOWN_KEYS))
        labels = [item for node in all_nodes for item in node.metadata.labels.items()]
        self._values = _Names(
            "value",
            chain(
                (value for key, value in labels if key in self._selected or key in _ALWAYS),
                (value for _, value in selected),
                (value for rule in requirements for value in rule.values),
                (taint.value for taint in taints),
                (rule.value for rule in tolerations),
            ),
        )
        # Comparisons need numbers: each is replaced by its rank among all that are compared.
        compared = {rule.key for rule in requirements if rule.operator in _NUMERIC}
        self._ranks = {
            key: _ranks(
                chain(
                    (value for name, value in labels if name == key),
                    (value for rule in requirements if rule.key == key for value in rule.values),
                    (value for name, value in selected if name == key),
                )
            )
            for key in compared
        }
        amounts = chain(
            (name for node in all_nodes for name in node.status.allocatable),
            (name for spec in specs for name in spec.overhead),
            (
                name
                for spec in specs
                for container in (*spec.containers, *spec.init_containers)
                for name in (*container.resources.limits, *container.resources.requests)
            ),
        )
        self._resources = _Names("resource", (name for name in amounts if not _is_known(name)))

    def topology_levels(self) -> tuple[str, ...]:
        """Return the levels of topology domains."""
        return tuple(map(self._key, self._state.topology_levels))

    # ---- nodes ----

    def node(self, node: Node) -> Node:
        """Return a node with its cards, and with what pods hold of them."""
        name = self._nodes[node.metadata.name]
        annotations = self._node_annotations(node, name)
        allocatable = {
            key: str(amount) for key, amount in self._amounts(node.status.allocatable).items()
        }
        annotations |= self._report(node, name, annotations, allocatable)
        ready = objects.Condition(type="Ready", status=_word(node.readiness, ("True", "False")))
        taints = (self._taint(taint) for taint in node.spec.taints if taint.effect in _EFFECTS)
        return Node(
            metadata=ObjectMeta(
                name=name,
                uid=self._uids[node.metadata.uid],
                labels=self._node_labels(node.metadata.labels),
                annotations=annotations,
                creation_timestamp=_time(node.metadata.creation_timestamp),
                deletion_timestamp=_time(node.metadata.deletion_timestamp or "") or None,
            ),
            spec=objects.NodeSpec(unschedulable=node.spec.unschedulable, taints=tuple(taints)),
            status=objects.NodeStatus(allocatable=allocatable, conditions=(ready,)),
        )

    def _node_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        kept = {}
        for key, value in labels.items():
            if key in _VALUES:
                kept[key] = value if re.fullmatch(_VALUES[key], value) else UNREADABLE
            elif key in self._selected or key in _ALWAYS:
                kept[self._key(key)] = self._value(key, value)
        return kept

    def _node_annotations(self, node: Node, name: str) -> dict[str, str]:
        given, kept = node.metadata.annotations, dict[str, str]()
        shared = _decoded(node.metadata.name, given, node.status.allocatable)
        if shared is None or shared.has_inventory:
            kept = dict.fromkeys({CARDS, INSTANCES} & given.keys(), "")
        if shared is not None and shared.has_inventory:
            kept[CARDS] = self._inventory(shared, name)
            if INSTANCES in given:
                uuids = _device_names(shared, name)
                divided = decode_instances(given)
                kept[INSTANCES] = encode_instances(
                    [
                        type(card)(
                            uuids.get(card.uuid, DeviceId(f"GPU-{name}-gone")),
                            card.geometry,
                            card.on_demand,
                            card.instances,
                        )
                        for card in divided
                    ]
                )
        if cordoned := nodes.parse_indexes(given.get(nodes.CORDONED, "")):
            kept[nodes.CORDONED] = ",".join(map(str, sorted(cordoned)))
        if given.get(autoscaling.SPOT_ADMIT) == "all":
            kept[autoscaling.SPOT_ADMIT] = "all"
        if protected := _time(given.get(autoscaling.PROTECTED_UNTIL, "")):
            kept[autoscaling.PROTECTED_UNTIL] = protected
        return kept

    @staticmethod
    def _inventory(shared: SharedNode, name: str) -> str:
        uuids, links = _device_names(shared, name), shared.node.links
        cards = [
            Card(
                *(card.index, uuids[card.uuid], card.model, card.memory_mib),
                healthy=card.healthy,
                unleased_mib=card.unleased_mib,
                drawn_mib=card.drawn_mib,
            )
            for card in shared.physical_cards
        ]
        if links is not None:
            known = tuple(uuids.get(DeviceId(uuid), DeviceId("")) for uuid in links.devices)
            links = Links(known, links.distances)
        return nodes.encode_inventory(cards, shared.unit_mib, links=links)

    def _report(
        self,
        node: Node,
        name: str,
        annotations: Mapping[str, str],
        allocatable: Mapping[str, str],
    ) -> dict[str, str]:
        """Return what pods hold of the node's cards, as its program reports it.

        Of a pod whose record cannot be read the request counts. It will again, because nothing is reported.
        """
        old = self._state.shared_node(node.metadata.name)
        new = _decoded(name, annotations, allocatable)
        if old is None or new is None:
            return {}
        by_index = {card.index: card.uuid for card in new.physical_cards}
        uuids = {card.uuid: by_index[card.index] for card in old.physical_cards}

        def renamed(slices: Iterable[Slice]) -> tuple[Slice, ...]:
            return tuple(
                Slice(piece.card, _instance(piece.uuid, uuids), piece.memory_mib, piece.compute)
                for piece in slices
            )

        pods, lingering = dict[str, tuple[Slice, ...]](), dict[str, Lingering]()
        for held in self._state.allocations(node.metadata.name):
            meta = held.pod.metadata
            if held.lingering:
                full_name = f"{self._namespaces[meta.namespace]}/{self._names[_full(meta)]}"
                lingering[self._uids[meta.uid]] = Lingering(full_name, renamed(held.slices))
            elif held.error is None:
                pods[self._uids[meta.uid]] = renamed(held.slices)
        refused = {
            self._uids[uid]: Refusal("", refusal.movable)
            for uid, refusal in self._state.refusals(node.metadata.name).items()
        }
        if not (pods or lingering or refused):
            return {}
        report = LeaseReport(pods, lingering, refused)
        return {lease_records.REPORT: lease_records.encode_report(report)}

    # ---- pods ----

    def pod(self, pod: ElasticPod) -> ElasticPod:
        """Return a pod with its request, its rules for nodes and its place in the queue."""
        spec, status = pod.spec, pod.status
        meta = self._meta(pod.metadata)
        labels, meta.annotations = self._options(pod)
        meta.labels = {**labels, **self._gang_labels(pod)}
        made = self._spec(spec)
        made.node_name = self._nodes[spec.node_name]
        made.scheduler_name = self._scheduler(spec.scheduler_name)
        if spec.scheduling_group is not None:
            named = self._gangs[spec.scheduling_group.pod_group_name]
            made.scheduling_group = objects.SchedulingGroup(pod_group_name=named)
        made.scheduling_gates = tuple(
            objects.SchedulingGate(name=_word(gate.name, (objects.QUEUE_GATE,)) or "other")
            for gate in spec.scheduling_gates
        )
        conditions = tuple(
            objects.Condition(
                type=condition.type,
                status=_word(condition.status, ("True", "False")),
                reason=_word(
                    condition.reason, ("Unschedulable", "SchedulerError", "SchedulingGated")
                ),
            )
            for condition in status.conditions
            if condition.type in ("PodScheduled", "Ready")
        )
        return ElasticPod(
            metadata=meta,
            spec=made,
            status=ElasticPodStatus(
                phase=_word(status.phase, ("Pending", "Running", "Succeeded", "Failed")),
                start_time=_time(status.start_time),
                nominated_node_name=self._nodes[status.nominated_node_name],
                conditions=conditions,
            ),
        )

    def group(self, group: PodGroup) -> PodGroup:
        """Return a PodGroup."""
        meta = self._meta(group.metadata)
        meta.name = self._gangs[group.metadata.name]
        return PodGroup(metadata=meta, spec=group.spec)

    def daemon(self, daemon: DaemonSet) -> DaemonSet:
        """Return a DaemonSet."""
        template = ElasticTemplate(spec=self._spec(daemon.spec.template.spec))
        return DaemonSet(
            metadata=self._meta(daemon.metadata), spec=DaemonSetSpec(template=template)
        )

    def _meta(self, meta: ObjectMeta) -> ObjectMeta:
        owners = (
            objects.OwnerReference(
                kind=_word(owner.kind, _OWNERS) or "Other", controller=owner.controller
            )
            for owner in meta.owner_references
        )
        return ObjectMeta(
            name=self._names[_full(meta)],
            namespace=self._namespaces[meta.namespace],
            uid=self._uids[meta.uid],
            owner_references=tuple(owners),
            creation_timestamp=_time(meta.creation_timestamp),
            deletion_timestamp=_time(meta.deletion_timestamp or "") or None,
        )

    def _options(self, pod: Pod) -> tuple[dict[str, str], dict[str, str]]:
        """Return the labels and annotations by which the user changes the request.

        Their values are words and numbers of the dialects, unless they cannot be read.
        """
        names, meta = option_names(WITH_HAMI), pod.metadata
        demand = pod.demand(self._state.dialects)
        readable = demand.error is None and demand.invalid is None and demand.requests_gpu
        labels, annotations = (
            {key: value if readable else UNREADABLE for key, value in given.items() if key in names}
            for given in (meta.labels, meta.annotations)
        )
        if meta.annotations.get(autoscaling.INTERRUPTIBLE) == "true":
            annotations[autoscaling.INTERRUPTIBLE] = "true"
        if objects.MIRROR in meta.annotations:
            annotations[objects.MIRROR] = ""
        for name in TOPOLOGY_ANNOTATIONS:
            if (value := meta.annotations.get(name)) is not None:
                known = value in self._state.topology_levels
                annotations[name] = (
                    self._key(value) if known else _word(value, ("true",)) or UNREADABLE
                )
        return labels, annotations

    def _gang_labels(self, pod: Pod) -> dict[str, str]:
        given = pod.metadata.labels
        kept = {label: self._gangs[given[label]] for label in NAME_LABELS if given.get(label)}
        if MINIMUM_LABEL in given:
            text = given[MINIMUM_LABEL]
            kept[MINIMUM_LABEL] = text if _WHOLE.fullmatch(text) else UNREADABLE
        return kept

    def _scheduler(self, name: str) -> str:
        return name if name in ("default-scheduler", "fenka") else self._schedulers[name]

    # ---- rules for nodes, and amounts ----

    def _spec(self, spec: ElasticPodSpec) -> ElasticPodSpec:
        """Return the amounts of a pod, and its rules for nodes."""
        tolerations = (
            self._toleration(rule)
            for rule in spec.tolerations
            if rule.operator in ("", "Equal", "Exists") and rule.effect in _EFFECTS
        )
        return ElasticPodSpec(
            priority=spec.priority,
            priority_class_name=_word(spec.priority_class_name, (objects.BACKFILL_CLASS,)),
            active_deadline_seconds=spec.active_deadline_seconds,
            termination_grace_period_seconds=spec.termination_grace_period_seconds,
            tolerations=tuple(tolerations),
            node_selector={
                self._key(key): self._value(key, value) for key, value in spec.node_selector.items()
            },
            affinity=self._affinity(spec.affinity),
            containers=self._containers(spec.containers),
            init_containers=self._containers(spec.init_containers),
            overhead=self._amounts(spec.overhead),
            topology_spread_constraints=spec.topology_spread_constraints,
            resource_claims=spec.resource_claims,
        )

    def _containers(self, containers: Sequence[ElasticContainer]) -> tuple[ElasticContainer, ...]:
        return tuple(
            ElasticContainer(
                name=f"container-{number}",
                resources=objects.ResourceRequirements(
                    limits=self._amounts(container.resources.limits),
                    requests=self._amounts(container.resources.requests),
                ),
                restart_policy=_word(container.restart_policy or "", ("Always",)) or None,
                ports=tuple(ElasticPort(host_port=1) for port in container.ports if port.host_port),
            )
            for number, container in enumerate(containers, start=1)
        )

    def _amounts(self, amounts: Mapping[str, str | int]) -> dict[str, str | int]:
        return {
            name if _is_known(name) else f"example.com/{self._resources[name]}": amount
            for name, amount in amounts.items()
            if isinstance(amount, int) or _QUANTITY.fullmatch(amount)
        }

    def _affinity(self, affinity: ElasticAffinity | None) -> ElasticAffinity | None:
        if affinity is None:
            return None
        terms = tuple(
            objects.NodeSelectorTerm(
                match_expressions=tuple(map(self._requirement, term.match_expressions)),
                match_fields=tuple(map(self._field, term.match_fields)),
            )
            for term in _terms(affinity)
        )
        required = objects.NodeSelector(node_selector_terms=terms)
        rule = objects.NodeAffinity(required_during_scheduling_ignored_during_execution=required)
        return replace(affinity, node_affinity=rule if terms else None)

    def _requirement(self, rule: SelectorRequirement) -> SelectorRequirement:
        values = tuple(self._value(rule.key, value) for value in rule.values)
        return SelectorRequirement(
            key=self._key(rule.key), operator=_word(rule.operator, _OPERATORS), values=values
        )

    def _field(self, rule: SelectorRequirement) -> SelectorRequirement:
        values = tuple(self._nodes[value] for value in rule.values)
        return SelectorRequirement(
            key=_word(rule.key, ("metadata.name",)),
            operator=_word(rule.operator, _OPERATORS),
            values=values,
        )

    def _taint(self, taint: Taint) -> Taint:
        return Taint(key=self._key(taint.key), value=self._values[taint.value], effect=taint.effect)

    def _toleration(self, rule: Toleration) -> Toleration:
        return Toleration(
            key=self._key(rule.key),
            operator=rule.operator,
            value=self._values[rule.value],
            effect=rule.effect,
        )

    def _key(self, key: str) -> str:
        return key if not key or key in _KNOWN_KEYS else self._keys[key]

    def _value(self, key: str, value: str) -> str:
        if key in _VALUES and re.fullmatch(_VALUES[key], value):
            return value
        if key == HOSTNAME_LABEL or key not in self._ranks:
            return self._values[value]
        return self._ranks[key].get(value) or self._values[value]


def _full(meta: ObjectMeta) -> str:
    return f"{meta.namespace}/{meta.name}"


def _field_names(spec: ElasticPodSpec) -> Iterator[str]:
    """Yield the nodes that a pod's affinity names."""
    for term in _terms(spec.affinity):
        for rule in term.match_fields:
            yield from rule.values


def _requirements(spec: ElasticPodSpec) -> Iterator[SelectorRequirement]:
    for term in _terms(spec.affinity):
        yield from term.match_expressions


def _terms(affinity: ElasticAffinity | None) -> tuple[objects.NodeSelectorTerm, ...]:
    if affinity is None or affinity.node_affinity is None:
        return ()
    required = affinity.node_affinity.required_during_scheduling_ignored_during_execution
    return required.node_selector_terms if required is not None else ()


def _ranks(values: Iterable[str]) -> dict[str, str]:
    whole = {value for value in values if _WHOLE.fullmatch(value)}
    numbers = sorted({int(value) for value in whole})
    return {value: str(numbers.index(int(value))) for value in whole}


def _decoded(
    name: str, annotations: Mapping[str, str], allocatable: Mapping[str, str]
) -> SharedNode | None:
    try:
        return nodes.decode_node(name, annotations, allocatable)
    except InvalidRecord:
        return None


def _device_names(shared: SharedNode, name: str) -> dict[DeviceId, DeviceId]:
    return {card.uuid: DeviceId(f"GPU-{name}-{card.index}") for card in shared.physical_cards}


def _instance(device: DeviceId, uuids: Mapping[DeviceId, DeviceId]) -> DeviceId:
    """Return the pseudonym of a card, or of an instance, whose id begins with its card's."""
    if device in uuids:
        return uuids[device]
    card = card_of(device)
    return DeviceId(f"{uuids.get(DeviceId(card), 'GPU-gone')}{device[len(card) :]}")


def _is_known(resource: str) -> bool:
    return (
        resource in _HOST
        or _HUGE_PAGES.fullmatch(resource) is not None
        or resource in (gpushare.COUNT, NVIDIA_GPU)
        or resource in resource_names(WITH_HAMI)
        or resource in node_resources(WITH_HAMI)
    )


def _word(text: str, known: Iterable[str]) -> str:
    """Return the text if it is a known word; else nothing."""
    return text if text in known else ""


def _time(text: str) -> str:
    """Return the text if it is a time; else nothing."""
    return text if TIME.fullmatch(text) else ""


TIME = re.compile(
    r"[0-9]{4}-[0-1][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9](?:\.[0-9]{1,9})?(?:Z|\+00:00)"
)
"""A time as the API server writes it."""
