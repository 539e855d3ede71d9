"""What users have had: added up, decayed, and compared."""

from math import exp, inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId
from fenka.core.queue import (
    REMEMBERED,
    Fairness,
    PendingRequest,
    UsageHistory,
    UserHistory,
    cards_of,
    history_lookup,
    queue_order,
)
from fenka.core.request import Placement, Slice
from tests.core.builders import T4_MIB, units

HOUR = 3600.0


def weighed(since: float, until: float, now: float, half_life: float = HOUR) -> float:
    """Return what a card that was held in between counts at `now`: an integral, by small steps."""
    steps = 2000
    width = (until - since) / steps
    return sum(
        width * exp(-log(2) / half_life * (now - since - (step + 0.5) * width))
        for step in range(steps)
    )


def used(uses: UsageHistory, user: str, now: float) -> float:
    """Return the card-seconds of a user."""
    return uses.history(user, 0, now).used_s


def test_usage_is_card_seconds_that_halve_every_half_life() -> None:
    """Half a card for 100 s; an hour later half of that counts, two hours later a quarter."""
    uses = UsageHistory(Fairness())
    uses.start("p", "a", 0.5, 0, 0, 0)
    assert used(uses, "a", 100) == pytest.approx(0.5 * weighed(0, 100, 100))
    uses.stop("p", 100, 100)
    then = used(uses, "a", 100)
    assert used(uses, "a", 100 + HOUR) == pytest.approx(then / 2)
    assert used(uses, "a", 100 + 2 * HOUR) == pytest.approx(then / 4)
    assert uses.used(100 + 60 * HOUR) == {}


@given(
    spans=st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 5000), st.floats(0.1, 8)), max_size=5)
)
def test_usage_is_the_same_when_it_is_reported_late(
    spans: list[tuple[float, float, float]],
) -> None:
    """Reported as it happens, or all at once after a restart by the times of the pods' status."""
    live, late = UsageHistory(Fairness()), UsageHistory(Fairness())
    events = []
    for number, (one, other, cards) in enumerate(spans):
        since, until = min(one, other), max(one, other)
        events += [(since, 0, number, cards), (until, 1, number, cards)]
        late.start(str(number), "a", cards, 0, since, 6000)
        late.stop(str(number), until, 6000)
    for at, ends, number, cards in sorted(events):
        if ends:
            live.stop(str(number), at, at)
        else:
            live.start(str(number), "a", cards, 0, at, at)
    assert used(late, "a", 6000) == pytest.approx(used(live, "a", 6000), abs=1e-6)


def test_usage_is_unchanged_when_clock_is_set_back() -> None:
    """Use never falls below 0 either."""
    uses = UsageHistory(Fairness())
    uses.start("p", "a", 1, 0, 1000, 1000)
    assert used(uses, "a", 500) == 0
    uses.stop("p", 400, 500)
    assert used(uses, "a", 500) == 0


def test_resized_allocation_counts_its_new_size_from_then_on() -> None:
    """One card for 100 s, then two."""
    uses = UsageHistory(Fairness())
    uses.start("p", "a", 1, 0, 0, 0)
    uses.start("p", "a", 2, 0, 0, 100)
    expected = weighed(0, 100, 200) + 2 * weighed(100, 200, 200)
    assert used(uses, "a", 200) == pytest.approx(expected)


def test_nothing_is_remembered_with_a_half_life_of_0() -> None:
    """What a user holds still counts as its turns."""
    uses = UsageHistory(Fairness(half_life_s=0))
    uses.start("p", "a", 1, 0, 0, 0)
    assert used(uses, "a", 100) == 0


@given(
    starts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 100)), max_size=20),
    asked=st.integers(-1, 21),
)
def test_served_at_returns_last_start_of_earlier_requests(
    starts: list[tuple[int, int]], asked: int
) -> None:
    """Starts are told in any order."""
    uses = UsageHistory(Fairness())
    for number, (requested_at, at) in enumerate(starts):
        uses.start(str(number), "a", 0.1, requested_at, at, 200)
    expected = max((at for made, at in starts if made <= asked), default=float("-inf"))
    assert uses.history("a", 0, 200).served_at(asked) == expected


