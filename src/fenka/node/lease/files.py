"""The files of leases, and the CDI specifications by which containers get them.

A container gets the shim, the proxy, the limits, the driver and the card together, or none of them.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects.card_records import VISIBLE
from fenka.hardware import driver_places
from fenka.hardware.driver_edits import LIBRARY_DIRECTORIES, ContainerEdits, Mount
from fenka.hardware.nvml import NoDriver
from fenka.isolation import account, lease_control, limit_changes, proxy_install, sandbox
from fenka.isolation.lease_control import InvalidControl, Limit
from fenka.isolation.lease_files import (
    AFFINITY,
    account_file,
    admit_containers,
    card_limits,
    control_page,
    create_lease,
    near_cpus,
    write_atomically,
)
from fenka.isolation.proxy_install import NEXT_LIBRARIES
from fenka.isolation.sandbox import DRIVER, LEASE_ROOT, SHIM
from fenka.node.kubelet.client import LEASE_KIND
from fenka.node.lease.capacity import with_limit
from fenka.node.lease.store import Lease

CDI_VERSION = "0.6.0"

PRELOADS = (Path("/etc/ld.so.preload"), Path("/etc/ld-nix.so.preload"))
_SIMULATED = LEASE_ROOT / "simulated"


def specification(
    token: str,
    directory: Path,
    library: Path,
    driver: ContainerEdits,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return a lease's CDI specification. directory: the lease's. library: made by `prepare_library`."""
    mounts = [
        Mount(directory / "lease", LEASE_ROOT / "lease"),
        Mount(library / SHIM.name, SHIM),
        *(Mount(library / "placed" / name, SHIM.parent / name) for name in NEXT_LIBRARIES),
        Mount(
            directory / "account",
            LEASE_ROOT / "account",
            ("rw", "nosuid", "nodev", "noexec", "bind"),
        ),
        *(Mount(library / "ld.so.preload", preload) for preload in PRELOADS),
        *(Mount(path, DRIVER / name) for name, path in driver.libraries.items()),
        *(
            Mount(library / "placed" / name, place / name)
            for place in LIBRARY_DIRECTORIES
            for name in proxy_install.LIBRARIES
        ),
        *driver.mounts,
    ]
    edits: dict[str, Any] = {
        "env": [f"{name}={value}" for name, value in {**driver.environment, **environment}.items()],
        "mounts": [mount.spec() for mount in mounts],
    }
    if driver.devices:
        edits["deviceNodes"] = [
            {"path": str(path), "hostPath": str(path)} for path in driver.devices
        ]
    return {
        "cdiVersion": CDI_VERSION,
        "kind": LEASE_KIND,
        "devices": [{"name": token, "containerEdits": edits}],
    }


def prepare_library(library: Path) -> None:
    """Add what leases mount to a copy of the native libraries: the proxy, and the preload list."""
    proxy_install.install(library / "placed", DRIVER, library)
    (library / "ld.so.preload").write_text(f"{SHIM}\n")


# ---- the driver's part ----


def simulated_edits(library: Path, node: Path) -> ContainerEdits:
    """Return the simulated driver's part. node: the simulated node's directory."""
    return ContainerEdits(
        {name: library / "simulated" / name for name in proxy_install.LIBRARIES},
        (Mount(node, _SIMULATED, ("rw", "nosuid", "nodev", "noexec", "bind")),),
    )


def nvml_file(host: Path, driver_root: str = "") -> Path | None:
    """Return the file of NVML as this process sees it; None for the system's own, found by name.

    Raises NoDriver, InvalidDriverRoot.
    """
    if host == Path("/") and not driver_root:
        return None
    search = driver_places.search(host, driver_root)
    if search.driver is None:
        raise NoDriver(
            f"{search.problem}: install it, or name its directory in node.driverRoot of the chart"
        )
    return search.here(search.driver.libraries["libnvidia-ml.so.1"])


_PREFIX, _SUFFIX = "fenka-", ".json"


