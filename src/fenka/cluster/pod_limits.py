"""Limits what is kept of a pod: tenants may write 1.4 MB into each, and programs keep all pods of a cluster.

Fields that no program reads are dropped, whatever their size. Of the others an ordinary pod has less than
the limits below. A pending pod that exceeds them is not served.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice

import msgspec

from fenka.cluster.autoscaling import INTERRUPTIBLE
from fenka.cluster.objects import QUEUE_GATE, Pod, PodStatus
from fenka.cluster.objects import Container as PodContainer
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
    return frozenset((*NAME_LABELS, MINIMUM_LABEL, *option_names(WITH_HAMI)))


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
    names, prefixes = annotation_names()
    kept = {
        name: value if len(value) <= MAX_RECORD else f"({len(value)} characters)"
        for name, value in annotations.items()
        if name in names or name in others or name.startswith(prefixes)
    }
    if len(kept) > MAX_CONTAINERS + len(names):
        # Only the names that begin so can be many: one of each container.
        return dict(islice(kept.items(), MAX_CONTAINERS + len(names)))
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
    # One after the other: these run for each version of each pod of a cluster.
    containers = spec.containers
    if spec.init_containers:
        containers += spec.init_containers
    if only_cards:
        requests_cards = _keep_cards(containers)
    else:
        requests_cards = names_any([each.resources.limits for each in containers])
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
        known = tuple(gate for gate in gates if gate.name == QUEUE_GATE)[:1]
        spec.scheduling_gates = (*known, *(gate for gate in gates if gate.name != QUEUE_GATE))[:2]
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
    cards, found = resource_names(WITH_HAMI), False
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


def _limit_rules(pod: Pod) -> str:
    """Drop rules for nodes that are too large, and return what is wrong with them."""
    excess = ""
    for name, words, nothing in _RULES:
        part = getattr(pod.spec, name)
        if part and (size := len(msgspec.json.encode(part))) > MAX_RULE_BYTES:
            excess = f"has {words} of {size} bytes, and fenka reads at most {MAX_RULE_BYTES}"
            setattr(pod.spec, name, nothing)
    return excess


def _limit_containers(pod: Pod, containers: Sequence[PodContainer]) -> str:
    resources = sum(
        [len(each.resources.limits) + len(each.resources.requests) for each in containers]
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
