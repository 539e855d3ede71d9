"""The lifecycle of jobs, without a daemon."""

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.workstation.broker import (
    GRACE_S,
    Broker,
    Effect,
    EvictGang,
    GrantLease,
    RecordEnd,
    RejectJob,
    RemoveLease,
    Terminate,
    UnknownJob,
)
from fenka.workstation.job import Job, JobGang
from fenka.workstation.protocol import GRANT_TTL_S, JobQueued
from tests.builders import job

T4 = Card(0, DeviceId("GPU-0"), "Tesla T4", 15079)


def request(name: str, units: int = 4, *, at: float = 0.0, cards: int = 1, **fields: object) -> Job:
    """A job that requests this number of units of 1 GiB."""
    memory = Request(memory=Memory(units, 1024), cards=cards)
    return job(name, request=memory, requested_at=at, **fields)


def test_user_is_served_later_when_another_has_used_less() -> None:
    """Ann submits twenty jobs of ten seconds each. Bob's job comes later and is next."""
    broker = Broker(Node("here", (T4,)), "binpack")
    for number in range(20):
        broker.submit([request(f"ann{number:02}", 14, at=0, uid=1)], 0)
    for number in range(5):
        broker.confirm(f"ann{number:02}", 10 * number)
        broker.on_exit(f"ann{number:02}", 10 * number + 10)
    broker.submit([request("bob", 14, at=55, uid=2)], 55)
    standing = {name: broker.queue_status(broker.jobs[name]) for name in ("bob", "ann06")}
    assert {name: status.position for name, status in standing.items() if status} == {
        "bob": 1,
        "ann06": 2,
    }
    broker.on_exit("ann05", 60)
    assert broker.jobs["bob"].state == "starting"


def gang(name: str, size: int, like: Job) -> list[Job]:
    """Return the members name/0, name/1 … with the request of `like`."""
    common = JobGang(name, name, size, pid=1, start_ticks=1)
    return [
        msgspec.structs.replace(
            like, id=f"{name}/{rank}", name=f"{name}/{rank}", gang=common, rank=rank
        )
        for rank in range(size)
    ]


def kinds(effects: list[Effect]) -> list[tuple[str, str]]:
    """Return the effects as (kind, job); a gang's grant gives one pair for each member."""
    named: list[tuple[str, str]] = []
    for effect in effects:
        match effect:
            case GrantLease(jobs) | EvictGang(jobs):
                names = [job.name for job in jobs]
            case JobQueued(name=name):
                names = [name]
            case RecordEnd():
                continue
            case _:
                names = [effect.job.name]
        named += [(type(effect).__name__, name) for name in names]
    return named


@pytest.fixture
def broker() -> Broker:
    """A broker with one T4."""
    return Broker(Node("here", (T4,)), "binpack")


def test_fourth_job_is_queued_when_three_fill_the_card(broker: Broker) -> None:
    """Scenario S1: 4 + 4 + 4 of 14 units fit, a fourth 4 does not."""
    for number in range(3):
        assert kinds(broker.submit([request(f"n{number}", at=number)], number)) == [
            ("GrantLease", f"n{number}")
        ]
    (waits,) = broker.submit([request("n3", at=3)], 3)
    # 3 x 4308 = 12924 of 15079 are held, 2155 are left.
    assert waits == JobQueued("n3", "n3", 1, 1, "no GPU fits: 1 of 1 has too little memory")
    assert kinds(broker.on_exit("n1", 4)) == [("RemoveLease", "n1"), ("GrantLease", "n3")]


def test_job_is_rejected_at_once_when_it_can_never_fit(broker: Broker) -> None:
    """A request that no card can ever satisfy is not queued."""
    (denied,) = broker.submit([request("big", 15)], 0)
    assert isinstance(denied, RejectJob)
    assert denied.final
    assert denied.reason == (
        "no GPU fits: 1 of 1 has too little memory; the largest card has 14 units, ask for no more"
    )
    assert broker.jobs == {}


