"""Every row of the shim's table: what it charges, to whom, on which card, and what gives it back.

The rows are read from the header that the hooks are compiled from, and so is the client's list of
functions: a hook without a case here fails, and so does a case without a hook.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from fenka.isolation import account
from tests.native.clients import MIB, OUT_OF_MEMORY, Answer, Client, Lease

Make = Callable[..., Lease]

TABLE = Path(__file__).parent.parent.parent / "native" / "shim" / "hooks.h"
HOOKS = dict(
    reversed(row)
    for row in re.findall(r"^CUDA_HOOK\((\w+), (\w+), \w+, \d+, [01]\)", TABLE.read_text(), re.M)
)
"""Role, by name."""

NOT_SUPPORTED = 801
SIZE = 64 * MIB


def with_role(role: str) -> list[str]:
    """Names in the order of the table."""
    return [name for name, its in HOOKS.items() if its == role]


FREES = ("cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz")
NARROW_FREES = ("cuMemFree", *FREES)  # its pointers have 32 bits
DESTROYS = ("cuCtxDestroy", "cuCtxDestroy_v2", "cuCtxDetach")


@dataclass(frozen=True)
class Takes:
    """How one entry point is tried."""

    gives: tuple[str, ...] = FREES
    """All that can give it back."""
    located: bool = False
    """It names its device itself, so that another one is current while it is called."""
    context: bool = False
    """It makes a context, and takes what the control page says that one costs."""


CHARGE = {
    "cuMemAlloc": Takes(NARROW_FREES),
    "cuMemAlloc_v2": Takes(),
    "cuMemAllocPitch": Takes(NARROW_FREES),
    "cuMemAllocPitch_v2": Takes(),
    "cuMemAllocManaged": Takes(),
    "cuMemAllocAsync": Takes(),
    "cuMemAllocAsync_ptsz": Takes(),
    "cuMemAllocFromPoolAsync": Takes(located=True),
    "cuMemAllocFromPoolAsync_ptsz": Takes(located=True),
    "cuMemCreate": Takes(("cuMemRelease",), located=True),
    "cuArrayCreate": Takes(("cuArrayDestroy",)),
    "cuArrayCreate_v2": Takes(("cuArrayDestroy",)),
    "cuArray3DCreate": Takes(("cuArrayDestroy",)),
    "cuArray3DCreate_v2": Takes(("cuArrayDestroy",)),
    "cuMipmappedArrayCreate": Takes(("cuMipmappedArrayDestroy",)),
    "cuModuleLoad": Takes(("cuModuleUnload",)),
    "cuModuleLoadData": Takes(("cuModuleUnload",)),
    "cuModuleLoadDataEx": Takes(("cuModuleUnload",)),
    "cuModuleLoadFatBinary": Takes(("cuModuleUnload",)),
    "cuLibraryLoadData": Takes(("cuLibraryUnload",)),
    "cuLibraryLoadFromFile": Takes(("cuLibraryUnload",)),
    "cuGraphAddMemAllocNode": Takes(("cuGraphDestroy",), located=True),
    "cuGraphAddNode": Takes(("cuGraphDestroy",), located=True),
    "cuGraphAddNode_v2": Takes(("cuGraphDestroy",), located=True),
    "cuGraphAddNode_v3": Takes(("cuGraphDestroy",), located=True),
    "cuCtxCreate": Takes(DESTROYS, context=True),
    "cuCtxCreate_v2": Takes(DESTROYS, context=True),
    "cuCtxCreate_v3": Takes(DESTROYS, context=True),
    "cuCtxCreate_v4": Takes(DESTROYS, context=True),
    "cuGLCtxCreate": Takes(DESTROYS, context=True),
    "cuGLCtxCreate_v2": Takes(DESTROYS, context=True),
    "cuVDPAUCtxCreate": Takes(DESTROYS, context=True),
    "cuVDPAUCtxCreate_v2": Takes(DESTROYS, context=True),
    "cuGreenCtxCreate": Takes(("cuGreenCtxDestroy",), context=True),
    "cuCtxSetLimit": Takes(("cuCtxDestroy_v2",)),
    "cuDevicePrimaryCtxRetain": Takes(
        (
            "cuDevicePrimaryCtxRelease",
            "cuDevicePrimaryCtxRelease_v2",
            "cuDevicePrimaryCtxReset",
            "cuDevicePrimaryCtxReset_v2",
        ),
        context=True,
    ),
}


class Keeps(NamedTuple):
    """A second claim on what was taken."""

    takes: str
    gives: str
    undo: str
    """Ends the second claim; empty = nothing does while the process lives."""


BLOCK = ("cuMemCreate", "cuMemRelease")
GRAPH = Keeps("cuGraphAddMemAllocNode", "cuGraphDestroy", "cuGraphExecDestroy")
RETAIN = {
    "cuMemMap": Keeps(*BLOCK, "cuMemUnmap"),
    "cuMemMapArrayAsync": Keeps(*BLOCK, ""),
    "cuMemMapArrayAsync_ptsz": Keeps(*BLOCK, ""),
    "cuMemRetainAllocationHandle": Keeps(*BLOCK, "cuMemRelease"),
    "cuMemImportFromShareableHandle": Keeps(*BLOCK, "cuMemRelease"),
    "cuGraphInstantiate": GRAPH,
    "cuGraphInstantiate_v2": GRAPH,
    "cuGraphInstantiateWithFlags": GRAPH,
    "cuGraphInstantiateWithParams": GRAPH,
    "cuGraphInstantiateWithParams_ptsz": GRAPH,
    "cuCtxAttach": Keeps("cuCtxCreate_v2", "cuCtxDetach", "cuCtxDetach"),
}

COVERED_ELSEWHERE = {
    "RESOLVE": {
        "cuInit",
        "cuGetProcAddress",
        "cuGetProcAddress_v2",
    },  # test_shim_interception, _closed
    # below, test_shim_lifetimes and test_shim_simulated
    "TRACK": {  # test_shim_lifetimes, test_shim_truth
        "cuGraphAddMemFreeNode",
        "cuStreamEndCapture",
        "cuStreamEndCapture_ptsz",
        "cuMemExportToShareableHandle",
        "cuMemGetDefaultMemPool",  # test_shim_memory
        "cuMemGetMemPool",  # test_shim_memory
        "cuMemPoolCreate",
        "cuMemPoolDestroy",
        "cuMemPoolSetAttribute",
        "cuMemPoolTrimTo",
        "cuDeviceGraphMemTrim",
        "cuStreamSynchronize",
        "cuStreamSynchronize_ptsz",
        "cuCtxSynchronize",
        "cuCtxSynchronize_v2",  # test_shim_interception
        "cuEventSynchronize",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
    },
    "REPORT": {  # test_shim_memory
        "cuMemGetInfo",
        "cuMemGetInfo_v2",
        "cuDeviceTotalMem",
        "cuDeviceTotalMem_v2",
    },
}


def test_every_hook_has_a_case() -> None:
    """No row of the table is without one, and none is tried that is not in the table."""
    given = {name for takes in CHARGE.values() for name in takes.gives}
    given |= {name for keeps in RETAIN.values() for name in (keeps.gives, keeps.undo) if name}
    cases = {"CHARGE": set(CHARGE), "RETAIN": set(RETAIN), "DISCHARGE": given, **COVERED_ELSEWHERE}
    cases["LAUNCH"] = set(with_role("LAUNCH"))  # test_shim_compute tries all that there are
    assert cases == {role: set(with_role(role)) for role in set(HOOKS.values())}


@dataclass
class Scene:
    """Two processes in a lease of two cards; the first is to take from the second card."""

    lease: Lease
    takes: Takes
    actor: Client = field(init=False)
    bystander: Client = field(init=False)

    def __post_init__(self) -> None:
        self.bystander = self.lease.start_rows()
        self.actor = self.lease.start_rows()
        if not self.takes.context:
            assert self.actor.ask("use -", 0 if self.takes.located else 1).code == 0

    def take(self, name: str, size: int = SIZE) -> Answer:
        """From the second card."""
        return self.actor.ask(f"take {name}", size, 1)

    def held(self) -> dict[int, tuple[int, int]]:
        """By process, on the two cards."""
        said = account.read(self.lease.account)
        return {p.pid: (p.memory_bytes[0], p.memory_bytes[1]) for p in said.processes}

    def expect(self, on_second: int) -> None:
        """All of it is the actor's, on the second card."""
        assert self.held() == {
            self.actor.process.pid: (0, on_second),
            self.bystander.process.pid: (0, 0),
        }


