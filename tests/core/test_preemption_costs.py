"""What decides between sets of victims, term by term, and that no set is larger than it must be."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.gangs import place_gang
from fenka.core.inventory import Node
from fenka.core.preemption import (
    MAX_EXACT,
    DisruptionBudget,
    Preemptor,
    VictimCandidate,
    Victims,
    cheapest_victims,
)
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import UsageOverlay, UsageTotals
from tests.core.builders import (
    GIB,
    T4_MIB,
    card,
    device,
    exact,
    held_by,
    node,
    on,
    piece,
    placement,
    units,
    whole,
)

TWO, B = node(T4_MIB, T4_MIB), node(T4_MIB, name="b")
HIGH = 100
SPENT, ONE = DisruptionBudget("spent"), DisruptionBudget("one", 1)


def candidate(
    name: str,
    where: str,
    amount: int = 14,
    priority: int = 0,
    *,
    gang: str | None = None,
    budgets: Iterable[DisruptionBudget] = (),
) -> VictimCandidate:
    """Return a candidate with units of a T4: a0 is card 0 of node a."""
    held = on(int(where[1:]), amount, where[0])
    return VictimCandidate(name, held, priority, gang, frozenset(budgets))


def chosen(
    candidates: list[VictimCandidate], *requests: Request, nodes: Iterable[Node] = (TWO, B)
) -> str | None:
    """Return the victims of a request of priority 100, or of a gang; None if nothing helps."""
    preemptor = Preemptor(requests, HIGH)
    victims = cheapest_victims(held_by(candidates), candidates, preemptor, list(nodes))
    return None if victims is None else " ".join(victims.ids)


@pytest.mark.parametrize(
    ("x", "y", "z", "expected"),
    [
        # x, y and z have a card each. The first term that differs decides.
        # violated budgets, before any priority
        (
            candidate("x", "a0", priority=0, budgets=[SPENT]),
            candidate("y", "a1", priority=99),
            candidate("z", "b0", priority=98),
            "z",
        ),
        # a budget that allows one more does not count, with two of them one is spent
        (
            candidate("x", "a0", priority=1, budgets=[ONE]),
            candidate("y", "a1", priority=2),
            candidate("z", "b0", priority=3),
            "x",
        ),
        (
            candidate("x", "a0", priority=1, budgets=[ONE, SPENT]),
            candidate("y", "a1", priority=2),
            candidate("z", "b0", priority=3),
            "y",
        ),
        # the least priority, also if it is negative
        (
            candidate("x", "a0", 1, -1),
            candidate("y", "a1", 1, -(2**31)),
            candidate("z", "b0", 1, 0),
            "y",
        ),
        # of equal priority the least memory
        (candidate("x", "a0", 13), candidate("y", "a1", 14), candidate("z", "b0", 12), "z"),
        # of equal memory the first id
        (candidate("y", "a0"), candidate("z", "a1"), candidate("x", "b0"), "x"),
        # a gang counts with its most important member, wherever that is
        (
            candidate("x", "a0", priority=1, gang="g"),
            candidate("y", "a1", priority=3),
            candidate("z", "b0", priority=4, gang="g"),
            "y",
        ),
        # and with the number of its members
        (
            candidate("x", "a0", priority=3, gang="g"),
            candidate("y", "a1", priority=3),
            candidate("z", "b0", priority=1, gang="g"),
            "y",
        ),
        (
            candidate("x", "a0", priority=1, gang="g"),
            candidate("y", "a1", priority=3),
            candidate("z", "b0", priority=1, gang="g"),
            "x z",
        ),
        # an empty name is no gang
        (
            candidate("x", "a0", 14, gang=""),
            candidate("y", "a1", gang=""),
            candidate("z", "b0", 13),
            "z",
        ),
        # as important as the request: never
        (
            candidate("x", "a0", priority=100),
            candidate("y", "a1", priority=99),
            candidate("z", "b0", priority=101),
            "y",
        ),
        (
            candidate("x", "a0", priority=100),
            candidate("y", "a1", priority=99, gang="g"),
            candidate("z", "b0", priority=100, gang="g"),
            None,
        ),
    ],
)
def test_victim_is_the_cheapest_when_each_card_has_one(
    x: VictimCandidate, y: VictimCandidate, z: VictimCandidate, expected: str | None
) -> None:
    """14 units are wanted, on any of three T4; the order in which candidates are listed does not matter."""
    for order in ([x, y, z], [z, y, x], [y, z, x]):
        assert chosen(order, units(14)) == expected


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # the gang's two need two cards: both of a, of priority 1 and 2, or b's of 5
        ((units(14), units(14)), "a0 a1"),
        ((units(14),) * 3, "a0 a1 b0"),
        ((units(14),) * 4, None),
        # 8 + 6 fit one card
        ((units(8), units(6)), "a0"),
        ((whole(), units(1)), "a0 a1"),
        ((units(2, cards=2), units(12, cards=2)), "a0 a1"),
        # on two cards of one node
        ((units(1, cards=2),), "a0 a1"),
        ((units(1, cards=3),), None),
    ],
)
def test_victims_make_room_for_all_of_a_gang(
    requests: tuple[Request, ...], expected: str | None
) -> None:
    """Each of three T4 is full: a0 of priority 1, a1 of 2, b0 of 5."""
    full = [candidate(it, it, 14, priority) for it, priority in (("a0", 1), ("a1", 2), ("b0", 5))]
    assert chosen(full, *requests) == expected


def test_victims_have_the_placements_and_the_violations() -> None:
    """What kube-scheduler is told: two of a budget of one, and one that is spent."""
    full = [
        candidate("x", "a0", 7, budgets=[ONE]),
        candidate("y", "a0", 7, budgets=[ONE, SPENT]),
        candidate("z", "a1", priority=100),
    ]
    victims = cheapest_victims(held_by(full), full, Preemptor((units(14),), HIGH), [TWO])
    assert victims == Victims(("x", "y"), (placement(piece(0, T4_MIB)),), 1)
    half = cheapest_victims(held_by(full), full, Preemptor((units(7),), HIGH), [TWO])
    assert half == Victims(("x",), (placement(piece(0, 7539)),), 0)
    both = [full[0], replace(full[1], budgets=frozenset([ONE])), full[2]]
    victims = cheapest_victims(held_by(both), both, Preemptor((units(14),), HIGH), [TWO])
    assert victims is not None
    assert victims.violations == 1


@pytest.mark.parametrize(("policy", "expected"), [("binpack", 0), ("spread", 1)])
def test_placement_is_by_the_policy_when_nobody_needs_to_go(policy: str, expected: int) -> None:
    """a0 has 8 of 14 units held, a1 nothing: in whichever order, ids are empty."""
    held = [candidate("x", "a0", 8)]
    victims = cheapest_victims(held_by(held), held, Preemptor((units(2),), HIGH), [TWO], policy)
    assert victims is not None
    # One card is a scope of its own, and the first one that fits costs nothing.
    assert (victims.ids, victims.violations) == ((), 0)
    pair = cheapest_victims(
        held_by(held), held, Preemptor((units(2), units(2)), HIGH), [TWO], policy
    )
    assert pair is not None
    assert pair.placements[0].slices[0].card == expected


def test_victims_are_not_sought_on_reserved_or_closed_cards() -> None:
    """a0 is reserved for others, a1 is cordoned, b0 is unhealthy: nothing helps."""
    nodes = [
        Node("a", (card(0), card(1, cordoned=True))),
        Node("b", (card(0, node="b", healthy=False),)),
    ]
    full = [candidate(it, it) for it in ("a0", "a1", "b0")]
    preemptor = Preemptor((units(1),), HIGH)
    assert cheapest_victims(held_by(full), full, preemptor, nodes, "spread", [device(0)]) is None
    victims = cheapest_victims(held_by(full), full, preemptor, nodes, "spread")
    assert victims is not None
    assert victims.ids == ("a0",)
    assert cheapest_victims(held_by(full), full, preemptor, []) is None


def test_policy_is_an_error_when_it_is_unknown() -> None:
    """Also where the request fits as it is."""
    with pytest.raises(KeyError, match="nonsense"):
        cheapest_victims(UsageTotals(), [], Preemptor((units(1),), HIGH), [TWO], "nonsense")


def test_pods_that_only_use_the_host_are_victims_when_the_host_is_short() -> None:
    """4 cores: x has 3 of them and no card, y has 1 and a card, z is on the card alone."""
    host = replace(TWO, cpu_milli=4000)
    only_host = VictimCandidate("x", Placement("a", (), 3000), 5)
    with_card = VictimCandidate("y", replace(placement(piece(0, 100)), cpu_milli=1000), 1)
    on_card = VictimCandidate("z", placement(piece(1, T4_MIB)), 0)
    full = [only_host, with_card, on_card]
    asking = Request(Memory(1, GIB), cpu_milli=1000)
    assert chosen(full, asking, nodes=[host]) == "y"
    assert chosen(full, replace(asking, cpu_milli=1001), nodes=[host]) == "x"
    assert chosen(full, replace(asking, cpu_milli=3001), nodes=[host]) == "x y"
    assert chosen(full, replace(asking, cpu_milli=4001), nodes=[host]) is None
    # Where the host is not counted, a card's own pods are enough.
    assert chosen(full, Request(whole=True, cpu_milli=4001), nodes=[TWO]) == "z"


@pytest.mark.parametrize("count", [MAX_EXACT - 1, MAX_EXACT, MAX_EXACT + 1, 14])
def test_victims_are_as_few_as_needed_however_many_there_are(count: int) -> None:
    """Each has 1000 MiB of 14000. On either side of the exact search the least important go."""
    size = 1000 * count
    full = [VictimCandidate(f"v{it:02}", placement(piece(0, 1000)), it) for it in range(count)]
    for needed in (1, 999, 1000, 1001, 3000, size):
        goes = -(-needed // 1000)
        expected = " ".join(f"v{it:02}" for it in range(goes))
        assert chosen(full[::-1], exact(needed), nodes=[node(size)]) == expected
    assert chosen(full, exact(size + 1), nodes=[node(size)]) is None


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        # up to 10 candidates all sets are compared: one victim rather than two of as much
        (MAX_EXACT - 3, "x"),
        # beyond, the most expensive stay first: 4 + 3 units go instead of 7
        (MAX_EXACT - 2, "y z"),
    ],
)
def test_fewer_victims_are_preferred_when_all_sets_can_be_compared(
    others: int, expected: str
) -> None:
    """7 units are wanted of a card that x, y and z fill with 7 + 4 + 3; the others hold 1 MiB each."""
    slices = [("x", 7), ("y", 4), ("z", 3)]
    full = [candidate(name, "a0", amount) for name, amount in slices]
    full += [VictimCandidate(f"o{it}", placement(piece(0, 1)), 50) for it in range(others)]
    one = node(T4_MIB + others)
    preemptor = Preemptor((exact(7539),), HIGH)
    victims = cheapest_victims(held_by(full), full, preemptor, [one])
    assert victims is not None
    assert " ".join(victims.ids) == expected


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.sampled_from(["a0", "a1", "b0"])),
        min_size=MAX_EXACT + 1,
        max_size=16,
    ),
    gangs=st.lists(st.sampled_from([None, None, None, "g", "h"]), min_size=16, max_size=16),
    requests=st.lists(st.builds(units, st.integers(1, 10)), min_size=1, max_size=2),
)
def test_no_victim_could_stay_when_there_are_too_many_to_compare(
    sizes: list[tuple[int, int, str]], gangs: list[str | None], requests: list[Request]
) -> None:
    """Whoever is evicted, alone or with its gang, is needed; and the room that is made is enough."""
    full = [
        candidate(f"v{number:02}", where, amount, priority, gang=gangs[number])
        for number, (amount, priority, where) in enumerate(sizes)
    ]
    nodes, view = [TWO, B], held_by(full)
    victims = cheapest_victims(view, full, Preemptor(tuple(requests), 3), nodes)

    def fits(ids: Iterable[str]) -> bool:
        without = UsageOverlay(view)
        for it in full:
            if it.id in ids:
                without.remove(it.placement)
        if len(requests) == 1:
            return isinstance(place(without, requests[0], "binpack", nodes), Placement)
        return isinstance(place_gang(without, requests, "binpack", nodes), tuple)

    keeps = {it.gang for it in full if it.gang and it.priority >= 3}
    may_go = {it.id for it in full if it.priority < 3 and it.gang not in keeps}
    if victims is None:
        assert not fits(may_go)
        return
    assert set(victims.ids) <= may_go
    assert fits(victims.ids)
    together = {
        it.id: {o.id for o in full if o.gang == it.gang} if it.gang else {it.id} for it in full
    }
    for name in victims.ids:
        assert together[name] <= set(victims.ids)
        assert not fits(set(victims.ids) - together[name])
    after = UsageOverlay(view)
    for it in full:
        if it.id in victims.ids:
            after.remove(it.placement)
    for made in victims.placements:
        after.add(made)
    for where in nodes:
        for each in where.cards:
            held = after.card_usage(where.name, each.uuid)
            before = view.card_usage(where.name, each.uuid)
            assert held.memory_mib <= max(each.memory_mib, before.memory_mib) < inf
