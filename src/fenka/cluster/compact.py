"""Pods and nodes as the scheduler keeps all of a cluster: without what it never reads, equal parts shared.

What a tenant writes costs little, whatever its size (`pod_limits.py`).
"""

from collections.abc import Callable, Mapping
from itertools import islice
from sys import intern
from typing import Any, TypeVar

import msgspec

from fenka.cluster.autoscaling import (
    INTERRUPTIBLE,
    PIN,
    PLANNED_PODS,
    PROTECTED_UNTIL,
    SPOT_ADMIT,
)
from fenka.cluster.objects import PREEMPTED, Node, OwnerReference, Pod, PodStatus
from fenka.cluster.pod_demand import PodDemand, shared_demand
from fenka.cluster.pod_limits import kept_annotations, kept_labels, limit_pod
from fenka.cluster.recent import SHARED, SharedValues
from fenka.cluster.small_mapping import small_mapping
from fenka.dialects import leases, node_inventory, resize
from fenka.dialects.base import CARDS, Dialect, PodRequest
from fenka.dialects.mig_records import INSTANCES
from fenka.dialects.registry import WITH_HAMI

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
    node_inventory.CORDONED,
    leases.REPORT,
    PIN,
    PLANNED_PODS,
    SPOT_ADMIT,
    PROTECTED_UNTIL,
)
_READ_ANNOTATIONS = (INTERRUPTIBLE, resize.REQUEST, resize.STATUS, resize.REFUSED)
"""Of pods, beside those that dialects read."""


class CompactPod(Pod):
    """A pod without the fields that only people and the node program read."""

    def demand(
        self, dialects: tuple[Dialect, ...] = WITH_HAMI, request: PodRequest | None = None
    ) -> PodDemand:
        """Return what the pod requests. It is not kept with a bound pod, of which it is seldom read again."""
        if self.spec.node_name:
            return shared_demand(request or self.request, dialects)
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
                OwnerReference(kind=owner.kind, controller=owner.controller)
                for owner in meta.owner_references
            ),
        )
        meta.name, meta.namespace = _recent(meta.name), intern(meta.namespace)
        meta.creation_timestamp = _recent(meta.creation_timestamp)
        read = "Ready" if self.finished else "" if spec.node_name else "PodScheduled"
        self.status = _shared(
            b"status",
            PodStatus(
                phase=status.phase,
                start_time=status.start_time,
                conditions=tuple(
                    each
                    for each in status.conditions
                    if each.type == read or each.reason == PREEMPTED
                ),
            ),
        )


class CompactNode(Node):
    """A node without the fields that only people read."""

    def __post_init__(self) -> None:
        meta, status = self.metadata, self.status
        # Read many times by rules for nodes, and there are fewer of them than of pods.
        meta.labels = _interned(meta.labels)
        meta.annotations = {
            name: meta.annotations[name] for name in _NODE_ANNOTATIONS if name in meta.annotations
        }
        status.capacity = {}
        internal = (each for each in status.addresses if each.type == "InternalIP")
        status.addresses = tuple(islice(internal, 1))
        status.allocatable = _shared(b"strings", status.allocatable)
        status.conditions = tuple(each for each in status.conditions if each.type == "Ready")


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
    for name in (resize.STATUS, resize.REFUSED):
        if name in records:
            # It is only read whether they are there.
            records[name] = ""
    if len(records.get(resize.REQUEST, "")) > MAX_SHARED_TEXT:
        # It is compared with requests that the scheduler writes, which are short.
        records[resize.REQUEST] = ""
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
