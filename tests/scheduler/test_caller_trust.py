"""Callers that are not kube-scheduler: what they send of other users' pods changes nothing."""

from copy import deepcopy

from tests.builders import T4_MIB, Json, gang_labels, node_json, pod_json
from tests.scheduler.harness import put_pod, scheduler
from tests.waiting import until

NODES = node_json("a", T4_MIB), node_json("b", T4_MIB)


def as_told(pod: Json, **meta: object) -> Json:
    """Return the pod as a caller describes it."""
    told = deepcopy(pod)
    told["metadata"] |= meta
    return told


async def test_gang_reservation_stays_when_callers_send_false_pods() -> None:
    """They describe its members, pods of other gangs, and the offered nodes."""

    async with scheduler(*NODES) as (server, one):
        pods = [put_pod(server, f"g-{n}", 10, labels=gang_labels("g", 2)) for n in range(2)]
        await until(lambda: one.knows(*pods))
        places = [(await one.filter(pod, "a", "b"))["NodeNames"] for pod in pods]
        planned = one.replica.gangs.reserved()
        assert len(planned) == 1
        stranger = pod_json("g-9", 1, labels=gang_labels("g", 9))
        for told in (
            as_told(pods[0], labels={}),
            as_told(pods[0], labels=gang_labels("other", 1)),
            as_told(pods[0], namespace="else"),
            as_told(pods[0], deletionTimestamp="2026-01-01T00:00:00Z"),
            {**pods[0], "spec": {"containers": []}},
            {**pods[0], "spec": {**pods[0]["spec"], "nodeSelector": {"no": "where"}}},
            stranger,
            as_told(stranger, uid=""),
        ):
            for names in (("a", "b"), ("a",), ("b",), (), ("nowhere",)):
                for verb in ("filter", "prioritize"):
                    await one.post(verb, {"Pod": told, "NodeNames": names})
        assert one.replica.gangs.reserved() == planned
        assert [(await one.filter(pod, "a", "b"))["NodeNames"] for pod in pods] == places


async def test_nothing_is_reserved_when_the_sent_pods_do_not_exist() -> None:
    """Otherwise cards would be held for them."""

    async with scheduler(*NODES) as (server, one):
        for number in range(2):
            made_up = pod_json(f"g-{number}", 14, labels=gang_labels("g", 1))
            answer = await one.filter(made_up, "a", "b")
            assert answer["NodeNames"] == []
        assert one.replica.gangs.reserved() == {}
        fits = put_pod(server, "p", 14)
        await until(lambda: one.knows(fits))
        assert (await one.filter(fits, "a", "b"))["NodeNames"] == ["a", "b"]


async def test_api_servers_pod_is_evaluated_when_the_caller_sends_another() -> None:
    """It is found by its UID. The caller decides neither its size nor its position."""

    async with scheduler(*NODES) as (server, one):
        pod = put_pod(server, "p", 4)
        await until(lambda: one.knows(pod))
        told = pod_json("p", 99, uid=pod["metadata"]["uid"])
        assert (await one.filter(told, "a", "b"))["NodeNames"] == ["a", "b"]
        large = put_pod(server, "large", 15)
        await until(lambda: one.knows(large))
        told = pod_json("large", 1, uid=large["metadata"]["uid"], priority=1000)
        assert (await one.filter(told, "a", "b"))["NodeNames"] == []


async def test_nothing_is_remembered_when_the_sent_pods_do_not_exist() -> None:
    """Invented UIDs neither fill the memory nor push known ones out."""

    async with scheduler(*NODES) as (_, one):
        order = one.replica.queue
        before = {name: len(it) for name, it in vars(order).items() if hasattr(it, "__len__")}
        for number in range(20):
            await one.filter(pod_json(f"p{number}", 99), "a", "b")
        after = {name: len(it) for name, it in vars(order).items() if hasattr(it, "__len__")}
        assert after == before


async def test_member_waits_for_its_gang_when_the_informer_has_not_brought_it() -> None:
    """It is read from the API server."""

    async with scheduler(*NODES) as (server, one):
        server.mute = True
        pod = put_pod(server, "g-0", 10, labels=gang_labels("g", 2))
        assert not one.knows(pod)
        assert "was not complete in time" in await one.bind(pod, "a")
        assert "nodeName" not in server.get("pods", "g-0", "default")["spec"]
