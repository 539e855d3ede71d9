"""Bookings in a scheduling pass: before they begin, while they last, and after. Times are seconds."""

from collections.abc import Collection
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import Node
from fenka.core.queue import Allocation, PendingRequest
from fenka.core.request import Request
from fenka.core.users.bookings import Occurrence, free_from, name_cards
from fenka.core.users.caps import Caps, HeldAmount, amount_of
from tests.core.builders import (
    T4_MIB,
    card,
    device,
    held,
    instance,
    node,
    on,
    requests,
    units,
    whole,
)
from tests.core.users.policies import FixedPolicies, ask, cards, reasons, serve

THREE = node(T4_MIB, T4_MIB, T4_MIB)
FRIDAY = Occurrence("fri", 2, 1000.0, 2000.0)
"""Two of the three cards."""
TEAM = FixedPolicies(bookings=[(FRIDAY, "a")])


def begun(*indices: int) -> FixedPolicies:
    """The booking with the cards that it had when it began."""
    named = replace(FRIDAY, named=frozenset(map(device, indices)))
    return FixedPolicies(bookings=[(named, "a")])


def test_before_it_begins_its_cards_are_for_what_ends_in_time() -> None:
    """At 100 a limit of 900 s ends at 1000, one of 901 s does not. Members are no exception."""
    pending = [
        ask("endless", whole(), "z"),
        ask("member", whole(), "a"),
        ask("late", whole(), "z", 901.0),
        ask("in time", whole(2), "z", 900.0),
    ]
    result, rules = serve(THREE, pending, TEAM)
    (booked,) = rules.booked
    assert booked.certain
    free = ({0, 1, 2} - {int(uuid[-1]) for uuid in booked.cards}).pop()
    placed = cards(result)
    assert placed["endless"] == [free]
    assert set(placed) == {"endless", "in time"}
    told = rules.booking_reasons(pending[2], result.pending[1].unschedulable)
    assert told == ["cards 1, 2 are booked (fri)"]


def test_while_it_lasts_its_cards_are_for_members_alone() -> None:
    """A stranger gets the third card, however short; a member both, before others of them are tried."""
    pending = [
        ask("z1", whole(), "z"),
        ask("z2", whole(), "z", 1.0),
        ask("a1", whole(), "a"),
        ask("a2", units(4), "a", 10.0),
    ]
    result, _ = serve(THREE, pending, begun(0, 1), now=1500)
    placed = cards(result)
    assert placed["z1"] == [2]
    assert sorted((*placed["a1"], *placed["a2"])) == [0, 1]
    assert set(reasons(result)) == {"z2"}


def test_strangers_reservation_bars_no_member() -> None:
    """z1 waits before a1, for all cards. It starts when the booking ends at the earliest."""
    pending = [ask("z1", whole(3), "z", 60.0), ask("z2", units(1), "z"), ask("a1", whole(2), "a")]
    result, _ = serve(THREE, pending, begun(0, 1), now=1500)
    assert cards(result)["a1"] == [0, 1]
    (first, second) = result.pending
    assert first.id == "z1"
    assert first.reservation is not None
    assert first.reservation.starts_by == 2000
    assert second.id == "z2", "the third card is reserved for z1"


def test_after_its_end_all_may_use_all() -> None:
    """The moment of its end is after it."""
    pending = [ask(name, whole(), "z") for name in "xyz"]
    result, rules = serve(THREE, pending, TEAM, now=2000)
    assert len(result.placed) == 3
    assert rules.booked == []


