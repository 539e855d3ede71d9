"""Tests that one object, call or tenant that fails does not keep the autoscaler from everything else."""

import itertools
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from fenka.autoscaler.actor_context import MAX_WARNED, Warnings
from fenka.autoscaler.loop import status_of
from fenka.autoscaler.plan_case import plan_case, within_most
from fenka.autoscaler.planner import PlanFailed
from fenka.autoscaler.snapshot import Shape
from fenka.cli.why import explain_pod
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.port import Offer, OfferKey
from fenka.cloud.simulated_cloud import Fault, Prices, Scenario, SimulatedOffer
from fenka.cluster.autoscaling import (
    CAPACITY,
    GROUP,
    ORDER,
    ORDERS_MAP,
    PLANNED,
    RECLAIM_AT,
    encode_time,
)
from fenka.core.nodes.case import NewCard, check_case
from fenka.core.nodes.plan import make_plan
from fenka.kubernetes.events import BURST
from tests.autoscaler.harness import NAMESPACE, World, scenario, world
from tests.autoscaler.snapshots import T4_CARD, config, elastic_node, group, snapshot
from tests.builders import pod_json
from tests.coroutines import synchronous
from tests.waiting import until


def refusing(there: World, path: str, status: int) -> None:
    """Let the API server refuse every patch of this path."""
    step = there.server.before

    async def before(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH" and request.path.endswith(path):
            body = {"kind": "Status", "code": status, "reason": "Invalid", "message": "too long"}
            return web.json_response(body, status=status)
        return await step(request) if step is not None else None

    there.server.before = before


@synchronous
async def test_other_pods_get_nodes_when_a_pod_cannot_be_annotated(tmp_path: Path) -> None:
    """Its owner has filled all that an object's annotations may have, or a policy forbids it."""
    async with world(tmp_path) as there, there.replica():
        refusing(there, "/pods/a", 422)
        there.pending("a")
        await there.passes(60, there.machines)
        there.pending("b", 14)
        await there.passes(60, lambda: len(there.machines()) == 2)
        await there.passes(60, lambda: PLANNED in there.annotations("pods", "b"))


@synchronous
async def test_other_nodes_are_labelled_when_a_node_cannot_be_patched(tmp_path: Path) -> None:
    """A policy forbids it."""
    async with world(tmp_path) as there, there.replica():
        refusing(there, "/nodes/node-i-000001", 403)
        there.pending("a", 14)
        there.pending("b", 14)
        await there.passes(60, lambda: len(there.machines()) == 2)
        for machine in there.machines():
            there.join(machine)
        await there.passes(60, lambda: ORDER in there.node("i-000002")["labels"])


@synchronous
async def test_other_nodes_are_labelled_when_an_instance_cannot_be_ended(tmp_path: Path) -> None:
    """One never joined, and the cloud protects it; another one comes."""
    faults = tuple(Fault("end", call, error="denied") for call in range(1, 2000))
    made = scenario(None, None, faults=faults)
    async with world(tmp_path, made, _two_zones()) as there, there.replica():
        there.pending("a")
        await there.passes(60, there.machines)
        there.time.now += 901
        await there.passes(60, lambda: len(there.machines()) == 2)
        there.join("i-000002", zone="b")
        await there.passes(60, lambda: ORDER in there.node("i-000002")["labels"])
        await there.passes(60, lambda: PLANNED in there.annotations("pods", "a"))


def _two_zones() -> AutoscalerConfig:
    return config(group(zones=("a", "b")))


@synchronous
async def test_event_has_the_clouds_sentence_when_an_order_is_denied(tmp_path: Path) -> None:
    """It says what to change."""
    faults = (Fault("launch", 1, error="denied"),)
    async with world(tmp_path, scenario(faults=faults)) as there, there.replica():
        there.pending("a")
        await there.passes(60, lambda: there.notes("FenkaNoScaleOut"))
        assert any("the account may not do this" in it for it in there.notes("FenkaNoScaleOut"))


@synchronous
async def test_pod_is_told_when_the_cloud_denies_to_be_read(tmp_path: Path) -> None:
    """Nothing is bought, and whoever waits sees why."""
    faults = tuple(Fault("instances", call, error="denied") for call in range(1, 200))
    async with world(tmp_path, scenario(faults=faults)) as there, there.replica():
        there.pending("a")
        await there.passes(60, lambda: there.notes("FenkaNoScaleOut"))
        assert "the account may not do this" in there.notes("FenkaNoScaleOut")[0]
        assert there.status().unserved


@synchronous
async def test_cloud_is_read_again_when_the_clock_was_set_back(tmp_path: Path) -> None:
    """By what is remembered, the next look would be due an hour later."""
    async with world(tmp_path) as there, there.replica():
        await there.passes(60, lambda: there.cloud().calls.get("offers"))
        there.time.now -= 3600
        calls = there.cloud().calls
        await there.passes(300, lambda: there.cloud().calls["instances"] > calls["instances"] + 1)
        await there.passes(300, lambda: there.cloud().calls["offers"] > calls["offers"] + 1)


@synchronous
async def test_pod_gets_a_node_when_others_vanish_during_every_plan(tmp_path: Path) -> None:
    """Pods that come and go all the time keep nobody from being served."""
    async with world(tmp_path) as there, there.replica() as replica:
        names = (f"short-{number}" for number in itertools.count())

        async def churn() -> None:
            old = [each["metadata"]["name"] for each in there.server.all("pods")]
            fresh = there.pending(next(names), 14)["metadata"]["uid"]
            for name in old:
                if name != "kept":
                    there.server.remove("pods", name, "default")
            pods = replica.cluster.pods.by_uid
            await until(lambda: len(pods) == 2 and fresh in pods)

        there.planner.during = churn
        there.pending(next(names), 14)
        kept = there.pending("kept", 14)["metadata"]["uid"]
        await there.passes(
            60, lambda: any(kept in each.slots[0].pods for each in there.live().values())
        )


def test_status_is_bounded_when_thousands_of_pods_are_unserved() -> None:
    """A ConfigMap has at most 1 MiB, and names and reasons are the tenants'."""
    names = [f"p-{number}-{'x' * 240}" for number in range(3000)]
    there = snapshot(pods=tuple(pod_json(name, uid=name) for name in names))
    status = status_of(there, {}, {name: f"0/1 groups help: {name}" for name in names})
    assert status.unserved
    assert len(msgspec.json.encode(status)) < 1 << 19


@synchronous
async def test_nothing_is_bought_while_an_order_cannot_be_read(tmp_path: Path) -> None:
    """It may have been asked for. The pod is told, and served once somebody has removed the entry."""
    async with world(tmp_path) as there:
        body = {"metadata": {"name": ORDERS_MAP, "namespace": NAMESPACE}, "data": {"t4-x": "{"}}
        there.server.put("configmaps", body)
        async with there.replica():
            there.pending("a")
            await there.passes(60, lambda: there.notes("FenkaNoScaleOut"))
            assert "order t4-x of ConfigMap fenka-orders" in there.notes("FenkaNoScaleOut")[0]
            assert not there.machines()
            there.server.put("configmaps", {**body, "data": {}})
            await there.passes(60, there.machines)


def test_case_is_valid_when_amounts_are_beyond_all_bounds() -> None:
    """A pod that names its node is there before anybody looks at it; nodes report what they like."""
    pending = pod_json("p", 4, uid="p")
    placed = pod_json("q", 4, uid="q", node="gpu")
    huge = {"cpu": "9223372036854775807", "x/y": "9223372036854775807", "memory": "9e30"}
    placed["spec"]["containers"][0]["resources"]["requests"] = huge
    node = elastic_node("gpu", 15079)
    node["status"]["allocatable"] |= {"x/z": "-1", "x/y": "9223372036854775807", "pods": "-1"}
    found = plan_case(snapshot(nodes=(node,), pods=(pending, placed)))
    check_case(found.case)


def test_pod_is_left_out_when_it_selects_by_a_label_of_cases() -> None:
    """No node has it, so that the pod would never fit what is bought for it."""
    pod = pod_json("p", 4, uid="p")
    pod["spec"]["nodeSelector"] = {"fenka.io/eligible-0": "true"}
    assert "fenka.io/eligible-" in plan_case(snapshot(pods=(pod,))).unserved["p"]


@synchronous
async def test_pods_are_served_when_the_cloud_does_not_answer_another_order(tmp_path: Path) -> None:
    """Neither other orders nor nodes that are taken back wait for that answer."""
    settings = config(group(labels={"is": "a"}), group("u", labels={"is": "u"}))
    offers = tuple(SimulatedOffer(name, "t4.x", "a", (Prices(4.0),)) for name in ("t4", "u"))
    async with world(tmp_path, Scenario(offers), settings) as there:
        there.silent = "t4"
        spot = elastic_node("spot", 15079, labels={CAPACITY: "spot", ORDER: "t4-old", GROUP: "t4"})
        spot["metadata"]["annotations"][RECLAIM_AT] = encode_time(there.time.now + 300)
        async with there.replica():
            for name in "au":
                pod = there.pending(name)
                there.server.put(
                    "pods", {**pod, "spec": {**pod["spec"], "nodeSelector": {"is": name}}}
                )
            await there.passes(60, lambda: len(there.orders()) == 2)
            await there.passes(60, there.machines)
            there.server.put("nodes", spot)
            tainted = lambda: there.server.get("nodes", "spot")["spec"].get("taints")  # noqa: E731
            await there.passes(60, tainted)
            assert len(there.machines()) == 1
            there.silent = ""
            there.over.set()
            await there.passes(60, lambda: len(there.machines()) == 2)
            assert there.most == 2


def test_group_of_two_types_keeps_that_of_the_highest_priority_when_both_exceed_its_max() -> None:
    """The dear type serves the pod of high priority, and the cheap one another pod."""
    card = NewCard(model="NVIDIA A10", memory_mib=23028)
    big = Shape(cpu_milli=4000, memory_mib=16000, cards=(card,))
    small = Shape(cpu_milli=4000, memory_mib=16000, cards=(T4_CARD,))
    settings = config(group(types=("small", "big"), max=1, shape=None, price=None))
    prices = {"small": 4.0, "big": 7.0}
    offers = [Offer(OfferKey("t4", it, "a", "on-demand"), price) for it, price in prices.items()]
    pods = pod_json("high", 20, uid="high"), pod_json("low", 14, uid="low")
    pods[0]["spec"]["priority"] = 1000
    shapes = {"small": small, "big": big}
    case = plan_case(snapshot(config=settings, offers=offers, shapes=shapes, pods=pods))
    narrower = within_most(case, make_plan(case.case, lambda: 1.0))
    assert narrower is not None
    placed = make_plan(narrower, lambda: 1.0).placements
    assert "default/high" in [each.request for each in placed]


@synchronous
async def test_pod_is_told_why_plans_fail_when_the_cloud_answers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the status, by an event and in `fenka why`, in place of what was true before; it is logged once.

    Once plans are made again, its node is bought.
    """
    faults = tuple(Fault("instances", call, error="denied") for call in range(1, 3))
    failures: list[str] = []

    async def fail() -> None:
        if len(failures) < 3:
            failures.append("the cluster cannot be planned for: it has no name")
            raise PlanFailed(failures[0])

    async with world(tmp_path, scenario(faults=faults)) as there, there.replica() as replica:
        there.planner.during = fail
        there.pending("a")
        await there.passes(60, lambda: "may not do this" in str(there.status().unserved))
        sentence = "nothing is bought: the cluster cannot be planned for: it has no name"
        await there.passes(60, lambda: there.status().unserved == {sentence: ["default/a"]})
        await there.passes(60, lambda: sentence in there.notes("FenkaNoScaleOut"))
        public = {"metadata": {"name": "fenka", "namespace": "kube-public"}}
        there.server.put("configmaps", {**public, "data": {"autoscalerNamespace": NAMESPACE}})
        async with there.server.api() as api:
            explained = await explain_pod(api, "default", "a", there.time.now)
        assert explained.scale_out == f"gets no new node: {sentence}"
        await there.passes(60, there.machines)
        await there.passes(60, lambda: not there.status().unserved)
        assert not replica.buyer.problem
    warnings = [each for each in caplog.messages if "cannot be planned for" in each]
    assert (len(failures), len(warnings)) == (3, 1)


@synchronous
async def test_new_pod_is_told_why_plans_fail_when_the_next_try_is_not_due(tmp_path: Path) -> None:
    """A plan that failed is tried again after 1, 2, 4 … 60 s."""
    tries: list[float] = []
    async with world(tmp_path) as there, there.replica():

        async def fail() -> None:
            tries.append(there.time.now)
            raise PlanFailed("no")

        there.planner.during = fail
        there.pending("a")
        await there.passes(400, lambda: len(tries) == 8)
        there.pending("b")
        both = {"nothing is bought: no": ["default/a", "default/b"]}
        await until(lambda: there.status().unserved == both)
        assert len(tries) == 8
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert all(
        pause >= least for pause, least in zip(pauses, (1, 2, 4, 8, 16, 32, 60), strict=True)
    )


@synchronous
async def test_problem_is_over_when_no_pod_waits_any_more(tmp_path: Path) -> None:
    """It was that of a plan for a pod that is deleted."""
    async with world(tmp_path) as there, there.replica() as replica:

        async def fail() -> None:
            raise PlanFailed("no")

        there.planner.during = fail
        there.pending("a")
        await there.passes(60, lambda: replica.loop.problem == "no")
        there.server.remove("pods", "a", "default")
        await there.passes(60, lambda: not replica.loop.problem and not there.status().unserved)


def test_status_has_no_pod_that_has_found_a_node_since() -> None:
    """It was bound before the next plan; a pod that leaves a node that is taken back still waits."""
    pods = tuple(pod_json(name, 4, uid=name, node="gpu" if name != "a" else "") for name in "abc")
    there = snapshot(pods=pods, evicted=frozenset("c"))
    assert status_of(there, {}, dict.fromkeys("abc", "no")).unserved == {
        "no": ["default/a", "default/c"]
    }


@synchronous
async def test_warning_is_logged_once_when_an_order_is_asked_for_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cloud does not answer for an hour, and is asked every two seconds."""
    faults = tuple(Fault("launch", call, error="unknown") for call in range(1, 11))
    async with world(tmp_path, scenario(faults=faults)) as there, there.replica():
        there.pending("a")
        await there.passes(60, there.machines)
        assert there.cloud().calls["launch"] == 11
    assert len([each for each in caplog.messages if "the cloud did not answer" in each]) == 1


def test_warnings_are_logged_when_they_change_and_forgotten_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Names are the tenants': of thousands only the last ones are remembered."""
    warnings = Warnings()
    for sentence in ("x", "x", "y", "x"):
        warnings.warn("a", sentence)
    assert caplog.messages == ["a: x", "a: y", "a: x"]
    for number in range(MAX_WARNED):
        warnings.warn(f"n{number}", "x")
    warnings.warn("a", "x")
    assert caplog.messages.count("a: x") == 3


@synchronous
async def test_each_pod_is_told_in_the_end_when_a_tenant_has_very_many(tmp_path: Path) -> None:
    """Of so many events at once some are dropped; namespaces take turns, and later passes write the rest."""
    async with world(tmp_path) as there:
        for number in range(BURST + 4):
            there.pending(f"p{number:03}", 15, namespace="many")
        there.pending("z", 15, namespace="one")
        async with there.replica():
            await there.passes(60, lambda: len(there.notes("FenkaNoScaleOut")) >= BURST)
            regarding = [each["regarding"]["name"] for each in there.server.all("events")]
            assert "z" in regarding
            await there.passes(60, lambda: len(there.notes("FenkaNoScaleOut")) == BURST + 5)


@synchronous
async def test_pod_is_told_when_orders_may_not_be_written(tmp_path: Path) -> None:
    """A right is missing, or the ConfigMap is full. What was refused is logged once, and tried again."""
    async with world(tmp_path) as there, there.replica() as replica:
        allowed = there.server.before
        body = {"metadata": {"name": ORDERS_MAP, "namespace": NAMESPACE}, "data": {}}
        there.server.put("configmaps", body)
        refusing(there, f"/configmaps/{ORDERS_MAP}", 403)
        there.pending("a")
        there.pending("huge", 1_000_000)
        await there.passes(60, lambda: len(there.status().unserved) == 2)
        by_pod = {pods[0]: why for why, pods in there.status().unserved.items()}
        assert by_pod["default/a"] == "nothing is bought: too long"
        assert by_pod["default/huge"].startswith("no node is bought for its request: 1024000000")
        await until(lambda: replica.loop.problem == "too long")
        there.server.before = allowed
        await there.passes(60, there.machines)
        await there.passes(60, lambda: len(there.status().unserved) == 1)


def test_status_names_the_schedulers_that_are_served() -> None:
    """So that a dry run leaves out the pods of others."""
    served = snapshot(schedulers=frozenset({"mine", "default-scheduler"}))
    assert status_of(served, {}, {}).schedulers == ("default-scheduler", "mine")
