"""Judgements of many nodes at once: order, best node, chosen cards and reasons, against the definition."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.columnar import (
    CODES,
    FITS,
    NO_CARD,
    REASONS,
    JointJudgement,
    Judgement,
    count_all,
    count_reasons,
    has_expressions,
)
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columns import Columns
from fenka.core.evaluate import Fit, evaluate
from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, Node
from fenka.core.policies.candidates import Candidate, NodeCandidate
from fenka.core.policies.scores import SCORES
from fenka.core.reasons import NodeRejection, ReasonCode, Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import UsageTotals
from tests.core.builders import (
    P4_MIB,
    T4_MIB,
    card,
    device,
    exact,
    holding,
    node,
    piece,
    placement,
    requests,
    units,
    whole,
)


@st.composite
def wide_clusters(draw: st.DrawFn) -> tuple[tuple[Node, ...], UsageTotals]:
    """Draw 8 to 24 nodes of a few kinds, many of them alike, with what is held of their cards."""
    totals, nodes = UsageTotals(), []
    kinds = draw(st.lists(st.integers(0, 5), min_size=8, max_size=24))
    for number, kind in enumerate(kinds):
        name = f"n{number:02}"
        sizes = [(T4_MIB,), (P4_MIB, T4_MIB), (T4_MIB,) * 3, (), (T4_MIB, T4_MIB), (P4_MIB,)][kind]
        made = node(*sizes, name=name, cpu=4000 if kind == 2 else None)
        own = draw(st.sampled_from([None, None, None, "binpack", "spread"]))
        closed = draw(st.sampled_from([None, None, 0]))
        cards = tuple(replace(it, cordoned=it.index == closed) for it in made.cards)
        nodes.append(replace(made, cards=cards, card_policy=own))
        for each in cards:
            mib = draw(st.sampled_from([0, 0, 4308, 7000, 15000]))
            if mib:
                part = piece(each.index, mib, mib // 200, name=name)
                totals.add(Placement(name, (part,), cpu_milli=1000, whole=mib == 15000))
    return tuple(nodes), totals


def scores(
    nodes: tuple[Node, ...], view: UsageTotals, request: Request, policy: str
) -> dict[str, Fit]:
    """Return the fits of the definition, the best first."""
    fits = [it for it in evaluate(view, request, policy, nodes) if isinstance(it, Fit)]
    return {it.node: it for it in sorted(fits, key=lambda it: (it.score, it.node))}


@settings(deadline=None, max_examples=80)
@given(
    cluster=wide_clusters(),
    request=requests(),
    policy=st.sampled_from(["binpack", "spread"]),
    most=st.integers(0, 6),
    data=st.data(),
)
def test_order_of_any_nodes_is_that_of_the_definition(
    cluster: tuple[tuple[Node, ...], UsageTotals],
    request: Request,
    policy: str,
    most: int,
    data: st.DataObject,
) -> None:
    """Of all nodes, of a few of many, and the first few of them; with the cards that each would give."""
    nodes, view = cluster
    columns = Columns(nodes, view)
    judgement = Judgement(columns, request)
    fits = scores(nodes, view, request, policy)
    names = [it.name for it in nodes]
    few = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    for among in (names, few):
        slots = columns.slots(among)
        expected = [name for name in fits if name in among]
        in_order = [names[it] for it in judgement.order(policy, slots, most)]
        assert in_order == expected[: most or None]
        mask = np.isin(np.arange(len(names)), slots)
        best = judgement.best(policy, mask)
        assert (None if best is None else names[best]) == (expected[0] if expected else None)
    chosen = judgement.chosen_cards(policy)
    for name in names:
        first = int(columns.starts[columns.slot(name)])
        here = chosen[first : first + len(nodes[names.index(name)].cards)]
        given_ = [it.card for it in fits[name].placement.slices] if name in fits else []
        assert np.flatnonzero(here).tolist() == given_


@settings(deadline=None, max_examples=40)
@given(cluster=wide_clusters(), asked=st.lists(requests(), min_size=1, max_size=3))
def test_reasons_and_joint_fits_are_those_of_the_definition_on_many_nodes(
    cluster: tuple[tuple[Node, ...], UsageTotals], asked: list[Request]
) -> None:
    """Counted on each node and on all; several requests fit together where `place_gang` says so."""
    nodes, view = cluster
    columns = Columns(nodes, view)
    codes = Judgement(columns, asked[0]).codes()
    counts = count_reasons(codes, columns.starts, columns.most_cards)
    total = Counter[ReasonCode]()
    for verdict, number in zip(
        evaluate(view, asked[0], "binpack", nodes), counts.of_slot.tolist(), strict=True
    ):
        if isinstance(verdict, NodeRejection):
            expected = Counter(it.code for it in verdict.reasons)
            assert counts.distinct[number] == expected
            total += expected
    mask = ~Judgement(columns, asked[0]).fits[columns.cards[2]]
    assert count_all(codes[mask]) == total
    joint = JointJudgement(columns, asked, "spread")
    of_all, firsts = joint.codes(np.arange(len(nodes)))
    for slot, each in enumerate(nodes):
        together = place_gang(view, asked, "spread", (each,))
        if isinstance(together, Unschedulable):
            assert not joint.fits[slot]
            few, starts = joint.codes(np.array([slot]))
            assert few.tolist() == of_all[firsts[slot] :][: few.size].tolist()
            (reasons,) = count_reasons(few, starts, columns.most_cards).distinct.values()
            assert reasons == Counter(it.code for it in together.rejections[0].reasons)
        else:
            assert joint.possible[slot]


def codes_of(columns: Columns, request: Request, *reserved: int) -> list[str]:
    """Return the wording of the reason of each column."""
    mask = columns.mask_of([device(it) for it in reserved]) if reserved else None
    words = {FITS: "fits", NO_CARD: "no card"} | {int(v): k.value for k, v in CODES.items()}
    return [words[it] for it in Judgement(columns, request, mask).codes().tolist()]


BAD = [
    replace(card(0), healthy=False, cordoned=True, model="P4"),
    replace(card(1), cordoned=True, model="P4"),
    replace(card(2), model="P4"),
    card(3),
    card(4),
    card(5, 1000),
    card(6),
    card(7),
]


@pytest.mark.parametrize(
    ("request_", "reserved", "expected"),
    [
        # the first filter that rejects a card gives its reason, in the order of the table
        (
            Request(exact(2000).memory, 50, models=frozenset({"Tesla T4"})),
            (7, 0, 3),
            [
                "unhealthy",
                "cordoned",
                "of another model",
                "taken whole",
                "too little compute",
                "too little memory",
                "fits",
                "reserved for requests before it",
            ],
        ),
        # of seven that may be, two fit, and three are wanted
        (
            exact(2000, cards=5, compute=1),
            (),
            [
                "unhealthy",
                "cordoned",
                "without enough others beside it",
                "taken whole",
                "without enough others beside it",
                "too little memory",
                "without enough others beside it",
                "without enough others beside it",
            ],
        ),
        (
            whole(),
            (6,),
            [
                "unhealthy",
                "cordoned",
                "fits",
                "taken whole",
                "in use",
                "fits",
                "reserved for requests before it",
                "fits",
            ],
        ),
        # the host's shortage is the reason of those cards that fit; CPU comes before memory
        (
            replace(exact(2000), cpu_milli=4001, host_memory_mib=65),
            (7,),
            [
                "unhealthy",
                "cordoned",
                "too little CPU",
                "taken whole",
                "too little CPU",
                "too little memory",
                "too little CPU",
                "reserved for requests before it",
            ],
        ),
        (
            replace(exact(2000, cards=9), cpu_milli=4000, host_memory_mib=65),
            (),
            [
                "unhealthy",
                "cordoned",
                "too little host memory",
                "taken whole",
                "too little host memory",
                "too little memory",
                "too little host memory",
                "too little host memory",
            ],
        ),
    ],
)
def test_reason_of_each_card_is_the_first_that_applies(
    request_: Request, reserved: tuple[int, ...], expected: list[str]
) -> None:
    """Eight cards, card 3 taken whole and 60 percent of card 4 held, on a host of 4 cores and 64 MiB."""
    view = holding(placement(piece(3, T4_MIB, 100), whole=True), placement(piece(4, 10, 60)))
    columns = Columns([Node("a", tuple(BAD), 4000, 64), Node("none", ())], view)
    assert codes_of(columns, request_, *reserved) == [*expected, "no card"]


@pytest.mark.parametrize("count", [1, 31, 32, 100])
def test_equal_counts_share_a_number_when_nodes_have_many_cards(count: int) -> None:
    """Three nodes, of which two are alike; the third has one card less and another reason."""
    alike = [node(*[P4_MIB] * count, name=name) for name in "ab"]
    other = Node("c", tuple(card(it, node="c", healthy=it > 0) for it in range(count)))
    columns = Columns([*alike, other])
    codes = Judgement(columns, exact(T4_MIB + 1)).codes()
    counts = count_reasons(codes, columns.starts, columns.most_cards)
    first, second, third = (counts.distinct[it] for it in counts.of_slot.tolist())
    assert first == second == {ReasonCode.MEMORY: count}
    assert third == Counter({ReasonCode.UNHEALTHY: 1, ReasonCode.MEMORY: count - 1}) + Counter()
    assert counts.of_slot[0] == counts.of_slot[1] != counts.of_slot[2]
    assert count_all(codes) == Counter({ReasonCode.MEMORY: 3 * count - 1, ReasonCode.UNHEALTHY: 1})


@pytest.fixture
def _by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a policy that the columns have no expression for: the last name first, the last card first."""

    def last(on: NodeCandidate, it: Candidate) -> tuple[float, ...]:
        return -float(int(on.node.name[1:])), -it.card.index

    monkeypatch.setitem(SCORES, "last", last)


