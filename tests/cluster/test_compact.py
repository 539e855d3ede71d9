"""Pods and nodes as the scheduler keeps them: smaller, and the same for all that it decides."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.compact import MAX_SHARED_TEXT, CompactNode, CompactPod
from fenka.cluster.mappings import MAX_SHARED_BYTES, SHARED
from fenka.cluster.node_admission import ineligibility_reasons
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pending_queue import is_open, is_unplaced
from fenka.cluster.pod_groups import group_key
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare, resize_records
from fenka.dialects.registry import WITH_HAMI
from tests.builders import T4_MIB, Json, node_json, on_card, pod, pod_json

NODE = node_json("n", *[T4_MIB] * 4, annotations={"fenka.io/cordoned": "3", "other": "x" * 5000})


def compact(sent: Json) -> CompactPod:
    """Return the pod as the informer keeps it."""
    return msgspec.json.decode(msgspec.json.encode(sent), type=CompactPod)


def requesting(limits: Json, annotations: Json, labels: Json | None = None) -> Json:
    """Return a bound pod of one container."""
    return pod("p", limits, node="n", annotations=annotations, labels=labels or {})


HOLDING: list[Json] = [
    requesting({gpushare.MEMORY: 4}, on_card(1, 4)),
    requesting(
        {gpushare.MEMORY: 4},
        {gpushare.ALLOCATION: '{"0":{"1":2,"2":2}}', **on_card(1, 4)},
        {gpushare.COUNT: "2"},
    ),
    requesting(
        {"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 8},
        {"tencent.com/predicate-gpu-idx-0": "2", "tencent.com/vcuda-core-limit": "50"},
    ),
    requesting({"nvidia.com/gpu": 1}, {"fenka.io/whole-cards": '{"main":[2]}'}),
    requesting(
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096},
        {"hami.io/vgpu-devices-allocated": "GPU-n-2,NVIDIA,4096,0:;"},
    ),
    requesting({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096}, {"nvidia.com/numa-bind": "true"}),
    requesting({gpushare.MEMORY: 4}, {gpushare.IDX: "seven"}),
    requesting({gpushare.MEMORY: 4}, {}),
    requesting({"cpu": 1}, on_card(1, 4)),
]


@pytest.mark.parametrize("sent", HOLDING)
def test_allocation_is_that_of_the_whole_objects_when_they_are_compact(sent: Json) -> None:
    """Of every dialect, readable or not: the annotations that a dialect reads are kept."""
    states = [
        ClusterState(
            [msgspec.convert(NODE, kinds[0])], [msgspec.convert(sent, kinds[1])], WITH_HAMI
        )
        for kinds in ((Node, Pod), (CompactNode, CompactPod))
    ]
    whole, small = (state.allocation(sent["metadata"]["uid"]) for state in states)
    assert states[0].shared_nodes() == states[1].shared_nodes()
    assert (whole is None) is (small is None)
    if whole is not None and small is not None:
        assert (whole.placements, whole.error) == (small.placements, small.error)
        assert whole.pod.demand().error == small.pod.demand().error


def test_fields_that_decide_about_a_pod_are_kept() -> None:
    """Its rules for nodes, its gang, its position, and what kube-scheduler says of it."""
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available",
    }
    sent = pod_json(
        "p",
        4,
        priority=7,
        labels={"pod-group.scheduling.sigs.k8s.io/name": "g"},
        status={"conditions": [{"type": "Initialized", "status": "True"}, unschedulable]},
    )
    sent["spec"] |= {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "schedulingGates": [{"name": "fenka.io/queue"}],
        "activeDeadlineSeconds": 60,
        "terminationGracePeriodSeconds": 5,
    }
    sent["metadata"]["ownerReferences"] = [{"kind": "Job", "controller": True}]
    whole, small = msgspec.convert(sent, Pod), compact(sent)
    node = msgspec.convert(NODE, CompactNode)
    assert small.unschedulable == whole.unschedulable == "0/1 nodes are available"
    assert group_key(small) == group_key(whole) == "default/g"
    assert ineligibility_reasons(small, node) == ineligibility_reasons(
        whole, msgspec.convert(NODE, Node)
    )
    assert small.metadata == whole.metadata
    for name in set(whole.spec.__struct_fields__) - {"containers"}:
        assert getattr(small.spec, name) == getattr(whole.spec, name), name
    assert small.request == whole.request


def test_time_of_the_end_is_kept_when_the_pod_has_finished() -> None:
    """Its namespace is charged until then."""
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    sent = pod("p", {gpushare.MEMORY: 4}, phase="Succeeded", status={"conditions": [ready]})
    assert compact(sent).ended_at == "2026-01-01T00:00:00Z"


def test_annotations_are_dropped_when_no_dialect_reads_them() -> None:
    """A tenant may write 256 KiB on each of thousands of pods."""
    large = {"example.com/notes": "x" * 200_000, **on_card(1, 4)}
    assert (
        "example.com/notes"
        not in compact(requesting({gpushare.MEMORY: 4}, large)).metadata.annotations
    )
    assert compact(requesting({"cpu": 1}, large)).metadata.annotations == {}
    assert "other" not in msgspec.convert(NODE, CompactNode).metadata.annotations


def test_parts_are_one_object_when_they_are_equal() -> None:
    """Pods of one workload differ by little."""
    first, second = (
        compact({**requesting({gpushare.MEMORY: 4}, {}, {"app": "a"}), "status": {"message": name}})
        for name in ("x", "y")
    )
    assert first is not second
    assert first.spec.containers is second.spec.containers
    assert first.metadata.labels is second.metadata.labels
    assert first.demand() is second.demand()


def test_parts_are_not_kept_when_they_are_long() -> None:
    """The table outlives the pods."""
    labels = {f"label-{number}": "x" * 60 for number in range(MAX_SHARED_BYTES // 60)}
    first, second = (compact(requesting({gpushare.MEMORY: 4}, {}, labels)) for _ in range(2))
    assert first.metadata.labels == second.metadata.labels
    assert first.metadata.labels is not second.metadata.labels


def with_status(*types: str, **given: Any) -> Json:
    """Return a pod whose status has conditions of these types."""
    conditions = [{"type": each, "status": "False", "reason": "Unschedulable"} for each in types]
    return pod("p", {gpushare.MEMORY: 4}, status={"conditions": conditions}, **given)


ALL = ("Initialized", "PodScheduled", "Ready", "ContainersReady")


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        # what kube-scheduler says of a pending pod
        (with_status(*ALL), ["PodScheduled"]),
        # nothing of one that runs
        (with_status(*ALL, node="n"), []),
        # when one that has finished stopped being ready
        (with_status(*ALL, node="n", phase="Succeeded"), ["Ready"]),
        (with_status(*ALL, phase="Failed"), ["Ready"]),
    ],
)
def test_conditions_are_kept_when_the_scheduler_reads_them(sent: Json, kept: list[str]) -> None:
    """Thousands of pods change their conditions all the time."""
    assert [each.type for each in compact(sent).status.conditions] == kept


def test_node_keeps_what_decides_whether_it_is_offered() -> None:
    """Its readiness, taints and labels; its address, which a screen shows; no capacity."""
    sent = node_json(
        "n", T4_MIB, labels={"zone": "a"}, taints=[{"key": "k", "effect": "NoSchedule"}]
    )
    sent["status"]["addresses"] = [
        {"type": kind, "address": address}
        for kind, address in (("Hostname", "n"), ("InternalIP", "10.0.0.1"), ("InternalIP", "::1"))
    ]
    sent["status"]["conditions"] += [{"type": "DiskPressure", "status": "False"}]
    small, whole = msgspec.convert(sent, CompactNode), msgspec.convert(sent, Node)
    assert [each.type for each in small.status.conditions] == ["Ready"]
    assert (small.ready, small.spec) == (whole.ready, whole.spec)
    assert small.metadata.labels == {"zone": "a"}
    assert small.status.allocatable == whole.status.allocatable
    assert (small.status.capacity, small.address) == ({}, whole.address)


@pytest.mark.parametrize("length", [1, MAX_SHARED_TEXT, MAX_SHARED_TEXT + 1])
def test_names_are_shared_when_they_are_short(length: int) -> None:
    """Two versions of one pod have one name; a long one of a tenant is not kept."""
    first, second = (compact(pod("x" * length, {gpushare.MEMORY: 4})) for _ in range(2))
    assert first.metadata.name == second.metadata.name == "x" * length
    # Python itself shares texts of one character.
    assert (first.metadata.name is second.metadata.name) is (length <= MAX_SHARED_TEXT)


def test_texts_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants choose labels' values: the table does not grow with all that were ever used."""
    texts: dict[object, object] = {}
    monkeypatch.setattr("fenka.cluster.compact._TEXTS", texts)
    for number in range(SHARED + 100):
        compact(pod("p", {gpushare.MEMORY: 1}, labels={"run": str(number)}))
    assert len(texts) <= SHARED + 10
    last = compact(pod("p", {gpushare.MEMORY: 1}, labels={"run": str(number)}))
    assert last.metadata.labels == {"run": str(number)}


