"""Sizes as users type them: `4` units of a card, or exactly `4096MiB` or `4GiB`.

A number without a unit counts units of a card (GiB by default): a card of 15079 MiB has 14. With a unit it is
exactly that memory.

Durations and percentages as people write them in options and files.

Names of MIG profiles as people write them, and of their extended resources.
"""

import re

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.request import ANY_INSTANCE, InvalidRequest, Memory

UNITS_MIB = {"MiB": 1, "Mi": 1, "GiB": 1024, "Gi": 1024}
"""Kubernetes' short forms and the long ones. GB and MB, powers of ten, are rejected for clarity."""

_SIZE = re.compile(r"(-?)([0-9]*)(?:\.([0-9]+))?\s*([A-Za-z]*)")

_MEANT = re.compile(r"([mg])(?:b|ib?)?", re.IGNORECASE)

_UNIT = re.compile(r"([0-9]{0,6})(MiB|GiB)")

_DIGITS = 12
"""No size needs more digits on either side of the point. Python refuses to parse very long numbers."""


class InvalidSize(FenkaError):
    """The text is no size; the message says what to write instead."""

    exit_code = INVALID_INPUT


def parse_unit(text: str) -> int:
    """Return a unit in MiB from GiB, MiB, or a number of them. Raises InvalidSize."""
    match = _UNIT.fullmatch(text.strip())
    if match is None or (match[1] and int(match[1]) == 0):
        raise InvalidSize(f"{_shown(text)} is no unit: use GiB, MiB, or a number of them as 256MiB")
    return int(match[1] or 1) * UNITS_MIB[match[2]]


def parse_memory(text: str, unit_mib: int) -> Memory:
    """Return `4` in units of `unit_mib`, or an exact size such as `4096MiB`. Raises InvalidSize."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (match[2] or match[3]):
        raise InvalidSize(f"{_shown(text)} is no size: write 4 for units of the card, or 4096MiB")
    sign, whole, fraction, suffix = match.groups("")
    fraction = fraction.rstrip("0")
    if suffix and suffix not in UNITS_MIB:
        # G, GB and other letters' cases: some read them as powers of ten.
        meant = _MEANT.fullmatch(suffix)
        advice = (
            f"write {whole}{meant[1].upper()}iB" if meant and not fraction else "use MiB or GiB"
        )
        raise InvalidSize(f"{_shown(suffix)} in {_shown(text)} is no unit: {advice}")
    if len(whole) > _DIGITS or len(fraction) > _DIGITS:
        raise InvalidSize(f"{_shown(text)} has too many digits to be a size")
    amount = int(whole or 0)
    if sign or not (amount or fraction):
        raise InvalidSize(f"{_shown(text)} is no amount of memory: ask for more than nothing")
    try:
        if fraction:
            mib = _rounded_down(amount, fraction, UNITS_MIB.get(suffix, unit_mib))
            instead = Memory(max(mib, 1))
            raise InvalidSize(
                f"{_shown(text)} is not a whole number of units: write {instead.amount}MiB"
            )
        return Memory(amount * UNITS_MIB[suffix]) if suffix else Memory(amount, unit_mib)
    except InvalidRequest as why:
        raise InvalidSize(f"{_shown(text)} is no amount of memory: {why}") from None


def _rounded_down(amount: int, fraction: str, unit_mib: int) -> int:
    """Return `amount`.`fraction` units in MiB."""
    denominator: int = 10 ** len(fraction)
    return amount * unit_mib + int(fraction) * unit_mib // denominator


def _shown(text: str) -> str:
    """Return the text as typed, cut to one line."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


_PRICE = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")
_CURRENCY = re.compile(r"[A-Z]{3}")


class InvalidPrice(FenkaError):
    """The text is no price; the message says what to write instead."""

    exit_code = INVALID_INPUT


def parse_price(text: str) -> tuple[str, int]:
    """Return the model of a card, and the price of its hour in millionths, from `Tesla T4=0.35`.

    Raises InvalidPrice.
    """
    model, _, price = text.rpartition("=")
    if not model.strip() or not _PRICE.fullmatch(price.strip()):
        raise InvalidPrice(
            f"{_shown(text)} is no price of a card's hour: write MODEL=PRICE, as 'Tesla T4=0.35'"
        )
    whole, _, fraction = price.strip().partition(".")
    return model.strip(), int(whole + fraction.ljust(6, "0"))


def check_currency(text: str) -> None:
    """Raise InvalidPrice unless this is a code of ISO 4217."""
    if not _CURRENCY.fullmatch(text):
        raise InvalidPrice(f"{_shown(text)} is no currency: write its code, as EUR")


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|[smhd]))+")
_PART = re.compile(r"([0-9.]+)([a-z]+)")


def parse_duration(text: str) -> float | None:
    """Return the seconds of `90s`, `0.5s`, `2h30m` or `7d`; None if it is no duration or has no unit."""
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


_PERCENT = re.compile(r"([0-9]{1,3})%?")


def parse_percent(text: str) -> int | None:
    """Return a share of `50` or `50%`; None if the text is no percentage from 0 to 100."""
    found = _PERCENT.fullmatch(text)
    return int(found[1]) if found and int(found[1]) <= 100 else None


def no_whole_cards(text: str) -> str:
    """Return the sentence for a number of whole cards that is none, as `0.5`."""
    return (
        f"{_shown(text)} is no number of whole cards: a part of one is asked for by --gpu-mem and "
        "--gpu-core"
    )


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
