"""Pods and nodes as the scheduler keeps all of a cluster: without what it never reads, equal parts shared.

Annotations and labels of tenants cost little, whatever their size (`pod_limits.py`).

Limits what is kept of a pod: tenants may write 1.4 MB into each, and programs keep all pods of a cluster.

Fields that no program reads are dropped, whatever their size. Of the others an ordinary pod has less than
the limits below. A pending pod that exceeds them is not served.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from sys import intern
from typing import Any, TypeVar

import msgspec

from fenka.cluster import objects
from fenka.cluster.autoscaling import INTERRUPTIBLE, PIN, PLANNED_PODS, PROTECTED_UNTIL, SPOT_ADMIT
from fenka.cluster.mappings import SHARED, SharedValues, small_mapping
from fenka.cluster.objects import Container as PodContainer
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS, TOPOLOGY_ANNOTATIONS
from fenka.cluster.queue_snapshot import POSITION
from fenka.dialects import lease_records, nodes, registry, resize_records
from fenka.dialects.base import CARDS, Dialect, PodRequest
from fenka.dialects.mig_records import INSTANCES

MAX_LABELS, MAX_LABEL_BYTES = 64, 4096
"""Labels by which PodDisruptionBudgets select a pod. Of a pod with more, budgets see these first ones."""
MAX_RULE_BYTES = 8192
"""JSON of each of a pod's rules for nodes: tolerations, selector, affinity."""
MAX_CONTAINERS = 128
MAX_RESOURCES = 512
"""Names of resources of all of a pod's containers together."""
MAX_RECORD = 16 * 1024
"""Characters of an annotation that is read."""
MAX_ANNOTATION_BYTES = 256 * 1024
"""Names and values of all annotations of an object, as the API server bounds them."""
RECORD_BYTES = 8 * 1024
"""Kept free for what fenka records. A binding is not checked against the limit, and after it no change of
the pod would be accepted: its status could not be written any more."""
MAX_NAME, MAX_KEY = 253, 317
"""Characters of an object's name, and of the name of a label, annotation or resource."""
MAX_GATES = MAX_OWNERS = 8
_FEW = 10
"""This number of labels or rules is within the limits, since the API server bounds each of them."""

_NO_TEXTS: Mapping[str, str] = {}
_NO_AMOUNTS: Mapping[str, str | int] = {}
_RULES: tuple[tuple[str, str, object], ...] = (
    ("tolerations", "tolerations", ()),
    ("node_selector", "a node selector", {}),
    ("affinity", "an affinity", None),
)


@lru_cache(maxsize=1)
def read_labels() -> frozenset[str]:
    """Return the labels that are read of every pod: its gang, and the options of dialects."""
    return frozenset((*NAME_LABELS, MINIMUM_LABEL, *registry.option_names(registry.WITH_HAMI)))


def kept_labels(labels: Mapping[str, str], *, for_budgets: bool) -> Mapping[str, str]:
    """Return the labels that are read, and for budgets the others within the limits."""
    if for_budgets and len(labels) <= _FEW:
        return labels
    known = read_labels()
    if not for_budgets:
        if known.isdisjoint(labels):
            return _NO_TEXTS
        return {name: value for name, value in labels.items() if name in known}
    kept = {name: value for name, value in labels.items() if name in known}
    size = 0
    for name, value in labels.items():
        size += len(name) + len(value)
        if len(kept) >= MAX_LABELS or size > MAX_LABEL_BYTES:
            break
        kept[name] = value
    return kept


def kept_annotations(
    annotations: Mapping[str, str], others: Container[str] = (INTERRUPTIBLE,)
) -> dict[str, str]:
    """Return the annotations that dialects read, and these others. If one is too long, its length is kept."""
    names, prefixes = registry.annotation_names()
    kept = {
        name: value if len(value) <= MAX_RECORD else f"({len(value)} characters)"
        for name, value in annotations.items()
        if name in names or name in others or name.startswith(prefixes)
    }
    if len(kept) > MAX_CONTAINERS + len(names):
        # Only the names that begin so can be many: one of each container.
        return dict(islice(kept.items(), MAX_CONTAINERS + len(names)))
    return kept


def limit_status(status: objects.PodStatus) -> None:
    """Drop conditions, and the states of containers beyond the limit."""
    status.conditions = ()
    status.container_statuses = status.container_statuses[:MAX_CONTAINERS]
    status.init_container_statuses = status.init_container_statuses[:MAX_CONTAINERS]


