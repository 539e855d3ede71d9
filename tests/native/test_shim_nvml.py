"""Through NVML a program sees its lease: its cards, its memory, its processes."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fenka.isolation import lease_control
from tests.native.clients import CARDS, GIB, Lease

Make = Callable[..., Lease]

PRELUDE = """
import json, pynvml as n
n.nvmlInit()
def tried(f, *a):
    try: return f(*a)
    except n.NVMLError as e: return type(e).__name__
by_index = n.nvmlDeviceGetHandleByIndex
uuid = lambda h: h if isinstance(h, str) else n.nvmlDeviceGetUUID(h)
"""


def nvml(lease: Lease, expression: str, prelude: str = "", **environment: str) -> Any:
    """What an expression over pynvml gives in the lease."""
    ran = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}{prelude}print(json.dumps({expression}))"],
        env=lease.environment(**environment),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.fixture
def reversed_lease(make_lease: Make) -> Lease:
    """2 GiB of the third card, then 4 GiB of the second."""
    lease = make_lease(1)
    limits = (lease_control.Limit(CARDS[2], 2 * GIB), lease_control.Limit(CARDS[1], 4 * GIB))
    lease_control.write(lease.control, lease_control.Control("test", limits))
    return lease


def test_cards_are_in_the_order_of_the_lease(reversed_lease: Lease) -> None:
    """Count, order and number are the lease's; there is no card behind the last."""
    seen = nvml(
        reversed_lease,
        "[n.nvmlDeviceGetCount(), [uuid(tried(by_index, i)) for i in range(3)],"
        " [n.nvmlDeviceGetIndex(by_index(i)) for i in range(2)]]",
    )
    assert seen == [2, [CARDS[2], CARDS[1], "NVMLError_InvalidArgument"], [0, 1]]


def test_other_cards_are_not_found(reversed_lease: Lease) -> None:
    """Neither a UUID nor a PCI address leads to a card of somebody else."""
    seen = nvml(
        reversed_lease,
        f"[uuid(tried(n.nvmlDeviceGetHandleByUUID, u)) for u in {list(CARDS)!r}]"
        " + [uuid(tried(n.nvmlDeviceGetHandleByPciBusId, f'0000:0{i}:00.0')) for i in range(4)]",
    )
    none = "NVMLError_NotFound"
    assert seen == [none, CARDS[1], CARDS[2], none] * 2


def test_cards_found_by_their_place_are_those_of_the_lease(reversed_lease: Lease) -> None:
    """Near another card, and near a CPU: the number, all of them, and as many as there is room for."""
    seen = nvml(
        reversed_lease,
        "[[uuid(h) for h in n.nvmlDeviceGetTopologyNearestGpus(by_index(0), 30)],"
        " [uuid(h) for h in n.nvmlSystemGetTopologyGpuSet(0)], one(0), one(1)]",
        prelude="import ctypes\n"
        "def one(room):\n"
        "    count, found = ctypes.c_uint(room), (n.c_nvmlDevice_t * 4)()\n"
        "    code = n._nvmlGetFunctionPointer('nvmlSystemGetTopologyGpuSet')(0, ctypes.byref(count), found)\n"
        "    return [code, count.value]\n",
    )
    assert seen == [[CARDS[1]], [CARDS[1], CARDS[2]], [0, 2], [0, 1]]


@pytest.mark.parametrize("version", ["None", "n.nvmlMemory_v2"])
def test_memory_is_the_slice_of_all_processes(lease: Lease, version: str) -> None:
    """Total, used and free agree with cuMemGetInfo, in both versions of the question."""
    client = lease.start().enter()
    client.ask("alloc", GIB)
    lease.start().enter().ask("alloc", 2 * GIB)
    shown = nvml(
        lease,
        f"[[m.total, m.used, m.free] for m in [n.nvmlDeviceGetMemoryInfo(by_index(0), {version})]][0]",
    )
    assert shown == [4 * GIB, 3 * GIB, GIB]
    assert client.ask("info")[1:] == (GIB, 4 * GIB)


PROCESSES = "[[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGet{}RunningProcesses{}(by_index(0))]"


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_only_processes_of_the_lease_are_listed(lease: Lease, version: str) -> None:
    """Strangers are left out; ours are there with their bytes, also when NVML names them otherwise."""
    known, idle, unnamed = (lease.start().enter() for _ in range(3))
    known.ask("alloc", 2 * GIB)
    unnamed.ask("alloc", GIB)
    seen = nvml(
        lease,
        PROCESSES.format("Compute", version),
        FENKA_NULL_PIDS=f"1,{known.process.pid},{idle.process.pid},77",
    )
    held = {known: 2 * GIB, idle: 0, unnamed: GIB}
    assert dict(seen) == {c.process.pid: b for c, b in held.items()}