@dataclass(frozen=True, slots=True)
class LeaseFiles:
    """The leases' files of this node. The container runtime must see mounts below `root`.

    They are made, resized and removed in an order that never leaves a usable part of a lease.
    ROOT/TOKEN/lease has the control page, and empty files where libraries are mounted over.
    ROOT/TOKEN/account is a small tmpfs, so that a program can fill nothing else. CDI/fenka-TOKEN.json is
    written last: a container can start from then on.

    library: the native libraries, prepared for leases. contexts_mib: context overhead by UUID of a card or
    instance. driver: returns the driver's part of a lease's container edits. near_cpus: the nearest CPUs by
    UUID of a card.
    """

    root: Path
    cdi: Path
    library: Path
    contexts_mib: Mapping[str, int]
    driver: Callable[[Lease], ContainerEdits]
    mount: Callable[[Path, int], None] = sandbox.mount_small
    unmount: Callable[[Path], None] = sandbox.unmount
    near_cpus: Mapping[str, Collection[int]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make the directories."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.cdi.mkdir(parents=True, exist_ok=True, mode=0o755)

    def spec(self, token: str) -> Path:
        """Return the path of a token's CDI specification."""
        return self.cdi / f"{_PREFIX}{token}{_SUFFIX}"

    def control(self, token: str) -> Path:
        """Return the path of a token's control page."""
        return control_page(self.root / token)

    def slots(self, token: str) -> Path:
        """Return the path of a token's account."""
        return account_file(self.root / token)

    def is_complete(self, token: str) -> bool:
        """Return whether a container can start with the token's lease."""
        return (
            self.spec(token).exists()
            and self.control(token).exists()
            and self.slots(token).exists()
        )

    def make(self, token: str, lease: Lease) -> None:
        """Make the files of a lease. A complete lease stays as it is, since programs may run in it.

        Raises OSError, InvalidControl, NoDriverFiles.
        """
        if self.is_complete(token):
            return
        driver = self.driver(lease)
        self.remove(token)
        directory = self.root / token
        for part in (directory, directory / "lease", directory / "account"):
            part.mkdir(mode=0o755)
        self.mount(directory / "account", account.size())
        create_lease(directory, token, self._limits(lease, lease.slices))
        admit_containers(directory)
        environment = lease.environment
        if lease.instances:
            environment = {**environment, VISIBLE: ",".join(lease.devices)}
        if cpus := near_cpus(lease.slices, self.near_cpus):
            environment = {**environment, AFFINITY: cpus}
        content = specification(token, directory, Path(lease.library), driver, environment)
        # The runtime reads every *.json of the directory. The temporary file has another suffix.
        write_atomically(self.spec(token), json.dumps(content, indent=1).encode())

    def in_force(self, token: str, lease: Lease) -> list[Slice]:
        """Return what the lease's programs may use now. Raises OSError, InvalidControl."""
        if lease.limits_mib:  # Its node does not isolate.
            return list(lease.slices)
        page = self.control(token)
        limits = lease_control.read_interrupted(page).limits
        if [limit.uuid for limit in limits] != lease.devices:
            raise InvalidControl(f"{page}: has other cards than its lease")
        return [
            with_limit(piece, limit, lease.device_compute(piece))
            for piece, limit in zip(lease.slices, limits, strict=True)
        ]

    def check(
        self, token: str, lease: Lease, before: Sequence[Slice], after: Sequence[Slice]
    ) -> None:
        """Check that programs hold no more than is left. Raises InUse, OSError, InvalidAccount."""
        limits = self._limits(lease, before), self._limits(lease, after)
        limit_changes.check(self.slots(token), *limits)

    def enforce(self, token: str, lease: Lease, slices: Sequence[Slice]) -> None:
        """Put slices in force for running programs. Raises InUse, OSError, InvalidControl, InvalidAccount."""
        limit_changes.resize(self.control(token), self.slots(token), self._limits(lease, slices))

    def _limits(self, lease: Lease, slices: Sequence[Slice]) -> tuple[Limit, ...]:
        lease = msgspec.structs.replace(lease, slices=list(slices))
        limited = [
            replace(piece, uuid=DeviceId(lease.device(piece)), memory_mib=lease.limit_mib(piece))
            for piece in slices
        ]
        compute = {lease.device(piece): lease.device_compute(piece) for piece in slices}
        return card_limits(limited, self.contexts_mib, lease.compute, compute.__getitem__)

    def remove(self, token: str) -> None:
        """Remove the files of a token, if there are any. Raises OSError."""
        self.spec(token).unlink(missing_ok=True)
        directory = self.root / token
        with contextlib.suppress(FileNotFoundError):
            sandbox.unmount_all(directory / "account", self.unmount)
            shutil.rmtree(directory)

    def orphans(self, known: Collection[str]) -> set[str]:
        """Return the tokens that have files but are not in `known`."""
        return {token for token in self._tokens() if token not in known}

    def libraries(self) -> set[str]:
        """Return the directories of native libraries that specifications name."""
        specifications = [path.read_text() for path in self.cdi.glob(f"{_PREFIX}*{_SUFFIX}")]
        return {
            str(Path(mount["hostPath"]).parent)
            for spec in specifications
            for mount in json.loads(spec)["devices"][0]["containerEdits"]["mounts"]
            if mount["hostPath"].endswith("/libfenka.so")
        }

    def _tokens(self) -> Iterator[str]:
        for path in self.cdi.glob(f"{_PREFIX}*{_SUFFIX}"):
            yield path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if self.root.is_dir():
            yield from (path.name for path in self.root.iterdir())