@pytest.mark.parametrize(
    ("ends", "named", "certain"),
    [
        # All are idle: the last ones, since binpack fills the first.
        ((-inf, -inf, -inf), {1, 2}, True),
        # Those in use until then are named, so that idle ones stay for jobs.
        ((900.0, 1000.0, -inf), {0, 1}, True),
        ((None, 900.0, -inf), {1, 2}, True),
        ((1001.0, 900.0, -inf), {1, 2}, True),
        # Too few: the one that ends first is kept, too.
        ((None, 1500.0, -inf), {1, 2}, False),
        ((None, None, -inf), {2}, False),
    ],
)
def test_cards_are_named_that_are_certain_to_be_free(
    ends: tuple[float | None, ...], named: Collection[int], certain: bool
) -> None:
    """A job without a time limit may stay; one with a limit has ended then."""
    holding = [held(index, 4, end) for index, end in enumerate(ends) if end != -inf]
    (booked,) = name_cards([FRIDAY], free_from(THREE.cards, holding), 100.0)
    assert booked.certain == certain
    assert {device(index) for index in named} <= booked.cards
    assert len(booked.cards) == 2


def test_one_that_has_begun_keeps_its_cards() -> None:
    """Members use them, and so they do not count as uncertain. A card that is lost is replaced."""
    holding = [replace(held(0, 14), user="a")]
    (booked,) = begun(0, 1).occurrences(1500)[0:1]
    (kept,) = name_cards([booked], free_from(THREE.cards, holding), 1500)
    assert kept.cards == {device(0), device(1)}
    assert kept.certain
    lost = [card(0), replace(card(1), healthy=False), card(2)]
    (renamed,) = name_cards([booked], free_from(lost, holding), 1500)
    assert renamed.cards == {device(0), device(2)}


def test_cards_that_cannot_be_given_whole_are_not_booked() -> None:
    """Divided, unhealthy and cordoned ones."""
    several = [
        card(0, divided=True),
        instance(0),
        replace(card(1), healthy=False),
        replace(card(2), cordoned=True),
        card(3),
    ]
    assert free_from(several, []) == {device(3): -inf}


def test_weekly_times_have_the_same_cards() -> None:
    """Otherwise jobs without a time limit would find all cards booked by and by."""
    weeks = [Occurrence("w", 1, 1000 + 700 * n, 1100 + 700 * n) for n in range(5)]
    booked = name_cards(weeks, free_from(THREE.cards, [held(2, 4, 1500.0)]), 0)
    assert all(cards_.certain for cards_ in booked)
    assert len({cards_.cards for cards_ in booked}) == 1


def test_two_bookings_at_a_time_have_different_cards() -> None:
    """And a third has not enough left, until the first has ended."""
    first, second = Occurrence("1", 2, 1000, 2000), Occurrence("2", 1, 1500, 2500)
    third, fourth = Occurrence("3", 1, 1900, 2100), Occurrence("4", 2, 2000, 2100)
    one, two, three = name_cards([third, second, first], free_from(THREE.cards, []), 0)
    assert (one.certain, two.certain, three.certain) == (True, True, False)
    assert not one.cards & two.cards
    assert all(
        b.certain for b in name_cards([fourth, second, first], free_from(THREE.cards, []), 0)
    )


def test_card_counts_as_free_when_others_are_ended_for_the_booking() -> None:
    """And from then on for later bookings, too."""
    holding = [held(index, 4) for index in range(3)]
    ending, later = replace(FRIDAY, ends_others=True), Occurrence("later", 2, 3000, 4000)
    first, second = name_cards([ending, later], free_from(THREE.cards, holding), 100)
    assert first.certain
    assert second.certain
    assert second.cards == first.cards


def test_request_reserves_cards_before_the_booking_if_it_ends_in_time() -> None:
    """Card 0 is free at 500; 500 + 400 ≤ 1000 < 500 + 600. The other cards stay in use."""
    holding = [held(0, 14, 500.0), held(1, 14), held(2, 14)]
    policies = FixedPolicies(bookings=[(replace(FRIDAY, cards=1), "a")])
    for limit_s, starts_by in ((400.0, 500.0), (600.0, 2000.0)):
        result, _ = serve(THREE, [ask("x", units(8), "z", limit_s)], policies, holding=holding)
        (status,) = result.pending
        assert status.reservation is not None
        assert status.reservation.cards == {device(0)}
        assert status.reservation.starts_by == starts_by


