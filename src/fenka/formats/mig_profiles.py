"""Names of MIG profiles as people write them, and of their extended resources."""

import re

from fenka.core.request import ANY_INSTANCE, InvalidRequest

PROFILE = re.compile(r"[1-9]g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]+(?:\.[a-z]+)*)?")


_COMPUTE = re.compile(r"[1-9]c\.(.+)")


_RESOURCE = re.compile(r"(?:nvidia\.com/)?mig-(.+)", re.IGNORECASE)


RESOURCE_PREFIX = "nvidia.com/mig-"
"""Extended resources: `nvidia.com/mig-1g.5gb`; for `1g.5gb+me` it is `nvidia.com/mig-1g.5gb.me`."""


_TIME_SLICED = ".shared"
"""How the names end that NVIDIA's device plugin gives to instances in time slices."""


def parse_profile(text: str) -> str:
    """Return the name of a profile, `1g.5gb`. Raises InvalidRequest with what to write instead."""
    if PROFILE.fullmatch(text):
        return text
    if match := _RESOURCE.fullmatch(text):
        name = _profile(match[1].lower())
        advice = f"; the profile of that resource is {name}" if PROFILE.fullmatch(name) else ""
        raise InvalidRequest(f"{_quoted(text)} is no MIG profile{advice}")
    if PROFILE.fullmatch(text.lower()):
        raise InvalidRequest(f"{_quoted(text)} is no MIG profile: write {text.lower()}")
    if match := _COMPUTE.fullmatch(text):
        raise InvalidRequest(
            f"{_quoted(text)} is a part of a GPU instance, which fenka does not create: ask for "
            f"{match[1][:40]}, or for a slice inside it"
        )
    raise InvalidRequest(
        f"{_quoted(text)} is no MIG profile: names are like 1g.5gb, and `fenka mig list` shows those of the "
        "cards"
    )


def parse_inside(text: str) -> str:
    """Return the profile of the instances that a slice may be in, or ANY_INSTANCE. Raises InvalidRequest."""
    return text if text == ANY_INSTANCE else parse_profile(text)


def resource_name(profile: str) -> str:
    """Return the extended resource of a profile."""
    return RESOURCE_PREFIX + profile.replace("+", ".")


def resource_profile(resource: str) -> str:
    """Return the profile of an extended resource that begins with RESOURCE_PREFIX.

    Raises:
        InvalidRequest: if it is of none, with what to write instead.
    """
    text = resource.removeprefix(RESOURCE_PREFIX)
    name = _profile(text.lower().replace("+", "."))
    if name.endswith(f"+{_TIME_SLICED[1:]}"):
        name = name[: -len(_TIME_SLICED)]
        raise InvalidRequest(
            f"{_quoted(resource)}, and instances are not time-sliced: ask for {resource_name(name)}, or for "
            f"a slice with annotation fenka.io/inside: {name}"
        )
    if resource_name(name) == resource and PROFILE.fullmatch(name):
        return name
    if match := _COMPUTE.fullmatch(name):
        name = match[1]
        raise InvalidRequest(
            f"{_quoted(resource)}, a part of a GPU instance, which fenka does not create: ask for "
            f"{resource_name(name)}"
        )
    instead = (
        resource_name(name) if PROFILE.fullmatch(name) else f"a name like {RESOURCE_PREFIX}1g.5gb"
    )
    raise InvalidRequest(f"{_quoted(resource)}, which is no MIG profile: write {instead}")


def _profile(of_resource: str) -> str:
    """Return the profile in the name of a resource: `1g.5gb+me` for `1g.5gb.me`."""
    return re.sub(r"gb\.", "gb+", of_resource, count=1)


def _quoted(text: str) -> str:
    return repr(text[:40])
