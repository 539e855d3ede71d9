"""Who gets round the limit: told from outside, by what the driver and the kernel say of processes.

The account is written by the programs themselves, so it proves nothing. NVML's own memory of a process,
and the files that it has mapped, do.
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from fenka.isolation.sandbox import SHIM
from fenka.node import processes

SAMPLES = 3
"""In a row before anybody is accused: one may be caught between an allocation and its end."""

TOLERANCE = 1.05

_MAPS_BYTES = 8 << 20
"""A program may have any number of mappings; the shim is among the first thousands."""


class OverLimit:
    """Counts, lease by lease, for how many samples in a row it has held too much."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def observe(self, excess: Mapping[tuple[str, str], bool]) -> set[tuple[str, str]]:
        """Who is accused by this sample. excess: by token and card, whether it holds too much now.

        Remembers only who is in the sample.
        """
        self._counts = {key: self._counts.get(key, 0) + 1 for key, over in excess.items() if over}
        return {key for key, count in self._counts.items() if count >= SAMPLES}


def allowance(limit_bytes: int, context_bytes: int) -> int:
    """What a lease may hold by the driver's account before that counts as too much, in bytes."""
    return int((limit_bytes + context_bytes) * TOLERANCE)


def has_shim(pid: int, library: Path, proc: Path = Path("/proc")) -> bool | None:
    """Whether a process has the node's own shim mapped; None where it cannot be told (it ended).

    By inode: a file of that name is easily made.
    """
    try:
        inode = (library / SHIM.name).stat().st_ino
        with (proc / str(pid) / "maps").open("rb") as file:
            text = file.read(_MAPS_BYTES)
    except OSError:
        return None
    if not text:
        return None  # a zombie, or a thread of the kernel
    for line in text.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[4] == str(inode).encode():
            return True
    return False


def kill(pid: int, pod: str, proc: Path = Path("/proc")) -> bool:
    """End a process if it is still one of this pod; whether it was sent the signal."""
    with contextlib.suppress(OSError):
        # The number may be another process's by now: hold it, then look again.
        descriptor = os.pidfd_open(pid)
        try:
            if processes.place_of(pid, proc)[0] == pod:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False
