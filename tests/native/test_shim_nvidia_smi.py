"""NVIDIA's own nvidia-smi 535 in a lease: it takes processes from a private table of NVML's."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.lease_control import Limit
from tests.hardware.test_nvidia_smi import binary
from tests.native.clients import GIB, Lease

__all__ = ["binary"]

DRIVERS = {"the program's own": "535.309.01", "another": "550.163.01"}
Smi = Callable[..., str]


@pytest.fixture(params=list(DRIVERS.values()), ids=list(DRIVERS))
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SimulatedNode]:
    """Three T4."""
    spec = tmp_path / "cards.toml"
    spec.write_text(
        f'version = 1\ndriver_version = "{request.param}"\ncuda_version = "12.2"\n'
        + '[[card]]\nmodel = "T4"\n' * 3
    )
    made = SimulatedNode.create(tmp_path / "node", parse_spec(str(spec)))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def uuids(node: SimulatedNode) -> list[str]:
    """Of its cards."""
    with Driver.open(node.library_dir) as driver:
        return [card.uuid for card in driver.cards()]


@pytest.fixture
def leases(tmp_path: Path, uuids: list[str]) -> Iterator[tuple[Lease, Lease]]:
    """Ours: 4 GiB of the third card and 2 of the second. A stranger's: 8 GiB of each."""
    ours = Lease(tmp_path / "ours", (Limit(uuids[2], 4 * GIB), Limit(uuids[1], 2 * GIB)))
    theirs = Lease(tmp_path / "theirs", tuple(Limit(uuid, 8 * GIB) for uuid in uuids))
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def pids(node: SimulatedNode, leases: tuple[Lease, Lease]) -> list[int]:
    """One of ours with 1 GiB of our second card; the stranger's hold something on every card."""
    ours, theirs = leases
    library = str(node.library_dir)
    client = ours.start(1, LD_LIBRARY_PATH=library).enter(1)
    assert client.ask("alloc", GIB).code == 0
    found = [client.process.pid]
    for device in range(3):
        stranger = theirs.start(1, LD_LIBRARY_PATH=library).enter(device)
        assert stranger.ask("alloc", 3 * GIB).code == 0
        found.append(stranger.process.pid)
    return found


@pytest.fixture
def smi(binary: Path, node: SimulatedNode, leases: tuple[Lease, Lease]) -> Smi:
    """The program in our lease."""

    def run(*words: str) -> str:
        done = subprocess.run(
            [binary, *words],
            env=leases[0].environment(LD_LIBRARY_PATH=str(node.library_dir)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_table_shows_only_the_lease(smi: Smi, pids: list[int]) -> None:
    """Our two cards with our limits, our one process, and of the strangers no trace."""
    text = re.sub(r"[ ]+", " ", smi())
    assert "0MiB / 4096MiB" in text
    assert "1024MiB / 2048MiB" in text
    (process,) = (line for line in text.splitlines() if f" {pids[0]} " in line)
    assert process.startswith(f"| 1 N/A N/A {pids[0]} C ")
    assert process.endswith(" 1024MiB |")
    assert not any(f" {pid} " in text for pid in pids[1:])


def test_queries_show_only_the_lease(smi: Smi, pids: list[int], uuids: list[str]) -> None:
    """By the lease's numbers, and processes by their own."""
    cards = smi("--query-gpu=index,uuid,memory.total", "--format=csv,noheader").splitlines()
    assert cards == [f"0, {uuids[2]}, 4096 MiB", f"1, {uuids[1]}, 2048 MiB"]
    apps = smi("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv,noheader")
    assert apps.splitlines() == [f"{pids[0]}, 1024 MiB, {uuids[1]}"]


def test_full_query_shows_only_the_lease(smi: Smi, pids: list[int]) -> None:
    """-q -x, which asks for more than all others."""
    gpus = ElementTree.fromstring(smi("-q", "-x")).findall("gpu")
    listed = [[int(p.text or 0) for p in gpu.findall("processes/process_info/pid")] for gpu in gpus]
    assert listed == [[], [pids[0]]]


def test_process_has_a_name_when_the_driver_uses_another_pid(
    binary: Path, node: SimulatedNode, leases: tuple[Lease, Lease], pids: list[int]
) -> None:
    """In a PID namespace of its own the lease's process is known by the account alone: 7, and its program."""
    command = ["unshare", "-pf", "--mount-proc", "--kill-child", "sh", "-c"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no private process namespace")
    program = (
        "import ctypes, subprocess, sys; cuda = ctypes.CDLL('libcuda.so.1'); p = ctypes.c_void_p()\n"
        "assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(p), 0)\n"
        "assert not cuda.cuCtxSetCurrent(p) and not cuda.cuMemAlloc_v2(ctypes.byref(p), 1 << 30)\n"
        "print(subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout)"
    )
    asked = f"{binary} --query-compute-apps=pid,used_memory,name --format=csv,noheader"
    done = subprocess.run(
        [*command, f'python3 -c "$0" {asked}', program],
        env=leases[0].environment(LD_LIBRARY_PATH=str(node.library_dir)),
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.split("\n\n")[0].splitlines()
    pid, used, name = line.split(", ")
    assert int(pid) not in pids
    assert used == "1024 MiB"
    assert Path(name).name.startswith("python3")
