"""Meters cards: whose time it was, what was held and what was used. Amounts are integers, so sums are exact.

An observer makes an `Observation` whenever something changes, and every few seconds. `charges` says what the
time between two of them was: a holder's, idle, or unobserved. These together are always cards × time.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from fenka.core.inventory import WHOLE_COMPUTE, DeviceId

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US
DAY_S = DAY_US // SECOND_US

MAX_GAP_US = 60 * SECOND_US
"""Nobody watched between two observations that are further apart, as while a laptop sleeps."""

MAX_ABSENCE_US = 400 * DAY_US
"""A longer absence is a clock that was wrong: metering begins again."""

PRICE_SCALE = 1_000_000
"""Prices are recorded in millionths of the currency's unit for an hour of one card."""


class LineKind(StrEnum):
    """Whose the time of a card was."""

    HELD = "held"
    IDLE = "idle"
    UNOBSERVED = "unobserved"


class MeteredCard(NamedTuple):
    """A card whose time counts.

    Attributes:
        uuid: The card's, not an instance's.
        model: As the driver names it.
        memory_mib: All of it.
        node: Its node; empty for this machine.
        paid: What its time costs now, if it is known by itself, as an elastic node's: in PRICE_SCALE for an
            hour. None: by a price list.
    """

    uuid: DeviceId
    model: str
    memory_mib: int
    node: str = ""
    paid: int | None = None


class Holding(NamedTuple):
    """A slice, a whole card or an instance that a holder has of a card.

    Attributes:
        holder: The id of a job or pod, which no later one has.
        card: The UUID of the card, or of the card that the instance is on.
        memory_mib, compute: In MiB, and in percent of the card.
        used_mib: The part of the memory that is in use; None if that is not known.
        busy_us: The card's time that the holder has had so far; None if that is not known.
    """

    holder: str
    card: DeviceId
    memory_mib: int
    compute: int = 0
    used_mib: int | None = None
    busy_us: int | None = None


class Moment(NamedTuple):
    """The time of an observation, as `Observation` has it."""

    at_us: int
    uptime_us: int
    boot: str
    observer: str


class Observation(NamedTuple):
    """All cards and holdings at a moment.

    Attributes:
        at_us: Unix time, which may be set.
        uptime_us: Time since the machine's boot, suspensions included.
        boot: The boot that it counts from.
        observer: The process that observes.
        cards: All cards, healthy or not.
        holdings: All that is held of them.
    """

    at_us: int
    uptime_us: int
    boot: str
    observer: str
    cards: Sequence[MeteredCard] = ()
    holdings: Sequence[Holding] = ()


class Amounts(NamedTuple):
    """Amounts that add up.

    Attributes:
        card_us: The part of the card's time that is charged.
        memory: Held memory, in MiB × µs.
        compute: Held compute, in percent of a card × µs.
        used: Memory in use, in MiB × µs.
        measured: The part of `memory` of which the use is known.
        busy_us: The card's time that was had.
        timed_us: The part of `card_us` of which that is known.
    """

    card_us: int = 0
    memory: int = 0
    compute: int = 0
    used: int = 0
    measured: int = 0
    busy_us: int = 0
    timed_us: int = 0

    def plus(self, other: "Amounts") -> "Amounts":
        """Return the sums."""
        return Amounts(*map(sum, zip(self, other, strict=True)))


NO_AMOUNTS = Amounts()


class Line(NamedTuple):
    """A line of the ledger: amounts with the same key are added.

    Attributes:
        day: The days from 1970 to that of the time, in UTC.
        kind: Whose time it was.
        holder: Whose; empty unless it was held.
        node, model, paid: Of the card.
    """

    day: int
    kind: LineKind
    holder: str
    node: str
    model: str
    paid: int | None


UsageLedger = dict[Line, Amounts]


def add(ledger: UsageLedger, charged: Iterable[tuple[Line, Amounts]]) -> None:
    """Add amounts to a ledger."""
    for line, amounts in charged:
        ledger[line] = ledger.get(line, NO_AMOUNTS).plus(amounts)


def elapsed_us(before: Observation, after: Observation) -> int:
    """Return the time between two observations. Clocks that are set do not count within one boot."""
    if before.boot == after.boot:
        return max(after.uptime_us - before.uptime_us, 0)
    absence = after.at_us - before.at_us
    return absence if 0 < absence <= MAX_ABSENCE_US else 0


