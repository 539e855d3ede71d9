"""Both timelines, by the same tables: where and when a request starts first, over changes of what is held."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from fenka.core.backfill import EarliestStart, Timeline
from fenka.core.columnar_timeline import SPARE, CardStates, ColumnarTimeline
from fenka.core.inventory import Node
from fenka.core.queue import Allocation
from fenka.core.request import Memory, Placement, Request
from tests.core.builders import (
    P4_MIB,
    T4_MIB,
    card,
    device,
    exact,
    node,
    piece,
    placement,
    units,
    whole,
)

Held = Mapping[str, Sequence[Allocation]]
Make = Callable[[Sequence[Node], Held, float], Timeline]

A, B, C = node(T4_MIB, T4_MIB), node(T4_MIB, name="b"), node(P4_MIB, name="c")


def columnar(nodes: Sequence[Node], held: Held, now: float) -> Timeline:
    """Return the twin, with states of its own."""
    return ColumnarTimeline(nodes, held, now, CardStates())


both = pytest.mark.parametrize("make", [Timeline, columnar])


def on(where: str, mib: int, until: float | None, compute: int = 0) -> Allocation:
    """Return an allocation on a card: a0 is card 0 of node a."""
    name, index = where[0], int(where[1:])
    return Allocation(placement(piece(index, mib, compute, name=name), name=name), until)


def shown(start: EarliestStart | None) -> tuple[float, int, str] | None:
    """Return time, number of uncertain ends, and the cards."""
    if start is None:
        return None
    cards = " ".join(f"{start.node.name}{each.index}" for each in start.cards)
    return start.at, start.uncertain, cards


HELD = {
    # a0 is full until 50 and then has 9000 until 70; a1 until 80 and, for half of it, nobody knows
    "a": [on("a0", 6079, 50), on("a0", 9000, 70), on("a1", 8079, 80), on("a1", 7000, None)],
    # b0 has 60 percent of its compute held until 40, and c0 is held whole
    "b": [on("b0", 1000, 40, 60)],
    "c": [Allocation(placement(piece(0, P4_MIB, 100, name="c"), name="c", whole=True), 30)],
}


@both
@pytest.mark.parametrize(
    ("request_", "among", "now", "expected"),
    [
        # b0 has 15079 - 1000 = 14079 now
        (exact(14_079), None, 10, (10, 0, "b0")),
        (exact(14_080), None, 10, (40, 0, "b0")),
        (exact(1, compute=40), None, 10, (10, 0, "b0")),
        (exact(1, compute=41), None, 10, (30, 0, "c0")),
        # the P4 has 7611
        (exact(7611, compute=41), None, 10, (30, 0, "c0")),
        (exact(7612, compute=41), None, 10, (40, 0, "b0")),
        # a0: 6079 at 50, all at 70; a1: 15079 - 7000 = 8079 at 80
        (exact(6079), "a", 10, (50, 0, "a0")),
        (exact(6080), "a", 10, (70, 0, "a0")),
        (exact(6080), "a", 75, (75, 0, "a0")),
        (exact(8079, cards=2), "a", 10, (80, 0, "a0 a1")),
        (exact(8080, cards=2), "a", 10, (inf, 1, "a0 a1")),
        (whole(2), None, 10, (inf, 1, "a0 a1")),
        (whole(), None, 10, (30, 0, "c0")),
        # the model is T4 everywhere here
        (Request(whole=True, models=frozenset({"Tesla T4"})), "bc", 35, (35, 0, "c0")),
        (Request(whole=True, models=frozenset({"V100"})), None, 10, None),
        (units(1, cards=3), None, 10, None),
        (units(15), None, 10, None),
        (units(8), "c", 10, None),
        (units(1), "", 10, None),
        (units(1), "xyz", 10, None),
    ],
)
def test_first_start_is_the_earliest_of_all_nodes(
    make: Make,
    request_: Request,
    among: str | None,
    now: float,
    expected: tuple[float, int, str] | None,
) -> None:
    """Certain ends come before uncertain ones, nothing starts before now."""
    line = make([C, B, A], HELD, now)
    assert shown(line.earliest(request_, None if among is None else frozenset(among))) == expected


@both
def test_nodes_are_in_the_order_in_which_all_requests_can_start(make: Make) -> None:
    """8 units are 8616 MiB: b now, a at 70, c never; 14 units: b at 40, a at 70."""
    line = make([C, B, A], HELD, 10)
    assert line.by_start([units(8)]) == ["b", "a"]
    assert line.by_start([units(1)]) == ["b", "c", "a"]
    assert line.by_start([units(1), whole()]) == ["c", "b", "a"]
    assert line.by_start([units(1, cards=2)]) == ["a"]
    assert line.by_start([units(1), units(15)]) == []
    assert line.by_start([units(8)], frozenset("ac")) == ["a"]
    # at the same time in the order of names
    assert make([B, A, C], {}, 0).by_start([units(1)]) == ["a", "b", "c"]


@both
@pytest.mark.parametrize(
    ("more", "request_", "expected"),
    [
        # 14079 are free of b0 now; 9000 more until 60 leave 5079; 7000 more leave 8079 from 40 on
        (on("b0", 9000, 60), exact(5079), (10, 0, "b0")),
        (on("b0", 9000, 60), exact(5080), (30, 0, "c0")),
        (on("b0", 7000, 60), exact(8079), (40, 0, "b0")),
        (on("b0", 7000, 60), exact(8080), (60, 0, "b0")),
        (on("b0", 9000, 60), exact(7612), (60, 0, "b0")),
        (on("c0", 1, 90), exact(7611), (10, 0, "b0")),
        (on("c0", 1, 90), whole(), (40, 0, "b0")),
    ],
)
def test_start_is_later_when_the_pass_has_added_something(
    make: Make, more: Allocation, request_: Request, expected: tuple[float, int, str]
) -> None:
    """And as before when that is removed again; a reservation keeps the card from those before it."""
    line = make([C, B, A], HELD, 10)
    before = shown(line.earliest(request_))
    line.add(more)
    assert shown(line.earliest(request_)) == expected
    line.reserve([device(0, "b"), device(0, "c")], 500)
    later = shown(line.earliest(request_, frozenset("b")))
    line.remove(more)
    if more.placement.node == "b":
        assert later is not None
        assert later[0] == 500
    assert shown(line.earliest(request_)) == before


@both
def test_start_waits_for_the_host_when_the_node_counts_it(make: Make) -> None:
    """4 cores of a, 3 held until 20 and 1 for an unknown time; b's are not counted."""
    host = replace(A, cpu_milli=4000)
    held = {"a": [Allocation(Placement("a", (), 3000), 20), Allocation(Placement("a", (), 1000))]}
    line = make([host, B], held, 0)
    asking = Request(Memory(1), cpu_milli=3000)
    assert shown(line.earliest(asking, frozenset("a"))) == (20, 0, "a0")
    assert shown(line.earliest(replace(asking, cpu_milli=3001), frozenset("a"))) == (inf, 1, "a0")
    assert line.earliest(replace(asking, cpu_milli=4001), frozenset("a")) is None
    assert shown(line.earliest(asking)) == (0, 0, "b0")
    assert line.by_start([asking, units(1)]) == ["b", "a"]
    assert line.by_start([replace(asking, cpu_milli=4001)]) == ["b"]


