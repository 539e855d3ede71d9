"""Place the proxy in front of a driver, and say what the driver has that the proxy does not know.

The proxy is the shim under the driver's name (docs/proxy.md). Its list of names was made when it was built;
a newer driver has more. Those stay reachable, because the driver stands behind the proxy in the dynamic
linker's search, so nothing has to be generated on the node. What a node's owner must know is whether
one of them is a new version of a function that fenka limits: that is what `fenka proxy check` is for.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fenka.isolation.elf import exported_functions
from fenka.isolation.layout import HEADER

__all__ = [
    "LIBRARIES",
    "NEXT_LIBRARIES",
    "UnknownFunctions",
    "find_driver",
    "install",
    "unknown_functions",
]

LIBRARIES: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
NEXT_LIBRARIES: Final = ("libfenka-next-cuda.so", "libfenka-next-nvml.so")

_KIND: Final = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(os.uname().machine, "")
"""What the dynamic linker's cache calls libraries for this kind of machine."""
_LDCONFIG_TIMEOUT_S: Final = 20

_NATIVE: Final = HEADER.parent
_SHIM: Final = "libfenka.so"
_VERSION: Final = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")

_PATH_PLACEHOLDER: Final = re.compile(rb"/nowhere/fenka-proxy-place/x+")
"""What the build leaves for the driver's place."""


@dataclass(frozen=True, slots=True)
class UnknownFunctions:
    """What a driver's library exports and its proxy does not.

    passed_through: reaches the driver as it is; fenka has nothing to do with such functions.
    unlimited: new versions of functions that fenka replaces: memory taken by calling them by their own
    name is not charged. (By cuGetProcAddress they are: there a function is known by its base name.)
    """

    passed_through: tuple[str, ...]
    unlimited: tuple[str, ...]


def unknown_functions(library: Path, native: Path = _NATIVE) -> UnknownFunctions:
    """Compare a driver's library with the proxy of the same name.

    library: named as in LIBRARIES. Raises InvalidLibrary, or OSError when a file cannot be read.
    """
    missing = sorted(
        exported_functions(library) - exported_functions(native / "proxy" / library.name)
    )
    hooked = {
        _base(name)
        for name in exported_functions(native / _SHIM)
        if name.startswith(("cu", "nvml"))
    }
    return UnknownFunctions(
        passed_through=tuple(name for name in missing if _base(name) not in hooked),
        unlimited=tuple(name for name in missing if _base(name) in hooked),
    )


def _base(name: str) -> str:
    return _VERSION.sub("", name)


def find_driver(beside: Iterable[Path] = ()) -> dict[str, tuple[Path, ...]]:
    """Return the driver's libraries on this machine by name, as the dynamic linker finds them, without links.

    beside: directories of others, such as that of a library which was loaded by its path; they come last.
    """
    cache = subprocess.run(
        ["/sbin/ldconfig", "-p"],
        check=False,
        capture_output=True,
        text=True,
        timeout=_LDCONFIG_TIMEOUT_S,
    )
    named: dict[str, list[Path]] = {name: [] for name in LIBRARIES}
    for line in cache.stdout.splitlines():
        described, _, path = line.partition(" => ")
        name, _, kind = described.strip().partition(" ")
        if name in named and _KIND in kind:
            named[name].append(Path(path))
    for directory in beside:
        for name, paths in named.items():
            paths.append(directory / name)
    found = {
        name: tuple(dict.fromkeys(path.resolve() for path in paths if path.is_file()))
        for name, paths in named.items()
    }
    return {name: paths for name, paths in found.items() if paths}


def install(directory: Path, driver: Path, native: Path = _NATIVE) -> None:
    """Make `directory` one that programs find the driver in, through the proxy.

    driver: where the real libraries are. A driver that a lease has in /run/fenka/driver comes before it.
    Each file is replaced in one step, so that programs may start meanwhile. Raises OSError, and
    ValueError when the path is too long to be written into the proxy.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fenka-", dir=directory) as new:
        shutil.copy(native / _SHIM, new)
        for behind, library in zip(NEXT_LIBRARIES, LIBRARIES, strict=True):
            _write_driver_path(
                native / "proxy" / behind, Path(new) / behind, driver.absolute() / library
            )
            shutil.copy(native / "proxy" / library, new)
        # The proxies last: whoever finds one finds all that it needs.
        for name in (_SHIM, *NEXT_LIBRARIES, *LIBRARIES):
            os.replace(Path(new) / name, directory / name)


def _write_driver_path(behind: Path, output: Path, library: Path) -> None:
    """Copy `behind` with the driver's place in it: once for the linker, once for the proxy."""
    path = os.fsencode(library)

    def fill(room: re.Match[bytes]) -> bytes:
        if len(path) > len(room[0]):
            raise ValueError(f"{library} is longer than {len(room[0])} bytes")
        return path.ljust(len(room[0]), b"\0")

    data, times = _PATH_PLACEHOLDER.subn(fill, behind.read_bytes())
    if times != 2:
        raise ValueError(f"{behind} was not built with room for the driver's place")
    output.write_bytes(data)
    output.chmod(0o755)
