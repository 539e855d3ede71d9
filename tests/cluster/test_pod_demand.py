"""A pod's request is parsed once and kept with the pod."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.objects import Pod
from fenka.dialects import ack, hami
from fenka.dialects.base import InvalidRecord
from fenka.dialects.gpushare import MEMORY
from fenka.dialects.registry import DIALECTS, WITH_HAMI, detect


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

    monkeypatch.setattr("fenka.cluster.pod_demand.detect", counted)
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
