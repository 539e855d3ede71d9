"""A pod's request is parsed once and kept with the pod."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.dialects import ack, gpu_manager, hami
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord, SharedNode
from fenka.dialects.gpushare import MEMORY
from fenka.dialects.registry import DIALECTS, WITH_HAMI, detect
from tests.builders import GIB, a_node
from tests.fakes.evaluators import ComparedEvaluator


def a_pod(*containers: dict[str, Any], inits: tuple[dict[str, Any], ...] = ()) -> Pod:
    """Return a pod of containers with these limits."""

    def spec(limits: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
        return [{"name": f"c{i}", "resources": {"limits": it}} for i, it in enumerate(limits)]

    spec_ = {"containers": spec(containers), "initContainers": spec(inits)}
    return msgspec.convert({"spec": spec_}, Pod)


def test_request_is_detected_once_when_it_is_read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filter, queue, binder and screens all read the same object."""
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return detect(*arguments)

    monkeypatch.setattr("fenka.cluster.objects.detect", counted)
    pod = a_pod({"aliyun.com/gpu-mem": "1234"})
    for _ in range(3):
        assert pod.demand(DIALECTS).dialect is ack
        assert len(pod.demand(DIALECTS).parts) == 1
    assert calls == 1


def test_demand_depends_on_the_dialects_when_only_one_set_has_hami() -> None:
    """A scheduler without --hami does not read HAMi's names."""
    pod = a_pod({"nvidia.com/gpumem": "4096", "nvidia.com/gpu": "1"})
    assert pod.demand(WITH_HAMI).dialect is hami
    assert pod.demand(DIALECTS).dialect is not hami


@pytest.mark.parametrize(
    ("containers", "amounts"),
    [
        (({},), {}),
        (({"aliyun.com/gpu-mem": "4"}, {"aliyun.com/gpu-mem": "3"}), {"aliyun.com/gpu-mem": 7}),
        (({"nvidia.com/gpu": 2},), {"nvidia.com/gpu": 2}),
    ],
)
def test_amounts_are_those_of_the_kubelet(
    containers: tuple[dict[str, Any], ...], amounts: dict[str, int]
) -> None:
    """The sum over containers of each resource of the dialect."""
    pod = a_pod(*containers)
    assert pod.demand().amounts == amounts
    assert pod.demand().requests_gpu is bool(amounts)
    assert all(pod.amount(name) == amount for name, amount in amounts.items())


def test_demand_names_its_error_when_the_request_cannot_be_read() -> None:
    """Each reader receives it; what only counts reads 0."""
    pod = a_pod({"aliyun.com/gpu-mem": "4", "tencent.com/vcuda-memory": "16"})
    demand = pod.demand()
    assert demand.requests_gpu
    assert demand.error
    for _ in range(2):
        with pytest.raises(InvalidRecord, match=r"."):
            _ = demand.parts
        with pytest.raises(InvalidRecord, match=r"."):
            _ = demand.amounts
    assert demand.amount("aliyun.com/gpu-mem") == 0
    assert a_pod({"aliyun.com/gpu-mem": "?"}).amount("aliyun.com/gpu-mem") == 0


def test_amount_is_the_peak_when_an_init_container_requests_more() -> None:
    """Init containers run before the others."""
    pod = a_pod({"nvidia.com/gpu": 1}, inits=({"nvidia.com/gpu": 2},))
    assert pod.amount("nvidia.com/gpu") == 2
    assert pod.amount("aliyun.com/gpu") == 0


def test_demand_is_the_same_object_when_a_new_version_requests_the_same() -> None:
    """Most changes of a pod are of its status."""
    sent = {"spec": {"containers": [{"name": "c", "resources": {"limits": {MEMORY: "4"}}}]}}
    first, second = (
        msgspec.convert({**sent, "status": {"phase": phase}}, Pod)
        for phase in ("Pending", "Running")
    )
    assert first.demand() is second.demand()


@pytest.mark.parametrize(
    ("limits", "metadata"),
    [
        ({MEMORY: "6"}, {}),
        ({MEMORY: "4"}, {"labels": {"aliyun.com/gpu-count": "2"}}),
    ],
)
def test_demand_is_another_when_the_pod_requests_something_else(
    limits: dict[str, str], metadata: dict[str, Any]
) -> None:
    """Labels count as far as a dialect reads them."""
    other = msgspec.convert(
        {
            "metadata": metadata,
            "spec": {"containers": [{"name": "c0", "resources": {"limits": limits}}]},
        },
        Pod,
    )
    assert a_pod({MEMORY: "4"}).demand().parts != other.demand().parts