@both
@pytest.mark.parametrize("nodes", [[], [Node("a", ())]])
def test_nothing_starts_when_there_is_no_card(make: Make, nodes: list[Node]) -> None:
    """Neither on no node nor on one without cards."""
    line = make(nodes, {"gone": [on("g0", 1, 5)]}, 0)
    for request in (units(1), whole(), Request(Memory(1), cpu_milli=1)):
        assert line.earliest(request) is None
        assert line.by_start([request]) == []


class TestKeptStates:
    """One table of states serves every pass."""

    def test_only_changed_nodes_are_computed_when_a_pass_begins(self) -> None:
        """The others keep their states, also when they are told again in equal values."""
        states = CardStates()
        nodes = {each.name: each for each in (A, B)}
        read: list[str] = []

        class Watched(list[Allocation]):
            def __iter__(self) -> object:  # type: ignore[override]
                read.append("read")
                return super().__iter__()

        held = {"a": Watched([on("a0", 100, 9)]), "b": Watched()}
        states.refresh(nodes, held)
        assert len(read) == 2
        states.refresh(dict(nodes), dict(held))
        states.refresh(nodes, {"a": [on("a0", 100, 9)], "b": []})
        assert len(read) == 2
        states.refresh(nodes, {"a": Watched([on("a0", 100, 8)]), "b": held["b"]})
        assert len(read) == 3

    def test_states_follow_when_nodes_and_allocations_change(self) -> None:
        """A node comes, gets a sick card, has more ends than there is room for, and goes."""
        states = CardStates()

        def first(nodes: Sequence[Node], held: Held, request: Request) -> object:
            start = ColumnarTimeline(nodes, held, 0, states).earliest(request)
            assert shown(start) == shown(Timeline(nodes, held, 0).earliest(request))
            return shown(start)

        assert first([B], {}, units(14)) == (0, 0, "b0")
        assert first([B, A], {"b": [on("b0", 1, 5)]}, units(14)) == (0, 0, "a0")
        sick = Node("a", (card(0, healthy=False), card(1, cordoned=True)))
        assert first([B, sick], {"b": [on("b0", 1, 5)]}, units(14)) == (5, 0, "b0")
        # one more state for each of so many ends
        many = [on("b0", 1, 10.0 + it) for it in range(4 * SPARE)]
        assert first([B, sick], {"b": many}, exact(T4_MIB - 3)) == (10 + 4 * SPARE - 4, 0, "b0")
        assert first([B, sick], {"b": many[:1]}, whole()) == (10, 0, "b0")
        assert first([sick], {}, units(1)) is None
        assert first([], {}, units(1)) is None
        assert first([C, A], {"a": [on("a0", 1, None)]}, whole(2)) == (
            inf,
            1,
            "a1 a0",
        )

    def test_columns_to_spare_hold_no_state(self) -> None:
        """After a long list of ends became a short one nothing is left of it."""
        states = CardStates()
        for ends in (6, 1, 3, 0):
            states.refresh({"b": B}, {"b": [on("b0", 1, float(it)) for it in range(ends)]})
            assert np.count_nonzero(states.exists) == ends + 1
            assert states.starts.tolist() == [0]
