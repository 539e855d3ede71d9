"""What only this provider understands of the configuration: `settings` of the provider and of groups."""

from typing import Any, TypeVar

import msgspec

from fenka.cloud.config import AutoscalerConfig, GroupConfig, InvalidConfig

T = TypeVar("T")


class ProviderSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """How to reach the cloud.

    Attributes:
        ess_endpoint: host of Auto Scaling, by default the region's public one. Inside a VPC it may be
            `ess-vpc.REGION.aliyuncs.com`.
        ecs_endpoint: host of the compute service.
        protocol: HTTP is for tests.
    """

    ess_endpoint: str = ""
    ecs_endpoint: str = ""
    protocol: str = "HTTPS"


class GroupSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """How to launch exactly what is ordered; without it the scaling group launches.

    Attributes:
        launch_template: its ID; it joins instances to the cluster.
        launch_template_version: None for its default version.
        v_switches: by zone, for every zone of the group.
    """

    launch_template: str = ""
    launch_template_version: int | None = None
    v_switches: dict[str, str] = {}

    @property
    def exact(self) -> bool:
        """Whether instances are launched one type and zone at a time, outside of scaling groups."""
        return bool(self.launch_template)


def check_settings(config: AutoscalerConfig) -> None:
    """Raise InvalidConfig for the first setting that is missing or not understood."""
    provider_settings(config)
    for group in config.groups:
        group_settings(group)


def provider_settings(config: AutoscalerConfig) -> ProviderSettings:
    """Return the provider's settings. Raises InvalidConfig."""
    if not config.provider.region:
        raise InvalidConfig("provider.region is missing: name the region, such as cn-beijing")
    return _convert(config.provider.settings, ProviderSettings, "provider")


def group_settings(group: GroupConfig) -> GroupSettings:
    """Return a group's settings. Raises InvalidConfig."""
    settings = _convert(group.settings, GroupSettings, f"group {group.name}")
    if not settings.exact:
        if not group.id:
            raise InvalidConfig(
                f"group {group.name} cannot be launched: set id to a scaling group, or launchTemplate and "
                "vSwitches"
            )
        if settings.v_switches:
            raise InvalidConfig(f"group {group.name} has vSwitches but no launchTemplate: set both")
        return settings
    if missing := [zone for zone in group.zones if zone not in settings.v_switches]:
        raise InvalidConfig(
            f"group {group.name} has no vSwitch for {', '.join(missing)}: set vSwitches"
        )
    return settings


def _convert(settings: Any, kind: type[T], owner: str) -> T:
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as why:
        raise InvalidConfig(f"the settings of {owner} are not understood: {why}") from None
