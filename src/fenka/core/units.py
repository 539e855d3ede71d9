"""Units of card memory, per card: the one place where units become MiB and MiB become units.

A card's units are its MiB divided by the unit, rounded down; the MiB that this leaves over are shared
out over the units, as cGPU does: 4 of a T4's 14 units are 15079 * 4 // 14 = 4308 MiB.
"""


def card_units(card_mib: int, unit_mib: int) -> int:
    """How many units of `unit_mib` a card of `card_mib` has."""
    return card_mib // unit_mib


def units_to_mib(units: int, card_mib: int, unit_mib: int) -> int:
    """What so many units of this card are, in MiB, rounded down. With unit_mib = 1: exactly `units`.

    Raises ValueError for a card smaller than one unit.
    """
    total = card_units(card_mib, unit_mib)
    if total == 0:
        raise ValueError(f"a card of {card_mib} MiB has no unit of {unit_mib} MiB")
    return card_mib * units // total


def mib_to_units(mib: int, card_mib: int, unit_mib: int) -> float:
    """The inverse: an int where `mib` is what so many units give, else the fraction that it is."""
    total = card_units(card_mib, unit_mib)
    if total == 0:
        return 0
    above = -(-mib * total // card_mib)
    return above if units_to_mib(above, card_mib, unit_mib) == mib else mib * total / card_mib


def format_units(units: float) -> str:
    """`4`, or `3.8` for a size that is no whole number of units."""
    if units == int(units):
        return str(int(units))
    return f"{units:.1f}"


def percent(part: float, whole: float) -> int:
    """Truncated, as arena and gpushare print it: 12 of 14 are 85. Of nothing: 0.

    Exact for ints; fractions of units are taken to a millionth of a percent, so that no float's last
    digit makes 28 of 29.
    """
    if not whole:
        return 0
    if isinstance(part, int) and isinstance(whole, int):
        return part * 100 // whole
    return int(round(part * 100 / whole, 6))
