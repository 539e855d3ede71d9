"""The configuration of the provider `ess`."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from fenka.cloud.config import AutoscalerConfig, GroupConfig, InvalidConfig, ProviderConfig, Text


class EssProviderConfig(ProviderConfig, frozen=True, kw_only=True):
    """How to reach the cloud.

    Attributes:
        ess_endpoint: host of Auto Scaling, by default the region's public one. Inside a VPC it may be
            `ess-vpc.REGION.aliyuncs.com`.
        ecs_endpoint: host of the compute service.
        protocol: HTTP is for tests.
    """

    ess_endpoint: Text = ""
    ecs_endpoint: Text = ""
    protocol: Literal["HTTP", "HTTPS"] = "HTTPS"


class EssGroup(GroupConfig, frozen=True, kw_only=True):
    """A group, with how to launch exactly what is ordered; without it the scaling group launches.

    Attributes:
        launch_template: its ID; it joins instances to the cluster.
        launch_template_version: None for its default version.
        v_switches: by zone, for every zone of the group.
    """

    launch_template: Text = ""
    launch_template_version: int | None = None
    v_switches: Mapping[Text, Text] = {}

    @property
    def exact(self) -> bool:
        """Whether instances are launched one type and zone at a time, outside of scaling groups."""
        return bool(self.launch_template)


class EssConfig(AutoscalerConfig, frozen=True, kw_only=True):
    """The configuration."""

    protection_s: ClassVar[float] = 3600

    provider: EssProviderConfig
    groups: tuple[EssGroup, ...]

    def check_settings(self) -> None:
        """Raise InvalidConfig for the first setting that is missing."""
        if not self.provider.region:
            raise InvalidConfig("provider.region is missing: name the region, such as cn-beijing")
        for group in self.groups:
            _check_group(group)


def _check_group(group: EssGroup) -> None:
    if group.exact:
        if missing := [zone for zone in group.zones if zone not in group.v_switches]:
            raise InvalidConfig(
                f"group {group.name} has no vSwitch for {', '.join(missing)}: set vSwitches"
            )
    elif not group.id:
        raise InvalidConfig(
            f"group {group.name} cannot be launched: set id to a scaling group, or launchTemplate and "
            "vSwitches"
        )
    elif group.v_switches:
        raise InvalidConfig(f"group {group.name} has vSwitches but no launchTemplate: set both")