@pytest.mark.usefixtures("_by_name")
def test_policy_without_an_expression_is_scored_by_the_definition() -> None:
    """On the nodes that fit alone, without reserved cards; and nodes may have it as their own."""
    nodes = [node(T4_MIB, T4_MIB, name=f"n{it}") for it in range(4)]
    columns = Columns(nodes, holding(placement(piece(0, 8000, name="n3"), name="n3")))
    assert not has_expressions(columns, "last")
    assert has_expressions(columns, "spread")
    slots = columns.slots(it.name for it in nodes)
    reserved = columns.mask_of([device(0, "n2"), device(1, "n2"), device(1, "n1")])
    judgement = Judgement(columns, units(14), reserved)
    assert judgement.order("last", slots).tolist() == [3, 1, 0]
    assert judgement.order("last", slots, 2).tolist() == [3, 1]
    assert judgement.best("last") == 3
    assert judgement.best("last", np.array([True, True, True, False])) == 1
    assert judgement.best("last", np.zeros(4, np.bool_)) is None
    joint = JointJudgement(columns, [units(14)] * 2, "last", reserved)
    # Only n0 has two free cards; binpack, which is tried in the end, places both there.
    assert joint.fits.tolist() == joint.possible.tolist() == [True, False, False, False]
    # Beside the first request on the last free card: n1 has its reserved card left, n3 the one in use.
    codes, starts = joint.codes(slots)
    assert starts.tolist() == [0, 2, 4, 6]
    assert [REASONS[code - 1] if code else None for code in codes.tolist()] == [
        *(None, None),
        *(ReasonCode.MEMORY, ReasonCode.RESERVED),
        *(ReasonCode.RESERVED, ReasonCode.RESERVED),
        *(ReasonCode.MEMORY, ReasonCode.MEMORY),
    ]
    columns.set_node(replace(nodes[0], card_policy="last"))
    assert not has_expressions(columns, "spread")


