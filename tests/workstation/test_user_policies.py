"""Caps and bookings of a daemon over reloads, restarts, midnights and weeks, and requests about them."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.core.users.caps import NO_CAPS
from fenka.workstation import protocol
from fenka.workstation.broker import Broker, Effect, GrantLease, RejectJob
from fenka.workstation.files import InvalidState
from fenka.workstation.users.user_policies import (
    MAX_BOOKINGS_PER_USER,
    UserPolicies,
    machine_zone,
)
from fenka.workstation.users.user_requests import UserRequests
from fenka.workstation.users.users_file import InvalidUsersFile
from tests.builders import T4_MIB, job

ALICE, BOB, ROOT = 61001, 61002, os.geteuid()
BERLIN = ZoneInfo("Europe/Berlin")
SATURDAY = datetime(2026, 11, 28, 12, 0, tzinfo=BERLIN).timestamp()
HOUR = 3600.0


@dataclass
class Machine:
    """A broker with three T4s and the policies of its daemon, whose clock is set by hand."""

    place: Path
    now: float = SATURDAY
    zone: tzinfo = BERLIN
    broker: Broker = field(init=False)
    policies: UserPolicies = field(init=False)
    requests: UserRequests = field(init=False)
    changes: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a daemon, or the next one."""
        cards = tuple(Card(n, DeviceId(f"GPU-{n}"), "Tesla T4", T4_MIB) for n in range(3))
        file = self.place / "users.toml"
        self.policies = UserPolicies(
            file, self.place / "state", {ROOT}, lambda: self.now, lambda: self.zone
        )
        self.policies.load()
        self.broker = Broker(Node("here", cards), "binpack", policies=self.policies)
        self.requests = UserRequests(self.policies, self.broker, self.changed)

    def changed(self) -> None:
        """Serve the queue again, as the daemon does."""
        self.changes += 1
        self.broker.reschedule(self.now)

    def write(self, text: str) -> None:
        """Write users.toml."""
        path = self.place / "users.toml"
        path.write_text(text)
        path.chmod(0o644)

    def submit(
        self, name: str, uid: int, units: int = 14, limit_s: float | None = None, cards: int = 1
    ) -> list[Effect]:
        """Submit a job, and confirm it if it is granted."""
        request = Request(memory=Memory(units, 1024), cards=cards)
        one = job(name, uid=uid, request=request, requested_at=self.now, time_limit_s=limit_s)
        effects = self.broker.submit([one], self.now)
        self.broker.confirm(name, self.now)
        return effects

    def ask(self, uid: int, message: object) -> object:
        """Return the answer to a request. Raises FenkaError."""
        return self.requests.answer(
            uid,
            uid,
            message,  # type: ignore[arg-type]
            self.now,
            owner=uid == ROOT,
        )

    def book(self, start: str, end: str, cards: int = 2, **fields: object) -> protocol.BookingView:
        """Book as root."""
        message = protocol.BookCards(cards, start, end, **fields)  # type: ignore[arg-type]
        answer = self.ask(ROOT, message)
        assert isinstance(answer, protocol.BookingsListed)
        return answer.bookings[0]

    def listed(self) -> list[protocol.BookingView]:
        """Return all bookings."""
        answer = self.ask(ROOT, protocol.GetBookings())
        assert isinstance(answer, protocol.BookingsListed)
        return answer.bookings

    def state(self, name: str) -> str:
        """Return the state of a job."""
        return self.broker.jobs[name].state

    def pass_to(self, moment: float) -> None:
        """Set the clock, and do what the daemon's loop does."""
        self.now = moment
        if self.policies.tick(moment):
            self.broker.reschedule(moment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without users.toml."""
    return Machine(tmp_path)


def berlin(day: int, hour: int, minute: int = 0, month: int = 12) -> float:
    """Unix seconds of a clock in Berlin, 2026."""
    return datetime(2026, month, day, hour, minute, tzinfo=BERLIN).timestamp()


# ---- users.toml ----


def test_bad_file_keeps_the_old_caps(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a reload and over a restart. Without an earlier file the daemon does not start."""
    assert machine.policies.caps(str(ALICE)) == NO_CAPS
    machine.write("version = 1\nuser.'*'.cards = 2\n")
    machine.policies.reload()
    assert machine.policies.caps(str(ALICE)).cards == 2
    assert machine.policies.caps(str(ROOT)) == NO_CAPS, "root is exempt"
    assert machine.policies.caps("0") == NO_CAPS
    machine.write("version = 1\nuser.'*'.card = 1\n")
    machine.policies.reload()
    assert machine.policies.caps(str(ALICE)).cards == 2
    said = capsys.readouterr().err
    assert "users.toml, line 2: user.*.card is not known: did you mean cards?" in said
    machine.start()
    assert machine.policies.caps(str(ALICE)).cards == 2
    (machine.place / "users.toml").unlink()
    machine.policies.reload()
    assert machine.policies.caps(str(ALICE)) == NO_CAPS
    machine.write("version = 3\n")
    with pytest.raises(InvalidUsersFile, match="line 1: version must be 1, not 3"):
        machine.start()


def test_capped_job_starts_when_the_cap_is_raised(machine: Machine) -> None:
    """8616 of 10000 MiB are held; with 40 GiB 8616 more are allowed."""
    machine.write("version = 1\nuser.'*'.memory = '10000MiB'\n")
    machine.policies.reload()
    machine.submit("a1", ALICE, 8)
    machine.submit("a2", ALICE, 8)
    assert (
        machine.broker.reason(machine.broker.jobs["a2"]) == "61001 holds 8616 of at most 10000 MiB"
    )
    (rejected,) = machine.submit("a3", ALICE, 14)
    assert isinstance(rejected, RejectJob)
    assert rejected.final
    machine.write("version = 1\nuser.61001.memory = '40GiB'\n")
    machine.policies.reload()
    machine.broker.reschedule(machine.now)
    assert machine.state("a2") == "starting"


def test_job_that_ends_lets_the_user_s_next_one_start(machine: Machine) -> None:
    """What was placed is counted back, also for what-if answers."""
    machine.write("version = 1\nuser.'*'.cards = 1\n")
    machine.policies.reload()
    machine.submit("a1", ALICE)
    machine.submit("a2", ALICE)
    result = machine.broker.rehearse(["a1"], (), machine.now)
    assert [name for name, _ in result.placed] == ["a2"]
    effects = machine.broker.on_exit("a1", machine.now)
    assert [e.jobs[0].name for e in effects if isinstance(e, GrantLease)] == ["a2"]


# ---- card-hours ----


def test_card_hours_survive_restarts_and_end_at_midnight(machine: Machine) -> None:
    """One card from 12:00; the daemon is killed at 13:00 and starts at 14:00; then two hours are used."""
    machine.write("version = 1\nuser.'*'.card_hours_per_day = 2\n")
    machine.policies.reload()
    machine.submit("a1", ALICE)
    machine.pass_to(SATURDAY + HOUR)
    living = machine.broker.jobs["a1"]
    machine.now += HOUR
    machine.start()
    machine.broker.restore([living], machine.now)
    assert machine.policies.hours(str(ALICE), machine.now) == pytest.approx(2)
    machine.submit("a2", ALICE, 1)
    assert machine.broker.reason(machine.broker.jobs["a2"]) == (
        "61001 has used 2 of at most 2 card-hours since midnight"
    )
    assert machine.state("a1") == "running", "what runs goes on"
    machine.pass_to(berlin(29, 0, 0, month=11) + 1)
    assert machine.state("a2") == "starting"
    assert machine.policies.hours(str(ALICE), machine.now) == pytest.approx(1 / HOUR, rel=0.1)


def test_job_that_ended_without_a_daemon_counts_until_the_next_one(machine: Machine) -> None:
    """Killed at 13:00, started at 15:00: three hours, since nobody knows when it ended."""
    machine.write("version = 1\nuser.'*'.card_hours_per_day = 9\n")
    machine.policies.reload()
    machine.submit("a1", ALICE)
    machine.pass_to(SATURDAY + HOUR)
    lost = machine.broker.jobs["a1"]
    machine.now += 2 * HOUR
    machine.start()
    machine.broker.count_unobserved(lost, machine.now)
    assert machine.policies.hours(str(ALICE), machine.now) == pytest.approx(3)


def test_yesterday_s_count_is_not_taken_over(machine: Machine) -> None:
    """A daemon that starts on the next day begins with nothing, and with nothing of a damaged clock."""
    machine.submit("a1", ALICE)
    machine.pass_to(SATURDAY + HOUR)
    machine.broker.on_exit("a1", machine.now)
    machine.policies.save_use()
    machine.now += 24 * HOUR
    machine.start()
    assert machine.policies.hours(str(ALICE), machine.now) == 0


# ---- bookings ----


def test_booking_is_for_the_next_such_day(machine: Machine) -> None:
    """It is on disk, in the list, and gone when it has ended."""
    booking = machine.book("fri 09:00", "17:00")
    assert (booking.when, booking.start) == ("Fri 4 Dec 09:00 to 17:00", berlin(4, 9))
    assert (booking.card_indices, booking.certain) == ([1, 2], True)
    machine.start()
    assert [view.id for view in machine.listed()] == [booking.id]
    machine.pass_to(berlin(4, 17) - 1)
    assert [view.id for view in machine.listed()] == [booking.id]
    machine.pass_to(berlin(4, 17))
    assert machine.listed() == []
    assert not (machine.place / "state" / "bookings.json").exists()


def test_reason_names_the_booking(machine: Machine) -> None:
    """Cards 1 and 2 are booked, and 0 is in use."""
    booking = machine.book("fri 09:00", "17:00", audience="user:61002")
    machine.submit("r0", ALICE)
    machine.submit("r1", ALICE)
    name = machine.policies.name(str(ROOT))
    assert machine.broker.reason(machine.broker.jobs["r1"]) == (
        "no GPU fits: 2 of 3 are reserved for requests before it, 1 has too little memory; cards 1, 2 are "
        f"booked by {name} for user:61002, Fri 4 Dec 09:00 to 17:00 ({booking.id})"
    )
    # Two hours before it one hour fits, and ends in time.
    machine.pass_to(berlin(4, 7))
    machine.submit("short", ALICE, 14, HOUR)
    assert machine.state("short") == "running"
    machine.submit("long", ALICE, 14, 2 * HOUR)
    assert machine.state("long") == "waiting"


def test_members_have_its_cards_while_it_lasts_also_after_a_restart(machine: Machine) -> None:
    """r0 of a stranger is on the third card. Waiting jobs start when the booking begins and ends."""
    machine.book("fri 09:00", "17:00", audience="user:61002")
    for name, uid in (("r0", ALICE), ("r1", ALICE), ("b0", BOB)):
        machine.submit(name, uid, 14, None)
    states = {name: one.state for name, one in machine.broker.jobs.items()}
    assert states == {"r0": "running", "r1": "waiting", "b0": "waiting"}
    machine.pass_to(berlin(4, 9))
    assert machine.state("b0") == "starting"
    assert machine.state("r1") == "waiting"
    jobs = [*machine.broker.jobs.values()]
    named = [view.card_indices for view in machine.listed()]
    machine.now += 60
    machine.start()
    machine.broker.restore(jobs, machine.now)
    machine.broker.reschedule(machine.now)
    assert [view.card_indices for view in machine.listed()] == named
    assert machine.state("r1") == "waiting"
    machine.pass_to(berlin(4, 17))
    assert machine.state("r1") == "starting"


def test_weekly_booking_comes_again_at_the_same_clock(machine: Machine) -> None:
    """From summer time to winter time: both Fridays at 09:00. Jobs without a limit get none of its cards."""
    machine.now = berlin(22, 12, month=10)
    machine.book("fri 09:00", "17:00", cards=2, weekly=True)
    starts = [item.start for item in machine.policies.occurrences(machine.now)]
    assert starts[:2] == [berlin(23, 9, month=10), berlin(30, 9, month=10)]
    assert starts[1] - starts[0] == (7 * 24 + 1) * HOUR
    machine.pass_to(berlin(23, 18, month=10))
    machine.submit("r0", ALICE, cards=2)
    assert machine.state("r0") == "waiting"
    machine.submit("r1", ALICE, limit_s=HOUR)
    assert machine.state("r1") == "running"
    (view,) = machine.listed()
    assert view.when == "Fri 30 Oct 09:00 to 17:00"
    machine.pass_to(berlin(30, 12, month=12))
    (view,) = machine.listed()
    assert view.start == datetime(2027, 1, 1, 9, 0, tzinfo=BERLIN).timestamp()


def test_zone_of_the_machine_counts(machine: Machine) -> None:
    """09:00 is ten in Berlin when the machine's clock is UTC; it may change under the daemon."""
    booking = machine.book("fri 09:00", "17:00")
    machine.zone = UTC
    machine.policies.reload()
    (moved,) = machine.listed()
    assert moved.start - booking.start == HOUR
    assert moved.when == booking.when


def test_zone_is_read_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """TZ counts first; a name that is none is no error."""
    monkeypatch.setenv("TZ", ":America/New_York")
    assert machine_zone() == ZoneInfo("America/New_York")
    monkeypatch.setenv("TZ", "nowhere/at-all")
    assert machine_zone() == UTC
    monkeypatch.setenv("TZ", "../../etc/passwd")
    assert machine_zone() == UTC
    monkeypatch.delenv("TZ")
    assert machine_zone() is not None


Asked = Callable[[Machine], object]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (("fri 09:00", "17:00", 3), r"only 1 of 3 cards are certain .* on Fri 4 Dec 09:00: .*"),
        (("fri 09:00", "17:00", 4), r"this machine has 3 cards that can be booked, not 4: .*"),
        (("fri 09:00", "17:00", 0), "--cards must be 1 or more, not 0"),
        (("fri 09:00", "fri 09:00", 1, {"weekly": True}), "a weekly booking is shorter .*"),
        (("fri 09:00", "2026-12-03 17:00", 1), r"the booking would end at 2026-12-03 17:00, .*"),
        (("2026-11-02 09:00", "2026-11-02 10:00", 1), r"2026-11-02 10:00 is past: .*"),
        (("2028-12-03 09:00", "17:00", 1), r"2028-12-03 is more than a year ahead: .*"),
        (("2027-03-28 02:30", "17:00", 1), r"there is no 02:30 on 2027-03-28.*"),
        (("soon", "17:00", 1), r"'soon' is no time: .*"),
        (("fri 09:00", "17:00", 1, {"audience": "team"}), r"--for names a group or user as .*"),
        (
            ("fri 09:00", "17:00", 1, {"audience": "group:no-such"}),
            "this machine has no group no-such",
        ),
        (("fri 09:00", "17:00", 1, {"end_others_s": -1.0}), "--end-others is a time of 24h .*"),
        (("fri 09:00", "17:00", 1, {"end_others_s": float("nan")}), "--end-others is a time .*"),
    ],
)
def test_booking_is_refused_in_one_sentence(
    machine: Machine, fields: tuple[object, ...], sentence: str
) -> None:
    """And nothing is changed. train has no time limit, sweep ends a week later."""
    machine.submit("train", ALICE)
    machine.submit("sweep", BOB, 14, 7 * 24 * HOUR)
    machine.submit("short", BOB, 14, HOUR)
    start, end, cards, *more = fields
    options = more[0] if more else {}
    assert isinstance(options, dict)
    with pytest.raises(FenkaError, match=f"^{sentence}$"):
        machine.book(str(start), str(end), cards, **options)  # type: ignore[arg-type]
    assert machine.listed() == []
    assert not (machine.place / "state" / "bookings.json").exists()


