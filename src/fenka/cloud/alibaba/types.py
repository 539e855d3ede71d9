"""What the compute service (ECS) says of instance types, for groups whose configuration has no shape."""

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


class InstanceTypes:
    """Types never change, so each is read once."""

    def __init__(self, client: Any, groups: Collection[GroupConfig]) -> None:
        self._client = client
        self._missing = sorted({kind for it in groups if it.shape is None for kind in it.types})
        self._known: dict[str, CloudType] = {}

    async def described(self) -> Mapping[str, CloudType]:
        """Return the types of groups without a shape, by their names. Raises ProviderError."""
        while self._missing:
            part = self._missing[:MOST]
            body = await call(
                self._client.describe_instance_types_async,
                ecs.DescribeInstanceTypesRequest(instance_types=part),
            )
            if body.instance_types is None:
                raise Unknown("Alibaba Cloud listed instance types without their properties")
            listed = map(_cloud_type, body.instance_types.instance_type)
            self._known |= {each.name: each for each in listed if each is not None}
            del self._missing[:MOST]
        return self._known


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
