"""The driver's other user-mode parts: OpenCL, Vulkan, EGL and OpenGL.

They open the card's device files themselves and call no function of libcuda, so the shim cannot limit them. A
slice does not get them, unless it is allowed to use them.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

ALLOWED: Final = "fenka.io/allow-unlimited-drivers"
"""Annotation of a pod: `true` gives its slices OpenCL, whose memory and time are not limited."""

_LIBRARY: Final = re.compile(
    r"lib(nvidia-(opencl|glcore|eglcore|glvkspirv|vulkan-producer)|(GLX|EGL|GLESv1_CM|GLESv2)_nvidia)"
    r"\.so(\.\d+)*"
)

VENDOR_DIRECTORIES: Final = (
    "etc/OpenCL/vendors",
    *(
        f"{base}/{kind}"
        for base in ("etc", "usr/share", "usr/local/share")
        for kind in (
            "vulkan/icd.d",
            "vulkan/implicit_layer.d",
            "vulkansc/icd.d",
            "glvnd/egl_vendor.d",
            "egl/egl_external_platform.d",
        )
    ),
)
"""Directories below a root, in which loaders find the drivers of all vendors."""

_VENDOR_FILE: Final = re.compile(r".*nvidia.*\.(icd|json)")

LIBRARY_DIRECTORIES: Final = (
    "usr/lib/{machine}-linux-gnu",
    "usr/lib/{machine}-linux-gnu/nvidia/current",
    "usr/lib64",
    "usr/lib64/nvidia",
    "usr/lib",
    "usr/lib/nvidia",
    "usr/lib/nvidia/current",
    "run/opengl-driver/lib",
    # Programs of 32 bits:
    "usr/lib/i386-linux-gnu",
    "usr/lib/i386-linux-gnu/nvidia/current",
    "usr/lib32",
    "usr/lib32/nvidia",
    "run/opengl-driver-32/lib",
)
"""Directories below a root in which distributions put these libraries."""


def is_unlimited(name: str) -> bool:
    """Return whether a file of this name is a library of such a driver."""
    return _LIBRARY.fullmatch(name) is not None


def libraries(beside: Iterable[Path], root: Path | None = Path("/")) -> list[Path]:
    """Return the libraries with links resolved, each once.

    Args:
        beside: Directories of the driver, such as that of libcuda.
        root: Where distributions' directories are searched, too; None for only `beside`.
    """
    machine = os.uname().machine
    places = [*beside]
    if root is not None:
        places += [root / directory.format(machine=machine) for directory in LIBRARY_DIRECTORIES]
    return [*_libraries_in(_stamped(places))]


def _stamped(directories: Iterable[Path]) -> tuple[tuple[Path, int], ...]:
    """Return the directories that exist, each once, with the time of their last change."""
    stamped = dict[Path, int]()
    for directory in directories:
        with contextlib.suppress(OSError):
            stamped[directory] = directory.stat().st_mtime_ns
    return (*stamped.items(),)


@lru_cache(maxsize=8)
def _libraries_in(stamped: tuple[tuple[Path, int], ...]) -> tuple[Path, ...]:
    """Return `libraries` of directories, some of which have thousands of files."""
    named = (path for place, _ in stamped for path in _files(place) if is_unlimited(path.name))
    real = (path.resolve() for path in named)
    return (*dict.fromkeys(path for path in real if path.is_file()),)


def vendor_files(root: Path = Path("/")) -> list[Path]:
    """Return the files by which loaders find these drivers."""
    return [
        path
        for directory in VENDOR_DIRECTORIES
        for path in _files(root / directory)
        if _VENDOR_FILE.fullmatch(path.name)
    ]


def _files(directory: Path) -> Iterator[Path]:
    """Yield the entries of a directory, none if it cannot be read."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    yield from (directory / name for name in names)
