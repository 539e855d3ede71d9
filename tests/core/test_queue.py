"""The order of pending requests, and what a reservation blocks."""

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.queue import (
    Fairness,
    PendingRequest,
    QueueStatus,
    Reservation,
    UsageHistory,
    UserHistory,
    history_lookup,
    queue_order,
    sort_key,
    sort_keys,
)
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable
from tests.core.builders import (
    units,
)


def ordered(
    waiting: list[PendingRequest],
    fairness: Fairness | None = None,
    now: float = 100,
    **past: UserHistory,
) -> list[str]:
    """Return the ids of the pending requests, in order. past: of users."""
    found = queue_order(
        waiting, lambda user: past.get(user, UserHistory()), fairness or Fairness(), now
    )
    return [it.id for it in found]


class TestOrder:
    """By priority, time and users."""

    def test_order_is_by_priority_time_and_id_when_there_are_no_users(self) -> None:
        """Kubernetes orders its own queue so."""
        waiting = [
            PendingRequest("d", (units(1),), 1.0),
            PendingRequest("b", (units(1),), 2.0, priority=5),
            PendingRequest("c", (units(1),), 0.0),
            PendingRequest("a", (units(1),), 1.0),
        ]
        assert ordered(waiting) == ["b", "c", "a", "d"]

    @pytest.mark.parametrize(
        ("fairness", "expected"),
        [
            # time alone: one's three come first
            (Fairness(penalty_per_request_s=0), ["o0", "o1", "o2", "t3", "t4"]),
            # o0 and t3 0, o1 and t4 60, o2 120
            (Fairness(), ["o0", "t3", "o1", "t4", "o2"]),
        ],
    )
    def test_order_alternates_users_when_they_have_equal_priority(
        self, fairness: Fairness, expected: list[str]
    ) -> None:
        """A user with many requests does not block the others."""
        waiting = [
            PendingRequest(f"{user[0]}{at}", (units(1),), float(at), user=user)
            for at, user in enumerate(["one", "one", "one", "two", "two"])
        ]
        assert ordered(waiting, fairness) == expected

    def test_user_is_later_when_it_has_or_had_more(self) -> None:
        """One holds two placements, or has had 121 card-seconds of late; two has had 120."""
        waiting = [
            PendingRequest("o", (units(1),), 0.0, user="one"),
            PendingRequest("t", (units(1),), 100.0, user="two"),
        ]
        assert ordered(waiting, one=UserHistory(held=2)) == ["t", "o"]
        assert ordered(waiting, one=UserHistory(used_s=121), two=UserHistory(held=2)) == ["t", "o"]
        assert ordered(waiting, one=UserHistory(used_s=120), two=UserHistory(held=2)) == ["o", "t"]
        assert ordered(waiting, Fairness(penalty_per_request_s=0), one=UserHistory(used_s=121)) == [
            "o",
            "t",
        ]

    def test_request_is_first_when_it_starves(self) -> None:
        """One has had much. Its first request has waited for an hour; the next one waits again."""
        waiting = [PendingRequest(f"o{at}", (units(1),), float(at), user="one") for at in (0, 1)]
        waiting.append(PendingRequest("t", (units(1),), 3599.0, user="two"))
        much = UserHistory(used_s=9000)
        assert ordered(waiting, now=3599, one=much) == ["t", "o0", "o1"]
        assert ordered(waiting, now=3600, one=much) == ["o0", "t", "o1"]
        # o0 was served at 3600
        served = replace(much, starts=((0.0, 3600.0),))
        assert ordered(waiting[1:], now=7199, one=served) == ["t", "o1"]
        late = UserHistory(starts=((9, 7000),))
        assert ordered(waiting[1:], now=7200, one=served, two=late) == ["o1", "t"]

    @given(
        waiting=st.lists(
            st.builds(
                PendingRequest,
                st.uuids().map(str),
                st.just((units(1),)),
                st.integers(0, 9000).map(float),
                st.integers(0, 2),
                st.sampled_from(["", "one", "two"]),
            )
        ),
        past=st.dictionaries(
            st.sampled_from(["one", "two"]),
            st.builds(
                UserHistory,
                st.integers(0, 100),
                st.floats(0, 9000),
                st.just(()) | st.tuples(st.tuples(st.just(0.0), st.floats(0, 9000))),
            ),
        ),
        now=st.floats(9000, 20000),
        chance=st.randoms(use_true_random=False),
    )
    def test_first_request_of_a_user_precedes_all_that_come_much_later_when_it_starves(
        self,
        waiting: list[PendingRequest],
        past: dict[str, UserHistory],
        now: float,
        chance: random.Random,
    ) -> None:
        """The starvation time is a bound. The order contains every request once."""

        def find(user: str) -> UserHistory:
            return past.get(user, UserHistory())

        order = queue_order(waiting, find, Fairness(), now)
        assert sorted(it.id for it in order) == sorted(it.id for it in waiting)
        firsts = set[tuple[str, int]]()
        for place_, later in enumerate(order):
            whose = later.user or later.id, later.priority
            first = whose not in firsts
            firsts.add(whose)
            since = max(later.requested_at, find(later.user).served_at(later.requested_at))
            for earlier in order[:place_]:
                assert earlier.priority >= later.priority
                if earlier.priority == later.priority and first:
                    assert earlier.requested_at < since + 3600 or earlier.requested_at == since
                if (earlier.user, earlier.priority) == (later.user, later.priority):
                    assert earlier.requested_at <= later.requested_at
        chance.shuffle(waiting)
        assert queue_order(waiting, find, Fairness(), now) == order


