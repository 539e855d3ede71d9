"""What AWS says of instance types, for groups whose configuration has no shape."""

from collections.abc import Collection, Mapping

from fenka.cloud.aws.calls import Answer, Calls, in_parts
from fenka.cloud.config import GroupConfig
from fenka.cluster.autoscaling import CloudType

MOST = 100
"""Types of one call."""


class InstanceTypes:
    """Types never change, so each is read once."""

    def __init__(self, calls: Calls, groups: Collection[GroupConfig]) -> None:
        self._calls = calls
        self._wanted = sorted(
            {kind for each in groups if each.shape is None for kind in each.types}
        )
        self._known: dict[str, CloudType] = {}

    async def described(self) -> Mapping[str, CloudType]:
        """Return the types of groups without a shape, by their names. Raises ProviderError."""
        missing = [kind for kind in self._wanted if kind not in self._known]
        for part in in_parts(missing, MOST):
            listed = await self._calls.pages(
                "ec2", "describe_instance_types", "InstanceTypes", InstanceTypes=part
            )
            self._known |= {each["InstanceType"]: _cloud_type(each) for each in listed}
        return self._known


def _cloud_type(described: Answer) -> CloudType:
    """Return a type. All cards of a type are alike."""
    cards = described.get("GpuInfo", {}).get("Gpus", ())
    first = cards[0] if cards else {}
    return CloudType(
        name=described["InstanceType"],
        cpu_milli=1000 * described["VCpuInfo"]["DefaultVCpus"],
        memory_mib=described["MemoryInfo"]["SizeInMiB"],
        cards=sum(each.get("Count", 0) for each in cards),
        model=first.get("Name", ""),
        card_mib=first.get("MemoryInfo", {}).get("SizeInMiB", 0),
    )
