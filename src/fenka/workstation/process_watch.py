"""Watches the processes of one lease until the last has ended."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable

from fenka.procfs import start_ticks
from fenka.workstation.process_scan import ProcessScan

__all__ = ["ProcessWatch"]

RESCAN_DELAY_S = 1.0
"""After an incomplete scan, during which the lease is kept."""


class ProcessWatch:
    """Calls back once, when the last process of a lease has ended."""

    def __init__(
        self,
        lease: str,
        holder: int,
        ticks: int,
        on_end: Callable[[], None],
        scan: Callable[[], Awaitable[ProcessScan]],
    ) -> None:
        """Start watching.

        Args:
            lease: The lease.
            holder: The process that requested it, which counts before it has entered the lease.
            ticks: When that process started; another process with its PID does not count.
            on_end: Called at most once.
            scan: Scans all processes.
        """
        self._lease, self._on_end, self._scan = lease, on_end, scan
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, int] = {}
        self._rescan_task: asyncio.Task[None] | None = None
        followed = self._follow([holder])
        if followed and start_ticks(holder) != ticks:
            self.close()
            followed = False
        if not followed:
            self._start_rescan()

    def close(self) -> None:
        """Stop watching."""
        if self._rescan_task:
            self._rescan_task.cancel()
        for descriptor in self._watched.values():
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._watched.clear()

    def _follow(self, pids: Iterable[int]) -> bool:
        for pid in pids:
            if pid in self._watched:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._watched[pid] = descriptor
            self._loop.add_reader(descriptor, self._on_process_end, pid)
        return bool(self._watched)

    def _on_process_end(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        if not self._watched:
            self._start_rescan()

    def _start_rescan(self) -> None:
        self._rescan_task = self._loop.create_task(self._rescan())

    async def _rescan(self) -> None:
        while True:
            scan = await self._scan()
            if self._follow(scan.pids(self._lease)):
                return
            # The processes found have ended since, and may have left children.
            if scan.complete and not scan.pids(self._lease):
                break
            await asyncio.sleep(0 if scan.complete else RESCAN_DELAY_S)
        self._rescan_task = None
        self._on_end()