def test_job_is_rejected_with_the_reason_when_it_must_not_wait(broker: Broker) -> None:
    """--no-wait reports why nothing is free, and leaves no entry in the queue."""
    broker.submit([request("a", 14)], 0)
    effects = broker.submit([request("b", 4)], 1, wait=False)
    (denied,) = effects
    assert isinstance(denied, RejectJob)
    assert (denied.reason, denied.final) == ("no GPU fits: 1 of 1 has too little memory", False)
    assert list(broker.jobs) == ["a"]


def test_position_is_reported_when_it_changes(broker: Broker) -> None:
    """Only entries whose position changes are reported."""
    broker.submit([request("a", 14)], 0)
    broker.submit([request("b", 14, at=1)], 1)
    effects = broker.submit([request("c", 2, at=2)], 2)
    assert [(e.name, e.position, e.length) for e in effects if isinstance(e, JobQueued)] == [
        ("b", 1, 2),
        ("c", 2, 2),
    ]
    assert [e.reason for e in effects if isinstance(e, JobQueued)][1] == (
        "no GPU fits: 1 of 1 has too little memory"
    )
    moved = broker.on_exit("b", 3)
    assert [(e.name, e.position) for e in moved if isinstance(e, JobQueued)] == [("c", 1)]


def test_small_job_waits_when_a_larger_one_is_before_it(broker: Broker) -> None:
    """The request for 2 units fits now, but a request for 4 is older."""
    broker.submit([request("a", 12)], 0)
    broker.submit([request("b", 4, at=1)], 1)
    (_, small) = broker.submit([request("c", 2, at=2)], 2)
    assert isinstance(small, JobQueued)
    assert small.reason == "no GPU fits: 1 of 1 is reserved for requests before it"
    assert kinds(broker.on_exit("a", 3)) == [
        ("RemoveLease", "a"),
        ("GrantLease", "b"),
        ("GrantLease", "c"),
    ]


def test_slice_does_not_grow_when_its_card_is_reserved_for_an_earlier_request(
    broker: Broker,
) -> None:
    """The request that waits keeps its place, but for the daemon's owner and jobs that end before it."""
    broker.submit([request("a", 4, time_limit_s=100)], 0)
    broker.submit([request("b", 4)], 0)
    first, second = broker.jobs["a"], broker.jobs["b"]

    def rejection(job: Job, units: int, *, reserved: bool = False) -> str:
        after = [replace(piece, memory_mib=units * 1024) for piece in job.slices]
        return broker.growth_rejection(job, after, reserved=reserved)

    assert rejection(second, 6) == ""
    broker.submit([request("big", 10, at=1)], 1)
    status = broker.queue_status(broker.jobs["big"])
    assert status
    assert status.reservation
    assert status.reservation.starts_by == 100 + GRACE_S
    assert rejection(second, 6) == "card 0 is reserved for big, which has waited before it"
    assert rejection(second, 4) == rejection(second, 2) == ""
    assert rejection(second, 6, reserved=True) == ""
    assert rejection(first, 6) == "", "it ends before the reservation starts"


def test_slice_does_not_grow_when_no_lease_uses_the_memory(broker: Broker) -> None:
    """Not even for the daemon's owner: it cannot be had."""
    broker.submit([request("a", 4)], 0)
    (card,) = broker.node.cards
    taken = replace(card, unleased_mib=8 * 1024)
    broker.update_node(
        replace(broker.node, cards=(taken,)), 0, {card.uuid: "8.0 GiB used by python"}
    )
    job = broker.jobs["a"]
    after = [replace(piece, memory_mib=8 * 1024) for piece in job.slices]
    reason = "its cards have no room for that now; card 0: 8.0 GiB used by python"
    assert broker.growth_rejection(job, after, reserved=True) == reason
    after = [replace(piece, memory_mib=6 * 1024) for piece in job.slices]
    assert broker.growth_rejection(job, after) == ""


