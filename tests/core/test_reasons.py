"""The sentences that are built from reasons, and their hints what to request instead."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from fenka.core.evaluate import never_fits, place
from fenka.core.inventory import Card, Node
from fenka.core.reasons import (
    NodeRejection,
    Reason,
    ReasonCode,
    Unschedulable,
    counts_sentence,
)
from fenka.core.request import Memory, Request
from fenka.core.usage import EmptyUsage
from tests.core.builders import (
    GIB,
    P4_MIB,
    T4_MIB,
    card,
    exact,
    holding,
    node,
    piece,
    placement,
    units,
    whole,
)


def rejected(*whys: ReasonCode, hint: str = "") -> Unschedulable:
    """Return a rejection with one card for each reason."""
    reasons = tuple(Reason(why, index) for index, why in enumerate(whys))
    return Unschedulable((NodeRejection("a", reasons),), hint)


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        # 5 + 2 + 1 = 8, most frequent first
        (
            rejected(ReasonCode.UNHEALTHY, *[ReasonCode.CORDONED] * 2, *[ReasonCode.MEMORY] * 5),
            "no GPU fits: 5 of 8 have too little memory, 2 are cordoned, 1 is unhealthy",
        ),
        # equals in the order in which they are declared
        (
            rejected(ReasonCode.CORDONED, ReasonCode.UNHEALTHY, ReasonCode.MEMORY),
            "no GPU fits: 1 of 3 has too little memory, 1 is unhealthy, 1 is cordoned",
        ),
        (
            rejected(ReasonCode.RESERVED),
            "no GPU fits: 1 of 1 is reserved for requests before it",
        ),
        (
            rejected(ReasonCode.TOO_FEW, ReasonCode.WHOLE),
            "no GPU fits: 1 of 2 is taken whole, 1 is without enough others beside it",
        ),
        (
            rejected(ReasonCode.MEMORY, hint="ask for less"),
            "no GPU fits: 1 of 1 has too little memory; ask for less",
        ),
        (Unschedulable(()), "there is no GPU"),
        (Unschedulable((NodeRejection("a", ()),), "buy one"), "there is no GPU; buy one"),
    ],
)
def test_sentence_counts_cards_by_reason_when_none_fits(
    verdict: Unschedulable, sentence: str
) -> None:
    """The counts add up to the number of cards of all nodes."""
    assert verdict.sentence() == sentence


def test_sentence_has_all_nodes_when_cards_differ() -> None:
    """Four cards are on each of two nodes."""
    cards = tuple(
        card(index, 2 * GIB if index < 5 else T4_MIB, healthy=index != 7, cordoned=index in (5, 6))
        for index in range(8)
    )
    nodes = [Node("a", cards[:4]), Node("b", cards[4:])]
    verdict = place(EmptyUsage(), units(4), "binpack", nodes)
    assert isinstance(verdict, Unschedulable)
    assert (
        verdict.sentence()
        == "no GPU fits: 5 of 8 have too little memory, 2 are cordoned, 1 is unhealthy"
    )


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (
            units(4),
            "no GPU fits: 3 of 6 have too little memory, 1 is taken whole, 1 is unhealthy, 1 is cordoned",
        ),
        (
            whole(),
            "no GPU fits: 3 of 6 are in use, 1 is taken whole, 1 is unhealthy, 1 is cordoned",
        ),
        (
            whole(2),
            "no GPU fits: 3 of 6 are in use, 1 is taken whole, 1 is unhealthy, 1 is cordoned",
        ),
        (
            Request(compute=50),
            "no GPU fits: 3 of 6 have too little compute, 1 is taken whole, 1 is unhealthy, 1 is cordoned",
        ),
        (
            Request(Memory(1), models=frozenset({"A100"})),
            "no GPU fits: 4 of 6 are of another model, 1 is unhealthy, 1 is cordoned",
        ),
        (
            exact(1, cards=4),
            "no GPU fits: 3 of 6 are without enough others beside it, 1 is taken whole, 1 is unhealthy, "
            "1 is cordoned",
        ),
        (
            Request(Memory(1), host_memory_mib=65),
            "no GPU fits: 3 of 6 have too little host memory, 1 is taken whole, 1 is unhealthy, "
            "1 is cordoned",
        ),
        (
            Request(Memory(20_000), cpu_milli=1, host_memory_mib=65),
            "no GPU fits: 3 of 6 have too little memory, 1 is taken whole, 1 is unhealthy, 1 is cordoned",
        ),
    ],
)
def test_sentence_tells_of_a_busy_cluster_as_users_see_it(request_: Request, sentence: str) -> None:
    """Six T4 on two nodes: a sick one, a cordoned one, one taken whole, and three of which little is left."""
    nodes = [
        Node("a", (card(0, healthy=False), card(1, cordoned=True), card(2)), None, 64),
        replace(node(*[T4_MIB] * 3, name="b"), memory_mib=64),
    ]
    view = holding(
        placement(piece(2, T4_MIB, 100), whole=True),
        *(placement(piece(it, 12_000, 60, name="b"), name="b") for it in range(3)),
    )
    rejected_ = place(view, request_, "spread", nodes)
    assert isinstance(rejected_, Unschedulable)
    assert rejected_.sentence() == sentence
    assert sum(rejected_.counts().values()) == len(rejected_.reasons) == 6


def test_rejections_are_equal_when_reasons_and_hint_are() -> None:
    """They are kept in sets, and compared with those of the twins."""
    one = rejected(ReasonCode.MEMORY, ReasonCode.CPU, hint="h")
    same = rejected(ReasonCode.MEMORY, ReasonCode.CPU).with_hint("h")
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, one.with_hint(""), rejected(ReasonCode.MEMORY, hint="h")}) == 3
    assert one != rejected(ReasonCode.CPU, ReasonCode.MEMORY, hint="h")
    assert one != one.with_hint("other")
    assert one != "no GPU fits: 1 of 2 has too little memory, 1 has too little CPU; h"
    assert one.with_hint("other").hint == "other"
    assert one.hint == "h"
    assert one.counts() == one.with_hint("").counts()


def test_counts_are_sorted_by_number_and_then_as_they_are_declared() -> None:
    """Every reason once, then one of them twice; nothing is left out."""
    every = Counter(dict.fromkeys(reversed(ReasonCode), 1))
    said = counts_sentence(every)
    assert said.startswith(f"no GPU fits: 1 of {len(ReasonCode)} has too little memory, 1 has too")
    codes = [
        re.sub(r"1 (of \d+ )?(has|is) ", "", part) for part in said.partition(": ")[2].split(", ")
    ]
    assert codes == [code.value for code in ReasonCode]
    every[ReasonCode.HOST_MEMORY] += 1
    assert counts_sentence(every).startswith(
        "no GPU fits: 2 of 15 have too little host memory, 1 has too little m"
    )
    assert counts_sentence(Counter()) == "there is no GPU"
    assert (
        counts_sentence(Counter({ReasonCode.WHOLE: 10_000}))
        == "no GPU fits: 10000 of 10000 are taken whole"
    )


def test_wording_differs_when_reasons_do() -> None:
    """No two reasons read the same."""
    assert len({why.value for why in ReasonCode}) == len(ReasonCode)


T4S = frozenset({"Tesla T4"})
NONE_SUCH = frozenset({"A100"})


@pytest.mark.parametrize(
    ("request_", "nodes", "hint"),
    [
        # 15079 // 1024 = 14
        (units(15), [node(T4_MIB)], "the largest card has 14 units, ask for no more"),
        (exact(15080), [node(T4_MIB)], "the largest card has 15079 MiB, ask for no more"),
        # the largest of all nodes: 7611 // 1024 = 7
        (
            units(20),
            [node(P4_MIB), node(P4_MIB, T4_MIB, name="b")],
            "the largest card has 14 units, ask for no more",
        ),
        # in units of 256 MiB: 7611 // 256 = 29
        (
            Request(Memory(30, 256)),
            [node(P4_MIB)],
            "the largest card has 29 units, ask for no more",
        ),
        (
            units(1, cards=3),
            [node(T4_MIB, T4_MIB), node(T4_MIB, name="b")],
            "ask for fewer cards, no node has more than 2 that fit",
        ),
        # 10 units fit on one card of three (7 units on the others): fewer cards, not less memory
        (
            units(10, cards=2),
            [node(T4_MIB, P4_MIB, P4_MIB)],
            "ask for fewer cards, no node has more than 1 that fit",
        ),
        (whole(2), [node(T4_MIB)], "ask for fewer cards, no node has more than 1 that fit"),
        (
            Request(Memory(4, GIB), models=NONE_SUCH),
            [Node("a", (card(0), card(1), card(2, model="Tesla P4")))],
            "the models here are Tesla P4, Tesla T4",
        ),
        (
            Request(whole=True, models=NONE_SUCH),
            [Node("a", tuple(card(it, model=f"M{it * 7 % 10}") for it in range(10)))],
            "the models here are M0, M1, M2, M3, M4, M5, M6, M7, M8, M9",
        ),
        # a larger card of another model is no advice: the T4 has 15079 // 1024 = 14
        (
            Request(Memory(20, GIB), models=T4S),
            [Node("a", (card(0), card(1, 32 * GIB, model="V100")))],
            "the largest card has 14 units, ask for no more",
        ),
        (
            Request(Memory(4, GIB), cpu_milli=9000),
            [node(T4_MIB, cpu=8000), node(T4_MIB, name="b", cpu=8500)],
            "the largest node has 8.5 CPU cores, ask for no more",
        ),
        (
            Request(Memory(4, GIB), host_memory_mib=64001),
            [node(T4_MIB, memory=64000)],
            "the largest node has 64000 MiB of host memory, ask for no more",
        ),
        (
            Request(compute=60),
            [Node("a", (replace(card(), compute=50),))],
            "no card gives more than 50 percent of compute, ask for no more",
        ),
        (units(1), [], ""),
        # 512 // 1024 = 0: less than one unit is no advice
        (units(1), [node(512)], "no card here has a whole unit of memory"),
        (
            Request(Memory(1, None)),
            [node(0, 512)],
            "the driver reports no memory of Tesla T4, so the size must be configured: on a workstation with "
            "`fenka daemon --card-memory 96GiB`",
        ),
        (
            units(1, cards=2),
            [node(512, 1024)],
            "ask for fewer cards, no node has more than 1 that fit",
        ),
    ],
)
def test_hint_names_the_nearest_request_when_nothing_could_fit(
    request_: Request, nodes: list[Node], hint: str
) -> None:
    """Such a request would wait in vain."""
    verdict = never_fits(request_, nodes)
    assert verdict is not None
    assert verdict.hint == hint


@pytest.mark.parametrize(
    ("request_", "smaller"),
    [
        (units(15), units(14)),
        (exact(20000), exact(15079)),
        (units(10, cards=3), units(10, cards=1)),
        (whole(4), whole(2)),
    ],
)
def test_request_could_be_placed_when_it_follows_the_hint(
    request_: Request, smaller: Request
) -> None:
    """The larger request could not."""
    nodes = [node(T4_MIB, P4_MIB)]
    assert never_fits(request_, nodes) is not None
    assert never_fits(smaller, nodes) is None


@pytest.mark.parametrize("out", [card(healthy=False), card(cordoned=True)])
def test_request_may_wait_when_only_health_or_a_cordon_excludes_it(out: Card) -> None:
    """A request that is too large in any case gets a hint."""
    nodes = [Node("a", (out,))]
    assert never_fits(units(14), nodes) is None
    verdict = never_fits(units(15), nodes)
    assert verdict is not None
    assert verdict.sentence() == (
        "no GPU fits: 1 of 1 has too little memory; the largest card has 14 units, ask for no more"
    )