def test_member_reserves_a_booked_card_while_it_lasts() -> None:
    """Another member has it until 1600, which is before the booking's end."""
    holding = [replace(held(0, 14, 1600.0), user="a"), held(1, 14), held(2, 14)]
    named = replace(FRIDAY, cards=1, named=frozenset({device(0)}))
    policies = FixedPolicies(bookings=[(named, "a")])
    result, _ = serve(
        THREE,
        [ask("x", units(8), "a"), ask("y", units(8), "z")],
        policies,
        holding=holding,
        now=1500,
    )
    starts = [status.reservation and status.reservation.starts_by for status in result.pending]
    assert starts[0] == 1600
    assert starts[1] is None


def test_growth_on_a_booked_card_is_refused_to_strangers() -> None:
    """They hold something there since before the booking only if somebody has broken a time limit."""
    before = on(0, 4)
    holding = [Allocation(before, 1990.0, "z"), Allocation(on(1, 4), 1990.0, "a")]
    _, rules = serve(THREE, [], begun(0, 1), holding=holding, now=1500)
    assert rules.growth_rejection("z", before.slices, on(0, 5).slices, 1990) == (
        "cards 0, 1 are booked (fri)"
    )
    assert not rules.growth_rejection("a", on(1, 4).slices, on(1, 5).slices, 1990)


# ---- a day of random requests ----

BOOKERS = ("a", "b")
USERS = (*BOOKERS, "y", "z")
MACHINE = node(T4_MIB, T4_MIB, T4_MIB, T4_MIB)
CAPS = {"y": Caps(cards=1.5), "z": Caps(memory_mib=10000), "a": Caps(cards=3)}


class Day:
    """Serves requests and bookings as they come. Jobs end by themselves, or at their time limits."""

    def __init__(self, machine: Node) -> None:
        self.node, self.now = machine, 0.0
        self.policies = FixedPolicies(CAPS)
        self.pending: list[PendingRequest] = []
        self.running: dict[str, tuple[Allocation, float]] = {}
        """By request and number: what it holds, and when it ends."""
        self.accepted = 0

    def book(self, occurrence: Occurrence, user: str) -> None:
        """Accept a booking if enough cards are certain for it and all others."""
        times = [*self.policies.occurrences(self.now), occurrence]
        booked = name_cards(times, free_from(self.node.cards, self.allocations), self.now)
        if all(cards_.certain for cards_ in booked):
            self.policies.bookings[occurrence.booking] = occurrence, {user}
            self.accepted += 1
        self.serve()

    @property
    def allocations(self) -> list[Allocation]:
        """Return all that is held."""
        return [allocation for allocation, _ in self.running.values()]

    def ask(self, request: PendingRequest, runs_s: float) -> None:
        """Queue a request that would run for so long."""
        self.pending.append(replace(request, requested_at=runs_s))
        self.serve()

    def serve(self) -> None:
        """Serve the queue, and check what holds after each pass."""
        holding = self.allocations
        result, rules = serve(self.node, self.pending, self.policies, holding=holding, now=self.now)
        for cards_ in rules.booked:
            occurrence, users = self.policies.bookings[cards_.occurrence.booking]
            assert cards_.certain, "an accepted booking has enough cards for ever"
            if occurrence.begun(self.now):
                named = replace(occurrence, named=cards_.cards)
                self.policies.bookings[occurrence.booking] = named, users
        for name, placements in result.placed:
            (request,) = (item for item in self.pending if item.id == name)
            limit_s = inf if request.time_limit_s is None else request.time_limit_s
            end = self.now + min(request.requested_at, limit_s)
            deadline = None if limit_s == inf else self.now + limit_s
            for number, placed in enumerate(placements):
                held_now = Allocation(placed, deadline, request.user)
                self.running[f"{name}/{number}"] = held_now, end
            self.pending.remove(request)
        self.check()

    def check(self) -> None:
        """Nobody is above a cap; strangers have nothing of a booking's cards, from its first moment."""
        for user, caps in CAPS.items():
            placements = [item.placement for item in self.allocations if item.user == user]
            assert amount_of(placements, self.node.cards).within(caps)
        used = [piece for item in self.allocations for piece in item.placement.slices]
        for device_ in {piece.uuid for piece in used}:
            assert sum(piece.memory_mib for piece in used if piece.uuid == device_) <= T4_MIB
        for occurrence, users in self.policies.bookings.values():
            if occurrence.begun(self.now) and self.now < occurrence.end and occurrence.named:
                assert len(occurrence.named) == occurrence.cards
                for item in self.allocations:
                    if item.user not in users:
                        assert not occurrence.named & {p.uuid for p in item.placement.slices}

    def advance(self, until: float) -> None:
        """Let time pass, with a pass at each end and at each beginning of a booking."""
        while True:
            moments = [end for _, end in self.running.values()]
            moments += [
                moment
                for occurrence, _ in self.policies.bookings.values()
                for moment in (occurrence.start, occurrence.end)
                if moment > self.now
            ]
            next_ = min([until, *moments])
            self.now = max(next_, self.now)
            self.running = {
                name: (item, end) for name, (item, end) in self.running.items() if end > self.now
            }
            self.serve()
            if self.now >= until:
                return


