"""Units of card memory: the only conversion between units and MiB.

A card has its MiB divided by the unit, rounded down, as units. The remaining MiB are distributed over them,
as cGPU does: 4 of a T4's 14 units are 15079 * 4 // 14 = 4308 MiB.
"""

MIB = 1 << 20
"""Bytes."""


def card_units(card_mib: int, unit_mib: int) -> int:
    """Return how many units of `unit_mib` a card of `card_mib` has."""
    return card_mib // unit_mib


def units_to_mib(units: int, card_mib: int, unit_mib: int) -> int:
    """Return the MiB of that many units of a card, rounded down; with unit_mib = 1 exactly `units`.

    Raises:
        ValueError: for a card smaller than one unit.
    """
    total = card_units(card_mib, unit_mib)
    if total == 0:
        raise ValueError(f"a card of {card_mib} MiB has no unit of {unit_mib} MiB")
    return card_mib * units // total


def mib_to_units(mib: int, card_mib: int, unit_mib: int) -> float:
    """Return the units of `mib`: an int if `units_to_mib` of it gives exactly `mib`, else a fraction."""
    total = card_units(card_mib, unit_mib)
    if total == 0:
        return 0
    if total == card_mib:
        return mib
    above = -(-mib * total // card_mib)
    return above if units_to_mib(above, card_mib, unit_mib) == mib else mib * total / card_mib


def format_units(units: float) -> str:
    """Return `4`, or `3.8` for a size that is no whole number of units."""
    if units == int(units):
        return str(int(units))
    return f"{units:.1f}"


def percent(part: float, whole: float) -> int:
    """Return the percentage truncated, as arena and gpushare print it: 12 of 14 are 85; 0 of an empty whole.

    It is exact for ints. Fractions of units are rounded to a millionth of a percent first, so that a float's
    last digit does not make 28 of 29.
    """
    if not whole:
        return 0
    if isinstance(part, int) and isinstance(whole, int):
        return part * 100 // whole
    return int(round(part * 100 / whole, 6))
