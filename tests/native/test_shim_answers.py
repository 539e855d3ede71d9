"""A slice gives the driver's own answers, the right ones, to what other projects' test suites ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.lease_control import Limit
from tests.hardware import test_simulated_graph_nodes
from tests.hardware.client import MIB, Client
from tests.hardware.random_programs import GRAPHS, play
from tests.native.clients import Lease
from tests.native.test_shim_simulated import LIST, python

INVALID_VALUE, INVALID_HANDLE, NOT_FOUND = 1, 400, 500
CAP = 4096 * MIB
NODE = """version = 1
driver_version = "620.10"
cuda_version = "13.5"
[[card]]
model = "H100-80G"
count = 2
"""
SETUP = """
import ctypes
MIB = 1 << 20
text = b'.version 7.0 .target sm_90 .global .b8 kept[64]; .visible .entry k_us2000() { ret; }'
module = ok(d.cuModuleLoadData(text))
s = ok(d.cuStreamCreate(1))
p, gone = ok(d.cuMemAlloc(MIB)), ok(d.cuMemAllocManaged(MIB, 1))
ok(d.cuMemFree(gone))
def pool(device):
    props = d.CUmemPoolProps()
    props.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = device
    return ok(d.cuMemPoolCreate(props))
SM = d.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
def part(count):
    whole = ok(d.cuDeviceGetDevResource(0, SM))
    return ok(d.cuDevSmResourceSplitByCount(1, whole, 0, count))[0][0]
def green(count):
    parts = ok(d.cuDevResourceGenerateDesc([part(count)], 1))
    return ok(d.cuGreenCtxCreate(parts, 0, 1))
def tiled(*box):
    sizes, ones = [d.cuuint64_t(64)] * 2, [d.cuuint32_t(1)] * 2
    return d.cuTensorMapEncodeTiled(
        d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, p, sizes, [d.cuuint64_t(256)],
        [d.cuuint32_t(n) for n in box], ones, d.CUtensorMapInterleave(0), d.CUtensorMapSwizzle(0),
        d.CUtensorMapL2promotion(0), d.CUtensorMapFloatOOBfill(0))
DUMP = d.CUcoredumpSettings
def name_of_dump():
    ok(d.cuCoredumpSetAttribute(DUMP.CU_COREDUMP_FILE, b'mine'))
    return [ok(get(DUMP.CU_COREDUMP_FILE)).decode()
            for get in (d.cuCoredumpGetAttribute, d.cuCoredumpGetAttributeGlobal)]
def captured_nothing():
    ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode(2)))
    nothing = ok(d.cuMemAllocAsync(0, s))
    answer = [int(nothing), code(d.cuMemFreeAsync(nothing, s))]
    return answer + [code(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(s)), 4))]
def clusters(x):
    c = d.CUlaunchConfig()
    c.gridDimX = c.gridDimY = c.gridDimZ = c.blockDimY = c.blockDimZ = 1
    c.blockDimX = 1024
    a = d.CUlaunchAttribute()
    a.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = x, 1, 1
    c.attrs, c.numAttrs = [a], 1
    return d.cuOccupancyMaxActiveClusters(ok(d.cuModuleGetFunction(module, b'k_us2000')), c)
def elapsed(stream):
    f, (a, b) = ok(d.cuModuleGetFunction(module, b'k_us2000')), [ok(d.cuEventCreate(0)) for _ in 'ab']
    ok(d.cuEventRecord(a, stream))
    ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
    ok(d.cuEventRecord(b, stream))
    ok(d.cuEventSynchronize(b))
    return round(ok(d.cuEventElapsedTime(a, b)))
def seen():
    import pynvml as n
    n.nvmlInit()
    uuid = n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0))
    bare = n.nvmlDeviceGetHandleByUUID(uuid.removeprefix('GPU-'))
    cpus = n.nvmlDeviceGetCpuAffinity(bare, 4)
    import os
    return [n.nvmlDeviceGetUUID(bare) == uuid, sum(bin(x).count('1') for x in cpus) == os.cpu_count()]
