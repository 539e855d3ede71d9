"""Nodes and their usage as arrays, after every change, and that copies are independent."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.columnar import Judgement
from fenka.core.columns import (
    CARD_POLICY,
    CPU,
    HOST_MEMORY,
    INDEX,
    MAX_INDEX,
    MEMORY_SUM,
    Columns,
    amounts_of,
)
from fenka.core.inventory import Card, Node
from fenka.core.request import NEVER, CardClass, Memory, Placement, Request
from fenka.core.usage import NO_USAGE, CardUsage, UsageTotals
from tests.core.builders import (
    GIB,
    P4_MIB,
    T4_MIB,
    card,
    clusters,
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

TWO = node(T4_MIB, P4_MIB)


def row(columns: Columns, name: str, index: int = 0) -> list[int]:
    """Return memory, compute, holders, whole, free memory and free compute of a card."""
    amounts: list[int] = columns.usage[:, columns.starts[columns.slot(name)] + index].tolist()
    return amounts


def sums(columns: Columns, name: str) -> list[int]:
    """Return the free and the total memory and compute of a node's open cards."""
    host = columns.hosts[:, columns.slot(name)].tolist()
    return [*host[:2], *host[MEMORY_SUM:CPU]]


class TestUsage:
    """What is allocated, and what is free of it."""

    def test_card_is_all_free_when_its_node_is_new(self) -> None:
        """15079 + 7611 = 22690 MiB and 2 * 100 percent are free."""
        columns = Columns([TWO])
        assert row(columns, "a", 0) == [0, 0, 0, 0, T4_MIB, 100]
        assert row(columns, "a", 1) == [0, 0, 0, 0, P4_MIB, 100]
        assert sums(columns, "a") == [22690, 200, 22690, 200]

    def test_free_amounts_shrink_when_placements_are_added(self) -> None:
        """15079 - 4308 - 1000 = 9771, 100 - 30 - 20 = 50; the sums lose 5308 and 50."""
        columns = Columns([TWO])
        columns.add(placement(piece(0, 4308, 30)), placement(piece(0, 1000, 20)))
        assert row(columns, "a", 0) == [5308, 50, 2, 0, 9771, 50]
        assert row(columns, "a", 1) == [0, 0, 0, 0, P4_MIB, 100]
        assert sums(columns, "a") == [22690 - 5308, 150, 22690, 200]

    def test_both_cards_change_when_a_placement_has_two_slices(self) -> None:
        """A whole placement is whole on each of its cards, and takes its part of the host once."""
        columns = Columns([TWO])
        both = placement(piece(0, T4_MIB, 100), piece(1, P4_MIB, 100), whole=True)
        columns.add(replace(both, cpu_milli=2000, host_memory_mib=64))
        assert row(columns, "a", 0) == [T4_MIB, 100, 1, 1, 0, 0]
        assert row(columns, "a", 1) == [P4_MIB, 100, 1, 1, 0, 0]
        assert sums(columns, "a") == [0, 0, 22690, 200]
        assert columns.host_usage("a") == (2000, 64)

    def test_nothing_is_free_when_a_card_is_overcommitted(self) -> None:
        """20000 of 15079 MiB; a removal of 6000 leaves 14000, so that 1079 are free again."""
        columns = Columns([node(T4_MIB)])
        columns.add(placement(piece(0, 14000, 90)), placement(piece(0, 6000, 30)))
        assert row(columns, "a") == [20000, 120, 2, 0, 0, 0]
        assert sums(columns, "a")[:2] == [0, 0]
        columns.remove(placement(piece(0, 6000, 30)))
        assert row(columns, "a") == [14000, 90, 1, 0, 1079, 10]
        assert sums(columns, "a")[:2] == [1079, 10]

    @pytest.mark.parametrize("closed", [card(healthy=False), card(cordoned=True)])
    def test_sums_exclude_a_card_when_it_is_not_open(self, closed: Card) -> None:
        """What changes on it does not change them; its own row does."""
        columns = Columns([Node("a", (closed, card(1, P4_MIB)))])
        assert sums(columns, "a") == [P4_MIB, 100, P4_MIB, 100]
        columns.add(placement(piece(0, 79, 1), piece(1, 11, 2)))
        assert row(columns, "a", 0) == [79, 1, 1, 0, 15000, 99]
        assert sums(columns, "a") == [7600, 98, P4_MIB, 100]

    def test_placement_does_not_count_when_its_node_or_card_is_unknown(self) -> None:
        """The host's part counts on a node that exists."""
        columns = Columns([TWO])
        columns.add(
            placement(piece(0, 1, name="b"), name="b"),
            replace(placement(piece(7, 1)), cpu_milli=500),
        )
        assert row(columns, "a", 0)[:3] == row(columns, "a", 1)[:3] == [0, 0, 0]
        assert columns.host_usage("a") == (500, 0)

    def test_usage_is_as_before_when_what_was_added_is_removed(self) -> None:
        """One of two, and then both."""
        columns, more = Columns([TWO]), placement(piece(1, 611, 7))
        columns.add(more, more)
        assert columns.card_usage("a", device(1)) == CardUsage(1222, 14, 2, 0)
        columns.remove(more)
        assert row(columns, "a", 1) == [611, 7, 1, 0, 7000, 93]
        columns.remove(more)
        assert columns.card_usage("a", device(1)) == NO_USAGE
        assert sums(columns, "a") == [22690, 200, 22690, 200]

    def test_take_allocates_what_the_request_needs_of_each_card(self) -> None:
        """4 units are 4308 MiB of a T4 and 4349 of a P4; the host gives its part once for both."""
        columns = Columns([TWO, node(T4_MIB, name="b")])
        request = replace(units(4, compute=25), cpu_milli=1500, host_memory_mib=10)
        columns.take(np.array([0, 1]), request, columns.needs(request))
        assert row(columns, "a", 0) == [4308, 25, 1, 0, 10771, 75]
        assert row(columns, "a", 1) == [4349, 25, 1, 0, 3262, 75]
        assert row(columns, "b") == [0, 0, 0, 0, T4_MIB, 100]
        assert (columns.host_usage("a"), columns.host_usage("b")) == ((1500, 10), (0, 0))
        columns.take(np.array([2]), whole(), columns.needs(whole()))
        assert row(columns, "b") == [T4_MIB, 100, 1, 1, 0, 0]

    def test_two_cards_count_when_they_have_the_same_id(self) -> None:
        """A node's record may name an id on two nodes: each has the usage of its own node."""
        twin = Node("b", (card(0, P4_MIB, node="a"),))
        columns = Columns([node(T4_MIB), twin])
        columns.add(placement(piece(0, 611), name="b"))
        assert columns.card_usage("a", device(0)) == NO_USAGE
        assert columns.card_usage("b", device(0)) == CardUsage(611, 0, 1, 0)
        assert columns.mask_of([device(0)]).tolist() == [True, True]
        columns.remove_node("b")
        assert columns.mask_of([device(0)]).tolist() == [True, False]

    def test_amounts_are_capped_when_a_report_exceeds_64_bits(self) -> None:
        """2 ** 100 MiB become 2 ** 60, of which nothing is free; what is below is exact, also 2 ** 53 + 1."""
        assert amounts_of(CardUsage(2**100, 2**100, 3, 1)) == (NEVER, NEVER, 3, 1)
        assert amounts_of(CardUsage(2**53 + 1, 7, 1)) == (2**53 + 1, 7, 1, 0)
        view = UsageTotals()
        view.add(Placement("a", (piece(0, 2**70, 2**70),), 2**70, 2**70))
        columns = Columns([TWO], view)
        assert row(columns, "a", 0) == [NEVER, NEVER, 1, 0, 0, 0]
        assert columns.host_usage("a") == (NEVER, NEVER)
        assert sums(columns, "a")[:2] == [P4_MIB, 100]


