"""Graphs, captured streams and each thread's own default stream."""

import pytest

from tests.hardware.client import MIB, Client, MakeClient

T4_BYTES = 15079 * MIB
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
UNSUPPORTED, INVALIDATED, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED, WRONG_THREAD = (
    900, 901, 903, 904, 905, 906, 907, 908,
)  # fmt: skip
SETUP = """
import ctypes, threading, time
MIB = 1 << 20
GLOBAL, THREAD, RELAXED = (d.CUstreamCaptureMode(n) for n in range(3))
module = ok(d.cuModuleLoadData(b'an image'))
f = ok(d.cuModuleGetFunction(module, b'k_us20000'))
s, t = (ok(d.cuStreamCreate(1)) for _ in range(2))
lib = ctypes.CDLL('libcuda.so.1')
def launch(stream): return code(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
def begin(stream, mode=RELAXED): return code(d.cuStreamBeginCapture(stream, mode))
def end(stream): return d.cuStreamEndCapture(stream)
def status(stream): return int(ok(d.cuStreamIsCapturing(stream)))
def types(g):
    count = int(ok(d.cuGraphGetNodes(g, 0))[1])
    return [int(ok(d.cuGraphNodeGetType(n))) for n in ok(d.cuGraphGetNodes(g, count))[0]]
def memory(name):
    attribute = getattr(d.CUgraphMem_attribute, 'CU_GRAPH_MEM_ATTR_' + name)
    return int(ok(d.cuDeviceGetGraphMemAttribute(0, attribute))) // MIB
def elsewhere(call):
    found = []
    def work(): ok(d.cuCtxSetCurrent(context)); found.append(call())
    thread = threading.Thread(target=work); thread.start(); thread.join()
    return found[0]
def alloc_node(g, needs, size):
    p = d.CUDA_MEM_ALLOC_NODE_PARAMS()
    p.poolProps.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.poolProps.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.bytesize = size
    node = ok(d.cuGraphAddMemAllocNode(g, needs, len(needs), p))
    return node, int(ok(d.cuGraphMemAllocNodeGetParams(node)).dptr)
def kernel_node(g, needs):
    p = d.CUDA_KERNEL_NODE_PARAMS()
    p.func, p.gridDimX, p.gridDimY, p.gridDimZ = f, 1, 1, 1
    p.blockDimX, p.blockDimY, p.blockDimZ = 32, 1, 1
    return ok(d.cuGraphAddKernelNode(g, needs, len(needs), p))
"""


@pytest.fixture
def program(client: Client) -> Client:
    """Return a client with the helpers above: streams s and t, and a kernel f of 20 ms."""
    client.do(f"exec({SETUP!r}, globals())", "0")
    return client


def test_a_captured_stream_does_nothing_until_the_launch(program: Client) -> None:
    """Kernels, copies and fills go into the graph in order; each launch takes what they take."""
    program.do("p = ok(d.cuMemAlloc(8))", "ok(d.cuMemsetD8(p, 46, 8))", "begin(s)")
    assert program.do("status(s)") == 1
    program.do("launch(s), launch(s), d.cuMemsetD8Async(p, 65, 4, s)", "q = int(p) + 4", "0")
    program.do(
        "launch(s), ok(d.cuMemcpyDtoDAsync(q, p, 4, s))",
        "g = ok(end(s))",
        "out = bytearray(8)",
        "0",
    )
    assert program.do("status(s)") == 0
    assert program.do("types(g)") == [0, 0, 2, 0, 1]  # kernel, memset, memcpy
    assert program.do("code(d.cuStreamQuery(s))") == 0
    read = "(ok(d.cuMemcpyDtoH(out, p, 8)), out.decode())[1]"
    assert program.do(read) == "." * 8
    program.do(
        "e = ok(d.cuGraphInstantiate(g, 0))", "a, b = (ok(d.cuEventCreate(0)) for _ in 'ab')", "0"
    )
    program.do("ok(d.cuGraphDestroy(g))", "ok(d.cuEventRecord(a, s))", "0")
    program.do(
        "ok(d.cuGraphLaunch(e, s)), ok(d.cuGraphLaunch(e, s))", "ok(d.cuEventRecord(b, s))", "0"
    )
    assert program.do("code(d.cuStreamQuery(s))") == 600  # NOT_READY
    program.do("ok(d.cuStreamSynchronize(s))", "0")
    assert program.do(read) == "A" * 8
    # twice three kernels of 20 ms
    assert float(program.do("str(ok(d.cuEventElapsedTime(a, b)))")) == pytest.approx(120, abs=5)


