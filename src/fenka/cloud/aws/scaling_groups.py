"""What an Auto Scaling group must be, so that the autoscaler alone decides about its nodes.

Without the tags nothing would find its instances again; with AZRebalance, or a minimum, AWS ends and starts
nodes by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fenka.cloud.config import GroupConfig

CLUSTER_TAG = "fenka.io/cluster"
GROUP_TAG = "fenka.io/group"
ORDER_TAG = "fenka.io/order"
SCALING_GROUP_TAG = "aws:autoscaling:groupName"
"""AWS sets it on each instance of a group."""

Described = Mapping[str, Any]
Check = Callable[[GroupConfig, Described], str]


def unfit(group: GroupConfig, cluster: str, described: Described) -> str:
    """Return the first reason not to launch into it, as a sentence; empty if there is none."""
    reasons = (_tag(cluster, described), *(check(group, described) for check in _CHECKS))
    return next((f"Auto Scaling group {group.id} {why}" for why in reasons if why), "")


def room(described: Described) -> int:
    """Return how many instances fit below a group's maximum."""
    return max(int(described["MaxSize"]) - int(described["DesiredCapacity"]), 0)


def _tag(cluster: str, described: Described) -> str:
    for each in described.get("Tags", ()):
        if (each["Key"], each["Value"]) == (CLUSTER_TAG, cluster) and each["PropagateAtLaunch"]:
            return ""
    return (
        f"does not tag its instances with {CLUSTER_TAG}={cluster}: "
        "add this tag to it, with PropagateAtLaunch"
    )


def _template(_group: GroupConfig, described: Described) -> str:
    if described.get("LaunchTemplate") or described.get("MixedInstancesPolicy"):
        return ""
    return "has a launch configuration: LaunchInstances wants a launch template"


def _zones(group: GroupConfig, described: Described) -> str:
    strange = sorted(set(group.zones) - set(described["AvailabilityZones"]))
    return (
        f"has no zone {strange[0]}: take it from the zones of group {group.name}" if strange else ""
    )


def _rebalance(_group: GroupConfig, described: Described) -> str:
    suspended = {each["ProcessName"] for each in described.get("SuspendedProcesses", ())}
    if len(described["AvailabilityZones"]) < 2 or "AZRebalance" in suspended:
        return ""
    return "balances its zones, which ends nodes in use: suspend its process AZRebalance"


def _minimum(group: GroupConfig, described: Described) -> str:
    if described["MinSize"] <= group.min:
        return ""
    return (
        f"has MinSize {described['MinSize']}, above min {group.min} of group {group.name}: "
        "make them equal"
    )


def _cap(group: GroupConfig, described: Described) -> str:
    cap = group.spot.cap
    if group.capacity != "spot" or cap is None:
        return ""
    policy = described.get("MixedInstancesPolicy", {}).get("InstancesDistribution", {})
    highest = policy.get("SpotMaxPrice")
    if highest and float(highest) <= cap:
        return ""
    return (
        f"has SpotMaxPrice {highest or 'unset'}, so that the cap of {cap:g} cannot be kept: "
        f"set it to {cap:g} in its MixedInstancesPolicy"
    )


def _market(group: GroupConfig, described: Described) -> str:
    policy = described.get("MixedInstancesPolicy")
    if policy is None:
        missing = "has no MixedInstancesPolicy: spot instances are launched by one only"
        return missing if group.capacity == "spot" else ""
    distribution = policy.get("InstancesDistribution", {})
    share = distribution.get("OnDemandPercentageAboveBaseCapacity", 100)
    base = distribution.get("OnDemandBaseCapacity", 0)
    if group.capacity == "spot" and (share or base):
        return "launches on-demand instances too: set both of its on-demand numbers to 0"
    if group.capacity == "on-demand" and share < 100:
        return "launches spot instances too: set OnDemandPercentageAboveBaseCapacity to 100"
    return ""


_CHECKS: tuple[Check, ...] = (_template, _zones, _rebalance, _minimum, _market, _cap)
