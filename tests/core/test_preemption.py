"""Which allocations are evicted: the cheapest set on the cards, compared with all sets."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.inventory import Node
from fenka.core.ledger import Ledger
from fenka.core.preemption import (
    DisruptionBudget,
    Preemptor,
    VictimCandidate,
    Victims,
    cheapest_victims,
)
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import UsageOverlay
from tests.core.builders import (
    GIB,
    T4_MIB,
    clusters,
    held_by,
    node,
    on,
    requests,
    units,
    whole,
)

TWO, OTHER = node(T4_MIB, T4_MIB), node(T4_MIB, name="b")
HIGH = 100


def victims(holders: list[VictimCandidate], request: Request, *nodes: Node) -> list[str] | None:
    """Return the ids of the victims of a request of priority 100."""
    found = cheapest_victims(
        held_by(holders), holders, Preemptor((request,), HIGH), nodes or (TWO,)
    )
    return None if found is None else list(found.ids)


@pytest.mark.parametrize(
    ("holders", "request_", "expected"),
    [
        # 14 units a card. 6 + 6 free are no 8 on one card: one of them goes, the one that frees less:
        # card 0: 14 - 8 = 6 free, without x 14; card 1: 14 - 4 - 4 = 6 free, without y 10
        (
            [
                VictimCandidate("x", on(0, 8)),
                VictimCandidate("y", on(1, 4)),
                VictimCandidate("z", on(1, 4)),
            ],
            units(8),
            ["y"],
        ),
        # it fits as it is
        ([VictimCandidate("x", on(0, 14))], units(8), []),
        # the less important first, though two of them must go: 14 - 3 - 3 - 8 = 0, 6 + 0 ≥ 6
        (
            [
                VictimCandidate("x", on(0, 14), 5),
                VictimCandidate("y", on(1, 3), 1),
                VictimCandidate("z", on(1, 3), 1),
                VictimCandidate("w", on(1, 8), 5),
            ],
            units(6),
            ["y", "z"],
        ),
        # of equal importance fewer: one of 14 rather than two of 3
        (
            [
                VictimCandidate("x", on(0, 14), 1),
                VictimCandidate("y", on(1, 3), 1),
                VictimCandidate("z", on(1, 3), 1),
                VictimCandidate("w", on(1, 8), 5),
            ],
            units(6),
            ["x"],
        ),
        # never of equal or greater priority
        (
            [VictimCandidate("x", on(0, 14), 100), VictimCandidate("y", on(1, 14), 101)],
            units(1),
            None,
        ),
        # whole: all of a card go, from the card where they are least important
        (
            [
                VictimCandidate("x", on(0, 1), 2),
                VictimCandidate("y", on(1, 1), 1),
                VictimCandidate("z", on(1, 1), 1),
            ],
            whole(),
            ["y", "z"],
        ),
        # two cards at once: somebody on each
        (
            [
                VictimCandidate("x", on(0, 10)),
                VictimCandidate("y", on(1, 10)),
                VictimCandidate("z", on(1, 4)),
            ],
            units(8, cards=2),
            ["x", "y"],
        ),
        # a budget that allows nothing weighs more than priority and number
        (
            [
                VictimCandidate("x", on(0, 14), 0, budgets=frozenset({DisruptionBudget("b")})),
                VictimCandidate("y", on(1, 7), 9),
                VictimCandidate("z", on(1, 7), 9),
            ],
            units(14),
            ["y", "z"],
        ),
        # one that allows one disruption: x alone is free to go, x and y together are not
        (
            [
                VictimCandidate("x", on(0, 7), 0, budgets=frozenset({DisruptionBudget("b", 1)})),
                VictimCandidate("y", on(0, 7), 0, budgets=frozenset({DisruptionBudget("b", 1)})),
                VictimCandidate("z", on(1, 14), 1),
            ],
            units(14),
            ["z"],
        ),
        # a gang of two counts as two, and goes whole
        (
            [
                VictimCandidate("x", on(0, 14), 0, "g"),
                VictimCandidate("y", on(0, 14, "b"), 0, "g"),
                VictimCandidate("z", on(1, 14), 0),
            ],
            units(14),
            ["z"],
        ),
        # a gang stays if one of its members is as important
        (
            [
                VictimCandidate("x", on(0, 14), 0, "g"),
                VictimCandidate("y", on(0, 14, "b"), 100, "g"),
                VictimCandidate("z", on(1, 14), 100),
            ],
            units(1),
            None,
        ),
    ],
)
def test_victims_are_the_cheapest_set_when_several_make_room(
    holders: list[VictimCandidate], request_: Request, expected: list[str] | None
) -> None:
    """Two T4; the request has priority 100."""
    assert victims(holders, request_) == expected


def test_gang_is_evicted_from_all_nodes_when_one_member_is_a_victim() -> None:
    """The result names where the request goes."""
    holders = [
        VictimCandidate("x", on(0, 14), 0, "g"),
        VictimCandidate("y", on(0, 14, "b"), 0, "g"),
        VictimCandidate("z", on(1, 14), 100),
    ]
    found = cheapest_victims(held_by(holders), holders, Preemptor((units(14),), HIGH), [TWO])
    assert found == Victims(("x", "y"), (on(0, 14),), 0)


def test_victims_are_on_several_nodes_when_a_gang_needs_them() -> None:
    """Three times 14 units: pods of lower priority hold two cards, the third is free."""
    holders = [VictimCandidate("x", on(0, 2)), VictimCandidate("y", on(0, 2, "b"))]
    found = cheapest_victims(
        held_by(holders), holders, Preemptor((units(14),) * 3, HIGH), [TWO, OTHER]
    )
    assert found is not None
    assert found.ids == ("x", "y")
    assert [(it.node, it.slices[0].card) for it in found.placements] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_victim_is_on_another_card_when_cpu_is_missing() -> None:
    """Any pod of the node can free the host's cores."""
    host = replace(TWO, cpu_milli=4000)
    holders = [
        VictimCandidate("x", replace(on(0, 1), cpu_milli=3000)),
        VictimCandidate("y", replace(on(1, 1), cpu_milli=1000)),
    ]
    request = Request(Memory(1, GIB), cpu_milli=2000)
    assert victims(holders, request, host) == ["x"]


