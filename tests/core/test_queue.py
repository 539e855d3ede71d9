"""Who is served first, who waits for whom, and that nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.cards import Card, Node
from fenka.core.evaluate import never_fits, place
from fenka.core.ledger import Ledger
from fenka.core.queue import WaitingQueue
from fenka.core.reasons import Rejected, Why
from fenka.core.requests import Memory, Placement, Request, Slice
from tests.core.core_kit import (
    GIB,
    T4_MIB,
    card,
    clusters,
    node,
    piece,
    placement,
    requests,
    units,
    whole,
)

T4 = node(T4_MIB)
TWO = Node("a", (card(0, 7611, model="Tesla P4"), card(1)))
"""A P4 with 7 units and a T4 with 14."""


def queue(*waiters: Request) -> WaitingQueue:
    """They came in this order; their ids are w0, w1, …."""
    made = WaitingQueue()
    for number, request in enumerate(waiters):
        made.add(f"w{number}", request, float(number))
    return made


def holding_ledger(nodes: tuple[Node, ...], *held: Placement) -> Ledger:
    """A ledger with these confirmed."""
    made = Ledger(nodes)
    for number, each in enumerate(held):
        made.adopt(f"held{number}", each)
    return made


def served(made: WaitingQueue, ledger: Ledger, *nodes: Node) -> list[tuple[str, list[int]]]:
    """Who is placed, and on which cards."""
    step = made.serve(ledger, "binpack", nodes)
    return [(name, [each.card for each in found.slices]) for name, found in step.placed]


def test_order_is_by_time_and_then_by_id() -> None:
    """Not by who joined the queue first: a restarted program adds them as it finds them."""
    made = WaitingQueue()
    for name, time in (("d", 2.0), ("b", 1.0), ("c", 1.0), ("a", 3.0)):
        made.add(name, units(1), time)
    assert [made.position(name) for name in "bcda"] == [1, 2, 3, 4]
    assert [name for name, _ in served(made, Ledger([T4]), T4)] == ["b", "c", "d", "a"]


def test_leaving_moves_the_others_up() -> None:
    """Positions count from 1."""
    made = queue(units(1), units(1), units(1))
    made.remove("w0")
    assert (made.position("w1"), made.position("w2"), len(made)) == (1, 2, 2)


def test_names_that_are_not_in_the_queue() -> None:
    """Unknown ones and doubles are errors, and change nothing."""
    made = queue(units(1))
    with pytest.raises(ValueError, match=r"^w0 waits already$"):
        made.add("w0", units(2), 5)
    with pytest.raises(KeyError, match="w1"):
        made.remove("w1")
    with pytest.raises(KeyError, match="w1"):
        made.position("w1")
    assert (len(made), made.position("w0")) == (1, 1)


def test_serving_changes_nothing() -> None:
    """The caller assumes what it is told, and takes it out of the queue."""
    made, ledger = queue(units(4), units(14)), Ledger([T4])
    first = made.serve(ledger, "binpack", [T4])
    assert made.serve(ledger, "binpack", [T4]) == first
    assert (len(made), ledger.entries, ledger.used("a", 0).holders) == (2, {}, 0)


def test_each_is_placed_on_what_those_before_it_leave() -> None:
    """In one step: 4 + 4 + 4 of 14 units fit, the fourth does not."""
    made = queue(*[units(4)] * 4)
    step = made.serve(Ledger([T4]), "binpack", [T4])
    assert [name for name, _ in step.placed] == ["w0", "w1", "w2"]
    assert step.waiting == (("w3", "0/1 GPUs fit: 1 too little memory"),)


def test_a_small_request_does_not_overtake_on_the_same_card() -> None:
    """Of 14 units 12 are held: 2 would fit, but 4 has waited longer, and 2 is told so."""
    # 15079 * 12 // 14 = 12924
    ledger = holding_ledger((T4,), placement(piece(0, 12924)))
    step = queue(units(4), units(2)).serve(ledger, "binpack", [T4])
    assert step.placed == ()
    assert step.waiting == (
        ("w0", "0/1 GPUs fit: 1 too little memory"),
        ("w1", "0/1 GPUs fit: 1 reserved for requests that waited longer"),
    )
    (_, (_, refused)) = step.rejected
    assert [reason.why for reason in refused.reasons] == [Why.RESERVED]


@pytest.mark.parametrize(
    ("held", "waiters", "expected"),
    [
        # 8 units wait for the T4, the only card that has so many: the P4 is free for those behind
        ((piece(1, T4_MIB),), (units(8), units(2)), [("w1", [0])]),
        # 4 units could use both cards: nothing passes it
        ((piece(0, 7611), piece(1, 12924)), (units(4), units(2)), []),
        # two cards with 4 each: both are waited for, though the T4 alone has room for 2
        ((piece(0, 7611),), (units(4, cards=2), units(2)), []),
        # two cards with 8 each are never there: it waits for no card
        ((), (units(8, cards=2), units(2)), [("w1", [0])]),
        # whole cards wait for cards that are in use, and keep newcomers off them
        ((piece(0, 1), piece(1, 1)), (whole(), units(2)), []),
        ((piece(0, 1),), (whole(2), units(2)), []),
        # served first, it leaves what it does not need
        ((), (whole(), units(2)), [("w0", [0]), ("w1", [1])]),
        # models: w0 waits for a P4 only
        (
            (piece(0, 7611),),
            (Request(Memory(4, GIB), models=frozenset({"Tesla P4"})), units(2)),
            [("w1", [1])],
        ),
        # three classes: w0 waits for the T4, w1 gets the P4, w2 finds nothing that is not waited for
        ((piece(1, T4_MIB),), (units(8), units(7), units(1)), [("w1", [0])]),
        # compute alone waits for compute alone: no card has 50 %, and both are kept for it
        ((piece(0, 0, 60), piece(1, 0, 60)), (Request(compute=50), units(2)), []),
    ],
)
def test_a_waiter_keeps_the_cards_it_could_ever_use(
    held: tuple[Slice, ...], waiters: tuple[Request, ...], expected: list[tuple[str, list[int]]]
) -> None:
    """And only those: later ones may use the others."""
    ledger = holding_ledger((TWO,), placement(*held))
    assert served(queue(*waiters), ledger, TWO) == expected


def test_who_waits_for_cpu_keeps_the_whole_node() -> None:
    """Another card's program would take the cores that it waits for."""
    host = Node("a", TWO.cards, cpu_milli=4000)
    ledger = holding_ledger((host,), Placement("a", (), 2000))
    waiting = Request(Memory(8, GIB), cpu_milli=4000)
    small = Request(Memory(2, GIB), cpu_milli=1000)
    assert served(queue(waiting, small), ledger, host) == []
    assert served(queue(small), ledger, host) == [("w0", [0])]


