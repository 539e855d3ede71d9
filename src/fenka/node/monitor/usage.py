"""What leases use, every few seconds: by their own account, by the driver's, and who gets round the limit.

Nothing that a tenant writes is trusted or makes this process larger: files are read in bounded pieces, and
only what leases and cards there are is remembered.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.inventory import Card
from fenka.hardware.nvml import DriverLost, GpuProcess, Reading
from fenka.isolation import account, violations
from fenka.isolation.sandbox import SHIM
from fenka.node.lease import pod_processes
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import Token

MIB = 1 << 20

BusyNs = Callable[[], Mapping[tuple[str, int], int]]
"""Nanoseconds that each process has had of a card so far, by card UUID and process id."""


@dataclass(frozen=True, slots=True)
class Use:
    """Of one container on one card."""

    token: Token
    uuid: str
    requested_bytes: int
    """What its pod asked for."""
    limit_bytes: int
    """What it may hold: the same, unless its node does not isolate."""
    self_reported_bytes: int
    """As its programs say."""
    driver_reported_bytes: int
    """As the driver says; 0 where it names no process's memory."""
    processes: int
    compute: float | None
    """Share of the card's time since the last look, 0 to 1; None where nobody says."""
    charged: float | None = None
    """The same as its programs say; where nothing limits it they need not."""
    requested_percent: int = 0
    """Of the card's time; 0 where it was promised none of its own."""
    limit_percent: int = 100
    """Of the card's time; 100 where nothing limits it."""


@dataclass(frozen=True, slots=True)
class UnmanagedProcess:
    """A process of a lease that computes on a card without the shim."""

    token: Token
    pid: int


@dataclass(frozen=True, slots=True)
class UsageSample:
    """One look at everything."""

    uses: tuple[Use, ...] = ()
    cards: tuple[Card, ...] = ()
    readings: Mapping[str, Reading] = field(default_factory=dict)
    over: tuple[Use, ...] = ()
    unmanaged: tuple[UnmanagedProcess, ...] = ()
    over_time: tuple[Use, ...] = ()


class Usage:
    """Looks, one after the other. running: processes that have a context, as the driver names them."""

    def __init__(
        self,
        running: Callable[[], Sequence[GpuProcess]],
        leases: LeaseFiles,
        contexts_mib: Mapping[str, int],
        busy_ns: BusyNs,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running, self._leases, self._contexts_mib = running, leases, contexts_mib
        self._busy_ns, self._proc, self._clock = busy_ns, proc, clock
        self._busy: Mapping[tuple[str, int], int] = {}
        self._charged: dict[tuple[str, str], int] = {}
        self._at = clock()
        self._over = violations.MemoryViolations()
        self._over_time = violations.ComputeViolations()

    def sample(
        self,
        tokens: Sequence[Token],
        names: Mapping[str, str],
        cards: tuple[Card, ...],
        readings: Mapping[str, Reading],
    ) -> UsageSample:
        """Takes as long as the driver and the disk take. names: containers by the id of their runtime."""
        bound = [token for token in tokens if token.lease is not None]
        owned = self._owned(bound, names)
        seconds, shares = self._shares()
        read = {token.name: self._account(token) for token in bound}
        charged = self._charges(bound, read, seconds)
        uses = tuple(
            use
            for token in bound
            for use in _uses(token, owned.get(token.name, ()), shares, read[token.name], charged)
        )
        excess = {
            (use.token.name, use.uuid): use.driver_reported_bytes
            > violations.memory_allowance(
                use.limit_bytes, self._contexts_mib.get(use.uuid, 0) * MIB
            )
            for use in uses
        }
        accused = self._over.observe(excess)
        beyond = {
            # A driver that says nothing of a program that was busy before means that it is idle.
            (use.token.name, use.uuid): (use.compute or 0) - use.limit_percent / 100
            for use in uses
            if use.limit_percent < 100
        }
        hurried = self._over_time.observe(seconds, beyond)
        return UsageSample(
            uses,
            cards,
            readings,
            tuple(use for use in uses if (use.token.name, use.uuid) in accused),
            tuple(self._without_shim(bound, owned)),
            tuple(use for use in uses if (use.token.name, use.uuid) in hurried),
        )

    def _owned(
        self, bound: Sequence[Token], names: Mapping[str, str]
    ) -> dict[str, list[GpuProcess]]:
        """The driver's processes by token. A container that nobody names is its pod's first."""
        owners = pod_processes.Owners(bound, names, self._proc)
        try:
            running = self._running()
        except DriverLost:
            running = ()
        owned: dict[str, list[GpuProcess]] = {}
        for process in running:
            for token in owners.of(process.pid)[:1]:
                owned.setdefault(token.name, []).append(process)
        return owned

    def _shares(self) -> tuple[float, dict[tuple[str, int], float]]:
        """Seconds since the last look, and who had how much of them."""
        now, busy = self._clock(), self._busy_ns()
        passed = now - self._at
        shares = {
            key: min(max(ns - self._busy.get(key, ns), 0) / (passed * 1e9), 1.0)
            for key, ns in busy.items()
            if passed > 0
        }
        self._at, self._busy = now, busy
        return passed, shares

    def _account(self, token: Token) -> account.Account:
        try:
            return account.read(self._leases.slots(token.name))
        except (OSError, account.InvalidAccount):
            return account.Account(())

    def _charges(
        self, bound: Sequence[Token], read: Mapping[str, account.Account], seconds: float
    ) -> dict[tuple[str, str], float]:
        """What each lease's programs say they had of each card since the last look, as a share."""
        before = self._charged
        self._charged = {
            (token.name, piece.uuid): ns
            for token in bound
            if token.lease is not None
            for piece, ns in zip(token.lease.slices, read[token.name].charged_ns, strict=False)
        }
        return {
            key: max(ns - before[key], 0) / (seconds * 1e9)
            for key, ns in self._charged.items()
            if key in before and seconds > 0
        }

    def _without_shim(
        self, bound: Sequence[Token], owned: Mapping[str, Sequence[GpuProcess]]
    ) -> list[UnmanagedProcess]:
        found = []
        for token in bound:
            assert token.lease is not None
            if token.lease.limits_mib:  # its node does not isolate
                continue
            try:
                shim = (Path(token.lease.library) / SHIM.name).stat().st_ino
            except OSError:
                continue
            for pid in sorted({it.pid for it in owned.get(token.name, ())}):
                if violations.has_shim(pid, shim, self._proc) is False:
                    found.append(UnmanagedProcess(token, pid))
        return found


def _uses(
    token: Token,
    owned: Sequence[GpuProcess],
    shares: Mapping[tuple[str, int], float],
    read: account.Account,
    charged: Mapping[tuple[str, str], float],
) -> list[Use]:
    assert token.lease is not None
    held = read.memory_bytes if read.processes else ()
    uses = []
    for position, piece in enumerate(token.lease.slices):
        mine = [it for it in owned if it.uuid == piece.uuid]
        told = [shares[piece.uuid, it.pid] for it in mine if (piece.uuid, it.pid) in shares]
        uses.append(
            Use(
                token,
                piece.uuid,
                piece.memory_mib * MIB,
                token.lease.limit_mib(piece) * MIB,
                held[position] if position < len(held) else 0,
                sum(it.used_mib or 0 for it in mine) * MIB,
                len({it.pid for it in mine}),
                min(sum(told), 1.0) if told or not mine else None,
                charged.get((token.name, piece.uuid)),
                piece.compute,
                token.lease.limit_percent(piece),
            )
        )
    return uses
