"""Device memory of a simulated card: counted over processes, refused when full, given back."""

import json
import os
import signal
from pathlib import Path

import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MIB, Client, MakeClient
from tests.waiting import wait_until

T4_BYTES = 15079 * MIB
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
CHURN = "while True: d.cuMemFree(d.cuMemAlloc(1 << 30)[1])"


def test_two_programs_share_one_card(make_client: MakeClient) -> None:
    """What one holds the other cannot have; the last page can be had; a free gives back exactly."""
    first, other = make_client().enter(), make_client().enter()
    first.do(f"p = ok(d.cuMemAlloc({10000 * MIB}))", "int(p)")
    # 15079 - 10000 = 5079 MiB are left: 2539 pages, and granules in one half
    assert other.free_bytes() == 5079 * MIB
    assert other.do(f"code(d.cuMemAlloc({5078 * MIB + 1}))") == OUT_OF_MEMORY
    assert other.free_bytes() == 5079 * MIB
    assert other.do(f"code(d.cuMemAlloc({5077 * MIB + 1}))") == 0
    assert first.free_bytes() == MIB
    assert other.do(f"code(d.cuMemAlloc({MIB}))") == 0
    assert first.do("code(d.cuMemAlloc(1))") == OUT_OF_MEMORY
    assert first.do("code(d.cuMemFree(p))") == 0
    assert other.free_bytes() == 10000 * MIB


@pytest.mark.parametrize(
    ("allocate", "free", "charged"),
    [
        ("ok(d.cuMemAlloc(1000))", "d.cuMemFree(p)", 1024),  # in granules of 512
        ("ok(d.cuMemAlloc(1 << 20))", "d.cuMemFree(p)", MIB),
        ("ok(d.cuMemAlloc((1 << 20) + 1))", "d.cuMemFree(p)", 2 * MIB),  # in pages
        ("ok(d.cuMemAlloc(4 << 30))", "d.cuMemFree(p)", 4096 * MIB),
        # lines of 1000 bytes get a pitch of 1024
        ("ok(d.cuMemAllocPitch(1000, 3, 4))[0]", "d.cuMemFree(p)", 3072),
        ("ok(d.cuMemAllocManaged(1 << 30, 1))", "d.cuMemFree(p)", 1024 * MIB),
        ("ok(d.cuMemAllocAsync(1 << 30, 0))", "d.cuMemFreeAsync(p, 0)", 1024 * MIB),
        ("ok(d.cuMemAllocAsync(1 << 30, 0))", "d.cuMemFree(p)", 1024 * MIB),
        (
            "ok(d.cuMemAllocFromPoolAsync(1 << 20, ok(d.cuDeviceGetDefaultMemPool(0)), 0))",
            "d.cuMemFreeAsync(p, 0)",
            2 * MIB,
        ),
        ("ok(d.cuMemHostAlloc(1 << 20, 0))", "d.cuMemFreeHost(p)", 0),
    ],
)
def test_every_allocation_is_charged_once_and_freed_once(
    client: Client, allocate: str, free: str, charged: int
) -> None:
    """The card's free memory falls by what was charged; a second free is an error, not a gift."""
    client.do(f"p = {allocate}", "0")
    assert client.free_bytes() == T4_BYTES - charged
    assert client.do(f"code({free})") == 0
    assert client.free_bytes() == T4_BYTES
    assert client.do(f"code({free})") == INVALID_VALUE
    assert client.free_bytes() == T4_BYTES


def test_pools_count_what_was_taken_from_them(client: Client) -> None:
    """The default pool says how much of it is in use, and its high-water mark stays."""
    attribute = "d.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_"
    client.do(
        "pool = ok(d.cuDeviceGetDefaultMemPool(0))", "p = ok(d.cuMemAllocAsync(1 << 20, 0))", "0"
    )
    assert client.do(f"ok(d.cuMemPoolGetAttribute(pool, {attribute}CURRENT))") == MIB
    client.do("ok(d.cuMemFreeAsync(p, 0))", "0")
    assert client.do(f"ok(d.cuMemPoolGetAttribute(pool, {attribute}CURRENT))") == 0
    assert client.do(f"ok(d.cuMemPoolGetAttribute(pool, {attribute}HIGH))") == MIB


@pytest.mark.parametrize(
    "call",
    [
        "d.cuMemFree(0x1234)",
        "d.cuMemFree(int(p) + 256)",  # not the beginning
        "d.cuMemAlloc(0)",
        "d.cuMemcpyDtoH(bytearray(4097), p, 4097)",  # beyond the end
        "d.cuMemcpyHtoD(int(p) + 4000, bytes(97), 97)",
        "d.cuMemsetD8(p, 1, 4097)",
        "d.cuMemsetD32(int(p) + 1, 1, 1)",  # not aligned
        "d.cuMemFreeHost(p)",
    ],
)
def test_invalid_addresses_are_rejected(client: Client, call: str) -> None:
    """Memory that is not what the call needs is an invalid value and no crash."""
    client.do("p = ok(d.cuMemAlloc(4096))", "0")
    assert client.do(f"code({call})") == INVALID_VALUE


def test_memory_is_freed_with_its_context(client: Client) -> None:
    """Destroying a context, and resetting a primary one, frees what was allocated in it only."""
    client.do("first = ok(d.cuMemAlloc(1 << 30))", "own = ok(d.cuCtxCreate(0, 0))", "0")
    client.do("second = ok(d.cuMemAlloc(2 << 30))", "0")
    assert client.free_bytes() == T4_BYTES - 3072 * MIB
    assert client.do("code(d.cuCtxDestroy(own))") == 0
    assert client.do("code(d.cuCtxDestroy(own))") == 201  # CUDA_ERROR_INVALID_CONTEXT
    assert client.free_bytes() == T4_BYTES - 1024 * MIB
    assert client.do("code(d.cuDevicePrimaryCtxReset(0))") == 0
    assert client.do("code(d.cuMemGetInfo())") == 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED
    client.enter()
    assert client.free_bytes() == T4_BYTES


