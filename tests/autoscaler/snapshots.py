"""Views for tests, of objects as the API server has them."""

from typing import Any

import msgspec

from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.watch import ElasticPod
from fenka.cloud.config import (
    AutoscalerConfig,
    CardConfig,
    GroupConfig,
    ProviderConfig,
    ShapeConfig,
)
from fenka.cloud.port import Instance, InstanceState, Offer, OfferKey
from fenka.cluster.objects import Node
from fenka.cluster.state import ClusterState
from fenka.core.nodes.case import NewCard
from tests.builders import T4_MIB, Json, node_json

NOW = 1_800_000_000.0
T4_CARD = NewCard(model="Tesla T4", memory_mib=T4_MIB)
T4 = ShapeConfig(
    cpu_milli=4000, memory_mib=16000, cards=(CardConfig(model="Tesla T4", memory_mib=T4_MIB),)
)


def group(name: str = "t4", **fields: Any) -> GroupConfig:
    """A group of nodes with one T4, which are on demand in zone a."""
    return GroupConfig(
        **{"name": name, "types": ("t4.x",), "zones": ("a",), "shape": T4, "price": 4.0, **fields}
    )


def config(*groups: GroupConfig, **fields: Any) -> AutoscalerConfig:
    """The configuration of cluster `demo`."""
    return AutoscalerConfig(
        cluster="demo",
        provider=ProviderConfig(kind="simulated"),
        groups=groups or (group(),),
        **fields,
    )


def offer(group: str = "t4", price: float = 4.0, **fields: Any) -> Offer:
    """An offer of type t4.x in zone a, on demand."""
    capacity = fields.pop("capacity", "on-demand")
    return Offer(OfferKey(group, "t4.x", fields.pop("zone", "a"), capacity), price, **fields)


def instance(name: str = "i-1", order: str = "", **fields: Any) -> Instance:
    """A running instance of offer t4. order: the token."""
    return Instance(
        name,
        f"sim:///a/{name}",
        fields.get("offer", offer().key),
        order,
        fields.get("state", InstanceState.RUNNING),
        fields.get("launched_at", NOW),
    )


def elastic_node(name: str, *sizes: int, provider_id: str = "", **given: Any) -> Json:
    """A node with cards of these MiB; none of them without inventory."""
    made = node_json(name, *sizes, **given)
    made["spec"]["providerID"] = provider_id
    return made


def snapshot(
    *, nodes: tuple[Json, ...] = (), pods: tuple[Json, ...] = (), **fields: Any
) -> Snapshot:
    """The snapshot of a cluster. Fields: those of a Snapshot; config and offers have defaults."""
    read_nodes = [msgspec.convert(each, Node) for each in nodes]
    read_pods = [msgspec.convert(each, ElasticPod) for each in pods]
    settings = fields.pop("config", None) or config()
    offers = fields.pop("offers", None)
    if offers is None:
        offers = [
            Offer(OfferKey(each.name, kind, zone, each.capacity), each.price or 0)
            for each in settings.groups
            for kind in each.types
            for zone in each.zones
        ]
    instances = fields.pop("instances", ())
    return Snapshot(
        **{
            "now": NOW,
            "config": settings,
            "state": ClusterState(read_nodes, read_pods),
            "nodes": {each.metadata.name: each for each in read_nodes},
            "pods": {each.metadata.uid: each for each in read_pods},
            "pods_on": {
                made["metadata"]["name"]: [
                    pod
                    for pod in read_pods
                    if pod.spec.node_name == made["metadata"]["name"] and not pod.finished
                ]
                for made in nodes
            },
            "instances": {each.id: each for each in instances},
            "instances_at": NOW,
            "offers": {each.key: each for each in offers},
            **fields,
        }
    )
