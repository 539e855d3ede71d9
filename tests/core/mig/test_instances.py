"""Requests for instances are placed on instances that exist, and on new ones at the best place."""

from dataclasses import replace

import pytest

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.geometry import TABLES, Place
from fenka.core.mig.instances import Division, InstancePlacer, instance_card, is_planned
from fenka.core.reasons import Unschedulable
from fenka.core.request import ANY_INSTANCE, Memory, Placement, Request
from fenka.core.usage import EmptyUsage

A100, A30 = TABLES["A100-40G"], TABLES["A30"]


def make_card(index: int, model: str = "A100") -> Card:
    """Return a divided card."""
    return Card(index, DeviceId(f"GPU-{index}"), model, 40448, divided=True)


def placer(*cards: Card, **division: object) -> InstancePlacer:
    """Return a placer of these cards without instances."""
    geometries = {card.uuid: A30 if card.model == "A30" else A100 for card in cards}
    return InstancePlacer(
        Node("a", cards),
        EmptyUsage(),
        Division(geometries, **division),  # type: ignore[arg-type]
        {card.uuid: ["job"] for card in cards},
    )


def profile(name: str, count: int = 1) -> Request:
    """Return a request for whole instances."""
    return Request(whole=True, cards=count, instance=name)


def inside(mib: int, compute: int = 0, instance: str = ANY_INSTANCE) -> Request:
    """Return a request for a slice in an instance."""
    return Request(Memory(mib), compute=compute, instance=instance)


def serve(on: InstancePlacer, request: Request) -> list[str] | str:
    """Place a request; return the instances as `card/start profile`, or the reason why there is none."""
    verdict = on.place(request, "binpack")
    if isinstance(verdict, Unschedulable):
        return verdict.sentence()
    on.add(verdict)
    by_uuid = {card.uuid: card for card in on.node.cards}
    cards = [by_uuid[piece.uuid] for piece in verdict.slices]
    return [f"{card.index}/{card.start} {card.profile}" for card in cards]


@pytest.mark.parametrize(("model", "name", "count"), [("A100", "1g.5gb", 7), ("A30", "1g.6gb", 4)])
def test_card_serves_as_many_small_instances_as_it_has(model: str, name: str, count: int) -> None:
    """The next one waits with a reason that says what holds the card."""
    on = placer(make_card(0, model))
    starts = {serve(on, profile(name))[0] for _ in range(count)}
    assert starts == {f"0/{start} {name}" for start in range(count)}
    reason = serve(on, profile(name))
    assert isinstance(reason, str)
    assert reason.startswith(f"no card has room for {name}: 0/0 {name} is held by nobody, ")
    assert len(on.node.cards) == count + 1


def test_instance_is_created_where_it_leaves_the_most_possible() -> None:
    """On the fuller card; a 3g in the upper half, where no 4g fits anyway."""
    on = placer(make_card(0), make_card(1))
    assert serve(on, profile("3g.20gb")) == ["0/4 3g.20gb"]
    assert serve(on, profile("4g.20gb")) == ["0/0 4g.20gb"]
    assert serve(on, profile("1g.5gb")) == ["1/6 1g.5gb"]


def test_request_for_several_instances_gets_all_of_them_or_none() -> None:
    """Nothing is created for a request that waits."""
    on = placer(make_card(0))
    assert serve(on, profile("2g.10gb", 3)) == ["0/0 2g.10gb", "0/2 2g.10gb", "0/4 2g.10gb"]
    assert serve(on, profile("1g.5gb", 2)).startswith("no card has room")  # type: ignore[union-attr]
    assert len(on.node.cards) == 4


def test_slices_share_an_instance_and_another_is_created_when_it_is_full() -> None:
    """Half a card each, 3g then 4g; compute is in percent of the whole card."""
    on = placer(make_card(0))
    assert serve(on, inside(10000, 30)) == ["0/4 3g.20gb"]
    # 38 - 30 = 8 percent are left there
    assert serve(on, inside(5000, 8)) == ["0/4 3g.20gb"]
    assert serve(on, inside(5000, 8)) == ["0/0 4g.20gb"]
    assert serve(on, inside(9000, 45)).startswith("no GPU fits: ")  # type: ignore[union-attr]


def test_slice_larger_than_half_a_card_gets_an_instance_of_all_of_it() -> None:
    """And a profile that the request names is the one that is created."""
    assert serve(placer(make_card(0)), inside(30000)) == ["0/0 7g.40gb"]
    assert serve(placer(make_card(0)), inside(1000, instance="2g.10gb")) == ["0/4 2g.10gb"]


def test_foreign_instances_occupy_their_place() -> None:
    """They are named in the reason, and never used."""
    foreign = {Place(A100.by_name["3g.20gb"], 0): "is an administrator's"}
    on = placer(make_card(0), taken={DeviceId("GPU-0"): foreign})
    assert serve(on, profile("4g.20gb")) == (
        "1 of 1 cards has room for 4g.20gb, none in one piece: 0/0 3g.20gb is an administrator's"
    )
    assert serve(on, profile("3g.20gb")) == ["0/4 3g.20gb"]


def test_place_is_kept_free_for_the_request_that_came_first() -> None:
    """Small instances are placed beside it, and wait when only that place is left."""
    on = placer(make_card(0))
    assert serve(on, profile("1g.5gb")) == ["0/6 1g.5gb"]
    assert serve(on, profile("7g.40gb")).startswith("no card has room for 7g.40gb")  # type: ignore[union-attr]
    assert isinstance(serve(on, profile("1g.5gb")), str)


def test_no_instance_is_created_on_cards_that_are_not_open_to_it() -> None:
    """A fixed layout, an unhealthy card, and a card that is not divided."""
    assert isinstance(
        serve(placer(make_card(0), fixed=frozenset({DeviceId("GPU-0")})), profile("1g.5gb")), str
    )
    for card in (replace(make_card(0), healthy=False), replace(make_card(0), divided=False)):
        assert isinstance(serve(placer(card), profile("1g.5gb")), str)


def test_existing_instance_is_used_before_another_is_created() -> None:
    """Of the same profile; it is not planned, for it exists."""
    card = make_card(0)
    existing = instance_card(card, A100, Place(A100.by_name["1g.5gb"], 2), "MIG-1")
    on = InstancePlacer(Node("a", (card, existing)), EmptyUsage(), Division({card.uuid: A100}), {})
    assert serve(on, profile("1g.5gb")) == ["0/2 1g.5gb"]
    assert serve(on, profile("1g.5gb")) == ["0/3 1g.5gb"]
    assert [is_planned(each.uuid) for each in on.node.cards] == [False, False, True]
    plain = on.place(Request(Memory(1)), "binpack")
    assert not isinstance(plain, Placement)
    assert plain.sentence() == "no GPU fits: 3 of 3 are divided into instances"


def test_reason_counts_all_who_hold_slices_of_an_instance() -> None:
    """To stop the one that is named would not free the instance."""
    card = make_card(0)
    existing = instance_card(card, A100, Place(A100.by_name["7g.40gb"], 0), "MIG-1")
    node, division = Node("a", (card, existing)), Division({card.uuid: A100})
    for holders, state in [((), "nobody"), (("a",), "a"), (("a", "b", "c"), "a and 2 more")]:
        on = InstancePlacer(node, EmptyUsage(), division, {existing.uuid: holders})
        assert on.held(card) == f"0/0 7g.40gb is held by {state}"