def limit_pod(pod: objects.Pod, *, only_cards: bool = True) -> bool:
    """Drop what exceeds the limits, and return whether the pod names resources of cards.

    A pending pod that does and exceeds them requests nothing that can be read, and its demand says why.

    Args:
        only_cards: drop the amounts of all other resources.
    """
    spec, meta = pod.spec, pod.metadata
    # One after the other: these run for each version of each pod of a cluster.
    containers = spec.containers
    if spec.init_containers:
        containers += spec.init_containers
    if only_cards:
        requests_cards = _keep_cards(containers)
    else:
        requests_cards = registry.names_any(
            [container.resources.limits for container in containers]
        )
    excess = _limit_containers(pod, containers)
    if len(spec.tolerations) > _FEW or len(spec.node_selector) > _FEW or spec.affinity is not None:
        excess = _limit_rules(pod) or excess
    if requests_cards and not spec.node_name:
        excess = excess or _excess_of_annotations(meta.annotations)
        if excess:
            pod.refuse(f"the pod {excess}: make it smaller")
    if len(spec.scheduler_name) > MAX_NAME:
        spec.scheduler_name = spec.scheduler_name[:MAX_NAME]
    if len(spec.scheduling_gates) > MAX_GATES:
        # Programs ask whether there is fenka's gate, and whether there are others.
        gates = spec.scheduling_gates
        known = tuple(gate for gate in gates if gate.name == objects.QUEUE_GATE)[:1]
        spec.scheduling_gates = (
            *known,
            *(gate for gate in gates if gate.name != objects.QUEUE_GATE),
        )[:2]
    if len(meta.owner_references) > MAX_OWNERS:
        owners = meta.owner_references
        meta.owner_references = tuple(owner for owner in owners if owner.controller)[:1]
    return requests_cards


def _excess_of_annotations(texts: Mapping[str, str]) -> str:
    most = MAX_ANNOTATION_BYTES - RECORD_BYTES
    # A character has at most four bytes.
    if sum(map(len, texts.values())) + MAX_KEY * len(texts) <= most // 4:
        return ""
    size = sum(len(text.encode()) for pair in texts.items() for text in pair)
    return (
        f"has {size} bytes of annotations, and fenka serves at most {most}" if size > most else ""
    )


def _keep_cards(containers: Iterable[PodContainer]) -> bool:
    """Drop amounts of other resources, and return whether there are any of cards."""
    cards, found = registry.resource_names(registry.WITH_HAMI), False
    names, prefixes = cards.names, cards.prefixes
    for container in containers:
        resources = container.resources
        resources.requests = _NO_AMOUNTS
        if resources.limits:
            resources.limits = {
                name: amount
                for name, amount in resources.limits.items()
                if name in names or name.startswith(prefixes)
            }
            found = found or bool(resources.limits)
    return found


def _limit_rules(pod: objects.Pod) -> str:
    """Drop rules for nodes that are too large, and return what is wrong with them."""
    excess = ""
    for name, words, nothing in _RULES:
        part = getattr(pod.spec, name)
        if part and (size := len(msgspec.json.encode(part))) > MAX_RULE_BYTES:
            excess = f"has {words} of {size} bytes, and fenka reads at most {MAX_RULE_BYTES}"
            setattr(pod.spec, name, nothing)
    return excess


def _limit_containers(pod: objects.Pod, containers: Sequence[PodContainer]) -> str:
    resources = sum(
        [
            len(container.resources.limits) + len(container.resources.requests)
            for container in containers
        ]
    )
    if len(containers) <= MAX_CONTAINERS and resources <= MAX_RESOURCES:
        return ""
    spec = pod.spec
    spec.containers = spec.containers[:MAX_CONTAINERS]
    spec.init_containers = spec.init_containers[:MAX_CONTAINERS]
    if len(containers) > MAX_CONTAINERS:
        return f"has {len(containers)} containers, and fenka serves at most {MAX_CONTAINERS}"
    _keep_cards(containers)
    return f"names {resources} resources, and fenka reads at most {MAX_RESOURCES}"


MAX_SHARED_TEXT = 128
"""Characters; what a tenant writes may be long."""

T = TypeVar("T")
V = TypeVar("V", str, str | int)

_NONE: Mapping[str, str] = {}
_PARTS: SharedValues[Any] = SharedValues()
_TEXTS: dict[Any, Any] = {}
"""Recent short texts and amounts. Unlike `intern`, this costs no memory for those that one pod has."""
_NODE_ANNOTATIONS = (
    CARDS,
    INSTANCES,
    nodes.CORDONED,
    lease_records.REPORT,
    PIN,
    PLANNED_PODS,
    SPOT_ADMIT,
    PROTECTED_UNTIL,
)
_READ_ANNOTATIONS = (
    *TOPOLOGY_ANNOTATIONS,
    INTERRUPTIBLE,
    resize_records.REQUEST,
    resize_records.STATUS,
    resize_records.REFUSED,
    POSITION,
)
"""Of pods, beside those that dialects read."""


