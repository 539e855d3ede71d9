"""The autoscaler's loop with the provider `aws`: one set of instances, whatever happens to its calls."""

from pathlib import Path

import pytest

from fenka.cloud.aws.provider import AwsProvider
from tests.autoscaler.harness import World, scenario
from tests.autoscaler.snapshots import T4
from tests.cloud.aws.cloud import ON_DEMAND, AwsCloud, configuration, group
from tests.cloud.aws.proxy import Fault
from tests.coroutines import synchronous
from tests.fakes.api_server import FakeApiServer, api_server


class AwsWorld(World):
    """A cluster whose nodes are AWS's."""

    def __init__(self, server: FakeApiServer, folder: Path, cloud: AwsCloud) -> None:
        on_demand = group(
            ON_DEMAND,
            shape=T4,
            id="asg" if cloud.grouped else "",
            launch_template="" if cloud.grouped else "node",
        )
        self.config = configuration(on_demand)
        super().__init__(server, folder, scenario(), self.config)
        self.aws = cloud
        self.time.now = cloud.aws.clock()

    def provider(self) -> AwsProvider:  # type: ignore[override]
        """A provider of the one cloud."""
        return self.aws.provider_of(self.config)

    def named(self) -> list[str]:
        """The instances that orders name."""
        slots = [slot for order in self.orders().values() for slot in order.slots]
        return [slot.instance for slot in slots if slot.instance]

    def launched(self) -> int:
        """How many instances AWS ever launched."""
        pages = self.aws.aws.ec2.describe_instances()["Reservations"]
        return sum(len(each["Instances"]) for each in pages)

    async def looks(self, count: int) -> None:
        """The autoscaler looks at all instances so many times."""
        made = len(self.aws.aws.launched("DescribeInstances")) + count
        await self.passes(60, lambda: len(self.aws.aws.launched("DescribeInstances")) >= made)


@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["lose call"],
        ["lose answer"],
        ["lose answer", "throttle"],
        ["lose answer", "fail", "lose answer"],
        ["throttle", "lose answer", "throttle"],
    ],
)
@synchronous
async def test_pod_gets_one_instance_whatever_happens_to_the_launch(
    cloud: AwsCloud, tmp_path: Path, faults: list[Fault | None]
) -> None:
    """And one order, which names it, also when another replica takes over in between."""
    cloud.aws.faults[cloud.launching] = list(faults)
    async with api_server() as server:
        there = AwsWorld(server, tmp_path, cloud)
        there.pending("a")
        async with there.replica():
            await there.passes(60, lambda: cloud.aws.launched(cloud.launching))
        async with there.replica("two") as second:
            await there.takes_over(second)
            await there.passes(60, there.named)
            await there.looks(3)
    assert there.launched() == 1
    assert len(there.named()) == len(there.live()) == 1
