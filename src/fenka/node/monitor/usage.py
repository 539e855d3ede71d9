"""Measures what leases use: by the driver, by the programs' own accounts, and which processes lack the shim.

Nothing that a tenant writes is trusted, and nothing of it can make this process grow. Files are read up to a
bounded size, and state is kept per lease and card only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.core.units import MIB
from fenka.hardware.nvml import DriverLost, GpuProcess, Reading
from fenka.isolation import account, driver_usage
from fenka.isolation.driver_usage import UnleasedMemory, UnleasedProgram, measure
from fenka.isolation.sandbox import SHIM
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.pod_processes import ProcessOwners
from fenka.node.lease.store import Lease
from fenka.procfs import process_name, start_ticks

BusyNs = Callable[[], Mapping[tuple[str, int], int]]
"""Nanoseconds that each process has had of a card so far, by card UUID and process ID."""


@dataclass(frozen=True, slots=True)
class SliceUsage:
    """One container's use of one card."""

    token: str
    lease: Lease
    piece: Slice
    self_reported_bytes: int
    driver_reported_bytes: int
    """0 where the driver reports no process's memory."""
    processes: int
    compute: float | None
    """Share of the card's time since the last sample, 0 to 1, by the driver; None if it reports none."""
    self_reported_compute: float | None = None
    """The same by the programs' account, which they need not keep where nothing limits them."""
    throttled_s: float | None = None
    """Time that its threads have waited because of the limit of compute, by the programs' account."""
    out_of_memory: int | None = None
    """How often its programs were refused memory, by their account."""

    @property
    def key(self) -> tuple[str, str]:
        """Token and card."""
        return self.token, self.piece.uuid

    @property
    def device(self) -> str:
        """UUID of its card or MIG instance, as the driver knows it."""
        return self.lease.device(self.piece)

    @property
    def card(self) -> str:
        """UUID of its card, or of the card that its instance is on."""
        return self.piece.card_uuid

    @property
    def requested_bytes(self) -> int:
        """The slice's memory; its limit as well, unless the node does not isolate."""
        return self.piece.memory_mib * MIB

    @property
    def requested_percent(self) -> int:
        """Return the part of the card's time that is reserved for it."""
        (reserved,) = self.lease.reserved([self.piece])
        return reserved.compute

    @property
    def limit_bytes(self) -> int:
        """The limit of its programs."""
        return self.lease.limit_mib(self.piece) * MIB

    @property
    def busy(self) -> float | None:
        """Share of the slice's time since the last sample, 0 to 1; None if the driver reports none.

        A weight reserves nothing, so such a slice's time is the card's.
        """
        if self.compute is None:
            return None
        reserved = 0 if self.lease.weighted else self.piece.compute
        return min(self.compute * 100 / (reserved or 100), 1.0)

    @property
    def limit_percent(self) -> int:
        """Of the card's time; 100 if nothing limits it."""
        return self.lease.limit_percent(self.piece)