class CompactPod(objects.Pod):
    """A pod without the fields that only people and the node program read."""

    def demand(
        self, dialects: tuple[Dialect, ...] = registry.WITH_HAMI, request: PodRequest | None = None
    ) -> objects.PodDemand:
        """Return what the pod requests. It is not kept with a bound pod, of which it is seldom read again."""
        if self.spec.node_name:
            return objects.shared_demand(request or self.request, dialects)
        return super().demand(dialects, request)

    def __post_init__(self) -> None:
        meta, spec, status = self.metadata, self.spec, self.status
        requests_cards = limit_pod(self)
        for container in (*spec.containers, *spec.init_containers):
            container.name, container.image = intern(container.name), ""
            container.resources.limits = _small(container.resources.limits)
        spec.containers = _shared(b"containers", spec.containers)
        spec.init_containers = _shared(b"containers", spec.init_containers)
        spec.tolerations = _shared(b"tolerations", spec.tolerations)
        spec.node_selector = _shared(b"selector", spec.node_selector) or _NONE
        spec.affinity = _shared(b"affinity", spec.affinity)
        spec.node_name, spec.scheduler_name = intern(spec.node_name), intern(spec.scheduler_name)
        # Only pods with cards are evicted for others.
        labels = kept_labels(meta.labels, for_budgets=requests_cards)
        meta.labels = _shared(b"labels", labels, _small) or _NONE
        meta.annotations = _records(meta.annotations) if requests_cards else _NONE
        meta.owner_references = _shared(
            b"owners",
            tuple(
                objects.OwnerReference(kind=owner.kind, controller=owner.controller)
                for owner in meta.owner_references
            ),
        )
        meta.name, meta.namespace = _recent(meta.name), intern(meta.namespace)
        meta.creation_timestamp = _recent(meta.creation_timestamp)
        read = "Ready" if self.finished else "" if spec.node_name else "PodScheduled"
        self.status = _shared(
            b"status",
            objects.PodStatus(
                phase=status.phase,
                start_time=status.start_time,
                conditions=tuple(
                    condition
                    for condition in status.conditions
                    if condition.type == read or condition.reason == objects.PREEMPTED
                ),
            ),
        )


class CompactNode(objects.Node):
    """A node without the fields that only people read."""

    def __post_init__(self) -> None:
        meta, status = self.metadata, self.status
        # Read many times by rules for nodes, and there are fewer of them than of pods.
        meta.labels = _interned(meta.labels)
        meta.annotations = {
            name: meta.annotations[name] for name in _NODE_ANNOTATIONS if name in meta.annotations
        }
        status.capacity = {}
        internal = (address for address in status.addresses if address.type == "InternalIP")
        status.addresses = tuple(islice(internal, 1))
        status.allocatable = _shared(b"strings", status.allocatable)
        status.conditions = tuple(
            condition for condition in status.conditions if condition.type == "Ready"
        )


def _interned(texts: Mapping[str, V]) -> dict[str, V]:
    """Return a mapping whose keys and values are those of earlier ones. All are short."""
    if len(_TEXTS) > SHARED:
        _TEXTS.clear()
    known = _TEXTS.setdefault
    return {known(name, name): known(value, value) for name, value in texts.items()}


def _small(texts: Mapping[str, V]) -> Mapping[str, V]:
    return small_mapping(_interned(texts))


def _recent(text: str) -> str:
    known: str = _TEXTS.setdefault(text, text) if len(text) <= MAX_SHARED_TEXT else text
    return known


def _records(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return those that a dialect reads, whether the pod may run on any spot node, and its resize."""
    if not annotations:
        return _NONE
    records = kept_annotations(annotations, _READ_ANNOTATIONS)
    if INTERRUPTIBLE in records and records[INTERRUPTIBLE] != "true":
        del records[INTERRUPTIBLE]
    for name in (resize_records.STATUS, resize_records.REFUSED):
        if name in records:
            # It is only read whether they are there.
            records[name] = ""
    for name in (resize_records.REQUEST, POSITION):
        if len(records.get(name, "")) > MAX_SHARED_TEXT:
            # It is compared with what the scheduler writes, which is short.
            records[name] = ""
    if records:
        known = _TEXTS.setdefault
        records = {known(name, name): _recent(value) for name, value in records.items()}
    return small_mapping(records) if records else _NONE


def _shared(kind: bytes, part: T, make: Callable[[T], T] = lambda part: part) -> T:
    """Return what was made of an equal part of an earlier object of this kind, if there was one."""
    if not part:
        return part
    key = kind + msgspec.json.encode(part)
    known: T | None = _PARTS.get(key)
    if known is None:
        _PARTS[key] = known = make(part)
    return known
