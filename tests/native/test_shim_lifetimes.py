"""What lives longer than the call that frees it: blocks and their mappings, pools, graphs, imports."""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.isolation import account
from fenka.isolation.lease_control import Limit
from tests.native import clients
from tests.native.clients import GIB, MIB, OUT_OF_MEMORY, Client, Lease
from tests.native.test_shim_robust import offset, put

Make = Callable[..., Lease]


@pytest.fixture
def client(lease: Lease) -> Client:
    """One client with all rows of the table, on the first card."""
    started = lease.start_rows()
    assert started.ask("use -").code == 0
    return started


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lease, Client]]:
    """A lease and a client for many examples, each of which gives back all that it took."""
    folder: Path = tmp_path_factory.mktemp("lifetimes") / "lease"
    lease = Lease(folder, (Limit(clients.CARDS[0], 4 * GIB),))
    client = lease.start_rows()
    assert client.ask("use -").code == 0
    yield lease, client
    lease.close()


class Blocks:
    """What the driver's documentation says of blocks: alive while a handle or a mapping refers to them."""

    def __init__(self, lease: Lease, client: Client) -> None:
        self.lease, self.client = lease, client
        self.handles: dict[int, int] = {}
        """How many references the program holds, by block."""
        self.mappings: dict[int, int] = {}
        """Block, by place."""
        self.sizes: dict[int, int] = {}

    def create(self, size: int) -> None:
        """A new block, with one handle."""
        code, block, _ = self.client.ask("take cuMemCreate", size)
        assert code == 0
        self.handles[block], self.sizes[block] = 1, size

    def act(self, what: str, number: int) -> None:
        """One step with one of the blocks; nothing where the driver would not allow it."""
        alive = [b for b in self.sizes if self.alive(b)]
        if not alive:
            return
        block = alive[number % len(alive)]
        place = number % 5 + 1
        if what == "release" and self.handles[block]:
            assert self.client.ask("give cuMemRelease", block).code == 0
            self.handles[block] -= 1
        elif what == "retain":
            assert self.client.ask("keep cuMemRetainAllocationHandle", block).code == 0
            self.handles[block] += 1
        elif what == "import" and self.handles[block]:
            assert self.client.ask("keep cuMemImportFromShareableHandle", block).code == 0
            self.handles[block] += 1
        elif what == "map" and self.handles[block] and place not in self.mappings:
            assert self.client.ask("map -", block, place).code == 0
            self.mappings[place] = block
        elif what == "unmap" and place in self.mappings:
            assert self.client.ask("give cuMemUnmap", place << 20).code == 0
            del self.mappings[place]

    def alive(self, block: int) -> bool:
        """Whether anything refers to it."""
        return bool(self.handles[block]) or block in self.mappings.values()

    def expect(self) -> None:
        """The account says what the documentation says."""
        assert self.lease.held() == sum(s for b, s in self.sizes.items() if self.alive(b))

    def end(self) -> None:
        """Gives all back."""
        for place in list(self.mappings):
            self.act("unmap", place - 1)
        for block, references in self.handles.items():
            for _ in range(references):
                assert self.client.ask("give cuMemRelease", block).code == 0
        self.handles = dict.fromkeys(self.handles, 0)
        self.expect()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "release", "retain", "import", "map", "unmap"]),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_block_is_charged_while_it_is_referenced(
    shared: tuple[Lease, Client], steps: list[tuple[str, int]]
) -> None:
    """Whatever order of create, retain, import, map, unmap and release a program chooses."""
    blocks = Blocks(*shared)
    blocks.create(2 * MIB)
    for what, number in steps:
        if what == "create":
            blocks.create((number + 1) * 2 * MIB)
        else:
            blocks.act(what, number)
        blocks.expect()
    blocks.end()


