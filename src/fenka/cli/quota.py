"""`fenka quota` and `fenka book`: caps of this machine's users, and cards that are kept for a time."""

from typing import Annotated, TypeVar

import typer

from fenka.cli import tables
from fenka.cli.common_options import (
    OutputOption,
    group,
    parse_duration,
    register,
    register_bare,
)
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.core.users.caps import duration_text
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection, RequestFailed
from fenka.workstation.protocol import BookingView, QuotaView

T = TypeVar("T")

_OLDER = "invalid message"
"""The beginning of a daemon's answer to a message that it does not know."""


def quota(output: OutputOption = "table") -> None:
    """Print what this user holds, and their caps; as root those of all users."""
    quotas = _request(protocol.GetQuotas(), protocol.QuotasListed).quotas
    if tables.print_data(quotas, output):
        return
    head = ("USER", "MEMORY", "CARDS", "CARD-HOURS TODAY", "TIME LIMIT")
    tables.print_lines(tables.align_to_terminal([head, *map(_quota_row, quotas)]))


def _quota_row(row: QuotaView) -> tuple[str, ...]:
    memory = _of(str(row.memory_mib), row.memory_at_most_mib)
    return (
        row.user,
        f"{memory} MiB",
        _of(f"{row.cards:.3g}", row.cards_at_most),
        _of(tables.hours_text(row.card_hours), row.card_hours_at_most),
        _time_limit(row),
    )


def _of(held: str, at_most: float | None) -> str:
    return held if at_most is None else f"{held} of {at_most:.6g}"


def _time_limit(row: QuotaView) -> str:
    if row.time_limit_s is None:
        return "-"
    text = duration_text(row.time_limit_s)
    at_most = row.time_limit_at_most_s
    return text if at_most is None else f"{text}, at most {duration_text(at_most)}"


def _book(
    cards: Annotated[int | None, typer.Option(min=1, help="number of cards")] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="TIME", help="begin: 'fri 09:00', 09:00, '2026-12-04 09:00', now"
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TIME",
            help="end, written in the same way; a clock alone comes after --from",
        ),
    ] = "",
    weekly: Annotated[bool, typer.Option("--weekly", help="again every seven days")] = False,
    audience: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="WHO",
            help="who may use them: group:NAME or user:NAME; default: yourself",
        ),
    ] = "",
    end_others: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="as root: end jobs in the way, by SIGTERM this long before and SIGKILL at the start",
        ),
    ] = "",
    output: OutputOption = "table",
) -> None:
    """Book cards: others cannot use them then, and before only if they end in time."""
    missing = [
        option
        for option, value in (("--cards", cards), ("--from", start), ("--to", end))
        if not value
    ]
    if missing:
        raise UserError(
            f"a booking needs {', '.join(missing)}, as in `fenka book --cards 2 --from 'fri 09:00' "
            "--to 'fri 17:00'`",
            INVALID_INPUT,
        )
    lead_s = float(parse_duration("--end-others", end_others)) if end_others else None
    message = protocol.BookCards(cards or 0, start, end, weekly, audience, lead_s)
    (booking,) = _request(message, protocol.BookingsListed).bookings
    if tables.print_data(booking, output):
        return
    again = ", every week" if booking.weekly else ""
    noun = "card" if booking.cards == 1 else "cards"
    tables.print_lines(
        [
            f"{booking.id}: {booking.cards} {noun} for {booking.audience}, {booking.when}{again}; "
            f"`fenka book cancel {booking.id}` gives them back"
        ]
    )


def _list(output: OutputOption = "table") -> None:
    """Print all bookings by their start."""
    bookings = _request(protocol.GetBookings(), protocol.BookingsListed).bookings
    if tables.print_data(bookings, output):
        return
    if not bookings:
        print("no cards are booked")
        return
    head = ("ID", "BY", "FOR", "CARDS", "WHEN", "WEEKLY", "NAMED NOW")
    tables.print_lines(tables.align_to_terminal([head, *map(_booking_row, bookings)]))


def _booking_row(row: BookingView) -> tuple[str, ...]:
    named = ",".join(map(str, row.card_indices)) + ("" if row.certain else " (not certain)")
    weekly = "yes" if row.weekly else "no"
    return (row.id, row.user, row.audience, str(row.cards), row.when, weekly, named.strip())


def _cancel(
    booking: Annotated[str, typer.Argument(metavar="ID", help="as `fenka book list` shows it")],
) -> None:
    """Give up a booking."""
    _request(protocol.CancelBooking(booking), protocol.Done)
    print(f"{booking} is cancelled")


def _request(message: protocol.Message, expected: type[T]) -> T:
    return ask_daemon(message, expected, "knows neither caps nor bookings")


def ask_daemon(message: protocol.Message, expected: type[T], older: str) -> T:
    """Return the daemon's answer.

    Args:
        message: The request.
        expected: The type of its answer.
        older: What a daemon does that does not know this request yet.

    Raises:
        RequestFailed, UserError: The daemon refused it, or does not know it.
        DaemonUnavailable, UnsafeDirectory, ProtocolMismatch: There is no daemon to ask.
    """
    try:
        with DaemonConnection(paths.current()) as connection:
            return connection.request(message, expected)
    except RequestFailed as why:
        if str(why).startswith(_OLDER):
            raise UserError(
                f"the daemon is of an older version that {older}: `fenka daemon --restart` replaces it, and "
                "programs go on"
            ) from None
        raise


book = group("Keep cards for a time: book, list and cancel.")
register_bare(book, _book, "Keep cards for a time: book, list and cancel.")
register(book, _list, "List all bookings.", name="list")
register(book, _cancel, "Give up a booking.", name="cancel")