def test_a_cordoned_card_blocks_nobody() -> None:
    """Who needs two cards while one is cordoned waits, and leaves the other to those behind it."""
    cordoned = Node("a", (card(0), card(1, cordoned=True)))
    step = queue(units(4, cards=2), units(2)).serve(Ledger([cordoned]), "binpack", [cordoned])
    assert [name for name, _ in step.placed] == ["w1"]
    assert step.waiting == (("w0", "0/2 GPUs fit: 1 cordoned, 1 without enough others beside it"),)


@pytest.mark.parametrize(
    ("waiters", "request_", "expected"),
    [
        ((), units(2), [0]),
        # the P4 is the tighter one; w0 takes all of it
        ((units(7),), units(2), [1]),
        # w0 takes 13 of the T4's 14, 1 unit is left there, and the P4 has 7
        ((units(13),), units(7), [0]),
        ((units(13),), units(8), "0/2 GPUs fit: 2 too little memory"),
        # w0 is placed on both, w1 waits for the T4: P4 7 - 2, T4 14 - 2
        (
            (units(2, cards=2), units(13)),
            units(6),
            "0/2 GPUs fit: 1 too little memory, 1 reserved for requests that waited longer",
        ),
        ((units(2, cards=2), units(13)), units(5), [0]),
    ],
)
def test_what_a_newcomer_would_get(
    waiters: tuple[Request, ...], request_: Request, expected: list[int] | str
) -> None:
    """Behind all who wait: the cards, or the sentence; and nothing is changed by asking."""
    made, ledger = queue(*waiters), Ledger([TWO])
    verdict = made.ask(request_, ledger, "binpack", [TWO])
    if isinstance(verdict, Rejected):
        assert verdict.sentence() == expected
    else:
        assert [each.card for each in verdict.slices] == expected
    assert (len(made), ledger.entries) == (len(waiters), {})


@settings(deadline=None)
@given(cluster=clusters(), first=requests(), others=st.lists(requests(), min_size=1, max_size=8))
def test_nobody_starves(cluster: tuple[Node, ...], first: Request, others: list[Request]) -> None:
    """Newcomers come at every step and each leaves after two: who can fit at all is served in three."""
    well = tuple(
        Node(
            each.name,
            tuple(Card(one.index, one.uuid, one.model, one.memory_mib) for one in each.cards),
            each.cpu_milli,
            each.memory_mib,
        )
        for each in cluster
    )
    ledger, made = Ledger(well), WaitingQueue()
    for number, request in enumerate(others):
        found = place(ledger, request, "spread", well)
        if isinstance(found, Placement):
            ledger.assume(f"held{number}", found, 2)
    made.add("first", first, 0)
    granted = False
    for now in range(1, 4):
        ledger.expire(now)
        for number, request in enumerate(others):
            made.add(f"new{now}-{number}", request, float(now))
        for name, found in made.serve(ledger, "binpack", well).placed:
            made.remove(name)
            ledger.assume(name, found, now + 2)
            granted |= name == "first"
    assert granted == (never_fits(first, well) is None)
