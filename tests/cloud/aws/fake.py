"""AWS for tests: what moto 5.2 lacks, answered by the proxy with moto's instances.

moto has no LaunchInstances, ignores ClientToken, is never out of stock, lets a group exceed its maximum, and
has one spot price.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.cloud.aws.proxy import Form, Proxy, Refusal, document

IMAGE = "ami-12c6146b"
NOTICE_S = 120


@dataclass(frozen=True)
class Wanted:
    """What a launch asks for. tags: of its instances."""

    type: str
    zone: str
    market: str
    count: int
    whole: bool
    cap: float | None
    template: Mapping[str, str]
    tags: Mapping[str, str]


class Aws(Proxy):
    """A region.

    Attributes:
        stock: how many can be had, by type, zone and market.
        prices: of spot, by type and zone.
        shortage: the error code of instances that cannot be had.
        hide_new: whether new instances are not listed at once.
        now: the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = {
            "LaunchInstances": self._launch_instances,
            "CreateFleet": self._create_fleet,
            "DescribeSpotPriceHistory": self._price_history,
            "DescribeSpotInstanceRequests": self._spot_requests,
            "TerminateInstanceInAutoScalingGroup": self._terminate_in_group,
        }

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.now = datetime.now(UTC)
        self.hide_new = False
        self.shortage = "InsufficientInstanceCapacity"
        self.stock: dict[tuple[str, str, str], int] = {}
        self.prices: dict[tuple[str, str], float] = {}
        self._caps: dict[str, tuple[float | None, str, str]] = {}
        self._marked: dict[str, datetime] = {}

    def clock(self) -> float:
        """Return the time."""
        return self.now.timestamp()

    def make_template(self, name: str, kind: str) -> None:
        """Make a launch template."""
        data = {"ImageId": IMAGE, "InstanceType": kind}
        self.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)

    def make_group(
        self, name: str, kind: str, zones: Sequence[str], tags: Mapping[str, str], **more: Any
    ) -> None:
        """Make an empty Auto Scaling group and its launch template."""
        self.make_template(name, kind)
        template = {"LaunchTemplateName": name, "Version": "$Default"}
        self.autoscaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            MinSize=0,
            AvailabilityZones=list(zones),
            Tags=[{"Key": k, "Value": v, "PropagateAtLaunch": True} for k, v in tags.items()],
            **(
                {"MaxSize": 10}
                | ({} if "MixedInstancesPolicy" in more else {"LaunchTemplate": template})
                | more
            ),
        )

    def wait(self, seconds: float) -> None:
        """Let time pass. Spot instances above their cap are marked, and end two minutes later."""
        self.now += timedelta(seconds=seconds)
        for name, (cap, kind, zone) in list(self._caps.items()):
            if cap is not None and self.prices.get((kind, zone), 0) > cap:
                self._marked.setdefault(name, self.now)
            marked = self._marked.get(name)
            if marked and marked + timedelta(seconds=NOTICE_S) <= self.now:
                self.ec2.terminate_instances(InstanceIds=[name])
                del self._caps[name], self._marked[name]

    def launched(self, action: str) -> list[dict[str, str]]:
        """Return the calls of an action."""
        return [form for form in self.forms if form["Action"] == action]

    # ---- calls ----

    def _launch_instances(self, form: Form) -> str:
        """Answer autoscaling:LaunchInstances."""
        group = self._group(form["AutoScalingGroupName"])
        count = int(form["RequestedCapacity"])
        if form.get("RetryStrategy") != "none":
            raise Refusal("ValidationError", "retries are not simulated")
        zone = form.get("AvailabilityZones.member.1") or self._zone(form["SubnetIds.member.1"])
        if zone not in group["AvailabilityZones"]:
            raise Refusal("ValidationError", f"{zone} is not of the group")
        if group["DesiredCapacity"] + count > group["MaxSize"]:
            raise Refusal("ValidationError", "the group would be above its maximum size")
        policy = group.get("MixedInstancesPolicy", {})
        template = (
            group.get("LaunchTemplate") or policy["LaunchTemplate"]["LaunchTemplateSpecification"]
        )
        highest = policy.get("InstancesDistribution", {}).get("SpotMaxPrice")
        version = self.ec2.describe_launch_template_versions(
            LaunchTemplateName=template["LaunchTemplateName"]
        )["LaunchTemplateVersions"][0]
        tags = {each["Key"]: each["Value"] for each in group["Tags"] if each["PropagateAtLaunch"]}
        wanted = Wanted(
            version["LaunchTemplateData"]["InstanceType"],
            zone,
            "spot" if policy else "on-demand",
            count,
            False,
            float(highest) if highest else None,
            {"LaunchTemplateName": template["LaunchTemplateName"]},
            tags,
        )
        ids, code = self._launch(wanted)
        if ids:
            self.autoscaling.attach_instances(
                AutoScalingGroupName=form["AutoScalingGroupName"], InstanceIds=ids
            )
        place = {"InstanceType": wanted.type, "MarketType": wanted.market, "AvailabilityZone": zone}
        return document(
            "LaunchInstancesResponse",
            LaunchInstancesResult={
                "AutoScalingGroupName": form["AutoScalingGroupName"],
                "ClientToken": form["ClientToken"],
                "Instances": {"member": [place | {"InstanceIds": {"member": ids}}] if ids else []},
                "Errors": {"member": [place | {"ErrorCode": code}] if code else []},
            },
        )

    def _create_fleet(self, form: Form) -> str:
        """Answer ec2:CreateFleet of type instant."""
        if form["Type"] != "instant":
            raise Refusal("InvalidParameterValue", "only instant fleets are simulated")
        config = "LaunchTemplateConfigs.1."
        override = f"{config}Overrides.1."
        market = form["TargetCapacitySpecification.DefaultTargetCapacityType"]
        options = "SpotOptions." if market == "spot" else "OnDemandOptions."
        count = int(form["TargetCapacitySpecification.TotalTargetCapacity"])
        least = int(form.get(f"{options}MinTargetCapacity", 0))
        highest = form.get(f"{override}MaxPrice")
        name = form[f"{config}LaunchTemplateSpecification.LaunchTemplateName"]
        tags = {
            form[f"TagSpecification.1.Tag.{each}.Key"]: form[f"TagSpecification.1.Tag.{each}.Value"]
            for each in range(1, 10)
            if f"TagSpecification.1.Tag.{each}.Key" in form
        }
        wanted = Wanted(
            form[f"{override}InstanceType"],
            form.get(f"{override}AvailabilityZone") or self._zone(form[f"{override}SubnetId"]),
            market,
            count,
            least == count,
            float(highest) if highest else None,
            {"LaunchTemplateName": name},
            tags,
        )
        ids, code = self._launch(wanted)
        came = {"instanceType": wanted.type, "lifecycle": market, "instanceIds": {"item": ids}}
        return document(
            "CreateFleetResponse",
            fleetId="fleet-1",
            errorSet={"item": [{"errorCode": code, "lifecycle": market}] if code else []},
            fleetInstanceSet={"item": [came] if ids else []},
        )

    def _price_history(self, form: Form) -> str:  # noqa: ARG002
        """Answer ec2:DescribeSpotPriceHistory; the old price is listed too."""
        times = [self.now - timedelta(hours=1), self.now]
        items = [
            {
                "instanceType": kind,
                "availabilityZone": zone,
                "productDescription": "Linux/UNIX",
                "spotPrice": f"{price if moment == self.now else 99:.6f}",
                "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            }
            for (kind, zone), price in self.prices.items()
            for moment in reversed(times)
        ]
        return document("DescribeSpotPriceHistoryResponse", spotPriceHistorySet={"item": items})

    def _spot_requests(self, form: Form) -> str:
        """Answer ec2:DescribeSpotInstanceRequests with a filter of `status-code`."""
        code = form["Filter.1.Value.1"]
        items = [
            {
                "spotInstanceRequestId": f"sir-{name}",
                "instanceId": name,
                "status": {"code": code, "updateTime": moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")},
            }
            for name, moment in self._marked.items()
        ]
        name = "DescribeSpotInstanceRequestsResponse"
        return document(name, spotInstanceRequestSet={"item": items})

    def _terminate_in_group(self, form: Form) -> str:
        """Answer TerminateInstanceInAutoScalingGroup with several ids; moto knows one."""
        group = self._group(form["AutoScalingGroupName"])
        ids = _members(form, "InstanceIds")
        if set(ids) - {each["InstanceId"] for each in group["Instances"]}:
            raise Refusal("ValidationError", "an instance is not of the group")
        if form["ShouldDecrementDesiredCapacity"] != "true":
            raise Refusal("ValidationError", "AWS would start others instead")
        if group["DesiredCapacity"] - len(ids) < group["MinSize"]:
            raise Refusal("ValidationError", "the group would be below its minimum size")
        for name in ids:
            self.autoscaling.terminate_instance_in_auto_scaling_group(
                InstanceId=name, ShouldDecrementDesiredCapacity=True
            )
        name = "TerminateInstanceInAutoScalingGroup"
        return document(f"{name}Response", **{f"{name}Result": ""})

    # ---- inside ----

    def _launch(self, wanted: Wanted) -> tuple[list[str], str]:
        """Launch what stock and price allow. Return ids, and the error of those that are missing."""
        price = self.prices.get((wanted.type, wanted.zone), 0.0)
        if wanted.market == "spot" and wanted.cap is not None and price > wanted.cap:
            return [], "SpotMaxPriceTooLow"
        key = wanted.type, wanted.zone, wanted.market
        count = min(wanted.count, self.stock.get(key, wanted.count))
        missing = self.shortage if count < wanted.count else ""
        if not count or (wanted.whole and missing):
            return [], missing
        if key in self.stock:
            self.stock[key] -= count
        spot = {"InstanceMarketOptions": {"MarketType": "spot"}} if wanted.market == "spot" else {}
        tags = [{"Key": key, "Value": value} for key, value in wanted.tags.items()]
        instances = self.ec2.run_instances(
            LaunchTemplate=dict(wanted.template),
            InstanceType=wanted.type,
            Placement={"AvailabilityZone": wanted.zone},
            MinCount=count,
            MaxCount=count,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            **spot,
        )["Instances"]
        ids = [each["InstanceId"] for each in instances]
        self.unlisted |= set(ids if self.hide_new else ())
        if wanted.market == "spot":
            self._caps |= dict.fromkeys(ids, (wanted.cap, wanted.type, wanted.zone))
        return ids, missing

    def _group(self, name: str) -> dict[str, Any]:
        (group,) = self.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])[
            "AutoScalingGroups"
        ]
        return dict(group)

    def _zone(self, subnet: str) -> str:
        return str(self.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["AvailabilityZone"])


def _members(form: Form, name: str) -> list[str]:
    return [value for key, value in form.items() if key.startswith(f"{name}.member.")]
