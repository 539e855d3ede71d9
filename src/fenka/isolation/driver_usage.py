"""Compares leases with the driver's figures: memory in use by no lease, programs that exceed their limits.

The workstation's daemon and the node program use the same thresholds. Programs write the account themselves,
so it proves nothing.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fenka.core.errors import listed

TOLERANCE = 0.05
"""Of a card's memory: drivers round, reserve and account for memory differently from moment to moment."""

MIN_TOLERANCE_MIB = 512
"""The memory that drivers reserve on a card of any size. NVML counts it as used by no process."""

HOLD_S = 10.0
"""A smaller amount counts when it was not exceeded for this long: programs free memory between phases."""

STEPS = 64
"""Of a card's memory. Amounts are rounded up to one of them, so that small changes change nothing."""

MAX_PROGRAMS = 2
"""Programs that a sentence names at most."""

_GIB_MIB = 1024


@dataclass(frozen=True, slots=True)
class UnleasedProgram:
    """A process on a card that is in no lease.

    Attributes:
        name: of the program, as the kernel has it. Its user chooses it.
        used_mib: None if the driver does not report it.
        draws: whether it only renders, as a desktop does.
    """

    name: str
    used_mib: int | None
    draws: bool = False


@dataclass(frozen=True, slots=True)
class UnleasedMemory:
    """Memory of a card that is in use by no lease, in MiB. It counts as taken.

    A job may have left it behind through a descriptor, or the driver has not freed it yet.

    Attributes:
        drawn_mib: of processes that only draw.
        computing_mib: of other processes.
        unattributed_mib: of no process that the driver names.
        programs: the names of the processes, those that use most first.
    """

    drawn_mib: int = 0
    computing_mib: int = 0
    unattributed_mib: int = 0
    programs: tuple[str, ...] = ()

    @property
    def total_mib(self) -> int:
        """Return all of it."""
        return self.drawn_mib + self.computing_mib + self.unattributed_mib

    def sentence(self) -> str:
        """Return `12.0 GiB used by python, no lease`; empty if there is none."""
        parts = []
        if attributed_mib := self.drawn_mib + self.computing_mib:
            names = listed(self.programs, MAX_PROGRAMS)
            parts.append(f"{_gib(attributed_mib)} used by {names}, no lease")
        if self.unattributed_mib:
            parts.append(f"{_gib(self.unattributed_mib)} used by no process that the driver names")
        return ", ".join(parts)


NOTHING_UNLEASED = UnleasedMemory()


def tolerance_mib(card_mib: int) -> int:
    """Return how much of a card may be in use by no process without being counted."""
    return max(int(card_mib * TOLERANCE), MIN_TOLERANCE_MIB)


def measure(
    card_mib: int,
    used_mib: int | None,
    leased_mib: Sequence[int | None],
    slices_mib: int,
    programs: Sequence[UnleasedProgram],
    *,
    names_all: bool = True,
) -> UnleasedMemory:
    """Return what is in use by no lease at this moment.

    If the driver does not report the memory of all processes, leases count as if they used all of their
    slices.

    Args:
        card_mib: The card's memory.
        used_mib: What is in use of it, by the driver; None if it reports only that of processes.
        leased_mib: What each process in a lease uses.
        slices_mib: What all leases together may use.
        programs: The processes in no lease.
        names_all: Whether the driver names all processes, also those of other PID namespaces.
    """
    by_size = sorted(programs, key=lambda program: -(program.used_mib or 0))
    names = tuple(dict.fromkeys(program.name or "a process" for program in by_size))
    known = [size for size in leased_mib if size is not None]
    outside = [program.used_mib for program in programs]
    complete = names_all and None not in outside and len(known) == len(leased_mib)
    leases_mib = sum(known) if complete else max(sum(known), slices_mib)
    rest_mib = 0 if used_mib is None else used_mib - leases_mib - _total(programs)
    rest_mib = rest_mib if rest_mib > tolerance_mib(card_mib) else 0
    drawn_mib = _total([program for program in programs if program.draws])
    computing_mib = _total([program for program in programs if not program.draws])
    unknown = [program for program in programs if program.used_mib is None]
    if not unknown:
        return UnleasedMemory(drawn_mib, computing_mib, rest_mib, names)
    if all(program.draws for program in unknown):
        return UnleasedMemory(drawn_mib + rest_mib, computing_mib, programs=names)
    return UnleasedMemory(drawn_mib, computing_mib + rest_mib, programs=names)


def _total(programs: Sequence[UnleasedProgram]) -> int:
    return sum(program.used_mib or 0 for program in programs)


def _gib(mib: int) -> str:
    return f"{mib / _GIB_MIB:.1f} GiB"