class TestNodes:
    """Slots, and what a changed node leaves behind."""

    def test_slot_is_used_again_when_a_node_of_as_many_cards_comes(self) -> None:
        """One of another number of cards gets columns of its own."""
        columns = Columns([TWO, node(T4_MIB, name="b")])
        columns.add(placement(piece(0, 1000)))
        columns.remove_node("a")
        assert (columns.slot("a"), columns.count, columns.nodes[0]) == (-1, 1, None)
        assert columns.exists.tolist() == columns.open.tolist() == [False, False, True]
        columns.set_node(node(T4_MIB, name="c"))
        assert columns.slot("c") == 2
        columns.set_node(node(P4_MIB, P4_MIB, name="d"))
        assert columns.slot("d") == 0
        assert row(columns, "d") == [0, 0, 0, 0, P4_MIB, 100]
        assert columns.exists.tolist() == [True] * 4
        assert columns.slots(["b", "gone", "d"]).tolist() == [1, -1, 0]

    def test_slot_changes_when_a_node_gets_another_card(self) -> None:
        """Its usage is read again, and the old columns hold no card."""
        columns, view = Columns([node(T4_MIB)]), holding(placement(piece(1, 611)))
        columns.set_node(TWO, view)
        assert (columns.slot("a"), columns.count, columns.most_cards) == (1, 1, 2)
        assert columns.exists.tolist() == [False, True, True]
        assert row(columns, "a", 1) == [611, 0, 1, 0, 7000, 100]
        columns.set_node(node(T4_MIB))
        assert (columns.slot("a"), columns.most_cards) == (0, 2)

    def test_old_devices_are_unknown_when_a_card_is_exchanged(self) -> None:
        """The index is the same, the id is another: what is recorded for the old card does not count."""
        columns = Columns([node(T4_MIB)])
        columns.set_node(Node("a", (card(0, P4_MIB, node="new"),)))
        columns.add(placement(piece(0, 1000)))
        assert row(columns, "a") == [0, 0, 0, 0, P4_MIB, 100]
        assert not columns.mask_of([device(0)]).any()
        assert columns.mask_of([device(0, "new")]).tolist() == [True]

    def test_ranks_follow_the_names_when_nodes_come_and_go(self) -> None:
        """Slots are in the order of arrival: c, a, b."""
        columns = Columns([node(1, name=name) for name in "cab"])
        assert columns.ranks().tolist() == [2, 0, 1]
        columns.remove_node("a")
        columns.set_node(node(1, name="d"))
        # c is first of b, c, d in slot 0, d in the slot of a
        assert columns.ranks().tolist() == [1, 2, 0]

    @pytest.mark.parametrize(
        ("host", "expected"),
        [
            # a host that is not counted has more than any request needs
            (node(1), [NEVER, NEVER, 0]),
            (node(1, cpu=0, memory=64000), [0, 64000, 0]),
            (replace(node(1, cpu=8000), card_policy="spread"), [8000, NEVER, 1]),
        ],
    )
    def test_host_has_its_totals_and_the_number_of_its_policy(
        self, host: Node, expected: list[int]
    ) -> None:
        """0 stands for the policy of the request."""
        columns = Columns([host])
        values = columns.hosts[:, 0]
        assert values[[CPU, HOST_MEMORY, CARD_POLICY]].tolist() == expected

    def test_policies_are_numbered_in_the_order_of_their_nodes(self) -> None:
        """Equal policies share a number."""
        own = ["spread", None, "binpack", "spread"]
        columns = Columns(replace(node(1, name=str(i)), card_policy=p) for i, p in enumerate(own))
        assert columns.hosts[CARD_POLICY].tolist() == [1, 0, 2, 1]

    def test_index_is_cut_when_it_is_larger_than_any_hardware_has(self) -> None:
        """Such cards count as equal in scores."""
        columns = Columns([Node("a", (card(MAX_INDEX), card(10**6)))])
        assert columns.cards[INDEX].tolist() == [MAX_INDEX, MAX_INDEX]

    @pytest.mark.parametrize("request_", [units(1), whole(2), Request(compute=1)])
    def test_no_node_fits_when_no_node_has_a_card(self, request_: Request) -> None:
        """A node may report an empty list of cards, and be the only one."""
        columns = Columns([Node("a", ()), Node("b", ())])
        judgement = Judgement(columns, request_)
        assert judgement.fits.tolist() == [False, False]
        assert judgement.best("binpack") is None
        assert judgement.order("spread", columns.slots(["a", "b"])).tolist() == []

    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            # 15079 * 4 // 14 = 4308
            (units(4), (4308, 0, False, False)),
            # 15 units are more than the card's 14
            (units(15), (NEVER, 0, False, False)),
            # the node's unit is 256 MiB: 15079 // 256 = 58, and 15079 * 4 // 58 = 1039
            (Request(Memory(4, None)), (1039, 0, False, False)),
            (exact(15079, compute=7), (15079, 7, False, False)),
            (Request(compute=100), (0, 100, False, False)),
            # a card may have less compute than 100
            (whole(), (15079, 90, False, False)),
            (Request(whole=True, models=frozenset({"Tesla T4", "A"})), (15079, 90, False, False)),
            (Request(compute=1, models=frozenset({"A"})), (0, 1, True, False)),
        ],
    )
    def test_class_knows_what_a_request_takes_of_its_cards(
        self, request_: Request, expected: tuple[int, int, bool, bool]
    ) -> None:
        """Memory in MiB, compute in percent, and whether model and kind are others."""
        assert CardClass(T4_MIB, 256, 90, "Tesla T4").needs(request_) == expected

    def test_classes_are_few_when_cards_are_alike(self) -> None:
        """A card of another model, size or unit has a class of its own."""
        columns = Columns([node(T4_MIB, T4_MIB, P4_MIB), node(T4_MIB, name="b")])
        assert list(columns.classes.values()) == [0, 1]
        columns.set_node(replace(node(T4_MIB, name="c"), unit_mib=256))
        columns.set_node(Node("d", (card(model="V100"),)))
        assert [each.unit_mib for each in columns.classes] == [GIB, GIB, 256, GIB]


