"""The simulated driver as a container has it: its files bound one by one under the system's names, the
node at its fixed place, process ids of a namespace of its own."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.waiting import wait_until

HELD_MIB = 300

CONTAINER = """
set -e
mount -t tmpfs none /mnt; mkdir -p /mnt/lib/x86_64-linux-gnu /mnt/lib64
mount -t tmpfs none /run; mkdir -p /run/fenka/simulated; mount --bind {node} /run/fenka/simulated
for library in libcuda.so.1 libnvidia-ml.so.1; do
    for place in /mnt/lib/x86_64-linux-gnu /mnt/lib64; do
        touch $place/$library; mount --bind {native}/$library $place/$library
    done
done
exec "$@"
"""
"""Both places that a CDI specification uses, below a folder in which nothing else stands."""

PROGRAM = f"""
import ctypes, os, sys
cuda = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1")
nvml = ctypes.CDLL(sys.argv[1] + "/libnvidia-ml.so.1")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t({HELD_MIB} << 20)), nvml.nvmlInit_v2()]
print(*codes, os.getpid(), flush=True)
sys.stdin.read()
"""

BEGINS = "print('begins', flush=True)\n"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    """A running node with one T4, on the host."""
    made = SimulatedNode.create(tmp_path / "node", parse_spec("T4"))
    made.start()
    yield made
    made.stop()


def in_container(node: SimulatedNode, *command: str, **environment: str) -> "subprocess.Popen[str]":
    """The command where the host's folders are not; it ends with its standard input."""
    namespaces = ["unshare", *(["-r"] if os.geteuid() else []), "-mpf", "--mount-proc"]
    if subprocess.run([*namespaces, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no private mount and process namespaces")
    script = CONTAINER.format(
        node=shlex.quote(str(node.directory)),
        native=shlex.quote(str((node.library_dir / "libcuda.so.1").resolve().parent)),
    )
    return subprocess.Popen(
        [*namespaces, "--kill-child", "sh", "-c", script, "sh", *command],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def only_child(pid: int) -> int:
    """The process that unshare has forked, by the host's number."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


@pytest.fixture
def outside(node: SimulatedNode) -> Iterator[Driver]:
    """The host's NVML."""
    with Driver.open(node.library_dir) as driver:
        yield driver


def held(driver: Driver) -> dict[int, int | None]:
    """MiB, by process id."""
    return {process.pid: process.used_mib for process in driver.processes()}


@pytest.mark.parametrize("place", ["/mnt/lib/x86_64-linux-gnu", "/mnt/lib64"])
def test_contained_program_is_listed_on_the_node(
    node: SimulatedNode, outside: Driver, place: str
) -> None:
    """It is process 1 to itself, and to the host's NVML the host's number, with its 300 MiB."""
    program = in_container(node, sys.executable, "-SIc", PROGRAM, place)
    assert program.stdout
    said = program.stdout.readline()
    assert said == "0 0 0 0 0 0 1\n", program.communicate()[1]
    assert held(outside) == {only_child(program.pid): HELD_MIB}
    program.communicate()
    wait_until(lambda: held(outside) == {})


def test_container_that_starts_while_the_card_server_restarts_waits_for_it(
    node: SimulatedNode,
) -> None:
    """The server was killed and left its socket: the container's first call is answered once it is back."""
    assert node._server
    node._server.kill()
    node._server.wait()
    assert not node.running
    program = in_container(node, sys.executable, "-SIc", BEGINS + PROGRAM, "/mnt/lib64")
    assert program.stdout
    assert program.stdout.readline() == "begins\n"
    again = SimulatedNode(node.directory)
    again.start()
    try:
        assert program.stdout.readline().startswith("0 0 0 0 0 0 ")
        program.communicate()
    finally:
        again.stop()


def test_memory_is_freed_when_the_container_was_killed(
    node: SimulatedNode, outside: Driver
) -> None:
    """Its connection ends with it, whatever namespace its number was of."""
    program = in_container(node, sys.executable, "-SIc", PROGRAM, "/mnt/lib64")
    assert program.stdout
    assert program.stdout.readline().startswith("0 0 0 0 0 0 ")
    assert len(held(outside)) == 1
    os.kill(only_child(program.pid), signal.SIGKILL)
    program.communicate()
    wait_until(lambda: held(outside) == {})
