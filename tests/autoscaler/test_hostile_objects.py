"""Tests that nothing that a tenant writes makes the planning case invalid, or ends a pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.autoscaler.demand import RULE_LABEL, pending_demand
from fenka.autoscaler.inputs import decode_case
from fenka.autoscaler.loop import status_of
from fenka.autoscaler.node_registration import node_changes, planned_annotations
from fenka.autoscaler.node_shapes import new_shapes, new_unhelpful_offers
from fenka.autoscaler.orders import advance
from fenka.autoscaler.plan_case import plan_case, unserved_pods
from fenka.autoscaler.reclaim import decide_reclaims, evicted_demand
from fenka.autoscaler.scale_in import Marked, decide_scale_in
from fenka.autoscaler.snapshot import Shape, Snapshot
from fenka.autoscaler.turns import MAX_AFFINITIES
from fenka.autoscaler.watch import ElasticPod
from fenka.cloud.config import ScaleIn
from fenka.cluster.autoscaling import (
    GROUP,
    ORDER,
    AutoscalerStatus,
    ElasticNodeStatus,
    OrderRecord,
    Slot,
    encode_time,
)
from fenka.cluster.state import ClusterState
from fenka.core.nodes.case import BuyLimits
from fenka.core.nodes.plan import make_plan
from fenka.core.nodes.problem import Problem
from fenka.dialects.base import Dialect
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from tests.autoscaler.hostile import hostile_pods
from tests.autoscaler.snapshots import NOW, T4_CARD, config, elastic_node, instance, snapshot
from tests.builders import T4_MIB, Json, gang_labels, on_card, pod_json, unschedulable

_TAINTS = st.sampled_from([(), (), ("fenka.io/reclaimed",), ("fenka.io/ending",)])


def _world(
    hostile: list[Json],
    slots: tuple[Slot, ...] = (),
    dialects: tuple[Dialect, ...] = DIALECTS,
    taints: Sequence[Json] = (),
) -> Snapshot:
    """A node with one T4 that is used, an idle one, well-formed pods and others."""
    labels = {GROUP: "t4", ORDER: "t4-1"}
    bought = [
        elastic_node(name, T4_MIB, provider_id=f"sim:///a/i-{number}", labels=labels)
        for number, name in enumerate(("gpu", "idle"), 1)
    ]
    bought[0]["spec"]["taints"] = list(taints)
    good = (
        pod_json("good", 14, uid="good"),
        pod_json("runs", 4, uid="runs", node="gpu", annotations=on_card(0, 4)),
    )
    record = OrderRecord("t4", "t4.x", "a", "on-demand", slots, "asked", 4.0, NOW)
    made = snapshot(
        nodes=tuple(bought),
        pods=(*good, *hostile),
        orders={"t4-1": record} if slots else {},
        instances=[instance(name, launched_at=NOW - 9999) for name in ("i-1", "i-2")],
        config=config(scale_in=ScaleIn(mode="repack")),
        status=AutoscalerStatus(
            nodes={
                "gpu": ElasticNodeStatus("t4", "in use", NOW - 9999),
                "idle": ElasticNodeStatus("t4", "idle", NOW - 9999),
            }
        ),
        shapes={"t4.x": Shape(cpu_milli=4000, memory_mib=16000, cards=(T4_CARD,))},
    )
    state = ClusterState(made.nodes.values(), made.pods.values(), dialects)
    evicted = evicted_demand(made)
    return replace(made, state=state, evicted=evicted)


@pytest.mark.parametrize(
    "limits",
    [
        {"aliyun.com/gpu-mem": "1000000"},
        {"aliyun.com/gpu-mem": "9223372036854775807"},
        {"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "1000000"},
        {"nvidia.com/gpu": "1000000"},
        {"aliyun.com/gpu-mem": "4", "aliyun.com/gpu-core.percentage": "1000"},
    ],
)
def test_impossible_request_is_unserved_and_others_are_planned_for(limits: Json) -> None:
    """Of 1000000 units of 1 GiB: 1024000000 MiB, while no card has more than 16 TiB."""
    huge = pod_json("huge", uid="huge")
    huge["spec"]["containers"] = [{"name": "c", "resources": {"limits": limits}}]
    found = plan_case(_world([huge]))
    case = decode_case(msgspec.json.encode(found.case))
    assert [each.name for each in case.requests] == ["default/good"]
    assert found.unserved["huge"]


def test_case_is_valid_when_pods_record_more_than_any_card_has() -> None:
    """They name their node themselves; what they hold of a card ends with the card."""
    placed = [
        pod_json(name, 1_000_000, uid=name, node="gpu", annotations=on_card(0, 1_000_000))
        for name in "ab"
    ]
    found = plan_case(_world(placed))
    case = decode_case(msgspec.json.encode(found.case))
    assert [card.held_mib for card in case.nodes[0].cards] == [T4_MIB]


def test_pass_goes_on_when_a_planned_pod_is_changed_to_what_is_not_understood() -> None:
    """Its node has come, it is still pending, and now it has an annotation of HAMi's that is not served."""
    pod = pod_json("h", uid="h", annotations={"nvidia.com/use-gputype": "T4"})
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    pod["spec"]["containers"] = [{"name": "c", "resources": {"limits": limits}}]
    pod["status"] |= unschedulable("0/1 nodes are available")
    slot = Slot(state="offering", instance="i-1", node="gpu", pods=("h",), offering_at=NOW - 100)
    assert new_unhelpful_offers(_world([pod], (slot,), WITH_HAMI)) == []