def test_grant_expires_when_it_is_not_confirmed(broker: Broker) -> None:
    """A client that never enters its lease loses it to the next request."""
    broker.submit([request("a", 14)], 0)
    broker.submit([request("b", 14, at=1)], 1)
    assert broker.expire(GRANT_TTL_S - 1) == []
    assert kinds(broker.expire(GRANT_TTL_S)) == [
        ("RemoveLease", "a"),
        ("RejectJob", "a"),
        ("GrantLease", "b"),
    ]
    assert not broker.confirm("a", 31)


def test_grant_does_not_expire_when_it_is_confirmed(broker: Broker) -> None:
    """A confirmed lease lasts as long as its processes."""
    broker.submit([request("a")], 0)
    assert broker.confirm("a", 1)
    assert not broker.confirm("a", 2), "once is enough"
    assert broker.expire(1e9) == []
    assert [job.started_at for job in broker.find("a", 0)] == [1]


def test_leases_and_order_are_kept_when_the_daemon_was_restarted(broker: Broker) -> None:
    """A new daemon continues with the recorded jobs."""
    for number in range(5):
        broker.submit([request(f"n{number}", 6, at=number)], number)
    broker.confirm("n0", 5)
    again = Broker(broker.node, "binpack")
    again.restore(list(reversed(broker.jobs.values())), 10)
    effects = again.reschedule(10)
    waits = [(e.name, e.position) for e in effects if isinstance(e, JobQueued)]
    assert waits == [("n2", 1), ("n3", 2), ("n4", 3)]
    assert again.jobs["n0"].state == "running"
    assert again.jobs["n1"].state == "starting"
    assert again.jobs["n1"].grant_expires_at == 10 + GRANT_TTL_S
    assert kinds(again.replay("n1")) == [("GrantLease", "n1")]
    assert kinds(again.replay("n3")) == [("JobQueued", "n3")]


def test_find_raises_when_the_name_is_unknown(broker: Broker) -> None:
    """An unknown name is an error; an unknown id is ignored."""
    with pytest.raises(UnknownJob, match="no job is called ghost: `fenka ps` lists them"):
        broker.find("ghost", 0)
    assert broker.on_exit("ghost", 0) == []


def order(broker: Broker) -> list[str]:
    """Return the names of pending jobs in the order of the queue."""
    waiting = [job for job in broker.jobs.values() if job.state == "waiting" and job.rank == 0]
    standings = [(broker.queue_status(job), job.display_name) for job in waiting]
    return [
        name for _, name in sorted((status.position, name) for status, name in standings if status)
    ]


def test_queue_is_ordered_by_priority_then_age(broker: Broker) -> None:
    """A priority below 0 is served after all others."""
    broker.submit([request("holder", 14)], 0)
    for at, priority in enumerate((0, -1, 2, 0, 1), start=1):
        broker.submit([request(f"{at}:{priority}", 14, at=at, priority=priority)], at)
    assert order(broker) == ["3:2", "5:1", "1:0", "4:0", "2:-1"]
    assert kinds(broker.on_exit("holder", 9)) == [
        ("RemoveLease", "holder"),
        ("GrantLease", "3:2"),
    ] + [("JobQueued", name) for name in ("5:1", "1:0", "4:0", "2:-1")]


@pytest.mark.parametrize(
    ("name", "priority", "expected"),
    [
        # a, b and c wait with the priorities 0, 0 and -1, in the order of their time.
        ("b", 1, ["b", "a", "c"]),
        ("a", -1, ["b", "a", "c"]),  # among those of -1 it is the oldest
        ("a", -2, ["b", "c", "a"]),
        ("c", 0, ["a", "b", "c"]),  # it has waited less than those of 0
        ("c", 7, ["c", "a", "b"]),
    ],
)
def test_pending_job_moves_when_its_priority_changes(
    broker: Broker, name: str, priority: int, expected: list[str]
) -> None:
    """At once, as if it had been submitted so; the next daemon knows it, too."""
    broker.submit([request("holder", 14, priority=9)], 0)
    for at, (waiting, own) in enumerate((("a", 0), ("b", 0), ("c", -1)), start=1):
        broker.submit([request(waiting, 14, at=at, priority=own)], at)
    broker.prioritize(name, priority, 5)
    assert order(broker) == expected
    again = Broker(broker.node, "binpack")
    again.restore(list(broker.jobs.values()), 6)
    again.reschedule(6)
    assert order(again) == expected
    assert kinds(again.on_exit("holder", 7))[1] == ("GrantLease", expected[0])