def test_demand_is_not_kept_with_a_bound_pod() -> None:
    """It is seldom read again; a pending pod is evaluated often."""
    bound, pending = compact(HOLDING[0]), compact(pod("p", {gpushare.MEMORY: 4}))
    assert bound.demand().parts == pending.demand().parts
    assert getattr(bound, "_demand", None) is None
    assert getattr(pending, "_demand", None) is pending.demand()


TEXT = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
MAPPING = st.dictionaries(TEXT, TEXT, max_size=4)


@given(
    labels=MAPPING,
    selector=MAPPING,
    annotations=st.dictionaries(
        st.sampled_from([gpushare.IDX, gpushare.ALLOCATION, "fenka.io/cards", "other"]), TEXT
    ),
    amounts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    on=st.sampled_from(["", "n"]),
    phase=st.sampled_from(["Pending", "Running", "Succeeded"]),
    gates=st.lists(st.sampled_from(["fenka.io/queue", "quota"]), max_size=2, unique=True),
)
def test_compact_pod_decides_as_the_whole_one(
    *,
    labels: dict[str, str],
    selector: dict[str, str],
    annotations: dict[str, str],
    amounts: list[int],
    on: str,
    phase: str,
    gates: list[str],
) -> None:
    """Whatever its fields are: request, gang, gates, state and rules for nodes are equal."""
    sent = pod_json("p", *amounts, labels=labels, annotations=annotations, node=on, phase=phase)
    sent["spec"] |= {
        "nodeSelector": selector,
        "schedulingGates": [{"name": gate} for gate in gates],
    }
    whole, small = msgspec.convert(sent, Pod), compact(sent)
    assert (small.metadata.labels, small.spec.node_selector) == (labels, selector)
    assert small.demand().amounts == whole.demand().amounts
    assert small.demand().parts == whole.demand().parts
    assert (small.finished, small.full_name, small.path) == (
        whole.finished,
        whole.full_name,
        whole.path,
    )
    assert [small.gated_by(gate) for gate in ("fenka.io/queue", "quota")] == [
        whole.gated_by(gate) for gate in ("fenka.io/queue", "quota")
    ]
    node = msgspec.convert(NODE, Node)
    assert ineligibility_reasons(small, node) == ineligibility_reasons(whole, node)
    assert is_open(small) == is_open(whole)
    assert is_unplaced(small) == is_unplaced(whole)
    assert time_limit_s(small) == time_limit_s(whole)


def test_resize_is_kept_in_few_bytes() -> None:
    """A tenant may write long ones. Only short requests are compared; of the others presence counts."""
    long = "x" * 10_000
    written = {
        resize_records.REQUEST: long,
        resize_records.STATUS: long,
        resize_records.REFUSED: long,
    }
    limits = {gpushare.MEMORY: 4}
    kept = compact(requesting(limits, written)).metadata.annotations
    assert dict(kept.items()) == dict.fromkeys(written, "")
    kept = compact(requesting(limits, {resize_records.REQUEST: "gpu-mem=6"})).metadata.annotations
    assert dict(kept.items()) == {resize_records.REQUEST: "gpu-mem=6"}
