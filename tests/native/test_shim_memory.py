"""What is charged, where, and what gives it back."""

from collections.abc import Callable

import pytest

from fenka.isolation import account, lease_control
from tests.native.clients import CARDS, GIB, INVALID_DEVICE, MIB, OUT_OF_MEMORY, Client, Lease

Make = Callable[..., Lease]

# ask for it, how many bytes that is, and what frees it
KINDS: dict[str, tuple[tuple[str, int, int], int, str]] = {
    "plain": (("alloc", GIB, 0), GIB, "free"),
    "managed": (("managed", GIB, 0), GIB, "free"),
    # 3 lines of 1000 bytes; the null driver's pitch is 1024
    "pitched": (("pitch", 1000, 3), 3072, "free"),
    # 3 lines of 1100 bytes: the shim assumes a pitch of 1536, the driver takes 2048
    "pitched wider than assumed": (("pitch", 1100, 3), 6144, "free"),
    "ordered by stream": (("async", GIB, 0), GIB, "free-async"),
    "ordered, freed plainly": (("async", GIB, 0), GIB, "free"),
    "plain, freed in order": (("alloc", GIB, 0), GIB, "free-async"),
    "block": (("block", GIB, 0), GIB, "release"),
    "block of host memory": (("block", GIB, -1), 0, "release"),
    # 100 x 10 texels of 4 floats, in tiles of 8 rows
    "array": (("array", 100, 10), 100 * 16 * 16, "array-destroy"),
    # 64 x 64 + 32 x 32 + 16 x 16 texels of 4 floats
    "mipmap": (("mipmap", 64, 64), (4096 + 1024 + 256) * 16, "mipmap-destroy"),
}


@pytest.mark.parametrize(("ask", "charged", "free"), KINDS.values(), ids=KINDS)
def test_memory_of_every_kind_is_charged_and_discharged(
    lease: Lease, ask: tuple[str, int, int], charged: int, free: str
) -> None:
    """Each allocation appears in the account with its size, and its free takes it out."""
    client = lease.start().enter()
    code, handle, _ = client.ask(*ask)
    assert (code, lease.held()) == (0, charged)
    assert client.ask(free, handle).code == 0
    assert lease.held() == 0


TOO_MUCH = 5 * GIB


@pytest.mark.parametrize(
    "ask",
    [
        ("alloc", TOO_MUCH, 0),
        ("managed", TOO_MUCH, 0),
        ("pitch", GIB, 5),
        ("async", TOO_MUCH, 0),
        ("block", TOO_MUCH, 0),
        ("array", 1 << 30, 1),
        ("mipmap", 1 << 30, 1),
        ("graph", TOO_MUCH, 0),
        ("alloc", -1, 0),
        ("pitch", -1, -1),
        ("array", -1, -1),
    ],
    ids=str,
)
def test_memory_of_every_kind_is_refused_beyond_the_cap(
    lease: Lease, ask: tuple[str, int, int]
) -> None:
    """Too much of anything, absurdly much too, is CUDA_ERROR_OUT_OF_MEMORY and leaves no trace."""
    client = lease.start().enter()
    assert client.ask(*ask).code == OUT_OF_MEMORY
    assert lease.held() == 0
    assert client.ask("alloc", 4 * GIB).code == 0


def test_refusals_are_counted_by_card(make_lease: Make) -> None:
    """Each on the card that lacked the memory, and all together; what was granted counts nothing."""
    lease = make_lease(4, 2)
    client = lease.start().enter()
    pool = client.ask("pool", 1).value
    assert client.ask("alloc", GIB).code == 0
    for _ in range(2):
        assert client.ask("alloc", TOO_MUCH).code == OUT_OF_MEMORY
    assert client.ask("from-pool", 3 * GIB, pool).code == OUT_OF_MEMORY
    content = account.read(lease.account)
    assert (content.out_of_memory, content.refused) == ((2, 1, *[0] * 14), 3)


def test_pool_is_charged_on_its_own_card(make_lease: Make) -> None:
    """Memory from a pool of the second card is the second card's, whatever device is current."""
    lease = make_lease(4, 2)
    client = lease.start().enter()
    pool = client.ask("pool", 1).value
    host_pool = client.ask("pool", -1).value
    assert client.ask("from-pool", 3 * GIB, pool).code == OUT_OF_MEMORY
    code, pointer, _ = client.ask("from-pool", GIB, pool)
    assert (code, lease.held(0), lease.held(1)) == (0, 0, GIB)
    assert client.ask("from-pool", 64 * GIB, host_pool).code == 0
    assert client.ask("free-async", pointer).code == 0
    assert lease.held(1) == 0


NOWHERE, DEVICE, HOST, NUMA, NUMA_CURRENT, NEWER = 0, 1, 2, 3, 4, 77
PINNED, MANAGED = 1, 2