SMALL = st.one_of(
    st.integers(1, 14).map(units), st.integers(1, 3).map(whole), st.just(units(4, cards=2))
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            SMALL,
            st.sampled_from(USERS),
            st.sampled_from([None, 100.0, 1000.0, 5000.0]),
            st.floats(1, 4000),
        ),
        st.tuples(
            st.just("book"),
            st.integers(1, 3),
            st.sampled_from(BOOKERS),
            st.floats(0, 6000),
            st.floats(100, 4000),
        ),
        st.tuples(st.just("wait"), st.floats(1, 2000)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_a_day_of_random_requests_caps_and_bookings(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    """An accepted booking is free at its start, members alone use it, and nobody exceeds a cap."""
    day = Day(MACHINE)
    for number, step in enumerate(steps):
        match step:
            case ("ask", request, user, limit_s, runs_s):
                day.ask(PendingRequest(f"r{number}", (request,), 0, 0, user, limit_s), runs_s)
            case ("book", count, user, ahead, lasts):
                start = day.now + ahead
                day.book(Occurrence(f"b{number}", count, start, start + lasts), user)
            case ("wait", seconds):
                day.advance(day.now + seconds)
    day.advance(day.now + 20000)


@settings(deadline=None)
@given(
    requests_=st.lists(requests().filter(lambda request: not request.instance), max_size=6),
    cards_=st.integers(1, 3),
)
def test_pass_without_rules_is_the_same_as_with_rules_that_allow_everything(
    requests_: list[Request], cards_: int
) -> None:
    """Nobody is limited: a booking that has ended, and caps that are infinite."""
    pending = [ask(str(n), request, "z", 50.0 * n or None) for n, request in enumerate(requests_)]
    past = FixedPolicies({"z": Caps()}, [(Occurrence("past", cards_, 1, 2), "a")])
    assert serve(MACHINE, pending, past)[0] == serve(MACHINE, pending, FixedPolicies())[0]


def test_what_was_placed_is_free_again_after_its_release() -> None:
    """The amounts of a user are those of its allocations, so that nothing is left."""
    nothing = FixedPolicies({"z": Caps(cards=1)})
    _, rules = serve(MACHINE, [ask("x", whole(), "z")], nothing)
    assert rules.check.held("z") == HeldAmount(T4_MIB, 1)
    _, rules = serve(MACHINE, [], nothing)
    assert rules.check.held("z") == HeldAmount()
