"""Makes one snapshot for all who watch: after each change of a job, else each second.

While nobody watches none is made.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec

from fenka.core.errors import FenkaError
from fenka.workstation.protocol import MachineSnapshot

PERIOD_S = 1.0

PAUSE_S = 0.2
"""At least between two snapshots, however often jobs change."""


class SnapshotFeed:
    """The snapshots of one daemon. make: takes one."""

    def __init__(self, make: Callable[[], Awaitable[MachineSnapshot]]) -> None:
        self._make = make
        self._changed = asyncio.Event()
        self._revision = 0
        self._latest: MachineSnapshot | None = None
        self._made_at = -PERIOD_S
        self._next: asyncio.Task[MachineSnapshot] | None = None

    def on_change(self) -> None:
        """A job has changed."""
        self._changed.set()

    async def after(self, revision: int) -> MachineSnapshot:
        """Return the first snapshot of a later revision. Raises what `make` raises."""
        if self._latest is not None and self._revision > revision and self._due_in() > 0:
            return self._latest
        if self._next is None:
            self._next = asyncio.create_task(self._make_next())
            self._next.add_done_callback(self._made)
        return await asyncio.shield(self._next)

    def _due_in(self) -> float:
        """Return in how many seconds the next snapshot is made if nothing changes."""
        return self._made_at + PERIOD_S - time.monotonic()

    async def _make_next(self) -> MachineSnapshot:
        await asyncio.sleep(self._made_at + PAUSE_S - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(self._due_in(), 0)):
                await self._changed.wait()
        self._changed.clear()
        snapshot = await self._make()
        self._revision, self._made_at = self._revision + 1, time.monotonic()
        self._latest = msgspec.structs.replace(snapshot, revision=self._revision)
        return self._latest

    def _made(self, task: asyncio.Task[MachineSnapshot]) -> None:
        self._next = None
        if not task.cancelled() and isinstance(task.exception(), FenkaError):
            # All who watch get it. If all of them have gone, nobody takes it.
            self._made_at = time.monotonic() - PERIOD_S + PAUSE_S