@pytest.mark.parametrize(("percent", "nodes"), [("71", 0), ("72", 1), ("", 1)])
def test_percent_of_a_card_is_planned_for_as_the_scheduler_counts_it(
    percent: str, nodes: int
) -> None:
    """Of a T4's 15079 MiB 4308 are held: 71 % are 10706, 72 % are 10856, and 10771 are free.

    Without an amount it is all of a card.
    """
    pod = pod_json("h", uid="h")
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "20"}
    limits |= {"nvidia.com/gpumem-percentage": percent} if percent else {}
    pod["spec"]["containers"] = [{"name": "c", "resources": {"limits": limits}}]
    there = _world([pod], (), WITH_HAMI)
    pods = {uid: it for uid, it in there.pods.items() if uid != "good"}
    there = replace(there, pods=pods, nodes={"gpu": there.nodes["gpu"]})
    case = decode_case(msgspec.json.encode(plan_case(there).case))
    plan = make_plan(case, lambda: 1.0)
    assert sum(each.count for each in plan.nodes) == nodes
    assert [each.request for each in plan.placements] == ["default/h"]


@given(st.data())
def test_no_pod_makes_the_case_invalid_or_ends_a_pass(data: st.DataObject) -> None:
    """Whatever is pending, runs, or is planned for a node that comes or has come."""
    names = [f"h{number}" for number in range(data.draw(st.integers(1, 3)))]
    hostile = [data.draw(hostile_pods(name)) for name in names]
    states: Any = data.draw(st.sampled_from([(), ("asked",), ("offering",), ("asked", "offering")]))
    slots = tuple(
        Slot(
            state=state,
            instance="i-1" if state == "offering" else "",
            node="gpu" if state == "offering" else "",
            pods=tuple(names),
            cards=tuple(data.draw(st.sampled_from([(), (0,), (0, 0), (5,)])) for _ in names),
            offering_at=NOW - 100 if state == "offering" else None,
        )
        for state in states
    )
    dialects = data.draw(st.sampled_from([DIALECTS, WITH_HAMI]))
    taints = [{"key": key, "effect": "NoSchedule"} for key in data.draw(_TAINTS)]
    there = _world(hostile, slots, dialects, taints)
    found = plan_case(there)
    assert decode_case(msgspec.json.encode(found.case)).requests == found.case.requests
    assert "default/good" in [each.name for each in found.case.requests]
    plan = make_plan(found.case, lambda: 0.0)
    status_of(there, {}, unserved_pods(found, plan))
    advance(there)
    decide_reclaims(there)
    decide_scale_in(there, {})
    decide_scale_in(there, {"gpu": Marked(NOW - 99, frozenset({"runs", *names}))})
    node_changes(there)
    planned_annotations(there)
    new_unhelpful_offers(there)
    new_shapes(there)


