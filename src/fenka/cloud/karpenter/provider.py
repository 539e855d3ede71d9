"""The provider `karpenter`: one NodeClaim for each node, whose name is made of the order's token.

Karpenter answers later than it is asked: it deletes a claim whose offer is out of stock. So `launch` looks
at new claims for some seconds. What vanishes later is missing from `instances`, as if it were taken back.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress

from fenka.cloud.config import Config, GroupConfig
from fenka.cloud.config_values import InvalidConfig
from fenka.cloud.karpenter.claims import CLUSTER, TOKEN, NodeClaim, NodeClaims, render
from fenka.cloud.port import (
    Denied,
    Instance,
    InstanceState,
    Notice,
    Offer,
    Order,
    OutOfStock,
    ProviderError,
    after_the_deed,
)
from fenka.cluster.objects import seconds

LOOKS, LOOK_S = 10, 1.0
"""How often, and after which pause, new claims are looked at. Most clouds answer within seconds."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


class KarpenterProvider:
    """A `Provider` for the groups of a configuration."""

    def __init__(
        self,
        config: Config,
        claims: NodeClaims,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Use claims. pause: waits. Raises InvalidConfig for groups that Karpenter cannot serve."""
        self._cluster, self._claims, self._pause = config.cluster, claims, pause
        self._groups = {group.name: group for group in config.groups}
        self._created: set[str] = set()
        """Names of claims: those that are gone are not created again for the same token."""
        self._ended: set[str] = set()
        check_settings(config)

    async def offers(self) -> Sequence[Offer]:
        """Return all offers at the prices of the configuration."""
        return [
            Offer(key, group.price or 0.0)
            for group in self._groups.values()
            for key in group.offers
        ]

    async def instances(self) -> Sequence[Instance]:
        """Return the instances of all claims of this cluster."""
        return [
            Instance(
                claim.metadata.name,
                claim.status.provider_id,
                claim.offer,
                claim.metadata.annotations.get(TOKEN, ""),
                claim.state,
                seconds(claim.metadata.creation_timestamp) or 0.0,
            )
            for claim in await self._listed()
        ]

    async def launch(self, order: Order) -> Sequence[str]:
        """Create the claims of an order, and look whether Karpenter keeps them."""
        group = self._groups.get(order.offer.group)
        if group is None or order.offer not in [offer.key for offer in await self.offers()]:
            raise Denied(f"there is no offer {order.offer}")
        if order.cap is not None:
            raise Denied(_no_cap(group.name))
        names = claim_names(order)
        for name in names:
            await self._create(name, group, order)
        return await self._settle(order, names)

    async def end(self, ids: Collection[str]) -> None:
        """Delete the claims with these names; Karpenter drains and ends their nodes."""
        for claim in await self._listed():
            if claim.metadata.name in ids and claim.state != InstanceState.ENDING:
                self._ended.add(claim.metadata.name)
                await self._claims.delete(claim)

    async def notices(self) -> Sequence[Notice]:
        """Return none: Karpenter acts on them by itself, and nodes see their own."""
        return ()

    async def _listed(self) -> Sequence[NodeClaim]:
        return await self._claims.list(f"{CLUSTER}={self._cluster}")

    async def _create(self, name: str, group: GroupConfig, order: Order) -> None:
        """Create a claim, unless this was done before for the same order."""
        if name in self._created:
            return
        others = self._created.intersection(claim_names(order))
        with after_the_deed() if others else nullcontext():
            if not await self._claims.create(render(name, self._cluster, group, order)):
                await self._check_same(name, order)
        self._created.add(name)

    async def _check_same(self, name: str, order: Order) -> None:
        """Raise Denied if a claim that was there already is not of this order."""
        for claim in await self._listed():
            if claim.metadata.name == name:
                token = claim.metadata.annotations.get(TOKEN)
                if (claim.offer, token) == (order.offer, order.token):
                    return
                raise Denied(f"token {order.token} is that of another order")

    async def _settle(self, order: Order, names: Sequence[str]) -> Sequence[str]:
        """Return the claims that are there when all are launched or gone, or after some seconds."""
        here: list[str] = []
        for look in range(LOOKS):
            if look:
                await self._pause(LOOK_S)
            with after_the_deed():
                listed = {claim.metadata.name: claim for claim in await self._listed()}
            here = [it for it in names if it in listed and listed[it].state != InstanceState.ENDING]
            short = len(here) < len(names) and order.whole
            if short or all(listed[name].is_true("Launched") for name in here):
                break
        gone = [name for name in names if name not in here and name not in self._ended]
        if gone and (order.whole or not here):
            with after_the_deed():
                await self.end(here)
            raise await self._why(order, gone)
        return here

    async def _why(self, order: Order, gone: Sequence[str]) -> ProviderError:
        """Return why Karpenter has deleted claims. Out of stock is the usual reason."""
        with suppress(ProviderError):
            for name in gone:
                for event in await self._claims.events(name):
                    if event.reason == "NodeClassNotReady":
                        return Denied(f"Karpenter deleted NodeClaim {name}: {event.message}")
        return OutOfStock(order.offer)


@asynccontextmanager
async def open_provider(config: Config, claims: NodeClaims) -> AsyncIterator[KarpenterProvider]:
    """Provide the nodes of a configuration whose provider is `karpenter`. Raises InvalidConfig."""
    yield KarpenterProvider(config, claims)


def claim_names(order: Order) -> list[str]:
    """Return the names of an order's claims: its token and their numbers."""
    plain = _NAME.fullmatch(order.token)
    base = order.token if plain else hashlib.sha256(order.token.encode()).hexdigest()[:40]
    return [f"{base}-{number}" for number in range(order.count)]


def _no_cap(group: str) -> str:
    return f"group {group} has a `cap`, but NodeClaims have no maximum price: leave it out"


def check_settings(config: Config) -> None:
    """Raise InvalidConfig for the first group that Karpenter cannot serve."""
    for group in config.groups:
        reference = group.settings.get("nodeClass")
        if not isinstance(reference, Mapping) or set(reference) != {"group", "kind", "name"}:
            raise InvalidConfig(
                f"group {group.name} needs `nodeClass: {{group: …, kind: …, name: …}}`: add it"
            )
        if group.price is None:
            raise InvalidConfig(
                f"group {group.name} has no `price`, and NodeClaims tell none: add it"
            )
        if group.spot.cap is not None:
            raise InvalidConfig(_no_cap(group.name))
