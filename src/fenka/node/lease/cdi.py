"""CDI specifications of leases: all that a container gets, and where the driver's part comes from.

A container gets the shim, the proxy, the limits, the driver and the card together, or none of them.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenka.core.errors import FenkaError
from fenka.isolation import proxy
from fenka.isolation.proxy import NEXT_LIBRARIES
from fenka.isolation.sandbox import DRIVER, LEASE_ROOT, SHIM
from fenka.node.kubelet.client import LEASE_KIND

CDI_VERSION = "0.6.0"

PRELOADS = (Path("/etc/ld.so.preload"), Path("/etc/ld-nix.so.preload"))
LIBRARY_DIRECTORIES = (Path(f"/usr/lib/{os.uname().machine}-linux-gnu"), Path("/usr/lib64"))
"""Default search directories of the dynamic linkers of Debian and Red Hat."""

_READ_ONLY = ("ro", "nosuid", "nodev", "bind")
_SIMULATED = LEASE_ROOT / "simulated"


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount. source: on the host. target: in the container."""

    source: Path
    target: Path
    options: tuple[str, ...] = _READ_ONLY

    def spec(self) -> dict[str, Any]:
        """Return the mount in CDI's format."""
        return {
            "hostPath": str(self.source),
            "containerPath": str(self.target),
            "options": list(self.options),
        }


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """The driver's part. libraries: its libcuda and libnvidia-ml, by the names in proxy.LIBRARIES."""

    libraries: Mapping[str, Path]
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


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
            for name in proxy.LIBRARIES
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
    proxy.install(library / "placed", DRIVER, library)
    (library / "ld.so.preload").write_text(f"{SHIM}\n")


# ---- simulated cards ----


def simulated_edits(library: Path, node: Path) -> ContainerEdits:
    """Return the simulated driver's part. node: the simulated node's directory."""
    return ContainerEdits(
        {name: library / "simulated" / name for name in proxy.LIBRARIES},
        (Mount(node, _SIMULATED, ("rw", "nosuid", "nodev", "noexec", "bind")),),
    )


# ---- real cards ----

_DRIVER_LIBRARY = re.compile(
    r"lib(cuda|cudadebugger|nvcuvid|nvidia-(allocator|cfg|encode|fbc|gpucomp|ml|nvvm|nvvm70|opencl|"
    r"opticalflow|pkcs11|pkcs11-openssl3|ptxjitcompiler|sandboxutils|tileiras)|nvoptix)\.so\.[\d.]+"
)
_COMMON_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_PROGRAMS = ("nvidia-smi", "nvidia-debugdump")


class NoDriverFiles(FenkaError):
    """The driver's files were not found. The message says where they should be."""


def driver_edits(
    minors: Iterable[int],
    version: str,
    host: Path = Path("/"),
    capabilities: Iterable[Path] = (),
) -> ContainerEdits:
    """Return the driver's part: the cards' device nodes and the files that `nvidia-ctk cdi generate` lists.

    Args:
        minors: N of /dev/nvidiaN.
        version: The driver's.
        host: The node's root, as this process sees it.
        capabilities: Device files of MIG instances.

    Raises:
        NoDriverFiles: The driver's files are not there.
    """
    directory = _library_directory(f"libcuda.so.{version}", host)
    if directory is None:
        raise NoDriverFiles(
            f"no libcuda.so.{version} in {host}'s {' or '.join(map(str, LIBRARY_DIRECTORIES))}: is the "
            f"driver installed there?"
        )
    inside = Path("/") / directory.relative_to(host)
    files = sorted(
        path.name
        for path in directory.iterdir()
        if _DRIVER_LIBRARY.fullmatch(path.name) and path.name.endswith(version)
    )
    proxied = {
        name: inside / f"{name.partition('.so')[0]}.so.{version}" for name in proxy.LIBRARIES
    }
    others = [name for name in files if inside / name not in proxied.values()]
    mounts = [
        Mount(inside / name, place / alias)
        for name in others
        for place in LIBRARY_DIRECTORIES
        for alias in dict.fromkeys((name, f"{name.partition('.so')[0]}.so.1"))
    ]
    mounts += [
        Mount(Path("/usr/bin") / name, Path("/usr/bin") / name)
        for name in _PROGRAMS
        if (host / "usr/bin" / name).exists()
    ]
    devices = [Path("/dev") / f"nvidia{minor}" for minor in sorted(set(minors))]
    devices += capabilities
    devices += [Path("/dev") / name for name in _COMMON_DEVICES if (host / "dev" / name).exists()]
    return ContainerEdits(proxied, tuple(mounts), tuple(devices))


def nvml_directory(host: Path) -> Path | None:
    """Return the directory of NVML below another root; None for the system's own, which is found by name."""
    return None if host == Path("/") else _library_directory("libnvidia-ml.so.1", host)


def _library_directory(name: str, host: Path) -> Path | None:
    directories = (host / place.relative_to("/") for place in LIBRARY_DIRECTORIES)
    return next((path for path in directories if (path / name).exists()), None)
