"""Arrays and mipmapped arrays, and the copies that reach them."""

import pytest

from tests.hardware.client import MIB, Client

T4_BYTES = 15079 * MIB
INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_SUPPORTED = 1, 2, 400, 801
SETUP = """
import ctypes
HOST, DEVICE, ARRAY, UNIFIED = (d.CUmemorytype(n) for n in (1, 2, 3, 4))
def shape(width, height=0, depth=0, channels=1, format='UNSIGNED_INT8', flags=0):
    s = d.CUDA_ARRAY3D_DESCRIPTOR()
    s.Width, s.Height, s.Depth, s.NumChannels, s.Flags = width, height, depth, channels, flags
    s.Format = getattr(d.CUarray_format, 'CU_AD_FORMAT_' + format)
    return s
def box(width, height=1, depth=1, **fields):
    c = d.CUDA_MEMCPY3D()
    c.WidthInBytes, c.Height, c.Depth = width, height, depth
    for name, value in fields.items(): setattr(c, name, value)
    return c
buffer = ctypes.create_string_buffer(b'abcdefghijklmnopqrstuvwx')
here = ctypes.addressof(buffer)
out = ctypes.create_string_buffer(b'.' * 24, 24)
there = ctypes.addressof(out)
"""


@pytest.fixture
def program(client: Client) -> Client:
    """Return a client with the helpers above."""
    client.do(f"exec({SETUP!r}, globals())", "0")
    return client


@pytest.mark.parametrize(
    ("create", "destroy", "charged"),
    [
        ("d.cuArray3DCreate(shape(1000))", "d.cuArrayDestroy(a)", 1024),
        ("d.cuArray3DCreate(shape(1024, 1024))", "d.cuArrayDestroy(a)", MIB),
        # 64 x 64 x 64 elements of 4 floats
        (
            "d.cuArray3DCreate(shape(64, 64, 64, 4, 'FLOAT'))",
            "d.cuArrayDestroy(a)",
            4 * MIB,
        ),
        ("d.cuArray3DCreate(shape(512, 0, 2048, flags=1))", "d.cuArrayDestroy(a)", MIB),  # layers
        # 1024 + 256 + 64 KiB, in a page
        (
            "d.cuMipmappedArrayCreate(shape(1024, 1024), 3)",
            "d.cuMipmappedArrayDestroy(a)",
            2 * MIB,
        ),
        # more levels than there are: 4, 2 and 1 rows of 512 layers, each in a tile
        (
            "d.cuMipmappedArrayCreate(shape(4, 4, 512, flags=1), 9)",
            "d.cuMipmappedArrayDestroy(a)",
            3 * 512 * 512,
        ),
    ],
)
def test_arrays_are_charged_once_and_freed_once(
    program: Client, create: str, destroy: str, charged: int
) -> None:
    """By what their tiles take; a second destruction is an error and no gift."""
    program.do(f"a = ok({create})", "0")
    assert program.free_bytes() == T4_BYTES - charged
    assert program.do(f"code({destroy})") == 0
    assert program.free_bytes() == T4_BYTES
    assert program.do(f"code({destroy})") == INVALID_HANDLE


