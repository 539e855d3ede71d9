"""The provider `ess` against a strict fake over HTTP."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from alibabacloud_ecs20140526.models import RunInstancesRequest, RunInstancesRequestTag

from fenka.cloud.config import InvalidConfig, ShapeConfig
from fenka.cloud.port import Denied, InstanceState, OfferKey, Order, Unknown
from fenka.cluster.autoscaling import CloudType
from tests.autoscaler.snapshots import T4
from tests.cloud.alibaba.harness import EXACT, REGION, START, AlibabaCloud, config
from tests.cloud.alibaba.state import InstanceType
from tests.cloud.contract import ON_DEMAND, SPOT, SPOT_CAP, Cloud, ProviderContract, refusal


class TestExactContract(ProviderContract):
    """The port's promises for groups that are launched exactly."""


class TestScalingGroupContract(ProviderContract):
    """The port's promises for groups that are launched by their scaling groups."""

    @pytest.fixture
    def cloud(self, cloud: AlibabaCloud) -> AlibabaCloud:
        """A fake whose scaling groups launch."""
        cloud.provider = cloud.open({})
        return cloud

    async def test_launch_gives_nothing_when_a_whole_order_is_short_of_stock(
        self, cloud: Cloud
    ) -> None:
        """A scaling group cannot promise that, so no whole order goes to it."""
        with pytest.raises(Denied, match="set launchTemplate and vSwitches of group t4"):
            await cloud.provider.launch(Order("a-1", ON_DEMAND, 3, whole=True))
        assert not await cloud.provider.instances()


async def test_instances_are_complete_when_there_are_several_pages(cloud: AlibabaCloud) -> None:
    """Pages of 10, 25 instances; without the last page the call fails."""
    cloud.change(page=10)
    ids = await cloud.provider.launch(Order("a-1", ON_DEMAND, 25))
    assert sorted(it.id for it in await cloud.provider.instances()) == sorted(ids)
    # Three pages are read in turn. The fault is the third's.
    for kind in ("hold", "hold", "lose-call"):
        cloud.fail("instances", kind)
    with pytest.raises(Unknown):
        await cloud.provider.instances()


async def test_instances_of_others_are_neither_listed_nor_ended(cloud: AlibabaCloud) -> None:
    """Those of another cluster, and those without any tag."""
    _, ecs = cloud.clients()
    for tags in ([], [RunInstancesRequestTag(key="fenka.io/cluster", value="other")]):
        await ecs.run_instances_async(
            RunInstancesRequest(
                region_id=REGION,
                launch_template_id="lt-1",
                instance_type="gn6i",
                zone_id="g",
                v_switch_id="vsw-g",
                tag=tags,
            )
        )
    others = list(cloud.state.cloud.machines)
    assert len(others) == 2
    assert not await cloud.provider.instances()
    await cloud.provider.end(others)
    assert list(cloud.state.cloud.machines) == others


async def test_end_of_nothing_calls_nothing_that_ends(cloud: AlibabaCloud) -> None:
    """An empty list must not mean all."""
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 2))
    await cloud.provider.end([])
    assert len(await cloud.provider.instances()) == 2


async def test_instances_have_state_time_and_provider_id(cloud: AlibabaCloud) -> None:
    """As their nodes will have it."""
    land = cloud.folder.landscape()
    cloud.change(offers=tuple(msgspec.structs.replace(it, startup_s=90.0) for it in land.offers))
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    states = []
    for _ in range(3):
        (instance,) = await cloud.provider.instances()
        states.append(instance.state)
        cloud.wait(45)
    assert states == [InstanceState.STARTING, InstanceState.STARTING, InstanceState.RUNNING]
    assert instance.provider_id == f"cn-beijing.{instance.id}"
    assert instance.launched_at == START


@pytest.mark.parametrize(
    ("cap", "limit"), [(None, None), (4.0, 4.0), (3.4999, 3.499), (3.4901, 3.49), (11.63, 11.63)]
)
async def test_price_limit_is_never_above_the_cap(
    cloud: AlibabaCloud, cap: float | None, limit: float | None
) -> None:
    """The cloud takes three decimals."""
    await cloud.provider.launch(Order("a-1", SPOT, 1, cap=cap))
    (machine,) = cloud.state.cloud.machines.values()
    assert machine.cap == limit


@pytest.mark.parametrize(
    "offer",
    [
        replace(ON_DEMAND, group="other"),
        replace(ON_DEMAND, type="gn7"),
        replace(ON_DEMAND, zone="h"),
        replace(ON_DEMAND, capacity="spot"),
    ],
)
async def test_offer_that_is_not_configured_is_denied(cloud: AlibabaCloud, offer: OfferKey) -> None:
    """Nothing is asked for."""
    with pytest.raises(Denied, match="there is no offer"):
        await cloud.provider.launch(Order("a-1", offer, 1))
    assert not cloud.state.calls