def test_namespaces_take_turns_when_more_pods_wait_than_are_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of six: a gang of four is whole or waits, and nobody keeps others out by number, age or priority."""
    monkeypatch.setattr("fenka.autoscaler.demand.MAX_PODS", 6)
    gang = [
        pod_json(f"g{it}", 4, uid=f"g{it}", namespace="gang", labels=gang_labels("g", 4))
        for it in range(4)
    ]
    many = [
        pod_json(f"m{it}", 4, uid=f"m{it}", namespace="many", priority=1000 - it)
        for it in range(20)
    ]
    one = pod_json("one", 4, uid="one", namespace="one")
    one["metadata"]["creationTimestamp"] = "2027-01-15T08:00:00Z"
    there = snapshot(pods=(*many, *gang, one))
    found = plan_case(there)
    assert {each.name for each in found.case.requests} == {
        *(f"gang/g{it}" for it in range(4)),
        *("many/m0", "one/one"),
    }
    assert found.unserved["m1"] == "6 pods are planned for at once, and others come first"
    # Once these have nodes, others follow.
    slots = tuple(Slot(state="asked", pods=(uid,)) for uid in found.pods.values())
    record = OrderRecord("t4", "t4.x", "a", "on-demand", slots, "asked", 4.0, NOW)
    later = plan_case(replace(there, orders={"t4-1": record}))
    assert [each.name for each in later.case.requests] == [f"many/m{it}" for it in range(1, 7)]
    # The orders remember all of these pods, and may not grow without end.
    monkeypatch.setattr("fenka.autoscaler.demand.MAX_PLANNED", 8)
    last = plan_case(replace(there, orders={"t4-1": record}))
    assert [each.name for each in last.case.requests] == ["many/m1", "many/m2"]


def test_others_are_planned_for_when_a_tenant_writes_very_many_affinities() -> None:
    """Each is judged for each node."""
    pods = [pod_json(f"p{it}", 4, uid=f"p{it}") for it in range(MAX_AFFINITIES + 2)]
    for pod in pods:
        name = pod["metadata"]["name"]
        terms = [{"matchExpressions": [{"key": name, "operator": "DoesNotExist"}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        pod["spec"]["affinity"] = {"nodeAffinity": required}
    found = plan_case(snapshot(pods=(*pods, pod_json("good", 14))))
    assert len(found.case.requests) == MAX_AFFINITIES + 1
    assert "default/good" in [each.name for each in found.case.requests]
    assert set(found.unserved.values()) == {
        "100 node affinities are planned for at once, and others come first"
    }


def affine(pod: Json, key: str, operator: str = "DoesNotExist") -> Json:
    """Return the pod with a node affinity to a label."""
    terms = [{"matchExpressions": [{"key": key, "operator": operator}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod["spec"]["affinity"] = {"nodeAffinity": required}
    return pod


def test_namespaces_get_turns_for_node_affinities_when_one_writes_very_many() -> None:
    """The tenant's pods are older and listed first. Another one's only affinity is planned for."""
    pods = [
        affine(pod_json(f"p{number}", 4, uid=f"p{number}"), f"p{number}")
        for number in range(2 * MAX_AFFINITIES)
    ]
    for pod in pods:
        pod["metadata"] |= {"creationTimestamp": "2020-01-01T00:00:00Z"}
    other = affine(pod_json("other", 4, uid="other"), "other")
    other["metadata"] |= {"namespace": "ben", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = plan_case(snapshot(pods=(*pods, other)))
    assert "ben/other" in [request.name for request in found.case.requests]
    assert len(found.case.requests) == MAX_AFFINITIES


def test_affinities_that_no_group_satisfies_take_no_others_place() -> None:
    """Whoever writes them is told that, not that others come first."""
    impossible = [
        affine(pod_json(f"p{number}", 4, uid=f"p{number}"), f"p{number}", "Exists")
        for number in range(MAX_AFFINITIES)
    ]
    own = [
        affine(pod_json(f"own{number}", 4, uid=f"own{number}"), f"x{number}") for number in (1, 2)
    ]
    found = plan_case(snapshot(pods=(*impossible, *own)))
    assert {request.name for request in found.case.requests} == {"default/own1", "default/own2"}
    assert set(found.unserved.values()) == {"no group has nodes that its node affinity admits"}


@pytest.mark.parametrize("running", [0, 1])
def test_namespaces_get_turns_for_the_limits_of_all_tenants_together(running: int) -> None:
    """The tenant's pods are older and more. What it has on bought nodes counts, too."""
    many = [pod_json(f"p{number}", 14, uid=f"p{number}") for number in range(6)]
    for pod in many:
        pod["metadata"] |= {"namespace": "many", "creationTimestamp": "2020-01-01T00:00:00Z"}
    few = pod_json("own", 14, uid="own")
    few["metadata"] |= {"namespace": "few", "creationTimestamp": "2026-01-01T00:00:00Z"}
    nodes: tuple[Json, ...] = ()
    if running:
        nodes = (elastic_node("gpu", T4_MIB, labels={ORDER: "t4-1"}),)
        many[0] |= pod_json("p0", 14, uid="p0", node="gpu", annotations=on_card(0, 14))
        many[0]["metadata"] |= {"namespace": "many"}
    world = snapshot(
        nodes=nodes,
        pods=(*many, few),
        config=config(limits=BuyLimits(nodes=2)),
        instances=(instance(),) if running else (),
    )
    plan = make_plan(plan_case(world).case, lambda: 5.0)
    served = {pod.request.partition("/")[0] for pod in plan.placements}
    assert served == {"few"} if running else served == {"few", "many"}