def test_reservation_blocks_when_deadline_is_later() -> None:
    """A request that ends when the reservation starts is not blocked."""
    reservation = Reservation(frozenset({DeviceId("GPU-a-0")}), 200)
    assert [reservation.blocks(end) for end in (199, 200, 201, None)] == [False, False, True, True]
    assert replace(reservation, starts_by=None).blocks(-inf)


@pytest.mark.parametrize(
    ("starts_by", "deadline", "expected"),
    [
        (200, 199.9, False),
        (200, 200, False),
        (200, 200.1, True),
        # nothing is known of the end, or of the start
        (200, None, True),
        (None, 0, True),
        (None, None, True),
        # a time before that of the reservation is no time at all
        (0, -1, False),
        (0.0, 0, False),
        (inf, 1e12, False),
        (inf, inf, False),
        (1e12, inf, True),
    ],
)
def test_reservation_blocks_only_what_may_not_have_ended(
    starts_by: float | None, deadline: float | None, expected: bool
) -> None:
    """Both are in the caller's time."""
    assert Reservation(frozenset(), starts_by).blocks(deadline) is expected


def pending(name: str, at: float = 0, priority: int = 0, user: str = "") -> PendingRequest:
    """Return a request for one unit."""
    return PendingRequest(name, (units(1),), at, priority, user)


SERVED_AT_50 = UserHistory(held=2, used_s=30.0, starts=((10.0, 50.0),))


@pytest.mark.parametrize(
    ("fairness", "past", "before", "first", "now", "expected"),
    [
        # 30 + 60 * (2 + 0) = 150; one more request before it is 60 more
        (Fairness(), SERVED_AT_50, 0, True, 100, (-7, 1, 150.0)),
        (Fairness(), SERVED_AT_50, 1, True, 100, (-7, 1, 210.0)),
        (Fairness(), UserHistory(), 3, False, 100, (-7, 1, 180.0)),
        (Fairness(), UserHistory(), 0, True, 100, (-7, 1, 0.0)),
        # 30 + 7 * (2 + 1) = 51
        (Fairness(penalty_per_request_s=7), SERVED_AT_50, 1, True, 100, (-7, 1, 51.0)),
        # its user was served at 50: it starves from 3650 on, by that time
        (Fairness(), SERVED_AT_50, 0, True, 3649.9, (-7, 1, 150.0)),
        (Fairness(), SERVED_AT_50, 0, True, 3650, (-7, 0, 50.0)),
        (Fairness(), SERVED_AT_50, 0, False, 3650, (-7, 1, 150.0)),
        # nobody was served for it: since it was made
        (Fairness(), UserHistory(), 0, True, 3620, (-7, 0, 20)),
        (Fairness(), UserHistory(starts=((21.0, 90.0),)), 0, True, 3620, (-7, 0, 20)),
        # a start before the request was made does not count
        (Fairness(), UserHistory(starts=((1.0, 5.0),)), 0, True, 3620, (-7, 0, 20)),
        (Fairness(max_penalty_s=80), UserHistory(), 0, True, 100, (-7, 0, 20)),
        (Fairness(max_penalty_s=80), UserHistory(), 0, True, 99.9, (-7, 1, 0.0)),
        # by time alone
        (Fairness(penalty_per_request_s=0), SERVED_AT_50, 9, True, 9000, (-7, 0, 20)),
        (Fairness(penalty_per_request_s=0), UserHistory(), 0, False, 0, (-7, 0, 20)),
    ],
)
def test_sort_key_is_priority_starvation_and_share(
    fairness: Fairness,
    past: UserHistory,
    before: int,
    first: bool,
    now: float,
    expected: tuple[float, int, float],
) -> None:
    """A request of priority 7, made at 20. Time and id are last."""
    key = sort_key(pending("x", 20, 7), before, past, fairness, now, first=first)
    assert key == (*expected, 20, "x")


