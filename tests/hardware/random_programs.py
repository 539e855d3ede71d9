"""Programs of random driver calls, on handles that may be stale."""

import random
from typing import NamedTuple

from tests.hardware.client import Client


class Program(NamedTuple):
    """What a random program may do: its start, its moves, and the lists that moves pick from."""

    setup: str
    moves: tuple[str, ...]
    # By name in a move: the list, and what stands for an element of an empty list.
    picks: dict[str, tuple[str, str]]


GRAPHS = Program(
    "graphs, nodes, execs, p = [new()], [], [], ok(d.cuMemAlloc(1))",
    (
        "graphs.append(new())",
        "nodes.append(kernel(G, *([N] if ints([N]) else [])))",
        "nodes.append(empty(G))",
        "nodes.append(fill(G, p, 1))",
        "nodes.append(ok(d.cuGraphAddChildGraphNode(G, None, 0, H)))",
        "graphs.extend(condition(G, 0, 1, 2)[1])",
        "d.cuGraphAddDependencies(G, [N], [M], 1)",
        "d.cuGraphRemoveDependencies(G, [N], [M], 1)",
        "d.cuGraphDestroyNode(N)",
        "d.cuGraphDestroy(G)",
        "graphs.append(ok(d.cuGraphClone(G)))",
        "execs.append(ok(d.cuGraphInstantiate(G, 0)))",
        "d.cuGraphExecUpdate(E, G)",
        "d.cuGraphLaunch(E, s)",
        "d.cuGraphExecDestroy(E)",
        "d.cuGraphNodeGetParams(N) if hasattr(d, 'cuGraphNodeGetParams') else 0",
        "d.cuGraphKernelNodeGetParams(N)",
        "d.cuGraphRetainUserObject(G, user(), 1, 1)",
        "d.cuStreamBeginCapture(s, d.CUstreamCaptureMode(2))",
        "d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, 0, 0)",
        "graphs.append(ok(d.cuStreamEndCapture(s)))",
    ),
    {
        "G": ("graphs", "None"),
        "H": ("graphs", "None"),
        "N": ("nodes", "d.CUgraphNode()"),
        "M": ("nodes", "d.CUgraphNode()"),
        "E": ("execs", "d.CUgraphExec()"),
    },
)

