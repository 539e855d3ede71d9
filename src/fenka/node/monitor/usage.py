"""Measures what leases use: by the driver, by the programs' own accounts, and which processes lack the shim.

Nothing that a tenant writes is trusted, and nothing of it can make this process grow: files are read up to a
bounded size, and state is kept per lease and card only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.inventory import Card
from fenka.hardware.nvml import DriverLost, GpuProcess, Reading
from fenka.isolation import account, violations
from fenka.isolation.sandbox import SHIM
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.pod_processes import ProcessOwners
from fenka.node.lease.store import Token

MIB = 1 << 20

BusyNs = Callable[[], Mapping[tuple[str, int], int]]
"""Nanoseconds that each process has had of a card so far, by card UUID and process ID."""


@dataclass(frozen=True, slots=True)
class SliceUsage:
    """What one container uses of one card."""

    token: Token
    uuid: str
    requested_bytes: int
    limit_bytes: int
    """The same as requested, unless the node does not isolate."""
    self_reported_bytes: int
    driver_reported_bytes: int
    """0 where the driver reports no process's memory."""
    processes: int
    compute: float | None
    """Share of the card's time since the last sample, 0 to 1, by the driver; None if it reports none."""
    self_reported_compute: float | None = None
    """The same by the programs' account, which they need not keep where nothing limits them."""
    requested_percent: int = 0
    """Of the card's time; 0 if none was requested."""
    limit_percent: int = 100
    """Of the card's time; 100 if nothing limits it."""

    @property
    def key(self) -> tuple[str, str]:
        """Token and card."""
        return self.token.name, self.uuid


@dataclass(frozen=True, slots=True)
class UnmanagedProcess:
    """A process of a lease that computes on a card without the shim."""

    token: Token
    pid: int


@dataclass(frozen=True, slots=True)
class UsageSample:
    """Usage and violations at one moment."""

    usages: tuple[SliceUsage, ...] = ()
    cards: tuple[Card, ...] = ()
    readings: Mapping[str, Reading] = field(default_factory=dict)
    over_memory: tuple[SliceUsage, ...] = ()
    unmanaged: tuple[UnmanagedProcess, ...] = ()
    over_compute: tuple[SliceUsage, ...] = ()


