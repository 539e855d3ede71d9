"""Reserved cards, backfill and gangs of one scheduling pass."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.gangs import place_gang
from fenka.core.inventory import Node
from fenka.core.ledger import Ledger
from fenka.core.queue import Allocation, Fairness, PendingRequest, SchedulingResult
from fenka.core.reasons import ReasonCode, Unschedulable
from fenka.core.request import Memory, Request
from fenka.core.usage import EmptyUsage
from tests.core.builders import (
    GIB,
    T4_MIB,
    NodesBackfill,
    card,
    clusters,
    held,
    node,
    requests,
    units,
    whole,
)

PLAIN = Fairness(penalty_per_request_s=0)


T4, TWO = node(T4_MIB), node(T4_MIB, T4_MIB)


OTHER = node(T4_MIB, name="b")


def queue(*asked: Request | tuple[Request, float]) -> list[PendingRequest]:
    """w0, w1, … in this order; with a number: it runs for so many seconds at most."""
    made = []
    for number, each in enumerate(asked):
        request, time_limit = each if isinstance(each, tuple) else (each, None)
        made.append(
            PendingRequest(f"w{number}", (request,), float(number), time_limit_s=time_limit)
        )
    return made


def serve(
    waiting: list[PendingRequest], holding: list[Allocation], *nodes: Node, now: float = 100
) -> SchedulingResult:
    """Once."""
    return NodesBackfill(nodes, "binpack", PLAIN).serve(waiting, holding, now)


def seats(step: SchedulingResult) -> dict[str, list[int]]:
    """Who is placed, on which cards."""
    return {name: [it.card for each in found for it in each.slices] for name, found in step.placed}


def named(step: SchedulingResult) -> dict[str, tuple[list[str], float | None]]:
    """Who named which cards, and when they will do."""
    return {
        it.id: (sorted(it.reservation.cards), it.reservation.starts_by)
        for it in step.pending
        if it.reservation
    }


class TestNamedCards:
    """Which cards a head waits for."""

    @pytest.mark.parametrize(
        ("holding", "request_", "expected"),
        [
            # card 1 ends at 200, card 0 at 300
            ([held(0, 14, 300), held(1, 14, 200)], units(8), (["GPU-a-1"], 200)),
            # 8 units on card 1 need both of its two to end (4 free, 9 after the first): 250
            # 14 - 5 - 5 = 4; 4 + 5 = 9 ≥ 8 after the first at 200
            ([held(0, 14, 300), held(1, 5, 200), held(1, 5, 250)], units(8), (["GPU-a-1"], 200)),
            # 10 units need both
            ([held(0, 14, 300), held(1, 5, 200), held(1, 5, 250)], units(10), (["GPU-a-1"], 250)),
            # a certain end goes before an uncertain one
            ([held(0, 14), held(1, 14, 900)], units(8), (["GPU-a-1"], 900)),
            # of uncertain ones the fewest: one on card 1, two on card 0
            ([held(0, 7), held(0, 7), held(1, 14)], units(10), (["GPU-a-1"], None)),
            # two cards: both, when the later ends
            (
                [held(0, 14, 300), held(1, 14, 200)],
                units(8, cards=2),
                (["GPU-a-0", "GPU-a-1"], 300),
            ),
            # whole: everybody must be gone
            ([held(0, 1, 300), held(1, 1, 200), held(1, 1, 400)], whole(), (["GPU-a-0"], 300)),
        ],
    )
    def test_reservation_is_of_the_earliest_cards(
        self, holding: list[Allocation], request_: Request, expected: tuple[list[str], float | None]
    ) -> None:
        """By when they will do."""
        assert named(serve(queue(request_), holding, TWO)) == {"w0": expected}

    def test_later_request_uses_cards_that_are_not_reserved(self) -> None:
        """The head could use both cards, and names one: unlike a waiter that keeps all it could ever use."""
        # card 0: 4 free, one ends at 300; card 1: 4 free, one ends at 200
        holding = [held(0, 10, 300), held(1, 10, 200)]
        step = serve(queue(units(8), units(2)), holding, TWO)
        assert named(step)["w0"] == (["GPU-a-1"], 200)
        assert seats(step) == {"w1": [0]}

    @pytest.mark.parametrize(
        ("time_limit", "expected"),
        # now is 100, the head's card will do at 200
        [(100, {"w1": [0]}), (101, {}), (None, {})],
    )
    def test_reserved_card_is_used_when_deadline_comes_before(
        self, time_limit: float | None, expected: dict[str, list[int]]
    ) -> None:
        """Only who proves to have ended by then."""
        small = units(2) if time_limit is None else (units(2), time_limit)
        step = serve(queue(units(8), small), [held(0, 10, 200)], T4)
        assert seats(step) == expected
        if not expected:
            assert [why.code for why in step.pending[1].unschedulable.reasons] == [
                ReasonCode.RESERVED
            ]

    def test_reserved_card_is_kept_when_no_deadline_is_known(self) -> None:
        """The head's card could do at any moment."""
        step = serve(queue(units(8), (units(2), 1)), [held(0, 10)], T4)
        assert seats(step) == {}
        assert named(step)["w0"] == (["GPU-a-0"], None)

    def test_second_reserves_other_cards_than_the_first(self) -> None:
        """Card 1 will be the first's at 200 and hold 8 of 14 then; 8 more are on card 0 at 300."""
        holding = [held(0, 14, 300), held(1, 14, 200)]
        step = serve(queue(units(8), units(8)), holding, TWO)
        assert named(step) == {"w0": (["GPU-a-1"], 200), "w1": (["GPU-a-0"], 300)}
        # 6 fit beside the first
        step = serve(queue(units(8), units(6)), holding, TWO)
        assert named(step) == {"w0": (["GPU-a-1"], 200), "w1": (["GPU-a-1"], 200)}
        # and who runs for a known time gives the card back: 200 + 50, earlier than 300
        step = serve(queue((units(8), 50), units(8)), holding, TWO)
        assert named(step) == {"w0": (["GPU-a-1"], 200), "w1": (["GPU-a-1"], 250)}

    def test_card_is_never_reserved_when_it_is_cordoned_or_too_small(self) -> None:
        """Who can be served by none of the cards keeps nobody off them."""
        cordoned = Node("a", (card(0), card(1, cordoned=True)))
        step = serve(queue(units(15), units(4, cards=2), units(2)), [], cordoned)
        assert named(step) == {}
        assert seats(step) == {"w2": [0]}
        assert [it.position for it in step.pending] == [1, 2]

    def test_all_cards_are_reserved_when_request_waits_for_cpu(self) -> None:
        """Another card's program would take them; the other node is free."""
        host = replace(TWO, cpu_milli=4000)
        busy = [Allocation(replace(held(0, 1).placement, cpu_milli=3000), 200)]
        asking = Request(Memory(1, GIB), cpu_milli=2000, models=frozenset({"Tesla T4"}))
        step = serve(queue(asking, units(1)), busy, host)
        both = ["GPU-a-0", "GPU-a-1"], 200
        assert named(step) == {"w0": both, "w1": (["GPU-a-0"], 200)}
        assert seats(step) == {}
        assert seats(serve(queue(asking, units(1)), busy, host, OTHER)) == {"w0": [0], "w1": [0]}

    def test_only_the_first_few_reserve_cards(self) -> None:
        """The others are ordered, with position and reason, and no more."""
        step = serve(queue(*[units(14)] * 6), [held(0, 1)], T4)
        assert [it.position for it in step.pending] == [1, 2, 3, 4, 5, 6]
        assert [it.reservation is not None for it in step.pending] == [True] * 4 + [False] * 2
        assert {it.reason for it in step.pending} == {"no GPU fits: 1 of 1 has too little memory"}

    def test_gang_reserves_cards_for_all_its_members(self) -> None:
        """Two of 8 units: card 0 at 300, card 1 at 200; it starts when both will do."""
        waiting = [
            PendingRequest("g", (units(8), units(8)), 0.0),
            *queue((units(4), 100), (units(4), 99)),
        ]
        holding = [held(0, 10, 300), held(1, 10, 200)]
        step = serve(waiting, holding, TWO)
        assert named(step)["g"] == (["GPU-a-0", "GPU-a-1"], 300)
        assert seats(step) == {"w0": [0], "w1": [1]}
        step = serve([PendingRequest("g", (units(8), units(8)), 0.0)], [], TWO)
        assert seats(step) == {"g": [0, 1]}


