"""What one pass over the queue leaves to the next requests, to the next pass, and to its caller."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from fenka.core.backfill import (
    MAX_IMPOSSIBLE,
    Backfill,
    EarliestStart,
    Timeline,
    complete,
    held_by_user,
)
from fenka.core.gangs import PlainPlacer
from fenka.core.inventory import Node
from fenka.core.queue import (
    Allocation,
    Fairness,
    PendingRequest,
    SchedulingResult,
    UsageHistory,
    history_lookup,
    queue_order,
)
from fenka.core.request import Memory, Placement, Request
from tests.core.builders import (
    GIB,
    T4_MIB,
    NodesBackfill,
    device,
    exact,
    held,
    holding,
    node,
    units,
    whole,
)

PLAIN = Fairness(penalty_per_request_s=0)
T4, TWO, B = node(T4_MIB), node(T4_MIB, T4_MIB), node(T4_MIB, name="b")


def want(
    name: str, *requests: Request, at: float = 0, limit: float | None = None
) -> PendingRequest:
    """Return a pending request."""
    return PendingRequest(name, requests, at, time_limit_s=limit)


def serve(
    waiting: Sequence[PendingRequest], allocations: Iterable[Allocation] = (), *nodes: Node
) -> SchedulingResult:
    """Serve once, at 100, on one T4 unless other nodes are given."""
    return NodesBackfill(nodes or (T4,), "binpack", PLAIN).serve(waiting, allocations, 100)


def starts(result: SchedulingResult) -> dict[str, object]:
    """Return the start of each reservation, "now" for what is placed, "never" for what reserves nothing."""
    times: dict[str, object] = {name: "now" for name, _ in result.placed}
    for it in result.pending:
        times[it.id] = it.reservation.starts_by if it.reservation else "never"
    return times


class CountingTimeline(Timeline):
    """Counts the requests whose first start is computed."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes, {}, 0)
        self.asked: list[Request] = []

    def earliest(
        self, request: Request, among: frozenset[str] | None = None
    ) -> EarliestStart | None:
        """Count, and compute."""
        self.asked.append(request)
        return super().earliest(request, among)


def asked(backfill: Backfill, *waiting: PendingRequest) -> list[Request]:
    """Serve the requests on one T4. Return those whose first start was computed."""
    timeline = CountingTimeline([T4])
    complete(backfill.serve(waiting, PlainPlacer([T4], holding()), timeline, 0))
    return timeline.asked


def test_impossible_request_is_searched_once_until_nodes_change() -> None:
    """The search for a large gang is long. Other eligible nodes make it another request."""
    backfill = Backfill("binpack")
    never = want("never", units(15))
    assert asked(backfill, never) == [units(15)]
    assert asked(backfill, never, want("again", units(15))) == []
    assert asked(backfill, replace(never, nodes=frozenset({"a"}))) == [units(15)]
    assert asked(backfill, replace(never, same_node=True)) == [units(15)]
    backfill.forget_impossible()
    assert asked(backfill, never) == [units(15)]


def test_impossible_requests_are_forgotten_when_there_are_too_many() -> None:
    """Whoever makes up new requests for ever does not fill the memory; all is searched again then."""
    backfill = Backfill("binpack", depth=1)
    for number in range(MAX_IMPOSSIBLE):
        assert asked(backfill, want("x", exact(16_000 + number)))
    assert asked(backfill, want("x", exact(16_000))) == []
    assert asked(backfill, want("x", exact(15_999)))
    assert asked(backfill, want("x", exact(16_000)))
    assert asked(backfill, want("x", exact(15_999))) == []


def test_possible_request_is_computed_in_every_pass() -> None:
    """It waits for others, who may end: 8 + 8 units on a card of 14."""
    backfill = Backfill("binpack")
    waiting = want("first", units(8)), want("second", units(8), at=1)
    assert asked(backfill, *waiting) == asked(backfill, *waiting) == [units(8)]


