"""Detects programs that exceed their limits, from what the driver and the kernel say of processes.

Programs write the account themselves, so it proves nothing. NVML's own memory of a process, and the files
that it has mapped, do. The workstation's daemon and the node's program use the same thresholds.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

CONSECUTIVE_SAMPLES = 3
"""In a row before anybody is accused: one may be caught between an allocation and its end."""

MEMORY_TOLERANCE = 1.05

COMPUTE_TOLERANCE = 0.10
"""Of a card's time, beyond the limit: so much is nobody's fault."""
SUSTAINED_S, WINDOW_S = 15.0, 60.0
"""In every look for so long, or together over so long. A program's single kernel cannot be stopped, and is
paid for by waiting afterwards: one of seconds is in few looks, and a minute has its price too."""

MAPS_TIMEOUT_S = 1.0
"""A process can keep who reads its mappings waiting for as long as it likes, by a file system of its own."""

_MAX_MAPS_BYTES = 8 << 20
"""A program may have any number of mappings; the shim is among the first thousands."""


class MemoryViolations:
    """Counts, lease by lease, for how many samples in a row it has held too much."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def observe(self, excess: Mapping[tuple[str, str], bool]) -> set[tuple[str, str]]:
        """Who is accused by this sample. excess: by token and card, whether it holds too much now.

        Remembers only who is in the sample.
        """
        self._counts = {key: self._counts.get(key, 0) + 1 for key, over in excess.items() if over}
        return {key for key, count in self._counts.items() if count >= CONSECUTIVE_SAMPLES}


class ComputeViolations:
    """Remembers, lease by lease and card by card, how much of the time beyond its limit it has had."""

    def __init__(self) -> None:
        self._looks: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def observe(
        self, seconds: float, excess: Mapping[tuple[str, str], float]
    ) -> set[tuple[str, str]]:
        """Who is accused by this look.

        seconds: since the look before. excess: by token and card, the share of the time that it had in these
        seconds, less what it may have. Remembers only who is in the look.
        """
        self._looks = {
            key: _newest([*self._looks.get(key, ()), (seconds, share)])
            for key, share in excess.items()
            if seconds > 0
        }
        return {
            key for key, looks in self._looks.items() if _sustained(looks) or _over_window(looks)
        }


def _newest(looks: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """As few of the last as make WINDOW_S."""
    while sum(seconds for seconds, _ in looks[1:]) >= WINDOW_S:
        looks = looks[1:]
    return looks


def _sustained(looks: list[tuple[float, float]]) -> bool:
    passed = 0.0
    for seconds, share in reversed(looks):
        if share <= COMPUTE_TOLERANCE:
            return False
        passed += seconds
        if passed >= SUSTAINED_S:
            return True
    return False


def _over_window(looks: list[tuple[float, float]]) -> bool:
    passed = sum(seconds for seconds, _ in looks)
    return passed >= WINDOW_S and sum(s * share for s, share in looks) > COMPUTE_TOLERANCE * passed


def memory_allowance(limit_bytes: int, context_bytes: int) -> int:
    """What a lease may hold by the driver's account before that counts as too much, in bytes."""
    return int((limit_bytes + context_bytes) * MEMORY_TOLERANCE)


def has_shim(pid: int, inode: int, proc: Path = Path("/proc")) -> bool | None:
    """Return whether a process has the shim mapped; None where it cannot be told.

    It is recognised by its inode, because a file of that name is easily made. A process that keeps the reader
    waiting is not told from one that has just ended; its memory is judged all the same.
    """
    text: list[bytes] = []
    reader = threading.Thread(target=_read_maps, args=(proc / str(pid) / "maps", text), daemon=True)
    reader.start()
    reader.join(MAPS_TIMEOUT_S)
    if not text or not text[0]:
        return None  # it ended, is a zombie or a thread of the kernel, or keeps us waiting
    for line in text[0].splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[4] == str(inode).encode():
            return True
    return False


def _read_maps(maps: Path, text: list[bytes]) -> None:
    try:
        with maps.open("rb") as file:
            text.append(file.read(_MAX_MAPS_BYTES))
    except OSError:
        return
