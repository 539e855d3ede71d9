"""What is in use by no lease is granted to nobody, over sequences of grants, ends and strangers."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.isolation.driver_usage import (
    HOLD_S,
    STEPS,
    UnleasedProgram,
    UnleasedTracker,
    measure,
    tolerance_mib,
)
from fenka.workstation.broker import Broker, GrantLease, RejectJob
from fenka.workstation.job import Job
from fenka.workstation.protocol import JobQueued
from tests.builders import job

CARD_MIB = 15079
CARD = Card(0, DeviceId("GPU-0"), "Tesla T4", CARD_MIB)


class Machine:
    """A card, its daemon's broker, and what really happens on the card."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards or (CARD,)
        self.broker = Broker(Node("here", self.cards), "binpack")
        self.tracker = UnleasedTracker()
        self.now = 0.0
        self.used: dict[str, int] = {}
        """What each job's processes use of the first card."""
        self.strangers: dict[str, int] = {}
        self.unattributed_mib = 0

    def observe(self) -> None:
        """Take a sample, as the daemon does."""
        first = self.cards[0]
        used = sum(self.used.values()) + sum(self.strangers.values()) + self.unattributed_mib
        programs = [UnleasedProgram(name, mib) for name, mib in self.strangers.items()]
        slices = self.broker.leased_mib(first.uuid)
        measured = measure(first.memory_mib, used, list(self.used.values()), slices, programs)
        self.tracker.update(first.uuid, first.memory_mib, measured, self.now)
        taken = self.tracker.counted(first.uuid).total_mib
        card = replace(first, unleased_mib=taken)
        sentences = {first.uuid: self.tracker.shown(first.uuid).sentence()}
        self.broker.update_node(Node("here", (card, *self.cards[1:])), self.now, sentences)

    def submit(self, name: str, mib: int, *, wait: bool = False) -> str:
        """Request a slice. Return why it is not granted; empty if it is."""
        self.observe()
        effects = self.broker.submit([job(name, request=Request(Memory(mib)))], self.now, wait=wait)
        if any(isinstance(effect, GrantLease) for effect in effects):
            self.broker.confirm(name, self.now)
            self.used[name] = 0
            return ""
        (effect,) = (e for e in effects if isinstance(e, RejectJob | JobQueued))
        return effect.reason

    def end(self, name: str, left_mib: int = 0) -> None:
        """End a job's processes, which leave memory in use."""
        del self.used[name]
        self.unattributed_mib += left_mib
        self.observe()
        self.broker.on_exit(name, self.now)


def test_whole_of_each_slice_counts_when_several_jobs_leave_memory_behind() -> None:
    """What a job has left behind is not explained by what another one could still have used."""
    machine = Machine()
    for name in ("a", "b", "c"):
        assert machine.submit(name, 4308) == ""
    for name in ("a", "b", "c"):
        machine.end(name, 4308)
    assert machine.broker.jobs == {}
    assert machine.submit("d", 10770) == (
        "no GPU fits: 1 of 1 has too little memory; card 0: 12.6 GiB used by no process that the driver names"
    )
    assert machine.submit("d", CARD_MIB - 13160) == ""


def test_rest_of_a_slice_is_free_when_a_stranger_holds_some_memory() -> None:
    """A stranger's 900 MiB do not hold back a slice of the whole card."""
    machine = Machine()
    assert machine.submit("victim", 15079) == ""
    machine.end("victim", 900)
    assert machine.broker.jobs == {}
    assert machine.submit("next", 14000) == ""


def test_other_card_is_chosen_when_a_stranger_fills_the_first() -> None:
    """Both placement and reservations leave out what the stranger uses."""
    machine = Machine(CARD, replace(CARD, index=1, uuid=DeviceId("GPU-1")))
    machine.strangers["python"] = 12288
    assert machine.submit("a", 4000) == ""
    assert [piece.card for piece in machine.broker.jobs["a"].slices] == [1]
    reason = "card 0: 12.0 GiB used by python, no lease"
    assert machine.submit("b", 14000, wait=True).endswith(
        f"2 of 2 have too little memory; {reason}"
    )
    status = machine.broker.queue_status(machine.broker.jobs["b"])
    assert status
    assert status.reservation
    assert status.reservation.cards == {"GPU-1"}
    machine.strangers.clear()
    machine.observe()
    assert [piece.card for piece in machine.broker.jobs["b"].slices] == [0]


def test_whole_card_is_granted_when_only_a_desktop_uses_it() -> None:
    """A desktop shares its card with one program; other programs do not."""
    broker = Broker(Node("here", (replace(CARD, unleased_mib=700, drawn_mib=700),)), "binpack")
    whole: list[Job] = [job("a", request=Request(whole=True))]
    assert any(isinstance(effect, GrantLease) for effect in broker.submit(whole, 0))
    assert [piece.memory_mib for piece in whole[0].slices] == [CARD_MIB - 700]
    broker = Broker(Node("here", (replace(CARD, unleased_mib=1400, drawn_mib=700),)), "binpack")
    (queued,) = broker.submit([job("a", request=Request(whole=True))], 0)
    assert isinstance(queued, JobQueued)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "use", "end", "stranger", "leave", "wait", "release"]),
        st.integers(0, 5),
        st.integers(0, 100),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(operations=OPERATIONS)
def test_memory_in_use_is_granted_to_nobody_over_any_sequence(
    operations: list[tuple[str, int, int]],
) -> None:
    """After each grant all slices fit beside what no lease uses; what is free is granted again."""
    machine = Machine()
    for number, (kind, which, percent) in enumerate(operations):
        names = sorted(machine.used)
        name = names[which % len(names)] if names else ""
        amount = CARD_MIB * percent // 100
        if kind == "submit" and amount:
            if machine.submit(f"job{number}", amount) == "":
                outside = machine.unattributed_mib + sum(machine.strangers.values())
                slices = machine.broker.leased_mib(CARD.uuid)
                assert slices + outside <= CARD_MIB + tolerance_mib(CARD_MIB)
        elif kind == "use" and name:
            (piece,) = machine.broker.jobs[name].slices
            machine.used[name] = piece.memory_mib * percent // 100
        elif kind in ("end", "leave") and name:
            left = machine.used[name] if kind == "leave" else 0
            machine.end(name, left)
        elif kind == "stranger":
            machine.strangers[f"s{which}"] = amount // 4
        elif kind == "wait":
            machine.now += percent / 10
        elif kind == "release":
            machine.unattributed_mib = machine.unattributed_mib * percent // 100
            machine.strangers.pop(f"s{which}", None)
    for name in sorted(machine.used):
        machine.end(name)
    # The highest amount of the first HOLD_S counts for the second.
    for _ in range(4):
        machine.observe()
        machine.now += HOLD_S
    outside = machine.unattributed_mib + sum(machine.strangers.values())
    # Each of the two amounts is rounded up to one step.
    free = CARD_MIB - outside - 2 * (CARD_MIB // STEPS + 1)
    if free > 0:
        assert machine.submit("last", free) == ""
