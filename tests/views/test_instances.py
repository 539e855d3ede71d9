"""Divided cards of a cluster's node as rows: who holds which instance, and what else fits."""

from collections.abc import Mapping

from fenka.cluster.objects import ObjectMeta, Pod
from fenka.cluster.state import PodAllocation
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.geometry import TABLES, Place
from fenka.core.request import Placement, Slice
from fenka.dialects.base import SharedNode
from fenka.dialects.gpushare import shown_units
from fenka.dialects.mig_records import DividedCard, InstanceState, with_division
from fenka.views.mig_rows import (
    InstanceRow,
    InstanceSlice,
    divided_cards,
    node_instances,
    usable_units,
)

A100 = TABLES["A100-40G"]


def shared(*instances: tuple[str, int, InstanceState]) -> SharedNode:
    """Return a node with a whole A100 and a divided one, which has these instances."""
    cards = tuple(Card(i, DeviceId(f"GPU-{i}"), "A100", 40960) for i in range(2))
    places: Mapping[Place, InstanceState] = {
        Place(A100.by_name[name], start): state for name, start, state in instances
    }
    divided = DividedCard(DeviceId("GPU-1"), A100, True, places)
    return with_division(SharedNode(Node("n", cards)), [divided])


def held(name: str, *slices: Slice, whole: bool = False) -> PodAllocation:
    """Return what a pod of namespace ns holds."""
    pod = Pod(metadata=ObjectMeta(name=name, namespace="ns", uid=name))
    return PodAllocation(pod, (Placement("n", slices, whole=whole),))


def piece(place: str, mib: int, compute: int) -> Slice:
    """Return a slice of an instance of card 1."""
    return Slice(1, DeviceId(f"GPU-1/{place}"), mib, compute)


def test_rows_have_the_slices_of_each_instance_and_what_else_fits() -> None:
    """3g at 4 takes slices 4 to 7: 4 of 1g, 2 of 2g, 1 of 4g and 2 of double memory are left."""
    node = shared(("3g.20gb", 4, "own"))
    pods = [
        held("a", piece("4/3g.20gb", 8460, 10)),
        held("b", piece("4/3g.20gb", 4230, 20)),
        held("elsewhere", Slice(0, DeviceId("GPU-0"), 4096, 10)),
    ]
    slices = [InstanceSlice("ns/a", 8460, 10), InstanceSlice("ns/b", 4230, 20)]
    rows, free = node_instances(node, pods)
    assert rows == [InstanceRow(1, 4, "3g.20gb", 20096, 38, "fenka", slices)]
    assert free == {1: {"1g.5gb": 4, "1g.10gb": 2, "2g.10gb": 2, "3g.20gb": 1, "4g.20gb": 1}}


def test_owner_is_shown_when_an_instance_is_for_no_pod() -> None:
    """One that is being destroyed is fenka's still; both take their place."""
    node = shared(("1g.5gb", 6, "foreign"), ("4g.20gb", 0, "leaving"))
    rows, free = node_instances(node, [])
    assert [(row.start, row.profile, row.owner) for row in rows] == [
        (0, "4g.20gb", "fenka"),
        (6, "1g.5gb", "administrator"),
    ]
    assert free == {1: {"1g.5gb": 2, "1g.10gb": 1, "2g.10gb": 1}}


def test_node_without_divided_cards_has_no_rows() -> None:
    """Nothing of its allocations is looked at."""
    whole = SharedNode(Node("n", (Card(0, DeviceId("GPU-0"), "A100", 40960),)))
    assert node_instances(whole, [held("a", Slice(0, DeviceId("GPU-0"), 4096, 10))]) == ([], {})


def test_list_names_pods_once_and_instances_by_place() -> None:
    """A pod with two slices in one instance is one holder."""
    node = shared(("2g.10gb", 0, "own"))
    pods = [held("a", piece("0/2g.10gb", 1000, 5), piece("0/2g.10gb", 1000, 5))]
    (card,) = divided_cards(node, pods)
    assert (card.index, card.uuid, card.enabled) == (1, "GPU-1", True)
    (instance,) = card.instances
    assert (instance.uuid, instance.jobs) == ("GPU-1/0/2g.10gb", ["ns/a"])


def test_units_of_a_divided_card_are_those_of_its_largest_instance() -> None:
    """40960 MiB are 40 GiB; 7g.40gb has 40320, which are 39. A slice's units are those of its instance.

    A 3g.20gb of 20096 MiB has 19 units: 4 of them are 20096 * 4 // 19 = 4230 MiB.
    """
    node = shared(("3g.20gb", 4, "own"))
    assert [usable_units(node, card) for card in node.node.cards] == [40, 39, 19]
    assert shown_units(node, (piece("4/3g.20gb", 4230, 0), piece("4/3g.20gb", 20096, 0))) == {1: 23}
