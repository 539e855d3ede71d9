"""Scaling groups (ESS): launches what they can choose, finds orders of instances, removes.

A scaling group chooses type and zone. An order goes to it if it has one of each, or if its plan for this
order is what was ordered. Orders are the metadata of scaling activities. Groups and their rules are never
changed.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from alibabacloud_ess20220222 import models as ess

from fenka.cloud.alibaba.calls import ESS_PAGE, all_ess, call
from fenka.cloud.alibaba.configuration import check_group
from fenka.cloud.alibaba.errors import refused
from fenka.cloud.alibaba.instances import parts
from fenka.cloud.config import GroupConfig
from fenka.cloud.port import Denied, Order, OutOfStock, Quota, Unknown
from fenka.cluster.autoscaling import ORDER

POLLS_S = (0.0, 1.0, 2.0)
"""Pauses before looks at an activity. A longer one is looked at when its order is launched again."""

MOST = 20
"""Instances or activities of one call: the cloud's limit."""

Pause = Callable[[float], Awaitable[None]]


class ScalingGroups:
    """The scaling groups of a region."""

    def __init__(self, client: Any, region: str, cluster: str, pause: Pause) -> None:
        self._client, self._region, self._cluster, self._pause = client, region, cluster, pause

    async def launch(self, group: GroupConfig, order: Order) -> list[str]:
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
        ids = sorted({it.scaling_activity_id for it in members if it.scaling_activity_id})
        tokens = {
            activity.scaling_activity_id: _token(activity)
            for part in parts(ids, MOST)
            for activity in await self._activities(list(part))
        }
        found = {it.instance_id: tokens.get(it.scaling_activity_id, "") for it in members}
        return {name: token for name, token in found.items() if token}

    async def remove(self, group: str, ids: Sequence[str]) -> None:
        """End members of a group."""
        for part in parts(ids, MOST):
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
            it.scaling_activity_id for it in body.scaling_activities or () if _token(it) == token
        ]
        return ids[0] if ids else None

    async def _admit(self, group: GroupConfig, order: Order) -> int:
        """Return how many of the order the group would launch. Raises ProviderError if none."""
        groups = await call(
            self._client.describe_scaling_groups_async,
            ess.DescribeScalingGroupsRequest(region_id=self._region, scaling_group_ids=[group.id]),
        )
        if not groups.scaling_groups:
            raise Denied(
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
            raise Denied(
                f"scaling group {group.id} has no active scaling configuration: make one; "
                "a launch template is not enough"
            )
        configuration = configurations.scaling_configurations[0]
        if check_group(order, self._cluster, scaling_group, configuration):
            return order.count
        return await self._ask(group.id, order)

    async def _ask(self, group: str, order: Order) -> int:
        """Return for how many the group's plan is of the order's type and zone alone."""
        amount = order.count
        while True:
            plan = (await self._scale(group, order, amount, plan_only=True)).plan_result
            allocations = [] if plan is None else plan.resource_allocations or []
            fitting = sum(
                it.amount
                for it in allocations
                if (it.instance_type, it.zone_id) == (order.offer.type, order.offer.zone)
            )
            if fitting == 0:
                raise OutOfStock(order.offer)
            if fitting == sum(it.amount for it in allocations):
                return int(fitting)
            amount = fitting

    async def _scale(
        self, group: str, order: Order, amount: int, *, plan_only: bool = False
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

    async def _follow(self, name: str, order: Order) -> list[str]:
        """Return what an activity has launched. Raises Unknown while that is nothing yet."""
        for pause in POLLS_S:
            await self._pause(pause)
            activities = await self._activities([name])
            created = list(activities[0].created_instances or ()) if activities else []
            if created:
                return created
            if activities and activities[0].status_code != "InProgress":
                raise _why_none(activities[0], order)
        raise Unknown(f"scaling activity {name} of group {order.offer.group} is in progress")

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


def _why_none(activity: Any, order: Order) -> Exception:
    messages = activity.error_messages or ()
    code = activity.error_code or next((it.code for it in messages), None)
    if not code:
        return Quota(order.offer.group)
    return refused(code, activity.error_message or activity.status_message or "", order.offer)
