"""Which card and node are chosen: gpushare's recorded choices, the scenarios, and reasons against a card."""

from dataclasses import replace

import pytest

from fenka.core.evaluate import Fit, evaluate, place
from fenka.core.inventory import Card, Node
from fenka.core.policies.scores import SCORES
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable
from fenka.core.request import Memory, Placement, Request, Slice
from fenka.core.usage import EmptyUsage, UsageTotals
from tests.core.builders import (
    GIB,
    P4_MIB,
    T4_MIB,
    V100_MIB,
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

SIXTEEN = 16 * GIB


def held(*mib: int, name: str = "a") -> UsageTotals:
    """Return a view in which this memory is held of card 0, 1, …; nothing where it is 0."""
    pieces = (piece(index, size, name=name) for index, size in enumerate(mib) if size)
    return holding(*(placement(each, name=name) for each in pieces))


def chosen(verdict: Placement | Unschedulable) -> list[int]:
    """Return the cards of a placement; none for a rejection."""
    return [each.card for each in verdict.slices] if isinstance(verdict, Placement) else []


def where(verdict: Placement | Unschedulable) -> str:
    """Return the node of a placement."""
    assert isinstance(verdict, Placement)
    return verdict.node


class TestGpushare:
    """Choices that the original extender was seen to make."""

    def test_card_with_the_least_sufficient_memory_is_chosen_when_four_differ(self) -> None:
        """The recorded run: 8, 12 and 4 GiB on cards of which 4, 8, 12 and 0 are used."""
        four = node(*[SIXTEEN] * 4)
        view = held(4 * GIB, 8 * GIB, 12 * GIB, 0)
        for size, expected in (
            # free 12/8/4/16: the smallest that is 8 or more is card 1
            (8, 1),
            # free 12/0/4/16: the smallest that is 12 or more is card 0
            (12, 0),
            # free 0/0/4/16: the smallest that is 4 or more is card 2
            (4, 2),
        ):
            verdict = place(view, units(size), "binpack", [four])
            assert chosen(verdict) == [expected]
            assert isinstance(verdict, Placement)
            view.add(verdict)

    @pytest.mark.parametrize(
        ("free", "request_mib", "expected"),
        [
            # gpushare's design: of 12207/8138/4069/16276 free, exactly 8138
            ((12207, 8138, 4069, 16276), 8138, [1]),
            # 8139: the next is 12207
            ((12207, 8138, 4069, 16276), 8139, [0]),
            # all of the largest
            ((12207, 8138, 4069, 16276), 16276, [3]),
            # 4069 + 4069 = 8138 are free, but on two cards
            ((4069, 4069), 8138, []),
            # equal: the lowest index
            ((8138, 8138, 4069), 4070, [0]),
        ],
    )
    def test_card_is_the_tightest_one_when_several_fit(
        self, free: tuple[int, ...], request_mib: int, expected: list[int]
    ) -> None:
        """Slices are never split."""
        view = held(*(16276 - mib for mib in free))
        verdict = place(view, exact(request_mib), "binpack", [node(*[16276] * len(free))])
        assert chosen(verdict) == expected

    def test_card_is_filled_when_all_are_empty(self) -> None:
        """The next card is used once the first is full."""
        four, view = node(*[SIXTEEN] * 4), UsageTotals()
        for _ in range(4):
            verdict = place(view, units(4), "binpack", [four])
            assert chosen(verdict) == [0]
            assert isinstance(verdict, Placement)
            view.add(verdict)
        # 4 * 4 = 16: card 0 is full
        assert chosen(place(view, units(4), "binpack", [four])) == [1]

    def test_card_has_nothing_free_when_it_is_overcommitted(self) -> None:
        """gpushare's counters are unsigned: 20 of 16 used were a huge number free."""
        view = held(20 * GIB)
        verdict = place(view, units(1), "binpack", [node(SIXTEEN)])
        assert verdict == Unschedulable(
            (NodeRejection("a", (Reason(ReasonCode.MEMORY, 0, GIB, 0),)),)
        )
        assert chosen(place(view, units(100), "binpack", [node(SIXTEEN)])) == []
        # Free are 0 and 16384, not -4096 and 16384: the other card is taken.
        assert chosen(place(view, units(1), "binpack", [node(SIXTEEN, SIXTEEN)])) == [1]


class TestScenarios:
    """Choices that the source articles show; S1 and S2 are in test_golden.py."""

    def test_two_jobs_fill_a_card_when_each_needs_half(self) -> None:
        """Scenario S5: two jobs of 8065 MiB are on card 0 of two V100 together: 2 * 8065 = 16130."""
        two, view = node(V100_MIB, V100_MIB), UsageTotals()
        for expected in ([0], [0], [1]):
            verdict = place(view, exact(8065), "binpack", [two])
            assert chosen(verdict) == expected
            assert isinstance(verdict, Placement)
            view.add(verdict)
        assert view.card_usage("a", device(0)).memory_mib == V100_MIB

    def test_compute_is_shared_when_another_job_has_the_other_card_whole(self) -> None:
        """Scenario S5: job2 has 40 % and 24 units of 256 MiB, job3 has 30 %."""
        two = [node(SIXTEEN, SIXTEEN)]
        view = UsageTotals()
        for request, expected in (
            (whole(), [0]),
            (Request(Memory(24, 256), compute=40), [1]),
            # 40 + 30 = 70 <= 100
            (Request(Memory(24, 256), compute=30), [1]),
            # 70 + 31 = 101 > 100
            (Request(Memory(1, 256), compute=31), []),
            # 70 + 30 = 100; memory 2 * 6144 + 4096 = 16384
            (Request(Memory(16, 256), compute=30), [1]),
        ):
            verdict = place(view, request, "binpack", two)
            assert chosen(verdict) == expected
            if isinstance(verdict, Placement):
                view.add(verdict)


class TestPolicies:
    """Which of the cards and nodes that fit come first."""

    @pytest.mark.parametrize(
        ("policy", "used", "request_mib", "expected"),
        [
            # free 8/12/16/12
            ("binpack", (8, 4, 0, 4), 4 * GIB, [0]),
            ("spread", (8, 4, 0, 4), 4 * GIB, [2]),
            # ties go to the lowest index under both
            ("binpack", (4, 4, 4, 4), 4 * GIB, [0]),
            ("spread", (4, 4, 4, 4), 4 * GIB, [0]),
            # only the emptiest is large enough: both agree
            ("binpack", (8, 4, 0, 4), 16 * GIB, [2]),
            ("spread", (8, 4, 0, 4), 16 * GIB, [2]),
        ],
    )
    def test_card_is_the_fullest_or_emptiest_when_the_policy_is_binpack_or_spread(
        self, policy: str, used: tuple[int, ...], request_mib: int, expected: list[int]
    ) -> None:
        """Only cards that suffice count."""
        view = held(*(gib * GIB for gib in used))
        verdict = place(view, exact(request_mib), policy, [node(*[SIXTEEN] * 4)])
        assert chosen(verdict) == expected

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            # free 8/12/16/12: card 0, then 1 (lower than 3)
            ("binpack", [0, 1]),
            # card 2, then 1
            ("spread", [1, 2]),
        ],
    )
    def test_cards_are_different_when_several_are_requested(
        self, policy: str, expected: list[int]
    ) -> None:
        """They are listed by index."""
        view = held(8 * GIB, 4 * GIB, 0, 4 * GIB)
        verdict = place(view, exact(GIB, cards=2), policy, [node(*[SIXTEEN] * 4)])
        assert chosen(verdict) == expected

    @pytest.mark.parametrize(("policy", "expected"), [("binpack", "b"), ("spread", "a")])
    def test_node_is_the_fullest_or_emptiest_when_the_policy_is_binpack_or_spread(
        self, policy: str, expected: str
    ) -> None:
        """b holds 1 GiB, a nothing."""
        nodes = [node(SIXTEEN), node(SIXTEEN, name="b")]
        assert where(place(held(GIB, name="b"), exact(GIB), policy, nodes)) == expected

    @pytest.mark.parametrize("policy", sorted(SCORES.keys() - {"random"}))
    def test_node_is_the_first_by_name_when_nodes_are_equal(self, policy: str) -> None:
        """The order in which they are listed does not matter."""
        nodes = [node(SIXTEEN, name="b"), node(SIXTEEN)]
        assert where(place(EmptyUsage(), exact(GIB), policy, nodes)) == "a"
        assert where(place(EmptyUsage(), exact(GIB), policy, nodes[::-1])) == "a"

    def test_compute_decides_when_cards_have_equal_memory(self) -> None:
        """binpack takes the card with less compute left."""
        view = holding(placement(piece(0, GIB, 10)), placement(piece(1, GIB, 60)))
        two = [node(SIXTEEN, SIXTEEN)]
        assert chosen(place(view, exact(GIB), "binpack", two)) == [1]
        assert chosen(place(view, exact(GIB), "spread", two)) == [0]

    def test_compute_decides_when_no_memory_is_requested(self) -> None:
        """Free memory does not matter then."""
        # free compute 60 and 30, free memory 1 and 15 GiB
        view = holding(placement(piece(0, 15 * GIB, 40)), placement(piece(1, GIB, 70)))
        two = [node(SIXTEEN, SIXTEEN)]
        assert chosen(place(view, Request(compute=20), "binpack", two)) == [1]
        assert chosen(place(view, Request(compute=20), "spread", two)) == [0]
        assert chosen(place(view, Request(compute=50), "binpack", two)) == [0]

    def test_policy_is_an_error_when_it_is_unknown(self) -> None:
        """It is not replaced by a default."""
        with pytest.raises(KeyError, match="emptiest"):
            evaluate(EmptyUsage(), exact(1), "emptiest", [])


