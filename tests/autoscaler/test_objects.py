"""Tests what the autoscaler reads of pods that kube-scheduler counts."""

from typing import Any

import msgspec
import pytest

from fenka.autoscaler.watch import ElasticPod, host_amount


def container(cpu: str = "", **fields: Any) -> dict[str, Any]:
    """A container that requests this CPU."""
    return {"name": "c", "resources": {"requests": {"cpu": cpu} if cpu else {}}, **fields}


def cpu_of(**spec: Any) -> int:
    """The thousandths of a core of a pod with this spec."""
    return msgspec.convert({"spec": spec}, ElasticPod).host_amounts().get("cpu", 0)


@pytest.mark.parametrize(
    ("name", "quantity", "amount"),
    [
        ("cpu", "1500m", 1500),
        ("cpu", "1.5", 1500),
        ("cpu", ".25", 250),
        ("cpu", "0.0001", 1),  # rounded up
        ("cpu", 2, 2000),
        ("memory", "1Gi", 1024),
        ("memory", "1", 1),  # a byte takes a MiB
        ("nvidia.com/mig-1g.10gb", "7", 7),
        ("cpu", "a lot", 0),
    ],
)
def test_host_amount_reads_quantities_as_kubernetes(
    name: str, quantity: str | int, amount: int
) -> None:
    """CPU is in thousandths, memory in MiB."""
    assert host_amount(name, quantity) == amount


def test_pod_takes_the_sum_of_its_containers_when_they_run_together() -> None:
    """1 + 0.5 of containers, 0.25 of overhead."""
    assert cpu_of(containers=[container("1"), container("500m")], overhead={"cpu": "250m"}) == 1750


def test_pod_takes_its_largest_init_container_when_that_is_more() -> None:
    """Init containers run one after the other: 3, not 2 + 3."""
    given = [container("2"), container("3")]
    assert cpu_of(containers=[container("1")], initContainers=given) == 3000


def test_sidecars_count_with_all_that_run_beside_them() -> None:
    """1 of the sidecar + 3 of the init container after it; later 1 + 1 is less."""
    given = [container("1", restartPolicy="Always"), container("3")]
    assert cpu_of(containers=[container("1")], initContainers=given) == 4000


def test_limit_is_the_request_when_there_is_no_request() -> None:
    """Kubernetes' default."""
    assert cpu_of(containers=[{"name": "c", "resources": {"limits": {"cpu": "2"}}}]) == 2000
