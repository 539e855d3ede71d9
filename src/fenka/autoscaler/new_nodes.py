"""The shape and labels of nodes that are bought by an offer. Pure.

The configuration, the cloud and earlier nodes of the type say what is known of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from fenka.autoscaler.snapshot import Shape, Snapshot, UnknownShape, shape_of
from fenka.cloud.config import GroupConfig
from fenka.cloud.port import TYPE_LABEL, OfferKey
from fenka.cluster import autoscaling
from fenka.core.nodes.case import NewCard
from fenka.core.nodes.problem import ZONE_LABEL

IMPLIED_LABELS = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
"""Labels of nodes where neither configuration nor an earlier node says otherwise."""


def shape_for(snapshot: Snapshot, config: GroupConfig, kind: str) -> Shape:
    """Return what a node of a group will be, DaemonSets included. Raises UnknownShape."""
    configured = None
    if config.shape is not None:
        given = config.shape
        configured = Shape(
            cpu_milli=given.cpu_milli,
            memory_mib=given.memory_mib,
            pods=given.pods,
            resources=given.resources,
            cards=tuple(
                NewCard(model=cards.model, memory_mib=cards.memory_mib)
                for cards in given.cards
                for _ in range(cards.count)
            ),
        )
    cloud = next(
        (
            offer.machine
            for key, offer in snapshot.offers.items()
            if (key.group, key.type) == (config.name, kind) and offer.machine is not None
        ),
        None,
    )
    shape = shape_of(kind, seen=snapshot.shapes.get(kind), configured=configured, cloud=cloud)
    labels = {**IMPLIED_LABELS, TYPE_LABEL: kind, **shape.labels, **config.labels}
    return replace(shape, labels=labels, taints=config.taints or shape.taints)


def machine_labels(labels: Mapping[str, str], key: OfferKey) -> dict[str, str]:
    """Return all labels of an offer's nodes."""
    return {
        **labels,
        ZONE_LABEL: key.zone,
        autoscaling.CAPACITY: key.capacity,
        autoscaling.GROUP: key.group,
    }


def labels_of_offers(snapshot: Snapshot) -> list[dict[str, str]]:
    """Return the labels of each offer's nodes, of those whose shape is known."""
    found = []
    for config in snapshot.config.groups:
        for key in config.offers:
            if key in snapshot.offers:
                try:
                    shape = shape_for(snapshot, config, key.type)
                except UnknownShape:
                    continue
                found.append(machine_labels(shape.labels, key))
    return found
