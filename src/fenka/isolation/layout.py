"""The two layouts of a lease, read from the C header that the shim was compiled from.

There is one definition (``fenka/lease.h``); this module gives Python its structs, offsets and constants,
so that a field cannot mean one thing here and another there.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from cffi import FFI

__all__ = ["HEADER", "constant", "layout"]

HEADER: Final = Path(__file__).parent.parent / "_native" / "lease.h"
"""Installed beside the libraries that were built from it."""

_INTEGER_DEFINE = re.compile(r"#define\s+(\w+)\s+(0x[0-9a-fA-F]+|\d+)\b")


def _text() -> str:
    try:
        return HEADER.read_text()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{HEADER} is missing: build fenka's native libraries first (make -C native)"
        ) from None


@cache
def _constants() -> dict[str, int]:
    return {name: int(value, 0) for name, value in _INTEGER_DEFINE.findall(_text())}


def constant(name: str) -> int:
    """The value of an integer ``#define`` of the header; KeyError when there is none."""
    return _constants()[name]


@cache
def layout() -> Any:
    """The header's structs, as a cffi ``FFI``; FileNotFoundError when nothing was built."""
    ffi = FFI()
    ffi.cdef("\n".join(line for line in _text().splitlines() if not line.startswith("#")))
    return ffi
