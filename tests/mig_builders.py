"""Nodes with divided cards and pods for their instances, as JSON or as fenka reads them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from fenka.cluster.objects import Node, Pod
from fenka.core.inventory import Card, DeviceId
from fenka.core.mig.geometry import TABLES, Geometry, Place
from fenka.dialects import base, gpushare, mig_records, nodes
from fenka.dialects.mig_records import DividedCard, InstanceState
from fenka.formats.mig_profiles import resource_name
from tests.builders import GIB, Json, node, pod

A100, A30 = TABLES["A100-40G"], TABLES["A30"]
MODELS = {"A100": (A100, 40448), "A30": (A30, 24576), "T4": (None, 15079)}

Present = Mapping[tuple[int, str, int], InstanceState]
"""Instances by card, profile and start."""


def mig_node_json(
    name: str, *models: str, present: Present | None = None, on_demand: bool = True, **given: Any
) -> Json:
    """A node with a card of each model; all but a T4 are divided."""
    cards, divided = list[Card](), list[DividedCard]()
    for index, model in enumerate(models):
        geometry, mib = MODELS[model]
        uuid = DeviceId(f"GPU-{name}-{index}")
        cards.append(Card(index, uuid, model, mib))
        if geometry is not None:
            divided.append(
                DividedCard(uuid, geometry, on_demand, _places(geometry, index, present))
            )
    mode = "on-demand" if on_demand else "static"
    resources = {
        gpushare.MEMORY: sum(card.memory_mib // GIB for card in cards),
        gpushare.COUNT: len(cards),
        **{"cpu": 8, "memory": "32Gi", "pods": 110},
    }
    annotations = {
        base.CARDS: nodes.encode_inventory(cards, GIB),
        mig_records.INSTANCES: mig_records.encode_instances(divided),
        **(given.pop("annotations", None) or {}),
    }
    labels = {"gpushare": "true", nodes.MIG_LABEL: mode, **(given.pop("labels", None) or {})}
    return node(name, resources=resources, annotations=annotations, labels=labels, **given)


def _places(geometry: Geometry, card: int, present: Present | None) -> dict[Place, InstanceState]:
    return {
        Place(geometry.by_name[profile], start): state
        for (index, profile, start), state in (present or {}).items()
        if index == card
    }


def mig_node(name: str, *models: str, **given: Any) -> Node:
    """As fenka reads it."""
    return msgspec.convert(mig_node_json(name, *models, **given), Node)


def mig_pod_json(name: str, *profiles: str, **given: Any) -> Json:
    """A pod with a container for each profile: `3g.20gb`, or `2x1g.5gb`."""
    containers = []
    for number, text in enumerate(profiles):
        count, _, profile = text.rpartition("x")
        limits = {resource_name(profile): count or "1"}
        resources = {"limits": limits, "requests": limits}
        containers.append({"name": f"c{number}", "image": "busybox", "resources": resources})
    spec = {"containers": containers, **given.pop("spec", {})}
    return pod(name, spec=spec, **given)


def mig_pod(name: str, *profiles: str, **given: Any) -> Pod:
    """As fenka reads it."""
    return msgspec.convert(mig_pod_json(name, *profiles, **given), Pod)


def inside_pod_json(name: str, gib: int, inside: str = "mig", **given: Any) -> Json:
    """A pod with a slice of so many GiB in an instance."""
    annotations = {mig_records.INSIDE: inside, **(given.pop("annotations", None) or {})}
    return pod(name, {gpushare.MEMORY: str(gib)}, annotations=annotations, **given)


def inside_pod(name: str, gib: int, inside: str = "mig", **given: Any) -> Pod:
    """As fenka reads it."""
    return msgspec.convert(inside_pod_json(name, gib, inside, **given), Pod)
