"""Copies and fills on a simulated card are real."""

import pytest

from tests.hardware.client import Client, MakeClient

INVALID_VALUE = 1
READ = "(d.cuMemcpyDtoH(out, p, len(out)), bytes(out).hex())[1]"


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["ok(d.cuMemcpyHtoD(p, b'abcdefgh', 8))"], b"abcdefgh"),
        (["ok(d.cuMemcpyHtoDAsync(p, b'abcdefgh', 8, 0))"], b"abcdefgh"),
        (["ok(d.cuMemcpyHtoD(q, b'12345678', 8))", "ok(d.cuMemcpyDtoD(p, q, 8))"], b"12345678"),
        (["ok(d.cuMemcpyHtoD(q, b'12345678', 8))", "ok(d.cuMemcpyAsync(p, q, 8, 0))"], b"12345678"),
        (["ok(d.cuMemcpyHtoD(q, b'12345678', 8))", "ok(d.cuMemcpy(p, q, 8))"], b"12345678"),
        (
            [
                "ok(d.cuMemcpyHtoD(q, b'12345678', 8))",
                "ok(d.cuMemcpyPeer(p, context, q, context, 8))",
            ],
            b"12345678",
        ),
        (["ok(d.cuMemsetD8(p, 0x41, 8))"], b"AAAAAAAA"),
        (["ok(d.cuMemsetD16(p, 0x4241, 4))"], b"ABABABAB"),
        (["ok(d.cuMemsetD32Async(p, 0x44434241, 2, 0))"], b"ABCDABCD"),
        (
            ["ok(d.cuMemsetD8(p, 0x41, 8))", "ok(d.cuMemsetD2D8(p, 4, 0x42, 2, 2))"],
            b"BBAABBAA",  # two rows of two, four apart
        ),
    ],
)
def test_copied_bytes_arrive(client: Client, statements: list[str], expected: bytes) -> None:
    """What was copied or filled is what is read back."""
    client.do("p = ok(d.cuMemAlloc(4096))", "q = ok(d.cuMemAlloc(4096))", "out = bytearray(8)", "0")
    assert bytes.fromhex(client.do(*statements, READ)) == expected


def test_copied_rectangles_arrive(client: Client) -> None:
    """A 2-D copy takes the rectangle out of the source and leaves the rest of the target."""
    client.do(
        "p = ok(d.cuMemAlloc(64))",
        "ok(d.cuMemsetD8(p, 0x2e, 64))",
        "import ctypes",
        "source = ctypes.create_string_buffer(b'abcdEFGHijkl')",
        "c = d.CUDA_MEMCPY2D()",
        "c.srcMemoryType = d.CUmemorytype.CU_MEMORYTYPE_HOST",
        "c.dstMemoryType = d.CUmemorytype.CU_MEMORYTYPE_DEVICE",
        "c.srcHost = ctypes.addressof(source); c.srcPitch = 4; c.srcXInBytes = 1; c.srcY = 1",
        "c.dstDevice = p; c.dstPitch = 8",
        "c.WidthInBytes = 2; c.Height = 2",
        "ok(d.cuMemcpy2D(c))",
        "out = bytearray(12)",
        "0",
    )
    # from row 1 and column 1: FG and jk, eight apart in the target
    assert bytes.fromhex(client.do(READ)) == b"FG......jk.."


def test_zeroing_gigabytes_takes_no_memory(client: Client) -> None:
    """Filling 4 GiB with zeros leaves the program small, and the bytes are zero."""
    resident = "int(open('/proc/self/statm').read().split()[1]) * 4096"
    client.do("p = ok(d.cuMemAlloc(4 << 30))", "ok(d.cuMemsetD8(p, 0x41, 4096))", "0")
    before = client.do(resident)
    assert client.do("code(d.cuMemsetD8(p, 0, 4 << 30))") == 0
    assert client.do(resident) - before < 64 << 20
    assert client.do("out = bytearray(4)", READ) == "00000000"


@pytest.mark.parametrize(
    ("allocate", "kind", "managed"),
    [
        ("ok(d.cuMemAlloc(4096))", 2, 0),  # CU_MEMORYTYPE_DEVICE
        ("ok(d.cuMemAllocManaged(4096, 1))", 2, 1),
        ("ok(d.cuMemHostAlloc(4096, 0))", 1, 0),  # CU_MEMORYTYPE_HOST
    ],
)
def test_pointer_attributes_name_the_kind_of_memory(
    client: Client, allocate: str, kind: int, managed: int
) -> None:
    """Inside an allocation, too, an address knows its kind, its range and its device."""
    client.do(f"p = {allocate}", "a = d.CUpointer_attribute", "0")
    inside = "int(p) + 100"
    for name, expected in [
        ("MEMORY_TYPE", kind),
        ("IS_MANAGED", managed),
        ("DEVICE_ORDINAL", 0),
        ("RANGE_SIZE", 4096),
    ]:
        attribute = f"a.CU_POINTER_ATTRIBUTE_{name}"
        assert client.do(f"ok(d.cuPointerGetAttribute({attribute}, {inside}))") == expected
    start = f"ok(d.cuPointerGetAttribute(a.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, {inside}))"
    assert client.do(start) == client.do("int(p)")
    assert client.do("code(d.cuPointerGetAttribute(a.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 1))") == 1


