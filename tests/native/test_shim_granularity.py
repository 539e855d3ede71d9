"""What is charged for an allocation is never less than what it takes of the card, whatever its size.

Drivers take memory in granules and pages, and store arrays in tiles. The driver's own account is the
measure, as in test_shim_truth.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hardware.client import Client
from tests.native.clients import MIB, OUT_OF_MEMORY
from tests.native.test_shim_truth import CAP, Card, card, node

__all__ = ["card", "node"]

KINDS = """
def pinned(kind):
    p = kind()
    where = p.poolProps if hasattr(p, 'poolProps') else p
    where.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    where.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return p
own = ok(d.cuMemPoolCreate(pinned(d.CUmemPoolProps)))
keep = []
def shape(size, **more):
    a = d.CUDA_ARRAY3D_DESCRIPTOR()
    a.Format, a.NumChannels = d.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8, 1
    a.Width, a.Height = max(1, size % 4093), size // 4093
    for name, value in more.items(): setattr(a, name, value)
    return a
def flat(size):
    a = d.CUDA_ARRAY_DESCRIPTOR()
    a.Format, a.NumChannels = d.CUarray_format.CU_AD_FORMAT_FLOAT, 4
    a.Width, a.Height = max(1, size // 16 % 1021), size // 16 // 1021
    return a
def node_of(size):
    p = pinned(d.CUDA_MEM_ALLOC_NODE_PARAMS)
    p.bytesize = size
    g = ok(d.cuGraphCreate(0))
    ok(d.cuGraphAddMemAllocNode(g, [], 0, p))
    e = ok(d.cuGraphInstantiate(g, 0))
    answer = d.cuGraphLaunch(e, s)
    ok(d.cuStreamSynchronize(s))
    return *answer, 0
def captured(size):
    ok(d.cuStreamBeginCapture(t, d.CUstreamCaptureMode(2)))
    answer = d.cuMemAllocAsync(size, t)
    g = ok(d.cuStreamEndCapture(t))
    if code(answer): return answer
    e = ok(d.cuGraphInstantiate(g, 0))
    return *d.cuGraphLaunch(e, t), 0
def module_of(size):
    return d.cuModuleLoadData(('.version 7.0 .target sm_75 .global .b8 x[%d];' % size).encode())
def library_of(size):
    text = ('.version 7.0 .target sm_75 .global .b8 x[%d]; .visible .entry k() { ret; }' % size)
    answer = d.cuLibraryLoadData(text.encode(), [], [], 0, [], [], 0)
    if not code(answer): ok(d.cuLibraryGetKernel(answer[1], b'k'))
    return answer
def block_of(size):
    p = pinned_block()
    return d.cuMemCreate(-(-size // (2 * MIB)) * 2 * MIB, p, 0)
def pinned_block():
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return p
kinds = {
    'alloc': lambda n: d.cuMemAlloc(n),
    'managed': lambda n: d.cuMemAllocManaged(n, 1),
    'pitch': lambda n: d.cuMemAllocPitch(max(1, n % 4093), n // 4093 + 1, 4)[:2],
    'async': lambda n: d.cuMemAllocAsync(n, s),
    'pool': lambda n: d.cuMemAllocFromPoolAsync(n, own, s),
    'block': block_of,
    'array': lambda n: d.cuArrayCreate(flat(n)),
    'array3d': lambda n: d.cuArray3DCreate(shape(n, Height=n // 4093 + 1, Depth=3)),
    'layered': lambda n: d.cuArray3DCreate(shape(n, Depth=2, Flags=1)),
    'mipmap': lambda n: d.cuMipmappedArrayCreate(shape(n), 8),
    'module': module_of,
    'library': library_of,
    'node': node_of,
    'captured': captured,
}
frees = {
    'alloc': d.cuMemFree, 'managed': d.cuMemFree, 'pitch': d.cuMemFree, 'block': d.cuMemRelease,
    'async': lambda p: d.cuMemFreeAsync(p, s), 'pool': lambda p: d.cuMemFreeAsync(p, s),
    'array': d.cuArrayDestroy, 'array3d': d.cuArrayDestroy, 'layered': d.cuArrayDestroy,
    'mipmap': d.cuMipmappedArrayDestroy, 'module': d.cuModuleUnload, 'library': d.cuLibraryUnload,
}
def take(kind, size):
    answer = kinds[kind](size)
    if not code(answer) and kind in frees: keep.append((frees[kind], answer[1]))
    return code(answer)
def give(which):
    if keep:
        free, held = keep.pop(which % len(keep))
        ok(free(held))
    return 0
"""
NAMES = (
    "alloc",
    "managed",
    "pitch",
    "async",
    "pool",
    "block",
    "array",
    "array3d",
    "layered",
    "mipmap",
    "module",
    "library",
    "node",
    "captured",
)
SIZES = st.one_of(
    st.integers(1, 3 * MIB),
    st.integers(0, 22).map(lambda power: max(1, 2**power - 1)),
    st.integers(0, 22).map(lambda power: 2**power + 1),
    st.integers(1, 64 * MIB),
)
ACTS = st.one_of(
    st.tuples(st.sampled_from(NAMES), SIZES), st.tuples(st.just("give"), st.integers(0, 99))
)


@pytest.fixture
def program(card: Card) -> Client:
    """A program of the lease with everything that takes memory."""
    client = card.program()
    client.do(f"exec({KINDS!r}, globals())", "0")
    return client


def taken(card: Card) -> int:
    """Bytes that the lease's processes have on the card, without their contexts."""
    living = sum(it.process.poll() is None for it in card.clients)
    return card.before - card.outside.free_bytes() - living * card.context


@pytest.mark.parametrize("kind", NAMES)
def test_smallest_piece_is_charged_as_much_as_it_takes(
    card: Card, program: Client, kind: str
) -> None:
    """Three hundred pieces of one byte of each kind."""
    before = card.lease.held(), taken(card)
    assert program.do(f"[take({kind!r}, 1) for _ in range(300)]") == [0] * 300
    charged, held = card.lease.held() - before[0], taken(card) - before[1]
    assert charged >= held >= 300 * 512


def test_pools_are_charged_as_much_as_they_take_whatever_their_number(
    card: Card, program: Client
) -> None:
    """A pool takes a page of 2 MiB for its first byte: 600 of them take 1200 MiB."""
    call = "d.cuMemAllocFromPoolAsync(1, ok(d.cuMemPoolCreate(pinned(d.CUmemPoolProps))), s)"
    assert program.do(f"[code({call}) for _ in range(600)]") == [0] * 600
    assert card.lease.held() >= taken(card) >= 1200 * MIB
    assert (
        program.do(f"next(answer for _ in range(2000) if (answer := code({call})))")
        == OUT_OF_MEMORY
    )
    assert taken(card) <= card.lease.held() <= CAP


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(acts=st.lists(ACTS, min_size=1, max_size=12))
def test_charge_covers_what_allocations_of_every_kind_take(
    card: Card, program: Client, acts: list[tuple[str, int]]
) -> None:
    """Random sizes of random kinds, given back in random order: never is more on the card than charged."""
    for name, size in acts:
        answer = program.do(f"give({size})" if name == "give" else f"take({name!r}, {size})")
        assert answer in (0, OUT_OF_MEMORY)
        assert taken(card) <= card.lease.held() <= CAP


HUGE = [2**63, 2**64 - 2 * MIB + 1, 2**64 - 2 * MIB, 2**64 - 512, 2**64 - 511, 2**64 - 1]


@pytest.mark.parametrize("size", HUGE)
def test_rounding_does_not_overflow_when_sizes_are_absurd(
    card: Card, program: Client, size: int
) -> None:
    """Rounded up, a size near 2^64 would become small: it is refused instead, and leaves no charge."""
    before = card.lease.held()
    calls = (
        *(f"d.cuMemAlloc({size})", f"d.cuMemAllocManaged({size}, 1)"),
        *(f"d.cuMemAllocPitch({size}, 1, 4)", f"d.cuMemAllocPitch(8, {size}, 4)"),
        *(f"d.cuMemAllocAsync({size}, s)", f"d.cuMemAllocFromPoolAsync({size}, own, s)"),
        f"d.cuMemCreate({size}, pinned_block(), 0)",
        *(f"d.cuArray3DCreate(shape(1, {field}={size}))" for field in ("Width", "Height")),
        f"d.cuArray3DCreate(shape(1, Height=4, Depth={size}))",
        f"d.cuMipmappedArrayCreate(shape(1, Width={size}, Height={size}), 64)",
        f"d.cuCtxSetLimit(d.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE, {size})",
    )
    answers = {call: program.do(f"code({call})") for call in calls}
    assert set(answers.values()) <= {1, OUT_OF_MEMORY}, answers
    assert card.lease.held() == before
    assert taken(card) <= before


FILL = """
import threading
def fill(size):
    global total
    ok(d.cuCtxSetCurrent(context))
    while not code(d.cuMemAlloc(size)): total += 1
total = 0
"""


def test_limit_holds_when_threads_of_two_programs_allocate_at_once(
    card: Card, program: Client
) -> None:
    """One byte more than a page each, by six threads, until all are refused: all within the slice."""
    other = card.program()
    for client in (program, other):
        client.do(f"exec({FILL!r}, globals())", "0")
        client.do(
            f"threads = [threading.Thread(target=fill, args=({2 * MIB + 1},)) for _ in range(3)]",
            "[thread.start() for thread in threads]",
            "0",
        )
    for client in (program, other):
        client.do("[thread.join() for thread in threads]", "0")
    granted = sum(int(client.do("total")) for client in (program, other))
    assert 0 < granted <= CAP // (4 * MIB)
    assert granted * 4 * MIB <= taken(card) <= card.lease.held() <= CAP


CHILD = """
import json
read, write = os.pipe()
if not (child := os.fork()):
    try:
        codes = [code(d.cuMemAlloc(1)), code(d.cuInit(0))]
        codes += [code(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))]
        codes += [code(d.cuMemAlloc(n)) for n in (2047 * MIB, 1025 * MIB, 1024 * MIB)]
        os.write(write, json.dumps(codes).encode())
    finally:
        os._exit(0)
os.close(write)
said = json.loads(os.read(read, 4096))
os.waitpid(child, 0)
"""


def test_child_is_charged_by_pages_when_its_parent_holds_memory(card: Card) -> None:
    """After fork a child has none of the parent's memory; its own counts in the slice until it ends."""
    client = card.program()
    assert client.do(f"code(d.cuMemAlloc({1023 * MIB}))") == 0
    held = card.lease.held()
    assert held >= 1024 * MIB
    client.do(f"exec({CHILD!r}, globals())", "0")
    assert client.do("said") == [3, 0, 0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY]
    assert client.do(f"code(d.cuMemAlloc({3071 * MIB}))") == OUT_OF_MEMORY
    assert client.do(f"code(d.cuMemAlloc({3069 * MIB}))") == 0
    assert taken(card) <= card.lease.held() <= CAP
