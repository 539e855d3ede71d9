"""Copies and fills on a simulated card are real."""

import pytest

from tests.hardware.client import Client

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
