"""Instances of no order: when they are adopted, and when they wait for the call that names them."""

from typing import Any

from fenka.autoscaler.orders import advance
from fenka.cluster.autoscaling import OrderRecord, Slot
from tests.autoscaler.snapshots import NOW, instance, snapshot


def order(*slots: Slot, zone: str = "a") -> OrderRecord:
    """An order of offer t4."""
    fields: dict[str, Any] = {"capacity": "on-demand", "state": "written", "price": 4.0}
    return OrderRecord(
        group="t4", type="t4.x", zone=zone, slots=slots, written_at=NOW - 10, **fields
    )


def adopted(orders: dict[str, OrderRecord]) -> list[str]:
    """Return the names of the orders that an untagged instance i-1 leads to, besides those given."""
    decision = advance(snapshot(orders=orders, instances=(instance("i-1"),)))
    return [name for name in decision.orders if name not in orders]


def test_instance_of_no_order_becomes_an_order_of_its_own() -> None:
    """The ConfigMap was deleted, or the cloud has launched it by itself."""
    assert adopted({}) == ["t4-i-1"]


def test_instance_is_not_adopted_when_an_order_has_it() -> None:
    """Its tag may be missing."""
    assert adopted({"t4-x": order(Slot(state="known", instance="i-1"))}) == []


def test_instance_is_not_adopted_while_an_order_of_its_offer_is_unanswered() -> None:
    """It may be of that order, whose answer was lost before the instance was tagged."""
    assert adopted({"t4-x": order(Slot())}) == []
    assert adopted({"t4-x": order(Slot(state="failed"))}) == ["t4-i-1"]
    assert adopted({"t4-x": order(Slot(), zone="b")}) == ["t4-i-1"]
