"""Test the agent's metrics of pods and cards, and its reactions to processes that bypass their limits."""

import json
import re
from collections.abc import Iterator

import pytest

from e2e.artifacts import CHART_FILES
from e2e.cluster import ClusterError, wait_until
from e2e.images import TRAINING
from e2e.scenarios.containers import (
    BYPASS_LIBRARY,
    fetch_from_agent,
    installed_with,
    pod,
    visible_mib,
    wait_for_agent,
)
from e2e.scenarios.installation import MEMORY, Installation, deployment
from fenka.dialects.ack import CORE
from fenka.dialects.base import CORE_MODE

MIB = 1 << 20
DASHBOARD = CHART_FILES / "gpu-app.json"
ALLOCATE = (
    "import ctypes as c, time; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); p=c.c_void_p(); d.cuInit(0); "
    "d.cuDevicePrimaryCtxRetain(c.byref(x),0); d.cuCtxSetCurrent(x); "
    "print(d.cuMemAlloc_v2(c.byref(p), c.c_size_t(1 << 30)), flush=True); time.sleep(1000)"
)
# Corrupts all files that a tenant can write: fills the account with 0xff bytes and its folder with data.
CORRUPT_ACCOUNT = (
    "import os; f=open('/run/fenka/account/slots','r+b'); f.write(b'\\xff'*(1<<16)); f.flush()\n"
    "try: open('/run/fenka/account/more','wb').write(b'x'*(1<<26))\n"
    "except OSError: print('no room')\n"
    "try: os.truncate('/run/fenka/account/slots', 1<<40)\n"
    "except OSError: pass"
)

# Launches kernels of 2 ms, unless the file says that there is no work.
KERNELS = """
import os, time, warnings
warnings.simplefilter("ignore")
import numpy as np
from numba import cuda

@cuda.jit
def step(values):
    values[0] += 1

values = cuda.device_array(1, np.float32)
while True:
    if os.path.exists("/tmp/idle"):
        time.sleep(0.1)
        continue
    for _ in range(20):
        step[1, 1](values)
    cuda.synchronize()
"""

Sample = tuple[str, dict[str, str], float]


def metrics(installation: Installation, node: str) -> list[Sample]:
    """Return name, labels and value of each sample of the node."""
    samples: list[Sample] = []
    for line in fetch_from_agent(installation, node, "/metrics").splitlines():
        if line and not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            samples.append((name, dict(re.findall(r'(\w+)="([^"]*)"', labels or "")), float(value)))
    return samples


def values_of(samples: list[Sample], name: str, **labels: str) -> list[float]:
    """Return the values of the samples with this name and these labels."""
    return [
        value
        for sample_name, sample_labels, value in samples
        if sample_name == name and labels.items() <= sample_labels.items()
    ]


@pytest.fixture(scope="module")
def measured(installation: Installation, sharing_node: str) -> Iterator[str]:
    """Provide the sharing node with its metrics port open."""
    with installed_with(installation, "node.metrics.enabled=true"):
        wait_for_agent(installation, sharing_node, 14)
        yield sharing_node


