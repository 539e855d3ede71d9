"""What leases use, every few seconds: by their own account, by the driver's, and who gets round the limit.

Nothing that a tenant writes is trusted or makes this process larger: files are read in bounded pieces, and
only what leases and cards there are is remembered.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.cards import Card
from fenka.hardware.nvml import DriverLost, GpuProcess, Reading
from fenka.isolation import account
from fenka.node import cheating, processes
from fenka.node.leases import Leases
from fenka.node.store import Token

MIB = 1 << 20

BusyNs = Callable[[], Mapping[tuple[str, int], int]]
"""Nanoseconds that each process has had of a card so far, by card UUID and process id."""


@dataclass(frozen=True, slots=True)
class Use:
    """Of one container on one card."""

    token: Token
    uuid: str
    booked_bytes: int
    """What its pod asked for."""
    limit_bytes: int
    """What it may hold: the same, unless its node does not isolate."""
    held_bytes: int
    """As its programs say."""
    used_bytes: int
    """As the driver says; 0 where it names no process's memory."""
    processes: int
    compute: float | None
    """Share of the card's time since the last look, 0 to 1; None where nobody says."""


@dataclass(frozen=True, slots=True)
class Unshimmed:
    """A process of a lease that computes on a card without the shim."""

    token: Token
    pid: int


@dataclass(frozen=True, slots=True)
class Look:
    """One look at everything."""

    uses: tuple[Use, ...] = ()
    cards: tuple[Card, ...] = ()
    readings: Mapping[str, Reading] = field(default_factory=dict)
    over: tuple[Use, ...] = ()
    unshimmed: tuple[Unshimmed, ...] = ()


class Usage:
    """Looks, one after the other. running: processes that have a context, as the driver names them."""

    def __init__(
        self,
        running: Callable[[], Sequence[GpuProcess]],
        leases: Leases,
        contexts_mib: Mapping[str, int],
        busy_ns: BusyNs,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running, self._leases, self._contexts_mib = running, leases, contexts_mib
        self._busy_ns, self._proc, self._clock = busy_ns, proc, clock
        self._busy: Mapping[tuple[str, int], int] = {}
        self._at = clock()
        self._over = cheating.OverLimit()

    def look(
        self,
        tokens: Sequence[Token],
        names: Mapping[str, str],
        cards: tuple[Card, ...],
        readings: Mapping[str, Reading],
    ) -> Look:
        """Takes as long as the driver and the disk take. names: containers by the id of their runtime."""
        bound = [token for token in tokens if token.lease is not None]
        owned = self._owned(bound, names)
        shares = self._shares()
        uses = tuple(use for token in bound for use in self._uses(token, owned, shares))
        excess = {
            (use.token.name, use.uuid): use.used_bytes
            > cheating.allowance(use.limit_bytes, self._contexts_mib.get(use.uuid, 0) * MIB)
            for use in uses
        }
        accused = self._over.observe(excess)
        return Look(
            uses,
            cards,
            readings,
            tuple(use for use in uses if (use.token.name, use.uuid) in accused),
            tuple(self._without_shim(bound, owned)),
        )

    def _owned(
        self, bound: Sequence[Token], names: Mapping[str, str]
    ) -> dict[str, list[GpuProcess]]:
        """The driver's processes by token. A container that nobody names is its pod's first."""
        of_pod: dict[str, list[Token]] = {}
        for token in bound:
            assert token.lease is not None
            of_pod.setdefault(token.lease.uid, []).append(token)
        try:
            running = self._running()
        except DriverLost:
            running = ()
        owned: dict[str, list[GpuProcess]] = {}
        for process in running:
            uid, container = processes.place_of(process.pid, self._proc)
            candidates = of_pod.get(uid, [])
            named = [
                it for it in candidates if it.lease and it.lease.container == names.get(container)
            ]
            for token in (named or candidates)[:1]:
                owned.setdefault(token.name, []).append(process)
        return owned

    def _shares(self) -> dict[tuple[str, int], float]:
        now, busy = self._clock(), self._busy_ns()
        passed = (now - self._at) * 1e9
        shares = {
            key: min(max(ns - self._busy.get(key, ns), 0) / passed, 1.0)
            for key, ns in busy.items()
            if passed > 0
        }
        self._at, self._busy = now, busy
        return shares

    def _uses(
        self,
        token: Token,
        owned: Mapping[str, Sequence[GpuProcess]],
        shares: Mapping[tuple[str, int], float],
    ) -> list[Use]:
        assert token.lease is not None
        try:
            held = account.read(self._leases.slots(token.name)).memory_bytes
        except (OSError, account.BadAccount):
            held = ()
        uses = []
        for position, piece in enumerate(token.lease.slices):
            mine = [it for it in owned.get(token.name, ()) if it.uuid == piece.uuid]
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
                )
            )
        return uses

    def _without_shim(
        self, bound: Sequence[Token], owned: Mapping[str, Sequence[GpuProcess]]
    ) -> list[Unshimmed]:
        found = []
        for token in bound:
            assert token.lease is not None
            if token.lease.limits_mib:  # its node does not isolate
                continue
            for pid in sorted({it.pid for it in owned.get(token.name, ())}):
                library = Path(token.lease.library)
                if cheating.has_shim(pid, library, self._proc) is False:
                    found.append(Unshimmed(token, pid))
        return found