def test_sort_keys_count_the_earlier_requests_of_each_user() -> None:
    """Also those of higher priority, whenever they were made; requests without a user count for nobody."""
    waiting = [
        pending("a0", 3, user="ann"),
        pending("b0", 1, user="bob"),
        pending("n0", 0),
        pending("a9", 5, 9, "ann"),
        pending("a1", 4, user="ann"),
        pending("n1", 2),
        pending("b1", 1, user="bob"),
    ]
    keyed = sort_keys(waiting, lambda _: UserHistory(), Fairness(), 10)
    # a9 is before a0 and a1, which have 60 and 120; b0 and b1 are of one time, by id
    assert [(it.id, key[0], key[2]) for key, it in keyed] == [
        ("a9", -9, 0),
        ("n0", 0, 0),
        ("b0", 0, 0),
        ("n1", 0, 0),
        ("b1", 0, 60),
        ("a0", 0, 60),
        ("a1", 0, 120),
    ]
    assert all(key[3] == it.requested_at and key[4] == it.id for key, it in keyed)


def test_only_the_first_request_of_each_priority_starves() -> None:
    """Of one user; each request without a user is a first one."""
    waiting = [
        pending("a0", 0, user="ann"),
        pending("a1", 1, user="ann"),
        pending("h0", 2, 5, "ann"),
        pending("h1", 3, 5, "ann"),
        pending("n0", 4),
        pending("n1", 5),
    ]
    keyed = sort_keys(waiting, lambda _: UserHistory(), Fairness(), 4000)
    starving = {it.id for key, it in keyed if key[1] == 0}
    assert starving == {"a0", "h0", "n0", "n1"}
    assert [it.id for _, it in keyed] == ["h0", "h1", "a0", "n0", "n1", "a1"]


def test_history_is_looked_up_once_for_each_user() -> None:
    """A pass sorts thousands of requests of a few users."""

    class Counted(UsageHistory):
        calls: list[tuple[str, int, float]] = []  # noqa: RUF012

        def history(self, user: str, held: int, now: float) -> UserHistory:
            self.calls.append((user, held, now))
            return super().history(user, held, now)

    uses = Counted(Fairness())
    uses.charge("ann", 12, 0, 7)
    find = history_lookup({"ann": 3}, uses, 7)
    waiting = [pending(f"r{it}", it, user=user) for it, user in enumerate(["ann", "bob"] * 20)]
    order = queue_order(waiting, find, Fairness(), 7)
    assert uses.calls == [("ann", 3, 7), ("bob", 0, 7)]
    # ann has 12 + 60 * 3 = 192 card-seconds: bob's first four have 0, 60, 120 and 180
    assert [it.user for it in order[:5]] == ["bob"] * 4 + ["ann"]
    assert find("ann").used_s == 12


def test_status_has_the_sentence_of_its_rejection() -> None:
    """With the hint."""
    rejections = (NodeRejection("a", (Reason(ReasonCode.MEMORY, 0, 9, 1),)),)
    status = QueueStatus("x", 1, Unschedulable(rejections, "ask for less"), None)
    assert status.reason == "no GPU fits: 1 of 1 has too little memory; ask for less"


@settings(deadline=None, max_examples=80)
@given(
    waiting=st.lists(
        st.builds(
            pending,
            st.sampled_from("abcdefgh"),
            st.sampled_from([0, 1, 2, 5000, 2**53]),
            st.sampled_from([-(2**31), 0, 2**31]),
            st.sampled_from(["", "ann", "bob"]),
        ),
        unique_by=lambda it: it.id,
    ),
    used=st.sampled_from([0.0, 59.9, 60.0, 1e300]),
    now=st.sampled_from([0.0, 3600.0, 2.0**53 + 4000]),
)
def test_order_of_service_is_total_and_later_arrivals_do_not_change_it(
    waiting: list[PendingRequest], used: float, now: float
) -> None:
    """No two keys are equal; without any other user's requests one's own stay in their order."""

    def find(user: str) -> UserHistory:
        return UserHistory(used_s=used if user == "ann" else 0.0)

    keys = [key for key, _ in sort_keys(waiting, find, Fairness(), now)]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(waiting)
    order = queue_order(waiting, find, Fairness(), now)
    for user in ("ann", "bob"):
        alone = queue_order([it for it in waiting if it.user == user], find, Fairness(), now)
        assert alone == [it for it in order if it.user == user]
    # One more request at the end of time, of the least priority, is last and moves nothing.
    last = pending("last", 2.0**60, -(2**40), "ann")
    assert queue_order([*waiting, last], find, Fairness(), now) == [*order, last]
