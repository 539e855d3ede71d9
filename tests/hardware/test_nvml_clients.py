"""The tools people know, unchanged, on simulated cards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeClient, MakeNode


def run(node: SimulatedNode, *command: str) -> str:
    """Return the tool's output with the node's libraries first. It must succeed and report no error."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
        env={**os.environ, "LD_LIBRARY_PATH": str(node.library_dir), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def busy(make_node: MakeNode, make_client: MakeClient) -> tuple[SimulatedNode, int]:
    """Return a node with a T4, an A100 and an RTX 4090, and a process with 2 GiB that keeps the T4 busy."""
    node = make_node("T4,A100-80G,RTX4090")
    client = make_client(node).enter()
    client.do("p = ok(d.cuMemAlloc(2 << 30))", "m = ok(d.cuModuleLoadData(b'an image'))", "0")
    client.do(
        "f = ok(d.cuModuleGetFunction(m, b'k_us60000000'))",
        "ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0))",
        "0",
    )
    return node, client.pid


def test_gpustat_shows_everything(busy: tuple[SimulatedNode, int]) -> None:
    """Names, memory, power, the process with its memory; fans only where there are some."""
    node, pid = busy
    report = json.loads(run(node, "gpustat", "--json"))
    assert report["driver_version"] == "550.163.01"
    first, second, third = report["gpus"]
    assert (first["name"], first["memory.used"], first["memory.total"]) == ("Tesla T4", 2048, 15079)
    assert first["utilization.gpu"] > 0
    assert 10 < first["power.draw"] <= first["enforced.power.limit"] == 70
    assert first["fan.speed"] is None
    assert [(p["pid"], p["gpu_memory_usage"]) for p in first["processes"]] == [(pid, 2048)]
    assert (second["name"], second["processes"]) == ("NVIDIA A100-SXM4-80GB", [])
    assert (third["name"], third["fan.speed"]) == ("NVIDIA GeForce RTX 4090", 30)


def test_nvitop_shows_everything(busy: tuple[SimulatedNode, int]) -> None:
    """The whole table: versions, cards, MIG where the model has it, the process."""
    node, pid = busy
    shown = run(node, "nvitop", "-1", "--ascii")
    assert "Driver Version: 550.163.01" in shown
    assert "CUDA Driver Version: 12.4" in shown
    rows = [line for line in shown.splitlines() if "Tesla T4" in line or "A100" in line]
    assert len(rows) == 2
    assert "Disabled" in rows[1]
    assert "2048MiB / 15079MiB" in shown
    assert any(f" {pid} C" in line and "2048MiB" in line for line in shown.splitlines())


_ASK = """
import json, pynvml as n
for _ in range(3): n.nvmlInit()
for _ in range(2): n.nvmlShutdown()
said = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    uuid, pci = n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetPciInfo(h)
    serial = n.nvmlDeviceGetSerial(h)
    again = [n.nvmlDeviceGetHandleByUUID(uuid), n.nvmlDeviceGetHandleByPciBusId(pci.busId),
             n.nvmlDeviceGetHandleBySerial(serial)]
    v1 = n.nvmlDeviceGetMemoryInfo(h)
    v2 = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
    old = n.nvmlDeviceGetComputeRunningProcesses_v2(h)
    new = n.nvmlDeviceGetComputeRunningProcesses_v3(h)
    said.append({
        "name": n.nvmlDeviceGetName(h), "index": n.nvmlDeviceGetIndex(h),
        "again": [n.nvmlDeviceGetIndex(a) for a in again],
        "memory": [v1.total, v1.used, v1.free, v2.total, v2.used, v2.free],
        "capability": n.nvmlDeviceGetCudaComputeCapability(h),
        "processes": [[(p.pid, p.usedGpuMemory) for p in ps] for ps in (old, new)],
        "clocks": [n.nvmlDeviceGetClockInfo(h, 1), n.nvmlDeviceGetMaxClockInfo(h, 1)],
        "state": n.nvmlDeviceGetPerformanceState(h)})
n.nvmlShutdown()
try: n.nvmlDeviceGetCount()
except n.NVMLError_Uninitialized: said.append("closed")
print(json.dumps(said))
"""


def test_nvidia_ml_py_returns_the_same_by_every_handle(busy: tuple[SimulatedNode, int]) -> None:
    """Handles by index, UUID, PCI and serial are one; old and new structs agree; opening is counted."""
    node, pid = busy
    first, second, _, closed = json.loads(run(node, "python", "-c", _ASK))
    total, used = 15079 << 20, 2 << 30
    assert first["memory"] == [total, used, total - used] * 2
    assert first["processes"] == [[[pid, used]]] * 2
    assert first["clocks"] == [1590, 1590]
    assert (first["capability"], first["state"]) == ([7, 5], 0)
    assert (second["again"], second["index"], second["processes"]) == ([1, 1, 1], 1, [[], []])
    assert (second["clocks"][0], second["state"]) == (300, 8)
    assert closed == "closed"


def test_nvml_shows_every_card_whatever_cuda_may_see(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """CUDA_VISIBLE_DEVICES is CUDA's affair; and a program that only called cuInit is not listed."""
    node = make_node("T4*2")
    make_client(node).do("ok(d.cuInit(0))", "0")
    ask = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0);"
    show = "print(n.nvmlDeviceGetCount(), n.nvmlDeviceGetComputeRunningProcesses(h))"
    hide = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0';"
    assert run(node, "python", "-c", hide + ask + show) == "2 []\n"


_FORK = """
import os, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
child = os.fork()
if child == 0: os._exit(0 if n.nvmlDeviceGetName(h) == "Tesla T4" else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
n.nvmlShutdown(); n.nvmlInit()
print(status, n.nvmlDeviceGetName(h))
"""


def test_handles_outlive_a_fork_and_a_shutdown(node: SimulatedNode) -> None:
    """As with the real NVML, a handle that was had before serves in the child and after reopening."""
    assert run(node, "python", "-c", _FORK) == "0 Tesla T4\n"
