"""Detects programs that exceed their limits, using driver and kernel data rather than self-reported usage.

Programs write the account themselves, so it proves nothing. NVML's figures and the files that a process has
mapped do. The workstation's daemon and the node program use the same thresholds.
"""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

_Key = TypeVar("_Key")

CONSECUTIVE_SAMPLES = 3
"""In a row before a violation is reported: a single one may catch an allocation that is about to fail."""

MEMORY_TOLERANCE = 1.05

COMPUTE_TOLERANCE = 0.10
"""Of a card's time beyond the limit, which is not reported."""
SUSTAINED_S, WINDOW_S = 15.0, 60.0
"""A violation is an excess in every sample of SUSTAINED_S, or on average over WINDOW_S. A running kernel
cannot be stopped, but is paid for by waiting afterwards: one of seconds is in few samples, and averages
out."""

MAPS_TIMEOUT_S = 1.0
"""A process can block readers of its mappings indefinitely, with a file system of its own."""

_MAX_MAPS_BYTES = 8 << 20
"""A process may have any number of mappings. The shim is among the first thousands."""


class MemoryViolations:
    """Counts by lease and card for how many samples in a row too much memory was held."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def observe(self, excess: Mapping[tuple[str, str], bool]) -> set[tuple[str, str]]:
        """Return the leases and cards that are in violation after this sample.

        excess: whether too much is held now, by lease and card. Those not in it are forgotten.
        """
        self._counts = {key: self._counts.get(key, 0) + 1 for key, over in excess.items() if over}
        return {key for key, count in self._counts.items() if count >= CONSECUTIVE_SAMPLES}


class ComputeViolations:
    """Remembers by lease and card how much time was used beyond the limit."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def observe(
        self, seconds: float, excess: Mapping[tuple[str, str], float]
    ) -> set[tuple[str, str]]:
        """Return the leases and cards that are in violation after this sample.

        Args:
            seconds: Time since the last sample.
            excess: The share of this time that was used, less the allowed share, by lease and card. Those not
                in it are forgotten.
        """
        self._samples = {
            key: _newest([*self._samples.get(key, ()), (seconds, share)])
            for key, share in excess.items()
            if seconds > 0
        }
        return {
            key
            for key, samples in self._samples.items()
            if _sustained(samples) or _over_window(samples)
        }


def _newest(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return as few of the last samples as cover WINDOW_S."""
    while sum(seconds for seconds, _ in samples[1:]) >= WINDOW_S:
        samples = samples[1:]
    return samples


def _sustained(samples: list[tuple[float, float]]) -> bool:
    passed = 0.0
    for seconds, share in reversed(samples):
        if share <= COMPUTE_TOLERANCE:
            return False
        passed += seconds
        if passed >= SUSTAINED_S:
            return True
    return False


def _over_window(samples: list[tuple[float, float]]) -> bool:
    passed = sum(seconds for seconds, _ in samples)
    return (
        passed >= WINDOW_S and sum(s * share for s, share in samples) > COMPUTE_TOLERANCE * passed
    )


def time_shares(
    now_ns: Mapping[_Key, int], before_ns: Mapping[_Key, int], seconds: float
) -> dict[_Key, float]:
    """Return which share of the time each one used since the last sample, if that has it.

    Args:
        now_ns: Time used so far.
        before_ns: The same at the last sample.
        seconds: Time since then.
    """
    return {
        key: max(ns - before_ns[key], 0) / (seconds * 1e9)
        for key, ns in now_ns.items()
        if key in before_ns and seconds > 0
    }


def memory_allowance(limit_bytes: int, context_bytes: int) -> int:
    """Return the bytes that a lease may hold by the driver's figures before that is a violation."""
    return int((limit_bytes + context_bytes) * MEMORY_TOLERANCE)


def without_shim(pids: Iterable[int], inode: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that certainly have not mapped the shim of this inode."""
    return [pid for pid in sorted(set(pids)) if has_shim(pid, inode, proc) is False]


def has_shim(pid: int, inode: int, proc: Path = Path("/proc")) -> bool | None:
    """Return whether a process has mapped the shim; None if that is unknown.

    The shim is recognised by its inode, because any file can have its name. A process that blocks the reader
    is treated like one that has ended; its memory is compared with its limit all the same.
    """
    maps = proc / str(pid) / "maps"
    if any(reader.name == str(maps) for reader in threading.enumerate()):
        return None  # it blocks the last reader
    text: list[bytes] = []
    reader = threading.Thread(target=_read_maps, args=(maps, text), name=str(maps), daemon=True)
    reader.start()
    reader.join(MAPS_TIMEOUT_S)
    if not text or not text[0]:
        return None  # it has ended, is a zombie or a kernel thread, or blocks the reader
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