def test_graphics_processes_are_only_those_that_the_driver_knows(lease: Lease) -> None:
    """Nobody is said to draw because he computes."""
    drawing, computing = lease.start().enter(), lease.start().enter()
    drawing.ask("alloc", GIB)
    computing.ask("alloc", GIB)
    pids = f"1,{drawing.process.pid}"
    seen = nvml(lease, PROCESSES.format("Graphics", "_v3"), FENKA_NULL_PIDS=pids)
    assert seen == [[drawing.process.pid, GIB]]


@pytest.mark.parametrize(("mode", "shown"), [("COMPUTE", 2), ("ALL", 2), ("GRAPHICS", 1)])
def test_detailed_list_has_only_processes_of_the_lease(lease: Lease, mode: str, shown: int) -> None:
    """One that the driver does not name computes, and is in no list of what draws."""
    known, unnamed = lease.start().enter(), lease.start().enter()
    known.ask("alloc", 2 * GIB)
    unnamed.ask("alloc", GIB)
    seen = nvml(
        lease,
        f"[[p.pid, p.usedGpuMemory] for p in"
        f" n.nvmlDeviceGetRunningProcessDetailList(by_index(0), 1, n.NVML_PROCESS_MODE_{mode})]",
        FENKA_NULL_PIDS=f"1,{known.process.pid},77",
    )
    held = [(known.process.pid, 2 * GIB), (unnamed.process.pid, GIB)]
    assert {(pid, used) for pid, used in seen} == {*held[:shown]}


def test_process_list_returns_the_needed_size_when_the_array_is_too_small(lease: Lease) -> None:
    """As NVML does: the number of processes, and an error, when the caller's array is too short."""
    for _ in range(2):
        lease.start().enter().ask("alloc", GIB)
    seen = nvml(
        lease,
        "[f(by_index(0), c.byref(size), None), size.value]"
        " if [c := __import__('ctypes'), size := c.c_uint(0),"
        " f := n._nvmlGetFunctionPointer('nvmlDeviceGetComputeRunningProcesses_v3')] else 0",
        FENKA_NULL_PIDS="1",
    )
    assert seen == [7, 2]


TABLE = """
import ctypes as c
n.nvmlInit()
ask = n._nvmlGetFunctionPointer("nvmlInternalGetExportTable")
def table(id):
    found = c.POINTER(c.c_size_t)()
    code = ask(c.byref(found), id)
    return [code, [i for i in range(1, min(512, found[0] // 8)) if found[i] != i] if found else None]
smi = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
"""

OURS = [81, 213, 214, 215]
TABLES = {
    "of the driver that is known": ("535.309.01:4096", OURS),
    "with no more than is replaced": ("535.54:1728", OURS),
    "of another driver": ("560.35.05:4096", []),
    "of a driver that does not say": (":4096", []),
    "that ends before": ("535.309.01:1720", []),
    "that is larger than any": ("535.309.01:8200", []),
    "whose first word is no size": ("535.309.01:18446744073709551615", []),
}


@pytest.mark.parametrize(("table", "replaced"), TABLES.values(), ids=TABLES)
def test_private_table_is_replaced_when_its_driver_is_known(
    lease: Lease, table: str, replaced: list[int]
) -> None:
    """1728 bytes are 216 words, 0 to 215. What is not known goes through as it is, word for word."""
    said = nvml(lease, "[table(smi), table(b'x' * 16), ask(None, smi), ask(c.byref(c.c_void_p()), None)]",
                prelude=TABLE, FENKA_NULL_TABLE=table)  # fmt: skip
    invalid = 2
    assert said == [[0, replaced], [0, []], invalid, invalid]


def test_nothing_is_shown_when_there_is_no_lease(lease: Lease) -> None:
    """A broken lease closes NVML as well."""
    lease.control.unlink()
    seen = nvml(
        lease,
        "[tried(n.nvmlDeviceGetCount), tried(by_index, 0),"
        f" tried(n.nvmlDeviceGetHandleByUUID, {CARDS[0]!r})]",
    )
    assert seen == ["NVMLError_NoPermission"] * 3
