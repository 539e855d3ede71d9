"""Binding: the server and the state in memory agree, whatever fails in between."""

import asyncio
import json

import pytest
from aiohttp import web

from fenka.dialects import base, gpushare
from tests.builders import T4_MIB, node_json, pod_json
from tests.fakes.api_server import FakeApiServer, Json, api_server
from tests.fakes.clock import Clock
from tests.scheduler.harness import extender, put_pod, scheduler
from tests.waiting import until

NODE = node_json("n", T4_MIB, T4_MIB)
FOUR = T4_MIB * 4 // 14


def bound(server: FakeApiServer, pod: Json) -> str | None:
    """Return the node on which the server has the pod."""
    node: str | None = server.get("pods", pod["metadata"]["name"], "default")["spec"].get(
        "nodeName"
    )
    return node


async def test_bind_sends_one_request_with_all_annotations() -> None:
    """The pod's own annotations stay; tools of both generations can read the record."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 3, 1, annotations={"own": "kept"})
        assert await one.bind(pod, "n") == ""
        writes = [it for it in server.requests if not it.startswith("GET") and "leases" not in it]
        assert writes == ["POST /api/v1/namespaces/default/pods/p/binding"]
        found = server.get("pods", "p", "default")["metadata"]["annotations"]
        assert found["own"] == "kept"
        assert found[gpushare.IDX] == "0"
        assert found[gpushare.POD] == "4"
        assert found[gpushare.DEV] == "14"
        assert found[gpushare.ASSIGNED] == "false"
        assert found[gpushare.ASSUME_TIME].isdecimal()
        assert json.loads(found[gpushare.ALLOCATION]) == {"0": {"0": 3}, "1": {"0": 1}}
        assert json.loads(found[base.CARDS]) == {"0": "GPU-n-0"}
        await until(lambda: not one.replica.cluster.is_assumed(pod["metadata"]["uid"]))
        assert one.held("n") == FOUR


async def test_slice_is_allocated_when_the_server_has_not_answered_yet() -> None:
    """`filter` counts the assumption."""

    async with scheduler(NODE) as (server, one):
        go_on, begun = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> None:
            if request.path.endswith("binding"):
                begun.set()
                await go_on.wait()

        server.before = slow
        pods = [put_pod(server, f"p{i}", 14) for i in range(3)]
        tasks = [asyncio.create_task(one.bind(pod, "n")) for pod in pods]
        await begun.wait()
        await until(lambda: one.held("n", 0) == one.held("n", 1) == T4_MIB)
        answer = await one.filter(pods[2], "n")
        assert answer["NodeNames"] == []
        go_on.set()
        errors = await asyncio.gather(*tasks)
        assert sorted(map(bool, errors)) == [False, False, True]
        assert "Insufficient GPU Memory in one device" in max(errors)


async def test_card_is_not_overcommitted_when_many_pods_are_bound_at_once() -> None:
    """gpushare's defect (e): 40 pods of 4 units at once for two cards of 14; 3 fit on each."""

    async with scheduler(NODE) as (server, one):
        pods = [put_pod(server, f"p{i}", 4) for i in range(40)]
        await until(lambda: one.knows(*pods))
        errors = await asyncio.gather(*(one.bind(pod, "n") for pod in pods))
        assert sum(not it for it in errors) == 6
        cards = [
            server.get("pods", f"p{i}", "default")["metadata"]["annotations"].get(gpushare.IDX)
            for i in range(40)
        ]
        assert cards.count("0") == cards.count("1") == 3
        assert one.held("n", 0) == one.held("n", 1) == 3 * FOUR


