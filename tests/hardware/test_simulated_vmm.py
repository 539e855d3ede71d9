"""Virtual memory management: charged at creation, given back when nobody can reach it any more."""

import pytest

from fenka.hardware.nvml import Driver
from tests.hardware.client import MIB, Client, MakeClient, MakeNode
from tests.waiting import wait_until

T4_BYTES = 15079 * MIB
BIG = 20 * MIB
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
SETUP = """
def properties(device=0, kind='DEVICE', shareable=False):
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = getattr(d.CUmemLocationType, 'CU_MEM_LOCATION_TYPE_' + kind)
    p.location.id = device
    if shareable: p.requestedHandleTypes = fd
    return p
def create(size, **how): return ok(d.cuMemCreate(size, properties(**how), 0))
def access(at, size, flags='READWRITE', device=0):
    a = d.CUmemAccessDesc()
    a.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.location.id = device
    a.flags = getattr(d.CUmemAccess_flags, 'CU_MEM_ACCESS_FLAGS_PROT_' + flags)
    return code(d.cuMemSetAccess(at, size, [a], 1))
def read(at, size):
    out = bytearray(size); ok(d.cuMemcpyDtoH(out, at, size)); return out.decode()
fd = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
MIB = 1 << 20
"""


@pytest.fixture
def program(client: Client) -> Client:
    """Return a client that knows the helpers above."""
    client.do(f"exec({SETUP!r}, globals())", "0")
    return client


def test_memory_lives_as_long_as_handles_and_mappings(program: Client) -> None:
    """Charged once at creation; neither the handle's release nor the unmapping alone discharges."""
    program.do(
        "va = int(ok(d.cuMemAddressReserve(64 * MIB, 0, 0, 0)))", "h = create(20 * MIB)", "0"
    )
    assert program.free_bytes() == T4_BYTES - BIG
    assert program.do("code(d.cuMemMap(va, 20 * MIB, 0, h, 0))", "access(va, 20 * MIB)") == 0
    assert program.free_bytes() == T4_BYTES - BIG
    assert program.do("code(d.cuMemRelease(h))") == 0
    assert program.free_bytes() == T4_BYTES - BIG
    assert program.do("code(d.cuMemRelease(h))") == INVALID_VALUE
    assert program.do("ok(d.cuMemcpyHtoD(va, b'still', 5))", "read(va, 5)") == "still"
    program.do("again = ok(d.cuMemRetainAllocationHandle(va))", "0")
    assert program.do("code(d.cuMemUnmap(va, 20 * MIB))") == 0
    assert program.free_bytes() == T4_BYTES - BIG
    assert program.do("code(d.cuMemRelease(again))") == 0
    assert program.free_bytes() == T4_BYTES
    assert program.do("code(d.cuMemAddressFree(va, 64 * MIB))") == 0
    assert program.do("code(d.cuMemAddressFree(va, 64 * MIB))") == INVALID_VALUE


def test_neighbouring_mappings_are_one_range(program: Client) -> None:
    """As PyTorch's expandable segments use it: a reservation beyond the card, grown piece by piece, is
    copied and filled across the seams, and shrinks in one call."""
    program.do(
        "va = int(ok(d.cuMemAddressReserve(1 << 40, 0, 0, 0)))",
        "handles = [create(2 * MIB) for _ in range(3)]",
        "[ok(d.cuMemMap(va + n * 2 * MIB, 2 * MIB, 0, h, 0)) for n, h in enumerate(handles)]",
        "[ok(d.cuMemRelease(h)) for h in handles]",
        "0",
    )
    seam = "va + 2 * MIB - 3"
    assert (
        program.do(f"code(d.cuMemcpyHtoD({seam}, b'seam!!', 6))") == INVALID_VALUE
    )  # no access yet
    assert program.do("access(va, 6 * MIB)") == 0
    assert program.do(f"ok(d.cuMemcpyHtoD({seam}, b'seam!!', 6))", f"read({seam}, 6)") == "seam!!"
    assert program.do("code(d.cuMemsetD8(va, 0, 6 * MIB))", f"read({seam}, 6)") == "\0" * 6
    assert program.do("code(d.cuMemsetD8(va, 0, 6 * MIB + 1))") == INVALID_VALUE
    assert program.do("code(d.cuMemUnmap(va, 3 * MIB))") == INVALID_VALUE  # would cut one
    assert program.do("code(d.cuMemAddressFree(va, 1 << 40))") == INVALID_VALUE  # still mapped
    assert program.free_bytes() == T4_BYTES - 6 * MIB
    assert program.do("code(d.cuMemUnmap(va, 6 * MIB))") == 0
    assert program.free_bytes() == T4_BYTES
    assert program.do("code(d.cuMemAddressFree(va, 1 << 40))") == 0


