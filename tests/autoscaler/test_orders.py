"""Tests the ConfigMap of the orders, against an API server that stands in."""

import pytest

from fenka.autoscaler.stores import OrderStore, WriteLost, new_name
from fenka.cluster.autoscaling import ORDERS_MAP, OrderRecord, Slot
from tests.autoscaler.snapshots import NOW, offer
from tests.coroutines import synchronous
from tests.fakes.api_server import api_server

NAMESPACE = "fenka-system"


def record(**fields: object) -> OrderRecord:
    """An order of one node that was just written."""
    defaults = {
        "group": "t4",
        "type": "t4.x",
        "zone": "a",
        "capacity": "on-demand",
        "slots": (Slot(),),
        "state": "written",
        "price": 4.0,
        "written_at": NOW,
    }
    return OrderRecord(**{**defaults, **fields})  # type: ignore[arg-type]


@synchronous
async def test_orders_are_read_as_they_were_written() -> None:
    """A second replica reads what the first one wrote."""
    async with api_server() as server, server.api() as api:
        first, second = OrderStore(api, NAMESPACE), OrderStore(api, NAMESPACE)
        await first.save({"t4-1": record()})
        await first.save({"t4-2": record(attempt=1)})
        await second.load()
        assert second.records == {"t4-1": record(), "t4-2": record(attempt=1)}


@synchronous
async def test_order_is_lost_when_another_replica_wrote_first() -> None:
    """The second of two leaders asks for nothing."""
    async with api_server() as server, server.api() as api:
        first, second = OrderStore(api, NAMESPACE), OrderStore(api, NAMESPACE)
        await first.save({"t4-1": record()})
        await second.load()
        await first.save({"t4-2": record()})
        with pytest.raises(WriteLost):
            await second.save({"t4-3": record()})
        assert set(server.get("configmaps", ORDERS_MAP, NAMESPACE)["data"]) == {"t4-1", "t4-2"}


@synchronous
async def test_two_replicas_do_not_both_make_the_map() -> None:
    """Neither has read a version."""
    async with api_server() as server, server.api() as api:
        first, second = OrderStore(api, NAMESPACE), OrderStore(api, NAMESPACE)
        await first.load()
        await second.load()
        await first.save({"t4-1": record()})
        with pytest.raises(WriteLost):
            await second.save({"t4-1": record()})


@synchronous
async def test_deleted_map_is_made_again_with_all_orders() -> None:
    """The leader still knows them."""
    async with api_server() as server, server.api() as api:
        store = OrderStore(api, NAMESPACE)
        await store.save({"t4-1": record()})
        server.remove("configmaps", ORDERS_MAP, NAMESPACE)
        await store.save({"t4-2": record()})
        assert set(server.get("configmaps", ORDERS_MAP, NAMESPACE)["data"]) == {"t4-1", "t4-2"}


@synchronous
async def test_unreadable_order_stays_when_others_are_written() -> None:
    """It may be of a newer version."""
    async with api_server() as server, server.api() as api:
        server.put(
            "configmaps",
            {"metadata": {"name": ORDERS_MAP, "namespace": NAMESPACE}, "data": {"t4-1": "{}"}},
        )
        store = OrderStore(api, NAMESPACE)
        await store.load()
        assert store.records == {}
        assert len(store.unreadable) == 1
        await store.save({"t4-2": record()})
        await store.save({"t4-2": None})
        assert server.get("configmaps", ORDERS_MAP, NAMESPACE)["data"] == {"t4-1": "{}"}


@synchronous
async def test_failed_offer_is_remembered_without_an_order() -> None:
    """Its record has no slots."""
    async with api_server() as server, server.api() as api:
        store = OrderStore(api, NAMESPACE)
        await store.fail_offer(offer().key, "taken back", "the stock is short", NOW)
        (failed,) = store.records.values()
        assert (failed.state, failed.failure, failed.slots) == ("failed", "taken back", ())


def test_names_of_orders_differ_when_they_are_made_in_the_same_second() -> None:
    """1,800,000,000 is tro8w0 in base 36."""
    first = new_name("t4", NOW, ())
    assert first == "t4-tro8w0"
    assert new_name("t4", NOW, {first}) != first
    assert new_name("t4", NOW + 1, ()) != first
