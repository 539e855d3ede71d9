"""A ledger stays consistent whatever records it is given."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.core.evaluate import place
from fenka.core.inventory import Node
from fenka.core.ledger import Conflict, EntryState, Ledger
from fenka.core.request import Placement, Request
from fenka.core.usage import NO_USAGE
from tests.core.builders import (
    SIZES,
    T4_MIB,
    card,
    device,
    exact,
    node,
    piece,
    placement,
    recomputed,
    requests,
    whole,
)


@pytest.mark.parametrize(
    "record",
    [
        # 15079 - (-1) would be 15080 MiB for others
        placement(piece(0, -1)),
        # and 101 percent
        placement(piece(0, 1, -1)),
        replace(placement(piece(0, 1)), cpu_milli=-1),
        replace(placement(piece(0, 1)), host_memory_mib=-1),
    ],
)
def test_record_is_a_conflict_when_an_amount_is_negative(record: Placement) -> None:
    """Others would be given what the card does not have."""
    ledger = Ledger([node(T4_MIB)])
    with pytest.raises(Conflict) as caught:
        ledger.adopt("x", record)
    assert str(caught.value) == "amounts of a placement cannot be negative"
    assert ledger.entries == {}
    assert ledger.card_usage("a", device(0)) == NO_USAGE


@pytest.mark.parametrize("request_", [exact(100, cards=2), whole(2), Request(compute=3)])
def test_totals_are_as_before_when_a_placement_is_released(request_: Request) -> None:
    """The same request is placed the same again."""
    two = node(T4_MIB, T4_MIB)
    ledger = Ledger([two])
    first = place(ledger, request_, "binpack", [two])
    assert isinstance(first, Placement)
    ledger.assume("x", first, 1)
    assert ledger.card_usage("a", device(0)) != NO_USAGE
    ledger.release("x")
    assert (ledger.card_usage("a", device(0)), ledger.card_usage("a", device(1))) == (
        NO_USAGE,
        NO_USAGE,
    )
    assert place(ledger, request_, "binpack", [two]) == first


def fleet_node(name: str, models: list[str], cpu: int | None, memory: int | None) -> Node:
    """Return a node with cards of these models."""
    cards = (card(index, SIZES[it], node=name, model=it) for index, it in enumerate(models))
    return Node(name, tuple(cards), cpu, memory)


NODES = (fleet_node("n0", sorted(SIZES), 8000, 20000), fleet_node("n1", ["Tesla T4"], None, None))
IDS = st.sampled_from([f"id{number}" for number in range(6)])


@st.composite
def any_placements(draw: st.DrawFn) -> Placement:
    """Draw placements that no policy would make: wrong nodes, cards and sizes."""
    name = draw(st.sampled_from(["n0", "n0", "n1", "n2"]))
    pieces = []
    for _ in range(draw(st.integers(0, 3))):
        mib = draw(st.integers(-9, 9) | st.integers(1, 17000))
        index, compute = draw(st.integers(0, 3)), draw(st.integers(-1, 101))
        pieces.append(piece(index, mib, compute, name=name))
    return Placement(
        name,
        tuple(pieces),
        draw(st.integers(-1, 5000)),
        draw(st.integers(-1, 12000)),
        draw(st.booleans()),
    )


class Bookkeeping(RuleBasedStateMachine):
    """Any calls of a ledger in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NODES)
        self.now = 0.0

    def shown(self) -> object:
        """Return all that the ledger shows."""
        cards = [self.ledger.card_usage(it.name, one.uuid) for it in NODES for one in it.cards]
        return self.ledger.entries, cards, [self.ledger.host_usage(it.name) for it in NODES]

    def attempt(self, change: Callable[[], object]) -> None:
        """Try a change. A refusal leaves no trace but its sentence."""
        before = self.shown()
        refusal = None
        try:
            change()
        except Conflict as why:
            refusal = str(why)
        assert refusal is None or (refusal and self.shown() == before)

    @rule(name=IDS, request_=requests(), policy=st.sampled_from(["binpack", "spread"]))
    def assume_what_is_placed(self, name: str, request_: Request, policy: str) -> None:
        """Assume what `place` returns: the ledger accepts that."""
        verdict = place(self.ledger, request_, policy, NODES)
        if isinstance(verdict, Placement) and self.ledger.state(name) is EntryState.ABSENT:
            self.ledger.assume(name, verdict, self.now + 5)

    @rule(name=IDS, record=any_placements(), expires=st.none() | st.integers(0, 50))
    def adopt_anything(self, name: str, record: Placement, expires: int | None) -> None:
        """Adopt a record of unknown quality."""
        self.attempt(lambda: self.ledger.adopt(name, record, expires))

    @rule(name=IDS)
    def confirm(self, name: str) -> None:
        """Confirm any id."""
        self.attempt(lambda: self.ledger.confirm(name))

    @rule(name=IDS)
    def release(self, name: str) -> None:
        """Release any id."""
        self.attempt(lambda: self.ledger.release(name))

    @precondition(lambda self: self.ledger.entries)
    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        """Let time pass: assumptions expire, and nothing else."""
        self.now += seconds
        before = self.ledger.entries
        due = {
            name
            for name, entry in before.items()
            if entry.expires_at is not None and entry.expires_at <= self.now
        }
        assert set(self.ledger.expire(self.now)) == due
        assert set(self.ledger.entries) == set(before) - due

    @invariant()
    def totals_are_the_sum_of_entries(self) -> None:
        """Recompute the totals from the entries alone."""
        expected = recomputed(self.ledger.entries.values())
        for it in NODES:
            for one in it.cards:
                where = it.name, one.uuid
                assert self.ledger.card_usage(*where) == expected.get(where, NO_USAGE)
                assert self.ledger.card_usage(*where) == expected.get(where, NO_USAGE)

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        """Check memory, compute, whole cards and the host."""
        for it in NODES:
            for one in it.cards:
                used = self.ledger.card_usage(it.name, one.uuid)
                assert 0 <= used.memory_mib <= one.memory_mib
                assert 0 <= used.compute <= one.compute
                assert used.whole == 0 or (used.whole, used.holders) == (1, 1)
            cpu, memory = self.ledger.host_usage(it.name)
            assert min(cpu, memory) >= 0
            assert it.cpu_milli is None or cpu <= it.cpu_milli
            assert it.memory_mib is None or memory <= it.memory_mib


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
