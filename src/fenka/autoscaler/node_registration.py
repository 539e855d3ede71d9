"""Changes of nodes and pods when ordered nodes come. Pure.

A plan reaches the scheduler by annotations: each planned pod names its order and slot, and so does the node.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fenka.autoscaler.snapshot import (
    LIVE,
    Snapshot,
)
from fenka.autoscaler.supply import protected_until
from fenka.autoscaler.watch import ElasticPod
from fenka.cloud.config import GroupConfig
from fenka.cloud.port import Instance
from fenka.cluster import autoscaling
from fenka.cluster.objects import Node
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import group_key
from fenka.core.nodes.case import Capacity


def is_partial_gang(snapshot: Snapshot, slot: autoscaling.Slot) -> bool:
    """Return whether a slot's node has waiting members of gangs alone, and their rest is not on its way."""
    if slot.state != "offering" or not slot.pods:
        return False
    waiting = snapshot.waiting(slot)
    gangs = {group_key(pod) for pod in waiting}
    if not waiting or None in gangs or _is_used(snapshot, slot.node):
        return False
    arriving = {
        group_key(pod) for *_, other in snapshot.coming() for pod in snapshot.waiting(other)
    }
    return gangs.isdisjoint(arriving)


def _is_used(snapshot: Snapshot, node: str) -> bool:
    """Return whether pods are there that would have to be moved."""
    return any(
        not (pod.of_daemon_set or pod.mirrors_file or pod.finished)
        for pod in snapshot.pods_on.get(node, ())
    )


def waiting_gangs(snapshot: Snapshot, offered: frozenset[str]) -> frozenset[str]:
    """Return the gangs of which members have no node yet, so that none of their pods may start.

    offered: UIDs of pods whose nodes offer their cards.
    """
    gangs = (
        group_key(pod) for uid, pod in snapshot.pods.items() if is_open(pod) and uid not in offered
    )
    return frozenset(gang for gang in gangs if gang is not None)


V = TypeVar("V", str, str | None)


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Labels and annotations that a node lacks, None for one to remove. It is one patch."""

    node: Node
    labels: Mapping[str, str]
    annotations: Mapping[str, str | None]


def node_changes(snapshot: Snapshot) -> list[NodeChange]:
    """Return what the nodes of orders lack."""
    changes, marked = list[NodeChange](), set[str]()
    for name, number, record, slot in snapshot.slots(LIVE):
        node = snapshot.nodes.get(slot.node)
        if node is None:
            continue
        config = snapshot.group(record.group)
        marked.add(slot.node)
        labels = {
            **(config.labels if config is not None else {}),
            autoscaling.ORDER: name,
            autoscaling.GROUP: record.group,
            autoscaling.CAPACITY: record.capacity,
        }
        pin = snapshot.config.scale_out.pin
        annotations = {
            autoscaling.SLOT: str(number),
            # The scheduler counts from when it sees the cards, and one that starts later from then.
            autoscaling.PIN: f"{pin:g}" if snapshot.now < pinned_until(snapshot, slot) else None,
            autoscaling.PLANNED_PODS: autoscaling.encode_planned_pods(slot.pods, slot.cards),
            **_spot_annotations(config, record.capacity, snapshot.instances.get(slot.instance)),
            **autoscaling.KEPT_FROM_OTHERS,
        }
        changes.append(_change(node, labels, annotations))
    changes += _changes_of_spot_nodes(snapshot, marked)
    return [change for change in changes if change.labels or change.annotations]


def _changes_of_spot_nodes(snapshot: Snapshot, marked: Collection[str]) -> Iterable[NodeChange]:
    """Yield what spot nodes lack whose order is over: the configuration may have changed since."""
    nodes = [
        node
        for name, node in snapshot.nodes.items()
        if node.metadata.labels.get(autoscaling.CAPACITY) == "spot" and name not in marked
    ]
    machines = snapshot.instances_by_provider_id() if nodes else {}
    for node in nodes:
        config = snapshot.group(node.metadata.labels.get(autoscaling.GROUP, ""))
        instance = machines.get(node.spec.provider_id)
        yield _change(node, {}, _spot_annotations(config, "spot", instance))


def _change(
    node: Node, labels: Mapping[str, str], annotations: Mapping[str, str | None]
) -> NodeChange:
    return NodeChange(
        node,
        _missing(labels, node.metadata.labels),
        _missing(annotations, node.metadata.annotations),
    )


def _spot_annotations(
    config: GroupConfig | None, capacity: Capacity, instance: Instance | None
) -> dict[str, str | None]:
    """Return the annotations that say which pods a spot node admits. Unknown ones stay as they are."""
    if config is None or capacity != "spot":
        return {}
    annotations: dict[str, str | None] = {autoscaling.SPOT_ADMIT: config.spot.admit}
    if instance is not None:
        until = protected_until(config, instance)
        annotations[autoscaling.PROTECTED_UNTIL] = (
            None if until is None else autoscaling.encode_time(until)
        )
    return annotations


def pinned_until(snapshot: Snapshot, slot: autoscaling.Slot) -> float:
    """Return until when a slot's node admits its planned pods only."""
    since = snapshot.now if slot.offering_at is None else slot.offering_at
    return since + snapshot.config.scale_out.pin


def _missing(wanted: Mapping[str, V], present: Mapping[str, str]) -> dict[str, V]:
    return {key: value for key, value in wanted.items() if present.get(key) != value}


def planned_annotations(snapshot: Snapshot) -> list[tuple[ElasticPod, str]]:
    """Return the pods that do not say yet which slot they are planned for, with the annotation."""
    changes = []
    for name, number, _, slot in snapshot.slots(LIVE):
        text = msgspec.json.encode(autoscaling.Planned(name, number)).decode()
        changes += [
            (pod, text)
            for pod in snapshot.waiting(slot)
            if pod.metadata.annotations.get(autoscaling.PLANNED) != text
        ]
    return changes