def test_one_memory_can_be_seen_at_two_addresses(program: Client) -> None:
    """What is written through one mapping is read through the other; the charge is one."""
    program.do(
        "va = int(ok(d.cuMemAddressReserve(4 * MIB, 0, 0, 0)))",
        "h = create(2 * MIB)",
        "[ok(d.cuMemMap(va + n * 2 * MIB, 2 * MIB, 0, h, 0)) for n in (0, 1)]",
        "access(va, 4 * MIB)",
    )
    assert program.do("ok(d.cuMemcpyHtoD(va, b'twice', 5))", "read(va + 2 * MIB, 5)") == "twice"
    assert program.free_bytes() == T4_BYTES - 2 * MIB


def test_access_is_kept_per_device_and_enforced(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """Reading only, writing is refused; each device's right is told apart."""
    program = make_client(make_node("T4*2")).enter()
    program.do(
        f"exec({SETUP!r}, globals())",
        "va = int(ok(d.cuMemAddressReserve(2 * MIB, 0, 0, 0)))",
        "h = create(2 * MIB, device=1)",
        "ok(d.cuMemMap(va, 2 * MIB, 0, h, 0))",
        "access(va, 2 * MIB, 'READ', device=1)",
    )
    assert program.do("read(va, 1)") == "\0"
    assert program.do("code(d.cuMemcpyHtoD(va, b'x', 1))") == INVALID_VALUE
    program.do("loc = d.CUmemLocation()", "loc.type = properties().location.type", "0")
    rights = "[[setattr(loc, 'id', n), ok(d.cuMemGetAccess(loc, va))][1] for n in (0, 1)]"
    assert program.do(rights) == [0, 1]
    # charged to the card that the properties name, not to the current context's
    assert program.free_bytes() == T4_BYTES


def test_a_program_without_a_context_can_create(make_client: MakeClient) -> None:
    """As on PyTorch's autograd threads: no current context is needed, and host memory is not charged."""
    program = make_client()
    program.do("ok(d.cuInit(0))", f"exec({SETUP!r}, globals())", "0")
    assert program.do("code(d.cuMemCreate(2 * MIB, properties(), 0))") == 0
    for kind in ("HOST", "HOST_NUMA", "HOST_NUMA_CURRENT"):
        assert program.do(f"code(d.cuMemCreate(1 << 40, properties(kind='{kind}'), 0))") == 0
    assert program.enter().free_bytes() == T4_BYTES - 2 * MIB


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("d.cuMemCreate(1, properties(), 0)", INVALID_VALUE),  # not of the granularity
        ("d.cuMemCreate(2 * MIB, properties(device=7), 0)", 101),  # INVALID_DEVICE
        ("d.cuMemCreate(15080 * MIB, properties(), 0)", OUT_OF_MEMORY),
        ("d.cuMemCreate(2 * MIB, d.CUmemAllocationProp(), 0)", INVALID_VALUE),
        ("d.cuMemAddressReserve(1, 0, 0, 0)", INVALID_VALUE),
        ("d.cuMemAddressReserve(2 * MIB, 3, 0, 0)", INVALID_VALUE),
        ("d.cuMemMap(va, 4 * MIB, 0, h, 0)", INVALID_VALUE),  # more than the handle has
        ("d.cuMemMap(va + 4 * MIB, 2 * MIB, 0, h, 0)", INVALID_VALUE),  # outside the reservation
        ("d.cuMemMap(va, 2 * MIB, 0, gone, 0)", INVALID_VALUE),
        ("d.cuMemMap(taken, 2 * MIB, 0, h, 0)", INVALID_VALUE),
        ("d.cuMemFree(taken)", INVALID_VALUE),
        ("d.cuMemExportToShareableHandle(h, fd, 0)", INVALID_VALUE),  # not asked for at creation
        ("d.cuMemImportFromShareableHandle(0, fd)", INVALID_VALUE),  # stdin is no memory
        ("d.cuMemRetainAllocationHandle(va)", INVALID_VALUE),
    ],
)
def test_wrong_uses_are_refused(program: Client, call: str, error: int) -> None:
    """The driver's error, nothing charged, and the next correct call works."""
    program.do(
        "va = int(ok(d.cuMemAddressReserve(4 * MIB, 0, 0, 0)))",
        "taken = va + 2 * MIB",
        "h, gone = create(2 * MIB), create(2 * MIB)",
        "ok(d.cuMemMap(taken, 2 * MIB, 0, h, 0))",
        "ok(d.cuMemRelease(gone))",
        "0",
    )
    before = program.free_bytes()
    assert program.do(f"code({call})") == error
    assert program.free_bytes() == before
    assert program.do("code(d.cuMemMap(va, 2 * MIB, 0, h, 0))") == 0


