"""The provider `ess`: launches through scaling groups, or exactly where type, zone or number must be.

A group with a launch template is launched exactly (RunInstances). Any other is launched by its scaling group.
Instances have tags for their cluster and group. Their order is a tag too, or the metadata of the scaling
activity. Zones, types and prices per hour are those that the compute service (ECS) publishes.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from alibabacloud_ecs20140526 import models as ecs

from fenka.cloud import port
from fenka.cloud.alibaba import ecs_instances, scaling_groups
from fenka.cloud.alibaba.sdk import MarketAboveCap, call, default_credentials, open_clients
from fenka.cloud.alibaba.settings import EssConfig
from fenka.cloud.config import GroupConfig, group_of
from fenka.cluster.autoscaling import ORDER, CloudType
from fenka.dialects.base import GIB_MIB

MOST = 10
"""Types of one call."""


class Catalogue:
    """Zones and types. They never change, so each is read once."""

    def __init__(self, client: Any, region: str, groups: Collection[GroupConfig]) -> None:
        self._client, self._region = client, region
        self._missing = sorted({kind for group in groups for kind in group.types})
        self._types: dict[str, CloudType | None] = {}
        self._zones: frozenset[str] | None = None

    async def zones(self) -> frozenset[str]:
        """Return the region's zones. Raises ProviderError."""
        if self._zones is None:
            body = await call(
                self._client.describe_zones_async,
                ecs.DescribeZonesRequest(region_id=self._region, verbose=False),
            )
            if body.zones is None or not body.zones.zone:
                raise port.Unknown("Alibaba Cloud listed no zones")
            self._zones = frozenset(zone.zone_id for zone in body.zones.zone)
        return self._zones

    async def types(self) -> Mapping[str, CloudType | None]:
        """Return those of the groups' types that the cloud has, by name. Raises ProviderError.

        None: the cloud does not say how much memory the cards of this type have.
        """
        while self._missing:
            part = self._missing[:MOST]
            body = await call(
                self._client.describe_instance_types_async,
                ecs.DescribeInstanceTypesRequest(instance_types=part),
            )
            if body.instance_types is None:
                raise port.Unknown("Alibaba Cloud listed instance types without their properties")
            listed = body.instance_types.instance_type
            self._types |= {kind.instance_type_id: _cloud_type(kind) for kind in listed}
            del self._missing[:MOST]
        return self._types


def _cloud_type(described: Any) -> CloudType | None:
    """Return a type, None if the cloud does not say how much memory its cards have."""
    cards, card_gib = described.gpuamount or 0, described.gpumemory_size or 0
    if cards and not card_gib:
        return None
    return CloudType(
        name=described.instance_type_id,
        cpu_milli=1000 * described.cpu_core_count,
        memory_mib=int(GIB_MIB * described.memory_size),
        cards=cards,
        model=described.gpuspec or "",
        card_mib=int(GIB_MIB * card_gib),
    )


