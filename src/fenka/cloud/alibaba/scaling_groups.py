"""Launches through scaling groups (ESS).

A scaling group chooses type and zone. An order goes to it if it has one of each, or if its plan for this
order is what was ordered. Orders are the metadata of scaling activities. Groups and their rules are never
changed.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from alibabacloud_ess20220222 import models as ess

from fenka.cloud import port
from fenka.cloud.alibaba.sdk import ESS_PAGE, all_ess, call, refused
from fenka.cloud.config import GroupConfig
from fenka.cluster.autoscaling import GROUP, ORDER

_ACTS_BY_ITSELF = {
    "auto_rebalance": "rebalancing of zones",
    "enable_desired_capacity": "expected number of instances",
    "spot_instance_remedy": "supplement of spot instances",
}
"""Fields of a group that lets it launch instances without an order."""

_SPOT_POLICIES = frozenset({"BALANCE", "PRIORITY"})
"""The others mix spot and on-demand instances."""


def check_group(order: port.Order, cluster: str, group: Any, configuration: Any) -> bool:
    """Return whether the group can launch nothing else than the order's type, in one zone.

    Args:
        order: for one of the group's offers.
        cluster: its tag.
        group: as ESS lists it.
        configuration: the group's active one, as ESS lists it.

    Raises:
        Denied: the group would launch something else, or instances that are not recognised later.
    """
    name, offer = group.scaling_group_id, order.offer
    if order.whole:
        raise port.Denied(
            f"scaling group {name} launches what it can get, not {order.count} nodes or none: set "
            f"launchTemplate and vSwitches of group {offer.group}"
        )
    for field, title in _ACTS_BY_ITSELF.items():
        if getattr(group, field):
            raise port.Denied(
                f"scaling group {name} would replace nodes that are replaced already: switch its {title} off"
            )
    _check_tags(name, {port.CLUSTER: cluster, GROUP: offer.group}, group, configuration)
    types = list(configuration.instance_types or ()) or [configuration.instance_type]
    if offer.type not in types:
        raise port.Denied(
            f"scaling group {name} does not launch {offer.type}: correct types of group {offer.group}"
        )
    _check_capacity(name, order, group, configuration)
    candidates = configuration.instance_type_candidate_options
    return (
        len(types) == 1
        and len(group.v_switch_ids or ()) == 1
        and not configuration.instance_pattern_infos
        and not (candidates is not None and candidates.enabled)
    )


def _check_tags(name: str, wanted: dict[str, str], group: Any, configuration: Any) -> None:
    tags = {tag.tag_key: tag.tag_value for tag in group.tags or () if tag.propagate}
    tags |= {tag.key: tag.value for tag in configuration.tags or ()}
    for key, value in wanted.items():
        if tags.get(key) != value:
            raise port.Denied(
                f"instances of scaling group {name} would not be recognised: add the tag {key}={value} to "
                "its scaling configuration"
            )


def _check_capacity(name: str, order: port.Order, group: Any, configuration: Any) -> None:
    strategy, offer = configuration.spot_strategy or "NoSpot", order.offer
    if (strategy == "NoSpot") != (offer.capacity == "on-demand"):
        raise port.Denied(
            f"scaling group {name} has the spot strategy {strategy}: correct capacity of group {offer.group}"
        )
    if offer.capacity == "on-demand":
        return
    if (group.multi_azpolicy or "PRIORITY") not in _SPOT_POLICIES:
        raise port.Denied(
            f"scaling group {name} may launch on-demand nodes in place of spot: set its MultiAZPolicy to "
            "PRIORITY"
        )
    if order.cap is None:
        return
    limits = {
        limit.instance_type: limit.price_limit for limit in configuration.spot_price_limits or ()
    }
    limit = limits.get(offer.type) if strategy == "SpotWithPriceLimit" else None
    if limit is None or limit > order.cap:
        has = "no price limit" if limit is None else f"the price limit {limit:g}"
        raise port.Denied(
            f"scaling group {name} has {has} for {offer.type}, and the cap of group {offer.group} is "
            f"{order.cap:g}: lower the limit or raise the cap"
        )


POLLS_S = (0.0, 1.0, 2.0)
"""Pauses before looks at an activity. A longer one is looked at when its order is launched again."""

MOST = 20
"""Instances or activities of one call: the cloud's limit."""

Pause = Callable[[float], Awaitable[None]]