@given(
    jobs=st.integers(2, 800),
    lasts=st.floats(0.5, 600),
    ago=st.floats(0, 4 * HOUR),
    comes=st.floats(0, HOUR - 1),
)
def test_idle_users_first_is_before_all_of_one_that_has_used_the_card(
    jobs: int, lasts: float, ago: float, comes: float
) -> None:
    """Jobs asked for together ran one after the other, as many as there was time for; the others wait."""
    fairness = Fairness()
    uses, now = UsageHistory(fairness), ago
    done = min(jobs - 1, int(ago / lasts) + 1)
    for number in range(done):
        begun = number * lasts
        uses.start(str(number), "heavy", 1, 0, begun, max(begun, now))
        uses.stop(str(number), min(begun + lasts, now), now)
    waiting = [PendingRequest(f"h{it}", (units(1),), 0.0, user="heavy") for it in range(done, jobs)]
    waiting.append(PendingRequest("idle", (units(1),), max(0.0, now - comes), user="idle"))
    order = queue_order(waiting, history_lookup({}, uses, now), fairness, now)
    last = uses.history("heavy", 0, now).served_at(0)
    if now - last < fairness.max_penalty_s:
        assert order[0].id == "idle" or used(uses, "heavy", now) == 0


def test_two_users_of_long_and_short_jobs_have_the_card_for_as_long() -> None:
    """One asks for jobs of 600 s, the other for jobs of 7 s, one after the other, for two days."""
    fairness = Fairness()
    uses, now = UsageHistory(fairness), 0.0
    had = {"long": 0.0, "short": 0.0}
    made = dict.fromkeys(had, 0)
    while now < 48 * HOUR:
        waiting = [PendingRequest(user, (units(1),), float(made[user]), user=user) for user in had]
        user = queue_order(waiting, history_lookup({}, uses, now), fairness, now)[0].user
        lasts = 600.0 if user == "long" else 7.0
        uses.start("job", user, 1, made[user], now, now)
        now += lasts
        uses.stop("job", now, now)
        had[user] += lasts
        made[user] += 1
    assert had["long"] == pytest.approx(had["short"], rel=0.2)


def test_a_slice_counts_for_the_larger_of_its_shares() -> None:
    """A quarter of memory, half of the compute; a whole card is one card, whatever it says."""
    cards = [Card(index, DeviceId(f"GPU-{index}"), "Tesla T4", T4_MIB) for index in range(2)]
    one = Placement(
        "n", (Slice(0, DeviceId("GPU-0"), T4_MIB // 4, 50), Slice(1, DeviceId("GPU-1"), T4_MIB, 0))
    )
    assert cards_of([one], cards) == pytest.approx(1.5)
    assert cards_of([Placement("n", (Slice(0, DeviceId("GPU-0"), 1, 0),), whole=True)], cards) == 1


@pytest.mark.parametrize("field", ["penalty_per_request_s", "max_penalty_s", "half_life_s"])
@pytest.mark.parametrize("seconds", [-1, -1e-9, inf, -inf, nan])
def test_settings_are_invalid_when_one_is_no_amount_of_time(field: str, seconds: float) -> None:
    """Each is finite, and 0 or more."""
    with pytest.raises(ValueError, match="0 or more seconds"):
        Fairness(**{field: seconds})
    assert Fairness(**{field: 0}) is not None


def test_allocation_counts_once_when_it_is_reported_again() -> None:
    """Informers bring the same pod several times."""
    uses = UsageHistory(Fairness())
    for now in (0, 10, 50):
        uses.start("p", "a", 1, 0, 0, now)
    assert used(uses, "a", 100) == pytest.approx(weighed(0, 100, 100))
    assert (uses.holds("p"), uses.holders) == (True, frozenset({"p"}))
    uses.stop("p", 100, 100)
    uses.stop("p", 50, 100)
    uses.stop("unknown", 0, 100)
    assert used(uses, "a", 100) == pytest.approx(weighed(0, 100, 100))
    assert (uses.holds("p"), uses.holders) == (False, frozenset())


def test_allocation_is_the_new_users_when_its_user_changes() -> None:
    """An id that is used again after its first owner is gone: 100 s of one, then 50 s of the other."""
    uses = UsageHistory(Fairness())
    uses.start("p", "a", 1, 0, 0, 0)
    uses.start("p", "b", 1, 0, 0, 100)
    assert used(uses, "b", 150) == pytest.approx(weighed(100, 150, 150))
    assert used(uses, "a", 150) == pytest.approx(weighed(0, 100, 150))


def test_charge_counts_what_was_held_and_not_used() -> None:
    """30 card-seconds for a reservation, beside those of a card; the request counts as served."""
    uses = UsageHistory(Fairness())
    uses.charge("a", 30, 5, 100)
    assert used(uses, "a", 100) == 30
    assert uses.history("a", 0, 100).served_at(5) == 100
    assert uses.history("a", 0, 100).served_at(4.9) == -inf
    assert used(uses, "a", 100 + HOUR) == pytest.approx(15)


def test_starts_are_forgotten_when_they_can_no_longer_delay_anybody() -> None:
    """After max_penalty_s; what a user holds is the caller's count and stays."""
    uses = UsageHistory(Fairness(max_penalty_s=60, half_life_s=1))
    uses.start("p", "a", 1, 7, 10, 10)
    uses.stop("p", 10, 10)
    assert uses.history("a", 2, 69.9) == UserHistory(2, 0.0, ((7, 10),))
    assert uses.history("a", 2, 70) == UserHistory(2)
    assert uses.history("a", 3, 80) == UserHistory(3)


def test_newest_starts_are_kept_when_there_are_too_many() -> None:
    """The memory of each user is bounded."""
    uses, many = UsageHistory(Fairness()), REMEMBERED + 10
    for number in range(many):
        uses.start(str(number), "a", 0.1, number, number, number)
    starts = uses.history("a", 0, many).starts
    assert starts == tuple((number, number) for number in range(10, many))


def test_users_are_shown_only_when_they_have_used_something() -> None:
    """A millisecond of a card is nothing; what still runs counts from its first second."""
    uses = UsageHistory(Fairness())
    uses.charge("little", 0.0009, 0, 0)
    uses.charge("some", 0.5, 0, 0)
    uses.start("p", "running", 1, 0, 0, 0)
    assert uses.used(0) == {"some": 0.5}
    assert uses.used(1).keys() == {"some", "running"}


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["start", "stop", "charge"]),
            st.sampled_from("pqr"),
            st.sampled_from("ab"),
            st.floats(0, 4),
            st.floats(-50, 200),
        ),
        max_size=20,
    )
)
def test_usage_is_never_negative_and_never_more_than_all_cards_were_held(
    events: list[tuple[str, str, str, float, float]],
) -> None:
    """Whatever is reported in whatever order, with clocks that jump."""
    uses, now, most = UsageHistory(Fairness()), 0.0, 0.0
    for kind, holder, user, amount, step in events:
        now += step
        if kind == "start":
            uses.start(holder, user, amount, now, now, now)
        elif kind == "stop":
            uses.stop(holder, now, now)
        else:
            uses.charge(user, amount, now, now)
            most += amount
        # Three holders of at most four cards, over all the time that has passed.
        most += 12 * max(step, 0)
        each = uses.used(now)
        assert all(seconds >= 0 for seconds in each.values())
        assert sum(each.values()) <= most + 1e-6
        history = uses.history(user, 1, now)
        assert list(history.starts) == sorted(history.starts)
        assert [at for _, at in history.starts] == sorted(at for _, at in history.starts)