@pytest.mark.parametrize(("depth", "expected"), [(0, 0), (1, 1), (2, 2), (5, 3)])
def test_as_many_requests_reserve_as_the_depth_says(depth: int, expected: int) -> None:
    """What reserves nothing, because it is impossible, does not count."""
    waiting = [want("never", units(15)), *(want(f"w{it}", units(14), at=it) for it in (1, 2, 3))]
    result = NodesBackfill((T4,), "binpack", PLAIN, depth).serve(waiting, [held(0, 1, 200)], 100)
    assert [it.position for it in result.pending] == [1, 2, 3, 4]
    assert sum(it.reservation is not None for it in result.pending) == expected
    assert Backfill("spread").depth == 4


@pytest.mark.parametrize(
    ("first", "limit", "then", "expected"),
    [
        # 8 of 14 units are placed now until 100 + 50: 8 more start then
        (units(8), 50, None, {"first": "now", "second": 150}),
        # without a limit nobody knows
        (units(8), None, None, {"first": "now", "second": None}),
        # 6 units beside 8 fit at once
        (units(6), 50, None, {"first": "now", "second": "now"}),
        # the first waits for 3 until 200 and runs for 50, and 12 + 8 > 14
        (units(12), 50, held(0, 3, 200), {"first": 200, "second": 250}),
        (units(12), None, held(0, 3, 200), {"first": 200, "second": None}),
        # who waits for an unknown end keeps the card for an unknown time, limited or not
        (units(12), 50, held(0, 3), {"first": None, "second": None}),
        (units(12), None, held(0, 3), {"first": None, "second": None}),
        # 6 + 8 = 14 fit together when the 9 have ended
        (units(6), 50, held(0, 9, 200), {"first": 200, "second": 200}),
    ],
)
def test_second_request_starts_when_the_first_leaves_room(
    first: Request, limit: float | None, then: Allocation | None, expected: dict[str, object]
) -> None:
    """It asks for 8 units of one T4, after the first."""
    waiting = [want("first", first, limit=limit), want("second", units(8), at=1)]
    assert starts(serve(waiting, [then] if then else [])) == expected


def test_rejection_is_renewed_when_something_was_placed_in_between() -> None:
    """Equal requests for two whole cards, before and after a slice of 1 unit went to the free card."""
    waiting = [
        want("w0", whole(2)),
        want("w1", units(1), at=1, limit=50),
        want("w2", whole(2), at=2),
    ]
    result = serve(waiting, [held(0, 14, 200)], TWO)
    assert starts(result) == {"w0": 200, "w1": "now", "w2": None}
    assert [it.reason for it in result.pending] == [
        "no GPU fits: 1 of 2 is in use, 1 is without enough others beside it",
        "no GPU fits: 2 of 2 are in use",
    ]


def test_equal_rejections_differ_when_nothing_reserves_and_something_was_placed() -> None:
    """Without reservations only the cards decide: the second of two equal requests has its own reasons."""
    waiting = [want("w0", whole(2)), want("w1", units(1), at=1), want("w2", whole(2), at=2)]
    result = NodesBackfill((TWO,), "binpack", PLAIN, 0).serve(waiting, [held(0, 14, 200)], 100)
    assert starts(result) == {"w0": "never", "w1": "now", "w2": "never"}
    assert [it.reason for it in result.pending] == [
        "no GPU fits: 1 of 2 is in use, 1 is without enough others beside it",
        "no GPU fits: 2 of 2 are in use",
    ]


