"""A Go program over go-nvml, NVIDIA's own binding, sees what nvidia-ml-py sees."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeClient, MakeNode

CLIENT = Path(__file__).parent.parent / "go-nvml-client"
BUILT_WITHIN_S = 100
NO_NETWORK = (
    "dial tcp",
    "no such host",
    "i/o timeout",
    "connection refused",
    "module lookup disabled",
)


def build(client: Path, built: Path, *, cgo: bool) -> Path:
    """Build a Go program of these tests. Skip without Go, a C compiler or access to the modules."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("the Go client needs go, which this machine has not")
    if cgo and not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        pytest.skip("the Go client needs a C compiler, which this machine has not")
    try:
        done = subprocess.run(
            [go, "build", "-mod=readonly", "-o", built, "."],
            cwd=client,
            env={
                **os.environ,
                "CGO_ENABLED": "1" if cgo else "0",
                "GOFLAGS": "",
                "GOTOOLCHAIN": "local",
            },
            capture_output=True,
            text=True,
            timeout=BUILT_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the Go client was not built within {BUILT_WITHIN_S} s")
    if done.returncode != 0 and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip(f"its modules cannot be fetched here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the client over go-nvml, built."""
    return build(CLIENT, tmp_path_factory.mktemp("go") / "client", cgo=True)


def run(program: Path, node: SimulatedNode) -> subprocess.CompletedProcess[str]:
    """Run the client on the node."""
    return subprocess.run(
        [program],
        env={"LD_LIBRARY_PATH": str(node.library_dir)},
        capture_output=True,
        text=True,
        check=False,
    )


def by_python() -> Iterator[dict[str, Any]]:
    """Return the same of each card, by nvidia-ml-py."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        first = pynvml.nvmlDeviceGetMemoryInfo(handle)
        second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        try:
            mig = pynvml.nvmlDeviceGetMigMode(handle)[0]
        except pynvml.NVMLError_NotSupported:
            mig = None
        yield {
            "name": pynvml.nvmlDeviceGetName(handle),
            "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "minor": pynvml.nvmlDeviceGetMinorNumber(handle),
            "memory": [first.total, first.used, first.free, second.total, second.used],
            "pci": pynvml.nvmlDeviceGetPciInfo(handle).busId,
            "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            "mig": mig,
            "processes": [
                {"pid": process.pid, "memory": process.usedGpuMemory}
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ],
        }


def test_go_and_python_return_the_same(
    program: Path, make_node: MakeNode, make_client: MakeClient
) -> None:
    """Count, names, UUIDs, memory, PCI, capability, MIG and processes, and they are what was made."""
    node = make_node("T4,A100-80G")
    client = make_client(node).enter(1)
    client.do("ok(d.cuMemAlloc(3 << 30))", "0")
    ended = run(program, node)
    assert (ended.returncode, ended.stderr) == (0, "")
    cards = json.loads(ended.stdout)
    with Driver.open(node.library_dir):
        assert cards == list(by_python())
    first, second = cards
    assert (first["name"], first["mig"], first["processes"]) == ("Tesla T4", None, [])
    assert (first["pci"], first["capability"]) == ("00000000:01:00.0", [7, 5])
    assert (second["mig"], second["memory"][0]) == (0, 81251 << 20)
    assert second["processes"] == [{"pid": client.pid, "memory": 3 << 30}]


def test_go_receives_the_event_of_a_lost_card(program: Path, make_node: MakeNode) -> None:
    """The binding names the error as NVML does."""
    node = make_node("T4")
    node.lose(0)
    ended = run(program, node)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "HandleByIndex: GPU is lost\n")