def test_victims_are_reprieved_when_there_are_many() -> None:
    """There are too many to compare all sets. Nobody is evicted who could stay; the most expensive stay."""
    holders = [VictimCandidate(f"h{number:02}", on(0, 1), number) for number in range(14)]
    # 14 of one unit each; 5 units: the five least important
    assert victims(holders, units(5), node(T4_MIB)) == [f"h0{number}" for number in range(5)]


@settings(deadline=None, max_examples=120)
@given(
    nodes=clusters(most_nodes=2, most_cards=2),
    held=st.lists(requests(), max_size=6),
    request=requests(),
    data=st.data(),
)
def test_no_cheaper_set_makes_room_when_victims_are_chosen(
    nodes: tuple[Node, ...], held: list[Request], request: Request, data: st.DataObject
) -> None:
    """The chosen set makes room."""
    ledger, holders = Ledger(nodes), []
    for number, each in enumerate(held):
        found = place(ledger, each, "spread", nodes)
        if isinstance(found, Placement):
            ledger.adopt(str(number), found)
            budgets = data.draw(
                st.sets(st.sampled_from([DisruptionBudget("p"), DisruptionBudget("q", 1)]))
            )
            gang = data.draw(st.sampled_from([None, None, "g", "h"]))
            priority = data.draw(st.integers(0, 3))
            holders.append(VictimCandidate(str(number), found, priority, gang, frozenset(budgets)))
    answer = cheapest_victims(ledger, holders, Preemptor((request,), 3), nodes)
    options = []
    for count in range(len(holders) + 1):
        for some in combinations(holders, count):
            gangs = {it.gang for it in some if it.gang}
            whole_gangs = all(it in some for it in holders if it.gang in gangs)
            view = UsageOverlay(ledger)
            for it in some:
                view.remove(it.placement)
            fits = isinstance(place(view, request, "binpack", nodes), Placement)
            if whole_gangs and fits and all(it.priority < 3 for it in some):
                options.append(some)
    assert (answer is None) == (not options)
    if answer is None:
        return
    chosen = [it for it in holders if it.id in answer.ids]
    assert tuple(chosen) in options
    assert price(chosen) == min(price(list(some)) for some in options)
    after = Ledger(nodes)
    for it in holders:
        if it not in chosen:
            after.adopt(it.id, it.placement)
    (at,) = answer.placements
    after.adopt("new", at)


def price(chosen: list[VictimCandidate]) -> tuple[int, int, int, int, int]:
    """Return the price of a set, computed again. Holders beyond its allowance violate a budget."""
    spent = {"p": 0, "q": 0}
    violations = 0
    for it in chosen:
        over = False
        for budget in it.budgets:
            over |= spent[budget.name] >= budget.allowed
            spent[budget.name] += 1
        violations += over
    gangs = {
        it.gang: max(o.priority for o in chosen if o.gang == it.gang) for it in chosen if it.gang
    }
    as_one = [it.priority for it in chosen if not it.gang] + list(gangs.values())
    freed = sum(each.memory_mib for it in chosen for each in it.placement.slices)
    return violations, max(as_one, default=-1), len(chosen), sum(as_one), freed
