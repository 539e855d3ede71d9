"""Memory and events that one program shows to another: seen by both, charged to the owner."""

import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MIB, MakeClient, MakeNode
from tests.waiting import wait_until

T4_BYTES = 15079 * MIB
INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT, MAP_FAILED, INVALID_HANDLE = 1, 101, 201, 205, 400
NOT_READY = 600
# Handles cross as text, as programs send them over their own channels.
HANDLE = "(h := ok(d.cuIpcGetMemHandle(p)), ctypes.string_at(h.getPtr(), 64).hex())[1]"
RECEIVE = "h = d.CUipcMemHandle(); ctypes.memmove(h.getPtr(), bytes.fromhex({!r}), 64)"
READ = "(ok(d.cuMemcpyDtoH(out, {}, len(out))), out.decode())[1]"


@pytest.mark.parametrize("size", [1000, 8 * MIB])
def test_shared_memory_is_visible_to_both_and_charged_to_its_owner(
    make_client: MakeClient, node: SimulatedNode, size: int
) -> None:
    """Each reads what the other wrote, in small pieces as in large ones; opening charges nothing."""
    owner, other = make_client().enter(), make_client().enter()
    owner.do("first = ok(d.cuMemAlloc(1000))", f"p = ok(d.cuMemAlloc({size}))", "0")
    owner.do("ok(d.cuMemcpyHtoD(p, b'owner', 5))", "ok(d.cuMemsetD8(first, 1, 1000))", "0")
    before = other.free_bytes()
    other.do(
        "import ctypes",
        RECEIVE.format(owner.do("import ctypes", HANDLE)),
        "q = ok(d.cuIpcOpenMemHandle(h, 1))",
        "0",
    )
    assert other.do("out = bytearray(5)", READ.format("q")) == "owner"
    assert other.do(f"code(d.cuMemsetD8(int(q) + {size}, 0, 1))") == INVALID_VALUE
    other.do("ok(d.cuMemcpyHtoD(q, b'other', 5))", "0")
    assert owner.do("out = bytearray(5)", READ.format("p")) == "other"
    assert other.free_bytes() == before
    with Driver.open(node.library_dir) as driver:
        held = {process.pid: process.used_mib for process in driver.processes()}
    assert held == {owner.pid: -(-size // MIB) if size >= MIB else 0, other.pid: 0}


def test_a_handle_opened_twice_is_closed_twice(make_client: MakeClient) -> None:
    """The same address comes back; it stays until as many have closed it, and cuMemFree is no close."""
    owner, other = make_client().enter(), make_client().enter()
    owner.do("p = ok(d.cuMemAlloc(4096))", "0")
    other.do(
        "import ctypes",
        RECEIVE.format(owner.do("import ctypes", HANDLE)),
        "q = ok(d.cuIpcOpenMemHandle(h, 1))",
        "0",
    )
    assert other.do("int(ok(d.cuIpcOpenMemHandle(h, 1))) == int(q)") == 1
    assert other.do("code(d.cuMemFree(q))") == INVALID_VALUE
    assert other.do("code(d.cuIpcCloseMemHandle(q))") == 0
    assert other.do("code(d.cuMemsetD8(q, 1, 4096))") == 0
    assert other.do("code(d.cuIpcCloseMemHandle(q))") == 0
    assert other.do("code(d.cuMemsetD8(q, 1, 4096))") == INVALID_VALUE
    assert other.do("code(d.cuIpcCloseMemHandle(q))") == INVALID_VALUE
    assert owner.do("code(d.cuIpcCloseMemHandle(p))") == INVALID_VALUE
    assert owner.do("code(d.cuMemFree(p))") == 0
    assert owner.free_bytes() == T4_BYTES


def test_handles_of_unshareable_memory_are_rejected(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """Pools' and managed memory, one's own handle, another card's context, rubbish."""
    node = make_node("T4*2")
    owner, other = make_client(node).enter(), make_client(node).enter(1)
    for allocate in ("d.cuMemAllocAsync(4096, 0)", "d.cuMemAllocManaged(4096, 1)"):
        assert owner.do(f"code(d.cuIpcGetMemHandle(ok({allocate})))") == INVALID_VALUE
    owner.do("p = ok(d.cuMemAlloc(4096))", "0")
    handle = owner.do("import ctypes", HANDLE)
    assert (
        owner.do("import ctypes", RECEIVE.format(handle), "code(d.cuIpcOpenMemHandle(h, 1))")
        == INVALID_CONTEXT
    )
    assert (
        other.do("import ctypes", RECEIVE.format(handle), "code(d.cuIpcOpenMemHandle(h, 1))")
        == INVALID_DEVICE
    )
    other.enter(0)
    assert other.do("code(d.cuIpcOpenMemHandle(h, 0))") == INVALID_VALUE  # flags
    assert other.do("code(d.cuIpcOpenMemHandle(d.CUipcMemHandle(), 1))") == INVALID_VALUE
    assert other.do("code(d.cuIpcOpenMemHandle(h, 1))") == 0


def test_handles_are_invalid_when_their_owner_ends(make_client: MakeClient) -> None:
    """After the owner was killed its handle opens no more; who had opened it keeps the bytes, which stay
    charged to the card until it closes them."""
    owner, other, late = (make_client().enter() for _ in range(3))
    owner.do("p = ok(d.cuMemAlloc(1 << 20))", "ok(d.cuMemcpyHtoD(p, b'still', 5))", "0")
    handle = owner.do("import ctypes", HANDLE)
    other.do(
        "import ctypes",
        RECEIVE.format(handle),
        "q = ok(d.cuIpcOpenMemHandle(h, 1))",
        "out = bytearray(5)",
        "0",
    )
    owner.kill()
    late.do("import ctypes", RECEIVE.format(handle), "0")
    wait_until(lambda: late.do("code(d.cuIpcOpenMemHandle(h, 1))") == MAP_FAILED)
    assert other.do(READ.format("q")) == "still"
    assert other.free_bytes() == T4_BYTES - MIB
    assert other.do("code(d.cuIpcCloseMemHandle(q))") == 0
    wait_until(lambda: other.free_bytes() == T4_BYTES)


def test_shared_event_is_visible_to_both(make_client: MakeClient) -> None:
    """An event recorded after a long kernel in one program is waited for in the other."""
    owner, other = make_client().enter(), make_client().enter()
    owner.do("module = ok(d.cuModuleLoadData(b'an image'))", "0")
    owner.do("f = ok(d.cuModuleGetFunction(module, b'k_us300000'))", "0")
    # DISABLE_TIMING | INTERPROCESS
    owner.do("e = ok(d.cuEventCreate(6))", "0")
    text = owner.do(
        "import ctypes",
        "h = ok(d.cuIpcGetEventHandle(e))",
        "ctypes.string_at(h.getPtr(), 64).hex()",
    )
    other.do(
        "import ctypes",
        "h = d.CUipcEventHandle()",
        f"ctypes.memmove(h.getPtr(), bytes.fromhex({text!r}), 64)",
        "e = ok(d.cuIpcOpenEventHandle(h))",
        "0",
    )
    assert other.do("code(d.cuEventQuery(e))") == 0  # nothing was recorded
    owner.do(
        "ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0))", "ok(d.cuEventRecord(e, 0))", "0"
    )
    assert other.do("ok(d.cuEventSynchronize(e))", "code(d.cuEventQuery(e))") == 0
    assert owner.do("code(d.cuEventQuery(e))") == 0
    owner.do(
        "f = ok(d.cuModuleGetFunction(module, b'k_us600000000'))",
        "ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0))",
        "ok(d.cuEventRecord(e, 0))",
        "0",
    )
    assert other.do("code(d.cuEventQuery(e))") == NOT_READY
    assert other.do("code(d.cuEventDestroy(e))") == 0
    assert owner.do("code(d.cuEventDestroy(e))") == 0
    assert owner.do("code(d.cuIpcGetEventHandle(ok(d.cuEventCreate(2))))") == INVALID_HANDLE
    assert owner.do("code(d.cuEventCreate(4))") == INVALID_VALUE  # shared events have no timing
