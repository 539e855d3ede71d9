"""Transitions of the ledger's entries, what it refuses, and that its totals are those of its entries."""

import itertools
from collections.abc import Callable

import pytest

from fenka.core.ledger import TRANSITIONS, Conflict, Entry, EntryEvent, EntryState, Ledger
from fenka.core.request import Placement
from fenka.core.usage import NO_USAGE, CardUsage, UsageTotals
from tests.core.builders import T4_MIB, device, node, piece, placement

FOUR = placement(piece(0, 4308))
HOST = Placement("a", (), 2000, 4000)


def ledger(*entries: tuple[str, Placement]) -> Ledger:
    """Return a ledger of a T4 with 4 cores and 8000 MiB of host memory, with confirmed entries."""
    made = Ledger([node(T4_MIB, cpu=4000, memory=8000)])
    for entry_id, each in entries:
        made.adopt(entry_id, each)
    return made


def in_state(state: EntryState) -> Ledger:
    """Return a ledger in which x is in this state."""
    made = ledger()
    if state is not EntryState.ABSENT:
        made.assume("x", FOUR, 10)
    if state is EntryState.CONFIRMED:
        made.confirm("x")
    return made


EVENTS: dict[EntryEvent, Callable[[Ledger], object]] = {
    EntryEvent.ASSUME: lambda made: made.assume("x", placement(piece(0, 1)), 20),
    EntryEvent.ADOPT: lambda made: made.adopt("x", placement(piece(0, 1))),
    EntryEvent.CONFIRM: lambda made: made.confirm("x"),
    EntryEvent.RELEASE: lambda made: made.release("x"),
}
"""What a caller can do to one id. EXPIRE comes by time, and passes over who does not expire."""


@pytest.mark.parametrize(("state", "event"), list(itertools.product(EntryState, EVENTS)))
def test_entry_changes_only_when_the_table_has_the_transition(
    state: EntryState, event: EntryEvent
) -> None:
    """Anything else is a Conflict that changes nothing."""
    made = in_state(state)
    before = made.entries, made.card_usage("a", device(0))
    if (state, event) in TRANSITIONS:
        EVENTS[event](made)
        assert made.state("x") is TRANSITIONS[state, event]
    else:
        with pytest.raises(Conflict, match=f"^cannot {event} x: it is {state}$"):
            EVENTS[event](made)
        assert (made.entries, made.card_usage("a", device(0))) == before


@pytest.mark.parametrize(
    ("state", "now", "expired"),
    [
        (EntryState.ABSENT, 1e9, []),
        # it expires at 10: not before, and then at once
        (EntryState.ASSUMED, 9.99, []),
        (EntryState.ASSUMED, 10, ["x"]),
        (EntryState.ASSUMED, 1e9, ["x"]),
        (EntryState.CONFIRMED, 1e9, []),
    ],
)
def test_entry_expires_only_when_it_is_assumed_and_its_time_is_over(
    state: EntryState, now: float, expired: list[str]
) -> None:
    """An expired entry holds nothing."""
    made = in_state(state)
    assert made.expire(now) == expired
    assert made.state("x") is (EntryState.ABSENT if expired else state)
    assert (made.card_usage("a", device(0)) == NO_USAGE) == (
        bool(expired) or state is EntryState.ABSENT
    )
    assert made.expire(now) == []


def test_state_can_be_reached_and_left_when_it_is_in_the_table() -> None:
    """Every life begins and ends with ABSENT, and a confirmed entry does not expire."""
    for state in EntryState:
        assert state in TRANSITIONS.values()
        assert any(old is state for old, _ in TRANSITIONS)
    assert (EntryState.CONFIRMED, EntryEvent.EXPIRE) not in TRANSITIONS


def test_entry_loses_its_expiry_when_it_is_confirmed() -> None:
    """An assumed entry has the expiry that it was given."""
    made = in_state(EntryState.ASSUMED)
    assert made.entries == {"x": Entry(FOUR, EntryState.ASSUMED, 10)}
    made.confirm("x")
    assert made.entries == {"x": Entry(FOUR, EntryState.CONFIRMED, None)}


def test_entry_keeps_its_state_when_another_ledger_adopts_it() -> None:
    """A record that expires is assumed again; one that does not is confirmed."""
    made = ledger()
    made.adopt("assumed", FOUR, 10)
    made.adopt("confirmed", FOUR)
    assert (made.state("assumed"), made.state("confirmed")) == (
        EntryState.ASSUMED,
        EntryState.CONFIRMED,
    )
    assert made.expire(10) == ["assumed"]


def test_id_can_be_used_again_when_it_was_released() -> None:
    """It may have another placement then."""
    made = ledger(("x", FOUR))
    made.release("x")
    made.assume("x", placement(piece(0, T4_MIB)), 10)
    assert made.card_usage("a", device(0)) == CardUsage(T4_MIB, 0, 1)