async def test_assumption_is_forgotten_when_the_server_refuses() -> None:
    """403, 404, 422: the pod is certainly not bound."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4)
        for status in (403, 404, 422, 429):

            async def refuse(request: web.Request, code: int = status) -> web.Response | None:
                if request.path.endswith("binding"):
                    return web.json_response({"message": f"no: {code}"}, status=code)
                return None

            server.before = refuse
            assert await one.bind(pod, "n") == f"no: {status}"
            assert one.held("n") == 0
        server.before = None
        assert await one.bind(pod, "n") == ""


async def test_pod_is_bound_once_when_the_answer_is_lost() -> None:
    """The server bound it, and then broke the connection or answered 504."""

    async with scheduler(NODE) as (server, one):
        for name, status in (("broken", 0), ("timeout", 504)):

            async def lose(request: web.Request, code: int = status) -> web.Response | None:
                if not request.path.endswith("binding"):
                    return None
                if code:
                    return web.json_response({"message": "timeout"}, status=code)
                assert request.transport is not None
                request.transport.abort()
                return web.Response()

            pod = put_pod(server, name, 4)
            server.after = lose
            assert await one.bind(pod, "n") == ""
            server.after = None
            assert bound(server, pod) == "n"
        assert one.held("n") == 2 * FOUR


async def test_assumption_stays_until_the_deadline_when_the_outcome_is_unknown() -> None:
    """A pod that is not bound now may be bound a second later."""

    async with scheduler(NODE) as (server, one):
        gets = 0

        async def lose(request: web.Request) -> web.Response | None:
            nonlocal gets
            if request.path.endswith("binding"):
                return web.json_response({"message": "etcd"}, status=500)
            if request.path.endswith("pods/p"):
                gets += 1
                assert one.held("n") == FOUR
                if gets == 5:
                    one.clock.now += 4.1
            return None

        server.before = lose
        pod = put_pod(server, "p", 4)
        await until(lambda: one.knows(pod))
        assert await one.bind(pod, "n") == "the pod p was not bound to n"
        assert gets == 6
        assert one.held("n") == 0


async def test_assumption_is_forgotten_when_the_pod_is_deleted_meanwhile() -> None:
    """Another pod of that name is another pod."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4)
        await until(lambda: one.knows(pod))

        async def deleted(request: web.Request) -> web.Response | None:
            if request.path.endswith("binding"):
                server.remove("pods", "p", "default")
            return None

        server.before = deleted
        assert await one.bind(pod, "n") == 'pods "p" not found'
        server.before = None
        assert one.held("n") == 0
        again = put_pod(server, "p", 4)
        await until(lambda: one.knows(again))
        error = await one.bind(pod, "n")
        assert error == (
            f"The pod p in ns default's uid is {again['metadata']['uid']}, "
            f"and it's not equal with expected {pod['metadata']['uid']}"
        )
        assert one.held("n") == 0


async def test_binding_is_sent_once_when_it_is_requested_again() -> None:
    """kube-scheduler retries after its timeout: while the binding runs, and after it."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4)
        first, second = await asyncio.gather(one.bind(pod, "n"), one.bind(pod, "n"))
        assert first == second == ""
        await until(lambda: not one.replica.cluster.is_assumed(pod["metadata"]["uid"]))
        assert await one.bind(pod, "n") == ""
        assert len([it for it in server.requests if it.endswith("binding")]) == 1
        assert await one.bind(pod, "m") == "the pod p is already bound to n"
        assert one.held("n") == FOUR


async def test_bind_fails_when_another_program_has_bound_the_pod() -> None:
    """It has no record of a card."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4, node="n")
        await until(lambda: one.knows(pod))
        assert "another program has bound the pod" in await one.bind(pod, "n")
        # Nobody knows where it is: it counts once.
        assert one.held("n", 0) + one.held("n", 1) == FOUR


async def test_bind_fails_when_the_node_is_unknown_or_closed() -> None:
    """Each case has its own sentence."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4)
        assert 'node "m" not found' in await one.bind(pod, "m")
        server.put("nodes", node_json("n", T4_MIB, labels={"gpushare": "false"}))
        await until(lambda: one.replica.cluster.node_error("n"))
        assert "takes it out of sharing" in await one.bind(pod, "n")
        assert bound(server, pod) is None


async def test_pod_is_bound_without_a_card_when_its_limit_is_0() -> None:
    """gpushare's defect (c): a limit of 0 passed filter, and bind answered 500."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 0)
        answer = await one.filter(pod, "n")
        assert answer["NodeNames"] == ["n"]
        assert await one.bind(pod, "n") == ""
        assert server.get("pods", "p", "default")["metadata"]["annotations"] == {}
        assert one.held("n") == 0


