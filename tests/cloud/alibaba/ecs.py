"""The actions of the compute service (ECS, version 2014-05-26)."""

import json
from typing import Any

from alibabacloud_ecs20140526 import models as ecs

from fenka.cloud.port import Order
from fenka.cloud.simulated_cloud import SimulatedMachine
from fenka.core.nodes.case import Capacity
from tests.cloud.alibaba.cloud import Cloud, action, minute, second
from tests.cloud.alibaba.ess import refuse_others
from tests.cloud.alibaba.protocol import CloudError
from tests.cloud.alibaba.state import Details, InstanceType

VERSION = "2014-05-26"
UNSTATED = InstanceType(cpus=4, memory_gib=15, gpus=1)
"""Of a type that is sold, and that the landscape says nothing of."""


def _tags(given: dict[str, Any]) -> dict[str, str]:
    tags = {it.get("Key", ""): it.get("Value", "") for it in given.get("Tag", [])}
    if len(tags) < len(given.get("Tag", [])):
        raise CloudError(400, "Duplicate.TagKey", "The Tag.N.Key contain duplicate key.")
    if len(tags) > 20 or not all(0 < len(key) <= 128 and len(tags[key]) <= 128 for key in tags):
        raise CloudError(400, "InvalidTagKey.Malformed", "The specified Tag.n.Key is not valid.")
    return tags


