"""Filters, policies, several cards, hosts and reservations: each rule by itself."""

from dataclasses import replace

import pytest

from fenka.core.evaluate import FILTERS, Fit, evaluate, never_fits, place
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.policies.candidates import Candidate
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable
from fenka.core.request import ANY_INSTANCE, Memory, Placement, Request
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage, UsageTotals
from tests.core.builders import (
    GIB,
    T4_MIB,
    card,
    device,
    exact,
    holding,
    instance,
    node,
    piece,
    placement,
    units,
    whole,
)

EIGHT, SIXTEEN = 8 * GIB, 16 * GIB
COMPUTE = Request(compute=30)
INSIDE = Request(Memory(4000), compute=30, instance=ANY_INSTANCE)
T4_ONLY = Request(Memory(4, GIB), models=frozenset({"Tesla T4"}))


def first_reason(each: Card, used: CardUsage, request: Request) -> Reason | None:
    """Return the reason of the one card of a node, through `evaluate`."""

    class One(EmptyUsage):
        def card_usage(self, node: str, device: DeviceId) -> CardUsage:  # noqa: ARG002
            return used

    (verdict,) = evaluate(One(), request, "binpack", [Node("a", (each,))])
    return None if isinstance(verdict, Fit) else verdict.reasons[0]


@pytest.mark.parametrize(
    ("each", "used", "request_", "why", "needed", "available"),
    [
        (card(healthy=False), NO_USAGE, units(4), ReasonCode.UNHEALTHY, 0, 0),
        (card(cordoned=True), NO_USAGE, units(4), ReasonCode.CORDONED, 0, 0),
        (card(model="Tesla P4"), NO_USAGE, T4_ONLY, ReasonCode.MODEL, 0, 0),
        # neither a card in MIG mode nor its instances take what is for cards, and a card takes no instance
        (card(divided=True), NO_USAGE, units(4), ReasonCode.DIVIDED, 0, 0),
        (instance(), NO_USAGE, units(4), ReasonCode.DIVIDED, 0, 0),
        (instance(), NO_USAGE, whole(), ReasonCode.DIVIDED, 0, 0),
        (card(divided=True), NO_USAGE, INSIDE, ReasonCode.INSTANCE, 0, 0),
        (card(), NO_USAGE, INSIDE, ReasonCode.INSTANCE, 0, 0),
        (instance(), NO_USAGE, replace(INSIDE, instance="1g.5gb"), ReasonCode.INSTANCE, 0, 0),
        # 38 - 20 = 18 < 30 percent of the whole card
        (instance(), CardUsage(4000, 20, 1), INSIDE, ReasonCode.COMPUTE, 30, 18),
        # whatever is asked for, a card taken whole admits nobody
        (card(), CardUsage(T4_MIB, 100, 1, 1), units(1), ReasonCode.WHOLE, 0, 0),
        (card(), CardUsage(T4_MIB, 100, 1, 1), COMPUTE, ReasonCode.WHOLE, 0, 0),
        (card(), CardUsage(T4_MIB, 100, 1, 1), whole(), ReasonCode.WHOLE, 0, 0),
        # one MiB, or one percent, is enough to be in use
        (card(), CardUsage(1, 0, 1), whole(), ReasonCode.IN_USE, 0, 0),
        (card(), CardUsage(0, 1, 1), whole(), ReasonCode.IN_USE, 0, 0),
        # 15079 - 10772 = 4307, one MiB short of the 4308 that 4 units are
        (card(), CardUsage(10772, 0, 1), units(4), ReasonCode.MEMORY, 4308, 4307),
        # 15079 - 20000 < 0
        (card(), CardUsage(20000, 0, 2), exact(1), ReasonCode.MEMORY, 1, 0),
        # 20 units are 20 x 1024 = 20480 MiB at the least, on a card that has 14
        (card(), NO_USAGE, units(20), ReasonCode.MEMORY, 20480, T4_MIB),
        (card(), NO_USAGE, exact(15080), ReasonCode.MEMORY, 15080, T4_MIB),
        # 100 - 71 = 29 < 30
        (card(), CardUsage(0, 71, 1), COMPUTE, ReasonCode.COMPUTE, 30, 29),
        (card(), CardUsage(4308, 71, 1), units(4, compute=30), ReasonCode.COMPUTE, 30, 29),
        # 100 - 130 < 0
        (card(), CardUsage(0, 130, 2), COMPUTE, ReasonCode.COMPUTE, 30, 0),
        # another capacity than 100
        (
            Card(0, DeviceId("GPU-a-0"), "T4", T4_MIB, compute=25),
            NO_USAGE,
            COMPUTE,
            ReasonCode.COMPUTE,
            30,
            25,
        ),
    ],
)
def test_reason_has_the_amounts_when_a_filter_rejects_a_card(
    each: Card, used: CardUsage, request_: Request, why: ReasonCode, needed: int, available: int
) -> None:
    """Reasons without amounts have none."""
    assert first_reason(each, used, request_) == Reason(why, 0, needed, available)