def scene(make_lease: Make, takes: Takes) -> Scene:
    """100 MiB of each card, so that the second of two requests is too much."""
    mib = 100 / 1024
    return Scene(make_lease(mib, mib, context_bytes=SIZE if takes.context else 0), takes)


CASES = [(name, give) for name, takes in CHARGE.items() for give in takes.gives]


@pytest.mark.parametrize(("name", "give"), CASES, ids=[f"{n}-{g}" for n, g in CASES])
def test_hook_charges_and_discharges(make_lease: Make, name: str, give: str) -> None:
    """To the byte: by the right process, on the right card; and again, so that nothing is left behind."""
    on = scene(make_lease, CHARGE[name])
    for _ in range(1 if name == "cuCtxSetLimit" else 2):
        code, handle, _ = on.take(name)
        assert code == 0
        on.expect(SIZE)
        assert on.actor.ask(f"give {give}", handle).code == 0
        on.expect(0)


@pytest.mark.parametrize("name", [name for name, takes in CHARGE.items() if not takes.context])
def test_hook_is_out_of_memory_beyond_the_cap(make_lease: Make, name: str) -> None:
    """As the driver would say it, with what is held left alone and the other card untouched."""
    on = scene(make_lease, CHARGE[name])
    assert on.take(name).code == 0
    assert on.take(name).code == OUT_OF_MEMORY
    on.expect(SIZE)


