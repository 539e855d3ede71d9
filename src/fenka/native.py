"""What `make build` leaves: the native libraries, and the headers whose layouts Python shares with them."""

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from cffi import FFI

DIRECTORY: Final = Path(__file__).parent / "_native"

_INTEGER_DEFINE = re.compile(r"#define\s+(\w+)\s+(0x[0-9a-fA-F]+|\d+)\b")


@cache
def header(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the structs of a header as a cffi ``FFI``, and its integer ``#define``s.

    The header holds plain declarations; everything else that begins with # is passed over.

    Raises:
        FileNotFoundError: The libraries are not built.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: run `make build`") from None
    ffi = FFI()
    ffi.cdef("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return ffi, {name: int(value, 0) for name, value in _INTEGER_DEFINE.findall(text)}
