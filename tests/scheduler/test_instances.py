"""Pods in MIG instances, from filter to bind, as kube-scheduler asks over HTTP."""

import asyncio
import json

from fenka.core.mig.instances import GANG_IN_INSTANCES
from fenka.dialects import gpushare
from fenka.dialects.mig_records import INSTANCE
from tests.builders import Json, gang_labels
from tests.fakes.api_server import FakeApiServer
from tests.mig_builders import A100, inside_pod_json, mig_node_json, mig_pod_json
from tests.scheduler.harness import SchedulerHarness, extender, put_pod, scheduler
from tests.waiting import until


async def put(server: FakeApiServer, one: SchedulerHarness, *pods: Json) -> list[Json]:
    """Create pods, and wait until the replica knows them."""
    made = [server.put("pods", pod) for pod in pods]
    await until(lambda: one.knows(*made))
    return made


def places(server: FakeApiServer, pod: Json) -> list[tuple[str, int, str]]:
    """Return what the pod's record says."""
    meta = pod["metadata"]
    stored = server.get("pods", meta["name"], meta["namespace"])
    recorded = json.loads(stored["metadata"]["annotations"][INSTANCE])
    return [(it["card"], it["start"], it["profile"]) for it in recorded]


async def test_binding_records_the_instances_of_a_pod() -> None:
    """By card and place, in the order of its containers; they need not exist yet."""
    async with scheduler(mig_node_json("n", "A100", "T4")) as (server, one):
        a, b = await put(
            server, one, mig_pod_json("a", "3g.20gb"), mig_pod_json("b", "2x1g.5gb", "2g.10gb")
        )
        assert (await one.filter(a, "n"))["NodeNames"] == ["n"]
        assert await one.bind(a, "n") == ""
        assert places(server, a) == [("GPU-n-0", 4, "3g.20gb")]
        assert await one.bind(b, "n") == ""
        # The 2g first, then each 1g where the least is lost.
        assert places(server, b) == [
            ("GPU-n-0", 0, "1g.5gb"),
            ("GPU-n-0", 1, "1g.5gb"),
            ("GPU-n-0", 2, "2g.10gb"),
        ]


async def test_second_binding_is_refused_when_both_pods_were_to_have_the_place() -> None:
    """Both fitted at filter. The reason names the pod that has it."""
    async with scheduler(mig_node_json("n", "A100")) as (server, one):
        pods = await put(
            server, one, mig_pod_json("a", "7g.40gb"), mig_pod_json("b", "4g.20gb", uid="b")
        )
        for pod in pods:
            assert (await one.filter(pod, "n"))["NodeNames"] == ["n"]
        assert await one.bind(pods[0], "n") == ""
        refused = "no card has room for 4g.20gb: 0/0 7g.40gb is held by default/a"
        assert await one.bind(pods[1], "n") == (
            f"The node n can't place the pod b in ns default: {refused}"
        )
        assert refused in (await one.filter(pods[1], "n"))["FailedAndUnresolvableNodes"]["n"]


async def test_pods_that_are_bound_at_once_never_overlap() -> None:
    """Fourteen of 1g on two cards, and the fifteenth is refused."""
    async with scheduler(mig_node_json("n", "A100", "A100")) as (server, one):
        pods = await put(
            server, one, *(mig_pod_json(f"p{i}", "1g.5gb", uid=f"u{i}") for i in range(15))
        )
        errors = await asyncio.gather(*(one.bind(pod, "n") for pod in pods))
        bound = [pod for pod, error in zip(pods, errors, strict=True) if not error]
        assert len(bound) == 14
        taken = sorted(place for pod in bound for place in places(server, pod))
        assert taken == [
            (f"GPU-n-{card}", start, "1g.5gb") for card in (0, 1) for start in range(7)
        ]


async def test_binding_leaves_an_administrators_instance_that_came_since_filter() -> None:
    """It is on the upper half, where the 3g would have been."""
    async with scheduler(mig_node_json("n", "A100")) as (server, one):
        (pod,) = await put(server, one, mig_pod_json("a", "3g.20gb"))
        assert (await one.filter(pod, "n"))["NodeNames"] == ["n"]
        server.put("nodes", mig_node_json("n", "A100", present={(0, "1g.5gb", 5): "foreign"}))
        await until(lambda: _taken(one) == 1)
        assert await one.bind(pod, "n") == ""
        assert places(server, pod) == [("GPU-n-0", 0, "3g.20gb")]


def _taken(one: SchedulerHarness) -> int:
    shared = one.replica.cluster.shared_node("n")
    return sum(map(len, shared.division.taken.values())) if shared else 0


async def test_another_replica_continues_from_the_records() -> None:
    """Nothing but the pods' annotations says where they are."""
    async with scheduler(mig_node_json("n", "A100")) as (server, one):
        pods = await put(
            server, one, *(mig_pod_json(f"p{i}", "2g.10gb", uid=f"u{i}") for i in range(4))
        )
        assert [await one.bind(pod, "n") for pod in pods[:2]] == ["", ""]
        await one.die()
        async with extender(server, "two", one.clock) as two:
            await two.takes_over()
            await until(lambda: two.knows(*pods))
            assert await two.bind(pods[2], "n") == ""
            assert "is held by default/p" in await two.bind(pods[3], "n")
        starts = sorted(place[1] for pod in pods[:3] for place in places(server, pod))
        assert starts == [0, 2, 4]


