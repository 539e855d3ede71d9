"""Caps in a scheduling pass. A unit of a T4 is 15079 // 14 = 1077 MiB; 4 units are 4308, 8 are 8616."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.queue import Allocation, PendingRequest
from fenka.core.request import Memory, Request
from fenka.core.users.caps import (
    NO_CAPS,
    CapExceeded,
    Caps,
    CardTime,
    HeldAmount,
    amount_of,
    applied_limit_s,
    duration_text,
    least_amount,
    limit_exceeds,
)
from fenka.core.users.rules import Policies, never_allowed
from tests.core.builders import (
    P4_MIB,
    T4_MIB,
    V100_MIB,
    card,
    held,
    instance,
    node,
    on,
    piece,
    placement,
    requests,
    units,
    whole,
)
from tests.core.users.policies import FixedPolicies, ask, cards, reasons, serve

THREE = node(T4_MIB, T4_MIB, T4_MIB)


def test_request_beyond_the_cap_waits_and_holds_nobody_up() -> None:
    """8616 of 10000 MiB are held after x; 8616 more are too many. y comes later, and is served."""
    pending = [ask(name, units(8), user) for name, user in (("x", "z"), ("xx", "z"), ("y", "y"))]
    result, _ = serve(THREE, pending, FixedPolicies({"z": Caps(memory_mib=10000)}))
    assert set(cards(result)) == {"x", "y"}
    (status,) = result.pending
    assert (status.id, status.position, status.reservation) == ("xx", 1, None)
    assert status.reason == "z holds 8616 of at most 10000 MiB"


@pytest.mark.parametrize(
    ("caps", "amounts", "granted"),
    [
        # 4308 + 4308 + 1077 = 9693 fits; 1077 more are 10770.
        (Caps(memory_mib=10000), [4, 4, 1, 1], 3),
        # 4/14 + 4/14 + 4/14 = 0.857 cards, and 2/14 make one.
        (Caps(cards=1), [4, 4, 4, 2, 1], 4),
        # Fourteen fourteenths are not more than a card.
        (Caps(cards=1), [1] * 15, 14),
        (Caps(memory_mib=0), [1], 0),
        (Caps(memory_mib=4308, cards=inf), [4], 1),
        (Caps(memory_mib=4307), [4], 0),
        (NO_CAPS, [14, 14, 14, 1], 3),
    ],
)
def test_as_much_is_granted_as_the_cap_allows(caps: Caps, amounts: list[int], granted: int) -> None:
    """In one pass, in which each grant counts for the next request."""
    pending = [ask(str(n), units(amount), "z") for n, amount in enumerate(amounts)]
    result, _ = serve(THREE, pending, FixedPolicies({"z": caps}))
    assert len(result.placed) == granted


def test_held_slices_whole_cards_and_compute_count() -> None:
    """A whole T4 is one card and 15079 MiB; half of its compute counts as half a card."""
    halves = Request(compute=50)
    assert least_amount([whole(2)], THREE) == HeldAmount(2 * T4_MIB, 2)
    assert least_amount([halves], THREE) == HeldAmount(0, 0.5)
    assert least_amount([units(7, compute=60)], THREE) == HeldAmount(T4_MIB * 7 // 14, 0.6)
    holding = [replace(held(0, 7), user="z")]
    # 7/14 + 0.5 = 1 card is allowed, and the next half is not.
    pending = [ask("a", halves, "z"), ask("b", halves, "z")]
    result, rules = serve(THREE, pending, FixedPolicies({"z": Caps(cards=1)}), holding=holding)
    assert list(cards(result)) == ["a"]
    assert reasons(result) == {"b": "z holds 1 of at most 1 card"}
    assert rules.check.held("z").memory_mib == 7539


def test_smaller_card_is_taken_when_units_of_a_larger_one_exceed_the_cap() -> None:
    """4 of a V100's 15 units are 4 × 16130 // 15 = 4301 MiB, and 4 of a P4's 7 units 4 × 7611 // 7 = 4349."""
    mixed = replace(node(), cards=(card(0, V100_MIB), card(1, P4_MIB)))
    asked = [ask("x", units(4), "z")]
    # The P4 is the fuller card afterwards, so it would be chosen.
    result, _ = serve(mixed, asked, FixedPolicies())
    assert cards(result) == {"x": [1]}
    policies = FixedPolicies({"z": Caps(memory_mib=4301)})
    result, _ = serve(mixed, asked, policies)
    assert cards(result) == {"x": [0]}
    # If the V100 is full, the request waits for it without reserving anything.
    full = Allocation(placement(piece(0, V100_MIB)), None, "y")
    result, _ = serve(mixed, asked, policies, holding=[full])
    assert reasons(result) == {
        "x": "z may hold at most 4301 MiB, and this request needs 4349 MiB: ask for less"
    }
    assert [status.reservation for status in result.pending] == [None]