def test_users_take_turns_by_what_they_hold_and_have_used() -> None:
    """The caller counts what they hold; both users want the whole card."""
    waiting = [
        PendingRequest("a", (units(14),), 0.0, user="ann"),
        PendingRequest("b", (units(14),), 1.0, user="bob"),
    ]
    fair, uses = Fairness(), UsageHistory(Fairness())
    uses.charge("ann", 100, 0, 5)

    def first(fairness: Fairness, held_: dict[str, int], history: UsageHistory | None) -> str:
        past = history_lookup(held_, history or UsageHistory(fairness), 5)
        ordered = queue_order(waiting, past, fairness, 5)
        steps = Backfill("binpack").serve(
            ordered, PlainPlacer([T4], holding()), Timeline([T4], {}, 5), 5
        )
        return complete(steps).placed[0][0]

    assert first(fair, {}, None) == "a"
    assert first(fair, {"ann": 1}, None) == "b"
    # 60 * 2 > 100 + 0
    assert first(fair, {"bob": 2}, uses) == "a"
    assert first(fair, {"bob": 1}, uses) == "b"
    # by time alone
    assert first(PLAIN, {"ann": 1}, uses) == "a"


def test_caller_may_do_something_else_before_each_request() -> None:
    """One step for each, also of those that reserve nothing."""
    waiting = [want("never", units(15)), want("w1", units(14), at=1), want("w2", units(14), at=2)]
    steps = Backfill("binpack").serve(
        waiting, PlainPlacer([T4], holding()), Timeline([T4], {}, 0), 0
    )
    assert len(list(steps)) == 3
    empty = Backfill("binpack").serve([], PlainPlacer([T4], holding()), Timeline([T4], {}, 0), 0)
    assert complete(empty) == SchedulingResult((), ())


def test_what_is_placed_is_allocated_on_placer_and_timeline() -> None:
    """For its user and until its deadline; what only reserves is on the timeline alone."""
    placer, timeline = PlainPlacer([TWO], holding()), Timeline([TWO], {}, 10)
    waiting = [want("w0", units(8), limit=5), want("w1", units(8), at=1), want("w2", whole(), at=2)]
    result = complete(Backfill("spread").serve(waiting, placer, timeline, 10))
    # card 0 until 15, card 1 for ever: the whole card is card 0
    assert starts(result) == {"w0": "now", "w1": "now", "w2": 15}
    assert [placer.card_usage("a", device(index)).holders for index in (0, 1)] == [1, 1]
    start = timeline.earliest(units(6))
    assert start is not None
    assert (start.at, start.cards[0].index) == (10, 1)
    start = timeline.earliest(units(7))
    assert start is not None
    # card 0 is w2's from 15 on, and w1's end is as unknown as w2's
    assert (start.at, start.uncertain, start.cards[0].index) == (float("inf"), 1, 0)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # cores: 4 of 4 are held until 200; the second container would need the same 2 again
        ((1000, 1000), {"pod": 200}),
        ((2000, 2000), {"pod": 200}),
        ((2000, 2001), {"pod": "never"}),
        ((4000,), {"pod": 200}),
        ((4001,), {"pod": "never"}),
    ],
)
def test_containers_of_a_pod_share_the_cores_of_their_node(
    requests: tuple[int, ...], expected: dict[str, object]
) -> None:
    """A host of 4 cores, of which 3 are held until 200 and 1 until 150."""
    host = replace(TWO, cpu_milli=4000)
    busy = [
        Allocation(replace(held(0, 1).placement, cpu_milli=3000), 200),
        Allocation(Placement("a", (), 1000), 150),
    ]
    containers = (Request(Memory(1, GIB), cpu_milli=cpu) for cpu in requests)
    pod = replace(want("pod", *containers), same_node=True)
    assert starts(serve([pod], busy, host)) == expected


def test_placements_are_counted_by_user() -> None:
    """Over all nodes; those without a user too."""
    by_node = {
        "a": [replace(held(0, 1), user="ann"), replace(held(1, 1), user="bob"), held(0, 2)],
        "b": [replace(held(0, 1, name="b"), user="ann")],
        "c": [],
    }
    assert held_by_user(by_node) == {"ann": 2, "bob": 1, "": 1}