def test_array_without_memory_says_what_it_would_take(program: Client) -> None:
    """Only such an array says so; it takes nothing itself, and cannot be copied to."""
    program.do("a = ok(d.cuArray3DCreate(shape(1000, 1000, flags=0x80)))", "0")
    assert program.free_bytes() == T4_BYTES
    assert program.do("ok(d.cuArrayGetMemoryRequirements(a, 0)).size") == 1024 * 1000
    assert program.do("code(d.cuMemcpyHtoA(a, 0, b'x', 1))") == INVALID_HANDLE
    assert program.do("code(d.cuArrayDestroy(a))") == 0
    program.do("m = ok(d.cuMipmappedArrayCreate(shape(1024, 1024, flags=0x80), 3))", "0")
    assert program.do("ok(d.cuMipmappedArrayGetMemoryRequirements(m, 0)).size") == 2 * MIB
    assert program.do("code(d.cuMipmappedArrayDestroy(m))") == 0
    program.do("b = ok(d.cuArray3DCreate(shape(1)))", "0")
    assert program.do("code(d.cuArrayGetMemoryRequirements(b, 0))") == INVALID_VALUE


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("d.cuArray3DCreate(shape(0))", INVALID_VALUE),
        ("d.cuArray3DCreate(shape(8, channels=3))", INVALID_VALUE),
        ("d.cuArray3DCreate(shape(8, 0, 8))", INVALID_VALUE),  # deep but not high
        ("d.cuArray3DCreate(shape(8, 4, 6, flags=4))", INVALID_VALUE),  # a cube is square
        ("d.cuArray3DCreate(shape(1 << 34))", OUT_OF_MEMORY),
        ("d.cuArray3DCreate(shape(1 << 40, 1 << 40, 1 << 40))", OUT_OF_MEMORY),
        ("d.cuArray3DCreate(shape(64, 64, flags=0x40))", NOT_SUPPORTED),  # sparse
        ("d.cuMipmappedArrayCreate(shape(8), 0)", INVALID_VALUE),
        ("d.cuArrayDestroy(ok(d.cuMipmappedArrayGetLevel(m, 1)))", INVALID_VALUE),
        ("d.cuMipmappedArrayGetLevel(m, 2)", INVALID_VALUE),
        ("d.cuMemcpyHtoA(m, 0, b'x', 1)", INVALID_HANDLE),
        ("d.cuMemcpyHtoA(small, 7, b'xx', 2)", INVALID_VALUE),
    ],
)
def test_invalid_arrays_are_rejected(program: Client, call: str, error: int) -> None:
    """With the driver's error, and nothing charged."""
    program.do(
        "m = ok(d.cuMipmappedArrayCreate(shape(8), 2))",
        "small = ok(d.cuArray3DCreate(shape(8)))",
        "0",
    )
    before = program.free_bytes()
    assert program.do(f"code({call})") == error
    assert program.free_bytes() == before


def test_an_array_describes_itself(program: Client) -> None:
    """Both descriptors give back what was asked for; a level says its halved extents."""
    program.do(
        "two = d.CUDA_ARRAY_DESCRIPTOR()",
        "two.Width, two.Height, two.NumChannels, two.Format = 6, 5, 2, shape(1, format='HALF').Format",
        "a = ok(d.cuArrayCreate(two))",
        "m = ok(d.cuMipmappedArrayCreate(shape(20, 10, 4), 3))",
        "l = ok(d.cuArray3DGetDescriptor(ok(d.cuMipmappedArrayGetLevel(m, 2))))",
        "g = ok(d.cuArrayGetDescriptor(a))",
        "0",
    )
    assert program.do("[g.Width, g.Height, g.NumChannels, int(g.Format)]") == [6, 5, 2, 0x10]
    assert program.do("[l.Width, l.Height, l.Depth]") == [5, 2, 1]


def test_box_is_copied_through_an_array(program: Client) -> None:
    """Out of a pitched source into the middle of an array, and out of it into a pitched target."""
    # the source: 2 slices of 3 rows of 4 bytes; the box: columns 1-2, rows 1-2 of both slices
    program.do(
        "a = ok(d.cuArray3DCreate(shape(8, 4, 4)))",
        "ok(d.cuMemcpy3D(box(2, 2, 2, srcMemoryType=HOST, srcHost=here, srcPitch=4, srcHeight=3,"
        " srcXInBytes=1, srcY=1, dstMemoryType=ARRAY, dstArray=a, dstXInBytes=5, dstY=2, dstZ=1)))",
        "ok(d.cuMemcpy3D(box(2, 2, 2, srcMemoryType=ARRAY, srcArray=a, srcXInBytes=5, srcY=2, srcZ=1,"
        " dstMemoryType=HOST, dstHost=there, dstPitch=4, dstHeight=2)))",
        "0",
    )
    assert program.do("out.raw.decode()") == "fg..jk..rs..vw.." + "." * 8
    assert (
        program.do(
            "code(d.cuMemcpy3D(box(2, 2, 2, srcMemoryType=ARRAY, srcArray=a, srcZ=3,"
            " dstMemoryType=HOST, dstHost=there)))"
        )
        == INVALID_VALUE
    )