class TestCards:
    """Slices on unequal cards, and reasons against a card."""

    def test_slices_differ_in_mib_when_cards_of_a_request_differ(self) -> None:
        """4 units on a P4 and a T4 are 7611 * 4 // 7 = 4349 and 15079 * 4 // 14 = 4308 MiB."""
        verdict = place(EmptyUsage(), units(4, cards=2), "binpack", [node(P4_MIB, T4_MIB)])
        assert isinstance(verdict, Placement)
        assert [each.memory_mib for each in verdict.slices] == [4349, 4308]

    def test_smaller_card_is_taken_when_it_suffices(self) -> None:
        """8 units are more than a P4's 7."""
        two = [node(T4_MIB, P4_MIB)]
        assert chosen(place(EmptyUsage(), units(7), "binpack", two)) == [1]
        assert chosen(place(EmptyUsage(), units(8), "binpack", two)) == [0]

    def test_units_do_not_fit_when_the_card_is_smaller_than_one(self) -> None:
        """Exact sizes do."""
        verdict = place(EmptyUsage(), units(1), "binpack", [node(512)])
        assert verdict == Unschedulable(
            (NodeRejection("a", (Reason(ReasonCode.MEMORY, 0, GIB, 512),)),)
        )
        assert chosen(place(EmptyUsage(), exact(512), "binpack", [node(512)])) == [0]

    def test_card_can_only_be_taken_whole_when_it_reports_no_memory(self) -> None:
        """Nothing is divided by it."""
        assert chosen(place(EmptyUsage(), whole(), "binpack", [node(0)])) == [0]
        assert chosen(place(EmptyUsage(), exact(1), "binpack", [node(0)])) == []

    def test_placement_has_all_of_a_card_when_it_is_taken_whole(self) -> None:
        """All memory, all compute, and the mark that it is whole."""
        verdict = place(EmptyUsage(), whole(), "binpack", [node(T4_MIB)])
        assert verdict == placement(piece(0, T4_MIB, 100), whole=True)

    @pytest.mark.parametrize("slice_of", [piece(0, 1), piece(0, 0, 1)])
    def test_card_is_not_taken_whole_when_anything_of_it_is_held(self, slice_of: Slice) -> None:
        """Neither 1 MiB nor 1 % may be held."""
        view = holding(placement(slice_of))
        verdict = place(view, whole(), "binpack", [node(T4_MIB)])
        assert verdict == Unschedulable((NodeRejection("a", (Reason(ReasonCode.IN_USE, 0),)),))
        assert chosen(place(view, whole(), "binpack", [node(T4_MIB, T4_MIB)])) == [1]

    @pytest.mark.parametrize("request_", [exact(1), Request(compute=1), whole()])
    def test_card_admits_nothing_when_it_is_taken_whole(self, request_: Request) -> None:
        """Neither memory, nor compute, nor another whole request."""
        view = holding(placement(piece(0, T4_MIB, 100), whole=True))
        verdict = place(view, request_, "binpack", [node(T4_MIB)])
        assert verdict == Unschedulable((NodeRejection("a", (Reason(ReasonCode.WHOLE, 0),)),))

    def test_memory_fits_when_all_compute_is_held(self) -> None:
        """Only requests without compute do."""
        view = holding(placement(piece(0, GIB, 100)))
        assert chosen(place(view, exact(GIB), "binpack", [node(T4_MIB)])) == [0]
        assert chosen(place(view, exact(GIB, compute=1), "binpack", [node(T4_MIB)])) == []

    def test_card_is_of_a_requested_model_when_the_request_names_some(self) -> None:
        """Without names any model will do."""
        cards = (card(0, model="Tesla P4"), card(1, model="Tesla T4"))
        two = [Node("a", cards)]
        wanted = Request(Memory(GIB), models=frozenset({"Tesla T4", "Tesla V100"}))
        assert chosen(place(EmptyUsage(), wanted, "binpack", two)) == [1]
        assert chosen(place(EmptyUsage(), exact(GIB), "binpack", two)) == [0]
        other = replace(wanted, models=frozenset({"A100"}))
        verdict = place(EmptyUsage(), other, "binpack", two)
        reasons = Reason(ReasonCode.MODEL, 0), Reason(ReasonCode.MODEL, 1)
        assert verdict == Unschedulable((NodeRejection("a", reasons),))

    @pytest.mark.parametrize(
        ("out", "why"),
        [
            (card(0, healthy=False), ReasonCode.UNHEALTHY),
            (card(0, cordoned=True), ReasonCode.CORDONED),
            (card(0, healthy=False, cordoned=True), ReasonCode.UNHEALTHY),
        ],
    )
    def test_card_is_rejected_when_it_is_unhealthy_or_cordoned(
        self, out: Card, why: ReasonCode
    ) -> None:
        """It is skipped even if it would be the tightest fit."""
        view = held(8 * GIB)
        assert chosen(place(view, exact(GIB), "binpack", [Node("a", (out, card(1)))])) == [1]
        verdict = place(view, exact(GIB), "binpack", [Node("a", (out,))])
        assert verdict == Unschedulable((NodeRejection("a", (Reason(why, 0),)),))

    def test_reserved_card_is_rejected_when_no_other_reason_applies(self) -> None:
        """Any other reason comes first."""
        three = [node(T4_MIB, T4_MIB, 512)]
        reserved = {device(0), device(2)}
        assert chosen(place(EmptyUsage(), exact(GIB), "binpack", three, reserved)) == [1]
        verdict = place(EmptyUsage(), exact(GIB, cards=2), "binpack", three, reserved)
        reasons = (
            Reason(ReasonCode.RESERVED, 0),
            Reason(ReasonCode.TOO_FEW, 1, 2, 1),
            Reason(ReasonCode.MEMORY, 2, GIB, 512),
        )
        assert verdict == Unschedulable((NodeRejection("a", reasons),))

    def test_cards_of_two_nodes_do_not_add_up_when_a_request_needs_two(self) -> None:
        """The slices of a request are all on one node."""
        nodes = [node(T4_MIB), node(T4_MIB, name="b")]
        verdict = place(EmptyUsage(), exact(GIB, cards=2), "binpack", nodes)
        assert isinstance(verdict, Unschedulable)
        assert verdict.reasons == (Reason(ReasonCode.TOO_FEW, 0, 2, 1),) * 2