def test_pending_job_starts_when_the_one_before_it_gets_a_lower_priority(broker: Broker) -> None:
    """The large one reserves the card until it is behind the small one, which fits: 10 + 4 of 14."""
    broker.submit([request("holder", 10)], 0)
    broker.submit([request("large", 14, at=1)], 1)
    broker.submit([request("small", 4, at=2)], 2)
    assert order(broker) == ["large", "small"]
    assert kinds(broker.prioritize("large", -1, 3)) == [
        ("GrantLease", "small"),
        ("JobQueued", "large"),  # of 1 now
    ]


def test_gang_has_one_priority_when_it_changes(broker: Broker) -> None:
    """It is one entry in the queue, and its members are evicted together."""
    broker.submit([request("holder", 14)], 0)
    broker.submit(gang("g", 3, request("g", at=1)), 1)
    broker.submit([request("a", 14, at=2)], 2)
    broker.prioritize("g", -5, 3)
    assert order(broker) == ["a", "g"]
    assert {job.spec.priority for job in broker.jobs_of("g")} == {-5}


def test_users_are_served_alternately_when_all_wait(broker: Broker) -> None:
    """A user's second request counts as a minute later, so another user's first one precedes it."""
    broker.submit([request("holder", 14, uid=1)], 0)
    for at in (1, 2):
        broker.submit([request(f"ann-{at}", 14, at=at, uid=2)], at)
    # ann-2 counts as of 62, bob's as of 50, and the holder's own next one as of 3 + 60
    broker.submit([request("bob", 14, at=50, uid=3)], 50)
    broker.submit([request("again", 14, at=3, uid=1)], 50)
    assert order(broker) == ["ann-1", "bob", "ann-2", "again"]


@pytest.mark.parametrize(
    ("time_limit_s", "starts"),
    [
        # The holder's cards are free at 0 + 100 + GRACE_S = 110 at the latest, and the short one asks at 20.
        (None, False),
        (80.0, True),  # 20 + 80 + 10 = 110: not after that
        (80.1, False),
    ],
)
def test_job_is_backfilled_when_its_time_limit_allows(
    time_limit_s: float | None, starts: bool
) -> None:
    """Only jobs that certainly end before the reservation may use the reserved card."""
    broker = Broker(Node("here", (T4,)), "binpack")
    broker.submit([request("holder", 10, time_limit_s=100)], 0)
    broker.submit([request("large", 14, at=10)], 10)
    standing = broker.queue_status(broker.jobs["large"])
    assert standing
    assert standing.reservation
    assert standing.reservation.cards == {"GPU-0"}
    assert standing.reservation.starts_by == 100 + GRACE_S
    broker.submit([request("small", 2, at=20, time_limit_s=time_limit_s)], 20)
    assert (broker.jobs["small"].state == "starting") is starts
    assert broker.jobs["small"].deadline == (100.0 if starts else None)
    assert broker.jobs["large"].state == "waiting"