FRESH_S = 60.0
"""For how long a price is used without asking again; the market changes every few minutes."""


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a type in a zone. read_at: when they were read."""

    spot: float
    regular: float
    read_at: float


class PriceCache:
    """Reads prices, and keeps them for a while."""

    def __init__(self, client: Any, region: str, clock: Callable[[], float]) -> None:
        self._client, self._region, self._clock = client, region, clock
        self._known: dict[tuple[str, str], tuple[float, Price | None]] = {}
        """With when they were read, by type and zone."""

    async def recent(self, kind: str, zone: str) -> Price | None:
        """Return the prices of at most a minute ago, None if the type is not sold as spot in the zone."""
        read_at, price = self._known.get((kind, zone), (float("-inf"), None))
        return price if self._clock() - read_at < FRESH_S else await self.now(kind, zone)

    async def now(self, kind: str, zone: str) -> Price | None:
        """Return the latest prices, None if the type is not sold as spot in the zone."""
        read_at = self._clock()
        listed = await self._history(kind, zone)
        latest = max(listed, key=lambda price: price.timestamp, default=None)
        price = None if latest is None else Price(latest.spot_price, latest.origin_price, read_at)
        self._known[kind, zone] = read_at, price
        return price

    async def _history(self, kind: str, zone: str) -> list[Any]:
        listed: list[Any] = []
        while True:
            body = await call(
                self._client.describe_spot_price_history_async,
                ecs.DescribeSpotPriceHistoryRequest(
                    region_id=self._region,
                    network_type="vpc",
                    instance_type=kind,
                    zone_id=zone,
                    offset=len(listed),
                ),
            )
            if body.spot_prices is None:
                raise port.Unknown("Alibaba Cloud listed a page without its prices")
            listed += body.spot_prices.spot_price_type
            if not body.spot_prices.spot_price_type or (body.next_offset or 0) <= len(listed) - 1:
                return listed


NOTICE_S = 300.0
"""From the announcement of a take-back until it happens."""


class EssProvider:
    """A `Provider`."""

    def __init__(
        self,
        config: EssConfig,
        clients: tuple[Any, Any],
        clock: Callable[[], float],
        pause: scaling_groups.Pause,
    ) -> None:
        """Use a configuration. Raises InvalidConfig.

        Args:
            config: with provider `ess`.
            clients: of ESS and ECS.
            clock: returns the time.
            pause: waits between looks at a scaling activity.
        """
        self._config = config
        config.check_settings()
        region, self._clock = config.provider.region, clock
        ess, ecs = clients
        self._instances = ecs_instances.EcsInstances(ecs, region, config.cluster)
        self._prices = PriceCache(ecs, region, clock)
        self._catalogue = Catalogue(ecs, region, config.groups)
        self._scaling_groups = scaling_groups.ScalingGroups(ess, region, config.cluster, pause)
        self._orders: dict[str, str] = {}
        self._taken: dict[str, float] = {}
        self._looked_at: float | None = None

    async def offers(self) -> Sequence[port.Offer]:
        """Return all offers. The cloud does not say stock, except that a type is not sold as spot."""
        types, zones = await self._catalogue.types(), await self._catalogue.zones()
        keys = [key for key in self._config.offers if key.type in types and key.zone in zones]
        places = sorted({(key.type, key.zone) for key in keys})
        read = await asyncio.gather(*(self._prices.recent(*place) for place in places))
        prices = dict(zip(places, read, strict=True))
        offers = [self._offer(key, prices[key.type, key.zone]) for key in keys]
        return [replace(offer, machine=types[offer.key.type]) for offer in offers]

    def _offer(self, key: port.OfferKey, price: Price | None) -> port.Offer:
        if price is not None:
            amount = price.spot if key.capacity == "spot" else price.regular
            return port.Offer(key, amount, until=price.read_at + FRESH_S)
        configured = group_of(self._config.groups, key).price
        if key.capacity == "spot":
            return port.Offer(key, configured or 0.0, stock=0)
        if configured is None:
            raise port.Denied(
                f"Alibaba Cloud has no price for {key.type} in {key.zone}: set price of group {key.group}"
            )
        return port.Offer(key, configured)

    async def instances(self) -> Sequence[port.Instance]:
        """Return all instances of the cluster. Raises ProviderError rather than give a part of them."""
        listed = await self._instances.all()
        await self._find_orders(listed)
        return [
            ecs_instances.as_instance(instance, self._orders.get(instance.instance_id, ""))
            for instance in listed
        ]

    async def _find_orders(self, listed: Sequence[Any]) -> None:
        """Find the orders of new instances; an instance never changes its order."""
        names = {instance.instance_id for instance in listed}
        self._orders = {name: order for name, order in self._orders.items() if name in names}
        groups = set()
        for instance in listed:
            tags = ecs_instances.tags_of(instance)
            if ORDER in tags:
                self._orders[instance.instance_id] = tags[ORDER]
            elif instance.instance_id not in self._orders and ecs_instances.SCALING_GROUP in tags:
                groups.add(tags[ecs_instances.SCALING_GROUP])
        for group in sorted(groups):
            self._orders |= await self._scaling_groups.orders(group)

    async def launch(self, order: port.Order) -> Sequence[str]:
        """Launch an order once.

        Raises Unknown while a scaling group is still busy with it. Launching it again says what became of it.
        """
        group = group_of(self._config.groups, order.offer)
        try:
            if group.exact:
                return await self._instances.run(order, group)
            return await self._scaling_groups.launch(group, order)
        except MarketAboveCap:
            raise await self._too_dear(order) from None

    async def _too_dear(self, order: port.Order) -> port.TooDear | port.OutOfStock:
        price = await self._prices.now(order.offer.type, order.offer.zone)
        if price is None or order.cap is None:
            return port.OutOfStock(order.offer)
        return port.TooDear(order.offer, price.spot, order.cap)

    async def end(self, ids: Collection[str]) -> None:
        """End those instances that have the cluster's tag."""
        members: defaultdict[str, list[str]] = defaultdict(list)
        for instance in await self._instances.named(ids):
            members[ecs_instances.tags_of(instance).get(ecs_instances.SCALING_GROUP, "")].append(
                instance.instance_id
            )
        alone = members.pop("", [])
        if alone:
            await self._instances.delete(alone)
        for group, removed in members.items():
            await self._scaling_groups.remove(group, removed)

    async def notices(self) -> Sequence[port.ReclaimNotice]:
        """Return the take-backs. Their times are the earliest ones possible, since the cloud tells none here.

        An instance that was not being taken back at the last call is there for five minutes after that call.
        The metadata of the instance itself has the exact time.
        """
        now = self._clock()
        listed = await self._instances.all(lock_reason="Recycling")
        before = now - NOTICE_S if self._looked_at is None else self._looked_at
        earliest = max(before + NOTICE_S, now)
        names = [instance.instance_id for instance in listed]
        self._taken = {name: self._taken.get(name, earliest) for name in names}
        self._looked_at = now
        return [
            port.ReclaimNotice(name, at, "the market's price is above the limit, or stock is short")
            for name, at in self._taken.items()
        ]


@asynccontextmanager
async def open_provider(config: EssConfig) -> AsyncIterator[EssProvider]:
    """Open the provider of a configuration. Raises InvalidConfig."""
    config.check_settings()
    clients = open_clients(config.provider, default_credentials())
    yield EssProvider(config, clients, time.time, asyncio.sleep)
