"""The provider `aws` through the proxy: the port's contract, and what is AWS's own."""

import asyncio
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from fenka.cloud.aws.group_settings import AwsGroup
from fenka.cloud.aws.provider import open_provider
from fenka.cloud.config import InvalidConfig, ShapeConfig
from fenka.cloud.port import (
    Denied,
    InstanceState,
    OfferKey,
    Order,
    OutOfStock,
    Quota,
    Throttled,
    TooDear,
    Unknown,
)
from fenka.cluster.autoscaling import CloudType
from tests.autoscaler.snapshots import T4
from tests.cloud.aws.cloud import (
    ON_DEMAND,
    OTHER_ZONE,
    SPOT,
    TYPE,
    ZONE,
    AwsCloud,
    configuration,
    group,
)
from tests.cloud.contract import SPOT_CAP, ProviderContract, refusal
from tests.waiting import until


class TestContract(ProviderContract):
    """The port's promises."""


async def test_offers_describe_the_type_when_its_group_has_no_shape(cloud: AwsCloud) -> None:
    """Types are read once; a group with a shape needs no such call."""
    expected = CloudType(
        name=TYPE, cpu_milli=4000, memory_mib=16384, cards=1, model="T4", card_mib=16384
    )
    for _ in range(2):
        assert [offer.machine for offer in await cloud.provider.offers()] == [expected] * 2
    assert len(cloud.aws.launched("DescribeInstanceTypes")) == 1
    shaped = [replace(each, shape=T4) for each in cloud.config.groups]
    offers = await cloud.provider_of(configuration(*shaped)).offers()
    assert [offer.machine for offer in offers] == [None] * 2
    assert len(cloud.aws.launched("DescribeInstanceTypes")) == 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, ""),
        ({"types": (TYPE, "g9.huge")}, ".types[1]: the provider has no g9.huge for t4: remove it"),
        # AWS sells no g4dn in this zone.
        ({"zones": (ZONE, "us-east-1e")}, ".zones[1]: the provider has no us-east-1e for t4: remove it"),
        ({"types": ("g9.huge",)}, f": the provider has no g9.huge in {ZONE}: correct types or zones of t4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [None, T4])
async def test_types_and_zones_that_aws_does_not_sell_are_no_offers(
    fleets: AwsCloud, shape: ShapeConfig | None, fields: dict[str, Any], sentence: str
) -> None:
    """The program that starts says so. Where types are sold is read once."""
    config = configuration(group(ON_DEMAND, launch_template="node", shape=shape, **fields))
    provider = fleets.provider_of(config)
    for _ in range(2):
        keys = [offer.key for offer in await provider.offers()]
        assert refusal(config, keys) == (sentence and f"groups[0]{sentence}")
    assert len(fleets.aws.launched("DescribeInstanceTypeOfferings")) == 1


async def test_launch_names_zone_and_token_and_no_retries(grouped: AwsCloud) -> None:
    """In one zone, once."""
    await grouped.provider.launch(Order("demo-t4-1-0", ON_DEMAND, 1))
    (form,) = grouped.aws.launched("LaunchInstances")
    assert form["ClientToken"] == "demo-t4-1-0"
    assert form["AvailabilityZones.member.1"] == ZONE
    assert form["RetryStrategy"] == "none"


async def test_launch_goes_into_the_zone_of_the_offer(grouped: AwsCloud) -> None:
    """Of a group with two zones; a subnet of the settings names it as well."""
    aws = grouped.aws
    subnets = aws.ec2.describe_subnets()["Subnets"]
    subnet = next(it["SubnetId"] for it in subnets if it["AvailabilityZone"] == OTHER_ZONE)
    aws.make_group("asg-2", TYPE, [ZONE, OTHER_ZONE], {"fenka.io/cluster": "demo"})
    aws.autoscaling.suspend_processes(
        AutoScalingGroupName="asg-2", ScalingProcesses=["AZRebalance"]
    )
    subnets = {OTHER_ZONE: subnet}
    two = group(ON_DEMAND, id="asg-2", zones=(ZONE, OTHER_ZONE), subnets=subnets)
    provider = grouped.provider_of(configuration(two))
    for zone in (ZONE, OTHER_ZONE):
        await provider.launch(Order(f"a-{zone}", OfferKey("t4", TYPE, zone, "on-demand"), 1))
    assert {it.offer.zone for it in await provider.instances()} == {ZONE, OTHER_ZONE}
    assert aws.launched("LaunchInstances")[-1]["SubnetIds.member.1"] == subnet


async def test_fleet_has_a_maximum_price_only_with_a_cap(fleets: AwsCloud) -> None:
    """And instances are tagged when they are created."""
    await fleets.provider.launch(Order("a-1", SPOT, 1))
    await fleets.provider.launch(Order("a-2", SPOT, 1, cap=SPOT_CAP))
    first, second = fleets.aws.launched("CreateFleet")
    price = "LaunchTemplateConfigs.1.Overrides.1.MaxPrice"
    assert (first.get(price), second.get(price)) == (None, "4.0000")
    assert not fleets.aws.launched("CreateTags")


async def test_whole_fleet_is_asked_for_as_a_whole(fleets: AwsCloud) -> None:
    """So that AWS launches nothing rather than a part."""
    await fleets.provider.launch(Order("a-1", ON_DEMAND, 2, whole=True))
    (form,) = fleets.aws.launched("CreateFleet")
    assert form["OnDemandOptions.MinTargetCapacity"] == "2"


async def test_half_of_a_whole_order_is_ended_again_when_its_end_was_lost(
    grouped: AwsCloud,
) -> None:
    """LaunchInstances gives a part; repeated, it names the same instances."""
    grouped.stock(ON_DEMAND, 2)
    grouped.aws.faults["TerminateInstanceInAutoScalingGroup"] = ["lose call"]
    order = Order("a-1", ON_DEMAND, 3, whole=True)
    with pytest.raises(Unknown):
        await grouped.provider.launch(order)
    assert len(await grouped.provider.instances()) == 2
    with pytest.raises(OutOfStock):
        await grouped.provider.launch(order)
    assert not await grouped.provider.instances()
    assert _desired(grouped) == 0


async def test_half_of_a_whole_order_is_unknown_when_its_end_is_throttled(
    grouped: AwsCloud,
) -> None:
    """Throttled would say that nothing was done."""
    grouped.stock(ON_DEMAND, 2)
    grouped.aws.faults["TerminateInstanceInAutoScalingGroup"] = ["throttle"]
    with pytest.raises(Unknown):
        await grouped.provider.launch(Order("a-1", ON_DEMAND, 3, whole=True))


@pytest.mark.parametrize("action", ["DescribeInstances", "CreateTags"])
async def test_launch_succeeds_when_its_instances_cannot_be_tagged_at_once(
    grouped: AwsCloud, action: str
) -> None:
    """They are known by their ids, have their order all the same, and are tagged later."""
    grouped.aws.faults[action] = ["throttle", "throttle"]
    ids = await grouped.provider.launch(Order("a-1", ON_DEMAND, 2))
    assert len(ids) == 2
    grouped.aws.faults["DescribeInstances"] = []
    for _ in range(2):
        assert [it.order for it in await grouped.provider.instances()] == ["a-1"] * 2
    restarted = grouped.provider_of(grouped.config)
    assert [it.order for it in await restarted.instances()] == ["a-1"] * 2


async def test_launch_is_answered_once_when_another_call_is_under_way(grouped: AwsCloud) -> None:
    """The second one waits for AWS, and both have the same instances."""
    grouped.aws.hold["LaunchInstances"] = threading.Event()
    order = Order("a-1", ON_DEMAND, 2)
    both = [asyncio.create_task(grouped.provider.launch(order)) for _ in range(2)]
    await until(lambda: len(grouped.aws.launched("LaunchInstances")) == 2)
    grouped.aws.hold["LaunchInstances"].set()
    first, second = await asyncio.gather(*both)
    assert first == second
    assert len(await grouped.provider.instances()) == 2


async def test_token_of_another_order_is_denied(cloud: AwsCloud) -> None:
    """AWS compares the parameters."""
    await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    with pytest.raises(Denied, match="IdempotentParameterMismatch"):
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 2))


