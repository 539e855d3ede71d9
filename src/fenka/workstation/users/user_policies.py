"""The policies of one daemon: caps from users.toml, bookings and today's use from its own files."""

import grp
import os
import pwd
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.users.bookings import BookedCards, Occurrence
from fenka.core.users.caps import NO_CAPS, Caps
from fenka.core.users.rules import Policies
from fenka.formats.moments import WEEK, midnight, seconds, span
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import lease_files
from fenka.workstation.files import load_file
from fenka.workstation.lifetime import describe, log
from fenka.workstation.users.users_file import (
    EVERYBODY,
    InvalidUsersFile,
    UsersFile,
    parse_users_file,
    read_users_file,
)

GROUPS_TTL_S = 300.0
"""A user's name and groups are looked up again after this time, and when users.toml is read."""

SAVE_PERIOD_S = 60.0
"""Between records of today's use while somebody holds cards."""

AHEAD = timedelta(days=15)
"""Occurrences of weekly bookings that are considered: two at least. The others are like them."""

MAX_BOOKINGS = 100

MAX_BOOKINGS_PER_USER = 20
"""Of a user other than root and the daemon's own, so that nobody has all of them."""

MAX_ID_DIGITS = 10
"""Of a uid or gid."""

MAX_AHEAD = timedelta(days=366)
"""Of a booking's end."""


class BookingRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A booking on disk.

    Attributes:
        id: Unique.
        uid: Who has made it.
        audience: Who may use the cards, as `user:NAME` or `group:NAME`.
        cards: How many.
        start, end: Wall clocks of the machine; of a weekly booking those of its first time.
        weekly: It comes again every seven days.
        end_others_s: Jobs that would run into it are ended from this many seconds before it; None if not.
        named: UUIDs of its cards, since it began.
        named_start: The time, in Unix seconds, that has these cards.
    """

    id: str
    uid: int
    audience: str
    cards: int
    start: datetime
    end: datetime
    weekly: bool = False
    end_others_s: float | None = None
    named: list[str] = []
    named_start: float = 0.0


class BookingsFile(msgspec.Struct, forbid_unknown_fields=True):
    """All bookings that have not ended."""

    bookings: list[BookingRecord]
    version: Literal[1] = 1


class UseFile(msgspec.Struct, forbid_unknown_fields=True):
    """Card-seconds by uid from a midnight until a time, both in Unix seconds."""

    midnight: float
    at: float
    used_s: Mapping[str, float]
    version: Literal[1] = 1


class _MachineUser(NamedTuple):
    """A user's name and number, its groups' names and numbers, and its caps."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    caps: Caps


def machine_zone() -> tzinfo:
    """Return the machine's time zone: that of TZ, else of /etc/localtime, else UTC."""
    named = os.environ.get("TZ", "").removeprefix(":")
    try:
        if named:
            return ZoneInfo(named)
        with lease_files.open_regular_file(Path("/etc/localtime"), follow_link=True) as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError, KeyError):
        return UTC