async def test_units_are_free_when_a_pod_is_replaced_by_one_of_its_name() -> None:
    """gpushare's defect (f), through the informer: deleted by force and created again at once."""

    async with scheduler(NODE) as (server, one):
        for _ in range(10):
            pod = put_pod(server, "web-0", 14)
            assert await one.bind(pod, "n") == ""
            server.remove("pods", "web-0", "default")
        await until(lambda: one.held("n", 0) == one.held("n", 1) == 0)


# ---- two replicas ----


async def test_new_leader_counts_the_last_binding_when_the_old_one_died() -> None:
    """The informer had not brought it: the new leader reads it before it binds."""

    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        clock = Clock()
        async with (
            extender(server, "one", clock) as one,
            extender(server, "two", clock) as two,
        ):
            await until(lambda: one.replica.leadership.leading or two.replica.leadership.leading)
            old, new = (one, two) if one.replica.leadership.leading else (two, one)
            await until(lambda: new.replica.informers.synced)
            server.mute = True
            first, second = put_pod(server, "a", 10), put_pod(server, "b", 10)
            assert await old.bind(first, "n") == ""
            await old.die()
            assert new.held("n") == 0
            assert "does not answer" in await new.bind(second, "n")
            await new.takes_over()
            assert new.held("n") == T4_MIB * 10 // 14
            assert "Insufficient GPU Memory" in await new.bind(second, "n")


async def test_another_replica_leads_at_once_when_the_leader_stops() -> None:
    """Running bindings are finished, none is begun, and no lease has to expire."""

    async with api_server() as server:
        server.put("nodes", NODE)
        clock = Clock()
        async with extender(server, "one", clock) as one:
            await until(lambda: one.replica.leadership.leading)
            async with extender(server, "two", clock) as two:
                await until(lambda: two.replica.leadership.leader == "one")
                go_on, begun = asyncio.Event(), asyncio.Event()

                async def slow(request: web.Request) -> web.StreamResponse | None:
                    if request.path.endswith("binding"):
                        begun.set()
                        await go_on.wait()
                    return None

                server.before = slow
                pod = put_pod(server, "p", 4)
                binding = asyncio.create_task(one.bind(pod, "n"))
                await begun.wait()
                stopping = asyncio.create_task(one.replica.stop())
                await until(lambda: not one.replica.leadership.leading)
                assert "no replica leads" in await one.bind(put_pod(server, "q", 4), "n")
                assert not two.replica.leadership.leading
                go_on.set()
                assert await binding == ""
                await stopping
                await until(lambda: two.replica.leadership.leading)
                assert two.held("n") == FOUR


async def test_bind_fails_when_the_lease_cannot_be_renewed() -> None:
    """The API server still answers reads of pods."""

    async with scheduler(NODE) as (server, one):

        async def no_leases(request: web.Request) -> web.StreamResponse | None:
            return web.Response(status=503) if "leases" in request.path else None

        server.before = no_leases
        pod = put_pod(server, "p", 4)
        one.clock.now += 10
        assert "no replica leads" in await one.bind(pod, "n")
        assert bound(server, pod) is None
        server.before = None
        await until(lambda: one.replica.leadership.leading)
        assert await one.bind(pod, "n") == ""


# ---- what no scheduler can have asked for ----


async def test_bind_fails_when_the_pod_requests_no_resource_of_fenka() -> None:
    """Otherwise any pod of any namespace could be bound with fenka's rights."""

    async with scheduler(NODE) as (server, one):
        pod = pod_json("plain", uid="u")
        pod["spec"]["containers"] = [{"name": "c", "image": "busybox"}]
        server.put("pods", pod)
        for known in (False, True):
            if known:
                await until(lambda: one.knows(pod))
            assert "requests no resource of fenka" in await one.bind(pod, "n")
        assert bound(server, pod) is None


