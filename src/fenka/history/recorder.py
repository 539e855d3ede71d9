"""Charges a ledger as things change, and writes it with readings in a thread of its own.

Nothing here fails or waits for a disk: what cannot be written is kept, usage until it can be, readings not.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from fenka import procfs
from fenka.core.metering import Moment, Observation, UsageLedger, add, charges
from fenka.history.history_store import Batch, Figures, HistoryStore
from fenka.history.series import HistoryEvent, Holder

T = TypeVar("T")

MAX_EVENTS = 10_000
"""Events that wait for a disk; further ones are lost."""

Samples = Callable[[], tuple[Mapping[str, Figures], Mapping[str, Figures]]]
"""Returns the figures of programs by job id and of cards by UUID; called in the thread."""


class MachineTimes(NamedTuple):
    """A reading of this machine's clocks, as `Moment` has it."""

    at_us: int
    uptime_us: int
    boot: str

    @classmethod
    def read(cls) -> "MachineTimes":
        """Return what they show now."""
        uptime_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        return cls(time.time_ns() // 1000, uptime_us, procfs.boot_id())


class HistoryRecorder:
    """Records for one program, from its event loop."""

    def __init__(
        self, store: HistoryStore, times: Callable[[], MachineTimes] = MachineTimes.read
    ) -> None:
        self.observer = secrets.token_hex(8)
        """Distinguishes this program's observations from those of an earlier one."""
        self._store, self._times = store, times
        self._thread = ThreadPoolExecutor(1, "history")
        self._first: Observation | None = None
        self._last: Observation | None = None
        self._usage: UsageLedger = {}
        self._events: list[HistoryEvent] = []
        self._holders: dict[str, Holder] = {}

    @property
    def problem(self) -> str:
        """Why nothing is recorded, or what was lost, in a sentence; empty without a problem."""
        return self._store.problem

    def now(self) -> Moment:
        """Return the time of an observation that is made now."""
        return Moment(*self._times(), self.observer)

    def observe(self, observation: Observation, holders: Mapping[str, Holder]) -> None:
        """Charge the time since the last observation. holders: of all holdings, by id."""
        if self._last is None:
            self._first = observation
        else:
            add(self._usage, charges(self._last, observation))
        self._last = observation
        self._holders |= holders

    def add_event(self, event: HistoryEvent, holder: Holder | None = None) -> None:
        """Record an event. holder: the job that it is about, if it is about one."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
            if holder is not None:
                self._holders[holder.id] = holder

    async def write(self, at: int, samples: Samples = lambda: ({}, {})) -> None:
        """Write everything since the last time. at: Unix seconds."""
        usage, events, holders = self._usage, self._events, self._holders
        self._usage, self._events, self._holders = {}, [], {}
        first, last = self._first, self._last

        def write() -> bool:
            programs, cards = samples()
            everyone = tuple(holders.values())
            return self._store.write(
                Batch(at, everyone, programs, cards, events, usage, first, last)
            )

        written = False
        try:
            written = await self._call(write)
        finally:
            if not written:
                add(self._usage, usage.items())
                self._events = [*events, *self._events][:MAX_EVENTS]
                self._holders = holders | self._holders

    async def read(self, read: Callable[[HistoryStore], T]) -> T:
        """Return what a method of the store returns."""
        return await self._call(lambda: read(self._store))

    async def close(self, at: int, timeout_s: float) -> None:
        """Write the rest, for which a disk has so much time, and close the file."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.write(at)
                await self._call(self._store.close)
        except TimeoutError:
            pass
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