class TestCopies:
    """A copy is what a pass over the queue changes."""

    def test_copy_and_original_change_independently(self) -> None:
        """Usage at once; nodes, classes and policies when either gets a new node."""
        columns = Columns([TWO])
        twin = columns.copy()
        twin.add(placement(piece(0, 79)))
        assert (row(columns, "a")[0], row(twin, "a")[0]) == (0, 79)
        columns.set_node(replace(node(10, name="b"), card_policy="spread"))
        twin.set_node(Node("c", (card(model="V100", node="c"),)))
        assert (columns.count, twin.count) == (2, 2)
        assert (columns.slot("c"), twin.slot("b")) == (-1, -1)
        assert (columns.card_policies, twin.card_policies) == ({"spread": 1}, {})
        assert [each.model for each in columns.classes] == ["Tesla T4"] * 3
        assert [each.model for each in twin.classes] == ["Tesla T4", "Tesla T4", "V100"]
        twin.remove_node("a")
        assert columns.slot("a") == 0
        assert columns.mask_of([device(0)]).tolist() == [True, False, False]

    def test_original_is_unchanged_when_a_copy_changes_a_node_of_the_same_size(self) -> None:
        """Its health, its cards and the list of vacant slots are the copy's own."""
        columns = Columns([TWO, node(T4_MIB, name="b")])
        columns.remove_node("b")
        twin = columns.copy()
        twin.set_node(Node("a", (card(0, healthy=False), card(1, 100))))
        twin.set_node(node(50, name="c"))
        assert columns.unhealthy.tolist() == [False, False, False]
        assert (sums(columns, "a"), sums(twin, "a")) == (
            [22690, 200, 22690, 200],
            [100, 100, 100, 100],
        )
        columns.set_node(node(60, name="d"))
        assert (row(columns, "d")[4], row(twin, "c")[4]) == (60, 50)

    def test_nothing_is_allocated_when_a_copy_is_emptied(self) -> None:
        """The original keeps its usage; a cordoned card stays out of the sums."""
        original = Columns([Node("a", (card(0), card(1, P4_MIB, cordoned=True)), 4000, 64)])
        original.add(Placement("a", (piece(0, 79, 9), piece(1, 11, 1)), 1000, 32))
        emptied = original.emptied()
        assert row(emptied, "a", 0) == [0, 0, 0, 0, T4_MIB, 100]
        assert row(emptied, "a", 1) == [0, 0, 0, 0, P4_MIB, 100]
        assert sums(emptied, "a") == [T4_MIB, 100, T4_MIB, 100]
        assert emptied.host_usage("a") == (0, 0)
        assert row(original, "a", 0)[:3] == [79, 9, 1]
        assert original.host_usage("a") == (1000, 32)