async def test_bind_fails_when_the_request_has_no_uid() -> None:
    """The next pod may have the same name."""

    async with scheduler(NODE) as (server, one):
        pod, other = put_pod(server, "p", 4), put_pod(server, "q", 4)
        await until(lambda: one.knows(pod, other))
        anonymous = {**pod, "metadata": {**pod["metadata"], "uid": ""}}
        assert "PodUID" in await one.bind(anonymous, "n")
        forged = {**pod, "metadata": {**pod["metadata"], "uid": other["metadata"]["uid"]}}
        assert "is that of the pod default/q" in await one.bind(forged, "n")
        assert bound(server, pod) is None
        assert bound(server, other) is None


def tainted(name: str) -> Json:
    """Return a node with a taint."""
    node = node_json(name, T4_MIB, labels={"pool": "b"})
    node["spec"] = {"taints": [{"key": "for", "value": "others", "effect": "NoSchedule"}]}
    return node


def cordoned(name: str) -> Json:
    """Return a node that takes no new pods."""
    return {**node_json(name, T4_MIB), "spec": {"unschedulable": True}}


async def test_bind_fails_when_the_pods_spec_excludes_the_node() -> None:
    """kube-scheduler has checked selectors, affinity, taints and cordons; a forged request has not."""

    async with scheduler(NODE, tainted("tainted"), cordoned("cordoned")) as (server, one):
        pod = put_pod(server, "p", 4)
        chooser = pod_json("chooser", 4)
        chooser["spec"]["nodeSelector"] = {"pool": "a"}
        term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        wisher = pod_json("wisher", 4)
        wisher["spec"]["affinity"] = {"nodeAffinity": required}
        for it in (chooser, wisher):
            server.put("pods", it)
        for thing, node, why in (
            (pod, "tainted", "taint for=others:NoSchedule is not tolerated"),
            (pod, "cordoned", "cordoned"),
            (chooser, "n", "the pod wants nodes labelled pool=a"),
            (wisher, "n", "the pod's node affinity excludes it"),
        ):
            error = await one.bind(thing, node)
            assert why in error
            assert f"may not go to the node {node}" in error
            assert bound(server, thing) is None
        assert one.held("n") == one.held("tainted") == 0
        tolerant = pod_json("tolerant", 4)
        tolerant["spec"]["tolerations"] = [{"operator": "Exists"}]
        server.put("pods", tolerant)
        assert await one.bind(tolerant, "tainted") == ""


async def test_bind_fails_when_the_pod_names_another_scheduler() -> None:
    """Without names any scheduler is accepted, for kube-schedulers with several profiles."""

    async with scheduler(NODE) as (server, one):
        one.replica.binder._schedulers = ("default-scheduler",)
        foreign, own = pod_json("foreign", 4), pod_json("own", 4)
        foreign["spec"]["schedulerName"] = "volcano"
        own["spec"]["schedulerName"] = "default-scheduler"
        for it in (foreign, own):
            server.put("pods", it)
        assert "is for the scheduler 'volcano'" in await one.bind(foreign, "n")
        assert bound(server, foreign) is None
        assert await one.bind(own, "n") == ""


@pytest.mark.parametrize(
    "notes",
    [
        {"note": "x" * 262_079},
        {"note": "ä" * 130_000},
        {f"{number:x}": "" for number in range(60_000)},
    ],
)
async def test_pod_is_neither_offered_a_node_nor_bound_when_the_record_may_not_fit(
    notes: dict[str, str],
) -> None:
    """After a binding beyond 256 KiB nobody could write the pod's status, and it would hold its card."""
    size = sum(len(text.encode()) for pair in notes.items() for text in pair)
    sentence = f"has {size} bytes of annotations, and fenka serves at most 253952: make it smaller"
    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 4, annotations=notes)
        await until(lambda: one.knows(pod))
        if size <= 253_952:
            assert await one.bind(pod, "n") == ""
            return
        answer = await one.filter(pod, "n")
        assert answer["NodeNames"] == []
        assert sentence in answer["FailedAndUnresolvableNodes"]["n"]
        assert sentence in await one.bind(pod, "n")
        assert bound(server, pod) is None
        # The owner removes it.
        server.put("pods", pod_json("p", 4, uid=pod["metadata"]["uid"]))
        await until(
            lambda: not one.replica.informers.pods.objects[pod["metadata"]["uid"]].demand().error
        )
        assert await one.bind(pod, "n") == ""