async def test_slices_of_two_namespaces_are_in_two_instances() -> None:
    """The dialect's own records name the physical card, as other tools expect."""
    async with scheduler(mig_node_json("n", "A100")) as (server, one):
        pods = await put(
            server,
            one,
            inside_pod_json("a", 4, namespace="x"),
            inside_pod_json("b", 4, namespace="y"),
            inside_pod_json("c", 4, namespace="x"),
            inside_pod_json("d", 4, namespace="z"),
        )
        assert [await one.bind(pod, "n") for pod in pods[:3]] == ["", "", ""]
        assert [places(server, pod)[0][1:] for pod in pods[:3]] == [
            (4, "3g.20gb"),
            (0, "4g.20gb"),
            (4, "3g.20gb"),
        ]
        stored = server.get("pods", "a", "x")["metadata"]["annotations"]
        assert json.loads(stored[gpushare.ALLOCATION]) == {"0": {"0": 4}}
        assert "instances with room hold slices of other namespaces" in await one.bind(pods[3], "n")


async def test_requests_that_no_card_has_are_not_resolvable() -> None:
    """And a slice of a card never goes to a divided one."""
    async with scheduler(mig_node_json("n", "A100"), mig_node_json("m", "T4")) as (server, one):
        (pod,) = await put(server, one, mig_pod_json("a", "5g.30gb"))
        refused = (await one.filter(pod, "n", "m"))["FailedAndUnresolvableNodes"]
        assert refused["n"] == (
            f"no card has a profile 5g.30gb: A100 has {', '.join(A100.by_name)}"
        )
        assert refused["m"] == "no card here is divided into instances"
        slice_of_card = put_pod(server, "s", 4)
        await until(lambda: one.knows(slice_of_card))
        answer = await one.filter(slice_of_card, "n", "m")
        assert answer["NodeNames"] == ["m"]
        assert answer["FailedAndUnresolvableNodes"] == {
            "n": "no GPU fits: 1 of 1 is divided into instances"
        }


async def test_best_node_is_the_one_that_loses_the_least() -> None:
    """The upper half of m is taken already; the whole card of n stays free."""
    nodes = mig_node_json("m", "A100", present={(0, "3g.20gb", 4): "foreign"})
    async with scheduler(nodes, mig_node_json("n", "A100")) as (server, one):
        (pod,) = await put(server, one, mig_pod_json("a", "1g.5gb"))
        scores = await one.post("prioritize", {"Pod": pod, "NodeNames": ["n", "m"]})
        assert {it["Host"]: it["Score"] for it in scores} == {"m": 10, "n": 0}


async def test_gang_in_instances_is_refused() -> None:
    """With the sentence that a workstation has for it."""
    async with scheduler(mig_node_json("n", "A100")) as (server, one):
        pods = await put(
            server,
            one,
            *(
                mig_pod_json(f"p{i}", "1g.5gb", uid=f"u{i}", labels=gang_labels("g", 2))
                for i in range(2)
            ),
        )
        refused = (await one.filter(pods[0], "n"))["FailedAndUnresolvableNodes"]
        assert refused == {"n": GANG_IN_INSTANCES}


async def test_holders_of_the_place_are_preempted() -> None:
    """The 1g in the lower half. No victims make room for a 7g: the 3g's priority is higher."""
    async with scheduler(mig_node_json("n", "A100")) as (server, one):
        pods = await put(
            server,
            one,
            mig_pod_json("three", "3g.20gb", uid="three", spec={"priority": 9}),
            mig_pod_json("low", "1g.5gb", uid="low", spec={"priority": 1}),
            mig_pod_json("four", "4g.20gb", uid="four", spec={"priority": 5}),
        )
        assert [await one.bind(pod, "n") for pod in pods[:2]] == ["", ""]
        body = {"Pod": pods[2], "NodeNameToMetaVictims": {"n": {"Pods": [], "NumPDBViolations": 0}}}
        answer = await one.post("preempt", body)
        victims = answer["NodeNameToMetaVictims"]["n"]["Pods"]
        assert [victim["UID"] for victim in victims] == ["low"]
        seven = await put(server, one, mig_pod_json("7", "7g.40gb", spec={"priority": 5}))
        assert await one.post("preempt", {**body, "Pod": seven[0]}) == {"NodeNameToMetaVictims": {}}


async def test_cards_count_once_beside_their_instances() -> None:
    """In /inspect and in the metrics: 39 units of the A100, and the memory of both instances."""
    async with scheduler(mig_node_json("n", "A100", "T4")) as (server, one):
        pods = await put(server, one, mig_pod_json("a", "3g.20gb"), mig_pod_json("b", "1g.5gb"))
        assert [await one.bind(pod, "n") for pod in pods] == ["", ""]
        async with one.session.get(f"{one.url}/gpushare-scheduler/inspect/n") as answer:
            (node,) = (await answer.json())["nodes"]
        assert [device["id"] for device in node["devs"]] == [0, 1]
        assert node["totalGPU"] == 39 + 14
        async with one.session.get(f"{one.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        used = [it for it in lines if it.startswith("fenka_scheduler_card_memory_allocated_bytes{")]
        assert [float(it.rpartition(" ")[2]) / 2**20 for it in used] == [20096 + 4864, 0]