@settings(deadline=None, max_examples=60)
@given(nodes=clusters(), asked=st.lists(requests(), min_size=1, max_size=6), chance=st.randoms())
def test_columns_equal_new_ones_when_placements_came_and_went(
    nodes: tuple[Node, ...], asked: list[Request], chance: random.Random
) -> None:
    """Followed change by change, or built at once from the totals of what is left."""
    columns, totals, held = Columns(nodes), UsageTotals(), list[Placement]()
    for number, request in enumerate(asked):
        judgement = Judgement(columns, request)
        slot = judgement.best("spread")
        if slot is None:
            continue
        at = columns.nodes[slot]
        assert at is not None
        cards = [
            each
            for each, fits in zip(
                at.cards, judgement.card_fits[int(columns.starts[slot]) :], strict=False
            )
            if fits
        ]
        mib = 10 + number
        slices = tuple(piece(each.index, mib, number, name=at.name) for each in cards)
        held.append(Placement(at.name, slices, request.cpu_milli, request.host_memory_mib))
        columns.add(held[-1])
        if chance.random() < 0.4:
            columns.remove(held.pop(0))
    for each in held:
        totals.add(each)
    fresh = Columns(nodes, totals)
    for name in ("usage", "hosts", "cards", "open", "exists"):
        assert (getattr(columns, name) == getattr(fresh, name)).all(), name
    for host in nodes:
        assert columns.host_usage(host.name) == totals.host_usage(host.name)
        for one in host.cards:
            expected = totals.card_usage(host.name, one.uuid)
            assert columns.card_usage(host.name, one.uuid) == expected