@action(VERSION, ecs.RunInstancesRequest)
def run_instances(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """Launch instances of one type in one zone."""
    refuse_others(
        given,
        *("InstanceType", "ZoneId", "VSwitchId", "LaunchTemplateId", "LaunchTemplateVersion"),
        *("Amount", "MinAmount", "SpotStrategy", "SpotPriceLimit", "SpotDuration"),
        *("SpotInterruptionBehavior", "Tag", "DryRun"),
    )
    template = _needed(given, "LaunchTemplateId")
    if template not in cloud.land.templates:
        raise CloudError(
            403, "InvalidLaunchTemplate.NotFound", "The launch template does not exist."
        )
    kind, zone = _needed(given, "InstanceType"), _needed(given, "ZoneId")
    if cloud.land.vswitches.get(_needed(given, "VSwitchId")) != zone:
        raise CloudError(400, "InvalidParameter.Mismatch", "The virtual switch is not in the zone.")
    amount = given.get("Amount", 1)
    least = given.get("MinAmount", amount)
    if not 1 <= amount <= 100:
        raise CloudError(400, "InvalidMaxAmount.Malformed", "The parameter Amount is not valid.")
    if not 1 <= least <= amount:
        raise CloudError(400, "InvalidMinAmount.Malformed", "The parameter MinAmount is not valid.")
    capacity, cap = _spot(given)
    offer = cloud.offer(kind, zone, capacity)
    if offer is None:
        raise CloudError(400, "Zone.NotOnSale", "The type is not sold in the zone.")
    if given.get("DryRun", False):
        raise CloudError(400, "DryRunOperation", "The request would succeed.")
    details = Details(cloud.land.templates[template] | _tags(given))
    # The market launches a part only down to one instance.
    stock = {it.key: it.stock for it in cloud.market.offers()}[offer.key]
    whole = least == amount or (stock is not None and stock < least)
    ids = cloud.launch(
        Order(f"run-{cloud.state.cloud.next_id}", offer.key, amount, whole, cap), details
    )
    return {"RequestId": "fake", "InstanceIdSets": {"InstanceIdSet": ids}}


def _needed(given: dict[str, Any], name: str) -> str:
    value: str = given.get(name, "")
    if not value:
        raise CloudError(400, "MissingParameter", f"The input parameter {name} is not supplied.")
    return value


def _spot(given: dict[str, Any]) -> tuple[Capacity, float | None]:
    strategy, limit = given.get("SpotStrategy", "NoSpot"), given.get("SpotPriceLimit")
    if strategy not in ("NoSpot", "SpotWithPriceLimit", "SpotAsPriceGo"):
        raise CloudError(400, "InvalidSpotStrategy", "The specified SpotStrategy is not valid.")
    if (
        given.get("SpotDuration", 1) != 1
        or given.get("SpotInterruptionBehavior", "Terminate") != "Terminate"
    ):
        raise CloudError(
            400, "FakeNotImplemented", "The fake protects spot for an hour and ends it."
        )
    if (strategy == "SpotWithPriceLimit") != (limit is not None):
        raise CloudError(400, "InvalidSpotPriceLimit", "The specified SpotPriceLimit is not valid.")
    if limit is not None and (limit <= 0 or round(limit, 3) != limit):
        raise CloudError(400, "InvalidSpotPriceLimit", "A limit has 3 decimals at most.")
    return ("on-demand" if strategy == "NoSpot" else "spot"), limit


@action(VERSION, ecs.DescribeInstancesRequest)
def describe_instances(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List instances, a page of them. As on the real cloud TotalCount says nothing."""
    refuse_others(given, "Tag", "InstanceIds", "LockReason", "Status", "MaxResults", "NextToken")
    tags, ids = _tags(given), json.loads(given.get("InstanceIds", "null"))
    if ids is not None and len(ids) > 100:
        raise CloudError(400, "InvalidInstanceIds.Malformed", "There are more than 100 IDs.")
    listed = [
        (name, machine)
        for name, machine in sorted(cloud.machines.items())
        if tags.items() <= cloud.state.details[name].tags.items()
        and (ids is None or name in ids)
        and (
            "LockReason" not in given
            or (given["LockReason"] == "Recycling") == (machine.taken_at is not None)
        )
        and given.get("Status", _status(cloud, machine)) == _status(cloud, machine)
        and name > given.get("NextToken", "")
    ]
    size = min(max(given.get("MaxResults", 10), 10), 100, cloud.land.page)
    shown = listed[:size]
    return {
        "RequestId": "fake",
        "TotalCount": 0,
        "NextToken": shown[-1][0] if len(listed) > size else "",
        "Instances": {"Instance": [_instance(cloud, *it) for it in shown]},
    }


def _status(cloud: Cloud, machine: SimulatedMachine) -> str:
    startup_s = cloud.land.offers[machine.offer].startup_s
    age = cloud.now - machine.launched_at
    return "Running" if age >= startup_s else "Pending" if age < startup_s / 2 else "Starting"


def _instance(cloud: Cloud, name: str, machine: SimulatedMachine) -> dict[str, Any]:
    key, details = cloud.key(machine), cloud.state.details[name]
    locks = [{"LockReason": "Recycling"}] if machine.taken_at is not None else []
    strategy = "SpotAsPriceGo" if machine.cap is None else "SpotWithPriceLimit"
    return {
        "InstanceId": name,
        "RegionId": cloud.land.region,
        "ZoneId": key.zone,
        "InstanceType": key.type,
        "Status": _status(cloud, machine),
        "CreationTime": minute(machine.launched_at),
        "InstanceChargeType": "PostPaid",
        "SpotStrategy": "NoSpot" if key.capacity == "on-demand" else strategy,
        "OperationLocks": {"LockReason": locks},
        "Tags": {"Tag": [{"TagKey": it, "TagValue": value} for it, value in details.tags.items()]},
    }


@action(VERSION, ecs.DeleteInstancesRequest)
def delete_instances(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """End instances: all of them, or none."""
    refuse_others(given, "InstanceId", "Force")
    ids = given["InstanceId"]
    if len(ids) > 100:
        raise CloudError(400, "InvalidInstanceId.ExceedLimit", "There are more than 100 IDs.")
    for name in ids:
        if name not in cloud.machines:
            raise CloudError(404, "InvalidInstanceId.NotFound", "The InstanceId does not exist.")
    if not given.get("Force", False):
        raise CloudError(403, "IncorrectInstanceStatus", "The instance is running.")
    cloud.market.end(ids)
    return {"RequestId": "fake"}


@action(VERSION, ecs.DescribeSpotPriceHistoryRequest)
def describe_spot_price_history(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List the prices of the last three hours, a page of them."""
    refuse_others(given, "InstanceType", "NetworkType", "ZoneId", "Offset")
    if given["NetworkType"] != "vpc":
        raise CloudError(400, "InvalidNetworkType", "The network type is not valid.")
    began = cloud.state.cloud.began_at
    listed = []
    for offer in cloud.land.offers:
        if (offer.type, offer.capacity) != (given["InstanceType"], "spot"):
            continue
        if offer.zone != given.get("ZoneId", offer.zone):
            continue
        regular = cloud.offer(offer.type, offer.zone, "on-demand")
        start = cloud.now - 3 * 3600
        times = [
            start,
            *(began + it.at for it in offer.market if start < began + it.at <= cloud.now),
        ]
        for moment in times:
            spot = offer.at(moment - began)[0].price
            listed.append(
                {
                    "InstanceType": offer.type,
                    "ZoneId": offer.zone,
                    "NetworkType": "vpc",
                    "Timestamp": second(moment),
                    "SpotPrice": spot,
                    "OriginPrice": spot if regular is None else regular.at(moment - began)[0].price,
                }
            )
    start, size = given.get("Offset", 0), cloud.land.page
    return {
        "RequestId": "fake",
        "Currency": "CNY",
        "NextOffset": min(start + size, len(listed)),
        "SpotPrices": {"SpotPriceType": listed[start : start + size]},
    }


@action(VERSION, ecs.DescribeSpotAdviceRequest)
def describe_spot_advice(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List spot types by zone, with their discounts."""
    refuse_others(given, "InstanceTypes", "ZoneId")
    zones: dict[str, list[dict[str, Any]]] = {}
    for offer in cloud.land.offers:
        regular = cloud.offer(offer.type, offer.zone, "on-demand")
        if (
            offer.capacity != "spot"
            or offer.zone != given.get("ZoneId", offer.zone)
            or regular is None
        ):
            continue
        if offer.type in given.get("InstanceTypes", [offer.type]):
            elapsed = cloud.now - cloud.state.cloud.began_at
            share = offer.at(elapsed)[0].price / regular.at(elapsed)[0].price
            zones.setdefault(offer.zone, []).append(
                {
                    "InstanceType": offer.type,
                    "AverageSpotDiscount": round(share * 10),
                    "InterruptionRate": 0.0,
                    "InterruptRateDesc": "0-3%",
                }
            )
    listed = [
        {"ZoneId": zone, "AvailableSpotResources": {"AvailableSpotResource": types}}
        for zone, types in zones.items()
    ]
    return {
        "RequestId": "fake",
        "RegionId": cloud.land.region,
        "AvailableSpotZones": {"AvailableSpotZone": listed},
    }


@action(VERSION, ecs.DescribeInstanceTypesRequest)
def describe_instance_types(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List types. The cloud states a card's memory rounded up, and of some types not at all."""
    refuse_others(given, "InstanceTypes")
    if len(given.get("InstanceTypes", [])) > 10:
        raise CloudError(400, "InvalidInstanceTypes.ExceedLimit", "There are more than 10 types.")
    kinds = {offer.type: UNSTATED for offer in cloud.land.offers} | cloud.land.types
    listed = [
        {
            "InstanceTypeId": name,
            "CpuCoreCount": kind.cpus,
            "MemorySize": kind.memory_gib,
            "GPUAmount": kind.gpus,
            "GPUSpec": kind.gpu,
            **({"GPUMemorySize": kind.gpu_gib} if kind.gpu_gib else {}),
        }
        for name, kind in kinds.items()
        if name in given.get("InstanceTypes", [name])
    ]
    return {"RequestId": "fake", "NextToken": "", "InstanceTypes": {"InstanceType": listed}}


@action(VERSION, ecs.DescribeZonesRequest)
def describe_zones(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List the region's zones, which are those of its offers."""
    refuse_others(given, "Verbose")
    zones = sorted({offer.zone for offer in cloud.land.offers})
    listed = [{"ZoneId": zone, "ZoneType": "AvailabilityZone", "LocalName": zone} for zone in zones]
    return {"RequestId": "fake", "Zones": {"Zone": listed}}