def test_memory_is_freed_when_a_program_is_killed(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """After SIGKILL its memory is free again, and NVML does not list it."""
    client = make_client().enter()
    client.do("p = ok(d.cuMemAlloc(8 << 30))", "0")
    with Driver.open(node.library_dir) as driver:
        assert [(p.pid, p.used_mib) for p in driver.processes()] == [(client.pid, 8192)]
        client.process.kill()
        wait_until(lambda: driver.processes() == ())
        assert driver.readings()[0].used_mib == 0


def test_memory_is_kept_when_a_child_inherited_the_driver(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """It is used, by no process, until the last copy of the driver's descriptors is closed."""
    parent, other = make_client().enter(), make_client().enter()
    parent.do("p = ok(d.cuMemAlloc(8 << 30))", "import os, signal", "0")
    child = parent.do("child = os.fork() or [os.closerange(0, 3), signal.pause()]", "child")
    with Driver.open(node.library_dir) as driver:
        parent.kill()
        wait_until(lambda: [process.pid for process in driver.processes()] == [other.pid])
        assert other.free_bytes() == T4_BYTES - 8192 * MIB
        assert driver.readings()[0].used_mib == 8192
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: driver.readings()[0].used_mib == 0)


def test_no_memory_remains_after_many_kills(make_client: MakeClient, node: SimulatedNode) -> None:
    """After several programs died while allocating, a newcomer can have the whole card."""
    for _ in range(5):
        clients = [make_client().enter() for _ in range(2)]
        for client in clients:
            assert client.process.stdin is not None
            client.process.stdin.write(json.dumps([CHURN, "0"]) + "\n")
            client.process.stdin.flush()
        with Driver.open(node.library_dir) as driver:
            wait_until(lambda: driver.readings()[0].used_mib)
        for client in clients:
            client.kill()
    last = make_client().enter()
    wait_until(lambda: last.free_bytes() == T4_BYTES)
    assert last.do(f"code(d.cuMemAlloc({T4_BYTES - MIB}))") == 0


def test_forked_child_must_initialise_again(client: Client) -> None:
    """A forked child is not initialised, can attach itself, and its end leaves the parent's memory."""
    client.do("p = ok(d.cuMemAlloc(1 << 30))", "import os", "0")
    status = client.do(
        "def child():\n"
        "    before = code(d.cuMemAlloc(1))\n"
        "    ok(d.cuInit(0)); c = ok(d.cuDevicePrimaryCtxRetain(0)); ok(d.cuCtxSetCurrent(c))\n"
        "    own = ok(d.cuMemAlloc(2 << 30))\n"
        "    used = ok(d.cuMemGetInfo())[1] - ok(d.cuMemGetInfo())[0]\n"
        "    os._exit(before if used == 3 << 30 else 99)",
        "pid = os.fork() or child()",
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
    )
    assert status == 3  # CUDA_ERROR_NOT_INITIALIZED
    wait_until(lambda: client.free_bytes() == T4_BYTES - 1024 * MIB)


def test_driver_touches_no_reused_descriptor_when_a_program_closes_all(
    client: Client, tmp_path: Path
) -> None:
    """As daemons do it: the driver gives up, and touches no file that got one of its numbers since."""
    kept = tmp_path / "kept"
    kept.write_bytes(b"x" * 8192)
    client.do("import os", "p = ok(d.cuMemAlloc(1 << 20))", "os.closerange(3, 100)", "0")
    client.do(f"files = [open({str(kept)!r}, 'r+b') for _ in range(90)]", "0")
    client.do("[d.cuMemFree(p), d.cuMemAlloc(1 << 20), d.cuMemAlloc(8)]", "0")
    status = client.do(
        "def child():\n"
        "    try: [os.fstat(file.fileno()) for file in files]\n"
        "    except OSError: os._exit(1)\n"
        "    os._exit(0)",
        "pid = os.fork() or child()",
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
    )
    assert status == 0
    assert kept.read_bytes() == b"x" * 8192


def test_program_gets_errors_when_the_card_server_is_gone(
    make_client: MakeClient, node: SimulatedNode
) -> None:
    """Once the server has gone nothing is granted any more, and a restarted one knows nobody."""
    client = make_client().enter()
    client.do("p = ok(d.cuMemAlloc(1 << 30))", "0")
    node.stop()
    not_ready = 802  # CUDA_ERROR_SYSTEM_NOT_READY
    wait_until(lambda: client.do("code(d.cuMemAlloc(1 << 20))") == not_ready)
    assert make_client().do("code(d.cuInit(0))") == not_ready
    node.start()
    assert client.do("code(d.cuMemAlloc(1 << 20))") == not_ready
    assert make_client().enter().free_bytes() == T4_BYTES


def test_managed_allocation_is_refused_when_it_would_take_half_of_the_machine(
    make_client: MakeClient,
) -> None:
    """The sentence says what to do; an allocation within the bound is made."""
    client = make_client(FENKA_SIMULATED_MANAGED_MIB="64").enter()
    assert client.do("code(d.cuMemAllocManaged(65 << 20, 1))") == 2
    assert client.do("code(d.cuMemAllocManaged(64 << 20, 1))") == 0