class TestGangs:
    """Their members do not make room for each other."""

    def test_gang_reserves_cards_that_fit_together(self) -> None:
        """Card 1's three end at some time, card 0's one too: two of 8 need both, not card 0 twice."""
        holding = [held(0, 10), held(1, 5), held(1, 4), held(1, 4)]
        gang = PendingRequest("g", (units(8), units(8)), 0.0)
        assert named(serve([gang], holding, TWO)) == {"g": (["GPU-a-0", "GPU-a-1"], None)}

    def test_impossible_request_reserves_no_card(self) -> None:
        """Two of 8 on one card of 14."""
        gang = PendingRequest("g", (units(8), units(8)), 0.0)
        step = serve([gang, *queue(units(4))], [held(0, 2)], T4)
        assert (named(step), seats(step)) == ({}, {"w0": [0]})

    def test_gang_reserves_by_search_when_greedy_order_fails(self) -> None:
        """7 and 4 on card 1 and 10 on card 0 leave no 7; 7 + 7 and 4 + 10 do, when both have ended."""
        holding = [held(0, 14, 300), held(1, 14, 100)]
        gang = PendingRequest("g", (units(7), units(4), units(10), units(7)), 0.0)
        assert named(serve([gang], holding, TWO)) == {"g": (["GPU-a-0", "GPU-a-1"], None)}


