"""When cards become free for a request, as tables and against a definition that tries every moment."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.backfill import EarliestStart, Timeline, availabilities, needs_host
from fenka.core.evaluate import Fit, evaluate
from fenka.core.inventory import Node
from fenka.core.queue import Allocation
from fenka.core.request import Memory, Placement, Request
from tests.core.builders import (
    P4_MIB,
    T4_MIB,
    card,
    clusters,
    device,
    exact,
    held,
    holding,
    node,
    piece,
    placement,
    requests,
    t4_mib,
    units,
    whole,
)

TWO = node(T4_MIB, T4_MIB)


def taken(index: int, mib: int, deadline: float | None, compute: int = 0) -> Allocation:
    """Return an allocation of this much of a card."""
    return Allocation(placement(piece(index, mib, compute)), deadline)


def found(request: Request, node: Node, *allocations: Allocation) -> list[tuple[int, float, int]]:
    """Return card, time and number of uncertain ends, the earliest first."""
    return [
        (it.card.index, it.at, it.uncertain) for it in availabilities(request, node, allocations)
    ]


@pytest.mark.parametrize(
    ("request_", "allocations", "expected"),
    [
        # nothing is held: now, in the order of indexes
        (units(14), [], [(0, -inf, 0), (1, -inf, 0)]),
        # 15079 - 10000 = 5079 are free, 4 units are 4308
        (units(4), [taken(0, 10_000, 50)], [(0, -inf, 0), (1, -inf, 0)]),
        # 5 units are 5385 > 5079: card 0 at 50
        (units(5), [taken(0, 10_000, 50)], [(1, -inf, 0), (0, 50, 0)]),
        # 8000 + 7000 are held: at 30, 8079 are free; at 60, all
        (exact(8000), [taken(0, 8000, 60), taken(0, 7000, 30)], [(1, -inf, 0), (0, 60, 0)]),
        (exact(7000), [taken(0, 8000, 60), taken(0, 7000, 30)], [(1, -inf, 0), (0, 30, 0)]),
        # without a deadline nobody knows when, but one end would do
        (units(14), [taken(0, 100, None)], [(1, -inf, 0), (0, inf, 1)]),
        # the larger of two without a deadline makes room alone: 15079 - 100 = 14979
        (exact(14_979), [taken(0, 100, None), taken(0, 9000, None)], [(1, -inf, 0), (0, inf, 1)]),
        (units(14), [taken(0, 100, None), taken(0, 9000, None)], [(1, -inf, 0), (0, inf, 2)]),
        # an infinite deadline never ends: the card is left out
        (units(14), [taken(0, 100, inf)], [(1, -inf, 0)]),
        (units(13), [taken(0, 100, inf)], [(0, -inf, 0), (1, -inf, 0)]),
        # one that stays is the last that would have to end: 15079 - 100 = 14979 once the others have
        (exact(14_979), [taken(0, 100, inf), taken(0, 50, None)], [(1, -inf, 0), (0, inf, 1)]),
        (exact(14_979), [taken(0, 100, inf), taken(0, 50, 5)], [(1, -inf, 0), (0, 5, 0)]),
        # compute: 60 of 100 are held until 9
        (units(1, compute=50), [taken(0, 1, 9, compute=60)], [(1, -inf, 0), (0, 9, 0)]),
        # a whole card is one that nobody holds
        (whole(), [taken(0, 1, 9), taken(1, 1, 7)], [(1, 7, 0), (0, 9, 0)]),
        # 15 units are more than any card has
        (units(15), [], []),
    ],
)
def test_card_is_available_when_enough_allocations_have_ended(
    request_: Request, allocations: list[Allocation], expected: list[tuple[int, float, int]]
) -> None:
    """Two T4; allocations end by their deadlines, and of those without one the largest first."""
    assert found(request_, TWO, *allocations) == expected


def test_small_slices_wait_when_a_card_is_taken_whole() -> None:
    """A whole card is shared with nobody, however little its holder uses and whoever else is there."""
    allocation = Allocation(placement(piece(0, 1), whole=True), 20)
    assert found(units(1), TWO, allocation) == [(1, -inf, 0), (0, 20, 0)]
    assert found(units(1), TWO, allocation, taken(0, 1, 30)) == [(1, -inf, 0), (0, 20, 0)]


@pytest.mark.parametrize(
    ("cpu", "memory", "expected"),
    [
        # 4000 - 3000 = 1000 and 8000 - 6000 = 2000 are free now
        (1000, 2000, [(0, -inf, 0)]),
        (1001, 0, [(0, 40, 0)]),
        (0, 2001, [(0, 40, 0)]),
        # what the host never has
        (4001, 0, []),
        (0, 8001, []),
    ],
)
def test_card_is_available_when_its_host_has_room_too(
    cpu: int, memory: int, expected: list[tuple[int, float, int]]
) -> None:
    """A host of 4 cores and 8000 MiB, of which 3 cores and 6000 MiB are held until 40."""
    host = node(T4_MIB, cpu=4000, memory=8000)
    request = replace(units(1), cpu_milli=cpu, host_memory_mib=memory)
    allocation = Allocation(Placement("a", (), 3000, 6000), 40)
    assert found(request, host, allocation) == expected


def test_end_of_an_allocation_is_uncertain_when_only_its_host_is_needed() -> None:
    """All cores are held, half until 40 and half by somebody without a deadline."""
    host = node(T4_MIB, cpu=4000)
    request = replace(units(1), cpu_milli=4000)
    until_40, open_ended = (Allocation(Placement("a", (), 2000), it) for it in (40, None))
    assert found(request, host, until_40, open_ended) == [(0, inf, 1)]
    assert found(replace(request, cpu_milli=2000), host, until_40, open_ended) == [(0, 40, 0)]
    for_ever = Allocation(Placement("a", (), 1), inf)
    assert found(request, host, for_ever) == []


def test_unhealthy_and_cordoned_cards_are_left_out() -> None:
    """Nobody knows when they are back."""
    cards = card(0), card(1, healthy=False), card(2, cordoned=True), card(3, P4_MIB)
    assert found(units(8), Node("a", cards)) == [(0, -inf, 0)]


DEADLINES = st.sampled_from([None, 10.0, 20.0, 30.0, inf])


@given(
    cluster=clusters(most_nodes=1, most_cards=3),
    request=requests(),
    data=st.data(),
)
def test_availability_is_the_first_moment_at_which_a_card_fits(
    cluster: tuple[Node, ...], request: Request, data: st.DataObject
) -> None:
    """Tried one by one: now and after each deadline, with all allocations that are left."""
    (each,) = cluster
    allocations = [
        Allocation(
            Placement(
                each.name,
                (piece(it.index, data.draw(st.integers(1, it.memory_mib)), name=each.name),),
                data.draw(st.sampled_from([0, 1000])),
            ),
            data.draw(DEADLINES),
        )
        for it in each.cards
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    alone = replace(request, cards=1)
    expected = {}
    for it in each.cards:
        single = replace(each, cards=(it,))
        for now in (-inf, 10.0, 20.0, 30.0):
            left = (a.placement for a in allocations if a.deadline is None or a.deadline > now)
            (verdict,) = evaluate(holding(*left), alone, "binpack", (single,))
            if isinstance(verdict, Fit):
                expected[it.index] = now
                break
    certain = {
        it.card.index: it.at for it in availabilities(alone, each, allocations) if not it.uncertain
    }
    assert certain == expected


@pytest.mark.parametrize(
    ("request_", "cpu", "memory", "expected"),
    [
        (Request(Memory(1), cpu_milli=1000), 4000, None, True),
        (Request(Memory(1), cpu_milli=1000), None, 8000, False),
        (Request(Memory(1), host_memory_mib=1), None, 8000, True),
        (Request(Memory(1), host_memory_mib=1), 4000, None, False),
        # a request for none, and a host that is not counted
        (units(1), 4000, 8000, False),
        (Request(Memory(1), cpu_milli=1, host_memory_mib=1), None, None, False),
        # a host that has none is counted
        (Request(Memory(1), cpu_milli=1), 0, None, True),
    ],
)
def test_host_is_needed_when_the_request_names_what_the_node_counts(
    request_: Request, cpu: int | None, memory: int | None, expected: bool
) -> None:
    """Then a card is available only when its host is."""
    assert needs_host(request_, node(T4_MIB, cpu=cpu, memory=memory)) is expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        # at first 8 + 4 = 12 of 14 units and 60 + 30 = 90 percent are held, by two slices
        (units(2), -inf),
        # 14 - 4 = 10 units and 100 - 30 = 70 percent from 10 on
        (units(10), 10),
        (units(2, compute=11), 10),
        (units(2, compute=70), 10),
        (units(2, compute=71), 20),
        (units(11), 20),
        (whole(), 20),
    ],
)
def test_card_is_available_when_memory_compute_and_holders_allow_it(
    request_: Request, expected: float
) -> None:
    """A slice of 8 units and 60 percent ends at 10, one of 4 units and 30 percent at 20."""
    ends = taken(0, t4_mib(8), 10, 60), taken(0, t4_mib(4), 20, 30)
    assert found(request_, node(T4_MIB), *ends) == [(0, expected, 0)]


def test_allocation_is_ignored_when_its_card_is_gone() -> None:
    """A record may name a card that the node had before."""
    assert found(whole(), node(T4_MIB), taken(1, T4_MIB, None)) == [(0, -inf, 0)]


# ---- several nodes ----

A, B = node(T4_MIB, T4_MIB), node(T4_MIB, name="b")


def timeline(now: float = 0) -> Timeline:
    """Return a timeline: a's cards are full until 50 and 80, b's card indefinitely."""
    on_a = [held(0, 14, 50), held(1, 14, 80)]
    return Timeline((A, B), {"a": on_a, "b": [held(0, 14, None, "b")]}, now)


def shown(start: EarliestStart | None) -> tuple[str, float, int, list[int]] | None:
    """Return node, time, number of uncertain ends and cards."""
    if start is None:
        return None
    return start.node.name, start.at, start.uncertain, [each.index for each in start.cards]


@pytest.mark.parametrize(
    ("request_", "among", "now", "expected"),
    [
        (units(8), None, 0, ("a", 50, 0, [0])),
        (units(8, cards=2), None, 0, ("a", 80, 0, [0, 1])),
        # not before now
        (units(8), None, 60, ("a", 60, 0, [0])),
        # nobody knows when b's holder ends
        (units(8), {"b"}, 0, ("b", inf, 1, [0])),
        (units(8), {"a", "b"}, 0, ("a", 50, 0, [0])),
        # b has one card; no card has 15 units; nothing is eligible
        (units(8, cards=2), {"b"}, 0, None),
        (units(15), None, 0, None),
        (units(8), set(), 0, None),
        (units(8), {"gone"}, 0, None),
    ],
)
def test_request_starts_where_its_cards_are_free_first(
    request_: Request,
    among: set[str] | None,
    now: float,
    expected: tuple[str, float, int, list[int]] | None,
) -> None:
    """On the eligible nodes alone."""
    eligible = None if among is None else frozenset(among)
    assert shown(timeline(now).earliest(request_, eligible)) == expected


def test_nodes_are_in_order_of_the_last_start_of_all_requests() -> None:
    """Each request by itself: 8 units on a at 50, two cards of 8 at 80; b has one card only."""
    line, one, two = timeline(), units(8), units(8, cards=2)
    assert line.starts_on([one], ["a", "b"]) == [(50, "a"), (inf, "b")]
    assert line.starts_on([one, two], ["a", "b"]) == [(80, "a")]
    assert line.by_start([one]) == ["a", "b"]
    assert line.by_start([one], frozenset({"b"})) == ["b"]
    assert line.by_start([two]) == ["a"]
    assert line.by_start([units(15)]) == []


def test_request_starts_later_when_the_pass_has_added_an_allocation() -> None:
    """8 more units of card 0 until 200 leave 14 - 8 = 6 of it from 50 on: 8 are free on card 1 at 80."""
    line, added = timeline(), held(0, 8, 200)
    line.add(added)
    assert shown(line.earliest(units(8))) == ("a", 80, 0, [1])
    assert shown(line.earliest(units(6))) == ("a", 50, 0, [0])
    line.remove(added)
    assert shown(line.earliest(units(8))) == ("a", 50, 0, [0])


@pytest.mark.parametrize(
    ("reservations", "expected"),
    [
        # card 0 is kept until 70, and free at 50
        ([70], ("a", 70, 0, [0])),
        # a reservation that has started before does not delay anybody
        ([20], ("a", 50, 0, [0])),
        # the later of two counts, in any order
        ([75, 60], ("a", 75, 0, [0])),
        ([60, 75], ("a", 75, 0, [0])),
        # card 1 is free first
        ([90], ("a", 80, 0, [1])),
        ([inf], ("a", 80, 0, [1])),
    ],
)
def test_reserved_card_is_available_when_its_reservation_has_started(
    reservations: list[float], expected: tuple[str, float, int, list[int]]
) -> None:
    """What is reserved has also been added: 1 unit of each card of node a, until 500."""
    line = timeline()
    line.add(held(0, 1, 500))
    line.add(held(1, 1, 500))
    for at in reservations:
        line.reserve([device(0)], at)
    assert shown(line.earliest(units(8))) == expected


def test_reservation_of_unknown_start_counts_as_one_more_uncertain_end() -> None:
    """So of two cards that are free at an unknown time the one that waits for less is taken."""
    line = Timeline((B,), {"b": [held(0, 14, None, "b")]}, 0)
    line.add(held(0, 1, 500, "b"))
    assert shown(line.earliest(units(8))) == ("b", inf, 1, [0])
    line.reserve([device(0, "b")], inf)
    assert shown(line.earliest(units(8))) == ("b", inf, 2, [0])
