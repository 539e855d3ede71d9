"""Reads the dynamic symbol table of a shared library, without binutils.

Supports what drivers' libraries are: 64-bit, little-endian, with section headers.
"""

import struct
from pathlib import Path

from fenka.core.errors import FenkaError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC_SYMBOLS = 11
"""Section type SHT_DYNSYM."""
_VERSION_DEFINITIONS = 0x6FFFFFFD
"""Section type SHT_GNU_verdef."""
_FUNCTIONS = (2, 10)
"""Symbol types STT_FUNC, and STT_GNU_IFUNC: a function chosen when the library is loaded."""


class InvalidLibrary(FenkaError):
    """The file has no readable dynamic symbols."""


def exported_functions(library: Path) -> frozenset[str]:
    """Return the names of the functions that the library exports, without versions.

    Raises InvalidLibrary, OSError.
    """
    data = library.read_bytes()
    try:
        sections = _sections(data)
        (table,) = (s for s in sections if s[1] == _DYNAMIC_SYMBOLS)
        strings = sections[table[6]]
        return frozenset(_names(_content(data, table), _content(data, strings)))
    except (struct.error, ValueError, IndexError):
        raise InvalidLibrary(f"{library} is not a shared library of this kind of machine") from None


def has_symbol_versions(library: Path) -> bool:
    """Return whether its symbols have versions, as glibc's do. Raises InvalidLibrary, OSError."""
    try:
        return any(s[1] == _VERSION_DEFINITIONS for s in _sections(library.read_bytes()))
    except (struct.error, ValueError):
        raise InvalidLibrary(f"{library} is not a shared library of this kind of machine") from None


def _sections(data: bytes) -> list[tuple[int, ...]]:
    identity, *rest = _HEADER.unpack_from(data)
    if identity[:6] != b"\x7fELF\x02\x01":
        raise ValueError
    start, size, count = rest[5], rest[10], rest[11]
    return [_SECTION.unpack_from(data, start + i * size) for i in range(count)]


def _content(data: bytes, section: tuple[int, ...]) -> bytes:
    return data[section[4] : section[4] + section[5]]


def _names(symbols: bytes, strings: bytes) -> list[str]:
    return [
        strings[name : strings.index(b"\0", name)].decode()
        for name, kind, _, section, _, _ in _SYMBOL.iter_unpack(symbols)
        if section and kind & 15 in _FUNCTIONS
    ]