class Usage:
    """Takes samples. running: returns the processes that have a context, as the driver names them."""

    def __init__(
        self,
        running: Callable[[], Sequence[GpuProcess]],
        files: LeaseFiles,
        busy_ns: BusyNs,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running, self._files = running, files
        self._busy_ns, self._proc, self._clock = busy_ns, proc, clock
        self._busy: Mapping[tuple[str, int], int] = {}
        self._charged: dict[tuple[str, str], int] = {}
        self._sampled_at = clock()
        self._memory_violations = violations.MemoryViolations()
        self._compute_violations = violations.ComputeViolations()

    def sample(
        self,
        tokens: Sequence[Token],
        names: Mapping[str, str],
        cards: tuple[Card, ...],
        readings: Mapping[str, Reading],
    ) -> UsageSample:
        """Take a sample. Takes as long as the driver and the disk take.

        Args:
            tokens: All tokens of the node.
            names: Containers by their runtime's IDs.
            cards: Copied into the sample, as are the readings.
            readings: By card UUID.
        """
        bound = [token for token in tokens if token.lease is not None]
        owned = self._processes(bound, names)
        seconds, shares = self._compute_shares()
        accounts = {token.name: self._account(token) for token in bound}
        charged = self._charged_shares(bound, accounts, seconds)
        usages = tuple(
            usage
            for token in bound
            for usage in _usages(
                token, owned.get(token.name, ()), shares, accounts[token.name], charged
            )
        )
        over_memory = self._memory_violations.observe(
            {usage.key: usage.driver_reported_bytes > self._allowance(usage) for usage in usages}
        )
        over_compute = self._compute_violations.observe(
            seconds,
            {
                # A driver that no longer reports a program means that it is idle.
                usage.key: (usage.compute or 0) - usage.limit_percent / 100
                for usage in usages
                if usage.limit_percent < 100
            },
        )
        return UsageSample(
            usages,
            cards,
            readings,
            tuple(usage for usage in usages if usage.key in over_memory),
            tuple(self._unmanaged(bound, owned)),
            tuple(usage for usage in usages if usage.key in over_compute),
        )

    def _allowance(self, usage: SliceUsage) -> int:
        context = self._files.contexts_mib.get(usage.uuid, 0) * MIB
        return violations.memory_allowance(usage.limit_bytes, context)

    def _processes(
        self, bound: Sequence[Token], names: Mapping[str, str]
    ) -> dict[str, list[GpuProcess]]:
        """Return the driver's processes by token. Those of an unknown container count as its pod's first."""
        owners = ProcessOwners(bound, names, self._proc)
        try:
            running = self._running()
        except DriverLost:
            running = ()
        owned: dict[str, list[GpuProcess]] = {}
        for process in running:
            for token in owners.tokens_of(process.pid)[:1]:
                owned.setdefault(token.name, []).append(process)
        return owned

    def _compute_shares(self) -> tuple[float, dict[tuple[str, int], float]]:
        """Return the seconds since the last sample, and the share of them that each process had."""
        now, busy = self._clock(), self._busy_ns()
        passed = now - self._sampled_at
        shares = {
            key: min(max(ns - self._busy.get(key, ns), 0) / (passed * 1e9), 1.0)
            for key, ns in busy.items()
            if passed > 0
        }
        self._sampled_at, self._busy = now, busy
        return passed, shares

    def _account(self, token: Token) -> account.Account:
        try:
            return account.read(self._files.slots(token.name))
        except (OSError, account.InvalidAccount):
            return account.Account(())

    def _charged_shares(
        self, bound: Sequence[Token], accounts: Mapping[str, account.Account], seconds: float
    ) -> dict[tuple[str, str], float]:
        """Return the share of each card's time since the last sample that each lease's programs report."""
        before = self._charged
        self._charged = {
            (token.name, piece.uuid): ns
            for token in bound
            if token.lease is not None
            for piece, ns in zip(token.lease.slices, accounts[token.name].charged_ns, strict=False)
        }
        return {
            key: max(ns - before[key], 0) / (seconds * 1e9)
            for key, ns in self._charged.items()
            if key in before and seconds > 0
        }

    def _unmanaged(
        self, bound: Sequence[Token], owned: Mapping[str, Sequence[GpuProcess]]
    ) -> list[UnmanagedProcess]:
        unmanaged = []
        for token in bound:
            assert token.lease is not None
            if token.lease.limits_mib:  # Its node does not isolate.
                continue
            try:
                shim = (Path(token.lease.library) / SHIM.name).stat().st_ino
            except OSError:
                continue
            for pid in sorted({process.pid for process in owned.get(token.name, ())}):
                if violations.has_shim(pid, shim, self._proc) is False:
                    unmanaged.append(UnmanagedProcess(token, pid))
        return unmanaged


def _usages(
    token: Token,
    owned: Sequence[GpuProcess],
    shares: Mapping[tuple[str, int], float],
    read: account.Account,
    charged: Mapping[tuple[str, str], float],
) -> list[SliceUsage]:
    assert token.lease is not None
    self_reported = read.memory_bytes if read.processes else ()
    usages = []
    for position, piece in enumerate(token.lease.slices):
        on_card = [process for process in owned if process.uuid == piece.uuid]
        reported = [
            shares[piece.uuid, process.pid]
            for process in on_card
            if (piece.uuid, process.pid) in shares
        ]
        usages.append(
            SliceUsage(
                token,
                piece.uuid,
                piece.memory_mib * MIB,
                token.lease.limit_mib(piece) * MIB,
                self_reported[position] if position < len(self_reported) else 0,
                sum(process.used_mib or 0 for process in on_card) * MIB,
                len({process.pid for process in on_card}),
                min(sum(reported), 1.0) if reported or not on_card else None,
                charged.get((token.name, piece.uuid)),
                piece.compute,
                token.lease.limit_percent(piece),
            )
        )
    return usages