@pytest.mark.parametrize(
    "order", sorted(set(permutations(["release", "release", "unmap", "unmap"])))
)
def test_block_is_discharged_with_its_last_reference(
    shared: tuple[Lease, Client], order: tuple[str, ...]
) -> None:
    """Two handles and two mappings of one block: charged once, until the last of the four is gone."""
    lease, client = shared
    block = client.ask("take cuMemCreate", GIB).value
    client.ask("keep cuMemRetainAllocationHandle", block)
    places = [1, 2]
    for place in places:
        client.ask("map -", block, place)
    for what in order:
        assert lease.held() == GIB
        if what == "unmap":
            client.ask("give cuMemUnmap", places.pop() << 20)
        else:
            client.ask("give cuMemRelease", block)
    assert lease.held() == 0


def test_import_is_not_charged_again(make_lease: Make) -> None:
    """A block or pointer of another process counts there; leaving it here changes nothing."""
    lease = make_lease(4)
    owner, guest = lease.start_rows(), lease.start_rows()
    for one in (owner, guest):
        one.ask("use -")
    block = owner.ask("take cuMemCreate", GIB).value
    pointer = owner.ask("take cuMemAlloc_v2", GIB).value
    code, descriptor, _ = owner.ask("export -", block)
    assert code == owner.ask("close -", descriptor).code == 0
    assert guest.ask("keep cuMemImportFromShareableHandle", block).value == block
    assert guest.ask("map -", block, 1).code == 0
    assert guest.ask("ipc -", pointer).value == pointer
    assert lease.held() == 2 * GIB
    assert guest.ask("give cuMemRelease", block).code == 0
    assert guest.ask("give cuMemUnmap", 1 << 20).code == 0
    assert guest.ask("ipc-close -", pointer).code == 0
    assert lease.held() == 2 * GIB
    owner.ask("give cuMemRelease", block)
    owner.ask("give cuMemFree_v2", pointer)
    assert lease.held() == 0


class Sharing:
    """Processes of one lease of 4 GiB that hand blocks of 1 MiB around: a mapping is as large."""

    def __init__(self, lease: Lease, guests: int) -> None:
        self.lease = lease
        self.owner, *self.guests = (lease.start_rows() for _ in range(1 + guests))
        for one in (self.owner, *self.guests):
            assert one.ask("use -").code == 0

    def export(self) -> int:
        """A new block of the owner's that others may have; the descriptor is closed."""
        block, descriptor = self.hand_out()
        assert self.owner.ask("close -", descriptor).code == 0
        return block

    def hand_out(self, mib: int = 1) -> tuple[int, int]:
        """A new block, and a descriptor of it in the owner."""
        block = self.owner.ask("take cuMemCreate", mib * MIB).value
        code, descriptor, _ = self.owner.ask("export -", block)
        assert code == 0
        return block, descriptor

    def map(self, guest: Client, block: int, place: int = 1) -> int:
        """In a guest; what the driver says to the mapping."""
        assert guest.ask("keep cuMemImportFromShareableHandle", block).code == 0
        return guest.ask("map -", block, place).code


def copy_descriptor(client: Client, number: int) -> int:
    """Another process's descriptor, in this one as well."""
    process = os.pidfd_open(client.process.pid)
    copied = int(ctypes.CDLL(None, use_errno=True).syscall(438, process, number, 0))  # pidfd_getfd
    os.close(process)
    if copied < 0:
        pytest.skip("the kernel, or the right to debug other processes, is missing: no pidfd_getfd")
    return copied


@pytest.mark.parametrize("dies", [False, True])
def test_block_stays_charged_when_a_descriptor_is_open(make_lease: Make, dies: bool) -> None:
    """Exported, released by a maker that lives or dies, imported by nobody: until the last copy is closed,
    also one that is on its way in a socket."""
    on = Sharing(make_lease(4), 1)
    block, descriptor = on.hand_out(mib=2048)
    (guest,) = on.guests
    copy = copy_descriptor(on.owner, descriptor)
    if dies:
        on.owner.kill()
    else:
        assert on.owner.ask("give cuMemRelease", block).code == 0
        assert on.owner.ask("close -", descriptor).code == 0
    ends = socket.socketpair()
    for step in ("held", "sent"):
        assert guest.ask("take cuMemAlloc_v2", 3 * GIB).code == OUT_OF_MEMORY, step
        assert on.lease.held() == 2 * GIB
        if step == "held":
            socket.send_fds(ends[0], [b"x"], [copy])
            os.close(copy)
    for end in ends:
        end.close()
    if not dies:  # it alone knows what it gave up, and looks when it is asked
        assert on.owner.ask("take cuMemAlloc_v2", 4 * GIB).code == 0
        return
    assert guest.ask("take cuMemAlloc_v2", 4 * GIB).code == 0
    assert on.lease.held() == 4 * GIB


