"""The provider `aws`: LaunchInstances into Auto Scaling groups, CreateFleet for groups without one.

An order's token is AWS's ClientToken, so that a repeated call answers with the instances of the first one.
A fleet tags its instances when they are created. LaunchInstances cannot: instances of a group have the
group's tags at once, and the order's as soon as their ids are known. A group must leave its size and its
zones to the autoscaler: with AZRebalance, or a minimum, AWS ends and starts nodes by itself.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fenka.cloud import port
from fenka.cloud.aws.boto import Answer, Calls, port_error, tag, tags_of
from fenka.cloud.aws.group_settings import AwsConfig, AwsGroup, client_token, launch_template
from fenka.cloud.config import GroupConfig, group_of
from fenka.cloud.port import CLUSTER, in_parts
from fenka.cluster.autoscaling import GROUP, ORDER, CloudType

log = logging.getLogger(__name__)

MOST = 100
"""Instances of one call."""
MOST_DETACHED = 20

NOTICE_S = 120.0
"""From the notice to a spot instance until its end."""


class InstanceTypes:
    """Neither types nor where they are sold change, so both are read once."""

    def __init__(self, calls: Calls, groups: Collection[GroupConfig]) -> None:
        self._calls = calls
        self._wanted = sorted({kind for group in groups for kind in group.types})
        self._shapeless = {kind for group in groups if group.shape is None for kind in group.types}
        self._sold: frozenset[tuple[str, str]] | None = None
        self._known: dict[str, CloudType] = {}

    async def sold(self) -> frozenset[tuple[str, str]]:
        """Return the groups' types and the zones that AWS sells them in, whatever is in stock.

        Raises ProviderError.
        """
        if self._sold is None:
            listed = [
                offering
                for part in in_parts(self._wanted, MOST)
                for offering in await self._calls.pages(
                    "ec2",
                    "describe_instance_type_offerings",
                    "InstanceTypeOfferings",
                    LocationType="availability-zone",
                    Filters=[{"Name": "instance-type", "Values": part}],
                )
            ]
            self._sold = frozenset(
                (offering["InstanceType"], offering["Location"]) for offering in listed
            )
        return self._sold

    async def described(self) -> Mapping[str, CloudType]:
        """Return the types that are sold, of groups without a shape, by name. Raises ProviderError.

        AWS refuses to describe a type that it does not have, together with all others.
        """
        sold = {kind for kind, _ in await self.sold()}
        missing = sorted((sold & self._shapeless) - self._known.keys())
        for part in in_parts(missing, MOST):
            listed = await self._calls.pages(
                "ec2", "describe_instance_types", "InstanceTypes", InstanceTypes=part
            )
            self._known |= {kind["InstanceType"]: _cloud_type(kind) for kind in listed}
        return self._known


def _cloud_type(described: Answer) -> CloudType:
    """Return a type. All cards of a type are alike."""
    cards = described.get("GpuInfo", {}).get("Gpus", ())
    first = cards[0] if cards else {}
    return CloudType(
        name=described["InstanceType"],
        cpu_milli=1000 * described["VCpuInfo"]["DefaultVCpus"],
        memory_mib=described["MemoryInfo"]["SizeInMiB"],
        cards=sum(card.get("Count", 0) for card in cards),
        model=first.get("Name", ""),
        card_mib=first.get("MemoryInfo", {}).get("SizeInMiB", 0),
    )


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
    for pair in described.get("Tags", ()):
        if (pair["Key"], pair["Value"]) == (CLUSTER, cluster) and pair["PropagateAtLaunch"]:
            return ""
    return (
        f"does not tag its instances with {CLUSTER}={cluster}: "
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
    suspended = {process["ProcessName"] for process in described.get("SuspendedProcesses", ())}
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


_STATES = {
    "pending": port.InstanceState.STARTING,
    "running": port.InstanceState.RUNNING,
    "shutting-down": port.InstanceState.ENDING,
    "stopping": port.InstanceState.ENDING,
    # Somebody has stopped it: it still costs, and nothing but `end` removes it.
    "stopped": port.InstanceState.RUNNING,
}


@dataclass(frozen=True, slots=True)
class _Launch:
    """The tags of an order's instances in an Auto Scaling group."""

    token: str
    group: str

    def tags(self) -> list[Answer]:
        return [tag(ORDER, self.token), tag(GROUP, self.group)]


