"""The layouts of the control page and the account, read from the C header of the shim.

``fenka/lease.h`` is the only definition. This module gives Python its structs, offsets and constants.
"""

from typing import Any, Final

from fenka import native

HEADER: Final = native.DIRECTORY / "lease.h"
"""Installed beside the libraries that were built from it."""


def constant(name: str) -> int:
    """Return the value of an integer ``#define`` of the header. Raises KeyError."""
    return native.constants(HEADER)[name]


def layout() -> Any:
    """Return the header's structs as a cffi ``FFI``. Raises FileNotFoundError if nothing was built."""
    return native.structs(HEADER)
