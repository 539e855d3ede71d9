"""Carries out what users request about their quotas and about bookings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from fenka.core.errors import FenkaError
from fenka.core.users.bookings import BookedCards
from fenka.core.users.caps import HOUR_S, NOTHING, amount_of
from fenka.formats.documents import InvalidDocument
from fenka.formats.moments import check_exists, moment_text, parse_moment, seconds, span
from fenka.hardware.peer_credentials import user_name
from fenka.workstation import protocol
from fenka.workstation.broker import GRACE_S, Broker
from fenka.workstation.job import Job
from fenka.workstation.users.user_policies import (
    MAX_AHEAD,
    MAX_BOOKINGS,
    MAX_BOOKINGS_PER_USER,
    BookingRecord,
    UserPolicies,
)
from fenka.workstation.users.users_file import check_audience

MAX_NAMED = 5
"""Jobs in the way of a booking that a sentence names."""

MAX_END_OTHERS_S = 86400.0

Message = protocol.GetQuotas | protocol.BookCards | protocol.GetBookings | protocol.CancelBooking


class CannotBook(FenkaError):
    """The booking was refused, and nothing was changed. The message says why."""


@dataclass(frozen=True, slots=True)
class UserRequests:
    """Answers for one daemon.

    Attributes:
        changed: Called when bookings have changed; serves the queue again.
    """

    policies: UserPolicies
    broker: Broker
    changed: Callable[[], None]

    def answer(
        self, uid: int, account: int, message: Message, now: float, *, owner: bool
    ) -> protocol.QuotasListed | protocol.BookingsListed | protocol.Done:
        """Do what a user requests.

        Args:
            uid: The user.
            account: The user that the client counts for.
            message: The request.
            now: Unix seconds.
            owner: Whether the user is root or the daemon's own.

        Raises:
            CannotBook, InvalidMoment, InvalidDocument, OSError: Nothing was changed.
        """
        match message:
            case protocol.GetQuotas():
                return protocol.QuotasListed(self._quotas(None if owner else account, now))
            case protocol.GetBookings():
                return protocol.BookingsListed(self._views(now))
            case protocol.BookCards():
                record = self._book(uid, message, now, owner=owner)
                self.changed()
                return protocol.BookingsListed(
                    [view for view in self._views(now) if view.id == record.id]
                )
            case protocol.CancelBooking():
                self._cancel(uid, message.id, owner=owner)
                self.changed()
                return protocol.Done(message.id)

    # ---- quotas ----

    def _quotas(self, only: int | None, now: float) -> list[protocol.QuotaView]:
        used = self.policies.card_time.used_s(now)
        placed = self.broker.placed()
        users = {job.account for job in self.broker.jobs.values()} | {int(user) for user in used}
        named = self.policies.named_users()
        users = users | named if only is None else {only}
        return [self._quota(uid, placed, used.get(str(uid), 0.0)) for uid in sorted(users)]

    def _quota(self, uid: int, placed: Sequence[Job], used_s: float) -> protocol.QuotaView:
        caps = self.policies.caps(str(uid))
        held = NOTHING
        for job in placed:
            if job.account == uid and job.placement:
                held = held.plus(amount_of((job.placement,), self.broker.node.cards))
        return protocol.QuotaView(
            user=user_name(uid),
            uid=uid,
            memory_mib=held.memory_mib,
            cards=round(held.cards, 6),
            card_hours=round(used_s / HOUR_S, 6),
            memory_at_most_mib=_cap(caps.memory_mib),
            cards_at_most=_cap(caps.cards),
            card_hours_at_most=_cap(caps.card_hours),
            time_limit_s=_cap(min(caps.default_limit_s, caps.max_limit_s)),
            time_limit_at_most_s=_cap(caps.max_limit_s),
        )

    # ---- bookings ----

    def jobs_to_end(self, now: float) -> Iterator[tuple[Job, str, float]]:
        """Yield the jobs that are in the way of bookings that end others, for whom, and when they begin."""
        for booked in self.policies.booked:
            occurrence = booked.occurrence
            begins_to_end = occurrence.start - self.policies.lead_s(booked)
            if not occurrence.ends_others or not begins_to_end <= now < occurrence.end:
                continue
            at = max(occurrence.start, now)
            for job in self.broker.running_beyond(at + GRACE_S, booked.cards):
                if not self.policies.members(occurrence.booking, [str(job.account)]):
                    yield job, self.policies.booker(occurrence), at

    def _views(self, now: float) -> list[protocol.BookingView]:
        views: dict[str, protocol.BookingView] = {}
        for booked in self.broker.name_cards(self.policies.occurrences(now), now):
            occurrence = booked.occurrence
            record = self.policies.bookings[occurrence.booking]
            views.setdefault(
                record.id,
                protocol.BookingView(
                    id=record.id,
                    user=user_name(record.uid),
                    audience=record.audience,
                    cards=record.cards,
                    start=occurrence.start,
                    end=occurrence.end,
                    when=span(occurrence.start, occurrence.end, self.policies.zone),
                    weekly=record.weekly,
                    end_others_s=record.end_others_s,
                    card_indices=self._indices(booked),
                    certain=booked.certain,
                ),
            )
        return [*views.values()]

    def _indices(self, booked: BookedCards) -> list[int]:
        return [card.index for card in self.broker.node.cards if card.uuid in booked.cards]

    def _cancel(self, uid: int, id_: str, *, owner: bool) -> None:
        record = self.policies.bookings.get(id_)
        if record is None:
            raise CannotBook(f"there is no booking {id_[:40]}: `fenka book list` lists them")
        if uid != record.uid and not owner:
            raise CannotBook(
                f"{id_} belongs to {user_name(record.uid)}: only they and root may cancel it"
            )
        self.policies.remove_booking(id_)

    def _book(
        self, uid: int, request: protocol.BookCards, now: float, *, owner: bool
    ) -> BookingRecord:
        if not self.policies.may_book(uid):
            raise CannotBook(
                f"{user_name(uid)} may not book cards: ask root, who names those who may in "
                f"{self.policies.file} (book.may)"
            )
        if len(self.policies.bookings) >= MAX_BOOKINGS:
            raise CannotBook(f"there are {MAX_BOOKINGS} bookings: cancel some first")
        own = sum(record.uid == uid for record in self.policies.bookings.values())
        if not owner and own >= MAX_BOOKINGS_PER_USER:
            raise CannotBook(
                f"you have {own} bookings, the limit for one user: cancel some first, or make one --weekly"
            )
        if request.end_others_s is not None:
            if not owner:
                raise CannotBook("only root may end others' jobs: book without --end-others")
            if not 0 <= request.end_others_s <= MAX_END_OTHERS_S:
                raise CannotBook("--end-others is a time of 24h at most before the booking")
        audience = request.audience or f"user:{user_name(uid)}"
        try:
            check_audience(audience)
        except InvalidDocument as why:
            raise CannotBook(f"--for {why}") from None
        if not self.policies.is_known(audience):
            kind, _, name = audience.partition(":")
            raise CannotBook(f"this machine has no {kind} {name[:80]}")
        record = self._timed(uid, audience, request, now)
        self._check_certain(record, now)
        self.policies.set_booking(record)
        return record

    def _timed(
        self, uid: int, audience: str, request: protocol.BookCards, now: float
    ) -> BookingRecord:
        """Return the booking at its wall clocks. Raises CannotBook, InvalidMoment."""
        zone = self.policies.zone
        clock = datetime.fromtimestamp(int(now), zone).replace(tzinfo=None)
        start = parse_moment(request.start, clock)
        end = parse_moment(request.end, clock, start)
        if max(start, end) - clock > MAX_AHEAD:
            raise CannotBook(
                f"{max(start, end):%Y-%m-%d} is more than a year ahead: book nearer to the time, or --weekly"
            )
        for moment in (start, end):
            if moment != clock:
                check_exists(moment, zone)
        if end <= start:
            raise CannotBook(
                f"the booking would end at {end:%Y-%m-%d %H:%M}, before it begins: give a later --to"
            )
        if seconds(end, zone) <= now:
            raise CannotBook(
                f"{end:%Y-%m-%d %H:%M} is past: give a later time, with the date if need be"
            )
        if request.weekly and (end - start).days >= 7:
            raise CannotBook("a weekly booking is shorter than a week: give an earlier --to")
        if request.cards < 1:
            raise CannotBook(f"--cards must be 1 or more, not {request.cards}")
        return BookingRecord(
            *(self.policies.new_id(), uid, audience, request.cards, start, end),
            request.weekly,
            request.end_others_s,
        )

    def _check_certain(self, record: BookingRecord, now: float) -> None:
        """Raise CannotBook unless enough cards are certain for this booking and for all others."""
        bookable = len(self.broker.bookable_cards())
        if record.cards > bookable:
            raise CannotBook(
                f"this machine has {bookable} card{'' if bookable == 1 else 's'} that can be booked, not "
                f"{record.cards}: ask for fewer (cards that are divided or unhealthy cannot be)"
            )
        records = [*self.policies.bookings.values(), record]
        occurrences = [item for item in self.policies.expand(records, now) if item.end > now]
        known = {(item.booking, item.start): item for item in self.policies.occurrences(now)}
        occurrences = [known.get((item.booking, item.start), item) for item in occurrences]
        before = self.broker.name_cards(known.values(), now)
        failing = {
            (booked.occurrence.booking, booked.occurrence.start)
            for booked in before
            if not booked.certain
        }
        for booked in self.broker.name_cards(occurrences, now):
            occurrence = booked.occurrence
            if not booked.certain and (occurrence.booking, occurrence.start) not in failing:
                raise CannotBook(self._obstacle(record, booked, now))

    def _obstacle(self, record: BookingRecord, booked: BookedCards, now: float) -> str:
        """Return why there are too few certain cards for a time, and what is in the way."""
        occurrence, zone = booked.occurrence, self.policies.zone
        start = max(occurrence.start, now)
        certain = self.broker.certain_cards(start)
        overlapping = [
            other
            for other in self.broker.name_cards(self.policies.occurrences(now), now)
            if other.occurrence.start < occurrence.end and start < other.occurrence.end
        ]
        if len(certain) >= occurrence.cards and overlapping:
            others = ", ".join(
                f"{other.occurrence.cards} {self.policies.title(other.occurrence)}"
                for other in overlapping[:MAX_NAMED]
                if other.occurrence.booking != record.id
            )
            return f"there are too few cards for this beside other bookings: {others}"
        jobs = self.broker.running_beyond(start)
        when = moment_text(datetime.fromtimestamp(start, zone))
        open_ended = [job for job in jobs if job.deadline is None]
        late = [job for job in jobs if job.deadline is not None]
        reasons = []
        if open_ended:
            reasons.append(f"{_names(open_ended)} {_have(open_ended)} no time limit")
        if late:
            reasons.append(f"{_names(late)} may run longer")
        return (
            f"{'only ' if certain else ''}{len(certain)} of {occurrence.cards} cards are certain to be free "
            f"on {when}: "
            f"{' and '.join(reasons) or 'other bookings have the others'}; "
            "book later, or have them stopped"
        )


def _names(jobs: Sequence[Job]) -> str:
    shown = [f"{job.name} of {user_name(job.uid)}" for job in jobs[:MAX_NAMED]]
    if len(jobs) > MAX_NAMED:
        shown.append(f"{len(jobs) - MAX_NAMED} more")
    return ", ".join(shown)


def _have(jobs: Sequence[Job]) -> str:
    return "has" if len(jobs) == 1 else "have"


def _cap(value: float) -> float | None:
    return None if value == inf else value
