"""Gangs over HTTP: their members are bound together."""

import asyncio

import msgspec

from fenka.cluster.objects import (
    Pod,
)
from tests.builders import T4_MIB, Json, gang_labels, node_json
from tests.scheduler.harness import put_pod, scheduler
from tests.waiting import until


async def test_members_are_bound_when_the_last_one_arrives() -> None:
    """The first three wait without a record."""

    async with scheduler(node_json("a", T4_MIB), node_json("b", T4_MIB)) as (server, one):
        pods = [put_pod(server, f"g-{n}", 7, labels=gang_labels("g", 4)) for n in range(4)]
        await until(lambda: one.knows(*pods))
        places = [(await one.filter(pod, "a", "b"))["NodeNames"][0] for pod in pods]
        assert sorted(places) == ["a", "a", "b", "b"]
        early = [
            asyncio.create_task(one.bind(pod, node))
            for pod, node in zip(pods[:3], places[:3], strict=True)
        ]
        await until(lambda: one.replica.gangs.waiting_status(_read(pods[0])) is not None)
        assert not any(it["spec"].get("nodeName") for it in server.all("pods"))
        assert await one.bind(pods[3], places[3]) == ""
        assert await asyncio.gather(*early) == ["", "", ""]
        assert [
            server.get("pods", f"g-{n}", "default")["spec"]["nodeName"] for n in range(4)
        ] == places


async def test_member_is_not_bound_when_it_has_no_reservation_there() -> None:
    """On another node, or if the reservation has ended since filter: half a gang never starts."""

    async with scheduler(node_json("a", T4_MIB), node_json("b", T4_MIB)) as (server, one):
        pods = [put_pod(server, f"g-{n}", 10, labels=gang_labels("g", 2)) for n in range(2)]
        await until(lambda: one.knows(*pods))
        said = "the gang of the pod g-0 was not complete in time"
        assert await one.bind(pods[0], "a") == said
        ((place,), _) = [(await one.filter(it, "a", "b"))["NodeNames"] for it in pods]
        other = "b" if place == "a" else "a"
        assert await one.bind(pods[0], other) == said
        assert not any(it["spec"].get("nodeName") for it in server.all("pods"))


def _read(pod: Json) -> Pod:
    return msgspec.convert(pod, Pod)
