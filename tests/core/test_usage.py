"""What is allocated: totals and overlays are the sums of their placements, and name the nodes that change."""

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.request import Placement, Slice
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage, UsageOverlay, UsageTotals, UsageView
from tests.core.builders import device, holding, piece, placement

CARDS = [(name, index) for name in "ab" for index in (0, 1)]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Slices of some cards of one of two nodes, with a part of its host."""
    name = draw(st.sampled_from("ab"))
    indexes = draw(st.lists(st.sampled_from([0, 1]), unique=True))
    slices = tuple(
        Slice(index, device(index, name), draw(st.integers(0, 99)), draw(st.integers(0, 99)))
        for index in indexes
    )
    cpu, memory = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Placement(name, slices, cpu, memory, whole=draw(st.booleans()))


def counted(name: str, index: int, held: Sequence[Placement]) -> CardUsage:
    """Return the usage of a card, counted from all placements."""
    pieces = [
        (part, each.whole)
        for each in held
        for part in each.slices
        if each.node == name and part.card == index
    ]
    return CardUsage(
        sum(part.memory_mib for part, _ in pieces),
        sum(part.compute for part, _ in pieces),
        len(pieces),
        sum(whole for _, whole in pieces),
    )


def check(view: UsageView, held: Sequence[Placement]) -> None:
    """Compare the view with the sums."""
    for name, index in CARDS:
        assert view.card_usage(name, device(index, name)) == counted(name, index, held)
    for name in "ab":
        here = [each for each in held if each.node == name]
        host = sum(each.cpu_milli for each in here), sum(each.host_memory_mib for each in here)
        assert view.host_usage(name) == host


@given(
    first=st.lists(placements(), max_size=4), more=st.lists(placements(), max_size=4), d=st.data()
)
def test_usage_is_the_sum_of_what_is_left_when_placements_come_and_go(
    first: list[Placement], more: list[Placement], d: st.DataObject
) -> None:
    """An overlay may remove what is under it, and follows what changes there."""
    under = holding(*first)
    overlay, added, removed = UsageOverlay(under), list[Placement](), list[Placement]()
    for each in more:
        overlay.add(each)
        added.append(each)
        gone = d.draw(st.none() | st.sampled_from(range(len(first + added))))
        if gone is not None and gone < len(first):
            each_gone = first.pop(gone)
            overlay.remove(each_gone)
            removed.append(each_gone)
        elif gone is not None:
            overlay.remove(added.pop(gone - len(first)))
        check(overlay, [*first, *added])
        check(under, [*first, *removed])
    for each in [*first, *removed]:
        under.remove(each)
    for each in removed:
        overlay.add(each)
    check(under, [])
    check(overlay, added)
    assert all(under.card_usage(name, device(i, name)) is NO_USAGE for name, i in CARDS)


@pytest.mark.parametrize("make", [UsageTotals, lambda: UsageOverlay(EmptyUsage())])
def test_watched_sets_name_the_nodes_that_change(make: type[UsageTotals]) -> None:
    """From the moment at which the set is handed in; each watcher has its own."""
    usage, early, late = make(), set[str](), set[str]()
    usage.watch(early)
    usage.add(placement(piece(0, 10)))
    usage.watch(late)
    usage.add(placement(piece(0, 10, name="b"), name="b"))
    assert (early, late) == ({"a", "b"}, {"b"})
    early.clear()
    usage.remove(placement(piece(0, 10)))
    assert (early, late) == ({"a"}, {"a", "b"})


def test_host_changes_when_a_placement_has_no_slice() -> None:
    """It is a change of its node too."""
    usage, changed = UsageTotals(), set[str]()
    usage.watch(changed)
    usage.add(Placement("a", (), 500, 64))
    assert (usage.host_usage("a"), changed) == ((500, 64), {"a"})
    assert EmptyUsage().host_usage("a") == (0, 0)
    assert EmptyUsage().card_usage("a", device()) is NO_USAGE


def test_nothing_is_kept_of_a_node_when_all_of_it_is_removed() -> None:
    """Autoscaled nodes come and go by the thousand; a negative amount is no leak either."""
    usage = UsageTotals()
    for number in range(100):
        name = f"node-{number}"
        parts = placement(piece(0, 10, 5, name=name), piece(1, 0, 0, name=name), name=name)
        each = replace(parts, cpu_milli=number, host_memory_mib=number % 3, whole=number % 2 > 0)
        usage.remove(each)
        assert usage.card_usage(name, device(0, name)).memory_mib == -10
        usage.add(each)
        usage.add(each)
        usage.remove(each)
    assert pickle.dumps(usage) == pickle.dumps(UsageTotals())


@pytest.mark.parametrize("amount", [0, 1, 2**31, 2**53 + 1, 2**63, 2**100])
def test_amounts_are_exact_however_large_they_are(amount: int) -> None:
    """One MiB more is seen beside 2 ** 53 and beyond, in totals and in overlays."""
    big = Placement("a", (piece(0, amount, amount),), amount, amount)
    one = Placement("a", (piece(0, 1, 1),), 1, 1)
    under = holding(big, one)
    overlay = UsageOverlay(under)
    assert under.card_usage("a", device(0)) == CardUsage(amount + 1, amount + 1, 2, 0)
    overlay.remove(big)
    assert overlay.card_usage("a", device(0)) == CardUsage(1, 1, 1, 0)
    assert overlay.host_usage("a") == (1, 1)
    overlay.add(big)
    overlay.add(big)
    assert overlay.card_usage("a", device(0)).memory_mib == 2 * amount + 1
    assert overlay.host_usage("a") == (2 * amount + 1, 2 * amount + 1)
    assert under.host_usage("a") == (amount + 1, amount + 1)


def test_overlays_can_be_stacked() -> None:
    """Each sees what those under it hold, and changes nothing there."""
    totals = holding(placement(piece(0, 100, 10)))
    middle = UsageOverlay(totals)
    top = UsageOverlay(middle)
    middle.add(placement(piece(0, 20), whole=True))
    top.remove(placement(piece(0, 100, 10)))
    top.add(placement(piece(1, 3)))
    assert totals.card_usage("a", device(0)) == CardUsage(100, 10, 1, 0)
    assert middle.card_usage("a", device(0)) == CardUsage(120, 10, 2, 1)
    assert top.card_usage("a", device(0)) == CardUsage(20, 0, 1, 1)
    assert middle.card_usage("a", device(1)) is NO_USAGE
    totals.add(placement(piece(1, 4)))
    assert top.card_usage("a", device(1)) == CardUsage(7, 0, 2, 0)