def test_rows_are_copied_between_arrays(program: Client) -> None:
    """Host to array, array to array, to device, back to an array and to the host."""
    program.do(
        "a, b, c = (ok(d.cuArray3DCreate(shape(16))) for _ in range(3))",
        "p = ok(d.cuMemAlloc(16))",
        "ok(d.cuMemcpyHtoA(a, 2, b'0123456789', 10))",
        "ok(d.cuMemcpyAtoA(b, 0, a, 4, 8))",
        "ok(d.cuMemcpyAtoD(p, b, 1, 7))",
        "ok(d.cuMemcpyDtoA(c, 3, p, 7))",
        "ok(d.cuMemcpyAtoHAsync(there, c, 2, 8, 0))",
        "0",
    )
    # 23456789 from the second character on, preceded by one zero byte of c
    assert program.do("out.raw[:9].decode()") == "\x003456789."
    assert program.do("code(d.cuMemcpyAtoD(p, b, 0, 17))") == INVALID_VALUE


def test_rectangles_are_copied_to_arrays(program: Client) -> None:
    """cuMemcpy2D takes arrays on either side, and a level of a mipmapped array is one."""
    program.do(
        "m = ok(d.cuMipmappedArrayCreate(shape(8, 8), 2))",
        "level = ok(d.cuMipmappedArrayGetLevel(m, 1))",
        "c = d.CUDA_MEMCPY2D()",
        "c.srcMemoryType, c.srcHost, c.srcPitch = HOST, here, 6",
        "c.dstMemoryType, c.dstArray, c.WidthInBytes, c.Height = ARRAY, level, 4, 4",
        "ok(d.cuMemcpy2D(c))",
        "c = d.CUDA_MEMCPY2D()",
        "c.srcMemoryType, c.srcArray, c.srcXInBytes, c.srcY = ARRAY, level, 2, 1",
        "c.dstMemoryType, c.dstHost, c.WidthInBytes, c.Height = HOST, there, 2, 3",
        "ok(d.cuMemcpy2D(c))",
        "0",
    )
    assert program.do("out.raw[:7].decode()") == "ijopuv."
    assert program.do("c.Height = 4", "0") == 0
    assert program.do("code(d.cuMemcpy2D(c))") == INVALID_VALUE


def test_copy_out_of_bounds_fails_and_changes_nothing(program: Client) -> None:
    """When only the last row does not fit, the first ones stay as they were, too."""
    program.do("p = ok(d.cuMemAlloc(10))", "ok(d.cuMemsetD8(p, 46, 10))", "0")
    call = "code(d.cuMemcpy3D(box(4, 3, srcMemoryType=HOST, srcHost=here, dstMemoryType={}, dstDevice=p)))"
    assert program.do(call.format("DEVICE")) == INVALID_VALUE
    assert program.do(call.format("UNIFIED")) == INVALID_VALUE
    program.do("ok(d.cuMemcpyDtoH(there, p, 10))", "0")
    assert program.do("out.raw[:10].decode()") == "." * 10


def test_arrays_are_freed_with_their_context(program: Client) -> None:
    """After the context's end its arrays are unknown, and their memory is free."""
    program.do(
        "own = ok(d.cuCtxCreate(0, 0))", "a = ok(d.cuArray3DCreate(shape(MIB := 1 << 20)))", "0"
    )
    assert program.free_bytes() == T4_BYTES - MIB
    assert program.do("code(d.cuCtxDestroy(own))") == 0
    assert program.free_bytes() == T4_BYTES
    assert program.do("code(d.cuArrayDestroy(a))") == INVALID_HANDLE