def test_released_block_is_charged_for_each_importer(make_lease: Make) -> None:
    """Three importers hold a block each of one maker that dies: three blocks are charged, not the largest."""
    on = Sharing(make_lease(4), 3)
    for guest in on.guests:
        block, descriptor = on.hand_out()
        assert on.map(guest, block) == 0
        assert on.owner.ask("close -", descriptor).code == 0
    on.owner.kill()
    assert on.guests[0].ask("take cuMemAlloc_v2", 4 * GIB - 2 * MIB).code == OUT_OF_MEMORY
    assert on.guests[0].ask("take cuMemAlloc_v2", 4 * GIB - 4 * MIB).code == 0
    assert on.lease.held() == 4 * GIB - MIB


def test_import_stays_charged_when_the_exporter_keeps_another_block(make_lease: Make) -> None:
    """The maker gives up one of two blocks, which a guest holds; the other one, still the maker's, pays for
    itself only."""
    on = Sharing(make_lease(4), 1)
    first, _ = on.export(), on.export()
    assert on.map(on.guests[0], first) == 0
    assert on.owner.ask("give cuMemRelease", first).code == 0
    assert on.lease.held() == 2 * MIB
    assert on.guests[0].ask("give cuMemRelease", first).code == 0
    assert on.guests[0].ask("give cuMemUnmap", 1 << 20).code == 0
    assert on.owner.ask("take cuMemAlloc_v2", 4 * GIB - 2 * MIB).code == 0
    assert on.lease.held() == 4 * GIB - MIB


def test_no_charge_remains_when_exporters_end(make_lease: Make) -> None:
    """One after the other hands out half of the lease and is killed: nothing adds up, no slot stays taken."""
    on = Sharing(make_lease(4), 1)
    for _ in range(12):
        maker = on.lease.start_rows()
        assert maker.ask("use -").code == 0
        block = maker.ask("take cuMemCreate", 2 * GIB).value
        assert maker.ask("export -", block).code == 0
        maker.kill()
    assert on.guests[0].ask("take cuMemAlloc_v2", 4 * GIB).code == 0
    assert on.lease.held() == 4 * GIB
    alive = {on.owner.process.pid, on.guests[0].process.pid}
    assert {p.pid for p in account.read(on.lease.account).processes} <= alive


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("guests", [1, 2])
def test_exported_memory_stays_charged_when_its_exporter_died(
    make_lease: Make, guests: int, killed: bool
) -> None:
    """Two blocks of 1 MiB: 2 MiB with their maker and without it, until the last that holds them is gone."""
    on = Sharing(make_lease(4), guests)
    blocks = [on.export(), on.export()]
    for guest in on.guests:
        for place, block in enumerate(blocks, start=1):
            assert on.map(guest, block, place) == 0
    assert on.lease.held() == 2 * MIB
    if killed:
        on.owner.kill()
    else:
        for block in blocks:
            assert on.owner.ask("give cuMemRelease", block).code == 0
    # Seen by the shim at once, by who allocates next; and by the account's reader.
    assert on.guests[0].ask("take cuMemAlloc_v2", 4 * GIB).code == OUT_OF_MEMORY
    rest = on.guests[0].ask("take cuMemAlloc_v2", 4 * GIB - 2 * MIB)
    assert rest.code == 0
    assert on.lease.held() == 4 * GIB
    assert on.guests[0].ask("give cuMemFree_v2", rest.value).code == 0
    for guest in on.guests:
        assert on.lease.held() == 2 * MIB
        for place, block in enumerate(blocks, start=1):
            assert guest.ask("give cuMemRelease", block).code == 0
            assert guest.ask("give cuMemUnmap", place << 20).code == 0
    assert on.lease.held() == 0


