"""Nodes of graphs beyond plain work: children, conditions, users, edges, copies and updates."""

import pytest

from tests.hardware.client import Client
from tests.hardware.random_programs import GRAPHS, play

INVALID_VALUE, UPDATE_FAILED = 1, 910
SETUP = """
import ctypes
module = ok(d.cuModuleLoadData(b'an image'))
f = ok(d.cuModuleGetFunction(module, b'k_us10'))
s = ok(d.cuStreamCreate(1))
lib = ctypes.CDLL('libcuda.so.1')
gone = []
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
destroy = CALL(gone.append)
def user(count=1):
    out = ctypes.c_void_p()
    made = lib.cuUserObjectCreate(ctypes.byref(out), ctypes.c_void_p(7), destroy, count, 1)
    assert made == 0
    return d.CUuserObject(out.value)
def new(): return ok(d.cuGraphCreate(0))
def empty(g, *needs): return ok(d.cuGraphAddEmptyNode(g, list(needs), len(needs)))
def kernel(g, *needs):
    p = d.CUDA_KERNEL_NODE_PARAMS()
    p.func, p.gridDimX, p.gridDimY, p.gridDimZ = f, 1, 1, 1
    p.blockDimX, p.blockDimY, p.blockDimZ = 32, 1, 1
    return ok(d.cuGraphAddKernelNode(g, list(needs), len(needs), p))
def fill(g, pointer, value, *needs):
    p = d.CUDA_MEMSET_NODE_PARAMS()
    p.dst, p.value, p.elementSize, p.width, p.height = pointer, value, 1, 1, 1
    return ok(d.cuGraphAddMemsetNode(g, list(needs), len(needs), p, context))
def condition(g, kind, value, size):
    p = d.CUgraphNodeParams()
    p.type = d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    p.conditional.handle = ok(d.cuGraphConditionalHandleCreate(g, context, value, 1))
    p.conditional.type = d.CUgraphConditionalNodeType(kind)
    p.conditional.size = size
    p.conditional.ctx = context
    node = ok(d.cuGraphAddNode(g, None, 0, p))
    # cuda-bindings returns views of the driver's array, which ends with the graph: keep the handles.
    return node, [d.CUgraph(int(body)) for body in p.conditional.phGraph_out]
def byte(pointer):
    out = bytearray(1)
    ok(d.cuMemcpyDtoH(out, pointer, 1))
    return out[0]
def run(g):
    e = ok(d.cuGraphInstantiate(g, 0))
    ok(d.cuGraphLaunch(e, s)), ok(d.cuStreamSynchronize(s))
    return e
def ints(nodes): return sorted(int(n) for n in nodes)
"""


@pytest.fixture
def program(client: Client) -> Client:
    """Return a client with the helpers above."""
    client.do(f"exec({SETUP!r}, globals())", "0")
    return client


def test_user_object_ends_with_the_last_graph_that_holds_it(program: Client) -> None:
    """The program moves its reference to a graph; the executable graph has another one."""
    program.do("u, g = user(), new()", "ok(d.cuGraphRetainUserObject(g, u, 1, 1))", "0")
    program.do("empty(g)", "e = ok(d.cuGraphInstantiate(g, 0))", "0")
    program.do("ok(d.cuGraphDestroy(g))", "0")
    assert program.do("gone") == []
    program.do("ok(d.cuGraphExecDestroy(e))", "0")
    assert program.do("gone") == [7]
    assert program.do("code(d.cuUserObjectRelease(u, 1))") == INVALID_VALUE


def test_user_object_is_refused_more_releases_than_it_has_references(program: Client) -> None:
    """Two references are released one by one, and a third one is not there."""
    program.do("u = user(2)", "0")
    assert program.do("code(d.cuUserObjectRelease(u, 3))") == INVALID_VALUE
    assert program.do("code(d.cuUserObjectRelease(u, 1)), gone") == [0, []]
    assert program.do("code(d.cuUserObjectRelease(u, 1)), gone") == [0, [7]]


def test_child_graph_is_a_copy_that_runs_in_its_place(program: Client) -> None:
    """What is added to the original later does not run, and the copy cannot be destroyed."""
    program.do("p = ok(d.cuMemAlloc(1))", "child, g = new(), new()", "fill(child, p, 5)", "0")
    program.do("node = ok(d.cuGraphAddChildGraphNode(g, None, 0, child))", "fill(child, p, 9)", "0")
    program.do("ok(d.cuGraphDestroy(child))", "run(g)", "0")
    assert program.do("byte(p)") == 5
    program.do("inner = ok(d.cuGraphChildGraphNodeGetGraph(node))", "0")
    assert program.do("code(d.cuGraphDestroy(inner))") == INVALID_VALUE
    assert program.do("int(ok(d.cuGraphGetNodes(inner, 0))[1])") == 1


@pytest.mark.parametrize(
    ("kind", "value", "size", "runs"),
    [(0, 1, 1, 0), (0, 0, 1, None), (0, 0, 2, 1), (1, 1, 1, 0), (2, 1, 3, 1), (2, 3, 3, None)],
)
def test_conditional_node_runs_the_body_of_its_default_value(
    program: Client, kind: int, value: int, size: int, runs: int | None
) -> None:
    """if, if-else, while and switch; a loop runs once, because no kernel ends it."""
    program.do("p = ok(d.cuMemAlloc(1))", "ok(d.cuMemsetD8(p, 99, 1))", "g = new()", "0")
    program.do(f"node, bodies = condition(g, {kind}, {value}, {size})", "0")
    assert program.do("len(bodies)") == size
    program.do("[fill(body, p, i) for i, body in enumerate(bodies)]", "run(g)", "0")
    assert program.do("byte(p)") == (99 if runs is None else runs)