OBJECTS = Program(
    "pools, streams, events, modules, arrays, held, shown = [own], [], [], [], [], [], []\n"
    "parts, greens, SM = [], [], d.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM",
    (
        "pools.append(ok(pool()))",
        "d.cuMemPoolDestroy(P)",
        "d.cuMemPoolTrimTo(P, 0)",
        "d.cuDeviceSetMemPool(0, P)",
        "put(P, 'RELEASE_THRESHOLD', MIB)",
        "state(P)",
        "held.append(ok(d.cuMemAllocFromPoolAsync(SIZE, P, S)))",
        "held.append(ok(d.cuMemAllocAsync(SIZE, S)))",
        "held.append(ok(d.cuMemAlloc(SIZE)))",
        "held.append(ok(d.cuMemAllocManaged(SIZE % (4 * MIB), 1)))",
        "d.cuMemFreeAsync(X, S)",
        "d.cuMemFree(X)",
        "d.cuMemsetD8Async(X, 1, SIZE, S)",
        "d.cuMemcpyDtoDAsync(X, Y, SIZE, S)",
        "d.cuMemcpyAsync(X, Y, SIZE, S)",
        "d.cuMemcpy(X, Y, SIZE)",
        "d.cuMemGetAddressRange(X)",
        "parts.append([ok(d.cuDeviceGetDevResource(0, SM))])",
        "parts.append(ok(d.cuDevResourceGenerateDesc(R, 1)))",
        "greens.append(ok(d.cuGreenCtxCreate(R, 0, 1)))",
        "d.cuGreenCtxDestroy(C)",
        "d.cuGreenCtxGetDevResource(C, SM)",
        "d.cuGreenCtxRecordEvent(C, E)",
        "d.cuGreenCtxWaitEvent(C, E)",
        "streams.append(ok(d.cuGreenCtxStreamCreate(C, 1, 0)))",
        "d.cuStreamGetGreenCtx(S)",
        "d.cuCtxDestroy(ok(d.cuCtxFromGreenCtx(C)))",
        "d.cuCoredumpSetAttribute(d.CUcoredumpSettings.CU_COREDUMP_FILE, b'x' * (SIZE % 1030))",
        "d.cuCoredumpGetAttribute(d.CUcoredumpSettings.CU_COREDUMP_FILE)",
        "streams.append(ok(d.cuStreamCreate(1)))",
        "d.cuStreamDestroy(S)",
        "d.cuStreamSynchronize(S)",
        "d.cuStreamQuery(S)",
        "events.append(ok(d.cuEventCreate(2)))",
        "events.append(ok(d.cuEventCreate(6)))",
        "d.cuEventRecord(E, S)",
        "d.cuStreamWaitEvent(S, E, 0)",
        "d.cuEventSynchronize(E)",
        "d.cuEventElapsedTime(E, F)",
        "d.cuEventDestroy(E)",
        "modules.append(ok(d.cuModuleLoadData(b'an image')))",
        "d.cuModuleGetFunction(M, b'k_us10')",
        "d.cuModuleGetGlobal(M, b'counter')",
        "d.cuModuleUnload(M)",
        "d.cuLaunchKernel(ok(d.cuModuleGetFunction(M, b'k_us10')), 1, 1, 1, 32, 1, 1, 0, S, 0, 0)",
        "arrays.append(ok(d.cuArray3DCreate(shape(SIZE % 300, SIZE % 7, SIZE % 3))))",
        "d.cuArrayGetDescriptor(A)",
        "d.cuArray3DGetDescriptor(A)",
        "d.cuArrayDestroy(A)",
        "d.cuMemcpyHtoA(A, SIZE % 30, here, SIZE % 25)",
        "d.cuMemcpyAtoH(there, A, SIZE % 30, SIZE % 25)",
        "d.cuMemcpyAtoA(A, 0, B, 0, SIZE % 300)",
        "shown.append(ok(d.cuIpcGetMemHandle(X)))",
        "held.append(ok(d.cuIpcOpenMemHandle(I, 1)))",
        "d.cuIpcCloseMemHandle(X)",
        "shown.append(ok(d.cuIpcGetEventHandle(E)))",
        "events.append(ok(d.cuIpcOpenEventHandle(I)))",
    ),
    {
        "P": ("pools", "d.CUmemoryPool()"),
        "S": ("streams", "d.CUstream(0)"),
        "E": ("events", "d.CUevent()"),
        "F": ("events", "d.CUevent()"),
        "M": ("modules", "d.CUmodule()"),
        "A": ("arrays", "d.CUarray()"),
        "B": ("arrays", "d.CUarray()"),
        "X": ("held", "d.CUdeviceptr(0)"),
        "Y": ("held", "d.CUdeviceptr(0)"),
        "I": ("shown", "None"),
        "R": ("parts", "d.CUdevResourceDesc()"),
        "C": ("greens", "d.CUgreenCtx()"),
        "SIZE": ("[0, 1, 20, 511, 4096, MIB, 3 * MIB, 1 << 44]", "0"),
    },
)


def play(client: Client, program: Program, seed: int, moves: int) -> None:
    """Make moves by chance, the same for the same seed; a refusal is no fault, a process that ends is."""
    chance = random.Random(seed)
    client.do(program.setup, "0")
    for _ in range(moves):
        move = chance.choice(program.moves)
        chosen = "; ".join(
            f"{name} = {kept}[int({chance.random()} * len({kept}))] if {kept} else {otherwise}"
            for name, (kept, otherwise) in program.picks.items()
        )
        kept_going = f"try: {move}\nexcept (RuntimeError, TypeError): pass"
        client.do(f"exec({chosen!r}, globals())", f"exec({kept_going!r}, globals())", "0")
    assert client.process.poll() is None