def test_streams_join_a_capture_through_events(program: Client) -> None:
    """A fork and a join become edges; without the join the capture fails and both streams are free."""
    fork = "e, j = (ok(d.cuEventCreate(2)) for _ in 'ej')"
    program.do(
        fork,
        "begin(s)",
        "launch(s), ok(d.cuEventRecord(e, s)), ok(d.cuStreamWaitEvent(t, e, 0))",
        "0",
    )
    assert program.do("status(t)") == 1
    assert program.do("launch(t), launch(s)", "code(d.cuEventQuery(e))") == CAPTURED
    assert program.do("code(end(t))") == UNMATCHED
    program.do(
        "ok(d.cuEventRecord(j, t)), ok(d.cuStreamWaitEvent(s, j, 0)), launch(s)",
        "g = ok(end(s))",
        "0",
    )
    program.do("nodes = ok(d.cuGraphGetNodes(g, 4))[0]", "0")
    # the last one needs both branches, each of which needs the first
    needs = "[int(ok(d.cuGraphNodeGetDependencies(n, 0))[1]) for n in nodes]"
    assert program.do(needs) == [0, 1, 1, 2]
    assert program.do("[status(s), status(t)]") == [0, 0]
    program.do(
        "begin(s)", "launch(s), ok(d.cuEventRecord(e, s)), ok(d.cuStreamWaitEvent(t, e, 0))", "0"
    )
    assert program.do("launch(t)", "code(end(s))") == UNJOINED
    assert program.do("[status(s), status(t)]") == [0, 0]
    assert program.do("code(d.cuStreamWaitEvent(s, e, 0))") == CAPTURED


@pytest.mark.parametrize(
    ("mode", "call", "error"),
    [
        ("RELAXED", "d.cuStreamSynchronize(s)", UNSUPPORTED),
        ("RELAXED", "d.cuStreamQuery(s)", UNSUPPORTED),
        ("RELAXED", "d.cuCtxSynchronize()", UNSUPPORTED),
        ("RELAXED", "d.cuStreamWaitEvent(s, outside, 0)", ISOLATION),
        ("GLOBAL", "d.cuMemAlloc(1024)", UNSUPPORTED),
        ("THREAD", "d.cuMemFree(p)", UNSUPPORTED),
        ("THREAD", "d.cuMemcpyDtoD(p, p, 8)", UNSUPPORTED),
        ("GLOBAL", "(elsewhere(lambda: code(d.cuMemAlloc(1024))),)", UNSUPPORTED),
    ],
)
def test_capture_is_invalidated_by_what_cannot_be_captured(
    program: Client, mode: str, call: str, error: int
) -> None:
    """The call is refused, the capture is invalid until its end, and afterwards all works again."""
    program.do("p, outside = ok(d.cuMemAlloc(64)), ok(d.cuEventCreate(0))", f"begin(s, {mode})")
    assert program.do(f"code({call})") == error
    assert program.do("status(s)") == 2
    assert program.do("launch(s)") == INVALIDATED
    assert program.do("code(end(s))") == INVALIDATED
    assert program.do("status(s)") == 0
    assert program.do("launch(s)") == 0
    assert program.do("code(d.cuStreamSynchronize(s))") == 0


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        ("RELAXED", "code(d.cuMemAlloc(1024))"),
        ("THREAD", "elsewhere(lambda: code(d.cuMemAlloc(1024)))"),
        ("RELAXED", "launch(t)"),
        ("RELAXED", "code(d.cuStreamSynchronize(t))"),
    ],
)
def test_unrelated_calls_work_during_a_capture(program: Client, mode: str, call: str) -> None:
    """Other streams, other threads in thread mode, anything unsafe in relaxed mode."""
    assert program.do(f"begin(s, {mode})", call) == 0
    assert program.do("status(s)") == 1
    assert program.do("code(end(s))") == 0


def test_capture_belongs_to_a_thread_and_excludes_the_legacy_stream(program: Client) -> None:
    """Only the thread that began may end it unless relaxed; a blocking stream's capture forbids
    using the stream 0; the thread's mode can be exchanged."""
    assert program.do("begin(s, THREAD)", "elsewhere(lambda: code(end(s)))") == WRONG_THREAD
    assert program.do("code(end(s))") == 0
    assert program.do("code(end(s))") == 401  # ILLEGAL_STATE: nothing is being captured
    assert program.do("blocking = ok(d.cuStreamCreate(0))", "begin(blocking)") == 0
    assert program.do("launch(0)") == IMPLICIT
    assert program.do("code(end(blocking))") == INVALIDATED
    assert program.do("int(ok(d.cuThreadExchangeStreamCaptureMode(RELAXED)))") == 0
    assert program.do("begin(s, GLOBAL)", "elsewhere(lambda: code(d.cuMemAlloc(8)))") == UNSUPPORTED
    assert program.do("code(end(s))") == INVALIDATED
    assert program.do("begin(0)") == UNSUPPORTED
    assert program.do("begin(s)", "code(d.cuStreamDestroy(s))") == 0
    assert program.do("launch(t), code(d.cuMemAlloc(8))", "launch(0)") == 0