async def test_long_or_strange_tokens_are_hashed_and_kept_as_tags(cloud: AwsCloud) -> None:
    """AWS takes 64 letters, digits and three signs."""
    token = "demo.cluster-t4-17-0"
    await cloud.provider.launch(Order(token, ON_DEMAND, 1))
    (form,) = cloud.aws.launched(cloud.launching)
    assert len(form["ClientToken"]) == 64
    assert [it.order for it in await cloud.provider.instances()] == [token]


async def test_group_at_its_maximum_is_a_quota(grouped: AwsCloud) -> None:
    """A repeated order is none, although it has filled the group."""
    order = Order("a-1", ON_DEMAND, 8)
    await grouped.provider.launch(order)
    offers = {offer.key: offer.stock for offer in await grouped.provider.offers()}
    assert offers[ON_DEMAND] == 2
    with pytest.raises(Quota):
        await grouped.provider.launch(Order("a-2", ON_DEMAND, 3))
    assert len(await grouped.provider.launch(order)) == 8


async def test_price_above_the_cap_is_named(cloud: AwsCloud) -> None:
    """The market's, and the cap."""
    cloud.price(SPOT, 5.5)
    with pytest.raises(TooDear, match=r"5\.5 an hour, above the cap of 4"):
        await cloud.provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))


