"""Limits what is kept of a pod: tenants may write 1.4 MB into each, and programs keep all pods of a cluster.

Fields that no program reads are dropped, whatever their size. Of the others an ordinary pod has less than
the limits below. A pending pod that exceeds them is not served.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from fenka.cluster.autoscaling import INTERRUPTIBLE
from fenka.cluster.objects import QUEUE_GATE, Container, Pod, PodStatus
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS
from fenka.dialects.registry import (
    WITH_HAMI,
    annotation_names,
    names_any,
    option_names,
    resource_names,
)

MAX_LABELS, MAX_LABEL_BYTES = 64, 4096
"""Labels by which PodDisruptionBudgets select a pod. Of a pod with more, budgets see these first ones."""
MAX_RULE_BYTES = 8192
"""JSON of each of a pod's rules for nodes: tolerations, selector, affinity."""
MAX_CONTAINERS = 128
MAX_RESOURCES = 512
"""Names of resources of all of a pod's containers together."""
MAX_RECORD = 16 * 1024
"""Characters of an annotation that is read."""
MAX_NAME = 253
MAX_GATES = MAX_OWNERS = 8

_NOTHING: Mapping[str, str | int] = {}
_RULES: tuple[tuple[str, str, object], ...] = (
    ("tolerations", "tolerations", ()),
    ("node_selector", "a node selector", {}),
    ("affinity", "an affinity", None),
)


@lru_cache(maxsize=1)
def read_labels() -> frozenset[str]:
    """Return the labels that are read of every pod: its gang, and the options of dialects."""
    return frozenset((*NAME_LABELS, MINIMUM_LABEL, *option_names(WITH_HAMI)))


def kept_labels(labels: Mapping[str, str], *, for_budgets: bool) -> Mapping[str, str]:
    """Return the labels that are read, and for budgets the others within the limits."""
    known = read_labels()
    if not for_budgets:
        if known.isdisjoint(labels):
            return {}
        return {name: value for name, value in labels.items() if name in known}
    if len(labels) <= MAX_LABELS and _text_size(labels) <= MAX_LABEL_BYTES:
        return labels
    kept = {name: value for name, value in labels.items() if name in known}
    size = 0
    for name, value in labels.items():
        size += len(name) + len(value)
        if len(kept) >= MAX_LABELS or size > MAX_LABEL_BYTES:
            break
        kept[name] = value
    return kept


def _text_size(texts: Mapping[str, str]) -> int:
    return sum(map(len, texts)) + sum(map(len, texts.values()))


def kept_annotations(
    annotations: Mapping[str, str], others: Iterable[str] = (INTERRUPTIBLE,)
) -> dict[str, str]:
    """Return the annotations that dialects read, and these others. If one is too long, its length is kept."""
    names, prefixes = annotation_names()
    kept = dict[str, str]()
    for name, value in annotations.items():
        if name in names or name in others or name.startswith(prefixes):
            kept[name] = value if len(value) <= MAX_RECORD else f"({len(value)} characters)"
            if len(kept) > MAX_CONTAINERS + len(names):
                # Only the names that begin so can be many: one of each container.
                break
    return kept


def limit_status(status: PodStatus) -> None:
    """Drop conditions, and the states of containers beyond the limit."""
    status.conditions = ()
    status.container_statuses = status.container_statuses[:MAX_CONTAINERS]
    status.init_container_statuses = status.init_container_statuses[:MAX_CONTAINERS]


def limit_pod(pod: Pod, *, only_cards: bool = True) -> bool:
    """Drop what exceeds the limits, and return whether the pod names resources of cards.

    A pending pod that does and exceeds them requests nothing that can be read, and its demand says why.

    Args:
        only_cards: drop the amounts of all other resources.
    """
    spec, meta = pod.spec, pod.metadata
    requests_cards = names_any([each.resources.limits for each in _containers(pod)])
    if only_cards:
        _keep_cards(_containers(pod))
    excess = _limit_rules(pod) or _limit_containers(pod)
    if excess and requests_cards and not spec.node_name:
        pod.refuse(f"the pod {excess}: make it smaller")
    spec.scheduler_name = spec.scheduler_name[:MAX_NAME]
    if len(spec.scheduling_gates) > MAX_GATES:
        # Programs ask whether there is fenka's gate, and whether there are others.
        gates = spec.scheduling_gates
        known = tuple(gate for gate in gates if gate.name == QUEUE_GATE)[:1]
        spec.scheduling_gates = (*known, *(gate for gate in gates if gate.name != QUEUE_GATE))[:2]
    if len(meta.owner_references) > MAX_OWNERS:
        owners = meta.owner_references
        meta.owner_references = tuple(owner for owner in owners if owner.controller)[:1]
    return requests_cards


def _containers(pod: Pod) -> tuple[Container, ...]:
    return (*pod.spec.containers, *pod.spec.init_containers)


def _keep_cards(containers: Iterable[Container]) -> None:
    cards = resource_names(WITH_HAMI)
    for container in containers:
        resources = container.resources
        resources.requests = _NOTHING
        if resources.limits:
            resources.limits = {
                name: amount for name, amount in resources.limits.items() if name in cards
            }


def _limit_rules(pod: Pod) -> str:
    """Drop rules for nodes that are too large, and return what is wrong with them."""
    excess = ""
    for name, words, nothing in _RULES:
        part = getattr(pod.spec, name)
        if part and (size := len(msgspec.json.encode(part))) > MAX_RULE_BYTES:
            excess = f"has {words} of {size} bytes, and fenka reads at most {MAX_RULE_BYTES}"
            setattr(pod.spec, name, nothing)
    return excess


def _limit_containers(pod: Pod) -> str:
    spec, containers = pod.spec, _containers(pod)
    resources = sum(
        [len(each.resources.limits) + len(each.resources.requests) for each in containers]
    )
    excess = ""
    if len(containers) > MAX_CONTAINERS:
        excess = f"has {len(containers)} containers, and fenka serves at most {MAX_CONTAINERS}"
    elif resources > MAX_RESOURCES:
        excess = f"names {resources} resources, and fenka reads at most {MAX_RESOURCES}"
        _keep_cards(containers)
    if excess:
        spec.containers = spec.containers[:MAX_CONTAINERS]
        spec.init_containers = spec.init_containers[:MAX_CONTAINERS]
    return excess
