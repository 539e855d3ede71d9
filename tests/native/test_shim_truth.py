"""What the driver has on the card is never more than what the lease is charged for.

The driver's own account is the measure: a process outside the lease asks the card how much is free. It sees
what no hook sees: memory that is freed later than a call says, or held by other processes than its maker.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation.lease_control import Limit
from tests.hardware.client import MIB, Client
from tests.native.clients import OUT_OF_MEMORY, Lease
from tests.native.test_shim_simulated import LIST, python

CAP = 4096 * MIB
SETUP = """
import ctypes, os
MIB = 1 << 20
fd = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
text = '.version 7.0 .target sm_75 ' + '.visible .entry %s() { ret; } ' * 2
module = ok(d.cuModuleLoadData((text % ('k_us20000', 'k_us600000000')).encode()))
f, endless = (ok(d.cuModuleGetFunction(module, n)) for n in (b'k_us20000', b'k_us600000000'))
s, t = (ok(d.cuStreamCreate(1)) for _ in range(2))
def launch(f, stream): return code(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
def block(mib):
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.requestedHandleTypes = fd
    return ok(d.cuMemCreate(mib * MIB, p, 0))
def export(handle): return int(ok(d.cuMemExportToShareableHandle(handle, fd, 0)))
def take(number): return d.cuMemImportFromShareableHandle(number, fd)
def alloc_node(g, mib):
    p = d.CUDA_MEM_ALLOC_NODE_PARAMS()
    p.poolProps.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.poolProps.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.bytesize = mib * MIB
    node = ok(d.cuGraphAddMemAllocNode(g, [], 0, p))
    return node, int(ok(d.cuGraphMemAllocNodeGetParams(node)).dptr)
def alloc(mib): return code(d.cuMemAlloc(mib * MIB))
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """One T4 of 15079 MiB, whose contexts cost nothing here."""
    made = SimulatedNode.create(tmp_path_factory.mktemp("node"), parse_spec("T4"))
    made.start()
    yield made
    made.stop()


class Card:
    """A lease of 4096 MiB, and what the driver says of the card."""

    def __init__(self, node: SimulatedNode, folder: Path) -> None:
        self.node = node
        (uuid,) = python(
            node, LIST + "print(json.dumps([n.nvmlDeviceGetUUID(h) for h in handles]))"
        )
        self.lease = Lease(folder / "lease", (Limit(uuid, CAP),))
        self.clients: list[Client] = []
        self.outside = Client(node.library_dir).enter()
        self.before = self.outside.free_bytes()
        self.context = 15079 * MIB - self.before

    def program(self) -> Client:
        """One of the lease."""
        environment = self.lease.environment()
        del environment["LD_LIBRARY_PATH"]
        self.clients.append(Client(self.node.library_dir, **environment).enter())
        self.clients[-1].do(f"exec({SETUP!r}, globals())", "0")
        return self.clients[-1]

    def truth(self) -> int:
        """MiB that the lease's processes have on the card, without their contexts."""
        living = sum(it.process.poll() is None for it in self.clients)
        return (self.before - self.outside.free_bytes() - living * self.context) // MIB

    def charged(self) -> int:
        """MiB by the account."""
        return self.lease.held() // MIB

    def kill(self, client: Client) -> None:
        """Ends one, and waits until the driver has noticed."""
        free = self.outside.free_bytes()
        client.kill()
        for _ in range(10_000):
            if self.outside.free_bytes() > free:
                return
        raise AssertionError("the driver does not let go of a dead process")

    def close(self) -> None:
        """Ends all."""
        for client in (*self.clients, self.outside):
            client.kill()
            for pipe in (client.process.stdin, client.process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def card(node: SimulatedNode, tmp_path: Path) -> Iterator[Card]:
    """For one test."""
    made = Card(node, tmp_path)
    yield made
    made.close()


Act = Callable[[Client], None]


def exported_and_released(client: Client) -> None:
    """The descriptor stays open."""
    client.do("b = block(3072)", "keep = export(b)", "code(d.cuMemRelease(b))")


def freed_behind_work(client: Client) -> None:
    """The stream never gets there."""
    client.do("p = ok(d.cuMemAllocAsync(3072 * MIB, s))", "launch(endless, s)", "0")
    client.do("code(d.cuMemFreeAsync(p, s))")


def pool_destroyed_behind_work(client: Client) -> None:
    """With it goes the only way to ask what it has."""
    client.do(
        "q = d.CUmemPoolProps()",
        "q.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED",
        "q.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE",
        "pool = ok(d.cuMemPoolCreate(q))",
        "p = ok(d.cuMemAllocFromPoolAsync(3072 * MIB, pool, s))",
        "launch(endless, s)",
        "code(d.cuMemFreeAsync(p, s))",
        "code(d.cuMemPoolDestroy(pool))",
    )


def freed_by_a_graph_that_never_runs(client: Client) -> None:
    """Another graph than the one that took it has the node."""
    client.do(
        "g, h = (ok(d.cuGraphCreate(0)) for _ in 'gh')",
        "node, at = alloc_node(g, 3072)",
        "ok(d.cuGraphAddMemFreeNode(h, [], 0, at))",
        "e = ok(d.cuGraphInstantiate(g, 0))",
        "ok(d.cuGraphLaunch(e, s)), ok(d.cuStreamSynchronize(s))",
        "ok(d.cuGraphExecDestroy(e)), ok(d.cuGraphDestroy(g))",
        "0",
    )


def freed_by_a_node_added_too_late(client: Client) -> None:
    """What is launched was instantiated before."""
    client.do(
        "g = ok(d.cuGraphCreate(0))",
        "node, at = alloc_node(g, 3072)",
        "e = ok(d.cuGraphInstantiate(g, 0))",
        "ok(d.cuGraphAddMemFreeNode(g, [node], 1, at))",
        "ok(d.cuGraphLaunch(e, s)), ok(d.cuStreamSynchronize(s))",
        "ok(d.cuGraphExecDestroy(e)), ok(d.cuGraphDestroy(g))",
        "0",
    )


def freed_in_a_capture_that_is_given_up(client: Client) -> None:
    """The next graph may have the same address."""
    client.do(
        "g = ok(d.cuGraphCreate(0))",
        "node, at = alloc_node(g, 3072)",
        "e = ok(d.cuGraphInstantiate(g, 0))",
        "ok(d.cuGraphLaunch(e, s)), ok(d.cuStreamSynchronize(s))",
        "mode = d.CUstreamCaptureMode(2)",
        "code(d.cuStreamBeginCapture(t, mode)), code(d.cuMemFreeAsync(at, t))",
        "code(d.cuStreamSynchronize(t)), code(d.cuStreamEndCapture(t))",
        "h = ok(d.cuGraphCreate(0))",
        "i = ok(d.cuGraphInstantiate(h, 0))",
        "ok(d.cuGraphLaunch(i, s)), ok(d.cuStreamSynchronize(s))",
        "ok(d.cuGraphExecDestroy(e)), ok(d.cuGraphDestroy(g))",
        "0",
    )


def kept_for_graphs(client: Client) -> None:
    """Freed by its own graph behind work, and the graph is destroyed."""
    client.do(
        "g = ok(d.cuGraphCreate(0))",
        "node, at = alloc_node(g, 3072)",
        "ok(d.cuGraphAddMemFreeNode(g, [node], 1, at))",
        "e = ok(d.cuGraphInstantiate(g, 0))",
        "launch(endless, s)",
        "ok(d.cuGraphLaunch(e, s))",
        "ok(d.cuGraphExecDestroy(e)), ok(d.cuGraphDestroy(g))",
        "0",
    )


@pytest.mark.parametrize(
    "act",
    [
        exported_and_released,
        freed_behind_work,
        pool_destroyed_behind_work,
        freed_by_a_graph_that_never_runs,
        freed_by_a_node_added_too_late,
        freed_in_a_capture_that_is_given_up,
        kept_for_graphs,
    ],
    ids=lambda it: it.__name__,
)
def test_charge_equals_the_memory_on_the_card(card: Card, act: Act) -> None:
    """3072 MiB stay there whatever the program says, and less than 1024 are left of the lease's 4096."""
    client = card.program()
    act(client)
    assert card.truth() == 3072
    assert client.do("alloc(1024)") == OUT_OF_MEMORY
    assert card.charged() == 3072
    assert client.do("alloc(1022)") == 0
    assert card.truth() == card.charged() == 4094


def test_graph_launch_discharges_what_it_frees(card: Card) -> None:
    """By a node of another graph, when that is launched, and by a capture: all is there again afterwards."""
    client = card.program()
    client.do(
        "g, h = (ok(d.cuGraphCreate(0)) for _ in 'gh')",
        "node, at = alloc_node(g, 3072)",
        "ok(d.cuGraphAddMemFreeNode(h, [], 0, at))",
        "e, i = ok(d.cuGraphInstantiate(g, 0)), ok(d.cuGraphInstantiate(h, 0))",
        "ok(d.cuGraphLaunch(e, s)), ok(d.cuGraphLaunch(i, s)), ok(d.cuStreamSynchronize(s))",
        "[ok(d.cuGraphExecDestroy(x)) for x in (e, i)], [ok(d.cuGraphDestroy(x)) for x in (g, h)]",
        "0",
    )
    assert card.truth() == card.charged() == 0
    client.do(
        "mode = d.CUstreamCaptureMode(2)",
        "ok(d.cuStreamBeginCapture(s, mode))",
        "p = ok(d.cuMemAllocAsync(3072 * MIB, s))",
        "ok(d.cuMemFreeAsync(p, s))",
        "g = ok(d.cuStreamEndCapture(s))",
        "e = ok(d.cuGraphInstantiate(g, 0))",
        "ok(d.cuGraphLaunch(e, s)), ok(d.cuStreamSynchronize(s))",
        "ok(d.cuGraphExecDestroy(e)), ok(d.cuGraphDestroy(g))",
        "0",
    )
    assert card.truth() == card.charged() == 0


@pytest.mark.parametrize("how", ["d.cuStreamSynchronize(s)", "d.cuCtxSynchronize()"])
def test_pool_is_charged_its_reserved_memory(card: Card, how: str) -> None:
    """The free counts when its stream gets there, which the program waits for; and its pool serves again
    what it has, without more."""
    client = card.program()
    client.do("p = ok(d.cuMemAllocAsync(3072 * MIB, s))", "launch(f, s)", "0")
    client.do("code(d.cuMemFreeAsync(p, s))", f"code({how})")
    assert card.truth() == card.charged() == 0
    client.do("p = ok(d.cuMemAllocAsync(3072 * MIB, s))", "launch(endless, s)", "0")
    assert client.do("code(d.cuMemFreeAsync(p, s))", "code(d.cuMemAllocAsync(2048 * MIB, s))") == 0
    assert card.truth() == card.charged() == 3072
    assert client.do("code(d.cuMemAllocAsync(2048 * MIB, s))") == OUT_OF_MEMORY
    assert client.do("code(d.cuMemAllocAsync(2046 * MIB, s))") == 0
    assert card.truth() == card.charged() == 4094


def test_opened_memory_stays_charged_when_its_exporter_frees_it(card: Card) -> None:
    """cuIpc: freed by its maker, or left by its death, it stays charged until the last one closes it."""
    maker, guest = card.program(), card.program()
    handles = [
        maker.do(
            "p = ok(d.cuMemAlloc(1024 * MIB))",
            "h = ok(d.cuIpcGetMemHandle(p))",
            "ctypes.string_at(h.getPtr(), 64).hex()",
        )
        for _ in "ab"
    ]
    guest.do(
        "def open(text):\n"
        "    handle = d.CUipcMemHandle()\n"
        "    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)\n"
        "    return ok(d.cuIpcOpenMemHandle(handle, 1))",
        f"opened = [open(h) for h in {handles!r}]",
        "0",
    )
    assert card.truth() == card.charged() == 2048
    maker.do("code(d.cuMemFree(p))")
    assert card.truth() == card.charged() == 2048
    card.kill(maker)
    assert guest.do("alloc(2048)") == OUT_OF_MEMORY
    assert card.truth() == card.charged() == 2048
    guest.do("[code(d.cuIpcCloseMemHandle(p)) for p in opened]")
    assert guest.do("alloc(4094)") == 0
    assert card.charged() == 4094


def test_orphans_stay_charged_when_several_processes_import_them(card: Card) -> None:
    """Three processes hold a block each of a maker that is killed; two have closed their descriptors, one
    holds nothing but the descriptor."""
    maker, *guests = (card.program() for _ in range(4))
    for number, guest in enumerate(guests):
        descriptor = maker.do("b = block(1024)", "export(b)")
        guest.do(
            f"target = os.pidfd_open({maker.pid})",
            f"number = ctypes.CDLL(None).syscall(438, target, {descriptor}, 0)",
            "0",
        )
        if number < 2:
            guest.do("held = ok(take(number))", "os.close(number)", "0")
        maker.do(f"os.close({descriptor})", "0")
    assert card.truth() == card.charged() == 3072
    card.kill(maker)
    assert card.truth() == 3072
    assert guests[0].do("alloc(1024)") == OUT_OF_MEMORY
    assert card.charged() == 3072
    guests[0].do("code(d.cuMemRelease(held))")
    guests[2].do("os.close(number)", "0")
    assert guests[1].do("alloc(3072)") == OUT_OF_MEMORY
    assert guests[1].do("alloc(3070)") == 0
    assert card.charged() == 4094