async def test_type_without_a_spot_price_is_not_offered(cloud: AwsCloud) -> None:
    """It is not sold in this zone."""
    cloud.aws.prices.clear()
    assert [offer.key for offer in await cloud.provider.offers()] == [ON_DEMAND]


async def test_instances_are_those_of_all_pages(cloud: AwsCloud) -> None:
    """And none of them if the second page fails."""
    for number in range(3):
        await cloud.provider.launch(Order(f"a-{number}", ON_DEMAND, 1))
    cloud.aws.page = 2
    cloud.aws.forms.clear()
    assert len(await cloud.provider.instances()) == 3
    assert len(cloud.aws.launched("DescribeInstances")) == 2
    cloud.aws.faults["DescribeInstances"] = [None, "fail"]
    with pytest.raises(Unknown):
        await cloud.provider.instances()


async def test_throttling_says_when_to_call_again(cloud: AwsCloud) -> None:
    """It is no unknown answer, although its status is 503."""
    cloud.aws.faults[cloud.launching] = ["throttle"]
    with pytest.raises(Throttled) as why:
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert (why.value.after_s, why.value.spent) == (5, False)
    assert not await cloud.provider.instances()


async def test_throttling_among_a_launchs_errors_spends_the_token(cloud: AwsCloud) -> None:
    """AWS repeats this answer, so the next call must have another token."""
    cloud.stock(ON_DEMAND, 0)
    cloud.aws.shortage = "RequestLimitExceeded"
    with pytest.raises(Throttled) as why:
        await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert why.value.spent


async def test_instances_are_tagged_later_when_they_are_not_listed_at_once(
    grouped: AwsCloud,
) -> None:
    """EC2 lists new instances after a while; then they have their order."""
    grouped.aws.hide_new = True
    ids = await grouped.provider.launch(Order("a-1", ON_DEMAND, 2))
    assert not await grouped.provider.instances()
    grouped.aws.hide_new = False
    grouped.aws.unlisted.clear()
    assert [it.order for it in await grouped.provider.instances()] == ["a-1"] * 2
    restarted = grouped.provider_of(grouped.config)
    assert {it.id: it.order for it in await restarted.instances()} == dict.fromkeys(ids, "a-1")


async def test_end_spares_instances_of_other_clusters(cloud: AwsCloud) -> None:
    """Whoever names them."""
    other = cloud.provider_of(replace(cloud.config, cluster="other"))
    (name,) = await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    await other.end([name])
    (instance,) = await cloud.provider.instances()
    assert instance.state == InstanceState.RUNNING
    assert not await other.instances()


async def test_end_shrinks_the_group_so_that_nothing_replaces_them(grouped: AwsCloud) -> None:
    """One call for all instances of a group."""
    ids = await grouped.provider.launch(Order("a-1", ON_DEMAND, 3))
    await grouped.provider.end(ids[:2])
    assert len(grouped.aws.launched("TerminateInstanceInAutoScalingGroup")) == 1
    assert _desired(grouped) == 1


async def test_provider_id_is_that_of_kubernetes(cloud: AwsCloud) -> None:
    """As the cloud controller manager writes it."""
    (name,) = await cloud.provider.launch(Order("a-1", ON_DEMAND, 1))
    assert [it.provider_id for it in await cloud.provider.instances()] == [f"aws:///{ZONE}/{name}"]


