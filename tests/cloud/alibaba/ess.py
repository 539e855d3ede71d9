"""The actions of Auto Scaling (ESS, version 2022-02-22)."""

from collections.abc import Sequence
from typing import Any

from alibabacloud_ess20220222 import models as ess

from tests.cloud.alibaba.cloud import Cloud, action, minute, second
from tests.cloud.alibaba.protocol import CloudError
from tests.cloud.alibaba.state import Activity, ScalingGroup

VERSION = "2022-02-22"


def page(listed: Sequence[dict[str, Any]], given: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the fields of a page, and its items as `items`."""
    size, number = given.get("PageSize", 10), given.get("PageNumber", 1)
    if not 1 <= size <= most:
        raise CloudError(400, "InvalidPageSize", f"The page size must be between 1 and {most}.")
    if number < 1:
        raise CloudError(400, "InvalidPageNumber", "The page number must be 1 or more.")
    items = listed[(number - 1) * size : number * size]
    return {
        "RequestId": "fake",
        "PageNumber": number,
        "PageSize": size,
        "TotalCount": len(listed),
        "items": items,
    }


def refuse_others(given: dict[str, Any], *known: str) -> None:
    """Raise CloudError for parameters that the cloud has but this fake does not implement."""
    for name in given:
        if name not in (*known, "RegionId"):
            raise CloudError(400, "FakeNotImplemented", f"The fake does not implement {name}.")


def configuration_of(group: ScalingGroup) -> str:
    """Return the ID of a group's configuration."""
    return group.id.replace("asg-", "asc-")


def _strategy(group: ScalingGroup) -> str:
    if group.capacity == "on-demand":
        return "NoSpot"
    return "SpotAsPriceGo" if group.cap is None else "SpotWithPriceLimit"


@action(VERSION, ess.DescribeScalingGroupsRequest)
def describe_scaling_groups(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List groups."""
    refuse_others(given, "ScalingGroupIds", "PageSize", "PageNumber")
    vswitches = {zone: name for name, zone in cloud.land.vswitches.items()}
    listed = [
        {
            "ScalingGroupId": group.id,
            "ActiveScalingConfigurationId": configuration_of(group),
            "LifecycleState": "Active",
            "MinSize": group.min,
            "MaxSize": group.max,
            "TotalCapacity": len(cloud.members(group.id)),
            "EnableDesiredCapacity": group.expected,
            "MultiAZPolicy": group.policy,
            "SpotInstanceRemedy": group.remedy,
            "AutoRebalance": group.rebalance,
            "VSwitchIds": [vswitches.get(zone, f"vsw-{zone}") for zone in group.zones],
            "RegionId": cloud.land.region,
        }
        for group in cloud.land.groups
        if group.id in given.get("ScalingGroupIds", [group.id])
    ]
    answer = page(listed, given, 100)
    return answer | {"ScalingGroups": answer.pop("items")}


@action(VERSION, ess.DescribeScalingConfigurationsRequest)
def describe_scaling_configurations(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List configurations."""
    refuse_others(given, "ScalingConfigurationIds", "ScalingGroupId", "PageSize", "PageNumber")
    listed = [
        {
            "ScalingConfigurationId": configuration_of(group),
            "ScalingGroupId": group.id,
            "InstanceType": group.types[0],
            "InstanceTypes": list(group.types),
            "InstancePatternInfos": [{"Cores": 4, "Memory": 15.0}] if group.patterns else [],
            "SpotStrategy": _strategy(group),
            "SpotPriceLimits": [
                {"InstanceType": kind, "PriceLimit": group.cap}
                for kind in group.types
                if group.cap is not None
            ],
            "Tags": [{"Key": key, "Value": value} for key, value in group.tags.items()],
        }
        for group in cloud.land.groups
        if configuration_of(group)
        in given.get("ScalingConfigurationIds", [configuration_of(group)])
        and group.id == given.get("ScalingGroupId", group.id)
    ]
    answer = page(listed, given, 50)
    return answer | {"ScalingConfigurations": answer.pop("items")}


@action(VERSION, ess.ScaleWithAdjustmentShrinkRequest)
def scale_with_adjustment(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """Launch instances, or say what would be launched."""
    refuse_others(
        given,
        *("ScalingGroupId", "AdjustmentType", "AdjustmentValue", "ActivityMetadata"),
        *("ExecutionMode", "SyncActivity"),
    )
    group, amount = cloud.group(given["ScalingGroupId"]), given["AdjustmentValue"]
    if given["AdjustmentType"] != "QuantityChangeInCapacity" or not 1 <= amount <= 1000:
        raise CloudError(400, "FakeNotImplemented", "The fake adds 1 to 1000 instances only.")
    if given.get("ExecutionMode", "None") == "PlanOnly":
        return {
            "RequestId": "fake",
            "PlanResult": {"ResourceAllocations": _plan(cloud, group, amount)},
        }
    activity = _begin(cloud, group, launch=amount, metadata=given.get("ActivityMetadata", ""))
    return {"RequestId": "fake", "ScalingActivityId": activity.id}


def _plan(cloud: Cloud, group: ScalingGroup, amount: int) -> list[dict[str, Any]]:
    chosen, _ = cloud.allocate(group, amount)
    return [
        {
            "InstanceType": key.type,
            "ZoneId": key.zone,
            "SpotStrategy": _strategy(group),
            "InstanceChargeType": "PostPaid",
            "Amount": count,
        }
        for key, count in chosen
    ]


def _begin(cloud: Cloud, group: ScalingGroup, **fields: Any) -> Activity:
    for activity in cloud.state.activities.values():
        if (activity.group, activity.status) == (group.id, "InProgress"):
            raise CloudError(400, "ScalingActivityInProgress", "A scaling activity is in progress.")
    name = f"asa-{len(cloud.state.activities) + 1:06d}"
    activity = Activity(name, group.id, cloud.now, cloud.now + group.activity_s, **fields)
    cloud.state.activities[name] = activity
    cloud.settle()
    return activity


@action(VERSION, ess.DescribeScalingActivitiesRequest)
def describe_scaling_activities(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List activities, the newest first."""
    refuse_others(
        given, "ScalingGroupId", "ScalingActivityIds", "StatusCode", "PageSize", "PageNumber"
    )
    if ("ScalingGroupId" in given) == ("ScalingActivityIds" in given):
        raise CloudError(
            400, "InvalidParameter.Conflict", "Give a group, or the IDs of activities."
        )
    if len(given.get("ScalingActivityIds", ())) > 20:
        raise CloudError(400, "InvalidScalingActivityIds", "There are more than 20 IDs.")
    listed = [
        {
            "ScalingActivityId": activity.id,
            "ScalingGroupId": activity.group,
            "ActivityMetadata": activity.metadata,
            "StatusCode": activity.status,
            "StartTime": second(activity.starts_at),
            "CreatedInstances": activity.created,
            "CreatedCapacity": len(activity.created),
            "DestroyedInstances": activity.remove,
            "ErrorCode": activity.error or None,
        }
        for activity in reversed(cloud.state.activities.values())
        if activity.group == given.get("ScalingGroupId", activity.group)
        and activity.id in given.get("ScalingActivityIds", [activity.id])
        and activity.status == given.get("StatusCode", activity.status)
    ]
    answer = page(listed, given, 50)
    return answer | {"ScalingActivities": answer.pop("items")}


@action(VERSION, ess.DescribeScalingInstancesRequest)
def describe_scaling_instances(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """List the members of groups."""
    refuse_others(
        given, "ScalingGroupId", "ScalingActivityId", "InstanceIds", "PageSize", "PageNumber"
    )
    ending = {
        name
        for activity in cloud.state.activities.values()
        if activity.status == "InProgress"
        for name in activity.remove
    }
    listed = [
        {
            "InstanceId": name,
            "ScalingGroupId": details.group,
            "ScalingActivityId": details.activity,
            "ZoneId": cloud.key(cloud.machines[name]).zone,
            "LifecycleState": "Removing" if name in ending else "InService",
            "CreationTime": minute(cloud.machines[name].launched_at),
        }
        for name, details in cloud.state.details.items()
        if name in cloud.machines
        and details.group
        and details.group == given.get("ScalingGroupId", details.group)
        and details.activity == given.get("ScalingActivityId", details.activity)
        and name in given.get("InstanceIds", [name])
    ]
    answer = page(listed, given, 100)
    return answer | {"ScalingInstances": answer.pop("items")}


@action(VERSION, ess.RemoveInstancesRequest)
def remove_instances(cloud: Cloud, given: dict[str, Any]) -> dict[str, Any]:
    """End members of a group."""
    refuse_others(
        given,
        *("ScalingGroupId", "InstanceIds", "RemovePolicy", "DecreaseDesiredCapacity"),
        "IgnoreInvalidInstance",
    )
    if given.get("RemovePolicy", "release") != "release":
        raise CloudError(400, "FakeNotImplemented", "The fake releases instances only.")
    group = cloud.group(given["ScalingGroupId"])
    members, ids = cloud.members(group.id), set(given["InstanceIds"])
    unknown = ids - set(members)
    if unknown == ids or (unknown and not given.get("IgnoreInvalidInstance", False)):
        raise CloudError(
            404, "InvalidInstanceId.NotFound", "An instance is not in the scaling group."
        )
    if len(members) - len(ids - unknown) < group.min:
        raise CloudError(400, "IncorrectCapacity.MinSize", "The group would be below its minimum.")
    activity = _begin(cloud, group, remove=sorted(ids - unknown))
    ignored = [{"InstanceId": name, "Code": "InvalidInstanceId.NotFound"} for name in unknown]
    return {"RequestId": "fake", "ScalingActivityId": activity.id, "IgnoredInstances": ignored}