@pytest.mark.parametrize(
    ("each", "used", "request_"),
    [
        # 15079 - 10771 = 4308, exactly 4 units
        (card(), CardUsage(10771, 0, 3), units(4)),
        (card(), NO_USAGE, units(14)),
        (card(), NO_USAGE, exact(T4_MIB)),
        (card(), NO_USAGE, whole()),
        (card(), NO_USAGE, T4_ONLY),
        # 100 - 70 = 30
        (card(), CardUsage(0, 70, 1), COMPUTE),
        # compute alone needs no memory, memory alone needs no compute
        (card(), CardUsage(T4_MIB, 0, 1), COMPUTE),
        (card(), CardUsage(0, 100, 1), units(4)),
        (card(), CardUsage(20000, 0, 2), COMPUTE),
        # 20096 - 16096 = 4000, and 38 - 8 = 30
        (instance(), CardUsage(16096, 8, 1), INSIDE),
        (instance(), NO_USAGE, Request(whole=True, instance="3g.20gb")),
    ],
)
def test_request_fits_when_exactly_that_is_free(
    each: Card, used: CardUsage, request_: Request
) -> None:
    """To the last MiB and the last percent."""
    assert first_reason(each, used, request_) is None


def test_reason_is_that_of_the_first_filter_when_several_reject_a_card() -> None:
    """The reasons come in the order of the table as the card is mended one by one."""
    request = Request(whole=True, models=frozenset({"Tesla T4"}))
    bad = card(healthy=False, cordoned=True, model="Tesla P4", divided=True)
    taken, in_use = CardUsage(T4_MIB, 100, 1, 1), CardUsage(1, 1, 1)
    found = [
        first_reason(each, used, request)
        for each, used in [
            (bad, taken),
            (card(cordoned=True, model="Tesla P4", divided=True), taken),
            (card(model="Tesla P4", divided=True), taken),
            (card(model="Tesla P4"), taken),
            (card(), taken),
            (card(), in_use),
            # Somebody else's record may hold memory or compute in no slice.
            (card(), CardUsage(1, 1, 0)),
            (card(), CardUsage(0, 1, 0)),
        ]
    ]
    assert [reason and reason.code for reason in found] == [
        ReasonCode.UNHEALTHY,
        ReasonCode.CORDONED,
        ReasonCode.DIVIDED,
        ReasonCode.MODEL,
        ReasonCode.WHOLE,
        ReasonCode.IN_USE,
        ReasonCode.MEMORY,
        ReasonCode.COMPUTE,
    ]
    assert {reason and reason.code for reason in found} == FILTERS.keys() - {ReasonCode.INSTANCE}