@pytest.mark.parametrize("name", ["cuMemGetDefaultMemPool", "cuMemGetMemPool"])
@pytest.mark.parametrize(
    ("kind", "location", "charged"),
    [
        (PINNED, HOST, (0, 0)),
        (PINNED, NUMA, (0, 0)),
        (PINNED, NUMA_CURRENT, (0, 0)),
        (PINNED, DEVICE, (0, GIB)),
        (MANAGED, HOST, (GIB, 0)),
        (MANAGED, DEVICE, (0, GIB)),
    ],
)
def test_usual_pool_is_charged_where_its_memory_is(
    make_lease: Make, name: str, kind: int, location: int, charged: tuple[int, int]
) -> None:
    """Asked for by location, which may be the host: then nothing is charged. The first card is current."""
    lease = make_lease(4, 4)
    client = lease.start_rows()
    client.ask("use -", 0)
    assert client.ask(f"usual-pool {name}", kind, location).code == 0
    code, pointer, _ = client.ask("from-last-pool -", GIB)
    assert (code, lease.held(0), lease.held(1)) == (0, *charged)
    assert client.ask("give cuMemFreeAsync", pointer).code == 0
    assert (lease.held(0), lease.held(1)) == (0, 0)


@pytest.mark.parametrize(("kind", "location"), [(MANAGED, NOWHERE), (PINNED, NEWER)])
def test_memory_of_no_known_place_is_charged_to_the_current_card(
    make_lease: Make, kind: int, location: int
) -> None:
    """The driver decides whether the place exists; beyond the slice it is refused."""
    lease = make_lease(4, 4)
    client = lease.start_rows()
    client.ask("use -", 1)
    assert client.ask("new-pool -", kind, location).code == 0
    assert client.ask("from-last-pool -", GIB).code == 0
    assert client.ask("block -", GIB, location).code == 0
    assert (lease.held(0), lease.held(1)) == (0, 2 * GIB)
    for what in ("from-last-pool -", "block -"):
        assert client.ask(what, 3 * GIB, location).code == OUT_OF_MEMORY


def test_block_of_an_unknown_place_is_charged_without_a_context(make_lease: Make) -> None:
    """Then to the first card that the program sees."""
    lease = make_lease(4, 4)
    client = lease.start_rows()
    assert client.ask("block -", GIB, NEWER).code == 0
    assert (lease.held(0), lease.held(1)) == (GIB, 0)


def test_charge_stays_when_the_free_fails(lease: Lease) -> None:
    """A pointer that the driver will not free, or that was never ours, changes no sum."""
    client = lease.start().enter()
    client.ask("alloc", GIB)
    assert client.ask("free", 0xBAD).code != 0
    assert client.ask("free", 0x1234).code == 0
    assert lease.held() == GIB


def test_block_is_charged_until_its_last_mapping_ends(lease: Lease) -> None:
    """Releasing a handle does not give back what is still mapped; one unmap may end several mappings."""
    client = lease.start().enter()
    at = 0x700000000000
    blocks = [client.ask("block", GIB).value for _ in range(2)]
    for number, block in enumerate(blocks):
        assert client.ask("map", block, at + number * GIB).code == 0
        assert client.ask("release", block).code == 0
    assert lease.held() == 2 * GIB
    assert client.ask("unmap", at, 2 * GIB).code == 0
    assert lease.held() == 0


def test_block_is_charged_until_its_handle_is_released(lease: Lease) -> None:
    """Unmapping does not give back what still has a handle."""
    client = lease.start().enter()
    block = client.ask("block", GIB).value
    client.ask("map", block, 0x700000000000)
    assert client.ask("unmap", 0x700000000000, GIB).code == 0
    assert lease.held() == GIB
    assert client.ask("release", block).code == 0
    assert lease.held() == 0


def test_memory_is_discharged_with_its_context(lease: Lease) -> None:
    """Destroying a context gives back its memory, and not another context's."""
    client = lease.start().enter()
    client.ask("alloc", GIB)
    assert client.ask("retain").code == 0  # makes the primary context current
    client.ask("alloc", 2 * GIB)
    for _ in range(300):
        client.ask("array", 8, 8)
    assert lease.held() == 3 * GIB + 300 * 1024
    assert client.ask("unretain").code == 0
    assert lease.held() == GIB


def test_memory_is_discharged_when_the_primary_context_is_reset(lease: Lease) -> None:
    """cuDevicePrimaryCtxReset gives everything back, memory ordered by streams too."""
    client = lease.start()
    client.ask("init")
    client.ask("retain")
    client.ask("alloc", GIB)
    client.ask("async", GIB)
    assert lease.held() == 2 * GIB
    assert client.ask("reset").code == 0
    assert lease.held() == 0


def test_contexts_of_a_process_are_charged_once(make_lease: Make) -> None:
    """The first context on a card costs what the page says, the next nothing; the last one gives it back."""
    lease = make_lease(1, context_bytes=300 * MIB)
    client = lease.start()
    client.ask("init")
    first = client.ask("context").value
    client.ask("retain")
    assert lease.held() == 300 * MIB
    client.ask("destroy", first)
    assert lease.held() == 300 * MIB
    client.ask("unretain")
    assert lease.held() == 0


