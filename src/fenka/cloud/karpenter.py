"""The provider `karpenter`: one NodeClaim for each node, whose name is made of the order's token.

Karpenter answers later than it is asked: it deletes a claim whose offer is out of stock. So `launch` looks
at new claims for some seconds. A claim that vanishes later is missing from `instances`, as if taken back.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Protocol

import msgspec

from fenka.cloud import port
from fenka.cloud.config import (
    AutoscalerConfig,
    GroupConfig,
    InvalidConfig,
    Section,
    Text,
    group_of,
)
from fenka.cluster.autoscaling import CAPACITY, GROUP
from fenka.cluster.objects import Condition, Event, Object, ObjectMeta, seconds
from fenka.core.nodes.problem import ZONE_LABEL

TOKEN = "fenka.io/token"
"""Annotation with the token of the order. Karpenter copies labels and annotations to the node."""

CAPACITY_TYPE = "karpenter.sh/capacity-type"

_UNDISTURBED = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/scale-down-disabled": "true",
}
"""Annotations that keep other autoscalers from ending the node."""


class NodeClass(Section, frozen=True, kw_only=True):
    """The object by which Karpenter configures nodes of one cloud.

    Attributes:
        group: API group of the object, for example karpenter.k8s.aws.
        kind: kind of the object, for example EC2NodeClass.
        name: name of the object.
    """

    group: Text
    kind: Text
    name: Text


class KarpenterGroup(GroupConfig, frozen=True, kw_only=True):
    """A group.

    Attributes:
        node_class: the object that configures its nodes. The program does not start without it.
    """

    node_class: NodeClass | None = None


class KarpenterConfig(AutoscalerConfig, frozen=True, kw_only=True):
    """The configuration."""

    groups: tuple[KarpenterGroup, ...]

    def check_settings(self) -> None:
        """Raise InvalidConfig for the first group that Karpenter cannot serve."""
        for group in self.groups:
            if group.node_class is None:
                raise InvalidConfig(
                    f"group {group.name} needs `nodeClass: {{group: …, kind: …, name: …}}`: add it"
                )
            if group.price is None:
                raise InvalidConfig(
                    f"group {group.name} has no `price`, and NodeClaims tell none: add it"
                )
            if group.spot.cap is not None:
                raise InvalidConfig(_no_cap(group.name))


class Requirement(Object):
    """A condition on the node."""

    key: str = ""
    values: tuple[str, ...] = ()


class NodeClaimSpec(Object):
    """The requirements on the node."""

    requirements: tuple[Requirement, ...] = ()


class NodeClaimStatus(Object):
    """The state of the node."""

    provider_id: str = msgspec.field(default="", name="providerID")
    conditions: tuple[Condition, ...] = ()


class NodeClaim(Object):
    """A node that Karpenter launches, or has launched."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: NodeClaimSpec = msgspec.field(default_factory=NodeClaimSpec)
    status: NodeClaimStatus = msgspec.field(default_factory=NodeClaimStatus)

    @property
    def offer(self) -> port.OfferKey:
        """Return what it was made for."""
        wanted = {
            requirement.key: requirement.values[0]
            for requirement in self.spec.requirements
            if requirement.values
        }
        return port.OfferKey(
            self.metadata.labels.get(GROUP, ""),
            wanted.get(port.TYPE_LABEL, ""),
            wanted.get(ZONE_LABEL, ""),
            "spot" if wanted.get(CAPACITY_TYPE) == "spot" else "on-demand",
        )

    @property
    def state(self) -> port.InstanceState:
        """Return where its instance is. Karpenter has registered the Node of a running one."""
        if self.metadata.deletion_timestamp is not None:
            return port.InstanceState.ENDING
        return (
            port.InstanceState.RUNNING
            if self.is_true("Registered")
            else port.InstanceState.STARTING
        )

    def is_true(self, condition: str) -> bool:
        """Return whether a condition holds."""
        return any(
            (known.type, known.status) == (condition, "True") for known in self.status.conditions
        )


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


def render(name: str, cluster: str, group: KarpenterGroup, order: port.Order) -> Mapping[str, Any]:
    """Return a claim for one node of an order.

    It has no label `karpenter.sh/nodepool`, so that Karpenter does not consolidate it. It requests no
    resources: Karpenter does not know fenka's, and would find no type that has them.
    """
    offer = order.offer
    wanted = {
        port.TYPE_LABEL: offer.type,
        ZONE_LABEL: offer.zone,
        CAPACITY_TYPE: offer.capacity,
    }
    spec: dict[str, Any] = {
        "nodeClassRef": msgspec.to_builtins(group.node_class),
        "requirements": [
            {"key": key, "operator": "In", "values": [value]} for key, value in wanted.items()
        ],
        # Karpenter's default ends nodes after 720 hours.
        "expireAfter": "Never",
        "resources": {"requests": {}},
    }
    if group.taints:
        spec["taints"] = [
            {"key": taint.key, "value": taint.value, "effect": taint.effect}
            for taint in group.taints
        ]
    labels = {port.CLUSTER: cluster, GROUP: group.name, CAPACITY: offer.capacity}
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