@pytest.mark.parametrize(
    ("policy", "request_", "expected"),
    [
        # free memory 16, 12, 8, 12 GiB; free compute 100, 20, 100, 60
        ("binpack", units(4), 2),
        ("spread", units(4), 0),
        # at least 9: 16, 12, 12; of the two with 12, the one with less free compute
        ("binpack", units(9), 1),
        ("spread", units(9), 0),
        # with 50 % of compute: 16, 8, 12
        ("binpack", units(9, compute=50), 3),
        # by compute alone: at least 10 of 100, 20, 100, 60
        ("binpack", Request(compute=10), 1),
        ("binpack", Request(compute=21), 3),
        # 100 twice: the one with less free memory packs, the one with more spreads
        ("binpack", Request(compute=61), 2),
        ("spread", Request(compute=10), 0),
    ],
)
def test_cards_are_the_fullest_or_emptiest_when_the_policy_says_so(
    policy: str, request_: Request, expected: int
) -> None:
    """Fullness is measured by what is requested."""
    view = holding(placement(piece(1, 4 * GIB, 80), piece(2, EIGHT), piece(3, 4 * GIB, 40)))
    cards = node(SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN)
    verdict = place(view, request_, policy, [cards])
    assert isinstance(verdict, Placement)
    assert [each.card for each in verdict.slices] == [expected]


@pytest.mark.parametrize(
    ("policy", "sizes", "held", "expected"),
    [
        # a: 32 - 8 = 24 of 32 free = 0.75; b: 32 - 12 = 20 of 32 = 0.625: b is fuller, though a's
        # card 0 with 8 free is tighter than b's cards with 10
        ("binpack", ((SIXTEEN, SIXTEEN),) * 2, {"a": (8, 0), "b": (6, 6)}, ("b", 0)),
        ("spread", ((SIXTEEN, SIXTEEN),) * 2, {"a": (8, 0), "b": (6, 6)}, ("a", 1)),
        # a: 4 of 8 free = 0.5; b: 10 of 16 = 0.625: by share, not by amount
        ("binpack", ((EIGHT,), (SIXTEEN,)), {"a": (4,), "b": (6,)}, ("a", 0)),
        # a: 6 of 8 = 0.75; b: 8 of 16 = 0.5
        ("binpack", ((EIGHT,), (SIXTEEN,)), {"a": (2,), "b": (8,)}, ("b", 0)),
        ("spread", ((EIGHT,), (SIXTEEN,)), {"a": (2,), "b": (8,)}, ("a", 0)),
        # the fullest that fits: a has 16 - 14 = 2 left, too little for 4
        ("binpack", ((SIXTEEN,),) * 2, {"a": (14,), "b": (0,)}, ("b", 0)),
        # both empty: the smaller card is the tighter, the larger the emptier
        ("binpack", ((SIXTEEN,), (EIGHT,)), {}, ("b", 0)),
        ("spread", ((EIGHT,), (SIXTEEN,)), {}, ("b", 0)),
    ],
)
def test_nodes_are_ranked_by_their_free_share_when_several_fit(
    policy: str,
    sizes: tuple[tuple[int, ...], ...],
    held: dict[str, tuple[int, ...]],
    expected: tuple[str, int],
) -> None:
    """Equally full nodes are ranked by their best card."""
    nodes = [node(*each, name=name) for name, each in zip("ab", sizes, strict=True)]
    view = holding(
        *(
            placement(
                *(piece(index, gib * GIB, name=name) for index, gib in enumerate(gibs) if gib),
                name=name,
            )
            for name, gibs in held.items()
        )
    )
    verdict = place(view, units(4), policy, nodes)
    assert isinstance(verdict, Placement)
    assert (verdict.node, verdict.slices[0].card) == expected


def test_free_share_excludes_a_card_when_it_takes_no_slices() -> None:
    """An empty cordoned card is no reason for or against its node."""
    half = node(SIXTEEN, name="b")
    cordoned = Node("a", (card(0, SIXTEEN), card(1, SIXTEEN, cordoned=True)))
    # a: 16 - 12 = 4 of 16 free = 0.25 without the cordoned card, 20 of 32 = 0.625 with it;
    # b: 16 - 8 = 8 of 16 = 0.5
    view = holding(placement(piece(0, 12 * GIB)), placement(piece(0, EIGHT, name="b"), name="b"))
    policies = ("binpack", "spread")
    chosen = {policy: place(view, units(4), policy, [cordoned, half]) for policy in policies}
    assert {
        policy: verdict.node for policy, verdict in chosen.items() if isinstance(verdict, Placement)
    } == {"binpack": "a", "spread": "b"}