def test_instances_count_by_their_part_of_the_card() -> None:
    """An instance 3g.20gb has 20096 MiB and 38 percent of the compute."""
    divided = replace(
        node(), cards=(card(0, 40536, divided=True), instance(0), instance(0, start=4))
    )
    assert least_amount([Request(whole=True, instance="3g.20gb")], divided) == HeldAmount(
        20096, 0.38
    )


def test_members_of_a_gang_count_together() -> None:
    """3 × 4308 = 12924 MiB are more than 10000, though each alone is not."""
    gang = PendingRequest("gang", (units(4),) * 3, 0, 0, "z", None)
    result, _ = serve(THREE, [gang], FixedPolicies({"z": Caps(memory_mib=10000)}))
    assert reasons(result) == {
        "gang": "z may hold at most 10000 MiB, and this request needs 12924 MiB: ask for less"
    }


def test_later_request_of_a_user_does_not_take_what_an_earlier_one_reserves() -> None:
    """a waits with 8616 MiB. 4308 that are held, these and 4308 of b would be 17232 of 15000 MiB."""
    holding = [replace(held(0, 4), user="z"), held(0, 10), held(1, 14), held(2, 10)]
    pending = [ask("a", units(8), "z"), ask("b", units(4), "z"), ask("c", units(4), "y")]
    policies = FixedPolicies({"z": Caps(memory_mib=15000)})
    result, _ = serve(THREE, pending, policies, holding=holding)
    assert cards(result) == {"c": [2]}
    assert (
        reasons(result)["b"] == "z holds 4308 of at most 15000 MiB, and 8616 MiB wait before this"
    )


def test_used_card_hours_stop_new_grants_until_midnight() -> None:
    """One card for two hours uses two card-hours; at the next midnight they are forgotten."""
    policies = FixedPolicies({"z": Caps(card_hours=2)})
    policies.card_time.begin_day(0)
    policies.card_time.hold("h", "z", 1.0, 0, 0)
    held_now = [Allocation(on(0, 14), None, "z")]
    pending = [ask("x", units(1), "z"), ask("y", units(1), "y")]
    result, _ = serve(THREE, pending, policies, holding=held_now, now=7199)
    assert set(cards(result)) == {"x", "y"}
    result, _ = serve(THREE, pending, policies, holding=held_now, now=7200)
    assert set(cards(result)) == {"y"}
    assert reasons(result) == {"x": "z has used 2 of at most 2 card-hours since midnight"}
    policies.card_time.begin_day(86400)
    result, _ = serve(THREE, pending, policies, holding=held_now, now=86401)
    assert set(cards(result)) == {"x", "y"}


@pytest.mark.parametrize(
    ("caps", "limit_s", "applied", "sentence"),
    [
        (NO_CAPS, None, None, ""),
        (NO_CAPS, 5.0, 5.0, ""),
        (Caps(default_limit_s=3600), None, 3600, ""),
        (Caps(default_limit_s=3600), 7200.0, 7200, ""),
        (Caps(max_limit_s=3600), None, 3600, ""),
        (Caps(default_limit_s=60, max_limit_s=3600), None, 60, ""),
        (
            *(Caps(max_limit_s=3600), 3601.0, 3601.0),
            "z may run programs for at most 1h: give --time-limit 1h or less",
        ),
    ],
)
def test_time_limit_is_given_and_bounded(
    caps: Caps, limit_s: float | None, applied: float | None, sentence: str
) -> None:
    """Who names none gets the default, or the longest."""
    assert applied_limit_s(caps, limit_s) == applied
    assert limit_exceeds("z", caps, applied) == sentence


def test_request_that_alone_exceeds_a_cap_is_never_allowed() -> None:
    """15079 > 10000 MiB; 8616 are not, whatever the user holds."""
    policies = FixedPolicies({"z": Caps(memory_mib=10000)})
    assert never_allowed(policies, "z", [units(14)], None, THREE) == (
        "z may hold at most 10000 MiB, and this request needs 15079 MiB: ask for less"
    )
    assert not never_allowed(policies, "z", [units(8)], None, THREE)
    assert not never_allowed(Policies(), "z", [whole(3)], None, THREE)
    policies = FixedPolicies({"z": Caps(cards=1)})
    assert never_allowed(policies, "z", [whole(2)], None, THREE) == (
        "z may hold at most 1 card, and this request needs 2 cards: ask for less"
    )