class TestHosts:
    """CPU and host memory of the node."""

    @pytest.mark.parametrize(
        ("cpu", "memory", "expected"),
        [
            # 6000 of 8000 and 24000 of 32000 are held: 2000 and 8000 are left
            (2000, 8000, None),
            (2001, 0, Reason(ReasonCode.CPU, 0, 2001, 2000)),
            (0, 8001, Reason(ReasonCode.HOST_MEMORY, 0, 8001, 8000)),
            (2001, 8001, Reason(ReasonCode.CPU, 0, 2001, 2000)),
        ],
    )
    def test_card_is_rejected_when_its_host_is_too_full(
        self, cpu: int, memory: int, expected: Reason | None
    ) -> None:
        """The reason is that of the node."""
        view = holding(replace(placement(), cpu_milli=6000, host_memory_mib=24000))
        request = Request(Memory(GIB), cpu_milli=cpu, host_memory_mib=memory)
        verdict = place(view, request, "binpack", [node(T4_MIB, cpu=8000, memory=32000)])
        if expected is None:
            assert verdict == replace(
                placement(piece(0, GIB)), cpu_milli=cpu, host_memory_mib=memory
            )
        else:
            assert verdict == Unschedulable((NodeRejection("a", (expected,)),))

    def test_request_fits_when_the_host_is_not_counted(self) -> None:
        """None is no limit."""
        request = Request(Memory(GIB), cpu_milli=10**9, host_memory_mib=10**9)
        assert chosen(place(EmptyUsage(), request, "binpack", [node(T4_MIB)])) == [0]

    def test_request_without_cpu_fits_when_the_host_is_overcommitted(self) -> None:
        """It requests nothing of the host."""
        view = holding(replace(placement(), cpu_milli=9000))
        assert chosen(place(view, exact(GIB), "binpack", [node(T4_MIB, cpu=8000)])) == [0]

    def test_worse_card_is_taken_when_the_better_ones_host_is_full(self) -> None:
        """The tightest card is of no use on a node without CPU."""
        nodes = [node(GIB, cpu=0), node(T4_MIB, name="b", cpu=1000)]
        request = Request(Memory(GIB), cpu_milli=1000)
        assert where(place(EmptyUsage(), request, "binpack", nodes)) == "b"


def test_verdicts_keep_the_order_of_nodes_when_one_does_not_fit() -> None:
    """A fit lists all cards that would do."""
    nodes = [node(512, name="b"), node(T4_MIB, T4_MIB)]
    no, yes = evaluate(EmptyUsage(), exact(GIB), "binpack", nodes)
    assert no == NodeRejection("b", (Reason(ReasonCode.MEMORY, 0, GIB, 512),))
    assert isinstance(yes, Fit)
    assert (yes.node, yes.cards) == ("a", nodes[1].cards)
    assert yes.placement == placement(piece(0, GIB))


def test_rejection_has_no_reasons_when_there_is_no_card() -> None:
    """Neither no node nor a node without cards gives one."""
    assert place(EmptyUsage(), exact(1), "binpack", []) == Unschedulable(())
    assert place(EmptyUsage(), exact(1), "binpack", [node()]) == Unschedulable(
        (NodeRejection("a", ()),)
    )