class ScalingGroups:
    """The scaling groups of a region."""

    def __init__(self, client: Any, region: str, cluster: str, pause: Pause) -> None:
        self._client, self._region, self._cluster, self._pause = client, region, cluster, pause

    async def launch(self, group: GroupConfig, order: port.Order) -> list[str]:
        """Launch an order once. Return the ids that are known, also if it is launched again.

        Raises:
            ProviderError: nothing came, or that is not known.
            MarketAboveCap: nothing came because of the market's price.
        """
        activity = await self._activity_of(group.id, order.token)
        if activity is None:
            amount = await self._admit(group, order)
            activity = (await self._scale(group.id, order, amount)).scaling_activity_id
        return await self._follow(activity, order)

    async def orders(self, group: str) -> dict[str, str]:
        """Return the tokens of a group's instances by their ids. Others than ours are left out."""
        members = await all_ess(
            self._client.describe_scaling_instances_async,
            ess.DescribeScalingInstancesRequest(region_id=self._region, scaling_group_id=group),
            lambda body: body.scaling_instances,
        )
        ids = sorted(
            {member.scaling_activity_id for member in members if member.scaling_activity_id}
        )
        tokens = {
            activity.scaling_activity_id: _token(activity)
            for part in port.in_parts(ids, MOST)
            for activity in await self._activities(list(part))
        }
        found = {
            member.instance_id: tokens.get(member.scaling_activity_id, "") for member in members
        }
        return {name: token for name, token in found.items() if token}

    async def remove(self, group: str, ids: Sequence[str]) -> None:
        """End members of a group."""
        for part in port.in_parts(ids, MOST):
            await call(
                self._client.remove_instances_async,
                ess.RemoveInstancesRequest(
                    region_id=self._region,
                    scaling_group_id=group,
                    instance_ids=list(part),
                    remove_policy="release",
                    decrease_desired_capacity=True,
                    ignore_invalid_instance=True,
                ),
            )

    async def _activity_of(self, group: str, token: str) -> str | None:
        """Return the activity of an order, so that it is one order even if the cloud forgets its token."""
        body = await call(
            self._client.describe_scaling_activities_async,
            ess.DescribeScalingActivitiesRequest(
                region_id=self._region, scaling_group_id=group, page_size=ESS_PAGE, page_number=1
            ),
        )
        ids = [
            activity.scaling_activity_id
            for activity in body.scaling_activities or ()
            if _token(activity) == token
        ]
        return ids[0] if ids else None

    async def _admit(self, group: GroupConfig, order: port.Order) -> int:
        """Return how many of the order the group would launch. Raises ProviderError if none."""
        groups = await call(
            self._client.describe_scaling_groups_async,
            ess.DescribeScalingGroupsRequest(region_id=self._region, scaling_group_ids=[group.id]),
        )
        if not groups.scaling_groups:
            raise port.Denied(
                f"there is no scaling group {group.id} in {self._region}: correct id of group {group.name}"
            )
        scaling_group = groups.scaling_groups[0]
        configurations = await call(
            self._client.describe_scaling_configurations_async,
            ess.DescribeScalingConfigurationsRequest(
                region_id=self._region,
                scaling_configuration_ids=[scaling_group.active_scaling_configuration_id],
            ),
        )
        if (
            not scaling_group.active_scaling_configuration_id
            or not configurations.scaling_configurations
        ):
            raise port.Denied(
                f"scaling group {group.id} has no active scaling configuration: make one; "
                "a launch template is not enough"
            )
        configuration = configurations.scaling_configurations[0]
        if check_group(order, self._cluster, scaling_group, configuration):
            return order.count
        return await self._ask(group.id, order)

    async def _ask(self, group: str, order: port.Order) -> int:
        """Return for how many the group's plan is of the order's type and zone alone."""
        amount = order.count
        while True:
            plan = (await self._scale(group, order, amount, plan_only=True)).plan_result
            allocations = [] if plan is None else plan.resource_allocations or []
            fitting = sum(
                allocation.amount
                for allocation in allocations
                if (allocation.instance_type, allocation.zone_id)
                == (order.offer.type, order.offer.zone)
            )
            if fitting == 0:
                raise port.OutOfStock(order.offer)
            if fitting == sum(allocation.amount for allocation in allocations):
                return int(fitting)
            amount = fitting

    async def _scale(
        self, group: str, order: port.Order, amount: int, *, plan_only: bool = False
    ) -> Any:
        metadata = msgspec.json.encode({ORDER: order.token}).decode()
        return await call(
            self._client.scale_with_adjustment_async,
            ess.ScaleWithAdjustmentRequest(
                scaling_group_id=group,
                adjustment_type="QuantityChangeInCapacity",
                adjustment_value=amount,
                execution_mode="PlanOnly" if plan_only else None,
                client_token=None if plan_only else order.token,
                activity_metadata=None if plan_only else metadata,
            ),
            order.offer,
        )

    async def _follow(self, name: str, order: port.Order) -> list[str]:
        """Return what an activity has launched. Raises Unknown while that is nothing yet."""
        for pause in POLLS_S:
            await self._pause(pause)
            activities = await self._activities([name])
            created = list(activities[0].created_instances or ()) if activities else []
            if created:
                return created
            if activities and activities[0].status_code != "InProgress":
                raise _why_none(activities[0], order)
        raise port.Unknown(f"scaling activity {name} of group {order.offer.group} is in progress")

    async def _activities(self, ids: list[str]) -> list[Any]:
        return await all_ess(
            self._client.describe_scaling_activities_async,
            ess.DescribeScalingActivitiesRequest(region_id=self._region, scaling_activity_ids=ids),
            lambda body: body.scaling_activities,
        )


def _token(activity: Any) -> str:
    """Return the token of an activity of ours, empty for others. Anybody may write metadata."""
    try:
        metadata = msgspec.json.decode(activity.activity_metadata or "", type=dict[str, str])
    except msgspec.MsgspecError:
        return ""
    return metadata.get(ORDER, "")


def _why_none(activity: Any, order: port.Order) -> Exception:
    messages = activity.error_messages or ()
    code = activity.error_code or next((message.code for message in messages), None)
    if not code:
        return port.Quota(order.offer.group)
    return refused(code, activity.error_message or activity.status_message or "", order.offer)
