"""The configuration of the provider `aws`, and what a group of it is in AWS's calls."""

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fenka.cloud.config import AutoscalerConfig, GroupConfig, InvalidConfig, ProviderConfig, Text
from fenka.cloud.port import Order

if TYPE_CHECKING:  # A configuration is checked where boto3 is not installed.
    from fenka.cloud.aws.boto import Answer

_TOKEN = re.compile(r"[A-Za-z0-9/_-]{1,64}")


def client_token(token: str) -> str:
    """Return what AWS takes for a token: letters, digits, `/`, `_` and `-`, 64 of them at most."""
    return token if _TOKEN.fullmatch(token) else hashlib.sha256(token.encode()).hexdigest()


class AwsProviderConfig(ProviderConfig, frozen=True, kw_only=True):
    """How to reach AWS.

    Attributes:
        endpoint: a URL in place of Amazon's.
    """

    endpoint: Text | None = None


class AwsGroup(GroupConfig, frozen=True, kw_only=True):
    """A group.

    Attributes:
        launch_template: its ID or name, for a group that is no Auto Scaling group.
        launch_template_version: a number, `$Default` or `$Latest`.
        subnets: by zone; of other zones AWS chooses one.
    """

    launch_template: Text = ""
    launch_template_version: int | Text = "$Default"
    subnets: Mapping[Text, Text] = {}


class AwsConfig(AutoscalerConfig, frozen=True, kw_only=True):
    """The configuration."""

    provider: AwsProviderConfig
    groups: tuple[AwsGroup, ...]

    def check_settings(self) -> None:
        """Raise InvalidConfig for the first group that AWS cannot serve."""
        for group in self.groups:
            _check_group(group)


def _check_group(group: AwsGroup) -> None:
    if group.id and len(group.types) != 1:
        raise InvalidConfig(
            f"group {group.name} has {len(group.types)} types: LaunchInstances does not choose among them. "
            "Make a group of each type, or leave out `id`"
        )
    if not group.id and not group.launch_template:
        raise InvalidConfig(
            f"group {group.name} has no `launchTemplate`: say it beside its types and zones"
        )
    if group.capacity == "on-demand" and group.price is None:
        raise InvalidConfig(
            f"group {group.name} has no `price`, and EC2 tells none of on-demand instances: add it"
        )


def launch_template(group: AwsGroup, order: Order) -> "Answer":
    """Return the launch template of a fleet, for one type in one zone."""
    name = group.launch_template
    override: Answer = {"InstanceType": order.offer.type}
    subnet = group.subnets.get(order.offer.zone)
    override |= {"SubnetId": subnet} if subnet else {"AvailabilityZone": order.offer.zone}
    if order.offer.capacity == "spot" and order.cap is not None:
        override["MaxPrice"] = f"{order.cap:.4f}"
    return {
        "LaunchTemplateSpecification": {
            "LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName": name,
            "Version": str(group.launch_template_version),
        },
        "Overrides": [override],
    }
