"""Reads what a group of the configuration says to AWS: its launch template, its subnets."""

import hashlib
import re
from typing import TYPE_CHECKING, Any

from fenka.cloud.config import AutoscalerConfig, GroupConfig, InvalidConfig
from fenka.cloud.port import Order

if TYPE_CHECKING:  # A configuration is checked where boto3 is not installed.
    from fenka.cloud.aws.boto import Answer

_TOKEN = re.compile(r"[A-Za-z0-9/_-]{1,64}")


def client_token(token: str) -> str:
    """Return what AWS takes for a token: letters, digits, `/`, `_` and `-`, 64 of them at most."""
    return token if _TOKEN.fullmatch(token) else hashlib.sha256(token.encode()).hexdigest()


def check_settings(config: AutoscalerConfig) -> None:
    """Raise InvalidConfig for the first group that AWS cannot serve."""
    for group in config.groups:
        _check_group(group)


def _check_group(group: GroupConfig) -> None:
    if group.id and len(group.types) != 1:
        raise InvalidConfig(
            f"group {group.name} has {len(group.types)} types: LaunchInstances does not choose among them. "
            "Make a group of each type, or leave out `id`"
        )
    if not group.id:
        _required(group.settings, "launchTemplate", group.name)
    if group.capacity == "on-demand" and group.price is None:
        raise InvalidConfig(
            f"group {group.name} has no `price`, and EC2 tells none of on-demand instances: add it"
        )


def subnet_of(group: GroupConfig, zone: str) -> str | None:
    """Return the subnet that the settings name for a zone, if any."""
    subnet = group.settings.get("subnets", {}).get(zone)
    return None if subnet is None else str(subnet)


def launch_template(group: GroupConfig, order: Order) -> "Answer":
    """Return the launch template of a fleet, for one type in one zone."""
    name = _required(group.settings, "launchTemplate", group.name)
    override: Answer = {"InstanceType": order.offer.type}
    subnet = subnet_of(group, order.offer.zone)
    override |= {"SubnetId": subnet} if subnet else {"AvailabilityZone": order.offer.zone}
    if order.offer.capacity == "spot" and order.cap is not None:
        override["MaxPrice"] = f"{order.cap:.4f}"
    return {
        "LaunchTemplateSpecification": {
            "LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName": name,
            "Version": str(group.settings.get("launchTemplateVersion", "$Default")),
        },
        "Overrides": [override],
    }


def _required(settings: Any, key: str, group: str) -> str:
    """Return a setting of a group that must be there. Raises InvalidConfig."""
    value = settings.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidConfig(f"group {group} has no `{key}`: say it beside its types and zones")
    return value