def test_options_are_given_to_the_dialect_when_they_are_annotations() -> None:
    """A dialect names them all in OPTIONS."""
    spec = {
        "containers": [
            {
                "name": "c",
                "resources": {
                    "limits": {"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "8"}
                },
            }
        ]
    }
    annotations = {"tencent.com/vcuda-core-limit": "50"}
    pod = msgspec.convert({"metadata": {"annotations": annotations}, "spec": spec}, Pod)
    assert [part.burst_percent for part in pod.demand().parts] == [50]


def a_shared_node(*sizes: int, unit_mib: int = GIB) -> SharedNode:
    """Return node n with cards of these sizes."""
    shared = ClusterState([a_node("n", *sizes, unit_mib=unit_mib)]).shared_node("n")
    assert shared is not None
    return shared


@pytest.mark.parametrize(
    ("limits", "unit_mib", "expected"),
    [
        # the dialect's own units, whatever the node's
        ({MEMORY: "4"}, GIB, 4),
        ({MEMORY: "4"}, 1, 4),
        # gpu-manager's are of 256 MiB: 8 * 256 = 2,048 MiB are 2 units of 1,024, or 2,048 of 1
        ({gpu_manager.CORE: "20", gpu_manager.MEMORY: "8"}, GIB, 2),
        ({gpu_manager.CORE: "20", gpu_manager.MEMORY: "8"}, 1, 2048),
        # HAMi's are MiB, of each of two cards
        ({hami.COUNT: "2", hami.MEMORY: "2048"}, GIB, 4),
        ({hami.COUNT: "1", hami.MEMORY: "3072"}, GIB, 3),
        # one and a half units
        ({hami.COUNT: "1", hami.MEMORY: "1536"}, GIB, 1.5),
        # a whole card of 16 GiB, and three of them
        ({NVIDIA_GPU: "1"}, GIB, 16),
        ({NVIDIA_GPU: "3"}, GIB, 48),
        ({}, GIB, 0),
        # what cannot be read is no unit
        ({MEMORY: "?"}, GIB, 0),
        ({MEMORY: "4", gpu_manager.MEMORY: "8"}, GIB, 0),
    ],
)
def test_units_are_the_nodes_when_the_dialect_has_others(
    limits: dict[str, str], unit_mib: int, expected: float
) -> None:
    """Hints compare holders of different dialects. The node's cards have 16 GiB each."""
    shared = a_shared_node(16 * GIB, 16 * GIB, unit_mib=unit_mib)
    assert a_pod(limits).demand().units(shared) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({MEMORY: "4"}, 4), ({NVIDIA_GPU: "1"}, 0), ({MEMORY: "0"}, 0), ({}, 0)],
)
def test_amount_is_0_when_the_resource_is_not_requested(
    limits: dict[str, str], expected: int
) -> None:
    """Sums over pods add it up."""
    assert a_pod(limits).demand().amount(MEMORY) == expected


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4), st.lists(st.integers(0, 30), max_size=3)
)
def test_amount_is_the_most_that_runs_at_once(apps: list[int], inits: list[int]) -> None:
    """Containers run together, each init container alone before them."""
    pod = a_pod(
        *({MEMORY: str(count)} for count in apps),
        inits=tuple({MEMORY: str(count)} for count in inits),
    )
    assert pod.amount(MEMORY) == max(sum(apps), *inits, 0)
    assert pod.demand().amount(MEMORY) == pod.amount(MEMORY)


def test_pods_without_cards_share_one_demand_when_their_labels_differ() -> None:
    """Most pods of a large cluster request none: nothing is kept for them."""
    plain = a_pod({"cpu": "2"})
    labelled = msgspec.convert(
        {
            "metadata": {"labels": {"app": "web"}, "annotations": {"a": "x" * 4096}},
            "spec": {"containers": [{"name": "other", "resources": {"limits": {"cpu": "1"}}}]},
        },
        Pod,
    )
    assert plain.demand() is labelled.demand()
    assert not plain.demand().requests_gpu
    assert plain.demand().parts == ()


@pytest.mark.parametrize(
    "quantity",
    ["9" * 4000, "1e9999", "-4", "4Gi4", "", "4\x00", "0x4", "NaN", "1_0"],
)
def test_demand_is_unreadable_or_huge_when_the_quantity_is_hostile(quantity: str) -> None:
    """The API server refuses most of them. None may raise anything but InvalidRecord."""
    demand = a_pod({MEMORY: quantity}).demand()
    shared = a_shared_node(16 * GIB)
    units = demand.units(shared)
    assert units >= 0
    if demand.invalid is None and demand.parts:
        never = ClusterState([a_node("n", 16 * GIB)])
        evaluator = ComparedEvaluator(never, "binpack")
        assert evaluator.filter(a_pod({MEMORY: quantity}), ["n"]).fitting == []
