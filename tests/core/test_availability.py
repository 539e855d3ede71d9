"""When cards become free for a request, as tables and against a definition that tries every moment."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.availability import availabilities
from fenka.core.evaluate import Fit, evaluate
from fenka.core.inventory import Node
from fenka.core.queue import Allocation
from fenka.core.request import Placement, Request
from tests.core.builders import (
    P4_MIB,
    T4_MIB,
    card,
    clusters,
    exact,
    holding,
    node,
    piece,
    placement,
    requests,
    units,
    whole,
)

TWO = node(T4_MIB, T4_MIB)


def held(index: int, mib: int, deadline: float | None, compute: int = 0) -> Allocation:
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
        (units(4), [held(0, 10_000, 50)], [(0, -inf, 0), (1, -inf, 0)]),
        # 5 units are 5385 > 5079: card 0 at 50
        (units(5), [held(0, 10_000, 50)], [(1, -inf, 0), (0, 50, 0)]),
        # 8000 + 7000 are held: at 30, 8079 are free; at 60, all
        (exact(8000), [held(0, 8000, 60), held(0, 7000, 30)], [(1, -inf, 0), (0, 60, 0)]),
        (exact(7000), [held(0, 8000, 60), held(0, 7000, 30)], [(1, -inf, 0), (0, 30, 0)]),
        # without a deadline nobody knows when, but one end would do
        (units(14), [held(0, 100, None)], [(1, -inf, 0), (0, inf, 1)]),
        # the larger of two without a deadline makes room alone: 15079 - 100 = 14979
        (exact(14_979), [held(0, 100, None), held(0, 9000, None)], [(1, -inf, 0), (0, inf, 1)]),
        (units(14), [held(0, 100, None), held(0, 9000, None)], [(1, -inf, 0), (0, inf, 2)]),
        # an infinite deadline never ends: the card is left out
        (units(14), [held(0, 100, inf)], [(1, -inf, 0)]),
        (units(13), [held(0, 100, inf)], [(0, -inf, 0), (1, -inf, 0)]),
        # one that stays is the last that would have to end: 15079 - 100 = 14979 once the others have
        (exact(14_979), [held(0, 100, inf), held(0, 50, None)], [(1, -inf, 0), (0, inf, 1)]),
        (exact(14_979), [held(0, 100, inf), held(0, 50, 5)], [(1, -inf, 0), (0, 5, 0)]),
        # compute: 60 of 100 are held until 9
        (units(1, compute=50), [held(0, 1, 9, compute=60)], [(1, -inf, 0), (0, 9, 0)]),
        # a whole card is one that nobody holds
        (whole(), [held(0, 1, 9), held(1, 1, 7)], [(1, 7, 0), (0, 9, 0)]),
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
    assert found(units(1), TWO, allocation, held(0, 1, 30)) == [(1, -inf, 0), (0, 20, 0)]


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