def test_slices_are_on_different_cards_when_several_are_requested() -> None:
    """Three slices are on the three tightest cards, however empty one card is."""
    # free 16, 12, 8, 12: the three tightest that are at least 4 are 2, 1 and 3
    view = holding(placement(piece(1, 4 * GIB), piece(2, EIGHT), piece(3, 4 * GIB)))
    cards = node(SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN)
    verdict = place(view, units(4, cards=3), "binpack", [cards])
    assert isinstance(verdict, Placement)
    assert verdict.slices == (piece(1, 4 * GIB), piece(2, 4 * GIB), piece(3, 4 * GIB))
    refused = place(
        EmptyUsage(), units(1, cards=2), "binpack", [node(SIXTEEN), node(SIXTEEN, name="b")]
    )
    assert isinstance(refused, Unschedulable)
    # 2 are needed on one node, 1 is there
    assert {(each.code, each.needed, each.available) for each in refused.reasons} == {
        (ReasonCode.TOO_FEW, 2, 1)
    }


def test_cards_are_untouched_when_they_are_taken_whole() -> None:
    """The placement has everything of each card."""
    view = holding(placement(piece(1, 1)))
    verdict = place(view, whole(2), "binpack", [node(T4_MIB, T4_MIB, SIXTEEN)])
    assert isinstance(verdict, Placement)
    assert verdict.whole
    assert verdict.slices == (piece(0, T4_MIB, 100), piece(2, SIXTEEN, 100))


def test_slice_holds_no_memory_when_only_compute_is_requested() -> None:
    """The memory is left to others, and the card is not taken whole."""
    verdict = place(EmptyUsage(), Request(compute=40), "binpack", [node(T4_MIB)])
    assert verdict == placement(piece(0, 0, 40))


@pytest.mark.parametrize(
    ("cpu", "memory", "held", "expected"),
    [
        # 2000 + 2000 = 4000, and 4000 + 4000 = 8000: to the last one
        (4000, 8000, (2000, 4000), None),
        # 2001 + 2000 > 4000: 1999 are left
        (4000, 8000, (2001, 4000), (ReasonCode.CPU, 2000, 1999)),
        # 4001 + 4000 > 8000: 3999 are left
        (4000, 8000, (2000, 4001), (ReasonCode.HOST_MEMORY, 4000, 3999)),
        # overcommitted: 5000 of 4000
        (4000, 8000, (5000, 0), (ReasonCode.CPU, 2000, 0)),
        # not counted
        (None, None, (10**6, 10**6), None),
        (None, 8000, (10**6, 4001), (ReasonCode.HOST_MEMORY, 4000, 3999)),
    ],
)
def test_node_is_rejected_when_its_host_is_too_small(
    cpu: int | None,
    memory: int | None,
    held: tuple[int, int],
    expected: tuple[ReasonCode, int, int] | None,
) -> None:
    """CPU in thousandths of a core and host memory in MiB; None is not counted."""
    host = node(T4_MIB, T4_MIB, cpu=cpu, memory=memory)
    request = Request(Memory(4, GIB), cpu_milli=2000, host_memory_mib=4000)
    (verdict,) = evaluate(holding(Placement("a", (), *held)), request, "binpack", [host])
    if expected is None:
        assert isinstance(verdict, Fit)
        assert (verdict.placement.cpu_milli, verdict.placement.host_memory_mib) == (2000, 4000)
    else:
        assert isinstance(verdict, NodeRejection)
        why, needed, available = expected
        assert verdict.reasons == tuple(Reason(why, index, needed, available) for index in (0, 1))