class UserPolicies(Policies):
    """Reads and keeps what is known of users. Users are named by their uid."""

    def __init__(
        self,
        file: Path,
        directory: Path,
        owners: Collection[int],
        clock: Callable[[], float] = time.time,
        zone: Callable[[], tzinfo] = machine_zone,
    ) -> None:
        """Args:
        file: users.toml.
        directory: for the daemon's own files, which outlive boots.
        owners: who may own users.toml, and has no caps.
        clock: Unix seconds.
        zone: the machine's time zone.
        """
        super().__init__()
        self.file, self._directory, self._owners = file, directory, frozenset(owners) | {0}
        self._clock, self._zone_of = clock, zone
        self.zone = zone()
        self.content = UsersFile()
        self.bookings: dict[str, BookingRecord] = {}
        self.booked: Sequence[BookedCards] = ()
        """The cards of each occurrence, as the last scheduling pass has named them."""
        self._users: dict[int, tuple[_MachineUser, float]] = {}
        self._expanded: tuple[list[Occurrence], float] = [], -inf
        self._ticked_at = self._clock()
        self._saved_at = -inf
        self._failed = False

    # ---- users.toml ----

    def load(self) -> None:
        """Read all files when the daemon starts.

        Raises:
            InvalidUsersFile: users.toml has a mistake, and none was accepted before.
            InvalidState: A file of the daemon's own is damaged.
        """
        try:
            self._read()
        except InvalidUsersFile as why:
            accepted = read_users_file(self._accepted, self._owners)
            if accepted is None:
                raise
            self.content = parse_users_file(accepted, self._accepted)
            log(f"{why}; the file that was read before it still holds")
        self._load_bookings()
        self._load_use()

    def reload(self) -> None:
        """Read users.toml again. One with a mistake leaves all as it is, and the log says why."""
        self.zone = self._zone_of()
        self._expanded = [], -inf
        try:
            self._read()
        except InvalidUsersFile as why:
            log(f"{why}; the file that was read before it still holds")
        else:
            log(f"{self.file} was read")

    def _read(self) -> None:
        content = read_users_file(self.file, self._owners)
        self.content = UsersFile() if content is None else parse_users_file(content, self.file)
        self._users.clear()
        self._keep_accepted(content)

    def _keep_accepted(self, content: bytes | None) -> None:
        """Keep a copy for a daemon that starts while the file has a mistake."""
        try:
            if content is None:
                self._accepted.unlink(missing_ok=True)
                return
            self._write(self._accepted, content)
        except OSError as why:
            log(f"the next daemon will not know the present users.toml: {describe(why)}")

    @property
    def _accepted(self) -> Path:
        return self._directory / "users-accepted.toml"

    def caps(self, user: str) -> Caps:
        """Return a user's caps; none for root and the daemon's owner."""
        return self._user(int(user)).caps if self.content.caps_anybody else NO_CAPS

    def name(self, user: str) -> str:
        """Return a user's name."""
        return user_name(int(user))

    def _user(self, uid: int) -> "_MachineUser":
        """Return a user's names, groups and caps, as of some minutes ago at most."""
        known, now = self._users.get(uid), self._clock()
        if known is None or not 0 <= now - known[1] <= GROUPS_TTL_S:
            names, groups = (user_name(uid), str(uid)), tuple(_group_names(uid))
            exempt = uid in self._owners
            caps = NO_CAPS if exempt else self.content.caps(names, groups)
            known = self._users[uid] = _MachineUser(names, groups, caps), now
        return known[0]

    def may_book(self, uid: int) -> bool:
        """Return whether a user may book cards."""
        if uid in self._owners:
            return True
        return any(text == EVERYBODY or self._is_in(text, uid) for text in self.content.may_book)

    def _is_in(self, audience: str, uid: int) -> bool:
        kind, _, name = audience.partition(":")
        user = self._user(uid)
        return name in (user.groups if kind == "group" else user.names)

    def is_known(self, audience: str) -> bool:
        """Return whether the machine knows this user or group."""
        kind, _, name = audience.partition(":")
        find: Callable[[str], object] = grp.getgrnam if kind == "group" else pwd.getpwnam
        try:
            find(name)
        except KeyError:
            # Users and groups may be without a name.
            return name.isdecimal() and len(name) <= MAX_ID_DIGITS
        return True

    def named_users(self) -> set[int]:
        """Return the uids of the users whom users.toml names."""
        found = set[int]()
        for name in self.content.user:
            try:
                found.add(pwd.getpwnam(name).pw_uid)
            except KeyError:
                if name.isdecimal() and len(name) <= MAX_ID_DIGITS:
                    found.add(int(name))
        return found

    # ---- bookings ----

    def _load_bookings(self) -> None:
        file = load_file(
            self._bookings_file, BookingsFile, "remove it, start again, and book again"
        )
        self.bookings = {record.id: record for record in file.bookings} if file else {}

    @property
    def _bookings_file(self) -> Path:
        return self._directory / "bookings.json"

    def save_bookings(self) -> None:
        """Record all bookings. Raises OSError."""
        if not self.bookings:
            self._bookings_file.unlink(missing_ok=True)
            return
        content = msgspec.json.encode(BookingsFile([*self.bookings.values()]))
        self._write(self._bookings_file, content)

    def new_id(self) -> str:
        """Return an id that no booking has."""
        while (id_ := f"b{secrets.token_hex(2)}") in self.bookings:
            pass
        return id_

    def set_booking(self, record: BookingRecord) -> None:
        """Add a booking. Raises OSError, and then changes nothing."""
        self.bookings[record.id] = record
        try:
            self.save_bookings()
        except OSError:
            del self.bookings[record.id]
            raise
        self._expanded = [], -inf

    def remove_booking(self, id_: str) -> None:
        """Remove a booking. Raises OSError."""
        del self.bookings[id_]
        self._expanded = [], -inf
        self.save_bookings()

    def occurrences(self, now: float) -> Sequence[Occurrence]:
        """Return the times of all bookings that have not ended."""
        if not self.bookings:
            return ()
        known, until = self._expanded
        if now >= until:
            known = self.expand(self.bookings.values(), now)
            self._expanded = known, now + 3600
        return [self._with_cards(item) for item in known if item.end > now]

    def _with_cards(self, occurrence: Occurrence) -> Occurrence:
        record = self.bookings[occurrence.booking]
        if not record.named or record.named_start != occurrence.start:
            return occurrence
        return replace(occurrence, named=frozenset(map(DeviceId, record.named)))

    def expand(self, records: Iterable[BookingRecord], now: float) -> list[Occurrence]:
        """Return the times of bookings from now on. Weekly ones come up to some weeks after all others."""
        records = list(records)
        local = datetime.fromtimestamp(now, self.zone).replace(tzinfo=None)
        last = max([local, *(record.end for record in records)])
        return [item for record in records for item in self._times(record, local, last + AHEAD)]

    def _times(
        self, record: BookingRecord, after: datetime, last: datetime
    ) -> Iterator[Occurrence]:
        weeks = max((after - record.end) // WEEK, 0) if record.weekly else 0
        while True:
            shift = WEEK * weeks
            start, end = (
                seconds(moment + shift, self.zone) for moment in (record.start, record.end)
            )
            yield Occurrence(record.id, record.cards, start, end, record.end_others_s is not None)
            weeks += 1
            if not record.weekly or record.start + WEEK * weeks > last:
                return

    def members(self, booking: str, users: Iterable[str]) -> frozenset[str]:
        """Return those of the users whom a booking is for."""
        audience = self.bookings[booking].audience
        return frozenset(user for user in users if self._is_in(audience, int(user)))

    def title(self, occurrence: Occurrence) -> str:
        """Return `booked by bob for group:a, Fri 4 Dec 09:00 to 17:00 (b1f2)`."""
        record = self.bookings[occurrence.booking]
        by = user_name(record.uid)
        for_whom = "" if record.audience == f"user:{by}" else f" for {record.audience}"
        when = span(occurrence.start, occurrence.end, self.zone)
        return f"booked by {by}{for_whom}, {when} ({record.id})"

    def booker(self, occurrence: Occurrence) -> str:
        """Return whose booking it is, as who ends jobs in its way."""
        record = self.bookings[occurrence.booking]
        return f"a booking of {user_name(record.uid)} ({record.id})"

    def on_named(self, booked: Sequence[BookedCards]) -> None:
        """Record the cards of bookings that have begun: they keep them, also over a restart."""
        self.booked, changed = booked, False
        now = self._clock()
        for cards in booked:
            occurrence = cards.occurrence
            record = self.bookings.get(occurrence.booking)
            named = sorted(cards.cards)
            if record is None or not occurrence.begun(now) or not named:
                continue
            if (record.named, record.named_start) != (named, occurrence.start):
                record.named, record.named_start, changed = list(named), occurrence.start, True
        if changed:
            self._try(self.save_bookings)

    # ---- time ----

    def tick(self, now: float) -> bool:
        """Begin a day and drop bookings that have ended. Return whether the queue is to be served again."""
        before, self._ticked_at = self._ticked_at, now
        new_day = self.card_time.begin_day(midnight(now, self.zone))
        due = new_day or any(
            before < moment <= now
            for cards in self.booked
            for moment in (cards.occurrence.start, cards.occurrence.end)
        )
        ended = [
            record.id
            for record in self.bookings.values()
            if not record.weekly and seconds(record.end, self.zone) <= now
        ]
        for id_ in ended:
            del self.bookings[id_]
        if ended:
            self._expanded = [], -inf
            self._try(self.save_bookings)
        if now >= self._saved_at + SAVE_PERIOD_S or now < self._saved_at:
            self.save_use()
        return due or bool(ended)

    def next_boundary(self, now: float) -> float:
        """Return when the next booking begins, ends or ends others; infinite if none does."""
        moments = [
            moment
            for cards in self.booked
            for moment in (
                cards.occurrence.start,
                cards.occurrence.end,
                cards.occurrence.start - self.lead_s(cards),
            )
        ]
        return min((moment for moment in moments if moment > now), default=inf)

    def lead_s(self, cards: BookedCards) -> float:
        """Return how long before its start a booking ends other jobs; 0 if it does not."""
        record = self.bookings.get(cards.occurrence.booking)
        return (record.end_others_s if record else None) or 0.0

    # ---- today's use ----

    def _load_use(self) -> None:
        now = self._clock()
        self.card_time.begin_day(midnight(now, self.zone))
        file = load_file(self._use_file, UseFile, "remove it, and start again")
        if file and file.midnight == self.card_time.midnight and file.at <= now:
            self.card_time.restore(file.used_s, file.at)

    @property
    def _use_file(self) -> Path:
        return self._directory / "use-today.json"

    def save_use(self) -> None:
        """Record what was used today, if it is anything."""
        now = self._saved_at = self._clock()
        used = self.card_time.used_s(now)
        if used:
            content = msgspec.json.encode(UseFile(self.card_time.midnight, now, used))
            self._try(lambda: self._write(self._use_file, content))

    def on_saved(self) -> None:
        """Jobs were recorded: so is what they have used, if that counts for anybody."""
        entries = [*self.content.user.values(), *self.content.group.values()]
        if any(entry.card_hours_per_day is not None for entry in entries):
            self.save_use()

    def _write(self, file: Path, content: bytes) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lease_files.write_atomically(file, content)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._failed = False
        except OSError as why:
            if not self._failed:
                log(f"bookings and today's use are not recorded: {describe(why)}")
            self._failed = True


def _group_names(uid: int) -> Iterator[str]:
    try:
        user = pwd.getpwuid(uid)
        gids = os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return
    for gid in gids:
        yield str(gid)
        try:
            yield grp.getgrgid(gid).gr_name
        except KeyError:
            continue