def test_context_is_out_of_memory_when_it_does_not_fit(make_lease: Make) -> None:
    """A third process whose context does not fit is refused it, and the others keep theirs."""
    lease = make_lease(1, context_bytes=400 * MIB)
    for _ in range(2):
        lease.start().enter()
    third = lease.start()
    assert third.ask("init").code == 0
    assert third.ask("context").code == OUT_OF_MEMORY
    assert third.ask("retain").code == OUT_OF_MEMORY
    assert lease.held() == 800 * MIB


def free_and_total(client: Client) -> tuple[int, int]:
    """As cuMemGetInfo says."""
    code, free, total = client.ask("info")
    assert code == 0
    return free, total


def test_memory_queries_return_the_slice(lease: Lease) -> None:
    """cuMemGetInfo and cuDeviceTotalMem agree, over all processes of the lease."""
    one, two = lease.start().enter(), lease.start().enter()
    one.ask("alloc", GIB)
    two.ask("alloc", 2 * GIB)
    assert free_and_total(one) == free_and_total(two) == (GIB, 4 * GIB)
    assert one.ask("total").value == 4 * GIB
    assert one.ask("info-of-nothing").code == 0


def test_memory_queries_return_the_card_when_the_slice_is_larger(make_lease: Make) -> None:
    """Programs are never told of memory that the card does not have (16 GiB here)."""
    client = make_lease(64).start().enter()
    assert free_and_total(client) == (16 * GIB, 16 * GIB)
    assert client.ask("total").value == 16 * GIB


@pytest.mark.parametrize(
    ("wanted", "totals"),
    [
        (None, [4, 2, 1]),
        ("1,0", [2, 4]),
        ("2", [1]),
        (" 1 , 2", [2, 1]),
        (f"{CARDS[2]},0", [1, 4]),
        (f"{CARDS[1].lower()[:3].upper()}{CARDS[1][3:]}", [2]),
        ("1,7,0", [2]),
        (f"0,{CARDS[3]},1", [4]),
        ("0,0,1", []),
        ("1,0,1", []),
        (f"{CARDS[1]},{CARDS[1]}", []),
        ("0,7,0", [4]),
        ("0,x", [4]),
        ("1 0", [2]),
        ("1;0", [2]),
        ("+1,0", [2, 4]),
        ("1gpu,\t2ampere", [2, 1]),
        ("0,", [4]),
        (",1", []),
        ("99999999999999999999,0", []),
        ("1,-0", [2, 4]),
        ("GPU-,1", []),  # names all three
        ("-1", []),
        ("", []),
    ],
)
def test_limits_follow_the_visible_devices(
    make_lease: Make, wanted: str | None, totals: list[int]
) -> None:
    """CUDA_VISIBLE_DEVICES reorders and leaves out within the lease; every limit stays with its card.

    Tokens are read like strtoul, and a repeated one empties the list, as PyTorch's parser says of the driver.
    """
    lease = make_lease(4, 2, 1)
    environment = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    client = lease.start(0, **environment)
    assert client.ask("init").code == (0 if totals else 100)
    assert client.ask("count").value == len(totals)
    for device, gib in enumerate(totals):
        assert client.ask("total", device).value == gib * GIB
        assert client.ask("context", device).code == 0
        assert client.ask("alloc", gib * GIB + 1).code == OUT_OF_MEMORY
        assert client.ask("alloc", gib * GIB).code == 0
    assert client.ask("context", len(totals)).code == INVALID_DEVICE


def test_devices_are_in_the_order_of_the_lease(make_lease: Make) -> None:
    """A lease of the fourth and the second card has them as devices 0 and 1."""
    lease = make_lease(1)
    limits = (lease_control.Limit(CARDS[3], GIB), lease_control.Limit(CARDS[1], 2 * GIB))
    lease_control.write(lease.control, lease_control.Control("test", limits))
    client = lease.start()
    assert client.ask("init").code == 0
    assert [client.ask("total", d).value for d in range(2)] == [GIB, 2 * GIB]


def test_limit_changes_while_a_program_runs(lease: Lease) -> None:
    """An update in place is obeyed by the next allocation, up and down."""
    client = lease.start().enter()
    assert client.ask("alloc", 3 * GIB).code == 0
    for gib, code in ((2, OUT_OF_MEMORY), (8, 0)):
        lease_control.update(
            lease.control,
            lease_control.Control("test", (lease_control.Limit(CARDS[0], gib * GIB),)),
        )
        assert client.ask("total").value == gib * GIB
        assert client.ask("info").second == gib * GIB
        assert client.ask("alloc", GIB).code == code
    assert free_and_total(client) == (4 * GIB, 8 * GIB)