@pytest.mark.parametrize("name", [name for name, takes in CHARGE.items() if takes.context])
def test_context_is_out_of_memory_beyond_the_cap(make_lease: Make, name: str) -> None:
    """A second process finds too little left for a context on that card, but enough on the other."""
    on = scene(make_lease, CHARGE[name])
    assert on.take(name).code == 0
    assert on.bystander.ask(f"take {name}", 0, 1).code == OUT_OF_MEMORY
    on.expect(SIZE)
    assert on.bystander.ask(f"take {name}", 0, 0).code == 0


@pytest.mark.parametrize("name", CHARGE)
def test_nothing_is_charged_when_the_driver_refuses(make_lease: Make, name: str) -> None:
    """The driver's own answer reaches the program, and the charge is taken back."""
    takes = CHARGE[name]
    lease = make_lease(1, 1, context_bytes=SIZE)
    actor = lease.start_rows(FENKA_NULL_FAIL="1")
    if not takes.located and not takes.context:
        # The driver makes no context now; the one of the second card may be current all the same.
        assert actor.ask("current -", 1).code == 0
    assert actor.ask(f"take {name}", SIZE, 1).code == NOT_SUPPORTED
    assert (lease.held(0), lease.held(1)) == (0, 0)


@pytest.mark.parametrize("name", RETAIN)
def test_retained_memory_stays_charged(make_lease: Make, name: str) -> None:
    """Given back once, it is still there for the second claim; with that one it goes."""
    keeps = RETAIN[name]
    on = scene(make_lease, CHARGE[keeps.takes])
    handle = on.take(keeps.takes).value
    code, second, _ = on.actor.ask(f"keep {name}", handle)
    assert code == 0
    on.expect(SIZE)
    assert on.actor.ask(f"give {keeps.gives}", handle).code == 0
    on.expect(SIZE)
    if keeps.undo:
        assert on.actor.ask(f"give {keeps.undo}", second).code == 0
        on.expect(0)


@pytest.mark.parametrize("name", HOOKS)
def test_hook_returns_an_error_when_arguments_are_null(make_lease: Make, name: str) -> None:
    """NULL and zero for everything: an answer, and the next call works."""
    on = scene(make_lease, Takes())
    on.actor.ask(f"null {name}")
    assert on.actor.ask("use -", 1).code == 0
    code, pointer, _ = on.take("cuMemAlloc_v2")
    assert (code, on.actor.ask("give cuMemFree_v2", pointer).code) == (0, 0)
    on.expect(0)