MIB = 1 << 20
TAKEN = {
    "small": ("d.cuMemAlloc(4096)", "d.cuMemFree"),
    "large": ("d.cuMemAlloc(3 * MIB)", "d.cuMemFree"),
    "small managed": ("d.cuMemAllocManaged(4096, 1)", "d.cuMemFree"),
    "large managed": ("d.cuMemAllocManaged(3 * MIB, 1)", "d.cuMemFree"),
    "reserved": (
        "d.cuMemAddressReserve(2 * MIB, 0, 0, 0)",
        "lambda x: d.cuMemAddressFree(x, 2 * MIB)",
    ),
}
USES = {
    "cuMemcpy": "d.cuMemcpy(p, x, 8)",
    "cuMemcpy to it": "d.cuMemcpy(x, p, 8)",
    "cuMemcpyAsync": "d.cuMemcpyAsync(p, x, 8, 0)",
    "cuMemcpyAsync to it": "d.cuMemcpyAsync(x, p, 8, 0)",
    "as the host's": "d.cuMemcpyHtoD(p, x, 8)",
    "as the host's, later": "d.cuMemcpyHtoDAsync(p, x, 8, 0)",
    "to the host's": "d.cuMemcpyDtoH(x, p, 8)",
    "past the end": "d.cuMemcpy(p, int(q) + 3 * MIB - 4, 8)",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", TAKEN)
def test_copy_is_refused_when_its_address_is_stale(client: Client, kind: str, use: str) -> None:
    """An address that the driver gave out is never taken for the host's."""
    take, free = TAKEN[kind]
    client.do(
        f"MIB = {MIB}",
        "p, q = ok(d.cuMemAlloc(4096)), ok(d.cuMemAllocManaged(3 * MIB, 1))",
        f"x = int(ok({take}))",
        f"ok(({free})(x))",
        "0",
    )
    assert client.do(f"code({USES[use]})") == INVALID_VALUE
    assert client.do("code(d.cuMemcpyAsync(p, p, 8, 0))") == 0


def test_freed_addresses_are_used_again_and_never_twice(client: Client) -> None:
    """Pieces of random sizes keep their contents, and ranges join when they are freed."""
    assert client.do(
        "import random, ctypes",
        f"chance, held, MIB = random.Random(5), [], {MIB}",
        "def take():\n"
        "    size = chance.choice([512, 65536, 70000, MIB, 3 * MIB, 9 * MIB])\n"
        "    kind = chance.choice([d.cuMemAlloc, lambda n: d.cuMemAllocManaged(n, 1)])\n"
        "    held.append((ok(kind(size)), size, chance.randrange(256)))\n"
        "    ok(d.cuMemsetD8(held[-1][0], held[-1][2], size))",
        "def give(number):\n"
        "    at, size, value = held.pop(number)\n"
        "    ends = ctypes.string_at(int(at), 8) + ctypes.string_at(int(at) + size - 8, 8)\n"
        "    assert ends == bytes([value]) * 16\n"
        "    ok(d.cuMemFree(at))",
        "for _ in range(600):\n"
        "    if len(held) < 40 and chance.random() < 0.6: take()\n"
        "    elif held: give(chance.randrange(len(held)))",
        "while held: give(-1)",
        "first = int(ok(d.cuMemAlloc(200 * MIB)))",
        "ok(d.cuMemFree(first))",
        "[int(ok(d.cuMemAlloc(200 * MIB))) == first, ok(d.cuMemGetInfo())[0] > 0]",
    ) == [True, True]


def test_reservation_gets_its_wish_when_the_range_is_free(client: Client) -> None:
    """Programs that grow a range ask for the addresses behind it."""
    assert client.do(
        f"MIB = {MIB}",
        "p = int(ok(d.cuMemAddressReserve(4 * MIB, 0, 0, 0)))",
        "q = int(ok(d.cuMemAddressReserve(2 * MIB, 0, p + 4 * MIB, 0)))",
        "r = int(ok(d.cuMemAddressReserve(2 * MIB, 0, p, 0)))",
        "[q - p, r in (p, q)]",
    ) == [4 * MIB, False]


def test_memory_is_found_when_addresses_are_limited(make_client: MakeClient) -> None:
    """A program under a limit of addresses gets memory from those that it has."""
    client = make_client()
    client.do("import resource", "resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))", "0")
    assert client.enter().do(
        "code(d.cuMemAlloc(64 << 20)), code(d.cuMemAllocManaged(1 << 20, 1))"
    ) == [0, 0]