@pytest.mark.versions
@pytest.mark.usefixtures("measured")
def test_metrics_describe_pods_and_cards_when_containers_use_memory(
    installation: Installation, node: str
) -> None:
    """Also check that every metric of the dashboard exists, and that samples of ended pods disappear."""
    for name, units in (("a", 4), ("b", 2)):
        installation.cluster.apply(pod(name, f'x={units}:python3 -c "{ALLOCATE}"\ny=1:'))
        installation.cluster.wait_for_pod(name)
    used = "fenka_container_gpu_memory_used_bytes"
    seen: list[Sample] = []

    def has_usage() -> bool:
        seen[:] = metrics(installation, node)
        return (
            all(value >= 1 << 30 for value in values_of(seen, used, container="x"))
            and len(values_of(seen, used, container="x")) == 2
        )

    wait_until("the memory use of the pods", has_usage)
    held = "fenka_container_gpu_memory_held_bytes"
    limit = "fenka_container_gpu_memory_limit_bytes"
    a_x = {"namespace": "default", "pod": "a", "container": "x", "node": node, "index": "0"}
    assert values_of(seen, limit, **a_x) == [15079 * 4 // 14 * MIB]
    assert values_of(seen, held, **a_x)[0] >= 1 << 30
    assert values_of(seen, "fenka_container_gpu_processes", **a_x) == [1]
    assert values_of(seen, used, **{**a_x, "container": "y"}) == [0]
    requested = [15079 * units // 14 * MIB for units in (4, 1, 2, 1)]
    assert values_of(seen, "fenka_card_memory_allocated_bytes", node=node) == [sum(requested)]
    assert values_of(seen, "fenka_card_memory_used_bytes")[0] >= 2 << 30
    assert values_of(seen, "fenka_card_healthy") == [1]
    assert values_of(seen, "fenka_card_temperature_celsius")[0] > 0
    assert values_of(seen, "fenka_card_power_watts")[0] > 0
    assert all(
        {"uuid", "model", "index", "node"} <= set(sample_labels)
        for sample_name, sample_labels, _ in seen
        if sample_name.startswith("fenka_") and not sample_name.startswith("fenka_node_")
    )
    drawn = set(re.findall(r"fenka_(?:container|card|node)_\w+", DASHBOARD.read_text()))
    # No container has a limit of compute.
    drawn.remove("fenka_container_gpu_compute_limit_ratio")
    assert drawn <= {name for name, _, _ in seen}
    # For each container and card, for a card, for the node; also gpu-manager's names.
    assert len([sample for sample in seen if sample[0].startswith("fenka_")]) == 4 * 11 + 12 + 4
    gpu_manager_labels = {
        "pod_name": "a",
        "container_name": "x",
        "node": node,
        "gpu_memory": "gpu0",
    }
    assert values_of(seen, "container_gpu_memory_total", **gpu_manager_labels)[0] >= 1 << 10
    installation.cluster.kubectl("delete", "pod", "a", "b", "--now")
    wait_until("no samples of ended pods", lambda: not values_of(metrics(installation, node), used))


def weighted_pod(name: str, weight: int) -> str:
    """Return a pod whose program launches numba-cuda's kernels with this weight."""
    manifest = json.loads(pod(name, "x=4:"))
    manifest["metadata"]["annotations"] = {CORE_MODE: "weight"}
    (container,) = manifest["spec"]["containers"]
    container |= {"image": TRAINING, "command": ["python3", "-c", KERNELS]}
    container["env"] = [{"name": "FENKA_SIMULATED_KERNEL_US", "value": "2000"}]
    container["resources"]["limits"][CORE] = weight
    return json.dumps(manifest)


@pytest.mark.usefixtures("measured")
def test_training_uses_what_its_service_leaves_idle_when_both_have_weights(
    installation: Installation, node: str
) -> None:
    """By the card's own counters. A resize changes the weight of a program that runs."""
    cluster = installation.cluster
    for name, weight in (("service", 80), ("training", 20)):
        cluster.apply(weighted_pod(name, weight))
    for name in ("service", "training"):
        cluster.wait_for_pod(name)
        assert "as a weight" in installation.fenka("why", name)

    def wait_for_shares(service: int, training: int) -> None:
        def has_shares() -> bool:
            ratio, seen = "fenka_container_gpu_utilization_ratio", metrics(installation, node)
            shares = [sum(values_of(seen, ratio, pod=name)) for name in ("service", "training")]
            # This machine's cores are busy too, so the card may be idle at times.
            percents = [share / (sum(shares) or 1) * 100 for share in shares]
            return sum(shares) > 0.5 and percents == pytest.approx([service, training], abs=6)

        wait_until(f"shares of {service} and {training}", has_shares)

    wait_for_shares(80, 20)
    cluster.kubectl("exec", "service", "--", "touch", "/tmp/idle")
    wait_for_shares(0, 100)
    cluster.kubectl("exec", "service", "--", "rm", "/tmp/idle")
    installation.fenka("resize", "training", "--gpu-core", "80")
    wait_for_shares(50, 50)
    cluster.kubectl("delete", "pod", "service", "training", "--now")


def bypass_library(installation: Installation, name: str) -> str:
    """Start a program in the pod that allocates 6 GiB past the library, and return its output."""
    write = f"cat > /tmp/bypass.py <<'END'\n{BYPASS_LIBRARY}\nEND\n"
    script = f"{write}python3 /tmp/bypass.py > /tmp/output 2>&1 &"
    installation.cluster.kubectl("exec", name, "--", "sh", "-c", script)
    wait_until(
        "its memory",
        lambda: installation.cluster.kubectl("exec", name, "--", "cat", "/tmp/output") != "",
    )
    return installation.cluster.kubectl("exec", name, "--", "cat", "/tmp/output").strip()


def agent_memory_bytes(installation: Installation, node: str) -> int:
    """Return the resident memory of the agent in bytes."""
    program = (
        "import pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if b'fenka.cli.admin.node_process' in (p / 'cmdline').read_bytes().split(b'\\0'):\n"
        "        print(int((p / 'statm').read_text().split()[1]) * 4096)"
    )
    return max(
        int(line) for line in installation.cluster.node(node).run("python3", "-c", program).split()
    )


@pytest.mark.full
def test_violation_is_reported_at_constant_cost_when_a_process_exceeds_its_limit(
    installation: Installation, measured: str, node: str
) -> None:
    """Events and a growing metric report it, even with a corrupted account."""
    with installed_with(installation, 'node.extraArgs=["--unmanaged-process=report"]'):
        wait_for_agent(installation, node, 14)
        installation.cluster.apply(pod("greedy", "x=2:"))
        installation.cluster.wait_for_pod("greedy")
        before = agent_memory_bytes(installation, node)
        assert bypass_library(installation, "greedy") == "0 0 0 0"
        installation.wait_for_event("greedy", "holds more than its 2154 MiB")
        installation.wait_for_event("greedy", "without fenka's library")
        assert "no room" in installation.cluster.kubectl(
            "exec", "greedy", "--", "python3", "-c", CORRUPT_ACCOUNT
        )
        wait_until(
            "three more samples",
            lambda: (
                values_of(
                    metrics(installation, node), "fenka_node_violations_total", kind="memory_limit"
                )[0]
                >= 4
            ),
        )
        seen = metrics(installation, node)
        assert values_of(seen, "fenka_container_gpu_memory_used_bytes", pod="greedy")[0] >= 6 << 30
        assert agent_memory_bytes(installation, node) - before < 8 * MIB
        installation.cluster.kubectl("delete", "pod", "greedy", "--now")
    wait_for_agent(installation, measured, 14)


@pytest.mark.full
def test_pod_is_evicted_when_it_exceeds_its_limit_and_the_option_says_evict(
    installation: Installation, measured: str, node: str
) -> None:
    """The pod ends, and its memory is freed."""
    changes = ('node.extraArgs=["--unmanaged-process=report"]', 'node.overLimit="evict"')
    with installed_with(installation, *changes):
        wait_for_agent(installation, node, 14)
        installation.cluster.apply(pod("greedy", "x=2:"))
        installation.cluster.wait_for_pod("greedy")
        assert bypass_library(installation, "greedy") == "0 0 0 0"

        def gone() -> bool:
            try:
                return "deletionTimestamp" in installation.cluster.get("pod", "greedy")["metadata"]
            except ClusterError:
                return True

        wait_until("its eviction", gone)
        assert any(
            "the pod is evicted" in message for message in installation.cluster.events("greedy")
        )
        wait_until(
            "a free card",
            lambda: values_of(metrics(installation, node), "fenka_card_memory_used_bytes") == [0],
        )
    wait_for_agent(installation, measured, 14)


def test_programs_may_use_the_whole_card_when_isolation_is_disabled(
    installation: Installation, node: str
) -> None:
    """cGPU's label disables isolation; environment variables and node events report it."""
    installation.label(node, "cgpu.disable.isolation=true")
    try:
        installation.cluster.apply(deployment("free", MEMORY, 4, command="env; exec sleep 100000"))
        (running,) = installation.wait_for_running("free", 1)
        name = running["metadata"]["name"]
        assert visible_mib(installation, name, "free") == 15079
        logs = installation.cluster.kubectl("logs", name)
        assert "CGPU_DISABLE=true" in logs
        assert "ALIYUN_COM_GPU_MEM_CONTAINER=4" in logs
        messages = installation.cluster.events(node)
        assert any("isolation is disabled by the node's labels" in message for message in messages)
    finally:
        installation.label(node, "cgpu.disable.isolation-")
    installation.cluster.apply(pod("held", "x=2:"))
    installation.cluster.wait_for_pod("held")
    assert visible_mib(installation, "held", "x") == 2154