def test_verdicts_are_in_the_order_of_nodes_when_several_are_evaluated() -> None:
    """Each fit lists all cards that fit, the best first."""
    nodes = [node(EIGHT, SIXTEEN, name="b"), node(4 * GIB, name="a"), Node("c", ())]
    verdicts = evaluate(EmptyUsage(), units(5), "spread", nodes)
    assert [verdict.node for verdict in verdicts] == ["b", "a", "c"]
    first, second, third = verdicts
    assert isinstance(first, Fit)
    assert [each.index for each in first.cards] == [1, 0]
    # 5 x 1024 = 5120 of 4096
    assert second == NodeRejection("a", (Reason(ReasonCode.MEMORY, 0, 5120, 4096),))
    assert third == NodeRejection("c", ())


def test_node_with_the_smallest_score_is_chosen_when_several_fit() -> None:
    """`place` takes that verdict."""
    nodes = [node(SIXTEEN, name="a"), node(EIGHT, name="b"), node(4 * GIB, name="c")]
    fits = [
        each for each in evaluate(EmptyUsage(), units(4), "binpack", nodes) if isinstance(each, Fit)
    ]
    assert min(fits, key=lambda fit: fit.score).placement == place(
        EmptyUsage(), units(4), "binpack", nodes
    )
    assert [fit.node for fit in sorted(fits, key=lambda fit: fit.score)] == ["c", "b", "a"]


def test_candidate_lists_the_requested_resource_first_when_it_is_scored() -> None:
    """The other resource breaks ties."""
    used = CardUsage(T4_MIB - 100, 60, 2)
    assert Candidate(card(), used, 4308).free == (100, 40)
    assert Candidate(card(), used, 0).free == (40, 100)
    assert Candidate(card(), CardUsage(10**6, 10**6, 1), 0).free == (0, 0)


@pytest.mark.parametrize(
    "request_",
    [units(14), exact(T4_MIB), whole(2), units(1, cards=2), Request(compute=100), T4_ONLY],
)
def test_never_fits_is_none_when_health_or_cordon_is_the_reason(request_: Request) -> None:
    """A card may become free, healthy and open again."""
    cards = (card(0, healthy=False), card(1, cordoned=True))
    assert never_fits(request_, [Node("a", cards)]) is None


def test_sentence_says_so_when_there_is_no_card() -> None:
    """Neither a node nor a card: there is nothing else to say."""
    for nodes in ([], [Node("a", ())]):
        verdict = never_fits(units(1), nodes)
        assert verdict is not None
        assert verdict.sentence() == "there is no GPU"


def test_usage_is_that_of_the_nodes_own_cards_when_a_view_has_more() -> None:
    """Other nodes' allocations do not count, and nothing is held of an unknown card."""
    view = UsageTotals()
    view.add(placement(piece(0, T4_MIB, name="b"), name="b"))
    assert view.card_usage("a", device(0)) == NO_USAGE
    assert isinstance(place(view, units(14), "binpack", [node(T4_MIB)]), Placement)


@pytest.mark.parametrize(
    ("policy", "own", "card_index"),
    # the card with 4 units held, or the empty one
    [("binpack", None, 0), ("binpack", "spread", 1), ("spread", "binpack", 0), ("spread", None, 1)],
)
def test_cards_are_chosen_by_the_nodes_own_policy_when_it_has_one(
    policy: str, own: str | None, card_index: int
) -> None:
    """The score stays that of the caller's policy, so that nodes remain comparable."""
    cards = (card(0), card(1))
    usage = UsageTotals()
    usage.add(Placement("a", (piece(0, 4308),)))
    (plain,) = evaluate(usage, units(4), policy, [Node("a", cards)])
    (verdict,) = evaluate(usage, units(4), policy, [Node("a", cards, card_policy=own)])
    assert isinstance(plain, Fit)
    assert isinstance(verdict, Fit)
    assert verdict.score == plain.score
    assert [it.card for it in verdict.placement.slices] == [card_index]