def test_pending_job_reserves_one_card_when_there_are_two() -> None:
    """Both cards are full. The pending job reserves one; a smaller job is served on the other."""
    broker = Broker(Node("here", (T4, Card(1, DeviceId("GPU-1"), "Tesla T4", 15079))), "binpack")
    broker.submit([request("a", 10)], 0)
    broker.submit([request("b", 11, at=1)], 1)
    broker.submit([request("large", 14, at=2)], 2)
    standing = broker.queue_status(broker.jobs["large"])
    # b's card: as many must end as on a's, and b is the larger
    assert standing
    assert standing.reservation
    (named,) = standing.reservation.cards
    broker.submit([request("small", 2, at=3)], 3)
    placement = broker.jobs["small"].placement
    assert placement
    assert [piece.uuid for piece in placement.slices] != [named]


def test_gang_starts_when_all_members_fit(broker: Broker) -> None:
    """The gang is one entry in the queue, and three in the ledger once enough jobs have ended."""
    broker.submit([request("a", 6)], 0)
    (waits,) = broker.submit(gang("g", 3, request("g", at=1)), 1)
    assert isinstance(waits, JobQueued)
    assert (waits.position, waits.length) == (1, 1)
    assert waits.reason == (
        "no GPU fits: 1 of 1 has too little memory; 2 of the gang's 3 would fit together"
    )
    assert set(broker.ledger.entries) == {"a"}
    *_, start = broker.on_exit("a", 2)
    assert isinstance(start, GrantLease)
    assert [job.name for job in start.jobs] == ["g/0", "g/1", "g/2"]
    assert set(broker.ledger.entries) == {"g/0", "g/1", "g/2"}
    assert broker.find("g", 0) == list(start.jobs)
    assert [job.name for job in broker.find("g/1", 0)] == ["g/1"]


def test_gang_is_rejected_when_it_can_never_fit(broker: Broker) -> None:
    """Each member would fit, but not all of them, even on empty cards."""
    members = gang("g", 4, request("g"))
    sentence = "3 of the gang's 4 would fit together, even if nobody else ran"
    assert broker.submit(members, 0) == [RejectJob(members[0], sentence, final=True)]
    assert broker.jobs == {}


def test_members_differ_when_each_has_its_own_request(broker: Broker) -> None:
    """10 + 2 + 2 of 14 units start together; a member that no card could hold is named."""
    members = gang("g", 3, request("g", 2))
    members[1].request = Request(memory=Memory(10, 1024))
    assert kinds(broker.submit(members, 0)) == [
        ("GrantLease", name) for name in ("g/0", "g/1", "g/2")
    ]
    assert [job.slices[0].memory_mib for job in members] == [2154, 10770, 2154]
    others = gang("h", 2, request("h", 2))
    others[1].request = Request(memory=Memory(15, 1024))
    (rejected,) = broker.submit(others, 1)
    assert isinstance(rejected, RejectJob)
    assert rejected.final


def test_gang_is_removed_when_it_must_not_wait(broker: Broker) -> None:
    """The next entry is served."""
    broker.submit([request("a", 6)], 0)
    assert kinds(broker.submit(gang("g", 3, request("g", at=1)), 1, wait=False)) == [
        ("RejectJob", "g/0")
    ]
    assert list(broker.jobs) == ["a"]


def test_running_members_are_terminated_when_the_gang_is_cancelled(broker: Broker) -> None:
    """The gang's process ends while one of three members runs. That member keeps its slice until it ends."""
    broker.submit(gang("g", 3, request("g")), 0)
    broker.confirm("g/1", 1)
    effects = broker.cancel("g", 2)
    assert effects == [
        Terminate(broker.jobs["g/1"]),
        *(effect for effect in effects if isinstance(effect, RecordEnd | RemoveLease)),
    ]
    assert [effect.job.name for effect in effects if isinstance(effect, RemoveLease)] == [
        "g/0",
        "g/2",
    ]
    assert set(broker.ledger.entries) == {"g/1"}
    assert kinds(broker.on_exit("g/1", 3)) == [("RemoveLease", "g/1")]
    assert broker.cancel("g", 4) == []


