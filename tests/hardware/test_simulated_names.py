"""What images define: kernels and variables are found by name, and others are not."""

import struct

import pytest

from tests.hardware.client import MakeClient

NOT_FOUND = 500


def cubin(padding: int) -> bytes:
    """Return a cubin with the kernel `first` and the variable `table`; its headers lie at any address."""
    strings = b"\0first\0table\0"
    symbols = bytes(24)
    symbols += struct.pack("<IBBHQQ", 1, 1 << 4 | 2, 0x10, 1, 0, 0)  # a global function, an entry
    symbols += struct.pack("<IBBHQQ", 7, 1 << 4 | 1, 0, 1, 0, 40)  # a global object
    body = strings + symbols + bytes(padding)
    places = ((3, 64, len(strings), 0), (2, 64 + len(strings), len(symbols), 1))
    table = bytes(64) + b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, link, 0, 1, 0)
        for kind, offset, size, link in places
    )
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, 3, 1)
    return header + body + table


@pytest.mark.parametrize("padding", range(8))
def test_names_of_a_cubin_are_found_wherever_its_headers_lie(
    make_client: MakeClient, padding: int
) -> None:
    """An absent kernel is not found, and a variable keeps what is copied to it."""
    client = make_client().enter()
    client.do(f"module = ok(d.cuModuleLoadData({cubin(padding)!r}))", "0")
    assert client.do("code(d.cuModuleGetFunction(module, b'first'))") == 0
    assert client.do("code(d.cuModuleGetFunction(module, b'other'))") == NOT_FOUND
    client.do(
        "pointer, size = ok(d.cuModuleGetGlobal(module, b'table'))", "out = bytearray(4)", "0"
    )
    client.do("ok(d.cuMemcpyHtoD(pointer, b'kept', 4))", "ok(d.cuMemcpyDtoH(out, pointer, 4))", "0")
    assert client.do("[int(size), out.decode()]") == [40, "kept"]
