"""The order of pending requests, and what a reservation blocks."""

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.fairness import Fairness, UserHistory
from fenka.core.inventory import DeviceId
from fenka.core.queue import PendingRequest, Reservation, queue_order
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
