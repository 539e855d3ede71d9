"""The two layouts of a lease, read from the C header that the shim was compiled from.

There is one definition (``fenka/lease.h``); this module gives Python its structs, offsets and constants,
so that a field cannot mean one thing here and another there.
"""

from functools import cache
from typing import Any, Final

from fenka import native

__all__ = ["HEADER", "constant", "layout"]

HEADER: Final = native.DIRECTORY / "lease.h"
"""Installed beside the libraries that were built from it."""


@cache
def _header() -> tuple[Any, dict[str, int]]:
    try:
        return native.read_header(HEADER)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{HEADER} is missing: build fenka's native libraries first (make -C native)"
        ) from None


def constant(name: str) -> int:
    """The value of an integer ``#define`` of the header; KeyError when there is none."""
    return _header()[1][name]


def layout() -> Any:
    """The header's structs, as a cffi ``FFI``; FileNotFoundError when nothing was built."""
    return _header()[0]
