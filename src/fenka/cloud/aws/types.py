"""What AWS says of instance types: where they are sold, and their shape where the configuration has none."""

from collections.abc import Collection, Mapping

from fenka.cloud.aws.calls import Answer, Calls, in_parts
from fenka.cloud.config import GroupConfig
from fenka.cluster.autoscaling import CloudType

MOST = 100
"""Types of one call."""


class InstanceTypes:
    """Neither types nor where they are sold change, so both are read once."""

    def __init__(self, calls: Calls, groups: Collection[GroupConfig]) -> None:
        self._calls = calls
        self._wanted = sorted({kind for each in groups for kind in each.types})
        self._shapeless = {kind for each in groups if each.shape is None for kind in each.types}
        self._sold: frozenset[tuple[str, str]] | None = None
        self._known: dict[str, CloudType] = {}

    async def sold(self) -> frozenset[tuple[str, str]]:
        """Return the groups' types and the zones that AWS sells them in, whatever is in stock.

        Raises ProviderError.
        """
        if self._sold is None:
            listed = [
                each
                for part in in_parts(self._wanted, MOST)
                for each in await self._calls.pages(
                    "ec2",
                    "describe_instance_type_offerings",
                    "InstanceTypeOfferings",
                    LocationType="availability-zone",
                    Filters=[{"Name": "instance-type", "Values": part}],
                )
            ]
            self._sold = frozenset((each["InstanceType"], each["Location"]) for each in listed)
        return self._sold

    async def described(self) -> Mapping[str, CloudType]:
        """Return the types that are sold, of groups without a shape, by name. Raises ProviderError.

        AWS refuses to describe a type that it does not have, together with all others.
        """
        sold = {kind for kind, _ in await self.sold()}
        missing = sorted((sold & self._shapeless) - self._known.keys())
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