@dataclass(frozen=True, slots=True)
class UnmanagedProcess:
    """A process of a lease that computes on a card without the shim."""

    token: str
    lease: Lease
    pid: int


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Usage and violations at one moment."""

    usages: tuple[SliceUsage, ...] = ()
    cards: tuple[Card, ...] = ()
    readings: Mapping[str, Reading] = field(default_factory=dict)
    over_memory: tuple[SliceUsage, ...] = ()
    unmanaged: tuple[UnmanagedProcess, ...] = ()
    over_compute: tuple[SliceUsage, ...] = ()
    unleased: Mapping[str, UnleasedMemory] = field(default_factory=dict)
    """Memory in use by no lease, by the UUIDs of cards that are not divided."""


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
        self._unattributed: dict[str, int] = {}
        """Memory of no process in the last sample, by card UUID."""
        self._memory_violations = driver_usage.MemoryViolations()
        self._compute_violations = driver_usage.ComputeViolations()

    def sample(
        self,
        leases: Mapping[str, Lease],
        names: Mapping[str, str],
        cards: tuple[Card, ...],
        readings: Mapping[str, Reading],
    ) -> NodeUsage:
        """Take a sample. Takes as long as the driver and the disk take.

        Args:
            leases: All leases of the node by token.
            names: Containers by their runtime's IDs.
            cards: Copied into the sample, as are the readings.
            readings: By card UUID.
        """
        owned, outside = self._processes(leases, names)
        seconds, shares = self._compute_shares()
        accounts = {token: self._account(token) for token in leases}
        charged = self._charged_shares(leases, accounts, seconds)
        usages = tuple(
            usage
            for token, lease in leases.items()
            for usage in _usages(
                token, lease, owned.get(token, ()), shares, accounts[token], charged
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
        return NodeUsage(
            usages,
            cards,
            readings,
            tuple(usage for usage in usages if usage.key in over_memory),
            tuple(self._unmanaged(leases, owned)),
            tuple(usage for usage in usages if usage.key in over_compute),
            self._measure_unleased(leases, cards, readings, owned, outside),
        )

    def _measure_unleased(
        self,
        leases: Mapping[str, Lease],
        cards: tuple[Card, ...],
        readings: Mapping[str, Reading],
        owned: Mapping[str, Sequence[GpuProcess]],
        outside: Sequence[GpuProcess] | None,
    ) -> dict[str, UnleasedMemory]:
        """Return what no lease uses. outside: processes in no lease, None if the driver is lost."""
        if outside is None:
            return {}
        slices_mib, measured = Counter[str](), dict[str, UnleasedMemory]()
        for lease in leases.values():
            for piece in lease.slices:
                slices_mib[lease.device(piece)] += piece.memory_mib
        leased = [process for processes in owned.values() for process in processes]
        for card in cards:
            if card.divided or card.uuid not in readings:
                continue
            now = measure(
                card.memory_mib,
                readings[card.uuid].used_mib,
                [process.used_mib for process in leased if process.uuid == card.uuid],
                slices_mib[card.uuid],
                [
                    UnleasedProgram(
                        process_name(process.pid, self._proc), process.used_mib, process.graphics
                    )
                    for process in outside
                    if process.uuid == card.uuid
                ],
            )
            # Readings and processes are of different moments: memory that is being freed is in one of them.
            before = self._unattributed.get(card.uuid, 0)
            self._unattributed[card.uuid] = now.unattributed_mib
            measured[card.uuid] = replace(now, unattributed_mib=min(before, now.unattributed_mib))
        return measured

    def _allowance(self, usage: SliceUsage) -> int:
        context = self._files.contexts_mib.get(usage.device, 0) * MIB
        return driver_usage.memory_allowance(usage.limit_bytes, context)

    def _processes(
        self, leases: Mapping[str, Lease], names: Mapping[str, str]
    ) -> tuple[dict[str, list[GpuProcess]], list[GpuProcess] | None]:
        """Return the driver's processes by token, and those in no lease.

        Those of an unknown container count as its pod's first. Without a driver the second is None.
        """
        owners = ProcessOwners(leases, names, self._proc)
        try:
            running = self._running()
        except DriverLost:
            return {}, None
        owned: dict[str, list[GpuProcess]] = {}
        outside = []
        for process in running:
            tokens = owners.tokens_of(process.pid)
            if tokens:
                owned.setdefault(tokens[0], []).append(process)
            elif start_ticks(process.pid, self._proc) is not None:  # It has not ended meanwhile.
                outside.append(process)
        return owned, outside

    def _compute_shares(self) -> tuple[float, dict[tuple[str, int], float]]:
        """Return the seconds since the last sample, and the share of them that each process had."""
        now, before = self._clock(), self._busy
        passed = now - self._sampled_at
        self._sampled_at, self._busy = now, self._busy_ns()
        shares = driver_usage.time_shares(self._busy, {**self._busy, **before}, passed)
        return passed, {key: min(share, 1.0) for key, share in shares.items()}

    def _account(self, token: str) -> account.Account:
        try:
            return account.read(self._files.slots(token))
        except (OSError, account.InvalidAccount):
            return account.Account(())

    def _charged_shares(
        self, leases: Mapping[str, Lease], accounts: Mapping[str, account.Account], seconds: float
    ) -> dict[tuple[str, str], float]:
        """Return the share of each card's time since the last sample that each lease's programs report."""
        before = self._charged
        self._charged = {
            (token, piece.uuid): ns
            for token, lease in leases.items()
            for piece, ns in zip(lease.slices, accounts[token].charged_ns, strict=False)
        }
        return driver_usage.time_shares(self._charged, before, seconds)

    def _unmanaged(
        self, leases: Mapping[str, Lease], owned: Mapping[str, Sequence[GpuProcess]]
    ) -> Iterator[UnmanagedProcess]:
        for token, lease in leases.items():
            if lease.limits_mib:  # Its node does not isolate.
                continue
            try:
                shim = (Path(lease.library) / SHIM.name).stat().st_ino
            except OSError:
                continue
            pids = (process.pid for process in owned.get(token, ()))
            for pid in driver_usage.without_shim(pids, shim, self._proc):
                yield UnmanagedProcess(token, lease, pid)


def _usages(
    token: str,
    lease: Lease,
    owned: Sequence[GpuProcess],
    shares: Mapping[tuple[str, int], float],
    content: account.Account,
    charged: Mapping[tuple[str, str], float],
) -> Iterator[SliceUsage]:
    self_reported = content.memory_bytes if content.processes else (0,) * len(lease.slices)
    for position, (piece, self_reported_bytes) in enumerate(
        zip(lease.slices, self_reported, strict=False)
    ):
        device = lease.device(piece)
        on_card = [process for process in owned if process.uuid == device]
        keys = [(device, process.pid) for process in on_card]
        reported = [shares[key] for key in keys if key in shares]
        yield SliceUsage(
            token,
            lease,
            piece,
            self_reported_bytes,
            sum(process.used_mib or 0 for process in on_card) * MIB,
            len(set(keys)),
            min(sum(reported), 1.0) if reported or not on_card else None,
            charged.get((token, piece.uuid)),
            *content.counts(position),
        )
