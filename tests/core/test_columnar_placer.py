"""Both placers, by the same tables: where requests go, what a rejection says, and when it says it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fenka.core.columnar_placer import ColumnarPlacer, count_reasons
from fenka.core.columns import Columns
from fenka.core.gangs import NO_LIMITS, PlacementLimits, Placer, PlainPlacer, place_all
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import ReasonCode, Unschedulable
from fenka.core.request import MAX_HOST, Memory, Placement, Request
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage, UsageTotals
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
    units,
    whole,
)

Make = Callable[..., Placer]


def plain(nodes: Sequence[Node], view: UsageTotals | None = None) -> Placer:
    """Return the definition."""
    return PlainPlacer(nodes, view or EmptyUsage())


def columnar(nodes: Sequence[Node], view: UsageTotals | None = None) -> Placer:
    """Return its twin."""
    return ColumnarPlacer(Columns(nodes, view))


both = pytest.mark.parametrize("make", [plain, columnar])

A, B, C = node(T4_MIB, T4_MIB), node(T4_MIB, name="b"), node(P4_MIB, name="c")


def on(*devices: str) -> PlacementLimits:
    """Return limits under which these cards, a0 for card 0 of node a, are reserved."""
    return PlacementLimits(frozenset(device(int(it[1:]), it[0]) for it in devices))


def among(*names: str) -> PlacementLimits:
    """Return limits under which only these nodes are eligible."""
    return PlacementLimits(among=frozenset(names))


def shown(*verdicts: object) -> str:
    """Return where slices are, a0 for card 0 of node a, or the sentence of a rejection."""
    parts = []
    for verdict in verdicts:
        if isinstance(verdict, Unschedulable):
            return verdict.sentence()
        placements = verdict if isinstance(verdict, tuple) else (verdict,)
        parts += [f"{it.node}{each.card}" for it in placements for each in it.slices]
    return " ".join(parts)


FREE = [
    # a T4 has 14 units, the P4 has 7: for 4 units all nodes are empty, and the P4 is the tightest card
    (units(4), "binpack", NO_LIMITS, "c0"),
    # for 8 units only T4 are left: a before b by name
    (units(8), "binpack", NO_LIMITS, "a0"),
    (units(4), "spread", NO_LIMITS, "a0"),
    (units(8), "binpack", among("b", "c"), "b0"),
    (units(8), "binpack", among("c"), "no GPU fits: 1 of 1 has too little memory"),
    (units(8), "binpack", among("gone"), "there is no GPU"),
    # a1 and b0 are as tight: the lower index
    (units(8), "binpack", on("a0"), "b0"),
    (units(8), "binpack", on("a0", "b0"), "a1"),
    (
        units(8),
        "binpack",
        on("a0", "a1", "b0"),
        "no GPU fits: 3 of 4 are reserved for requests before it, ",
    ),
    (units(4, cards=2), "binpack", NO_LIMITS, "a0 a1"),
    (
        units(4, cards=2),
        "spread",
        on("a1"),
        "no GPU fits: 3 of 4 are without enough others beside it, ",
    ),
    (
        units(4, cards=3),
        "binpack",
        NO_LIMITS,
        "no GPU fits: 4 of 4 are without enough others beside it",
    ),
    (units(15), "binpack", NO_LIMITS, "no GPU fits: 4 of 4 have too little memory"),
    # 7611 is all of the P4, and one more is not
    (exact(P4_MIB), "binpack", NO_LIMITS, "c0"),
    (exact(P4_MIB + 1), "binpack", NO_LIMITS, "a0"),
    (exact(T4_MIB + 1), "spread", NO_LIMITS, "no GPU fits: 4 of 4 have too little memory"),
    (whole(2), "spread", NO_LIMITS, "a0 a1"),
    (whole(), "binpack", on("c0"), "a0"),
    (Request(compute=100), "binpack", NO_LIMITS, "c0"),
    (
        Request(compute=1, models=frozenset({"A"})),
        "binpack",
        NO_LIMITS,
        "no GPU fits: 4 of 4 are of an",
    ),
    (Request(whole=True, models=frozenset({"A", "Tesla T4"})), "binpack", among("b"), "b0"),
]


@both
@pytest.mark.parametrize(("request_", "policy", "limits", "expected"), FREE)
def test_request_goes_to_the_best_node_when_all_are_free(
    make: Make, request_: Request, policy: str, limits: PlacementLimits, expected: str
) -> None:
    """a has two T4, b has one, c has a P4; the usage is afterwards as before."""
    placer = make([C, A, B])
    assert shown(placer.place(request_, policy, limits)).startswith(expected)
    assert placer.card_usage("a", device(0)) == NO_USAGE


@both
@pytest.mark.parametrize(
    ("requests", "policy", "limits", "expected"),
    [
        # the first decides which node is tried first: for 2 units the P4, which has no 6 beside it
        ([units(2), units(6)], "binpack", NO_LIMITS, "a0 a0"),
        ([units(2), units(5)], "binpack", NO_LIMITS, "c0 c0"),
        # 8 + 8 > 14: two cards
        ([units(8), units(8)], "binpack", NO_LIMITS, "a0 a1"),
        ([units(7), units(7)], "spread", NO_LIMITS, "a0 a1"),
        ([units(7), units(7)], "spread", among("b"), "b0 b0"),
        # in this order 4 + 4 + 14 fill card 0 with 8, and 14 go to the other
        ([units(4), units(4), units(14)], "binpack", NO_LIMITS, "a0 a0 a1"),
        # spread would put the small ones on both cards; the largest first leaves the other for them
        ([units(4), units(4), units(14)], "spread", NO_LIMITS, "a1 a1 a0"),
        ([whole(), units(1)], "binpack", NO_LIMITS, "a0 a1"),
        # the first one that does not fit beside those before it gives the reasons
        ([units(8)] * 3, "binpack", NO_LIMITS, "no GPU fits: 4 of 4 have too little memory"),
        (
            [units(8), units(8)],
            "binpack",
            on("a0"),
            "no GPU fits: 3 of 4 have too little memory, 1 is reserved",
        ),
        ([units(8), whole()], "binpack", among("b"), "no GPU fits: 1 of 1 is in use"),
        ([whole(), units(8)], "binpack", among("b"), "no GPU fits: 1 of 1 is taken whole"),
        (
            [Request(compute=60)] * 2,
            "binpack",
            among("b"),
            "no GPU fits: 1 of 1 has too little compute",
        ),
        ([Request(compute=60)] * 2, "binpack", among("a", "b"), "a0 a1"),
        ([units(4)] * 2, "binpack", among("gone"), "there is no GPU"),
        # each container needs two cards, in 7 of 14 units: twice on both
        ([units(7, cards=2)] * 2, "binpack", NO_LIMITS, "a0 a1 a0 a1"),
        (
            [units(8, cards=2)] * 2,
            "binpack",
            among("a"),
            "no GPU fits: 2 of 2 have too little memory",
        ),
    ],
)
def test_requests_for_one_node_are_together_or_nowhere(
    make: Make, requests: list[Request], policy: str, limits: PlacementLimits, expected: str
) -> None:
    """As the containers of a pod are; the usage is afterwards as before."""
    placer = make([C, A, B])
    assert shown(placer.place_on_one_node(requests, policy, limits)).startswith(expected)
    assert all(placer.card_usage("a", device(index)) == NO_USAGE for index in (0, 1))


@both
def test_fits_are_in_the_order_of_names_with_all_cards_that_do(make: Make) -> None:
    """Usage may change in between, if it is restored."""
    placer = make([C, B, A])
    found = []
    for at, fit in placer.fits(units(8), on("a0")):
        found.append((at.name, [each.index for each in fit.cards], shown(fit.placement)))
        placer.add(fit.placement)
        placer.remove(fit.placement)
    assert found == [("a", [1], "a1"), ("b", [0], "b0")]
    assert [at.name for at, _ in placer.fits(units(1), among("c", "b"))] == ["b", "c"]
    assert list(placer.fits(units(15))) == []


@both
def test_story_of_one_placer_when_requests_come_and_go(make: Make) -> None:
    """Cards fill up, a release makes room, and an emptied placer knows nothing of it."""
    placer = make([A, B])
    first, second, third = (placer.place(units(8), "binpack"), None, None)
    assert isinstance(first, Placement)
    placer.add(first)
    # a0 has 6 of 14 left: a is the fuller node, and 8 fit on a1
    second = placer.place(units(8), "binpack")
    assert shown(first, second) == "a0 a1"
    assert isinstance(second, Placement)
    placer.add(second)
    third = placer.place(units(8), "binpack")
    assert shown(third) == "b0"
    assert isinstance(third, Placement)
    placer.add(third)
    refused = placer.place(units(8), "binpack")
    assert shown(refused) == "no GPU fits: 3 of 3 have too little memory"
    assert shown(placer.place(units(6), "binpack")) == "a0"
    placer.remove(second)
    assert shown(placer.place(units(8), "binpack")) == "a1"
    assert shown(placer.place(whole(), "binpack")) == "a1"
    # 15079 * 8 // 14 = 8616
    assert placer.card_usage("a", device(0)) == CardUsage(8616, 0, 1, 0)
    empty = placer.emptied()
    assert shown(empty.place(units(14, cards=2), "binpack")) == "a0 a1"
    empty.add(first)
    assert empty.card_usage("a", device(0)).holders == 1
    assert placer.card_usage("b", device(0, "b")).holders == 1


@both
def test_placer_goes_by_the_usage_of_its_view(make: Make) -> None:
    """8 units are held of a0, 1 percent of a1, and b0 whole."""
    view = holding(
        placement(piece(0, 8616)),
        placement(piece(1, 0, 1)),
        placement(piece(0, T4_MIB, 100, name="b"), name="b", whole=True),
    )
    placer = make([A, B], view)
    assert shown(placer.place(units(7), "binpack")) == "a1"
    assert shown(placer.place(Request(compute=100), "binpack")) == "a0"
    assert (
        shown(placer.place(whole(), "binpack"))
        == "no GPU fits: 2 of 3 are in use, 1 is taken whole"
    )
    assert shown(placer.place(units(6, compute=100), "binpack")) == "a0"
    assert shown(placer.place(units(7, compute=100), "binpack")) == (
        "no GPU fits: 1 of 3 has too little memory, 1 has too little compute, 1 is taken whole"
    )


@pytest.mark.parametrize("together", [False, True])
def test_rejection_tells_of_its_own_time_when_it_is_read_later(together: bool) -> None:
    """It is computed when it is read: the cards that were full are free by then, or full of others."""
    placer = ColumnarPlacer(Columns([A]))
    whole_card = placement(piece(0, T4_MIB, 100), whole=True)
    placer.add(whole_card)
    placer.add(placement(piece(1, 14_000)))

    def ask() -> object:
        if together:
            return placer.place_on_one_node([units(4)] * 2, "binpack")
        return placer.place(units(4), "binpack")

    early = ask()
    placer.remove(whole_card)
    placer.add(placement(piece(0, 13_000)))
    late = ask()
    assert isinstance(early, Unschedulable)
    assert isinstance(late, Unschedulable)
    placer.remove(placement(piece(1, 14_000)))
    placer.remove(placement(piece(0, 13_000)))
    assert shown(ask()).startswith("a0")
    assert early.counts() == {ReasonCode.WHOLE: 1, ReasonCode.MEMORY: 1}
    assert late.sentence() == "no GPU fits: 2 of 2 have too little memory"
    # 15079 - 14000 = 1079 and 15079 - 13000 = 2079 were free
    assert [reason.available for reason in late.reasons] == [2079, 1079]
    assert [reason.available for reason in early.reasons] == [0, 1079]
    assert early.with_hint("wait").sentence().endswith("1 is taken whole; wait")
    # Reading has changed nothing.
    assert placer.card_usage("a", device(0)) == placer.card_usage("a", device(1)) == NO_USAGE


def test_state_is_restored_when_a_look_into_the_past_fails() -> None:
    """The look is a context, whose body may raise."""
    placer = ColumnarPlacer(Columns([B]))
    placer.add(placement(piece(0, 100, name="b"), name="b"))
    state = placer.state

    def look() -> None:
        with placer.as_of(None) as columns:
            assert columns.card_usage("b", device(0, "b")) == NO_USAGE
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    assert placer.card_usage("b", device(0, "b")) == CardUsage(100, 0, 1, 0)
    assert placer.state is state


class CountedColumns(Columns):
    """Columns that count their changes."""

    changes = 0

    def add(self, *placements: Placement) -> None:
        """Allocate placements."""
        self.changes += len(placements)
        super().add(*placements)

    def remove(self, *placements: Placement) -> None:
        """Release placements."""
        self.changes += len(placements)
        super().remove(*placements)


def test_reasons_cost_no_change_of_other_gangs_when_many_were_rejected() -> None:
    """Tenants choose how many gangs wait, and anybody reads why: that must not cost gangs times gangs."""
    columns = CountedColumns([A, B])
    placer = ColumnarPlacer(columns)
    rejected = [place_all(placer, [units(4)] * 2 + [units(14)] * 3, "binpack") for _ in range(50)]
    before = columns.changes
    sentences = {why.sentence() for why in rejected if isinstance(why, Unschedulable)}
    assert sentences == {
        "no GPU fits: 3 of 3 have too little memory; 4 of the gang's 5 would fit together"
    }
    # Each goes to the members that it had tried before, and back: 4 of them, 2 by order, and none by others.
    assert columns.changes - before <= 50 * 2 * 4


def test_reasons_are_those_of_the_time_of_rejection_when_they_are_counted_together() -> None:
    """One walk from the last state to the first finds what each rejection has found by itself."""

    def rejections(placer: ColumnarPlacer) -> list[Unschedulable]:
        found: list[Unschedulable] = []
        for number in range(3):
            for verdict in (
                placer.place(units(14 - number), "binpack", among("a")),
                place_all(placer, [units(5)] * 7, "binpack"),
            ):
                assert isinstance(verdict, Unschedulable)
                found.append(verdict)
            placer.add(placement(piece(number % 2, 100 + number)))
        return found

    first = placement(piece(0, 9_000)), placement(piece(1, 4_000))
    made = [ColumnarPlacer(Columns([A, B])) for _ in range(2)]
    for placer in made:
        placer.add(first[0])
        placer.add(first[1])
    alone, together = map(rejections, made)
    steps = sum(1 for _ in count_reasons(together))
    assert steps == len(together) == 6
    assert sum(1 for _ in count_reasons(together)) == 0
    assert [why.sentence() for why in together] == [why.sentence() for why in alone]
    assert [why.rejections for why in together] == [why.rejections for why in alone]


@both
def test_more_than_all_cards_are_rejected_when_only_a_few_are_large(make: Make) -> None:
    """Two cards of 8 units are on one node only: of a's 14 + 7 + 14, b's 14 + 7."""
    nodes = [node(T4_MIB, P4_MIB, T4_MIB), node(T4_MIB, P4_MIB, name="b")]
    placer = make(nodes)
    held = placement(piece(2, 1))
    assert shown(placer.place(units(8, cards=2), "spread")) == "a0 a2"
    assert shown(placer.place(units(14, cards=2), "spread", on("a1"))) == "a0 a2"
    placer.add(held)
    assert shown(placer.place(units(14, cards=2), "binpack")) == (
        "no GPU fits: 3 of 5 have too little memory, 2 are without enough others beside it"
    )
    placer.remove(held)
    assert shown(placer.place(units(14, cards=2), "binpack")) == "a0 a2"
    assert shown(placer.place(units(1, cards=4), "binpack")).startswith(
        "no GPU fits: 5 of 5 are without"
    )


@both
def test_frontier_follows_the_usage_when_cards_fill_and_are_released(make: Make) -> None:
    """The same shape is asked for again and again, with a release between: 15079 - 12000 = 3079."""
    placer, held = make([B]), placement(piece(0, 12_000, 50, name="b"), name="b")
    for request, free, full in (
        (exact(3079), True, True),
        (exact(3080), True, False),
        (exact(3079, compute=50), True, True),
        (exact(3079, compute=51), True, False),
        (Request(compute=51), True, False),
        (exact(T4_MIB + 1), False, False),
    ):
        for _ in range(2):
            assert isinstance(placer.place(request, "binpack"), Placement) is free
            placer.add(held)
            assert isinstance(placer.place(request, "binpack"), Placement) is full
            placer.remove(held)


@both
def test_several_cards_are_found_when_the_one_that_was_full_is_released(make: Make) -> None:
    """What was known of a full node is not known of it afterwards."""
    placer, held = make([A]), placement(piece(1, 10_000))
    placer.add(held)
    two = exact(6000, cards=2)
    # 15079 - 10000 = 5079
    assert shown(placer.place(two, "binpack")).startswith(
        "no GPU fits: 1 of 2 has too little memory, 1"
    )
    placer.remove(held)
    assert shown(placer.place(two, "binpack")) == "a0 a1"
    assert shown(placer.place_on_one_node([two, two], "binpack")) == "a0 a1 a0 a1"


@both
@pytest.mark.parametrize("closed", [card(healthy=False), card(cordoned=True)])
def test_closed_card_is_not_given_when_it_is_the_only_large_one(make: Make, closed: Card) -> None:
    """It counts neither for one card nor for two."""
    cards = Node("a", (closed, card(1, P4_MIB)))
    placer = make([cards])
    assert shown(placer.place(units(8), "binpack")).startswith(
        "no GPU fits: 1 of 2 has too little memory, 1"
    )
    assert isinstance(placer.place(units(7, cards=2), "binpack"), Unschedulable)
    assert shown(placer.place(units(7), "spread")) == "a1"


@both
@pytest.mark.parametrize("nodes", [[], [Node("a", ())], [Node("a", ()), Node("b", ())]])
def test_there_is_no_gpu_when_no_node_has_one(make: Make, nodes: list[Node]) -> None:
    """Whatever is requested: one card, several, a gang, or all on one node."""
    for request in (units(1), whole(), Request(compute=1), units(1, cards=2)):
        placer = make(nodes)
        assert shown(placer.place(request, "binpack")) == "there is no GPU"
        assert shown(placer.place_on_one_node([request] * 2, "spread")) == "there is no GPU"
        assert list(placer.fits(request)) == []
        rejected = place_all(placer, [request] * 2, "binpack")
        assert shown(rejected) == "there is no GPU; 0 of the gang's 2 would fit together"


@both
def test_node_without_cards_is_no_obstacle_when_another_has_some(make: Make) -> None:
    """It has a slot of its own, and no reason."""
    placer = make([Node("0", ()), B, Node("z", ())])
    assert shown(placer.place(units(14), "binpack")) == "b0"
    assert shown(placer.place(units(15), "binpack")) == "no GPU fits: 1 of 1 has too little memory"


@both
@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_amounts_are_exact_when_they_are_the_largest_possible(make: Make, policy: str) -> None:
    """A card of 2 ** 37 MiB, the largest host amount, and one MiB and one thousandth of a core more."""
    huge = 1 << 37
    host = Node("a", (card(0, huge),), MAX_HOST, MAX_HOST)
    placer = make([host, node(T4_MIB, name="b")])
    request = Request(Memory(T4_MIB + 1), cpu_milli=MAX_HOST, host_memory_mib=MAX_HOST - 1)
    first = placer.place(request, policy)
    assert shown(first) == "a0"
    assert isinstance(first, Placement)
    placer.add(first)
    assert placer.host_usage("a") == (MAX_HOST, MAX_HOST - 1)
    small = replace(request, cpu_milli=1, host_memory_mib=0)
    assert shown(placer.place(small, policy)) == (
        "no GPU fits: 1 of 2 has too little memory, 1 has too little CPU"
    )
    assert isinstance(
        placer.place(replace(small, cpu_milli=0, host_memory_mib=1), policy), Placement
    )
    assert isinstance(placer.place_on_one_node([request, small], policy), Unschedulable)
    # 2 ** 37 - 15080 are free.
    placer.add(placement(piece(0, huge - 15080)))
    assert placer.card_usage("a", device(0)) == CardUsage(huge, 0, 2, 0)
    assert isinstance(placer.place(exact(1), policy, among("a")), Unschedulable)


@both
@pytest.mark.parametrize(("policy", "expected"), [("binpack", "a0"), ("spread", "b0")])
def test_card_without_memory_is_taken_whole_when_it_is_asked_for(
    make: Make, policy: str, expected: str
) -> None:
    """A node may offer no memory at all. Nodes are compared by memory: both have 16000 of 16000 free."""
    nodes = [node(0, 16000), node(16000, 0, name="b")]
    assert shown(make(nodes).place(whole(), policy)) == expected
    alone = Node("c", (replace(card(0, 0, node="c"), compute=0),))
    assert shown(make([alone]).place(whole(), policy)) == "c0"


@both
@pytest.mark.parametrize("count", [31, 32, 40])
def test_reasons_add_up_when_a_node_has_very_many_cards(make: Make, count: int) -> None:
    """Every third card is unhealthy, every fifth of the others is cordoned."""
    cards = tuple(card(i, healthy=i % 3 > 0, cordoned=i % 5 == 0) for i in range(count))
    sick = -(-count // 3)
    cordoned = sum(i % 3 > 0 and i % 5 == 0 for i in range(count))
    refused = make([Node("a", cards), C]).place(units(15), "binpack")
    assert isinstance(refused, Unschedulable)
    assert refused.counts() == {
        ReasonCode.UNHEALTHY: sick,
        ReasonCode.CORDONED: cordoned,
        ReasonCode.MEMORY: count - sick - cordoned + 1,
    }


@both
def test_reserved_devices_are_ignored_when_no_node_has_them(make: Make) -> None:
    """A reservation may outlive its card."""
    gone = PlacementLimits(frozenset({DeviceId("GPU-gone")}), frozenset({"b"}))
    assert shown(make([A, B]).place(units(14), "binpack", gone)) == "b0"