"""
ANSWERS = {
    "absent kernel": ("code(d.cuModuleGetFunction(module, b'other'))", NOT_FOUND),
    "absent variable": ("code(d.cuModuleGetGlobal(module, b'other'))", NOT_FOUND),
    "variable": ("int(ok(d.cuModuleGetGlobal(module, b'kept'))[1])", 64),
    "nothing of a pool": ("code(d.cuMemAllocFromPoolAsync(0, pool(0), s))", 0),
    "nothing, captured, and a graph for kernels": ("captured_nothing()", [0, 0, 0]),
    "name of no kernel": ("code(d.cuKernelGetName(0))", INVALID_VALUE),
    "stale address": ("code(d.cuMemcpyAsync(p, gone, 8, s))", INVALID_VALUE),
    "stale address, host's": ("code(d.cuMemcpyHtoD(p, int(gone), 8))", INVALID_VALUE),
    "NVML": ("seen()", [True, True]),
    "tensor map": ("[code(tiled(16, 64)), code(tiled(3, 64))]", [0, INVALID_VALUE]),
    "core dumps": ("name_of_dump()", ["mine", ""]),
    "clusters": ("[ok(clusters(2)), code(clusters(16))]", [66, 912]),
    "shared memory": ("code(d.cuKernelSetCacheConfig(0, d.CUfunc_cache(1), 0))", INVALID_HANDLE),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Return a node with two H100 and the newest driver."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "node.toml").write_text(NODE)
    made = SimulatedNode.create(folder / "node", parse_spec(str(folder / "node.toml")))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def lease(node: SimulatedNode, tmp_path: Path) -> Lease:
    """Return a lease of 4096 MiB of each card."""
    uuids = python(node, LIST + "print(json.dumps([n.nvmlDeviceGetUUID(h) for h in handles]))")
    return Lease(tmp_path / "lease", tuple(Limit(uuid, CAP) for uuid in uuids))


@pytest.fixture(params=["bare", "slice"])
def program(request: pytest.FixtureRequest, node: SimulatedNode, lease: Lease) -> Iterator[Client]:
    """Return a program with the helpers above: on the cards, and in slices of them."""
    environment = lease.environment() if request.param == "slice" else {}
    environment.pop("LD_LIBRARY_PATH", None)
    client = Client(node.library_dir, **environment).enter()
    client.do(f"exec({SETUP!r}, globals())", "0")
    yield client
    client.kill()
    for pipe in (client.process.stdin, client.process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.mark.parametrize("question", ANSWERS)
def test_answer_is_the_same_in_a_slice(program: Client, question: str) -> None:
    """Each answer is the one that the suites expect of NVIDIA's driver."""
    call, expected = ANSWERS[question]
    assert program.do(call) == expected


def test_pool_of_another_card_is_charged_to_its_own(program: Client, lease: Lease) -> None:
    """A pool's memory comes from the pool's card, whatever context is current."""
    first, second = lease.held(0), lease.held(1)
    assert program.do("other = pool(1)", "code(d.cuMemAllocFromPoolAsync(64 * MIB, other, s))") == 0
    if lease.held(0) > 0:
        assert lease.held(0) == first
        assert lease.held(1) - second >= 64 * MIB


def test_green_context_has_its_part_of_the_card(program: Client, lease: Lease) -> None:
    """Its kernels take as much longer, and it ends with all that it has; the primary one stays."""
    before = lease.held(0)
    assert program.do(
        "g = green(66)",
        "c = ok(d.cuCtxFromGreenCtx(g))",
        "mine = ok(d.cuGreenCtxStreamCreate(g, 1, 0))",
        "[ok(d.cuGreenCtxGetDevResource(g, SM)).sm.smCount, code(d.cuCtxDestroy(c)),"
        " int(ok(d.cuStreamGetGreenCtx(mine))) == int(g), int(ok(d.cuStreamGetGreenCtx(s))),"
        " elapsed(s), elapsed(mine)]",
    ) == [72, 201, True, 0, 2, 4]
    program.do(
        "ok(d.cuCtxPushCurrent(c))", "ok(d.cuMemAlloc(64 * MIB))", "ok(d.cuCtxPopCurrent())", "0"
    )
    program.do("ok(d.cuGreenCtxDestroy(g))", "0")
    assert program.do("[code(d.cuGreenCtxDestroy(g)), code(d.cuMemAlloc(1))]") == [INVALID_VALUE, 0]
    assert lease.held(0) <= before + 2 * MIB


@pytest.mark.parametrize("seed", range(2))
def test_random_graph_programs_run_in_a_slice(node: SimulatedNode, lease: Lease, seed: int) -> None:
    """All moves in any order, on handles that may be stale, neither end the process nor exceed the slice."""
    environment = lease.environment()
    del environment["LD_LIBRARY_PATH"]
    client = Client(node.library_dir, **environment).enter()
    try:
        client.do(f"exec({test_simulated_graph_nodes.SETUP!r}, globals())", "0")
        play(client, GRAPHS, seed, 200)
        assert lease.held(0) <= CAP
    finally:
        client.kill()
        for pipe in (client.process.stdin, client.process.stdout):
            if pipe is not None:
                pipe.close()