def test_capture_info_names_the_graph_and_the_last_nodes(program: Client) -> None:
    """All versions agree on state and id; ids are not used twice."""
    program.do("begin(s)", "launch(s), launch(s)", "info = ok(d.cuStreamGetCaptureInfo(s))", "0")
    assert program.do("[int(info[0]), len(info[3])]") == [1, 1]
    program.do("state, number = ctypes.c_int(), ctypes.c_uint64()", "0")
    query = "lib.cuStreamGetCaptureInfo(ctypes.c_void_p(int(s)), ctypes.byref(state), ctypes.byref(number))"
    assert program.do(query, "[state.value, number.value == int(info[1])]") == [1, True]
    program.do("ok(end(s))", "begin(s)", query, "0")
    assert program.do("number.value > int(info[1])") == 1
    program.do("ok(end(s))", "0")
    assert program.do("int(ok(d.cuStreamGetCaptureInfo(s))[0])") == 0


def test_graphs_are_built_by_hand(program: Client) -> None:
    """Nodes run after what they need, whatever order they were added in; a circle is refused."""
    program.do(
        "g = ok(d.cuGraphCreate(0))",
        "called, h = [], d.CUDA_HOST_NODE_PARAMS()",
        "CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)",
        "note = CALL(lambda data: called.append(data))",
        "h.fn = d.CUhostFn(_ptr=ctypes.addressof(note))",
        "h.userData = 2",
        "second = ok(d.cuGraphAddHostNode(g, [], 0, h))",
        "h.userData = 1",
        "first = ok(d.cuGraphAddHostNode(g, [], 0, h))",
        "k, empty = kernel_node(g, [first]), ok(d.cuGraphAddEmptyNode(g, [second], 1))",
        "ok(d.cuGraphAddDependencies(g, [k], [second], 1))",
        "roots = ok(d.cuGraphGetRootNodes(g, 1))[0]",
        "0",
    )
    assert program.do("[int(n) == int(first) for n in roots]") == [True]
    assert program.do("types(g)") == [3, 3, 0, 5]
    program.do("e = ok(d.cuGraphInstantiate(g, 0))", "ok(d.cuGraphLaunch(e, s))", "0")
    assert program.do("ok(d.cuStreamSynchronize(s))", "called") == [1, 2]
    program.do("ok(d.cuGraphAddDependencies(g, [empty], [first], 1))", "0")
    assert program.do("code(d.cuGraphInstantiate(g, 0))") == INVALID_VALUE
    assert program.do("code(d.cuGraphExecDestroy(e))") == 0
    assert program.do("code(d.cuGraphExecDestroy(e))") == INVALID_VALUE
    assert program.do("code(d.cuGraphDestroy(g))", "code(d.cuGraphDestroy(g))") == INVALID_VALUE


def test_a_graphs_memory_is_charged_from_its_launch_to_the_trim(program: Client) -> None:
    """The address is there before the memory; freed memory stays reserved for graphs until trimmed."""
    program.do(
        "f = ok(d.cuModuleGetFunction(module, b'k_us500000'))",  # still runs at the first trim
        "g = ok(d.cuGraphCreate(0))",
        "a, at = alloc_node(g, [], 64 * MIB)",
        "k = kernel_node(g, [a])",
        "ok(d.cuGraphAddMemFreeNode(g, [k], 1, at))",
        "e = ok(d.cuGraphInstantiate(g, 0))",
        "0",
    )
    assert program.do("types(g)") == [10, 0, 11]
    assert program.free_bytes() == T4_BYTES
    program.do("[ok(d.cuGraphLaunch(e, s)) for _ in range(3)]", "0")
    assert program.do("[memory(n) for n in ('USED_MEM_CURRENT', 'USED_MEM_HIGH')]") == [0, 64]
    assert program.do("memory('RESERVED_MEM_CURRENT')") == 64
    assert program.free_bytes() == T4_BYTES - 64 * MIB
    trimmed = "code(d.cuDeviceGraphMemTrim(0))", "memory('RESERVED_MEM_CURRENT')"
    assert program.do(*trimmed) == 64  # the kernels run
    program.do("ok(d.cuStreamSynchronize(s))", "0")
    assert program.do(*trimmed) == 0
    assert program.free_bytes() == T4_BYTES