def test_ledger_stays_when_the_copy_of_its_entries_changes() -> None:
    """Callers try changes out on copies."""
    made = ledger(("x", FOUR))
    made.entries.clear()
    assert (made.state("x"), made.card_usage("a", device(0))) == (
        EntryState.CONFIRMED,
        CardUsage(4308, 0, 1),
    )


WHOLE = placement(piece(0, T4_MIB, 100), whole=True)


@pytest.mark.parametrize(
    ("held", "new"),
    [
        # 15079 - 4308 = 10771
        (FOUR, placement(piece(0, 10771))),
        (placement(piece(0, 1, 40)), placement(piece(0, 1, 60))),
        # compute beside all memory, memory beside all compute
        (placement(piece(0, T4_MIB)), placement(piece(0, 0, 100))),
        (HOST, HOST),
        (Placement("a", (), 4000, 8000), FOUR),
        (placement(), WHOLE),
    ],
)
def test_placement_is_held_when_it_just_fits(held: Placement, new: Placement) -> None:
    """Memory, compute and the host are used to the last MiB, percent and core."""
    made = ledger(("held", held))
    made.assume("new", new, 10)
    assert made.state("new") is EntryState.ASSUMED


NO_ROOM = "card 0 of a has no room for this slice"


@pytest.mark.parametrize(
    ("held", "new", "sentence"),
    [
        # 10772 + 4308 = 15080 = 15079 + 1
        (FOUR, placement(piece(0, 10772)), NO_ROOM),
        # 40 + 61 = 101
        (placement(piece(0, 1, 40)), placement(piece(0, 1, 61)), NO_ROOM),
        (WHOLE, placement(piece(0, 0, 0)), NO_ROOM),
        (WHOLE, WHOLE, NO_ROOM),
        (placement(piece(0, 1)), placement(piece(0, 1), whole=True), NO_ROOM),
        # each alone fits, together they are 2 x 8000 = 16000 > 15079
        (
            placement(),
            placement(piece(0, 8000), piece(0, 8000)),
            "a placement has at most one slice on each card",
        ),
        (placement(), placement(piece(1, 1)), "there is no card 1 (GPU-a-1) on a"),
        # the card was exchanged: same index, another UUID
        (placement(), placement(piece(0, 1, name="b")), "there is no card 0 (GPU-b-0) on a"),
        (placement(), placement(piece(0, 1), name="b"), "there is no node b"),
        # 2000 + 2001 > 4000, 4000 + 4001 > 8000
        (HOST, Placement("a", (), 2001, 0), "a has too little CPU left"),
        (HOST, Placement("a", (), 0, 4001), "a has too little host memory left"),
    ],
)
def test_placement_is_refused_when_it_would_overcommit(
    held: Placement, new: Placement, sentence: str
) -> None:
    """New assumptions and adopted records are refused alike, and nothing changes."""
    made = ledger(("held", held))
    before = made.entries, made.card_usage("a", device(0)), made.host_usage("a")
    ways: list[Callable[[], None]] = [
        lambda: made.assume("new", new, 10),
        lambda: made.adopt("new", new),
        lambda: made.adopt("new", new, 10),
    ]
    for refused in ways:
        with pytest.raises(Conflict) as caught:
            refused()
        assert str(caught.value) == sentence
        assert (made.entries, made.card_usage("a", device(0)), made.host_usage("a")) == before


def test_no_slice_is_held_when_one_of_them_does_not_fit() -> None:
    """The first slice would fit."""
    made = Ledger([node(T4_MIB, T4_MIB)])
    made.adopt("held", placement(piece(1, T4_MIB)))
    with pytest.raises(Conflict, match="card 1"):
        made.assume("new", placement(piece(0, 1), piece(1, 1)), 10)
    assert made.card_usage("a", device(0)) == NO_USAGE


def test_host_has_no_limit_when_it_is_not_counted() -> None:
    """None is not zero."""
    made = Ledger([node(T4_MIB)])
    made.assume("x", Placement("a", (), 10**9, 10**9), 10)
    assert made.host_usage("a") == (10**9, 10**9)


def test_card_stays_whole_when_one_of_two_whole_records_is_removed() -> None:
    """Only foreign records give one card away twice."""
    tally = UsageTotals()
    tally.add(WHOLE)
    tally.add(WHOLE)
    assert tally.card_usage("a", device(0)) == CardUsage(2 * T4_MIB, 200, 2, 2)
    tally.remove(WHOLE)
    assert tally.card_usage("a", device(0)) == CardUsage(T4_MIB, 100, 1, 1)
    tally.add(FOUR)
    tally.remove(FOUR)
    assert tally.card_usage("a", device(0)).whole


def test_usage_is_empty_when_card_or_node_is_unknown() -> None:
    """Unknown cards and nodes hold nothing."""
    made = ledger(("x", FOUR))
    assert made.card_usage("a", device(7)) == made.card_usage("b", device(0, "b")) == NO_USAGE
    assert made.host_usage("b") == (0, 0)