def test_growth_obeys_the_cap() -> None:
    """8616 held; 2 units more are 10770 of at most 10000 MiB; to shrink is always allowed."""
    before = on(0, 8)
    holding = [Allocation(before, None, "z")]
    _, rules = serve(THREE, [], FixedPolicies({"z": Caps(memory_mib=10000)}), holding=holding)
    larger, smaller = on(0, 10), on(0, 2)
    assert rules.growth_rejection("z", before.slices, larger.slices, None) == (
        "z holds 8616 of at most 10000 MiB"
    )
    assert not rules.growth_rejection("z", before.slices, smaller.slices, None)
    assert not rules.growth_rejection("z", before.slices, on(0, 9).slices, None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(86400, "24h"), (5400, "90m"), (45, "45s"), (0.5, "0.5s"), (3600, "1h")]
)
def test_durations_are_written_as_options_have_them(seconds: float, text: str) -> None:
    """They are copied into commands."""
    assert duration_text(seconds) == text


CAPS = st.builds(
    Caps,
    memory_mib=st.sampled_from([inf, 4308, 10000, 20000]),
    cards=st.sampled_from([inf, 0.5, 1, 2]),
)
MACHINE = replace(
    node(),
    cards=(card(0), card(1), card(2, V100_MIB, model="Tesla V100-SXM2-16GB"), card(3, P4_MIB)),
)
QUEUES = st.lists(
    st.tuples(
        requests().filter(lambda request: not request.instance),
        st.sampled_from("xyz"),
        st.sampled_from([None, None, 50.0, 500.0]),
    ),
    max_size=10,
)


@settings(deadline=None)
@given(queue=QUEUES, caps=st.dictionaries(st.sampled_from("xyz"), CAPS))
def test_nobody_is_above_a_cap_and_who_is_capped_delays_nobody(
    queue: list[tuple[Request, str, float | None]], caps: dict[str, Caps]
) -> None:
    """Without the requests that wait for a cap, the pass decides the same about all others."""
    pending = [ask(str(n), request, user, s) for n, (request, user, s) in enumerate(queue)]
    policies = FixedPolicies(caps)
    result, _ = serve(MACHINE, pending, policies)
    users = {request.id: request.user for request in pending}
    for user, cap in caps.items():
        placements = [
            placement
            for name, placed in result.placed
            for placement in placed
            if users[name] == user
        ]
        assert amount_of(placements, MACHINE.cards).within(cap)
    capped = {
        status.id for status in result.pending if isinstance(status.unschedulable, CapExceeded)
    }
    assert all(status.reservation is None for status in result.pending if status.id in capped)
    others = [request for request in pending if request.id not in capped]
    without, _ = serve(MACHINE, others, policies)
    assert without.placed == result.placed
    kept = [(s.id, s.reservation) for s in result.pending if s.id not in capped]
    assert [(s.id, s.reservation) for s in without.pending] == kept


EVENTS = st.lists(
    st.tuples(st.floats(0, 5000), st.sampled_from("ab"), st.sampled_from("xy"), st.floats(0, 4)),
    max_size=20,
)


@given(events=EVENTS, midnight=st.floats(0, 5000))
def test_card_time_is_the_integral_of_what_is_held(
    events: list[tuple[float, str, str, float]], midnight: float
) -> None:
    """Holders are resized and released in any order, and half of the time is before a midnight."""
    time, expected = CardTime(), dict[str, float]()
    time.begin_day(0)
    open_: dict[str, tuple[str, float]] = {}
    at, day = 0.0, 0.0
    for when, holder, user, cards_ in [*sorted(events), (6000.0, "a", "x", 0.0)]:
        if day == 0 and when >= midnight:
            day = midnight or -1.0
            time.begin_day(midnight)
            expected, at = {}, midnight
        for owner, amount in open_.values():
            expected[owner] = expected.get(owner, 0.0) + amount * (when - at)
        at = when
        if cards_ < 1:
            time.release(holder, when)
            open_.pop(holder, None)
        else:
            time.hold(holder, user, cards_, when, when)
            open_[holder] = user, cards_
    used = time.used_s(6000.0)
    for user in "xy":
        assert used.get(user, 0.0) == pytest.approx(expected.get(user, 0.0), abs=1e-6)


def test_earlier_program_s_count_is_taken_over_once() -> None:
    """It had counted 100 s until 1000, of a holder since 500; at 1200 these are 300 s."""
    time = CardTime()
    time.begin_day(0)
    time.restore({"z": 100.0}, 1000)
    time.hold("h", "z", 1.0, 500, 1100)
    assert time.used_s(1200) == {"z": 300.0}


def test_memory_is_that_of_the_request_s_unit() -> None:
    """A size in MiB is the same on all cards."""
    assert least_amount([Request(Memory(5000))], MACHINE).memory_mib == 5000
