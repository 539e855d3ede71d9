"""Launches exactly, by the compute service (ECS)."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Decimal
from typing import Any

from alibabacloud_ecs20140526 import models as ecs

from fenka.cloud import port
from fenka.cloud.alibaba.sdk import call
from fenka.cloud.alibaba.settings import EssGroup
from fenka.cluster.autoscaling import GROUP, ORDER

SCALING_GROUP = "acs:autoscaling:scalingGroupId"
"""The tag that ESS sets on the instances of its groups."""


MOST_INSTANCES = 100
"""Instances of one call: the cloud's limit."""


_STATES = {
    "Pending": port.InstanceState.STARTING,
    "Starting": port.InstanceState.STARTING,
    "Running": port.InstanceState.RUNNING,
    "Stopping": port.InstanceState.ENDING,
    "Stopped": port.InstanceState.ENDING,
}


class EcsInstances:
    """The instances that have the tag of a cluster."""

    def __init__(self, client: Any, region: str, cluster: str) -> None:
        self._client, self._region, self._cluster = client, region, cluster

    async def all(self, **filters: str) -> list[Any]:
        """Return all pages of the list. filters: more fields of the request. Raises ProviderError."""
        listed: dict[str, Any] = {}
        token = ""
        while True:
            body = await call(
                self._client.describe_instances_async,
                ecs.DescribeInstancesRequest(
                    region_id=self._region,
                    tag=[ecs.DescribeInstancesRequestTag(key=port.CLUSTER, value=self._cluster)],
                    max_results=MOST_INSTANCES,
                    next_token=token or None,
                    **filters,
                ),
            )
            if body.instances is None:
                raise port.Unknown("Alibaba Cloud listed a page without its instances")
            listed |= {instance.instance_id: instance for instance in body.instances.instance}
            if not body.next_token:
                return list(listed.values())
            if body.next_token == token:
                raise port.Unknown("Alibaba Cloud listed the same page twice")
            token = body.next_token

    async def named(self, ids: Iterable[str]) -> list[Any]:
        """Return those of some instances that exist and have the cluster's tag."""
        return [
            instance
            for part in port.in_parts(sorted(set(ids)), MOST_INSTANCES)
            for instance in await self.all(instance_ids=json.dumps(part))
        ]

    async def run(self, order: port.Order, group: EssGroup) -> list[str]:
        """Launch an order: all of it or none if it is `whole`, else at least one. Return the ids."""
        offer, amount = order.offer, min(order.count, MOST_INSTANCES)
        strategy, limit = "NoSpot", None
        if offer.capacity == "spot":
            strategy = "SpotAsPriceGo" if order.cap is None else "SpotWithPriceLimit"
            limit = None if order.cap is None else price_limit(order.cap)
        tags = {port.CLUSTER: self._cluster, GROUP: offer.group, ORDER: order.token}
        body = await call(
            self._client.run_instances_async,
            ecs.RunInstancesRequest(
                region_id=self._region,
                client_token=order.token,
                launch_template_id=group.launch_template,
                launch_template_version=group.launch_template_version,
                instance_type=offer.type,
                zone_id=offer.zone,
                v_switch_id=group.v_switches[offer.zone],
                amount=order.count if order.whole else amount,
                min_amount=None if order.whole else 1,
                spot_strategy=strategy,
                spot_price_limit=limit,
                tag=[ecs.RunInstancesRequestTag(key=key, value=tags[key]) for key in tags],
            ),
            offer,
        )
        if body.instance_id_sets is None or not body.instance_id_sets.instance_id_set:
            raise port.Unknown("Alibaba Cloud did not name the instances that it launched")
        return list(body.instance_id_sets.instance_id_set)

    async def delete(self, ids: Sequence[str]) -> None:
        """End instances that exist."""
        for part in port.in_parts(ids, MOST_INSTANCES):
            await call(
                self._client.delete_instances_async,
                ecs.DeleteInstancesRequest(
                    region_id=self._region, instance_id=list(part), force=True
                ),
            )


def price_limit(cap: float) -> float:
    """Return the highest limit that is not above a cap: the cloud takes three decimals."""
    return float(Decimal(str(cap)).quantize(Decimal("0.001"), rounding=ROUND_DOWN))


def tags_of(instance: Any) -> dict[str, str]:
    """Return the tags of a listed instance."""
    listed = [] if instance.tags is None else instance.tags.tag
    return {tag.tag_key: tag.tag_value for tag in listed}


def as_instance(instance: Any, order: str) -> port.Instance:
    """Return a listed instance as the port has it. order: its token. Raises Unknown."""
    state = _STATES.get(instance.status)
    if state is None:
        raise port.Unknown(
            f"instance {instance.instance_id} has the unknown state {instance.status}"
        )
    locks = [] if instance.operation_locks is None else instance.operation_locks.lock_reason
    if any(lock.lock_reason == "Recycling" for lock in locks):
        state = port.InstanceState.ENDING
    offer = port.OfferKey(
        tags_of(instance).get(GROUP, ""),
        instance.instance_type,
        instance.zone_id,
        "on-demand" if instance.spot_strategy in (None, "", "NoSpot") else "spot",
    )
    created = datetime.strptime(instance.creation_time, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC)
    return port.Instance(
        instance.instance_id,
        f"{instance.region_id}.{instance.instance_id}",
        offer,
        order,
        state,
        created.timestamp(),
    )