def test_refusal_names_the_jobs_in_the_way(machine: Machine) -> None:
    """Those without a limit, and those that may run longer. root may have them ended."""
    machine.submit("train", ALICE)
    machine.submit("sweep", BOB, 14, 7 * 24 * HOUR)
    with pytest.raises(
        FenkaError, match=r"train of 61001 has no time limit and sweep of 61002 may run"
    ):
        machine.book("fri 09:00", "17:00")
    booking = machine.book("fri 09:00", "17:00", end_others_s=600.0)
    assert booking.certain
    (booked,) = machine.policies.booked
    ended = machine.broker.running_beyond(berlin(4, 9), booked.cards)
    assert len(ended) == 1, "one card is idle, and one of both jobs has to go"
    assert machine.policies.next_boundary(machine.now) == berlin(4, 9) - 600


def test_jobs_in_the_way_are_ended_from_the_lead_on_until_the_end(machine: Machine) -> None:
    """Ten minutes before 09:00, alice's; not bob's, whom the booking is for, nor anybody's after its end."""
    machine.submit("a", ALICE, 7)
    machine.submit("b", BOB, 7)
    machine.book("fri 09:00", "17:00", 3, audience="user:61002", end_others_s=600.0)

    def ended() -> list[tuple[str, float]]:
        return [(job.name, at) for job, _, at in machine.requests.jobs_to_end(machine.now)]

    for moment, expected in (
        (berlin(4, 8, 49), []),
        (berlin(4, 8, 50), [("a", berlin(4, 9))]),
        (berlin(4, 10), [("a", berlin(4, 10))]),
    ):
        machine.pass_to(moment)
        assert ended() == expected
    machine.broker.end_by(machine.broker.jobs["a"], machine.now)
    assert ended() == []
    machine.pass_to(berlin(4, 17))
    assert ended() == []
    assert machine.policies.booked == []


