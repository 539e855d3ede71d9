"""The sizes that users type: `4` units of the world, `4096MiB` or `4GiB` exactly.

A number without a unit counts units of a card (GiB by default), of which a card of 15079 MiB has 14;
with a unit it is exactly that much memory.
"""

import re

from fenka.core.requests import BadRequest, Memory

UNITS_MIB = {"MiB": 1, "Mi": 1, "GiB": 1024, "Gi": 1024}
"""Kubernetes's short forms and the long ones. GB and MB would be powers of ten: not taken, for clarity."""

_SIZE = re.compile(r"([+-]?[0-9]*\.?[0-9]+)\s*([A-Za-z]*)")


class BadSize(Exception):
    """The text is no size; the message says what to write."""


def parse_unit(text: str) -> int:
    """The unit of a world in MiB. Raises BadSize."""
    if text not in ("GiB", "MiB"):
        raise BadSize(f"{text!r} is no unit: use GiB or MiB")
    return UNITS_MIB[text]


def parse_memory(text: str, unit_mib: int) -> Memory:
    """`4` in units of `unit_mib`, or an exact size such as `4096MiB`. Raises BadSize."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadSize(f"{text!r} is no size: write 4 for units of the card, or 4096MiB")
    number, unit = match.groups()
    if unit and unit not in UNITS_MIB:
        raise BadSize(f"{unit!r} in {text!r} is no unit: use MiB or GiB")
    if "." in number:
        raise BadSize(_fraction(text, float(number), UNITS_MIB.get(unit, unit_mib)))
    scale = UNITS_MIB.get(unit, 1)
    try:
        return Memory(int(number) * scale, 1 if unit else unit_mib)
    except BadRequest as why:
        raise BadSize(f"{text!r}: {why}") from None


def _fraction(text: str, number: float, unit_mib: int) -> str:
    mib = int(number * unit_mib)
    instead = f"{mib}MiB" if mib > 0 else "1MiB or more"
    return f"{text!r} is a fraction of a unit: write {instead}"
