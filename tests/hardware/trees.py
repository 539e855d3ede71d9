"""File trees of hosts with a driver, as distributions install it."""

import os
from pathlib import Path

from fenka.hardware.driver_places import LIBRARIES

_MACHINES = {"x86_64": 62, "aarch64": 183}


def elf(machine: str = os.uname().machine, *, bits: int = 64) -> bytes:
    """Return the first bytes of a shared library."""
    head = b"\x7fELF" + bytes((2 if bits == 64 else 1, 1, 1)) + bytes(9)
    return head + (3).to_bytes(2, "little") + _MACHINES.get(machine, 3).to_bytes(2, "little")


ELF = elf()


def install_driver(root: Path, directory: str, version: str, content: bytes = ELF) -> Path:
    """Make the libraries of a driver below a root, with relative links. Return their directory."""
    place = root / directory.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        file = f"{name.removesuffix('.1')}.{version}"
        (place / file).write_bytes(content)
        (place / name).symlink_to(file)
    return place