@pytest.mark.parametrize(
    ("mib", "compute", "cards"),
    [
        # 15079 / 15079 = 1, 0 / 100 = 0
        (T4_MIB, 0, 1.0),
        # 0 of memory, 25 of 100 percent
        (0, 25, 0.25),
        # 3770 / 15079 = 0.25002, 10 / 100 = 0.1
        (3770, 10, 3770 / T4_MIB),
        (0, 0, 0.0),
    ],
)
def test_slice_is_the_larger_of_its_shares_of_its_card(
    mib: int, compute: int, cards: float
) -> None:
    """Of a card that the node does not have any more it is a whole card."""
    known = Card(0, DeviceId("GPU-0"), "Tesla T4", T4_MIB)
    placement = Placement("n", (Slice(0, known.uuid, mib, compute),))
    assert cards_of([placement], [known]) == pytest.approx(cards)
    assert cards_of([placement, placement], [known]) == pytest.approx(2 * cards)
    assert cards_of([placement], []) == 1


@pytest.mark.parametrize(
    ("mib", "compute", "card_mib", "card_compute", "cards"),
    [
        # nothing of nothing is nothing, anything is all of it
        (0, 0, 0, 100, 0.0),
        (4308, 0, 0, 100, 1.0),
        (0, 40, 0, 100, 0.4),
        (4308, 40, 0, 100, 1.0),
        (100, 40, 1000, 0, 1.0),
        (100, 0, 1000, 0, 0.1),
        # more than the card has: a record of a card that was larger
        (3000, 0, 1000, 100, 3.0),
        (2**53, 0, 2**54, 100, 0.5),
    ],
)
def test_slice_counts_when_its_card_reports_no_memory_or_no_compute(
    mib: int, compute: int, card_mib: int, card_compute: int, cards: float
) -> None:
    """A node that offers fewer units than it has cards has cards of 0 MiB, and pods from before."""
    card = Card(0, DeviceId("GPU-0"), "", card_mib, card_compute)
    placement = Placement("n", (Slice(0, card.uuid, mib, compute),))
    assert cards_of([placement], [card]) == cards
