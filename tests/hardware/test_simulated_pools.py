"""Memory pools: what is freed stays with the pool up to its threshold, and counts as used meanwhile."""

import pytest

from tests.hardware.client import MIB, Client, MakeClient

T4_BYTES = 15079 * MIB
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
SETUP = """
def pool(kind='DEVICE', device=0, **fields):
    p = d.CUmemPoolProps()
    p.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = getattr(d.CUmemLocationType, 'CU_MEM_LOCATION_TYPE_' + kind)
    p.location.id = device
    for name, value in fields.items(): setattr(p, name, value)
    return d.cuMemPoolCreate(p)
def attribute(name): return getattr(d.CUmemPool_attribute, 'CU_MEMPOOL_ATTR_' + name)
def get(p, name): return int(ok(d.cuMemPoolGetAttribute(p, attribute(name))))
def put(p, name, value):
    return code(d.cuMemPoolSetAttribute(p, attribute(name), d.cuuint64_t(value)))
def take(p, size): return ok(d.cuMemAllocFromPoolAsync(size, p, 0))
MIB = 1 << 20
own = ok(pool())
def state(p=None):
    p = p or own
    return [get(p, n + '_MEM_' + w) >> 20 for n in ('USED', 'RESERVED') for w in ('CURRENT', 'HIGH')]
"""


@pytest.fixture
def program(client: Client) -> Client:
    """Return a client with the helpers above and a pool of its own."""
    client.do(f"exec({SETUP!r}, globals())", "0")
    return client


def test_a_pool_keeps_up_to_its_threshold(program: Client) -> None:
    """Freed memory stays reserved and charged, serves the next request, and is trimmed on demand."""
    program.do("put(own, 'RELEASE_THRESHOLD', 100 * MIB)", "a = take(own, 80 * MIB)", "0")
    program.do("b = take(own, 80 * MIB)", "0")
    assert program.do("state()") == [160, 160, 160, 160]
    program.do("ok(d.cuMemFreeAsync(a, 0))", "0")
    assert program.do("state()") == [80, 160, 100, 160]  # 160 are above the threshold
    program.do("ok(d.cuMemFreeAsync(b, 0))", "0")
    assert program.do("state()") == [0, 160, 100, 160]
    assert program.free_bytes() == T4_BYTES - 100 * MIB
    program.do("c = take(own, 60 * MIB)", "0")
    assert program.free_bytes() == T4_BYTES - 100 * MIB  # out of what was kept
    assert program.do("code(d.cuMemPoolTrimTo(own, 10 * MIB))", "state()") == [60, 160, 60, 160]
    assert program.do("code(d.cuMemFree(c))") == 0
    assert program.do("code(d.cuMemPoolTrimTo(own, 0))") == 0
    assert program.free_bytes() == T4_BYTES


def test_lower_threshold_releases_memory(program: Client) -> None:
    """A smaller threshold counts at once; the high-water marks go back to what is, and only so."""
    program.do(
        "put(own, 'RELEASE_THRESHOLD', 1 << 62)", "ok(d.cuMemFreeAsync(take(own, MIB), 0))", "0"
    )
    assert program.free_bytes() == T4_BYTES - 2 * MIB  # a page
    assert program.do("put(own, 'RELEASE_THRESHOLD', 0)", "state()") == [0, 1, 0, 2]
    assert program.free_bytes() == T4_BYTES
    assert program.do("put(own, 'USED_MEM_HIGH', 5)") == INVALID_VALUE
    assert program.do("put(own, 'USED_MEM_CURRENT', 0)") == INVALID_VALUE
    assert program.do("put(own, 'USED_MEM_HIGH', 0)", "state()") == [0, 0, 0, 2]
    assert program.do("put(own, 'RESERVED_MEM_HIGH', 0)", "state()") == [0, 0, 0, 0]


def test_what_one_pool_keeps_another_cannot_have(make_client: MakeClient) -> None:
    """A pool's reserve counts as used for everybody else, and is refused beyond the card."""
    first, other = make_client().enter(), make_client().enter()
    first.do(f"exec({SETUP!r}, globals())", "put(own, 'RELEASE_THRESHOLD', 1 << 62)", "0")
    first.do("ok(d.cuMemFreeAsync(take(own, 15000 * MIB), 0))", "0")
    assert other.do("code(d.cuMemAlloc(80 << 20))") == OUT_OF_MEMORY
    assert first.do("code(d.cuMemAllocFromPoolAsync(15080 * MIB, own, 0))") == OUT_OF_MEMORY
    assert first.do("code(d.cuMemAllocFromPoolAsync(15078 * MIB, own, 0))") == 0
    assert other.free_bytes() == MIB