def charges(before: Observation, after: Observation) -> Iterator[tuple[Line, Amounts]]:
    """Yield what the time between two observations was, for the cards that were there at its beginning.

    Each holder has the share of memory of its card, or of compute if that is larger. If the shares of a card
    are more than all of it, they are scaled down to it. Time without a holder is idle.
    """
    elapsed = elapsed_us(before, after)
    if not elapsed:
        return
    watched = before.observer == after.observer and elapsed <= MAX_GAP_US
    had = (
        {(now.holder, now.card): now.busy_us for now in _joined(after.holdings)} if watched else {}
    )
    on_cards: dict[DeviceId, list[Holding]] = {}
    for holding in _joined(before.holdings):
        on_cards.setdefault(holding.card, []).append(holding)
    end = after.at_us
    marks = [end - elapsed, *range(_next_day(end - elapsed), end, DAY_US), end]
    for start, stop in pairwise(marks):
        part = start - marks[0], stop - marks[0], elapsed
        for card in before.cards:
            day = start // DAY_US
            if watched:
                yield from _of_card(card, day, part, on_cards.get(card.uuid, ()), had)
            else:
                yield _line(card, day, LineKind.UNOBSERVED), Amounts(stop - start)


_Part = tuple[int, int, int]
"""A part of the time between two observations: its start, its end, and all of the time."""


def _of_card(
    card: MeteredCard,
    day: int,
    part: _Part,
    holdings: Sequence[Holding],
    had: dict[tuple[str, DeviceId], int | None],
) -> Iterator[tuple[Line, Amounts]]:
    span, memory_mib = part[1] - part[0], max(card.memory_mib, 1)
    # In percent × MiB, so that the larger of both shares is a whole number.
    shares = [
        min(
            max(held.memory_mib * WHOLE_COMPUTE, held.compute * memory_mib),
            memory_mib * WHOLE_COMPUTE,
        )
        for held in holdings
    ]
    whole = max(memory_mib * WHOLE_COMPUTE, sum(shares))
    taken = done = 0
    for held, share in zip(holdings, shares, strict=True):
        taken += share
        # The rounded sum so far: so the parts add up.
        until = span * taken // whole
        card_us, done = until - done, until
        used = held.used_mib
        busy = _busy(held.busy_us, had.get((held.holder, card.uuid)), part)
        yield (
            _line(card, day, LineKind.HELD, held.holder),
            Amounts(
                card_us,
                held.memory_mib * span,
                held.compute * span,
                0 if used is None else min(used, held.memory_mib) * span,
                0 if used is None else held.memory_mib * span,
                busy or 0,
                0 if busy is None else card_us,
            ),
        )
    if done < span:
        yield _line(card, day, LineKind.IDLE), Amounts(span - done)


def _busy(before: int | None, after: int | None, part: _Part) -> int | None:
    """Return the card's time that was had in a part; None if it is not known."""
    start, stop, elapsed = part
    if before is None or after is None:
        return None
    # Drivers date their samples, so a few may count for the interval after their own.
    had = min(max(after - before, 0), elapsed)
    return had * stop // elapsed - had * start // elapsed


def _joined(holdings: Iterable[Holding]) -> Iterator[Holding]:
    """Yield one holding for each holder and card: a job may have several instances of one."""
    joined: dict[tuple[str, DeviceId], Holding] = {}
    for held in holdings:
        key = held.holder, held.card
        other = joined.get(key)
        joined[key] = (
            held
            if other is None
            else other._replace(
                memory_mib=other.memory_mib + held.memory_mib,
                compute=other.compute + held.compute,
                used_mib=_sum(other.used_mib, held.used_mib),
                busy_us=_sum(other.busy_us, held.busy_us),
            )
        )
    yield from joined.values()


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _line(card: MeteredCard, day: int, kind: LineKind, holder: str = "") -> Line:
    return Line(day, kind, holder, card.node, card.model, card.paid)


def _next_day(at_us: int) -> int:
    return (at_us // DAY_US + 1) * DAY_US


def cost(card_us: int, price: int) -> Fraction:
    """Return what time of a card costs, in the currency's unit. price: in PRICE_SCALE for an hour."""
    return Fraction(card_us * price, HOUR_US * PRICE_SCALE)
