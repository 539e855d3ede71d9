"""Prices per hour: the market's and the regular ones, as the compute service (ECS) publishes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alibabacloud_ecs20140526 import models as ecs

from fenka.cloud.alibaba.calls import call
from fenka.cloud.port import Unknown

FRESH_S = 60.0
"""For how long a price is used without asking again; the market changes every few minutes."""


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a type in a zone. read_at: when they were read."""

    spot: float
    regular: float
    read_at: float


class Prices:
    """Reads prices, and keeps them for a while."""

    def __init__(self, client: Any, region: str, clock: Callable[[], float]) -> None:
        self._client, self._region, self._clock = client, region, clock
        self._known: dict[tuple[str, str], Price | None] = {}
        self._read_at: dict[tuple[str, str], float] = {}

    async def recent(self, kind: str, zone: str) -> Price | None:
        """Return the prices of at most a minute ago, None if the type is not sold as spot in the zone."""
        key = (kind, zone)
        if key not in self._known or self._clock() - self._read_at[key] >= FRESH_S:
            await self.now(kind, zone)
        return self._known[key]

    async def now(self, kind: str, zone: str) -> Price | None:
        """Return the latest prices, None if the type is not sold as spot in the zone."""
        read_at = self._clock()
        listed = await self._history(kind, zone)
        latest = max(listed, key=lambda it: it.timestamp, default=None)
        price = None if latest is None else Price(latest.spot_price, latest.origin_price, read_at)
        self._known[kind, zone], self._read_at[kind, zone] = price, read_at
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
                raise Unknown("Alibaba Cloud listed a page without its prices")
            listed += body.spot_prices.spot_price_type
            if not body.spot_prices.spot_price_type or (body.next_offset or 0) <= len(listed) - 1:
                return listed