@dataclass(slots=True)
class _Level:
    """An amount that rises at once, falls to nothing at once, and falls to anything else after HOLD_S.

    shown: the amount as it was measured when it changed last.
    """

    counted: int = 0
    shown: int = 0
    _below_since: float | None = None
    _highest_below: int = 0

    def update(self, measured: int, step: int, now: float) -> None:
        rounded = -(-measured // step) * step
        if rounded >= self.counted or measured == 0:
            if rounded != self.counted:
                self.counted, self.shown = rounded, measured
            self._below_since = None
            return
        if self._below_since is None:
            self._below_since, self._highest_below = now, 0
        self._highest_below = max(self._highest_below, measured)
        if now - self._below_since >= HOLD_S:
            self.counted = -(-self._highest_below // step) * step
            self.shown, self._below_since = self._highest_below, None


@dataclass(slots=True)
class _CardLevels:
    drawn: _Level = field(default_factory=_Level)
    computing: _Level = field(default_factory=_Level)
    unattributed: _Level = field(default_factory=_Level)


class UnleasedTracker:
    """Remembers for each card what counts as taken."""

    def __init__(self) -> None:
        self._cards: dict[str, _CardLevels] = {}
        self._programs: dict[str, tuple[str, ...]] = {}

    def update(self, uuid: str, card_mib: int, measured: UnleasedMemory, now: float) -> None:
        """Take a measurement of a card. now: seconds of a clock that never goes back."""
        levels, step = self._cards.setdefault(uuid, _CardLevels()), max(card_mib // STEPS, 1)
        levels.drawn.update(measured.drawn_mib, step, now)
        levels.computing.update(measured.computing_mib, step, now)
        levels.unattributed.update(measured.unattributed_mib, step, now)
        self._programs[uuid] = measured.programs or self._programs.get(uuid, ())

    def counted(self, uuid: str) -> UnleasedMemory:
        """Return what counts as taken of a card: what was measured, rounded up."""
        levels = self._cards.get(uuid, _CardLevels())
        return UnleasedMemory(
            levels.drawn.counted, levels.computing.counted, levels.unattributed.counted
        )

    def shown(self, uuid: str) -> UnleasedMemory:
        """Return the same for people: as it was measured, with the programs."""
        levels = self._cards.get(uuid, _CardLevels())
        return UnleasedMemory(
            levels.drawn.shown,
            levels.computing.shown,
            levels.unattributed.shown,
            self._programs.get(uuid, ()),
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """A lease's use of a card so far.

    Attributes:
        started_at: Unix seconds of its granting; None if it is not known.
        busy_s: card time used so far; None if the driver does not measure it.
        last_active_at: Unix seconds of the last look at which that had grown; None as well.
        share: of the card's time since the look before, 0 to 1; None at the first look, too.
    """

    started_at: float | None = None
    busy_s: float | None = None
    last_active_at: float | None = None
    share: float | None = None


NO_ACTIVITY = Activity()


@dataclass(eq=False)
class ActivityTracker:
    """Remembers when leases last used a card.

    Before it has seen one do so, that is its own start or, if it is later, the lease's granting: what was
    before is not known after a restart.

    Attributes:
        busy_s: Returns how long a lease has used a card, by lease and the device's UUID; None if the
            driver does not measure it.
        clock: Unix seconds.
    """

    busy_s: Callable[[str, str], float | None]
    clock: Callable[[], float] = time.time
    _looked_at: float = field(init=False)
    _known: Mapping[tuple[str, str], Activity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._looked_at = self._began_at = self.clock()

    def observe(
        self, started_at: Mapping[tuple[str, str], float | None]
    ) -> Mapping[tuple[str, str], Activity]:
        """Look at leases, and return their activity. Others are forgotten.

        started_at: When each was granted, by lease and the device's UUID; None if it is not known.
        """
        now = self.clock()
        seconds, self._looked_at = now - self._looked_at, now
        self._known = {
            key: self._observe(self._known.get(key, NO_ACTIVITY), at, self.busy_s(*key), seconds)
            for key, at in started_at.items()
        }
        return self._known

    def _observe(
        self, before: Activity, started_at: float | None, busy_s: float | None, seconds: float
    ) -> Activity:
        if busy_s is None:
            return Activity(started_at)
        if busy_s > (before.busy_s or 0):
            last_active_at = self._looked_at
        else:
            # The granting may become known only now.
            last_active_at = max(before.last_active_at or self._began_at, started_at or 0)
        share = None
        if before.busy_s is not None and seconds > 0:
            share = min(max(busy_s - before.busy_s, 0) / seconds, 1.0)
        return Activity(started_at, busy_s, last_active_at, share)


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