def test_many_handles_need_few_descriptors(program: Client) -> None:
    """Thousands of handles that are not shared stay below a usual limit on open files."""
    program.do("import os", "hs = [create(2 * MIB) for _ in range(3000)]", "0")
    assert program.do("len(os.listdir('/proc/self/fd'))") < 50
    assert program.do("[ok(d.cuMemRelease(h)) for h in hs]", "0") == 0
    assert program.free_bytes() == T4_BYTES


class TestSharing:
    """Memory that crosses to another process by file descriptor."""

    def share(self, owner: Client) -> int:
        """Create, write and export 2 MiB there; the descriptor's number."""
        owner.do(
            f"exec({SETUP!r}, globals())",
            "va = int(ok(d.cuMemAddressReserve(2 * MIB, 0, 0, 0)))",
            "h = create(2 * MIB, shareable=True)",
            "ok(d.cuMemMap(va, 2 * MIB, 0, h, 0))",
            "access(va, 2 * MIB)",
            "ok(d.cuMemcpyHtoD(va, b'from the owner', 14))",
            "out = int(ok(d.cuMemExportToShareableHandle(h, fd, 0)))",
            "0",
        )
        return int(owner.do("out"))

    def receive(self, owner: Client, number: int, importer: Client) -> None:
        """Send the descriptor over a socket, as programs do, then import and map it."""
        path = owner.do(
            "import socket, tempfile, os",
            "path = os.path.join(tempfile.mkdtemp(), 's')",
            "line = socket.socket(socket.AF_UNIX); line.bind(path); line.listen()",
            "path",
        )
        importer.do(
            f"exec({SETUP!r}, globals())",
            "import socket, os",
            f"peer = socket.socket(socket.AF_UNIX); peer.connect({path!r})",
            "0",
        )
        owner.do(
            "other, _ = line.accept()",
            f"socket.send_fds(other, [b'x'], [{number}])",
            "other.close(); line.close(); os.unlink(path); os.rmdir(os.path.dirname(path))",
            "0",
        )
        importer.do(
            "got = socket.recv_fds(peer, 1, 1)[1][0]",
            "theirs = ok(d.cuMemImportFromShareableHandle(got, fd))",
            "os.close(got)",
            "va = int(ok(d.cuMemAddressReserve(2 * MIB, 0, 0, 0)))",
            "ok(d.cuMemMap(va, 2 * MIB, 0, theirs, 0))",
            "access(va, 2 * MIB)",
        )

    def test_an_import_shows_the_owners_bytes_and_is_not_charged_again(
        self, make_client: MakeClient
    ) -> None:
        """Both read what the other wrote; the card counts the memory once, in the owner's name."""
        owner, importer = make_client().enter(), make_client().enter()
        number = self.share(owner)
        self.receive(owner, number, importer)
        assert importer.do("read(va, 14)") == "from the owner"
        importer.do("ok(d.cuMemcpyHtoD(va, b'from the other', 14))", "0")
        assert owner.do("read(va, 14)") == "from the other"
        assert importer.free_bytes() == T4_BYTES - 2 * MIB

    @pytest.mark.parametrize("end", ["release", "kill"])
    def test_the_charge_stays_until_the_last_import_has_gone(
        self, make_client: MakeClient, end: str
    ) -> None:
        """The owner lets go first: still charged; the importer lets go or is killed: free again."""
        owner, importer = make_client().enter(), make_client().enter()
        number = self.share(owner)
        self.receive(owner, number, importer)
        owner.do(
            f"os.close({number})", "ok(d.cuMemUnmap(va, 2 * MIB))", "ok(d.cuMemRelease(h))", "0"
        )
        assert owner.free_bytes() == T4_BYTES - 2 * MIB
        assert importer.do("read(va, 14)") == "from the owner"
        if end == "kill":
            importer.kill()
        else:
            importer.do("ok(d.cuMemRelease(theirs))", "ok(d.cuMemUnmap(va, 2 * MIB))", "0")
        wait_until(lambda: owner.free_bytes() == T4_BYTES)

    def test_an_import_finds_the_card_under_its_own_number(
        self, make_node: MakeNode, make_client: MakeClient
    ) -> None:
        """With the devices reordered the import's properties name the right one; unseen is refused."""
        node = make_node("T4,L4")
        owner = make_client(node).enter()
        importer = make_client(node, CUDA_VISIBLE_DEVICES="1,0").enter()
        number = self.share(owner)
        self.receive(owner, number, importer)
        assert importer.do("ok(d.cuMemGetAllocationPropertiesFromHandle(theirs)).location.id") == 1
        blind = make_client(node, CUDA_VISIBLE_DEVICES="1").enter()
        with pytest.raises(RuntimeError, match="INVALID_DEVICE"):
            self.receive(owner, number, blind)
        with Driver.open(node.library_dir) as driver:
            assert [reading.used_mib for reading in driver.readings()] == [2, 0]