@pytest.mark.parametrize(
    ("minutes", "status", "served"),
    [
        (31, {}, {"few/own"}),
        (29, {}, {"few/own", "many/next"}),
        (31, {"phase": "Running"}, {"few/own", "many/next"}),
        (31, {"containerStatuses": [{"containerID": "c"}]}, {"few/own", "many/next"}),
    ],
)
def test_nothing_is_bought_for_a_namespace_whose_pods_start_on_none_of_its_nodes(
    minutes: int, status: Json, served: set[str]
) -> None:
    """Three nodes are enough to see that. Others are served, and the namespace when its pods start."""
    began = encode_time(NOW - 60 * minutes)
    nodes = [elastic_node(f"n{number}", T4_MIB, labels={ORDER: "t4-1"}) for number in range(3)]
    pods = []
    for number in range(3):
        pod = pod_json(f"p{number}", 14, uid=f"p{number}", node=f"n{number}")
        pod["metadata"] |= {"namespace": "many", "annotations": on_card(0, 14)}
        pod["status"] |= {"phase": "Pending", "startTime": began, **status}
        pods.append(pod)
    for namespace, name in (("many", "next"), ("few", "own")):
        waiting = pod_json(name, 14, uid=name)
        waiting["metadata"] |= {"namespace": namespace}
        pods.append(waiting)
    found = plan_case(snapshot(nodes=tuple(nodes), pods=tuple(pods)))
    assert {request.name for request in found.case.requests} == served
    if "many/next" not in served:
        assert "3 nodes were bought for pods of this namespace" in found.unserved["next"]


def test_rules_are_few_whatever_pods_request_and_however_they_name_their_containers() -> None:
    """A node of mode cgpu shares memory, not compute: of all these pods there are two kinds."""
    node = elastic_node("gpu", T4_MIB, labels={"ack.node.gpu.schedule": "cgpu"})
    pods = [pod_json(f"p{it}", 1 + it % 14, uid=f"p{it}") for it in range(28)]
    for number, pod in enumerate(pods):
        container = pod["spec"]["containers"][0]
        container["name"] = f"c{number}"
        if number % 2:
            container["resources"]["limits"]["aliyun.com/gpu-core.percentage"] = "20"
    case = plan_case(snapshot(nodes=(node,), pods=tuple(pods))).case
    labels = {key for each in (*case.groups, *case.nodes) for key in each.labels}
    assert len([key for key in labels if key.startswith(RULE_LABEL)]) == 1


class _CountedPods(dict[str, ElasticPod]):
    """Pods that count how often all of them are looked at."""

    reads = 0

    def values(self) -> Any:
        self.reads += 1
        return super().values()

    def items(self) -> Any:
        self.reads += 1
        return super().items()


def test_pods_are_read_as_often_whatever_the_number_of_gangs() -> None:
    """For each pod of a gang all pods were: a thousand gangs held back the leader for half a minute."""
    reads = []
    for gangs in (2, 20):
        pods = tuple(
            pod_json(f"p{it}", 4, uid=f"p{it}", labels=gang_labels(f"g{it // 2}", 2))
            for it in range(2 * gangs)
        )
        there = snapshot(pods=pods)
        counted = _CountedPods(there.pods)
        assert len(pending_demand(replace(there, pods=counted)).requests) == 2 * gangs
        reads.append(counted.reads)
    assert reads[0] == reads[1]


def test_resources_that_no_machine_has_cost_nothing() -> None:
    """A pod may name thousands of them. Of a host only CPU, memory and pods are counted then."""
    hostile = pod_json("h", 4, uid="h")
    names = {f"x.io/r{number}": "1" for number in range(200)}
    hostile["spec"]["containers"][0]["resources"]["requests"] |= names
    case = plan_case(_world([hostile])).case
    assert {len(each.host) for each in Problem(case).types} == {3}
    plan = make_plan(case, lambda: 0.0)
    assert [each.request for each in plan.placements] == ["default/good"]
    assert plan.unserved[0].why.startswith("0/1 groups help: 1 with too few x.io/r")