@pytest.mark.parametrize("policy", sorted(SCORES))
def test_every_policy_gives_the_reason_of_the_request_that_fails(policy: str) -> None:
    """The slice takes the only card, which the whole one lacks then; a P4 of b is too small for the slice."""
    columns = Columns([node(T4_MIB), node(P4_MIB, name="b")])
    refused = ColumnarPlacer(columns).place_on_one_node([units(8), whole()], policy)
    assert isinstance(refused, Unschedulable)
    assert refused.counts() == {ReasonCode.IN_USE: 1, ReasonCode.MEMORY: 1}


@pytest.mark.parametrize(
    ("asked", "fits", "possible"),
    [
        # alone on each node: one request is what the judgement says
        ([units(8)], [True, True, False], [True, True, False]),
        # 8 + 8 > 14 on one card, and two cards are enough
        ([units(8)] * 2, [False, True, False], [False, True, False]),
        ([units(7)] * 3, [False, True, False], [False, True, False]),
        ([units(7)] * 2, [True, True, False], [True, True, False]),
        # 7 + 7 on the P4 of 7 units is too much
        ([units(3), units(4)], [True, True, True], [True, True, True]),
        # 5 * 3 > 14 on one card
        ([units(5)] * 3, [False, True, False], [False, True, False]),
        ([units(5)] * 5, [False, False, False], [False, False, False]),
        ([whole(), whole()], [False, True, False], [True, True, True]),
        ([Request(compute=50)] * 4, [False, True, False], [False, True, False]),
        (
            [Request(compute=50), exact(7611, compute=51)],
            [False, True, False],
            [False, True, False],
        ),
    ],
)
def test_requests_fit_together_where_their_sum_has_room(
    asked: list[Request], fits: list[bool], possible: list[bool]
) -> None:
    """A node with a T4, one with two T4, one with a P4."""
    columns = Columns([node(T4_MIB), node(T4_MIB, T4_MIB, name="b"), node(P4_MIB, name="c")])
    joint = JointJudgement(columns, asked, "binpack")
    assert (joint.fits.tolist(), joint.possible.tolist()) == (fits, possible)