def test_edges_are_listed_from_both_ends_and_removed(program: Client) -> None:
    """A diamond of four nodes: dependencies, dependents, edges, and an edge that is taken away."""
    program.do("g = new()", "a = empty(g)", "b, c = empty(g, a), empty(g, a)", "0")
    program.do("z = empty(g, b, c)", "0")
    assert program.do("len(ok(d.cuGraphGetEdges(g, 8))[0])") >= 4
    assert program.do("ints(ok(d.cuGraphNodeGetDependentNodes(a, 2))[0]) == ints([b, c])")
    assert program.do("ints(ok(d.cuGraphNodeGetDependencies(z, 2))[0]) == ints([b, c])")
    program.do("ok(d.cuGraphRemoveDependencies(g, [b], [z], 1))", "0")
    assert program.do("ints(ok(d.cuGraphNodeGetDependencies(z, 1))[0]) == ints([c])")
    assert program.do("code(d.cuGraphRemoveDependencies(g, [b], [z], 1))") == INVALID_VALUE
    program.do("ok(d.cuGraphDestroyNode(c))", "0")
    assert program.do("ok(d.cuGraphNodeGetDependencies(z, 0))[1]") == 0


def test_update_takes_the_parameters_of_a_graph_of_the_same_shape(program: Client) -> None:
    """The executable graph fills with the other value; a graph of another shape is refused."""
    program.do(
        "p = ok(d.cuMemAlloc(1))", "g, h = new(), new()", "fill(g, p, 3)", "fill(h, p, 4)", "0"
    )
    program.do("e = run(g)", "ok(d.cuGraphExecUpdate(e, h))", "0")
    program.do("ok(d.cuGraphLaunch(e, s)), ok(d.cuStreamSynchronize(s))", "0")
    assert program.do("byte(p)") == 4
    program.do("kernel(h)", "0")
    assert program.do("code(d.cuGraphExecUpdate(e, h))") == UPDATE_FAILED


def test_clone_has_a_twin_of_every_node(program: Client) -> None:
    """The copy's nodes are found by the original's, and outlive them."""
    program.do("g = new()", "a = kernel(g)", "b = kernel(g, a)", "h = ok(d.cuGraphClone(g))", "0")
    program.do("twin = ok(d.cuGraphNodeFindInClone(b, h))", "0")
    assert program.do("int(twin) != int(b)")
    program.do("ok(d.cuGraphDestroy(g))", "run(h)", "0")
    assert program.do("len(ok(d.cuGraphNodeGetDependencies(twin, 1))[0])") == 1


def test_stream_that_was_joined_may_be_destroyed_before_the_end_of_a_capture(
    program: Client,
) -> None:
    """The capture ends as if the stream were still there."""
    program.do(
        "t = ok(d.cuStreamCreate(1))", "a, b = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))", "0"
    )
    program.do(
        "ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode(2)))", "ok(d.cuEventRecord(a, s))", "0"
    )
    program.do(
        "ok(d.cuStreamWaitEvent(t, a, 0))",
        "ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, t, 0, 0))",
        "0",
    )
    program.do(
        "ok(d.cuEventRecord(b, t))",
        "ok(d.cuStreamWaitEvent(s, b, 0))",
        "ok(d.cuStreamDestroy(t))",
        "0",
    )
    assert program.do("code(d.cuStreamEndCapture(s))") == 0


def test_captured_dependency_has_edge_data(program: Client) -> None:
    """The array has an entry for each dependency; a program that reads it does not end."""
    program.do("ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode(2)))", "0")
    program.do("ok(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, 0, 0))", "0")
    program.do(
        "status, count = ctypes.c_int(), ctypes.c_size_t()", "edges = ctypes.c_void_p()", "0"
    )
    program.do(
        "lib.cuStreamGetCaptureInfo_v3(ctypes.c_void_p(int(s)), ctypes.byref(status), None, None, None,"
        " ctypes.byref(edges), ctypes.byref(count))",
        "0",
    )
    assert program.do("[count.value, ctypes.string_at(edges.value, 8 * count.value).hex()]") == [
        1,
        "00" * 8,
    ]


def test_capture_ends_with_the_context_of_its_stream(program: Client) -> None:
    """Calls in another context are not refused for a capture that nobody can end."""
    program.do("other = ok(d.cuCtxCreate(0, 0))", "t = ok(d.cuStreamCreate(1))", "0")
    program.do(
        "ok(d.cuStreamBeginCapture(t, d.CUstreamCaptureMode(0)))", "ok(d.cuCtxDestroy(other))", "0"
    )
    program.do("ok(d.cuCtxSetCurrent(context))", "0")
    assert program.do("code(d.cuMemAlloc(1))") == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_graph_programs_do_not_end_the_process(program: Client, seed: int) -> None:
    """All moves in any order, on handles that may be stale."""
    play(program, GRAPHS, seed, 150)