def test_only_who_is_named_may_book_and_cancel(machine: Machine) -> None:
    """Bob may book, for others too; he may cancel his own, and root any. Only root ends others."""
    message = protocol.BookCards(1, "fri 09:00", "17:00")
    with pytest.raises(FenkaError, match="61002 may not book cards: ask root"):
        machine.ask(BOB, message)
    machine.write("version = 1\nbook.may = ['user:61002']\n")
    machine.policies.reload()
    answer = machine.ask(BOB, message)
    assert isinstance(answer, protocol.BookingsListed)
    (booking,) = answer.bookings
    assert booking.audience == "user:61002"
    with pytest.raises(FenkaError, match="only root may end others' jobs"):
        machine.ask(BOB, protocol.BookCards(1, "sat 09:00", "17:00", end_others_s=1.0))
    with pytest.raises(FenkaError, match="belongs to 61002: only they and root"):
        machine.ask(ALICE, protocol.CancelBooking(booking.id))
    with pytest.raises(FenkaError, match="there is no booking b: "):
        machine.ask(BOB, protocol.CancelBooking("b"))
    machine.ask(BOB, protocol.CancelBooking(booking.id))
    assert machine.listed() == []
    assert machine.changes == 2


def test_user_cannot_book_when_he_has_many_bookings(machine: Machine) -> None:
    """Others may still book, and root has no limit but the machine's."""
    machine.write("version = 1\nbook.may = ['user:61001', 'user:61002']\n")
    machine.policies.reload()
    days = [
        f"{datetime.fromtimestamp(machine.now + number * 86400, BERLIN):%Y-%m-%d} 09:00"
        for number in range(1, 23)
    ]
    for day in days[:MAX_BOOKINGS_PER_USER]:
        machine.ask(BOB, protocol.BookCards(1, day, "10:00"))
    with pytest.raises(FenkaError, match="you have 20 bookings, the limit for one user"):
        machine.ask(BOB, protocol.BookCards(1, days[-2], "10:00"))
    machine.ask(ALICE, protocol.BookCards(1, days[-1], "10:00"))