class AwsProvider:
    """A `Provider` for the groups of a configuration."""

    def __init__(self, config: AwsConfig, calls: Calls, clock: Callable[[], float]) -> None:
        """Use clients. Raises InvalidConfig for groups that AWS cannot serve."""
        self._config, self._cluster = config, config.cluster
        self._calls, self._clock = calls, clock
        self._types = InstanceTypes(calls, config.groups)
        self._untagged: dict[str, _Launch] = {}
        """Launches of new instances that EC2 did not list yet, by their ids."""
        config.check_settings()

    async def offers(self) -> Sequence[port.Offer]:
        """Return all offers. The stock is what fits into an Auto Scaling group, if there is one."""
        types, sold = await self._types.described(), await self._types.sold()
        described, prices = await asyncio.gather(
            self._described_groups(*self._config.groups), self._spot_prices()
        )
        offers = []
        for key in [key for key in self._config.offers if (key.type, key.zone) in sold]:
            group = group_of(self._config.groups, key)
            price = prices.get((key.type, key.zone)) if key.capacity == "spot" else group.price
            stock = room(described[group.id]) if group.id else None
            # A type that has no spot price in a zone is not sold there.
            if price is not None:
                offers.append(port.Offer(key, price, stock, machine=types.get(key.type)))
        return offers

    async def instances(self) -> Sequence[port.Instance]:
        """Return all instances with this cluster's tag."""
        return [self._instance(listed) for listed in await self._described_instances()]

    async def launch(self, order: port.Order) -> Sequence[str]:
        """Launch an order. AWS answers when it knows which instances come."""
        group = group_of(self._config.groups, order.offer)
        if order.whole and order.count > MOST:
            raise port.Denied(
                f"{order.count} instances at once are too many: AWS launches {MOST} in a call"
            )
        answer = await (self._into_group if group.id else self._as_fleet)(group, order)
        ids = [name for fleet in answer.get("Instances", ()) for name in fleet["InstanceIds"]]
        errors = answer.get("Errors", ())
        if not ids:
            raise await self._error(order, errors)
        if order.whole and len(ids) < order.count:
            with port.after_the_deed():
                await self.end(ids)
            raise await self._error(order, errors) if errors else port.OutOfStock(order.offer)
        if group.id:
            await self._tag(ids, _Launch(order.token, group.name))
        return ids

    async def end(self, ids: Collection[str]) -> None:
        """End instances that have this cluster's tag; groups shrink by as many."""
        for part in in_parts(sorted(ids), MOST):
            for name, members in _by_scaling_group(await self._ours(part)).items():
                await self._end_in(name, members)

    async def notices(self) -> Sequence[port.ReclaimNotice]:
        """Return the interruptions that EC2 has announced for spot instances.

        Their Auto Scaling groups let go of them, or would replace them.
        """
        marked = await self._calls.pages(
            "ec2",
            "describe_spot_instance_requests",
            "SpotInstanceRequests",
            Filters=[{"Name": "status-code", "Values": ["marked-for-termination"]}],
        )
        if not marked:
            return []
        described = await self._described_instances()
        ours = {instance["InstanceId"]: instance for instance in described}
        taken = [request for request in marked if request.get("InstanceId") in ours]
        with suppress(port.ProviderError):
            # A failure here is tried again with the next look, until the instance is gone.
            await self._detach([ours[request["InstanceId"]] for request in taken])
        return [
            port.ReclaimNotice(
                request["InstanceId"],
                request["Status"]["UpdateTime"].timestamp() + NOTICE_S,
                request["Status"].get("Message") or "EC2 takes the spot instance back",
            )
            for request in taken
        ]

    # ---- launching ----

    async def _into_group(self, group: AwsGroup, order: port.Order) -> Answer:
        described = await self._described_groups(group)
        if why := unfit(group, self._cluster, described[group.id]):
            raise port.Denied(why)
        subnet = group.subnets.get(order.offer.zone)
        place = {"SubnetIds": [subnet]} if subnet else {"AvailabilityZones": [order.offer.zone]}
        # A repeated call must have the same parameters: it may not depend on the room that is left.
        count = min(order.count, MOST)
        try:
            return await self._calls.autoscaling(
                "launch_instances",
                order.offer,
                AutoScalingGroupName=group.id,
                RequestedCapacity=count,
                ClientToken=client_token(order.token),
                RetryStrategy="none",
                **place,
            )
        except port.Denied:
            if room((await self._described_groups(group))[group.id]) < count:
                raise port.Quota(group.name) from None
            raise

    async def _as_fleet(self, group: AwsGroup, order: port.Order) -> Answer:
        count = min(order.count, MOST)
        options = {"SingleInstanceType": True, "SingleAvailabilityZone": True}
        least = {"MinTargetCapacity": count} if order.whole else {}
        capacity = order.offer.capacity
        tags = [tag(CLUSTER, self._cluster), *_Launch(order.token, group.name).tags()]
        return await self._calls.ec2(
            "create_fleet",
            order.offer,
            Type="instant",
            ClientToken=client_token(order.token),
            LaunchTemplateConfigs=[launch_template(group, order)],
            TargetCapacitySpecification={
                "TotalTargetCapacity": count,
                "DefaultTargetCapacityType": capacity,
            },
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            **{"SpotOptions" if capacity == "spot" else "OnDemandOptions": options | least},
        )

    async def _error(
        self, order: port.Order, errors: Sequence[Mapping[str, Any]]
    ) -> port.ProviderError:
        """Return the error of an order of which nothing came."""
        if not errors:
            return port.Unknown(f"AWS lists neither instances nor errors for order {order.token}")
        prices = 0.0, 0.0
        if order.cap is not None:
            key = order.offer.type, order.offer.zone
            prices = (await self._spot_prices()).get(key, order.cap), order.cap
        message = errors[0].get("ErrorMessage", "")
        error = port_error(errors[0]["ErrorCode"], message, offer=order.offer, prices=prices)
        # This is the answer to the token from now on.
        return (
            port.Throttled(error.after_s, spent=True)
            if isinstance(error, port.Throttled)
            else error
        )

    async def _tag(self, ids: Sequence[str], launch: _Launch) -> None:
        """Tag what is listed of an order. A repeated launch names instances that have ended, too."""
        self._untagged |= dict.fromkeys(ids, launch)
        with suppress(port.ProviderError):
            # The next look at all instances tags them.
            await self._tag_late(await self._ours(ids))

    async def _tag_late(self, described: Sequence[Answer]) -> None:
        """Tag instances that were launched before EC2 listed them."""
        by_launch: dict[_Launch, list[str]] = defaultdict(list)
        for instance in described:
            launch = self._untagged.get(instance["InstanceId"])
            if launch is not None:
                by_launch[launch].append(instance["InstanceId"])
                instance["Tags"] = [*instance.get("Tags", ()), *launch.tags()]
        for launch, ids in by_launch.items():
            try:
                await self._calls.ec2("create_tags", Resources=ids, Tags=launch.tags())
            except port.ProviderError as why:
                log.warning("instances of order %s are tagged later: %s", launch.token, why)
                continue
            for name in ids:
                self._untagged.pop(name, None)

    # ---- reading and ending ----

    async def _described_instances(self) -> list[Answer]:
        described = await self._listed(_STATES)
        await self._tag_late(described)
        return described

    async def _ours(self, ids: Sequence[str]) -> list[Answer]:
        """Return the instances of ours that have not ended, by their ids; unknown ones are no error."""
        return await self._listed(
            ("pending", "running", "stopped"), {"Name": "instance-id", "Values": list(ids)}
        )

    async def _listed(self, states: Iterable[str], *filters: Answer) -> list[Answer]:
        """Return the instances with this cluster's tag that are in one of these states."""
        reservations = await self._calls.pages(
            "ec2",
            "describe_instances",
            "Reservations",
            Filters=[
                {"Name": f"tag:{CLUSTER}", "Values": [self._cluster]},
                {"Name": "instance-state-name", "Values": list(states)},
                *filters,
            ],
        )
        return [instance for listed in reservations for instance in listed["Instances"]]

    async def _detach(self, described: Sequence[Answer]) -> None:
        """Remove instances from their Auto Scaling groups, which shrink by as many."""
        for name, ids in _by_scaling_group(described).items():
            for part in in_parts(ids, MOST_DETACHED) if name else ():
                await self._calls.autoscaling(
                    "detach_instances",
                    InstanceIds=part,
                    AutoScalingGroupName=name,
                    ShouldDecrementDesiredCapacity=True,
                )

    async def _end_in(self, scaling_group: str, ids: list[str]) -> None:
        if not scaling_group:
            await self._calls.ec2("terminate_instances", InstanceIds=ids)
            return
        await self._calls.autoscaling(
            "terminate_instance_in_auto_scaling_group",
            InstanceIds=ids,
            AutoScalingGroupName=scaling_group,
            ShouldDecrementDesiredCapacity=True,
        )

    async def _described_groups(self, *groups: GroupConfig) -> dict[str, Answer]:
        """Return the Auto Scaling groups of groups by name. Raises Denied if one is missing."""
        names = [group.id for group in groups if group.id]
        if not names:
            return {}
        listed = await self._calls.pages(
            "autoscaling",
            "describe_auto_scaling_groups",
            "AutoScalingGroups",
            AutoScalingGroupNames=names,
        )
        described = {group["AutoScalingGroupName"]: group for group in listed}
        if missing := [name for name in names if name not in described]:
            raise port.Denied(f"there is no Auto Scaling group {missing[0]} in this region")
        return described

    async def _spot_prices(self) -> dict[tuple[str, str], float]:
        """Return the market's prices by type and zone."""
        wanted = {
            kind
            for group in self._config.groups
            if group.capacity == "spot"
            for kind in group.types
        }
        if not wanted:
            return {}
        now = datetime.fromtimestamp(self._clock(), UTC)
        history = await self._calls.pages(
            "ec2",
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=sorted(wanted),
            ProductDescriptions=["Linux/UNIX"],
            # With both equal, the prices in force then.
            StartTime=now,
            EndTime=now,
        )
        history.sort(key=lambda entry: entry["Timestamp"])
        return {
            (entry["InstanceType"], entry["AvailabilityZone"]): float(entry["SpotPrice"])
            for entry in history
        }

    def _instance(self, described: Answer) -> port.Instance:
        tags = tags_of(described)
        scaling_group = tags.get(SCALING_GROUP_TAG)
        names = [
            group.name
            for group in self._config.groups
            if scaling_group and group.id == scaling_group
        ]
        zone = described["Placement"]["AvailabilityZone"]
        key = port.OfferKey(
            names[0] if names else tags.get(GROUP, ""),
            described["InstanceType"],
            zone,
            "spot" if described.get("InstanceLifecycle") == "spot" else "on-demand",
        )
        return port.Instance(
            described["InstanceId"],
            f"aws:///{zone}/{described['InstanceId']}",
            key,
            tags.get(ORDER, ""),
            _STATES[described["State"]["Name"]],
            described["LaunchTime"].timestamp(),
        )


@asynccontextmanager
async def open_provider(
    config: AwsConfig, clock: Callable[[], float] = time.time
) -> AsyncIterator[AwsProvider]:
    """Provide the nodes of a configuration whose provider is `aws`. Raises Denied, InvalidConfig."""
    calls = Calls(config.provider.region, config.provider.endpoint)
    try:
        yield AwsProvider(config, calls, clock)
    finally:
        calls.close()


def _by_scaling_group(described: Sequence[Answer]) -> dict[str, list[str]]:
    """Return ids by the Auto Scaling group that they are in, "" for none."""
    ids: dict[str, list[str]] = defaultdict(list)
    for instance in described:
        ids[tags_of(instance).get(SCALING_GROUP_TAG, "")].append(instance["InstanceId"])
    return ids
