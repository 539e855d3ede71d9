"""Orders that scaling groups launch: what they can promise, what they are asked, what becomes of it."""

from typing import Any

import pytest

from fenka.cloud.alibaba.ess import EssProvider
from fenka.cloud.port import (
    Denied,
    OfferKey,
    Order,
    OutOfStock,
    Quota,
    Throttled,
    TooDear,
    Unknown,
)
from tests.cloud.alibaba.harness import EXACT, AlibabaCloud, tags
from tests.cloud.contract import ON_DEMAND, SPOT, SPOT_CAP

OTHER_ZONE = OfferKey("t4", "gn6i", "h", "on-demand")


@pytest.fixture
def provider(cloud: AlibabaCloud) -> EssProvider:
    """A provider whose scaling groups launch."""
    return cloud.open({})


@pytest.fixture
def zones(cloud: AlibabaCloud) -> EssProvider:
    """The same with two zones; the scaling group tries g first."""
    cloud.sell("gn6i", "h")
    cloud.change_group("asg-t4", zones=("g", "h"))
    return cloud.open({}, zones=("g", "h"))


async def test_launch_is_unknown_while_its_activity_is_in_progress(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """Launching again returns the ids. It is one activity, also for a provider that was restarted."""
    cloud.change_group("asg-t4", activity_s=60.0)
    for _ in range(2):
        with pytest.raises(Unknown, match="asa-000001 of group t4 is in progress"):
            await provider.launch(Order("a-1", ON_DEMAND, 2))
    assert not await provider.instances()
    cloud.wait(60)
    ids = await cloud.open({}).launch(Order("a-1", ON_DEMAND, 2))
    assert len(ids) == 2
    assert {it.order for it in await cloud.open({}).instances()} == {"a-1"}
    assert len(cloud.state.activities) == 1


async def test_launch_is_one_order_when_the_cloud_has_forgotten_its_token(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """Its scaling activity is found by its metadata, also if the group has been changed since."""
    ids = await provider.launch(Order("a-1", ON_DEMAND, 2))
    state = cloud.state
    state.tokens.clear()
    cloud.folder.keep(state)
    cloud.change_group("asg-t4", expected=True)
    assert await provider.launch(Order("a-1", ON_DEMAND, 2)) == ids


async def test_launch_waits_a_few_seconds_for_the_activity(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """So that most orders are answered at once."""
    cloud.change_group("asg-t4", activity_s=3.0)
    assert len(await provider.launch(Order("a-1", ON_DEMAND, 2))) == 2


async def test_second_order_waits_when_an_activity_is_in_progress(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """It is refused for now. With its old token it would be refused for ever, so it gets a new one."""
    cloud.change_group("asg-t4", activity_s=60.0)
    for token, error in (("a-1", Unknown), ("b-1", Throttled)):
        with pytest.raises(error):
            await provider.launch(Order(token, ON_DEMAND, 1))
    cloud.wait(60)
    for token, error in (("b-1", Throttled), ("b-2", Unknown)):
        with pytest.raises(error):
            await provider.launch(Order(token, ON_DEMAND, 1))
    cloud.wait(60)
    assert sorted(it.order for it in await provider.instances()) == ["a-1", "b-2"]


async def test_launch_gives_what_the_groups_maximum_allows(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """The cloud does less without a word. Nothing at all is an error, except for what was done before."""
    cloud.change_group("asg-t4", max=3)
    assert len(await provider.launch(Order("a-1", ON_DEMAND, 2))) == 2
    assert len(await provider.launch(Order("a-2", ON_DEMAND, 2))) == 1
    with pytest.raises(Quota):
        await provider.launch(Order("a-3", ON_DEMAND, 1))
    assert len(await provider.launch(Order("a-1", ON_DEMAND, 2))) == 2


async def test_launch_is_out_of_stock_when_the_activity_fails(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """The call itself was accepted."""
    cloud.stock(ON_DEMAND, 0)
    with pytest.raises(OutOfStock):
        await provider.launch(Order("a-1", ON_DEMAND, 1))
    cloud.stock(ON_DEMAND, 1)
    with pytest.raises(OutOfStock):
        await provider.launch(Order("a-1", ON_DEMAND, 1))
    assert len(await provider.launch(Order("a-2", ON_DEMAND, 1))) == 1


async def test_launch_is_too_dear_when_the_price_is_above_the_groups_limit(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """The sentence has both prices."""
    cloud.price(SPOT, 4.5)
    with pytest.raises(TooDear, match=r"costs 4\.5 an hour, above the cap of 4"):
        await provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))


async def test_group_of_several_zones_is_asked_first(
    cloud: AlibabaCloud, zones: EssProvider
) -> None:
    """Its plan begins with zone g; an order for zone h is one for later."""
    with pytest.raises(OutOfStock) as why:
        await zones.launch(Order("a-1", OTHER_ZONE, 1))
    assert why.value.offer == OTHER_ZONE
    await zones.launch(Order("a-2", ON_DEMAND, 1))
    cloud.stock(ON_DEMAND, 1)
    await zones.launch(Order("a-3", OTHER_ZONE, 1))
    listed = {it.order: it.offer for it in await zones.instances()}
    assert listed == {"a-2": ON_DEMAND, "a-3": OTHER_ZONE}


async def test_group_of_several_zones_launches_no_more_than_its_plan_has_in_the_zone(
    cloud: AlibabaCloud, zones: EssProvider
) -> None:
    """Three in g, of which there are two: the third would come in h."""
    cloud.stock(ON_DEMAND, 2)
    await zones.launch(Order("a-1", ON_DEMAND, 3))
    assert [it.offer for it in await zones.instances()] == [ON_DEMAND] * 2


async def test_group_of_several_zones_is_not_used_when_fewer_would_come_elsewhere(
    cloud: AlibabaCloud, zones: EssProvider
) -> None:
    """Two in h are planned as one in g and one in h. One alone would come in g."""
    cloud.stock(ON_DEMAND, 1)
    with pytest.raises(OutOfStock):
        await zones.launch(Order("a-1", OTHER_ZONE, 2))
    assert not await zones.instances()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tags": {}}, "add the tag fenka.io/cluster=demo to its scaling configuration"),
        ({"tags": tags("other")}, "add the tag fenka.io/group=t4 to its scaling configuration"),
        ({"expected": True}, "switch its expected number of instances off"),
        ({"remedy": True}, "switch its supplement of spot instances off"),
        ({"rebalance": True}, "switch its rebalancing of zones off"),
        ({"types": ("gn7",)}, "does not launch gn6i: correct types of group t4"),
        ({"capacity": "spot"}, "has the spot strategy SpotAsPriceGo: correct capacity of group t4"),
        ({"id": "asg-x"}, "there is no scaling group asg-t4 in cn-beijing: correct id of group t4"),
    ],
)
async def test_group_is_refused_when_it_would_launch_something_else(
    cloud: AlibabaCloud, provider: EssProvider, fields: dict[str, Any], sentence: str
) -> None:
    """The sentence says what to change on the cloud's side. Nothing was asked for."""
    cloud.change_group("asg-t4", **fields)
    with pytest.raises(Denied, match=sentence):
        await provider.launch(Order("a-1", ON_DEMAND, 1))
    assert "ScaleWithAdjustment" not in cloud.state.calls


async def test_spot_group_is_refused_when_it_may_launch_on_demand(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """A group of on-demand nodes may choose by price."""
    for name in ("asg-spot", "asg-t4"):
        cloud.change_group(name, policy="COST_OPTIMIZED")
    with pytest.raises(Denied, match="set its MultiAZPolicy to PRIORITY"):
        await provider.launch(Order("a-1", SPOT, 1))
    assert await provider.launch(Order("a-2", ON_DEMAND, 1))


async def test_group_with_a_pattern_of_types_is_asked_first(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """It may launch others than the one that it names."""
    for patterns, calls in ((False, 1), (True, 3)):
        cloud.change_group("asg-t4", patterns=patterns)
        await provider.launch(Order(f"a-{patterns}", ON_DEMAND, 1))
        assert cloud.state.calls.count("ScaleWithAdjustment") == calls


@pytest.mark.parametrize(("limit", "has"), [(None, "no price limit"), (5.0, "the price limit 5")])
async def test_group_is_refused_when_it_may_pay_more_than_the_cap(
    cloud: AlibabaCloud, provider: EssProvider, limit: float | None, has: str
) -> None:
    """The cap of an order cannot be passed to a scaling group."""
    cloud.change_group("asg-spot", cap=limit)
    with pytest.raises(Denied, match=f"has {has} for gn6i, and the cap of group t4-spot is 4"):
        await provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))
    assert await provider.launch(Order("a-2", SPOT, 1))


async def test_end_is_denied_below_the_groups_minimum(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """The minimum of the cloud's side counts too."""
    ids = await provider.launch(Order("a-1", ON_DEMAND, 2))
    cloud.change_group("asg-t4", min=2)
    with pytest.raises(Denied, match=r"IncorrectCapacity\.MinSize"):
        await provider.end(ids)
    assert len(await provider.instances()) == 2


async def test_end_ends_instances_of_groups_and_of_none(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """Members leave their scaling group; others are deleted."""
    ids = [
        *await provider.launch(Order("a-1", ON_DEMAND, 45)),
        *await cloud.provider.launch(Order("a-2", ON_DEMAND, 2)),
    ]
    await provider.end(ids)
    assert not await provider.instances()
    assert cloud.state.calls.count("RemoveInstances") == 3


async def test_orders_are_found_when_there_are_several_pages(
    cloud: AlibabaCloud, provider: EssProvider
) -> None:
    """120 members of 24 activities; once found they are not asked for again."""
    for number in range(24):
        await provider.launch(Order(f"a-{number}", ON_DEMAND, 5))
    restarted = cloud.open({})
    orders = [it.order for it in await restarted.instances()]
    assert sorted(orders) == sorted(f"a-{number}" for number in range(24) for _ in range(5))
    calls = len(cloud.state.calls)
    await restarted.instances()
    assert cloud.state.calls[calls:] == ["DescribeInstances"] * 2


async def test_exact_group_launches_the_type_and_zone_that_are_ordered(
    cloud: AlibabaCloud, zones: EssProvider
) -> None:
    """Whatever its scaling group would choose."""
    settings = {**EXACT, "v_switches": {"g": "vsw-g", "h": "vsw-h"}}
    exact = cloud.open(settings, zones=("g", "h"))
    await exact.launch(Order("a-1", OTHER_ZONE, 2, whole=True))
    assert [it.offer for it in await zones.instances()] == [OTHER_ZONE] * 2