def test_gang_is_cancelled_when_one_grant_expires(broker: Broker) -> None:
    """The other members are cancelled, too."""
    broker.submit(gang("g", 2, request("g")), 0)
    broker.confirm("g/0", 1)
    assert kinds(broker.expire(GRANT_TTL_S)) == [
        ("Terminate", "g/0"),
        ("RemoveLease", "g/1"),
        ("RejectJob", "g/0"),
    ]


class Lifecycle(RuleBasedStateMachine):
    """Any order of events leaves no card overcommitted and no slice without a job."""

    def __init__(self) -> None:
        super().__init__()
        cards = (T4, Card(1, DeviceId("GPU-1"), "Tesla P4", 7611))
        self.broker = Broker(Node("here", cards), "binpack")
        self.now = 0.0
        self.names = (f"j{number}" for number in itertools.count())
        self.started: set[str] = set()
        self.evicted: set[str] = set()

    def carry_out(self, effects: list[Effect]) -> None:
        """Apply effects as the daemon does: a lease is removed only after it was granted."""
        for effect in effects:
            if isinstance(effect, GrantLease):
                names = {job.id for job in effect.jobs}
                assert not names & self.started
                assert len(names) == (effect.jobs[0].gang.size if effect.jobs[0].gang else 1)
                self.started |= names
            elif isinstance(effect, EvictGang):
                names = {job.id for job in effect.jobs}
                assert names <= self.started
                assert not names & self.evicted
                assert {job.spec.eviction_grace_s for job in effect.jobs} == {10}
                assert names == {job.id for job in self.broker.jobs_of(effect.jobs[0].queue_id)}
                self.evicted |= names
            elif isinstance(effect, RemoveLease):
                self.started.remove(effect.job.id)

    @rule(
        units=st.integers(1, 16),
        cards=st.integers(1, 2),
        size=st.sampled_from([0, 0, 1, 2, 3, 5, -1, -2]),
        priority=st.integers(-1, 1),
        time_limit_s=st.none() | st.floats(1, 100),
        wait=st.booleans(),
    )
    def ask(
        self,
        units: int,
        cards: int,
        size: int,
        priority: int,
        time_limit_s: float | None,
        wait: bool,
    ) -> None:
        """Submit a job, a gang, or one that is evicted (a negative size)."""
        self.now += 1
        name = next(self.names)
        first = request(
            name,
            units,
            at=self.now,
            cards=cards,
            priority=priority,
            time_limit_s=time_limit_s,
            eviction_grace_s=10 if size < 0 else None,
        )
        jobs = gang(name, abs(size), first) if size else [first]
        self.carry_out(self.broker.submit(jobs, self.now, wait=wait))

    @precondition(lambda self: self.broker.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a job's processes, or its wait."""
        name = data.draw(st.sampled_from(sorted(self.broker.jobs)))
        self.carry_out(self.broker.on_exit(name, self.now))

    @precondition(lambda self: self.broker.jobs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """End the process that requested an entry."""
        entries = sorted({job.queue_id for job in self.broker.jobs.values()})
        self.carry_out(self.broker.cancel(data.draw(st.sampled_from(entries)), self.now))

    @precondition(lambda self: self.broker.jobs)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        """Confirm a lease."""
        name = data.draw(st.sampled_from(sorted(self.broker.jobs)))
        self.broker.confirm(name, self.now)

    @precondition(lambda self: self.broker.jobs)
    @rule(data=st.data(), priority=st.integers(-2, 2))
    def prioritize(self, data: st.DataObject, priority: int) -> None:
        """Change the priority of what waits, starts, runs or is evicted."""
        entries = sorted({job.queue_id for job in self.broker.jobs.values()})
        queue_id = data.draw(st.sampled_from(entries))
        self.carry_out(self.broker.prioritize(queue_id, priority, self.now))
        assert {job.spec.priority for job in self.broker.jobs_of(queue_id)} <= {priority}

    @rule(seconds=st.floats(0, 40))
    def pass_time(self, seconds: float) -> None:
        """Let grants expire."""
        self.now += seconds
        self.carry_out(self.broker.expire(self.now))

    @rule()
    def restart(self) -> None:
        """Replace the broker by one that takes over the jobs."""
        jobs = list(self.broker.jobs.values())
        self.broker = Broker(self.broker.node, "binpack")
        self.evicted.clear()
        self.broker.restore(jobs, self.now)
        self.carry_out(self.broker.reschedule(self.now))

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        """The jobs' slices never exceed a card."""
        for card in self.broker.node.cards:
            held = sum(
                piece.memory_mib
                for job in self.broker.jobs.values()
                if job.placement
                for piece in job.placement.slices
                if piece.uuid == card.uuid
            )
            assert held <= card.memory_mib
            assert held == self.broker.ledger.card_usage("here", card.uuid).memory_mib

    @invariant()
    def slices_belong_to_jobs(self) -> None:
        """Exactly the granted jobs whose leases were not removed have placements."""
        placed = {job.id for job in self.broker.jobs.values() if job.placement}
        assert placed == self.started == set(self.broker.ledger.entries)

    @invariant()
    def those_that_wait_are_in_order(self) -> None:
        """All jobs are of one user, so priority and age decide."""
        waiting = [
            job for job in self.broker.jobs.values() if job.state == "waiting" and not job.rank
        ]
        ordered = sorted(waiting, key=lambda job: (-job.spec.priority, job.requested_at))
        assert order(self.broker) == [job.display_name for job in ordered]

    @invariant()
    def gangs_wait_whole(self) -> None:
        """Either all members of a gang are pending, or none."""
        waiting: dict[str, list[Job]] = {}
        for member in self.broker.jobs.values():
            if member.gang:
                waiting.setdefault(member.queue_id, []).append(member)
        for members in waiting.values():
            states = {job.state == "waiting" for job in members}
            assert len(states) == 1
            assert states == {False} or len(members) == members[0].gang.size  # type: ignore[union-attr]

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """Gangs cannot block each other: while jobs are pending, others hold slices."""
        assert self.broker.ledger.entries or not order(self.broker)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- users ----------------------------------------------------------------------------------------------


def test_names_are_each_user_s_own(broker: Broker) -> None:
    """A command finds its user's job first; another's by its id, or by a name that only one has."""
    for uid, job_id in ((1, "ann"), (2, "bob")):
        broker.submit([request(job_id, uid=uid)], 0)
        broker.jobs[job_id].name = "night"
    broker.submit([request("only", uid=2)], 0)
    assert [job.id for job in broker.find("night", 1)] == ["ann"]
    assert [job.id for job in broker.find("night", 2)] == ["bob"]
    assert [job.id for job in broker.find("bob", 1)] == ["bob"]
    assert [job.id for job in broker.find("only", 1)] == ["only"]
    with pytest.raises(UnknownJob, match=r"jobs of 2 users are called night: .* ann or bob"):
        broker.find("night", 3)


def test_user_s_own_job_is_found_when_another_is_called_by_its_id(broker: Broker) -> None:
    """No user can take another's job out of reach by the name of his own."""
    broker.submit([request("1a2b", uid=1)], 0)
    broker.submit([request("x", uid=2)], 0)
    broker.jobs["x"].name = "1a2b"
    assert [job.id for job in broker.find("1a2b", 0)] == ["1a2b"]
    assert [job.id for job in broker.find("1a2b", 2)] == ["x"]


def test_pending_jobs_do_not_start_when_they_are_cancelled_with_what_they_wait_for(
    broker: Broker,
) -> None:
    """All leave the queue before anything is granted."""
    broker.submit([request("a", 14)], 0)
    broker.submit([request("b", 14, at=1)], 1)
    broker.submit([request("c", 2, at=2)], 2)
    broker.submit([request("d", 2, at=3)], 3)
    assert kinds(broker.end([], ["a", "b", "c"], 4)) == [
        ("RemoveLease", "a"),
        ("GrantLease", "d"),
    ]
