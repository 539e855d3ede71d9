"""What the compute service (ECS) says of a region's zones, and of instance types."""

from collections.abc import Collection, Mapping
from typing import Any

from alibabacloud_ecs20140526 import models as ecs

from fenka.cloud.alibaba.calls import call
from fenka.cloud.config import GroupConfig
from fenka.cloud.port import Unknown
from fenka.cluster.autoscaling import CloudType

MOST = 10
"""Types of one call."""

GIB_MIB = 1024


class Catalogue:
    """Zones and types. They never change, so each is read once."""

    def __init__(self, client: Any, region: str, groups: Collection[GroupConfig]) -> None:
        self._client, self._region = client, region
        self._missing = sorted({kind for it in groups for kind in it.types})
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
                raise Unknown("Alibaba Cloud listed no zones")
            self._zones = frozenset(it.zone_id for it in body.zones.zone)
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
                raise Unknown("Alibaba Cloud listed instance types without their properties")
            listed = body.instance_types.instance_type
            self._types |= {it.instance_type_id: _cloud_type(it) for it in listed}
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
