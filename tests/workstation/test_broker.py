"""The lifecycle of jobs, without a daemon around it."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.core.cards import Card, Node
from fenka.core.requests import Memory, Request
from fenka.workstation.broker import (
    GRANT_EXPIRES_S,
    Broker,
    Deny,
    Drop,
    Effect,
    Job,
    Start,
    UnknownJob,
    Wait,
)

T4 = Card(0, "GPU-0", "Tesla T4", 15079)


def job(name: str, units: int = 4, *, at: float = 0.0, cards: int = 1) -> Job:
    """A job that asks for so many GiB units."""
    return Job(
        id=name,
        name=name,
        uid=1000,
        pid=1,
        start_ticks=1,
        request=Request(memory=Memory(units, 1024), cards=cards),
        wanted=str(units),
        command=["true"],
        directory="/",
        kind="run",
        isolation="namespace",
        requested_at=at,
    )


def kinds(effects: list[Effect]) -> list[tuple[str, str]]:
    """Effects as (kind, job)."""
    return [(type(effect).__name__, effect.job.name) for effect in effects]


@pytest.fixture
def broker() -> Broker:
    """One T4."""
    return Broker(Node("here", (T4,)), "binpack")


def test_three_run_and_the_fourth_waits(broker: Broker) -> None:
    """Scenario S1: 4 + 4 + 4 of 14 units fit, a fourth 4 does not."""
    for number in range(3):
        assert kinds(broker.ask(job(f"n{number}", at=number), number)) == [("Start", f"n{number}")]
    (waits,) = broker.ask(job("n3", at=3), 3)
    # 3 x 4308 = 12924 of 15079 are held, 2155 are left.
    assert waits == Wait(broker.jobs["n3"], 1, 1, "0/1 GPUs fit: 1 too little memory")
    assert kinds(broker.gone("n1", 4)) == [("Drop", "n1"), ("Start", "n3")]


def test_impossible_requests_are_denied_at_once(broker: Broker) -> None:
    """Nobody waits for what can never come."""
    (denied,) = broker.ask(job("big", 15), 0)
    assert isinstance(denied, Deny)
    assert denied.final
    assert denied.reason == (
        "0/1 GPUs fit: 1 too little memory; the largest card has 14 units, ask for no more"
    )
    assert broker.jobs == {}


def test_no_wait_is_denied_with_the_reason(broker: Broker) -> None:
    """--no-wait says why nothing is free, and leaves nothing behind."""
    broker.ask(job("a", 14), 0)
    effects = broker.ask(job("b", 4), 1, wait=False)
    assert effects == [Deny(effects[0].job, "0/1 GPUs fit: 1 too little memory", final=False)]
    assert list(broker.jobs) == ["a"]


def test_positions_are_told_when_they_change(broker: Broker) -> None:
    """Who moves up hears of it; who does not is left alone."""
    broker.ask(job("a", 14), 0)
    broker.ask(job("b", 14, at=1), 1)
    effects = broker.ask(job("c", 2, at=2), 2)
    assert [(e.job.name, e.position, e.length) for e in effects if isinstance(e, Wait)] == [
        ("b", 1, 2),
        ("c", 2, 2),
    ]
    assert [e.reason for e in effects if isinstance(e, Wait)][1] == (
        "0/1 GPUs fit: 1 too little memory"
    )
    moved = broker.gone("b", 3)
    assert [(e.job.name, e.position) for e in moved if isinstance(e, Wait)] == [("c", 1)]


def test_a_small_request_does_not_overtake(broker: Broker) -> None:
    """2 of the 2 free units would fit, but 4 asked before."""
    broker.ask(job("a", 12), 0)
    broker.ask(job("b", 4, at=1), 1)
    (_, small) = broker.ask(job("c", 2, at=2), 2)
    assert isinstance(small, Wait)
    assert small.reason == "0/1 GPUs fit: 1 reserved for requests that waited longer"
    assert kinds(broker.gone("a", 3)) == [("Drop", "a"), ("Start", "b"), ("Start", "c")]


def test_an_unconfirmed_grant_expires(broker: Broker) -> None:
    """A client that never enters its lease does not keep it; the next one gets it."""
    broker.ask(job("a", 14), 0)
    broker.ask(job("b", 14, at=1), 1)
    assert broker.expire(GRANT_EXPIRES_S - 1) == []
    assert kinds(broker.expire(GRANT_EXPIRES_S)) == [("Drop", "a"), ("Deny", "a"), ("Start", "b")]
    assert not broker.confirm("a", 31)


def test_a_confirmed_grant_does_not_expire(broker: Broker) -> None:
    """It lives as long as its processes."""
    broker.ask(job("a"), 0)
    assert broker.confirm("a", 1)
    assert not broker.confirm("a", 2), "once is enough"
    assert broker.expire(1e9) == []
    assert broker.by_name("a").started_at == 1


def test_restore_keeps_leases_and_order(broker: Broker) -> None:
    """A new daemon goes on where the old one was killed."""
    for number in range(5):
        broker.ask(job(f"n{number}", 6, at=number), number)
    broker.confirm("n0", 5)
    again = Broker(broker.node, "binpack")
    effects = again.restore(list(reversed(broker.jobs.values())), 10)
    waits = [(e.job.name, e.position) for e in effects if isinstance(e, Wait)]
    assert waits == [("n2", 1), ("n3", 2), ("n4", 3)]
    assert again.jobs["n0"].state == "running"
    assert again.jobs["n1"].state == "starting"
    assert again.jobs["n1"].expires_at == 10 + GRANT_EXPIRES_S
    assert kinds(again.resume("n1")) == [("Start", "n1")]
    assert kinds(again.resume("n3")) == [("Wait", "n3")]


def test_unknown_names_are_said_so(broker: Broker) -> None:
    """A name nobody has is a sentence, and an id that is gone is nothing."""
    with pytest.raises(UnknownJob, match="no job is called ghost: `fenka ps` lists them"):
        broker.by_name("ghost")
    assert broker.gone("ghost", 0) == []


class Lifecycle(RuleBasedStateMachine):
    """Any order of events leaves no card overcommitted and no slice without a job."""

    def __init__(self) -> None:
        super().__init__()
        cards = (T4, Card(1, "GPU-1", "Tesla P4", 7611))
        self.broker = Broker(Node("here", cards), "binpack")
        self.now = 0.0
        self.names = (f"j{number}" for number in itertools.count())
        self.started: set[str] = set()

    def carry_out(self, effects: list[Effect]) -> None:
        """As the daemon does: every Drop follows a Start."""
        for effect in effects:
            if isinstance(effect, Start):
                assert effect.job.id not in self.started
                self.started.add(effect.job.id)
            elif isinstance(effect, Drop):
                self.started.remove(effect.job.id)

    @rule(units=st.integers(1, 16), cards=st.integers(1, 2), wait=st.booleans())
    def ask(self, units: int, cards: int, wait: bool) -> None:
        """Somebody asks."""
        self.now += 1
        new = job(next(self.names), units, at=self.now, cards=cards)
        self.carry_out(self.broker.ask(new, self.now, wait=wait))

    @precondition(lambda self: self.broker.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Somebody's processes end, or they give up waiting."""
        name = data.draw(st.sampled_from(sorted(self.broker.jobs)))
        self.carry_out(self.broker.gone(name, self.now))

    @precondition(lambda self: self.broker.jobs)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        """Somebody enters their lease."""
        name = data.draw(st.sampled_from(sorted(self.broker.jobs)))
        self.broker.confirm(name, self.now)

    @rule(seconds=st.floats(0, 40))
    def pass_time(self, seconds: float) -> None:
        """Grants may expire."""
        self.now += seconds
        self.carry_out(self.broker.expire(self.now))

    @rule()
    def restart(self) -> None:
        """The daemon is killed, and the next one takes over."""
        jobs = list(self.broker.jobs.values())
        self.broker = Broker(self.broker.node, "binpack")
        self.carry_out(self.broker.restore(jobs, self.now))

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        """Sum of slices, card by card, from the jobs themselves."""
        for card in self.broker.node.cards:
            held = sum(
                piece.memory_mib
                for it in self.broker.jobs.values()
                if it.placement
                for piece in it.placement.slices
                if piece.uuid == card.uuid
            )
            assert held <= card.memory_mib
            assert held == self.broker.ledger.used("here", card.index).memory_mib

    @invariant()
    def slices_belong_to_jobs(self) -> None:
        """Whoever started and has not been dropped is a job with a placement, and nobody else is."""
        placed = {it.id for it in self.broker.jobs.values() if it.placement}
        assert placed == self.started == set(self.broker.ledger.entries)

    @invariant()
    def those_that_wait_are_in_order(self) -> None:
        """By time of request."""
        waiting = [it for it in self.broker.jobs.values() if it.state == "waiting"]
        ordered = sorted(waiting, key=lambda it: self.broker.queue.position(it.id))
        assert ordered == sorted(waiting, key=lambda it: (it.requested_at, it.id))


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