@pytest.mark.parametrize(
    ("cards", "policy", "expected"),
    [
        # more free memory first by spread, less by binpack, then compute, then the index
        ([(100, 0), (50, 0), (70, 0)], "binpack", 1),
        ([(100, 0), (50, 0), (70, 0)], "spread", 0),
        ([(50, 10), (50, 20), (50, 5)], "binpack", 1),
        ([(50, 10), (50, 20), (50, 5)], "spread", 2),
        ([(50, 0), (50, 0)], "spread", 0),
        # the largest amounts that a key has room for
        ([(2**38 - 1, 0), (2**38 - 2, 0)], "binpack", 1),
        ([(2**38 - 2, 0), (2**38 - 1, 0)], "spread", 1),
    ],
)
def test_chosen_card_is_the_definitions_by_memory_compute_and_index(
    cards: list[tuple[int, int]], policy: str, expected: int
) -> None:
    """Cards of this free memory, with this compute held."""
    made: list[Card] = [card(index, mib) for index, (mib, _) in enumerate(cards)]
    view = holding(*(placement(piece(i, 0, held)) for i, (_, held) in enumerate(cards)))
    columns = Columns([Node("a", tuple(made))], view)
    chosen = np.flatnonzero(Judgement(columns, exact(10)).chosen_cards(policy)).tolist()
    assert chosen == [expected]
    (fit,) = scores((Node("a", tuple(made)),), view, exact(10), policy).values()
    assert [it.card for it in fit.placement.slices] == chosen
