"""Installs the proxy in front of a driver, and finds functions of the driver that the proxy does not know.

The proxy is the shim under the driver's name (docs/understand/proxy.md). Its list of functions is made when
it is built, and a newer driver has more. These stay reachable, because the dynamic linker searches the driver
next, so nothing is generated on the node. `fenka proxy check` reports whether one of them is a new version of
a limited function.
"""

import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fenka.core.errors import FenkaError
from fenka.isolation.lease_control import HEADER

_FUNCTIONS: Final = ("STT_FUNC", "STT_LOOS")
"""Symbol types. The second is STT_GNU_IFUNC: a function chosen when the library is loaded."""


class InvalidLibrary(FenkaError):
    """The file has no readable dynamic symbols."""


def exported_functions(library: Path) -> frozenset[str]:
    """Return the names of the functions that the library exports, without versions.

    Raises InvalidLibrary, OSError.
    """
    with _sections(library) as sections:
        (table,) = (section for section in sections if section["sh_type"] == "SHT_DYNSYM")
        return frozenset(
            symbol.name
            for symbol in table.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["type"] in _FUNCTIONS
        )


def has_symbol_versions(library: Path) -> bool:
    """Return whether its symbols have versions, as glibc's do. Raises InvalidLibrary, OSError."""
    with _sections(library) as sections:
        return any(section["sh_type"] == "SHT_GNU_verdef" for section in sections)


@contextlib.contextmanager
def _sections(library: Path) -> Iterator[list[Any]]:
    """Give the sections of a shared library. Raises InvalidLibrary, also for errors in the body; OSError."""
    # Most commands import this module, and read no library.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    data = io.BytesIO(library.read_bytes())
    try:
        sections = [*ELFFile(data).iter_sections()]
        yield sections
    # Not only ELFError: damaged offsets and names reach the decoders below.
    except (ELFError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError):
        raise InvalidLibrary(f"{library} is not a shared library of this kind of machine") from None


LIBRARIES: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
NEXT_LIBRARIES: Final = ("libfenka-next-cuda.so", "libfenka-next-nvml.so")

_NATIVE: Final = HEADER.parent
_SHIM: Final = "libfenka.so"
_VERSION: Final = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")

_PATH_PLACEHOLDER: Final = re.compile(rb"/nowhere/fenka-proxy-place/x+")
"""Placeholder of the driver's path, written by the build."""


@dataclass(frozen=True, slots=True)
class UnknownFunctions:
    """Functions that a driver's library exports and its proxy does not.

    passed_through: functions that fenka does not limit, and that reach the driver directly.
    unlimited: new versions of functions that fenka replaces. Memory that they allocate is not charged if they
    are called by their own name; through cuGetProcAddress it is, which uses the base name.
    """

    passed_through: tuple[str, ...]
    unlimited: tuple[str, ...]


def unknown_functions(library: Path, native: Path = _NATIVE) -> UnknownFunctions:
    """Compare a driver's library with the proxy of the same name.

    library: named as in LIBRARIES. Raises InvalidLibrary, OSError.
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


def install(directory: Path, driver: Path, native: Path = _NATIVE) -> None:
    """Install the proxy in a directory in which programs then find the driver.

    Each file is replaced atomically, so that programs may start meanwhile.

    Args:
        directory: Where programs search the driver.
        driver: Directory of the real libraries. A lease's own driver in /run/fenka/driver has precedence.
        native: Directory of the native libraries.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The path is too long to be written into the proxy.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fenka-", dir=directory) as new:
        shutil.copy(native / _SHIM, new)
        for next_library, library in zip(NEXT_LIBRARIES, LIBRARIES, strict=True):
            _write_driver_path(
                native / "proxy" / next_library,
                Path(new) / next_library,
                driver.absolute() / library,
            )
            shutil.copy(native / "proxy" / library, new)
        # The proxies last, so that a program that finds one finds everything it needs.
        for name in (_SHIM, *NEXT_LIBRARIES, *LIBRARIES):
            os.replace(Path(new) / name, directory / name)


def _write_driver_path(source: Path, output: Path, library: Path) -> None:
    """Copy a library with the driver's path in it: once for the linker, once for the proxy."""
    path = os.fsencode(library)

    def fill(placeholder: re.Match[bytes]) -> bytes:
        if len(path) > len(placeholder[0]):
            raise ValueError(f"{library} is longer than {len(placeholder[0])} bytes")
        return path.ljust(len(placeholder[0]), b"\0")

    data, times = _PATH_PLACEHOLDER.subn(fill, source.read_bytes())
    if times != 2:
        raise ValueError(f"{source} was not built with a placeholder for the driver's path")
    output.write_bytes(data)
    output.chmod(0o755)