class TestTogether:
    """Several requests for one node: a pod whose containers each have their slice."""

    def test_same_node_request_is_placed_on_one_node_or_not_at_all(self) -> None:
        """a has 4 units left, b 8: two of 4 are on b together, apart they would be a's first."""
        pair = PendingRequest("w0", (units(4), units(4)), 0.0, same_node=True)
        holding = [held(0, 10, 200), held(0, 6, 300, "b")]
        step = serve([pair], holding, T4, OTHER)
        assert [it.node for _, found in step.placed for it in found] == ["b", "b"]
        step = serve([replace(pair, same_node=False)], holding, T4, OTHER)
        assert [it.node for _, found in step.placed for it in found] == ["a", "b"]
        # 9 held of b's 14: no node has 8 left, though each has 4.
        step = serve([pair], [held(0, 10, 200), held(0, 9, 300, "b")], T4, OTHER)
        assert step.placed == ()
        assert step.pending[0].reason == "no GPU fits: 2 of 2 have too little memory"
        # b, when its one has ended, or a: the earlier
        assert named(step) == {"w0": (["GPU-a-0"], 200)}

    def test_same_node_request_is_rejected_when_no_node_fits_all(self) -> None:
        """Two of 8 on cards of 14: each node has one. It keeps nobody off anything."""
        pair = PendingRequest("w0", (units(8), units(8)), 0.0, same_node=True)
        step = serve([pair], [], T4, OTHER)
        assert (step.placed, named(step)) == ((), {})
        step = serve([pair], [held(0, 14, 300)], TWO, OTHER)
        assert named(step) == {"w0": (["GPU-a-0", "GPU-a-1"], 300)}

    @settings(deadline=None)
    @given(
        nodes=clusters(),
        asked=st.lists(st.lists(requests(), min_size=1, max_size=3), max_size=4),
    )
    def test_same_node_requests_use_different_nodes(
        self, nodes: tuple[Node, ...], asked: list[list[Request]]
    ) -> None:
        """Placed or named; no card holds more than it has; the first is placed where it could be."""
        waiting = [
            PendingRequest(f"w{n}", tuple(it), float(n), same_node=True)
            for n, it in enumerate(asked)
        ]
        step = NodesBackfill(nodes, "binpack", PLAIN).serve(waiting, [], 0)
        ledger = Ledger(nodes)
        for name, found in step.placed:
            assert len({it.node for it in found}) == 1
            for number, it in enumerate(found):
                ledger.adopt(f"{name}/{number}", it)
        home = {card.uuid: it.name for it in nodes for card in it.cards}
        for standing in step.pending:
            if standing.reservation:
                assert len({home[uuid] for uuid in standing.reservation.cards}) == 1
        for first in waiting[:1]:
            could = any(
                not isinstance(
                    place_gang(EmptyUsage(), first.requests, "binpack", (it,)), Unschedulable
                )
                for it in nodes
            )
            assert (first.id in dict(step.placed)) == could