LOOKS, LOOK_S = 10, 1.0
"""How often, and after which pause, new claims are looked at. Most clouds answer within seconds."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


class KarpenterProvider:
    """A `Provider` for the groups of a configuration."""

    def __init__(
        self,
        config: KarpenterConfig,
        claims: NodeClaims,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Use claims. pause: waits. Raises InvalidConfig for groups that Karpenter cannot serve."""
        self._config, self._cluster = config, config.cluster
        self._claims, self._pause = claims, pause
        self._created: set[str] = set()
        """Names of claims: those that are gone are not created again for the same token."""
        self._ended: set[str] = set()
        config.check_settings()

    async def offers(self) -> Sequence[port.Offer]:
        """Return all offers at the prices of the configuration."""
        return [
            port.Offer(key, group.price or 0.0)
            for group in self._config.groups
            for key in group.offers
        ]

    async def instances(self) -> Sequence[port.Instance]:
        """Return the instances of all claims of this cluster."""
        return [
            port.Instance(
                claim.metadata.name,
                claim.status.provider_id,
                claim.offer,
                claim.metadata.annotations.get(TOKEN, ""),
                claim.state,
                seconds(claim.metadata.creation_timestamp) or 0.0,
            )
            for claim in await self._listed()
        ]

    async def launch(self, order: port.Order) -> Sequence[str]:
        """Create the claims of an order, and look whether Karpenter keeps them."""
        group = group_of(self._config.groups, order.offer)
        if order.cap is not None:
            raise port.Denied(_no_cap(group.name))
        names = claim_names(order)
        for name in names:
            await self._create(name, group, order)
        return await self._settle(order, names)

    async def end(self, ids: Collection[str]) -> None:
        """Delete the claims with these names; Karpenter drains and ends their nodes."""
        for claim in await self._listed():
            if claim.metadata.name in ids and claim.state != port.InstanceState.ENDING:
                self._ended.add(claim.metadata.name)
                await self._claims.delete(claim)

    async def notices(self) -> Sequence[port.ReclaimNotice]:
        """Return none: Karpenter acts on them by itself, and nodes see their own."""
        return ()

    async def _listed(self) -> Sequence[NodeClaim]:
        return await self._claims.list(f"{port.CLUSTER}={self._cluster}")

    async def _create(self, name: str, group: KarpenterGroup, order: port.Order) -> None:
        """Create a claim, unless this was done before for the same order."""
        if name in self._created:
            return
        others = self._created.intersection(claim_names(order))
        with port.after_the_deed() if others else nullcontext():
            if not await self._claims.create(render(name, self._cluster, group, order)):
                await self._check_same(name, order)
        self._created.add(name)

    async def _check_same(self, name: str, order: port.Order) -> None:
        """Raise Denied if a claim that was there already is not of this order."""
        for claim in await self._listed():
            if claim.metadata.name == name:
                token = claim.metadata.annotations.get(TOKEN)
                if (claim.offer, token) == (order.offer, order.token):
                    return
                raise port.Denied(f"token {order.token} is that of another order")

    async def _settle(self, order: port.Order, names: Sequence[str]) -> Sequence[str]:
        """Return the claims that are there when all are launched or gone, or after some seconds."""
        here: list[str] = []
        for look in range(LOOKS):
            if look:
                await self._pause(LOOK_S)
            with port.after_the_deed():
                listed = {claim.metadata.name: claim for claim in await self._listed()}
            here = [
                name
                for name in names
                if name in listed and listed[name].state != port.InstanceState.ENDING
            ]
            short = len(here) < len(names) and order.whole
            if short or all(listed[name].is_true("Launched") for name in here):
                break
        gone = [name for name in names if name not in here and name not in self._ended]
        if gone and (order.whole or not here):
            with port.after_the_deed():
                await self.end(here)
            raise await self._why(order, gone)
        return here

    async def _why(self, order: port.Order, gone: Sequence[str]) -> port.ProviderError:
        """Return why Karpenter has deleted claims. Out of stock is the usual reason."""
        with suppress(port.ProviderError):
            for name in gone:
                for event in await self._claims.events(name):
                    if event.reason == "NodeClassNotReady":
                        return port.Denied(f"Karpenter deleted NodeClaim {name}: {event.message}")
        return port.OutOfStock(order.offer)


@asynccontextmanager
async def open_provider(
    config: KarpenterConfig, claims: NodeClaims
) -> AsyncIterator[KarpenterProvider]:
    """Provide the nodes of a configuration whose provider is `karpenter`. Raises InvalidConfig."""
    yield KarpenterProvider(config, claims)


def claim_names(order: port.Order) -> list[str]:
    """Return the names of an order's claims: its token and their numbers."""
    plain = _NAME.fullmatch(order.token)
    base = order.token if plain else hashlib.sha256(order.token.encode()).hexdigest()[:40]
    return [f"{base}-{number}" for number in range(order.count)]


def _no_cap(group: str) -> str:
    return f"group {group} has a `cap`, but NodeClaims have no maximum price: leave it out"
