"""The shim on the simulated driver, which keeps its own account of every byte."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.lease_control import Limit
from tests.native.clients import CARDS, GIB, MIB, OUT_OF_MEMORY, STYLES, SYSTEM_NOT_READY, Lease

LIST = """
import json, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
"""


def python(node: SimulatedNode, text: str, **environment: str) -> Any:
    """What a Python program prints on the node, as JSON."""
    ran = subprocess.run(
        [sys.executable, "-c", text],
        env={**environment, "LD_LIBRARY_PATH": str(node.library_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Three T4 of 15079 MiB."""
    made = SimulatedNode.create(tmp_path_factory.mktemp("node"), parse_spec("T4*3"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def uuids(node: SimulatedNode) -> list[str]:
    """Of the node's cards."""
    found = python(node, LIST + "print(json.dumps([n.nvmlDeviceGetUUID(h) for h in handles]))")
    assert len(found) == 3
    return list(found)


@pytest.fixture
def lease(tmp_path: Path, uuids: list[str]) -> Iterator[Lease]:
    """4 GiB of the second card, then 2 GiB of the first."""
    limits = (Limit(uuids[1], 4 * GIB, 100 * MIB), Limit(uuids[0], 2 * GIB))
    made = Lease(tmp_path / "lease", limits)
    yield made
    made.close()


@pytest.mark.parametrize("style", [v for k, v in STYLES.items() if k != "dlvsym"])
def test_limit_holds_on_the_simulated_driver(node: SimulatedNode, lease: Lease, style: int) -> None:
    """Both caps hold on their cards, the context is paid for, and freeing gives all back."""
    client = lease.start(style, LD_LIBRARY_PATH=str(node.library_dir)).enter()
    assert client.ask("info")[1:] == (4 * GIB - 100 * MIB, 4 * GIB)
    assert client.ask("alloc", 4 * GIB).code == OUT_OF_MEMORY
    pointer = client.ask("alloc", 3 * GIB).value
    assert client.ask("info").value == GIB - 100 * MIB
    assert client.ask("free", pointer).code == 0
    assert client.ask("retain", 1).code == 0
    assert client.ask("alloc", 2 * GIB + 1).code == OUT_OF_MEMORY
    assert client.ask("alloc", 2 * GIB).code == 0
    assert (lease.held(0), lease.held(1)) == (100 * MIB, 2 * GIB)


def test_bindings_and_nvml_agree_when_devices_are_reordered(
    node: SimulatedNode, uuids: list[str], lease: Lease
) -> None:
    """With the devices swapped, cuda-bindings sees each cap on its card; NVML keeps the lease's order."""
    seen = python(
        node,
        LIST
        + """
from cuda.bindings import driver as cu
cu.cuInit(0)
devices = [cu.cuDeviceGet(i)[1] for i in range(cu.cuDeviceGetCount()[1])]
totals = [cu.cuDeviceTotalMem(d)[1] for d in devices]
context = cu.cuDevicePrimaryCtxRetain(devices[0])[1]
cu.cuCtxSetCurrent(context)
codes = [int(cu.cuMemAlloc(size)[0]) for size in (2147483649, 1 << 30)]
print(json.dumps([totals, codes, cu.cuMemGetInfo()[1:],
    [n.nvmlDeviceGetUUID(h) for h in handles],
    [[m.total, m.used, m.free] for m in map(n.nvmlDeviceGetMemoryInfo, handles)],
    [[p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(h)] for h in handles]]))
""",
        **lease.environment(CUDA_VISIBLE_DEVICES="1,0"),
    )
    assert seen == [
        [2 * GIB, 4 * GIB],
        [OUT_OF_MEMORY, 0],
        [GIB, 2 * GIB],
        [uuids[1], uuids[0]],
        [[4 * GIB, 0, 4 * GIB], [2 * GIB, GIB, GIB]],
        [[], [GIB]],
    ]


def test_pool_keeps_no_uncharged_memory(node: SimulatedNode, lease: Lease) -> None:
    """However high the threshold that a program sets, what it freed is off the card too."""
    seen = python(
        node,
        LIST
        + """
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
pool = cu.cuDeviceGetDefaultMemPool(0)[1]
attribute = cu.CUmemPool_attribute
codes = [int(cu.cuMemPoolSetAttribute(pool, attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    cu.cuuint64_t(2**63))[0])]
code, pointer = cu.cuMemAllocAsync(3 << 30, 0)
codes += [int(code), int(cu.cuMemFreeAsync(pointer, 0)[0]), int(cu.cuCtxSynchronize()[0])]
reserved = cu.cuMemPoolGetAttribute(pool, attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)[1]
codes += [int(cu.cuMemAlloc(3 << 30)[0])]
print(json.dumps([codes, int(reserved)]))
""",
        **lease.environment(),
    )
    assert seen == [[0, 0, 0, 0, 0], 0]


@pytest.mark.parametrize(
    "dimension",
    ["[1073741824]", "[0x40000000U]", "[1<<30]", "[(1 << 15)*0x8000]", f"[0b1{'0' * 30}]"],
)
def test_loaded_code_is_charged_as_on_the_card(
    node: SimulatedNode, uuids: list[str], lease: Lease, dimension: str
) -> None:
    """A module and a library with 1 GiB of variables each: what the lease says is what the card says."""
    text = f".version 7.0 .target sm_75 .global .b8 big{dimension}; .visible .entry k() {{ ret; }}"
    used = f"n.nvmlDeviceGetHandleByUUID({uuids[1]!r})"
    program = f"""
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
text = {text!r}.encode()
steps = [cu.cuModuleLoadData(text), cu.cuLibraryLoadData(text, [], [], 0, [], [], 0)]
steps += [cu.cuModuleLoadData(text), cu.cuModuleLoadData(text)]
free = cu.cuMemGetInfo()[1]
cu.cuModuleUnload(steps[0][1]); cu.cuLibraryUnload(steps[1][1])
print(json.dumps([[int(s[0]) for s in steps], free, cu.cuMemGetInfo()[1],
    n.nvmlDeviceGetMemoryInfo({used}).used]))
"""
    gone = 3 * (GIB + 2 * MIB)  # the text needs a page
    environment = lease.environment()
    assert python(node, LIST + program, **environment) == [
        [0, 0, 0, OUT_OF_MEMORY],
        4 * GIB - 100 * MIB - gone,
        4 * GIB - 100 * MIB - gone // 3,
        100 * MIB + gone // 3,
    ]
    del environment["LD_PRELOAD"]
    environment["CUDA_VISIBLE_DEVICES"] = uuids[1]
    codes, *_, used_there = python(node, LIST + program, **environment)
    assert (codes, used_there) == ([0, 0, 0, 0], 2 * (GIB + 2 * MIB))


def test_code_is_refused_when_its_size_remains_unknown(node: SimulatedNode, lease: Lease) -> None:
    """The text has an expression, and the driver is not asked for names of this length."""
    text = f".version 7.0 .target sm_75 .global .b8 {'n' * 5000}[1<<30]; .visible .entry k() {{ ret; }}"
    program = f"""
import json
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
free, text = cu.cuMemGetInfo()[1], {text!r}.encode()
steps = [cu.cuModuleLoadData(text), cu.cuLibraryLoadData(text, [], [], 0, [], [], 0)]
print(json.dumps([[int(s[0]) for s in steps], free - cu.cuMemGetInfo()[1]]))
"""
    assert python(node, program, **lease.environment()) == [[801, 801], 0]


SHARING = """
import json, os, signal, socket, sys
from cuda.bindings import driver as cu
fd = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
line = socket.socket(fileno=int(sys.argv[1]))
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
"""
MAKER = """
p = cu.CUmemAllocationProp()
p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
p.requestedHandleTypes = fd
block = cu.cuMemCreate(1 << 30, p, 0)[1]
socket.send_fds(line, [b"x"], [int(cu.cuMemExportToShareableHandle(block, fd, 0)[1])])
signal.pause()
"""
GUEST = """
descriptor = socket.recv_fds(line, 1, 1)[1][0]
block = cu.cuMemImportFromShareableHandle(descriptor, fd)[1]
at = cu.cuMemAddressReserve(1 << 30, 0, 0, 0)[1]
def free(): return cu.cuMemGetInfo()[1] >> 20
said = [int(cu.cuMemMap(at, 1 << 30, 0, block, 0)[0]), free()]
print(flush=True)
sys.stdin.readline()
code, rest = cu.cuMemAlloc(2972 << 20)
said += [int(cu.cuMemAlloc(1)[0]), int(code), int(cu.cuMemFree(rest)[0]), free()]
said += [int(cu.cuMemUnmap(at, 1 << 30)[0]), int(cu.cuMemRelease(block)[0]), free()]
os.close(descriptor)
said += [int(cu.cuMemAlloc(3996 << 20)[0])]
print(json.dumps(said), flush=True)
"""


def test_block_stays_charged_when_its_exporter_was_killed(
    node: SimulatedNode, lease: Lease
) -> None:
    """A descriptor crosses to another process, which maps 1 GiB. Of 4096 MiB each process has 100 for its
    context: with both 4096 - 200 - 1024 = 2872 are free; with the maker killed 4096 - 100 - 1024 = 2972,
    until the last descriptor is closed."""

    def start(program: str, line: socket.socket) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", SHARING + program, str(line.fileno())],
            env=lease.environment(LD_LIBRARY_PATH=str(node.library_dir)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[line.fileno()],
            text=True,
        )

    ends = socket.socketpair()
    maker, guest = start(MAKER, ends[0]), start(GUEST, ends[1])
    for end in ends:
        end.close()
    assert guest.stdout
    assert guest.stdout.readline() == "\n"
    maker.kill()
    maker.communicate()
    said = json.loads(guest.communicate("go on\n")[0])
    assert said == [0, 2872, OUT_OF_MEMORY, 0, 0, 2972, 0, 0, 2972, 0]


def test_foreign_process_is_not_listed(
    node: SimulatedNode, uuids: list[str], lease: Lease, tmp_path: Path
) -> None:
    """Two leases on one card: each sees its own process only, and only its own memory as used."""
    other = Lease(tmp_path / "other", (Limit(uuids[1], 8 * GIB),))
    library = str(node.library_dir)
    try:
        other.start(1, LD_LIBRARY_PATH=library).enter().ask("alloc", 5 * GIB)
        ours = lease.start(1, LD_LIBRARY_PATH=library).enter()
        ours.ask("alloc", GIB)
        seen = python(
            node,
            LIST
            + """
pids = [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(handles[0])]
print(json.dumps([pids, n.nvmlDeviceGetMemoryInfo(handles[0]).used]))
""",
            **lease.environment(),
        )
        assert seen == [[ours.process.pid], GIB + 100 * MIB]
    finally:
        other.close()


def test_free_memory_never_exceeds_the_cards(
    node: SimulatedNode, uuids: list[str], lease: Lease
) -> None:
    """Where the card itself is nearly full, the slice says so."""
    hog = lease.start(1, LD_LIBRARY_PATH=str(node.library_dir), LD_PRELOAD="")
    hog.enter(1)
    assert hog.ask("alloc", 14 * GIB).code == 0
    ours = lease.start(1, LD_LIBRARY_PATH=str(node.library_dir)).enter()
    free, total = ours.ask("info")[1:]
    assert (total, free) == (4 * GIB, (15079 - 14 * 1024) * MIB)


def test_gpu_is_refused_when_the_lease_names_a_card_of_another_machine(
    node: SimulatedNode, uuids: list[str], tmp_path: Path
) -> None:
    """A lease that names one card too many opens none."""
    lease = Lease(tmp_path / "lease", (Limit(uuids[0], GIB), Limit(CARDS[0], GIB)))
    refused = lease.start(1, LD_LIBRARY_PATH=str(node.library_dir))
    try:
        assert refused.ask("init").code == SYSTEM_NOT_READY
        assert CARDS[0] in refused.finish()
    finally:
        lease.close()