class TestNodesItMayGoTo:
    """Selectors and taints: a waiter is placed on its own nodes, and names cards of these alone."""

    def test_request_is_placed_and_reserved_on_eligible_nodes_only(self) -> None:
        """b's card is free, a's has 4 of 14 units left until 200; w0 may go to a alone and wants 8."""
        waiting = [
            PendingRequest("w0", (units(8),), 0.0, nodes=frozenset({"a"})),
            PendingRequest("w1", (units(8),), 1.0, nodes=frozenset({"b"})),
            PendingRequest("w2", (units(4),), 2.0),
        ]
        step = serve(waiting, [held(0, 10, 200)], T4, OTHER)
        assert named(step) == {"w0": (["GPU-a-0"], 200)}
        assert [(name, found[0].node) for name, found in step.placed] == [("w1", "b"), ("w2", "b")]
        # Only a's card is counted in its reason.
        assert step.pending[0].reason == "no GPU fits: 1 of 1 has too little memory"

    def test_request_is_rejected_when_eligible_nodes_do_not_exist(self) -> None:
        """It keeps nobody off anything."""
        waiting = [
            PendingRequest("w0", (units(8),), 0.0, nodes=frozenset({"c"})),
            *queue(units(14)),
        ]
        step = serve([replace(waiting[0]), replace(waiting[1], id="w1")], [], T4)
        assert seats(step) == {"w1": [0]}
        assert [(it.id, it.reservation, it.reason) for it in step.pending] == [
            ("w0", None, "there is no GPU")
        ]

    def test_equal_requests_are_separate_when_eligible_nodes_differ(self) -> None:
        """That one was refused on a says nothing of b."""
        waiting = [
            PendingRequest(f"w{number}", (units(8),), float(number), nodes=frozenset({where}))
            for number, where in enumerate("aab")
        ]
        step = serve(waiting, [held(0, 10)], T4, OTHER)
        assert seats(step) == {"w2": [0]}
        assert [it.id for it in step.pending] == ["w0", "w1"]

    def test_gang_is_placed_on_eligible_nodes_only(self) -> None:
        """Both members on b, though a is empty."""
        gang = PendingRequest("g", (units(8), units(8)), 0.0, nodes=frozenset({"b"}))
        two = node(T4_MIB, T4_MIB, name="b")
        step = serve([gang], [], TWO, two)
        assert [it.node for _, found in step.placed for it in found] == ["b", "b"]
        step = serve([gang], [held(0, 10, 200, "b")], TWO, two)
        assert named(step) == {"g": (["GPU-b-0", "GPU-b-1"], 200)}

    @settings(deadline=None)
    @given(
        nodes=clusters(),
        asked=st.lists(st.tuples(requests(), st.sets(st.integers(0, 2))), max_size=6),
    )
    def test_result_is_the_same_when_ineligible_nodes_are_removed(
        self, nodes: tuple[Node, ...], asked: list[tuple[Request, set[int]]]
    ) -> None:
        """Of all who wait, each is placed, and names cards, on its own nodes; the first as on these alone."""
        waiting = [
            PendingRequest(f"w{n}", (it,), float(n), nodes=frozenset(f"n{i}" for i in on))
            for n, (it, on) in enumerate(asked)
        ]
        step = NodesBackfill(nodes, "binpack", PLAIN).serve(waiting, [], 0)
        allowed = {it.id: it.nodes or frozenset() for it in waiting}
        for name, found in step.placed:
            assert {it.node for it in found} <= allowed[name]
        home = {card.uuid: it.name for it in nodes for card in it.cards}
        for it in step.pending:
            if it.reservation:
                assert {home[uuid] for uuid in it.reservation.cards} <= allowed[it.id]
        for first in waiting[:1]:
            alone = NodesBackfill(
                [it for it in nodes if it.name in allowed[first.id]], "binpack", PLAIN
            )
            mine = alone.serve([replace(first, nodes=None)], [], 0)
            assert mine.placed == tuple(it for it in step.placed if it[0] == first.id)
            assert mine.pending == tuple(it for it in step.pending if it.id == first.id)