async def test_spot_is_taken_back_with_two_minutes_notice(cloud: AwsCloud) -> None:
    """When the market is above the cap, without a protected time."""
    await cloud.provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))
    assert not await cloud.provider.notices()
    cloud.price(SPOT, SPOT_CAP + 1)
    cloud.wait(60)
    (notice,) = await cloud.provider.notices()
    (instance,) = await cloud.provider.instances()
    assert notice.instance == instance.id
    assert notice.at == pytest.approx(cloud.aws.clock() + 120, abs=1)
    cloud.wait(120)
    assert not await cloud.provider.instances()
    assert not await cloud.provider.notices()


async def test_group_replaces_what_is_taken_back_unless_its_notice_was_read(
    grouped: AwsCloud,
) -> None:
    """It lets go of the instance, which keeps its offer and order and can still be ended."""
    first, second = await grouped.provider.launch(Order("a-1", SPOT, 2, cap=SPOT_CAP))
    grouped.price(SPOT, SPOT_CAP + 1)
    grouped.wait(1)
    grouped.aws.faults["DetachInstances"] = ["throttle"]
    for _ in range(3):
        assert {it.instance for it in await grouped.provider.notices()} == {first, second}
    assert len(grouped.aws.launched("DetachInstances")) == 2
    listed = await grouped.provider.instances()
    assert [(it.offer, it.order) for it in listed] == [(SPOT, "a-1")] * 2
    assert _desired(grouped, "asg-spot") == 0
    await grouped.provider.end([first])
    grouped.wait(120)
    assert not await grouped.provider.instances()


async def test_group_replaces_what_is_taken_back_without_notice(grouped: AwsCloud) -> None:
    """The replacement is of no order."""
    (name,) = await grouped.provider.launch(Order("a-1", SPOT, 1, cap=SPOT_CAP))
    grouped.price(SPOT, SPOT_CAP + 1)
    grouped.wait(1)
    grouped.wait(120)
    (replacement,) = await grouped.provider.instances()
    assert replacement.id != name
    assert (replacement.offer.group, replacement.order) == ("t4-spot", "")


async def test_group_that_does_not_tag_is_refused_before_anything_is_launched(
    grouped: AwsCloud,
) -> None:
    """Its instances would not be found again."""
    provider = grouped.provider_of(replace(grouped.config, cluster="other"))
    with pytest.raises(Denied, match=r"does not tag its instances with fenka\.io/cluster=other"):
        await provider.launch(Order("a-1", ON_DEMAND, 1))
    assert not grouped.aws.launched("LaunchInstances")


async def test_missing_group_is_denied(grouped: AwsCloud) -> None:
    """The sentence names it."""
    provider = grouped.provider_of(configuration(group(ON_DEMAND, id="asg-9")))
    with pytest.raises(Denied, match="no Auto Scaling group asg-9"):
        await provider.offers()


async def test_launch_does_not_need_other_groups(grouped: AwsCloud) -> None:
    """One that was deleted says nothing about this one."""
    gone = replace(group(ON_DEMAND, id="asg-9"), name="gone")
    provider = grouped.provider_of(configuration(*grouped.config.groups, gone))
    assert await provider.launch(Order("a-1", ON_DEMAND, 1))


async def test_offer_that_does_not_exist_is_denied(cloud: AwsCloud) -> None:
    """The sentence names it."""
    with pytest.raises(Denied, match="no offer p5 in"):
        await cloud.provider.launch(Order("a-1", OfferKey("t4", "p5", ZONE, "on-demand"), 1))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (group(ON_DEMAND, id="asg", types=(TYPE, "g5.xlarge")), "has 2 types"),
        (group(ON_DEMAND), "has no `launchTemplate`"),
        (group(ON_DEMAND, id="asg", price=None), "has no `price`"),
    ],
)
async def test_group_that_aws_cannot_serve_is_an_error_at_the_start(
    wrong: AwsGroup, sentence: str
) -> None:
    """Before any call."""
    with pytest.raises(InvalidConfig, match=sentence):
        async with open_provider(configuration(wrong)):
            pass


def _desired(cloud: AwsCloud, name: str = "asg") -> int:
    described = cloud.aws.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    return int(described["AutoScalingGroups"][0]["DesiredCapacity"])