async def test_offers_show_prices_of_a_minute_ago_at_most(cloud: AlibabaCloud) -> None:
    """They say until when they hold."""
    first = {it.key: it for it in await cloud.provider.offers()}
    assert first[SPOT].until == cloud.now + 60
    cloud.wait(1)
    cloud.price(SPOT, 5.0)
    cloud.wait(58)
    assert {it.key: it.price for it in await cloud.provider.offers()}[SPOT] == 3.49
    cloud.wait(1)
    assert {it.key: it.price for it in await cloud.provider.offers()}[SPOT] == 5.0


async def test_offers_use_the_configured_price_where_the_cloud_has_none(
    cloud: AlibabaCloud,
) -> None:
    """A type that is not sold as spot has no price there, and no stock as spot."""
    land = cloud.folder.landscape()
    cloud.change(offers=tuple(it for it in land.offers if it.capacity == "on-demand"))
    with pytest.raises(Denied, match="set price of group t4"):
        await cloud.provider.offers()
    offers = {it.key: it for it in await cloud.open(EXACT, price=12.0).offers()}
    assert (offers[ON_DEMAND].price, offers[ON_DEMAND].stock) == (12.0, None)
    assert offers[SPOT].stock == 0


async def test_notice_is_at_once_when_it_is_not_known_since_when(cloud: AlibabaCloud) -> None:
    """After a restart it may be the last second. Before, five minutes from the last look."""
    await cloud.provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))
    cloud.price(SPOT, SPOT_CAP + 1)
    cloud.wait(3590)
    assert not await cloud.provider.notices()
    seen_at = cloud.now
    cloud.wait(20)
    (notice,) = await cloud.provider.notices()
    assert notice.at == seen_at + 300
    (restarted,) = await cloud.open(EXACT).notices()
    assert restarted.at == cloud.now
    cloud.wait(10)
    assert [notice] == await cloud.provider.notices()
    (instance,) = await cloud.provider.instances()
    assert instance.state == InstanceState.ENDING


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launch_template": "lt-1"}, "no vSwitch for g"),
        ({"v_switches": {"g": "vsw-g"}}, "vSwitches but no launchTemplate"),
    ],
)
def test_settings_are_refused_when_they_are_not_understood(
    cloud: AlibabaCloud, settings: dict[str, Any], message: str
) -> None:
    """One sentence, before anything is called."""
    with pytest.raises(InvalidConfig, match=message):
        cloud.open(settings)
    with pytest.raises(InvalidConfig, match="set id to a scaling group"):
        cloud.open({}, id="")


async def test_offers_describe_the_type_when_its_group_has_no_shape(cloud: AlibabaCloud) -> None:
    """Ten types a call, each read once; not if the memory of their cards is not stated."""
    stated = InstanceType(4, 15, 1, "NVIDIA T4", 16)
    cloud.change(types={"gn6i": stated, **{f"x{number}": stated for number in range(11)}})
    provider = cloud.open({}, types=("gn6i", *(f"x{number}" for number in range(11))), price=1)
    expected = CloudType(
        name="gn6i", cpu_milli=4000, memory_mib=15360, cards=1, model="NVIDIA T4", card_mib=16384
    )
    for _ in range(2):
        machines = [offer.machine for offer in await provider.offers()]
        assert (machines[0], None in machines) == (expected, False)
    assert cloud.state.calls.count("DescribeInstanceTypes") == 2

    cloud.change(types={"gn6i": InstanceType(4, 15, 1, "NVIDIA T4")})
    assert {offer.machine for offer in await cloud.open({}).offers()} == {None}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, ""),
        (
            {"types": ("gn6i", "gn9")},
            "groups[0].types[1]: the provider has no gn9 for t4: remove it",
        ),
        ({"zones": ("g", "x")}, "groups[0].zones[1]: the provider has no x for t4: remove it"),
        (
            {"zones": ("x",)},
            "groups[0]: the provider has no gn6i in x: correct types or zones of t4",
        ),
    ],
)
@pytest.mark.parametrize("shape", [None, T4])
async def test_types_and_zones_that_the_region_has_not_are_no_offers(
    cloud: AlibabaCloud, shape: ShapeConfig | None, fields: dict[str, Any], sentence: str
) -> None:
    """The program that starts says so, also of groups with a shape. Both are read once."""
    provider = cloud.open({}, shape=shape, **fields)
    for _ in range(2):
        keys = [offer.key for offer in await provider.offers()]
        assert refusal(config(cloud.address, {}, **fields), keys) == sentence
    assert cloud.state.calls.count("DescribeZones") == 1
    assert cloud.state.calls.count("DescribeInstanceTypes") == 1
