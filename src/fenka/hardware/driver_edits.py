"""The driver's part of a container, in terms of CDI: files, programs, device nodes."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenka.core.errors import FenkaError
from fenka.hardware import driver_places, unlimited_drivers
from fenka.hardware.driver_places import DriverFiles, Search

LIBRARY_DIRECTORIES = (Path(f"/usr/lib/{os.uname().machine}-linux-gnu"), Path("/usr/lib64"))
"""Where containers get the driver's libraries: the linkers' default directories of Debian and Red Hat."""

_READ_ONLY = ("ro", "nosuid", "nodev", "bind")


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
    driver_root: str = "",
    *,
    unlimited: bool = False,
) -> ContainerEdits:
    """Return the driver's part: the cards' device nodes and the files that `nvidia-ctk cdi generate` lists.

    Args:
        minors: N of /dev/nvidiaN.
        version: The driver's.
        host: The node's root, as this process sees it.
        capabilities: Device files of MIG instances.
        driver_root: Where the options say that the driver is; empty: where it is found.
        unlimited: Include the driver's part for OpenCL, which the shim cannot limit.

    Raises:
        NoDriverFiles: The driver's files are not there.
        InvalidDriverRoot: `driver_root` is not absolute.
    """
    search = driver_places.search(host, driver_root)
    driver = search.of_version(version)
    if driver is None:
        where = "; ".join(
            f"{look.directory}: {look.result}" for look in search.looked if look.result
        )
        raise NoDriverFiles(
            f"no libcuda.so.{version} is in the {len(search.looked)} places where drivers are"
            f"{f' ({where})' if where else ''}: name its directory in node.driverRoot of the chart"
        )
    files = {
        name: file
        for name, file in _library_files(search, driver).items()
        if unlimited or not unlimited_drivers.is_unlimited(name)
    }
    mounts = [
        Mount(file, place / alias)
        for name, file in files.items()
        for place in LIBRARY_DIRECTORIES
        for alias in dict.fromkeys((name, f"{name.partition('.so')[0]}.so.1"))
    ]
    programs = {name: driver_places.find_program(search, driver, name) for name in _PROGRAMS}
    mounts += [Mount(file, Path("/usr/bin") / name) for name, file in programs.items() if file]
    devices = [Path("/dev") / f"nvidia{minor}" for minor in sorted(set(minors))]
    devices += capabilities
    devices += [Path("/dev") / name for name in _COMMON_DEVICES if (host / "dev" / name).exists()]
    return ContainerEdits(driver.libraries, tuple(mounts), tuple(devices))


def _library_files(search: Search, driver: DriverFiles) -> dict[str, Path]:
    """Return the driver's files beside the two that the proxy replaces, by name, with links followed."""
    within = search.here(driver.root)
    directory = driver.directory.relative_to(driver.root)
    proxied = [file.name for file in driver.libraries.values()]
    named = (
        path.name
        for path in (within / directory).iterdir()
        if _DRIVER_LIBRARY.fullmatch(path.name) and path.name.endswith(driver.version)
    )
    real = {
        name: driver_places.resolve(within, directory / name)
        for name in sorted(named)
        if name not in proxied
    }
    return {name: driver.root / path for name, path in real.items() if path}
