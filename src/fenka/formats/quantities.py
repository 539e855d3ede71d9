"""Sizes as users type them: `4` units of a card, or exactly `4096MiB` or `4GiB`.

A number without a unit counts units of a card (GiB by default): a card of 15079 MiB has 14. With a unit it is
exactly that memory.
"""

import re

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.request import InvalidRequest, Memory

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


def no_whole_cards(text: str) -> str:
    """Return the sentence for a number of whole cards that is none, as `0.5`."""
    return (
        f"{_shown(text)} is no number of whole cards: a part of one is asked for by --gpu-mem and "
        "--gpu-core"
    )
