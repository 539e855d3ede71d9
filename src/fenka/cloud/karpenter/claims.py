"""NodeClaims: what Karpenter launches a node for, and the access to them that the provider needs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from fenka.cloud.config import GroupConfig
from fenka.cloud.port import InstanceState, OfferKey, Order
from fenka.cluster.autoscaling import CAPACITY, GROUP
from fenka.cluster.objects import Condition, Event, Object, ObjectMeta

CLUSTER = "fenka.io/cluster"
"""Label of the claims of this cluster's autoscaler. Karpenter copies labels and annotations to the node."""
TOKEN = "fenka.io/token"
"""Annotation with the token of the order."""

TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
CAPACITY_TYPE = "karpenter.sh/capacity-type"

_UNDISTURBED = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/scale-down-disabled": "true",
}
"""Annotations that keep other autoscalers from ending the node."""


class Requirement(Object):
    """A condition on the node."""

    key: str = ""
    values: tuple[str, ...] = ()


class NodeClaimSpec(Object):
    """What the node must be."""

    requirements: tuple[Requirement, ...] = ()


class NodeClaimStatus(Object):
    """What became of it."""

    provider_id: str = msgspec.field(default="", name="providerID")
    conditions: tuple[Condition, ...] = ()


class NodeClaim(Object):
    """A node that Karpenter launches, or has launched."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: NodeClaimSpec = msgspec.field(default_factory=NodeClaimSpec)
    status: NodeClaimStatus = msgspec.field(default_factory=NodeClaimStatus)

    @property
    def offer(self) -> OfferKey:
        """Return what it was made for."""
        wanted = {each.key: each.values[0] for each in self.spec.requirements if each.values}
        return OfferKey(
            self.metadata.labels.get(GROUP, ""),
            wanted.get(TYPE, ""),
            wanted.get(ZONE, ""),
            "spot" if wanted.get(CAPACITY_TYPE) == "spot" else "on-demand",
        )

    @property
    def state(self) -> InstanceState:
        """Return where its instance is. Karpenter has registered the Node of a running one."""
        if self.metadata.deletion_timestamp is not None:
            return InstanceState.ENDING
        return InstanceState.RUNNING if self.is_true("Registered") else InstanceState.STARTING

    def is_true(self, condition: str) -> bool:
        """Return whether a condition holds."""
        return any((it.type, it.status) == (condition, "True") for it in self.status.conditions)


class NodeClaims(Protocol):
    """The access to NodeClaims and their events. Every method may raise ProviderError."""

    async def list(self, selector: str) -> Sequence[NodeClaim]:
        """Return all claims with a label, never a part of them."""

    async def create(self, body: Mapping[str, Any]) -> bool:
        """Create a claim. Return False if there is one with its name."""

    async def delete(self, claim: NodeClaim) -> None:
        """Delete this claim. One that is gone, or replaced by another of its name, is no error."""

    async def events(self, name: str) -> Sequence[Event]:
        """Return the events on the claim with this name, also if it is gone."""


def render(name: str, cluster: str, group: GroupConfig, order: Order) -> Mapping[str, Any]:
    """Return a claim for one node of an order.

    It has no label `karpenter.sh/nodepool`, so that Karpenter does not consolidate it. It requests no
    resources: Karpenter does not know fenka's, and would find no type that has them.
    """
    offer = order.offer
    wanted = {TYPE: offer.type, ZONE: offer.zone, CAPACITY_TYPE: offer.capacity}
    spec: dict[str, Any] = {
        "nodeClassRef": dict(group.settings["nodeClass"]),
        "requirements": [
            {"key": key, "operator": "In", "values": [value]} for key, value in wanted.items()
        ],
        # Karpenter's default ends nodes after 720 hours.
        "expireAfter": "Never",
        "resources": {"requests": {}},
    }
    if group.taints:
        spec["taints"] = [
            {"key": it.key, "value": it.value, "effect": it.effect} for it in group.taints
        ]
    labels = {CLUSTER: cluster, GROUP: group.name, CAPACITY: offer.capacity}
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodeClaim",
        "metadata": {
            "name": name,
            "labels": dict(group.labels) | labels,
            "annotations": _UNDISTURBED | {TOKEN: order.token},
        },
        "spec": spec,
    }
