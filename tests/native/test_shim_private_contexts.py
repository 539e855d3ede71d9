"""Contexts that a program gets from a private table of the driver, as the CUDA runtime does, are charged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.lease_control import Limit
from tests.hardware.client import MIB, Client
from tests.native.clients import OUT_OF_MEMORY, Lease
from tests.native.test_shim_simulated import LIST, python

CONTEXT = 300 * MIB
TABLE = """
import ctypes
cuda = ctypes.CDLL('libcuda.so.1')
class Table(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_size_t), ('retain', ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)),
        ('release', ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int))]
table, context = ctypes.POINTER(Table)(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuGetExportTable(ctypes.byref(table), b"fenka's contexts")]
def enter():
    return [table.contents.retain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)]
def alloc(mib): return code(d.cuMemAlloc(mib * MIB))
def info(): return [int(n) >> 20 for n in ok(d.cuMemGetInfo())]
MIB = 1 << 20
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """One T4."""
    made = SimulatedNode.create(tmp_path_factory.mktemp("node"), parse_spec("T4"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def lease(node: SimulatedNode, tmp_path: Path) -> Iterator[Lease]:
    """4096 MiB, of which a context costs 300."""
    (uuid,) = python(node, LIST + "print(json.dumps([n.nvmlDeviceGetUUID(h) for h in handles]))")
    made = Lease(tmp_path / "lease", (Limit(uuid, 4096 * MIB, CONTEXT),))
    yield made
    made.close()


@pytest.fixture
def program(node: SimulatedNode, lease: Lease) -> Iterator[Client]:
    """A program of the lease that has the table."""
    environment = lease.environment()
    del environment["LD_LIBRARY_PATH"]
    client = Client(node.library_dir, **environment)
    client.do(f"exec({TABLE!r}, globals())", "0")
    assert client.do("codes") == [0, 0]
    yield client
    client.kill()


def test_private_context_is_charged_at_the_first_charge(program: Client, lease: Lease) -> None:
    """Its first query of the memory has it in the account, and 1000 MiB later the rest is right."""
    assert program.do("enter()") == [0, 0]
    assert lease.held() == 0
    assert program.do("info()") == [3796, 4096]
    assert program.do("alloc(1000)", "info()") == [2796, 4096]
    assert program.do("alloc(2797)") == OUT_OF_MEMORY
    assert lease.held() == CONTEXT + 1000 * MIB


def test_private_context_is_charged_by_every_first_allocation(
    program: Client, lease: Lease
) -> None:
    """Stream-ordered memory comes from a pool, which is charged by another way."""
    assert program.do("enter()", "code(d.cuMemAllocAsync(1000 * MIB, 0))") == 0
    assert lease.held() == CONTEXT + 1000 * MIB


def test_context_is_charged_once_when_it_is_also_retained(program: Client, lease: Lease) -> None:
    """The exported function retains what the table has made; with both references it goes."""
    assert program.do("enter()", "alloc(1000)") == 0
    assert program.do("code(d.cuDevicePrimaryCtxRetain(0))") == 0
    assert lease.held() == CONTEXT + 1000 * MIB
    assert program.do("code(d.cuDevicePrimaryCtxRelease(0))") == 0
    assert lease.held() == CONTEXT + 1000 * MIB
    assert program.do("code(d.cuDevicePrimaryCtxRelease(0))") == 0
    assert lease.held() == 0


def test_privately_released_context_is_discharged_when_memory_is_short(
    program: Client, lease: Lease
) -> None:
    """No hook sees the end; who is refused looks, and gets what the context had held."""
    assert program.do("enter()", "alloc(1000)") == 0
    assert program.do("table.contents.release(0)") == 0
    assert program.do("code(d.cuCtxCreate(0, 0))", "alloc(3700)") == 0
    assert lease.held() == CONTEXT + 3700 * MIB


def test_private_context_beyond_the_slice_leaves_nothing_to_allocate(
    node: SimulatedNode, program: Client, lease: Lease
) -> None:
    """It exists, so it is charged; its program gets no more."""
    assert program.do("enter()", "alloc(3700)") == 0
    environment = lease.environment()
    del environment["LD_LIBRARY_PATH"]
    late = Client(node.library_dir, **environment)
    late.do(f"exec({TABLE!r}, globals())", "0")
    assert late.do("enter()", "alloc(1)") == OUT_OF_MEMORY
    assert late.do("info()") == [0, 4096]
    assert lease.held() == 2 * CONTEXT + 3700 * MIB
    late.kill()


CHILD = """
import json, os
read, write = os.pipe()
if not (child := os.fork()):
    try:
        said = [cuda.cuInit(0), *enter(), alloc(1000), info()]
        os.write(write, json.dumps(said).encode())
    finally:
        os._exit(0)
os.close(write)
said = json.loads(os.read(read, 4096))
os.waitpid(child, 0)
"""


def test_child_is_charged_for_its_own_private_context(program: Client, lease: Lease) -> None:
    """After fork it has none of its parent's; of 4096 MiB two contexts and 2000 are taken then."""
    assert program.do("enter()", "alloc(1000)") == 0
    program.do(f"exec({CHILD!r}, globals())", "0")
    assert program.do("said") == [0, 0, 0, 0, [4096 - 600 - 2000, 4096]]
    assert program.do("info()") == [2796, 4096]
    assert lease.held() == CONTEXT + 1000 * MIB


def test_memory_of_a_new_private_context_is_not_discharged_with_its_predecessor(
    program: Client, lease: Lease
) -> None:
    """Both have the same handle: 700 MiB of the second stay charged when 3300 more are refused."""
    assert program.do("enter()", "alloc(3000)") == 0
    assert program.do("table.contents.release(0)", "enter()", "alloc(700)") == 0
    assert program.do("alloc(3300)") == OUT_OF_MEMORY
    assert lease.held() >= CONTEXT + 700 * MIB
