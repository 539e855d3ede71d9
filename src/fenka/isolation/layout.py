"""The layouts of the control page and the account, read from the C header of the shim.

``fenka/lease.h`` is the only definition. This module gives Python its structs, offsets and constants.
"""

from functools import cache
from typing import Any, Final

from fenka import native

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
    """Return the value of an integer ``#define`` of the header. Raises KeyError."""
    return _header()[1][name]


def layout() -> Any:
    """Return the header's structs as a cffi ``FFI``. Raises FileNotFoundError if nothing was built."""
    return _header()[0]