LIBRARIES = ("cuLibraryLoadData", "cuLibraryLoadFromFile")


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_charged_to_later_contexts(make_lease: Make, name: str) -> None:
    """100 MiB on each card: a library of 30 is charged where there is a context, then where one begins."""
    mib = 100 / 1024
    lease = make_lease(mib, mib, context_bytes=20 * MIB)
    actor = lease.start_rows()
    _, library, _ = actor.ask(f"take {name}", 30 * MIB)
    assert (lease.held(0), lease.held(1)) == (0, 0)
    first = actor.ask("take cuCtxCreate_v2", 0, 1).value
    assert (lease.held(0), lease.held(1)) == (0, 50 * MIB)
    _, second, _ = actor.ask(f"take {name}", 26 * MIB)
    actor.ask("take cuDevicePrimaryCtxRetain", 0, 0)
    assert (lease.held(0), lease.held(1)) == (76 * MIB, 76 * MIB)
    assert actor.ask("give cuLibraryUnload", library).code == 0
    assert (lease.held(0), lease.held(1)) == (46 * MIB, 46 * MIB)
    assert actor.ask("give cuCtxDestroy_v2", first).code == 0
    assert (lease.held(0), lease.held(1)) == (46 * MIB, 0)
    assert actor.ask("give cuLibraryUnload", second).code == 0
    assert (lease.held(0), lease.held(1)) == (20 * MIB, 0)


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_charged_nowhere_when_one_card_cannot_hold_it(
    make_lease: Make, name: str
) -> None:
    """100 MiB of the first card and 50 of the second: 60 are too much for both, and for a context."""
    lease = make_lease(100 / 1024, 50 / 1024)
    actor = lease.start_rows()
    for device in (0, 1):
        assert actor.ask("take cuDevicePrimaryCtxRetain", 0, device).code == 0
    assert actor.ask(f"take {name}", 60 * MIB).code == OUT_OF_MEMORY
    assert (lease.held(0), lease.held(1)) == (0, 0)
    assert actor.ask("give cuDevicePrimaryCtxRelease_v2", 1).code == 0
    assert actor.ask(f"take {name}", 60 * MIB).code == 0
    assert actor.ask("take cuDevicePrimaryCtxRetain", 0, 1).code == OUT_OF_MEMORY
    assert (lease.held(0), lease.held(1)) == (60 * MIB, 0)


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_refused_when_no_card_can_hold_it(make_lease: Make, name: str) -> None:
    """Also before there is a context that it would not fit: 2^64 - 1 bytes are not added to anything."""
    actor = make_lease(1).start_rows()
    for _ in range(2):
        assert actor.ask(f"take {name}", 2**64 - 1).code == OUT_OF_MEMORY
    assert actor.ask(f"take {name}", MIB).code == 0
    assert actor.ask("take cuCtxCreate_v2").code == 0


def test_module_is_discharged_with_its_context(make_lease: Make) -> None:
    """What was loaded into a context is given back with it, without an unload."""
    on = scene(make_lease, Takes(context=True))
    context = on.take("cuCtxCreate_v2").value
    assert on.take("cuModuleLoadData", 32 * MIB).code == 0
    on.expect(SIZE + 32 * MIB)
    assert on.actor.ask("give cuCtxDestroy_v2", context).code == 0
    on.expect(0)


def test_charge_falls_when_the_heap_shrinks(make_lease: Make) -> None:
    """Setting the heap of the kernels' malloc again replaces the charge of before."""
    on = scene(make_lease, CHARGE["cuCtxSetLimit"])
    for size in (SIZE // 2, SIZE // 4, 0):
        assert on.take("cuCtxSetLimit", size).code == 0
        on.expect(size)


def test_heap_and_printf_buffer_are_charged_separately(make_lease: Make) -> None:
    """Of 100 MiB a context of 64 leaves 36 for both, which go with it."""
    on = scene(make_lease, Takes(context=True))
    context = on.take("cuCtxCreate_v2").value
    on.expect(SIZE)
    assert on.actor.ask("printf -", 37 * MIB).code == OUT_OF_MEMORY
    assert on.actor.ask("printf -", 20 * MIB).code == 0
    assert on.take("cuCtxSetLimit", 17 * MIB).code == OUT_OF_MEMORY
    assert on.take("cuCtxSetLimit", 16 * MIB).code == 0
    on.expect(SIZE + 36 * MIB)
    assert on.actor.ask("printf -", 0).code == 0
    on.expect(SIZE + 16 * MIB)
    assert on.actor.ask("give cuCtxDestroy_v2", context).code == 0
    on.expect(0)


def test_context_is_discharged_when_destroyed_with_references(make_lease: Make) -> None:
    """cuCtxDestroy does not count attachments, as cuCtxDetach does."""
    on = scene(make_lease, CHARGE["cuCtxCreate_v2"])
    handle = on.take("cuCtxCreate_v2").value
    assert on.actor.ask("keep cuCtxAttach", handle).code == 0
    assert on.actor.ask("give cuCtxDestroy_v2", handle).code == 0
    on.expect(0)