def test_exported_memory_is_discharged_when_the_last_importer_ended(make_lease: Make) -> None:
    """Killed, both of them: nothing is held."""
    on = Sharing(make_lease(4), 1)
    assert on.map(on.guests[0], on.export()) == 0
    on.owner.kill()
    on.guests[0].kill()
    last = on.lease.start().enter()
    assert last.ask("alloc", 4 * GIB).code == 0
    assert on.lease.held() == 4 * GIB


def test_import_from_another_lease_is_refused_when_it_does_not_fit(make_lease: Make) -> None:
    """Of 2 GiB that are full but for 1 MiB a second block of a stranger's is too much; room lets it in."""
    on = Sharing(make_lease(4), 1)
    blocks = [on.export(), on.export()]
    small = make_lease(2).start_rows()
    assert small.ask("use -").code == 0
    assert small.ask("take cuMemAlloc_v2", MIB).code == 0
    full = small.ask("take cuMemAlloc_v2", 2 * GIB - 2 * MIB).value
    assert on.map(small, blocks[0]) == 0
    assert on.map(small, blocks[1], 2) == OUT_OF_MEMORY
    assert small.ask("give cuMemFree_v2", full).code == 0
    assert small.ask("map -", blocks[1], 2).code == 0
    assert on.lease.held() == 2 * MIB


def test_corrupted_imports_end_with_their_writer(make_lease: Make) -> None:
    """A word of nobody's there keeps the card from no one."""
    lease = make_lease(4)
    one = lease.start_rows()
    assert one.ask("use -").code == 0
    for field, index, word in (
        ("slots_used", 0, 16),
        ("shared_cards", 0, 1),
        ("imported", 9, 3 * GIB),
    ):
        put(lease.account, offset(field, index), word)
    assert one.ask("take cuMemAlloc_v2", 4 * GIB).code == 0
    assert lease.held() == 4 * GIB


def test_pool_memory_stays_charged_when_the_pool_is_destroyed(lease: Lease, client: Client) -> None:
    """Attributes and trimming change no sum; a pool destroyed leaves what is still allocated charged."""
    pool = client.ask("pool -").value
    pointer = client.ask("from-pool -", pool, GIB).value
    assert lease.held() == GIB
    assert client.ask("pool-set -", pool).code == 0
    assert client.ask("pool-trim -", pool).code == 0
    assert lease.held() == GIB
    assert client.ask("pool-destroy -", pool).code == 0
    assert lease.held() == GIB
    assert client.ask("give cuMemFreeAsync", pointer).code == 0
    assert lease.held() == 0


@pytest.mark.parametrize(
    "name", ["cuMemAllocAsync", "cuMemAllocAsync_ptsz", "cuMemAllocFromPoolAsync"]
)
def test_captured_allocation_belongs_to_the_graph(lease: Lease, client: Client, name: str) -> None:
    """Every launch takes again what the graph frees: charged until graph and executable are gone."""
    graph = client.ask("graph -").value
    assert client.ask("capture -", graph).code == 0
    pointer = client.ask(f"take {name}", 3 * GIB).value
    assert client.ask("give cuMemFreeAsync", pointer).code == 0
    assert client.ask("captured -").value == graph
    assert lease.held() == 3 * GIB
    executable = client.ask("keep cuGraphInstantiate_v2", graph).value
    assert client.ask("give cuGraphDestroy", graph).code == 0
    assert client.ask("take cuMemAlloc_v2", 2 * GIB).code == OUT_OF_MEMORY
    assert client.ask("give cuGraphExecDestroy", executable).code == 0
    assert lease.held() == 0
    assert client.ask(f"take {name}", GIB).code == 0