def test_a_devices_pool_can_be_exchanged(program: Client) -> None:
    """cuMemAllocAsync takes from the pool that was set; destroying it brings the default back, and what
    was taken from it is still freed."""
    assert program.do("code(d.cuDeviceSetMemPool(0, own))") == 0
    assert program.do("int(ok(d.cuDeviceGetMemPool(0))) == int(own)") == 1
    program.do("p = ok(d.cuMemAllocAsync(5 * MIB, 0))", "0")
    assert program.do("get(own, 'USED_MEM_CURRENT') >> 20") == 5
    attribute = "d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE"
    assert program.do(f"int(ok(d.cuPointerGetAttribute({attribute}, p))) == int(own)") == 1
    assert program.do("code(d.cuMemPoolDestroy(own))") == 0
    assert program.do("code(d.cuMemPoolDestroy(own))") == INVALID_VALUE
    assert program.do("code(d.cuMemPoolTrimTo(own, 0))") == INVALID_VALUE
    default = "int(ok(d.cuDeviceGetDefaultMemPool(0)))"
    assert program.do(f"int(ok(d.cuDeviceGetMemPool(0))) == {default}") == 1
    assert program.do(f"code(d.cuMemPoolDestroy({default}))") == INVALID_VALUE
    assert program.free_bytes() == T4_BYTES - 6 * MIB
    assert program.do("code(d.cuMemFreeAsync(p, 0))") == 0
    assert program.free_bytes() == T4_BYTES


def test_limits_and_places(program: Client) -> None:
    """A pool with a maximum refuses beyond it; a pool on the host is charged to no card."""
    program.do("small, host = ok(pool(maxSize=4 * MIB)), ok(pool('HOST'))", "0")
    assert program.do("code(d.cuMemAllocFromPoolAsync(5 * MIB, small, 0))") == OUT_OF_MEMORY
    assert program.do("code(d.cuMemAllocFromPoolAsync(4 * MIB, small, 0))") == 0
    program.do("p = take(host, 1 << 30)", "0")
    assert program.free_bytes() == T4_BYTES - 4 * MIB
    assert program.do("state(host)") == [1024, 1024, 1024, 1024]
    assert program.do("code(d.cuMemFreeAsync(p, 0))", "state(host)") == [0, 1024, 0, 1024]
    assert program.do("code(pool('INVALID'))") == INVALID_VALUE
    assert program.do("code(pool(device=3))") == 101  # INVALID_DEVICE


def test_access_to_a_pool_is_kept(program: Client) -> None:
    """The pool's own device can always read and write, and cannot be shut out."""
    program.do(
        "a = d.CUmemAccessDesc()",
        "a.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE",
        "a.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE",
        "0",
    )
    assert program.do("ok(d.cuMemPoolGetAccess(own, a.location))") == 3
    assert program.do("code(d.cuMemPoolSetAccess(own, [a], 1))") == INVALID_VALUE
    program.do("a.location.id = 9", "0")
    assert program.do("code(d.cuMemPoolSetAccess(own, [a], 1))") == 101


def test_leaving_the_card_leaves_no_reserve(program: Client, make_client: MakeClient) -> None:
    """When its last context goes, a process's default pool gives back what it kept."""
    program.do(
        "default = ok(d.cuDeviceGetDefaultMemPool(0))",
        "put(default, 'RELEASE_THRESHOLD', 1 << 62)",
        "ok(d.cuMemFreeAsync(ok(d.cuMemAllocAsync(1 << 30, 0)), 0))",
        "0",
    )
    other = make_client().enter()
    assert other.free_bytes() == T4_BYTES - 1024 * MIB
    program.do("ok(d.cuDevicePrimaryCtxRelease(0))", "0")
    assert other.free_bytes() == T4_BYTES


def test_what_is_freed_behind_work_stays_until_the_work_is_done(program: Client) -> None:
    """The pool keeps it reserved, and the card charged, also where trimmed or destroyed; another allocation
    of the same pool may come behind it."""
    program.do(
        "module = ok(d.cuModuleLoadData(b'an image'))",
        "f = ok(d.cuModuleGetFunction(module, b'k_us60000000'))",
        "s = ok(d.cuStreamCreate(1))",
        "a, b, c = take(own, 80 * MIB), take(own, 20 * MIB), ok(d.cuMemAllocAsync(5 * MIB, s))",
        "ok(d.cuMemFreeAsync(b, s)), code(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, 0, 0))",
        "0",
    )
    assert program.do("code(d.cuMemFreeAsync(a, s))") == 0
    assert program.do("code(d.cuMemPoolTrimTo(own, 0))", "state()") == [0, 100, 80, 100]
    assert program.free_bytes() == T4_BYTES - 86 * MIB
    assert program.do("code(d.cuMemAllocFromPoolAsync(60 * MIB, own, s))") == 0
    assert program.do("code(d.cuMemPoolDestroy(own))") == 0
    assert program.free_bytes() == T4_BYTES - 86 * MIB
