"""Pods and nodes as the scheduler keeps them: smaller, and the same for all that it decides."""

import msgspec
import pytest

from fenka.cluster.compact import CompactNode, CompactPod
from fenka.cluster.eligibility import ineligibility_reasons
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_groups import group_key
from fenka.cluster.recent import MAX_SHARED_BYTES
from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare
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