def test_captured_allocations_outlive_the_graph_until_freed(program: Client) -> None:
    """Without a free node the memory is the program's; launching again needs it freed, by the program
    or by the flag; beyond the card the launch is refused."""
    program.do(
        "begin(s)",
        "p = ok(d.cuMemAllocAsync(32 * MIB, s))",
        "d.cuMemsetD8Async(p, 66, 4, s)",
        "g = ok(end(s))",
        "0",
    )
    program.do(
        "plain, again = ok(d.cuGraphInstantiate(g, 0)), ok(d.cuGraphInstantiate(g, 1))",
        "out = bytearray(4)",
        "0",
    )
    assert program.do("code(d.cuMemcpyDtoH(out, p, 4))") == INVALID_VALUE
    assert program.do("code(d.cuGraphLaunch(plain, s))") == 0
    assert program.do("ok(d.cuMemcpyDtoH(out, p, 4))", "out.decode()") == "BBBB"
    assert program.do("code(d.cuGraphLaunch(plain, s))") == INVALID_VALUE
    assert program.do("code(d.cuGraphLaunch(again, s))") == 0
    assert program.do("memory('USED_MEM_CURRENT')") == 32
    assert program.do("code(d.cuMemFree(p))", "ok(d.cuDeviceGraphMemTrim(0))", "0") == 0
    assert program.free_bytes() == T4_BYTES
    program.do("hog = ok(d.cuMemAlloc(15060 * MIB))", "0")
    assert program.do("code(d.cuGraphLaunch(plain, s))") == OUT_OF_MEMORY


def test_instantiate_has_flags_from_cuda_12_on(program: Client) -> None:
    """From CUDA 12 on cuGraphInstantiate means the form with flags."""
    ask = (
        "(lambda p: lib.cuGetProcAddress(b'cuGraphInstantiate', ctypes.byref(p), {}, ctypes.c_uint64(0))"
        " or p.value)(ctypes.c_void_p()) == ctypes.cast(lib.{}, ctypes.c_void_p).value"
    )
    assert program.do(ask.format(12000, "cuGraphInstantiateWithFlags")) == 1
    assert program.do(ask.format(11040, "cuGraphInstantiate_v2")) == 1


def test_per_thread_default_streams_are_supported(make_client: MakeClient) -> None:
    """The _ptsz forms mean it by 0: it is no other stream's and no other thread's, and can be captured."""
    program = make_client().enter()
    program.do(f"exec({SETUP!r}, globals())", "own = d.CUstream(2)", "0")
    identify = "int(ok(d.cuStreamGetId(own)))"
    assert program.do(f"{identify} == {identify}") == 1
    assert program.do(f"{identify} != elsewhere(lambda: {identify})") == 1
    program.do("number = ctypes.c_uint64()", "0")
    assert program.do(
        f"lib.cuStreamGetId_ptsz(None, ctypes.byref(number)), number.value == {identify}"
    ) == [0, True]
    assert program.do("lib.cuStreamGetId(None, ctypes.byref(number)), number.value") == [0, 0]
    busy = "[code(d.cuStreamQuery(own)), elsewhere(lambda: code(d.cuStreamQuery(own)))]"
    assert program.do("[launch(own) for _ in range(5)]", busy) == [600, 0]
    assert program.do("lib.cuStreamSynchronize_ptsz(None)", busy) == [0, 0]
    assert program.do(
        "lib.cuStreamBeginCapture_v2_ptsz(None, 2), launch(own)", "types(ok(end(own)))"
    ) == [0]


def test_only_what_a_graph_allocates_can_be_freed_in_one(program: Client) -> None:
    """Plain and pooled memory is refused in a capture and in a free node; so is freeing twice in a graph."""
    program.do("g = ok(d.cuGraphCreate(0))", "node, at = alloc_node(g, [], MIB)", "0")
    program.do("other = ok(d.cuGraphCreate(0))", "0")
    for take in ("d.cuMemAlloc(MIB)", "d.cuMemAllocAsync(MIB, 0)"):
        program.do(f"p = int(ok({take}))", "begin(s)")
        assert program.do("code(d.cuMemFreeAsync(p, s))") == INVALID_VALUE
        assert (
            program.do("code(end(s))", "code(d.cuGraphAddMemFreeNode(g, [], 0, p))")
            == INVALID_VALUE
        )
        assert program.do("code(d.cuMemFreeAsync(p, 0))") == 0
    assert program.do("code(d.cuGraphAddMemFreeNode(g, [], 0, at + 512))") == INVALID_VALUE
    assert program.do("code(d.cuGraphAddMemFreeNode(g, [node], 1, at))") == 0
    assert program.do("code(d.cuGraphAddMemFreeNode(g, [node], 1, at))") == INVALID_VALUE
    assert program.do("code(d.cuGraphAddMemFreeNode(other, [], 0, at))") == 0