class Graph:
    """One of 3 GiB in a lease of 4, and its executable form."""

    def __init__(self, client: Client) -> None:
        self.client = client
        code, self.graph, self.pointer = client.ask("take cuGraphAddMemAllocNode", 3 * GIB)
        assert code == 0
        self.executable = 0

    def instantiate(self) -> "Graph":
        """From here on it can be launched."""
        self.executable = self.client.ask("keep cuGraphInstantiateWithFlags", self.graph).value
        return self

    def launch(self, per_thread: int = 0) -> None:
        """Once."""
        assert self.client.ask("launch -", self.executable, per_thread).code == 0

    def destroy(self) -> None:
        """Both forms."""
        assert self.client.ask("give cuGraphExecDestroy", self.executable).code == 0
        assert self.client.ask("give cuGraphDestroy", self.graph).code == 0


@pytest.mark.parametrize("per_thread", [0, 1])
@pytest.mark.parametrize("free", ["cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz"])
def test_launched_memory_stays_charged_when_the_graph_is_destroyed(
    lease: Lease, client: Client, free: str, per_thread: int
) -> None:
    """Launched, not freed, destroyed: it stays charged until the program frees it."""
    graph = Graph(client).instantiate()
    graph.launch(per_thread)
    graph.destroy()
    assert lease.held() == 3 * GIB
    assert client.ask("take cuMemAlloc_v2", 2 * GIB).code == OUT_OF_MEMORY
    assert client.ask(f"give {free}", graph.pointer).code == 0
    assert lease.held() == 0


@pytest.mark.parametrize("free", ["cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz"])
def test_memory_freed_after_the_last_launch_is_discharged_with_the_graph(
    lease: Lease, client: Client, free: str
) -> None:
    """Three times launched, and freed each time."""
    graph = Graph(client).instantiate()
    for _ in range(2):
        graph.launch()
        assert client.ask(f"give {free}", graph.pointer).code == 0
        assert lease.held() == 3 * GIB  # the graph keeps it for its next launch
    graph.launch()
    assert client.ask(f"give {free}", graph.pointer).code == 0
    graph.destroy()
    assert lease.held() == 0


def test_launch_allocates_again_after_a_free(lease: Lease, client: Client) -> None:
    """Of three launches two were freed."""
    graph = Graph(client).instantiate()
    for free in ("cuMemFree_v2", "cuMemFreeAsync"):
        graph.launch()
        assert client.ask(f"give {free}", graph.pointer).code == 0
    graph.launch()
    graph.destroy()
    assert lease.held() == 3 * GIB
    assert client.ask("give cuMemFreeAsync", graph.pointer).code == 0
    assert lease.held() == 0


@pytest.mark.parametrize("how", [0, 1, 2, 3])
def test_memory_freed_by_a_node_is_discharged_with_the_graph(
    lease: Lease, client: Client, how: int
) -> None:
    """A graph that frees what it takes leaves nothing behind, however the node was added."""
    graph = Graph(client)
    assert client.ask("free-node -", graph.graph, how).code == 0
    graph.instantiate()
    graph.launch()
    graph.destroy()
    assert lease.held() == 0


def test_memory_freed_by_a_capture_is_discharged_with_the_graph(
    lease: Lease, client: Client
) -> None:
    """The same by capturing a stream, which is how frameworks make graphs."""
    graph = Graph(client)
    assert client.ask("capture -", graph.graph).code == 0
    assert client.ask("give cuMemFreeAsync", graph.pointer).code == 0
    assert client.ask("captured -").code == 0
    graph.instantiate()
    graph.launch()
    graph.destroy()
    assert lease.held() == 0


def test_no_charge_remains_when_a_graph_never_ran(lease: Lease, client: Client) -> None:
    """Its address was reserved, and there was no memory."""
    Graph(client).instantiate().destroy()
    assert lease.held() == 0


def test_graph_without_memory_is_not_charged(lease: Lease, client: Client) -> None:
    """Instantiated and destroyed in any order."""
    graph = client.ask("graph -").value
    executable = client.ask("keep cuGraphInstantiateWithFlags", graph).value
    client.ask("give cuGraphDestroy", graph)
    client.ask("give cuGraphExecDestroy", executable)
    assert lease.held() == 0