def test_result_is_the_same_when_nothing_is_cached() -> None:
    """The same, whether it served before or not, when others hold and nodes are as they were."""
    seasoned = NodesBackfill([TWO, OTHER], "binpack", PLAIN)
    situations = [
        (queue(units(8), units(2)), [held(0, 10, 300), held(1, 10, 200)]),
        (queue(units(8), units(2)), [held(0, 10, 300), held(1, 10, 200), held(0, 14, name="b")]),
        (queue(units(8), (units(2), 9.0)), [held(0, 14), held(1, 10, 150), held(0, 14, 120, "b")]),
        (queue(units(8), units(2)), []),
        (queue(units(8), units(2)), [held(0, 10, 300), held(1, 10, 200)]),
    ]
    for waiting, holding in situations:
        fresh = serve(waiting, holding, TWO, OTHER)
        assert seasoned.serve(waiting, holding, 100) == fresh


def test_result_is_the_same_when_nodes_change() -> None:
    """It goes by the nodes as they are now."""
    scheduler = NodesBackfill([TWO], "binpack", PLAIN)
    waiting, holding = queue(units(8)), [held(0, 14, 300), held(1, 14, 200)]
    assert named(scheduler.serve(waiting, holding, 100)) == {"w0": (["GPU-a-1"], 200)}
    sick = Node("a", (card(0), card(1, healthy=False)))
    scheduler.set_nodes([sick])
    assert named(scheduler.serve(waiting, holding, 100)) == {"w0": (["GPU-a-0"], 300)}
    scheduler.set_nodes([sick, OTHER])
    step = scheduler.serve(waiting, holding, 100)
    assert [placed[0].node for _, placed in step.placed] == ["b"]
    scheduler.set_nodes([])
    assert [it.reason for it in scheduler.serve(waiting, holding, 100).pending] == [
        "there is no GPU"
    ]


def test_impossible_gang_blocks_no_request() -> None:
    """Three of 8 units on two cards of 14: each alone would fit, together they never do."""
    never = PendingRequest("never", (units(8),) * 3, 0.0)
    small = PendingRequest("small", (units(8),), 1.0)
    step = serve([never, small], [], TWO)
    assert seats(step) == {"small": [0]}
    assert named(step) == {}
    # Two of them would: that is a matter of time.
    two = PendingRequest("two", (units(8),) * 2, 0.0)
    step = serve([two, small], [held(0, 8)], TWO)
    assert set(named(step)) == {"two", "small"}


def test_one_queue_serves_nodes_of_different_units() -> None:
    """Each request is resolved by the node that it goes to; what waits reserves a card of either."""
    nodes = (node(T4_MIB, name="a"), replace(node(T4_MIB, name="b"), unit_mib=256))
    request = Request(Memory(14, None))
    pending = [PendingRequest(f"r{number}", (request,), number) for number in range(6)]
    result = NodesBackfill(nodes, "binpack").serve(pending, (), 0)
    placed = [(it.node, it.slices[0].memory_mib) for _, (it,) in result.placed]
    assert sorted(placed) == [("a", 15079), *[("b", 3639)] * 4]
    (waiting,) = result.pending
    assert waiting.id == "r5"
    assert waiting.reservation is not None
    assert waiting.reason == "no GPU fits: 2 of 2 have too little memory"