def test_quota_is_one_s_own_and_root_s_everybody_s(machine: Machine) -> None:
    """4308 of 10000 MiB, 4/14 of a card; for an hour 4308/15079 = 0.2857 card-hours."""
    machine.write("version = 1\nuser.61001 = {memory = '10000MiB', time_limit = '8h'}\n")
    machine.policies.reload()
    machine.submit("a", ALICE, 4, HOUR)
    machine.submit("b", BOB, 14)
    machine.pass_to(SATURDAY + HOUR)
    own = machine.ask(ALICE, protocol.GetQuotas())
    assert isinstance(own, protocol.QuotasListed)
    (quota,) = own.quotas
    assert (quota.memory_mib, quota.memory_at_most_mib) == (4308, 10000)
    assert quota.cards == pytest.approx(4308 / T4_MIB, abs=1e-6)
    assert quota.card_hours == pytest.approx(4308 / T4_MIB, abs=1e-6)
    assert (quota.time_limit_s, quota.time_limit_at_most_s) == (8 * HOUR, 8 * HOUR)
    assert quota.cards_at_most is None
    every = machine.ask(ROOT, protocol.GetQuotas())
    assert isinstance(every, protocol.QuotasListed)
    assert [row.uid for row in every.quotas] == [ALICE, BOB]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"bookings": 3}', '{"bookings": [{"id": 1}]}', "[" * 9999]
)
def test_damaged_record_of_bookings_stops_the_start(machine: Machine, content: str) -> None:
    """With what to do. Silently forgotten bookings would be worse."""
    machine.book("fri 09:00", "17:00")
    (machine.place / "state" / "bookings.json").write_text(content)
    with pytest.raises(
        InvalidState,
        match=r"bookings.json .*: remove it, start again, and book again|"
        r"bookings.json .*; remove it, start again, and book again",
    ):
        machine.start()


def test_records_have_a_version(machine: Machine) -> None:
    """The next release may write them otherwise."""
    machine.book("fri 09:00", "17:00")
    record = json.loads((machine.place / "state" / "bookings.json").read_text())
    assert record["version"] == 1
    assert record["bookings"][0]["start"] == "2026-12-04T09:00:00"
