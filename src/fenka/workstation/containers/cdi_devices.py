"""The devices by which containers request slices: two static files of CDI, whatever the engine.

    fenka.io/slice=4      units of the daemon, up to the largest card's
    fenka.io/slice=6GiB   the same by its size
    fenka.io/slice=any    FENKA_GPU_MEM says how much
    fenka.io/card=1       whole cards

They are kept over boots, since engines may start before the daemon. So they name nothing below /run.
The daemon chooses a card when the hook asks it, at each start. Root's daemon writes them again when cards,
unit or libraries change.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenka.core.units import card_units
from fenka.hardware import unlimited_drivers
from fenka.hardware.driver_edits import LIBRARY_DIRECTORIES, ContainerEdits, Mount, driver_edits
from fenka.isolation import proxy_install
from fenka.isolation.lease_files import read_regular_file, write_atomically
from fenka.isolation.sandbox import LEASE_ROOT, PRELOAD
from fenka.workstation.containers.container_request import HOOK
from fenka.workstation.files import install_system_native
from fenka.workstation.paths import Runtime

DIRECTORY = Path("/etc/cdi")
DOCKER_OPTIONS = Path("/etc/docker/daemon.json")
SLICES, CARDS = "fenka.io/slice", "fenka.io/card"

VERSION = "0.5.0"
"""Of CDI's format; Podman 4.3 reads no later one."""

PLACE = "fenka-lease"
"""Source of the mount that the hook covers with the lease."""

HOOK_TIMEOUT_S = 40
"""The hook waits 30 s for a daemon."""

MAX_UNIT_NAMES = 1024
"""With a unit of 1 MiB, sizes have names by GiB only."""

_MAX_BYTES = 4 << 20
_GIB_MIB = 1024
_NO_DRIVER = ContainerEdits({})


@dataclass(frozen=True, slots=True)
class CdiMachine:
    """The part of the machine that the files describe.

    Attributes:
        cards_mib: The memory of each card.
        unit_mib: The unit of sizes without one.
        driver: A real driver's part; empty with simulated cards.
    """

    cards_mib: Sequence[int]
    unit_mib: int
    driver: ContainerEdits = _NO_DRIVER


def describe(cards_mib: Sequence[int], unit_mib: int, version: str, driver_root: str) -> CdiMachine:
    """Return a machine. Raises NoDriverFiles, InvalidDriverRoot.

    Args:
        cards_mib: The memory of each card.
        unit_mib: The unit of sizes without one.
        version: The driver's; empty for a simulated one.
        driver_root: Where the options say that the driver is; empty: where it is found.
    """
    if not version:
        return CdiMachine(cards_mib, unit_mib)
    # All cards: which one a container gets is decided later.
    minors = (int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    edits = driver_edits(minors, version, driver_root=driver_root, unlimited=True)
    return CdiMachine(cards_mib, unit_mib, edits)


def files() -> dict[str, Path]:
    """Return the file of each kind of devices."""
    return {SLICES: DIRECTORY / "fenka.json", CARDS: DIRECTORY / "fenka-card.json"}


def exist() -> bool:
    """Return whether containers are served."""
    return files()[SLICES].exists()


def problem() -> str:
    """Return why containers get no slice although the files exist; empty if none is known."""
    if not exist():
        return ""
    again = "`sudo fenka containers on` writes it again"
    path = files()[SLICES]
    try:
        devices = json.loads(read_regular_file(path, _MAX_BYTES))["devices"]
        hook = Path(devices[0]["containerEdits"]["hooks"][0]["path"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"{path} is not understood: {again}"
    if not os.access(hook, os.X_OK):
        return f"{hook}, which {path} names, is missing: {again}"
    try:
        options = json.loads(read_regular_file(DOCKER_OPTIONS, _MAX_BYTES))
        off = options["features"]["cdi"] is False
    except (OSError, ValueError, LookupError, TypeError):
        off = False
    if off:
        return f"{DOCKER_OPTIONS} turns CDI off: set its features.cdi to true, and restart Docker"
    return ""


def remove() -> bool:
    """Remove the files. Return whether there were any. Raises OSError."""
    existed = exist()
    for path in files().values():
        path.unlink(missing_ok=True)
    return existed


def write(machine: CdiMachine, runtime: Runtime) -> bool:
    """Write the files whose content has changed. Return whether any has. Raises OSError."""
    native = install_system_native()
    DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    changed = False
    for kind, path in files().items():
        content = json.dumps(specification(kind, machine, native, runtime), indent=1).encode()
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)
            path.chmod(0o644)
            changed = True
    return changed


def specification(kind: str, machine: CdiMachine, native: Path, runtime: Runtime) -> dict[str, Any]:
    """Return the content of one file. native: the directory of the libraries."""
    names = _slices(machine) if kind == SLICES else map(str, range(1, len(machine.cards_mib) + 1))
    word = kind.rpartition("/")[2]
    edits: dict[str, Any] = {
        # NVIDIA's toolkit, where it is the default runtime, gives a container all cards otherwise.
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "mounts": [_place(), *(mount.spec() for mount in _mounts(kind, machine, native))],
    }
    if machine.driver.devices:
        edits["deviceNodes"] = [{"path": str(path)} for path in machine.driver.devices]
    return {
        "cdiVersion": VERSION,
        "kind": kind,
        "devices": [
            {
                "name": name,
                "containerEdits": {"hooks": [_hook(f"{word}={name}", native, runtime)]},
            }
            for name in names
        ],
        "containerEdits": edits,
    }


def _slices(machine: CdiMachine) -> Iterator[str]:
    largest = max(machine.cards_mib)
    units = card_units(largest, machine.unit_mib)
    yield "any"
    yield from (f"{gib}GiB" for gib in range(1, largest // _GIB_MIB + 1))
    if units <= MAX_UNIT_NAMES:
        yield from map(str, range(1, units + 1))


def _place() -> dict[str, Any]:
    return {
        "hostPath": PLACE,
        "containerPath": str(LEASE_ROOT),
        "type": "tmpfs",
        "options": ["nosuid", "nodev", "mode=0755", "size=64k"],
    }


def _mounts(kind: str, machine: CdiMachine, native: Path) -> Iterator[Mount]:
    yield Mount(native / PRELOAD.name, PRELOAD)
    for directory in LIBRARY_DIRECTORIES:
        for name in proxy_install.LIBRARIES:
            yield Mount(native / "proxy" / name, directory / name)
    for mount in machine.driver.mounts:
        if kind == CARDS or not unlimited_drivers.is_unlimited(mount.target.name):
            yield mount


def _hook(device: str, native: Path, runtime: Runtime) -> dict[str, Any]:
    return {
        "hookName": "createRuntime",
        "path": str(native / HOOK),
        "args": [HOOK, device],
        # Without it, the hook would have the engine's environment.
        "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"FENKA_RUNTIME={os.fspath(runtime.root)}"],
        "timeout": HOOK_TIMEOUT_S,
    }
