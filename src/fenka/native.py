"""The products of `make build`: native libraries, and headers whose layouts Python shares with them."""

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from cffi import FFI

DIRECTORY: Final = Path(__file__).parent / "_native"

_INTEGER_DEFINE = re.compile(r"#define\s+(\w+)\s+(0x[0-9a-fA-F]+|\d+)\b")


def missing(path: Path) -> FileNotFoundError:
    """Return the error for a file of the native libraries that this installation does not have."""
    return FileNotFoundError(
        f"{path} is missing: this fenka has no native libraries, so it can look at clusters but start no "
        "programs here. Install fenka's wheel for Linux on x86-64 or aarch64; in a checkout run `make build`"
    )


@cache
def structs(header: Path) -> Any:
    """Return the structs of a header as a cffi ``FFI``.

    The header holds plain declarations; everything else that begins with # is passed over.

    Raises:
        FileNotFoundError: The libraries are not built.
    """
    ffi = FFI()
    lines = _text(header).splitlines()
    ffi.cdef("\n".join(line for line in lines if not line.startswith("#")))
    return ffi


@cache
def constants(header: Path) -> dict[str, int]:
    """Return the integer ``#define``s of a header. Raises FileNotFoundError like `structs`."""
    return {name: int(value, 0) for name, value in _INTEGER_DEFINE.findall(_text(header))}


def _text(header: Path) -> str:
    try:
        return header.read_text()
    except FileNotFoundError:
        raise missing(header) from None
