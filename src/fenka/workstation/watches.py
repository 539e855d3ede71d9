"""Watches the processes of all jobs, and of the programs that started gangs."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fenka.procfs import exit_status, lives
from fenka.workstation.job import Gang, Job
from fenka.workstation.process_scan import ProcessScan

MAX_WATCHED = 16
"""Processes of one lease that are watched at a time: users may start any number, and descriptors are few."""

RESCAN_DELAY_S = 1.0
"""After an incomplete scan, during which the lease is kept."""


@dataclass(slots=True)
class JobWatches:
    """One watch for each job, and one for the starting process of each gang.

    Attributes:
        scan: Scans all processes.
        on_exit: Called with the id of a job whose last process has ended.
        on_gang_end: Called with the queue id of a gang whose starting process has ended.
        on_status: Called with the id of a job and the wait status of the process that requested it.
    """

    scan: Callable[[], Awaitable[ProcessScan]]
    on_exit: Callable[[str], None]
    on_gang_end: Callable[[str], None]
    on_status: Callable[[str, int], None]
    _watches: dict[str, "ProcessWatch"] = field(default_factory=dict)
    """By job id; for a gang's starting process, by queue id."""

    def watch(self, jobs: Sequence[Job]) -> None:
        """Watch all jobs of one queue entry."""
        for job in jobs:
            if not job.gang or job.pid != job.gang.pid:
                self.watch_job(job)
        gang = jobs[0].gang if jobs else None
        if gang and lives(gang.pid, gang.start_ticks):
            self._follow(gang.id, gang, self.on_gang_end, lambda _: None)
        elif gang:
            self.on_gang_end(gang.id)

    def watch_job(self, job: Job) -> None:
        """Watch one job, instead of the process that was watched for it before."""
        self._follow(job.id, job, self.on_exit, partial(self.on_status, job.id))

    def keep(self, names: Collection[str]) -> None:
        """Stop all watches but those of these jobs and queue entries."""
        for name in self._watches.keys() - set(names):
            self._watches.pop(name).close()

    def _follow(
        self,
        name: str,
        process: Job | Gang,
        on_end: Callable[[str], None],
        on_status: Callable[[int], None],
    ) -> None:
        if name in self._watches:
            self._watches.pop(name).close()
        self._watches[name] = ProcessWatch(
            name, (process.pid, process.start_ticks), partial(on_end, name), on_status, self.scan
        )


class ProcessWatch:
    """Calls back once, when the last process of a lease has ended."""

    def __init__(
        self,
        lease: str,
        holder: tuple[int, int],
        on_end: Callable[[], None],
        on_status: Callable[[int], None],
        scan: Callable[[], Awaitable[ProcessScan]],
    ) -> None:
        """Start watching.

        Args:
            lease: The lease.
            holder: The process that requested it, which counts before it has entered the lease, and when it
                started: another process with its PID does not count.
            on_end: Called at most once.
            on_status: Called with the holder's wait status when it has ended, if the kernel tells it.
            scan: Scans all processes.
        """
        self._lease, self._on_end, self._scan = lease, on_end, scan
        self._holder, self._on_status = holder, on_status
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, int] = {}
        self._rescan_task: asyncio.Task[None] | None = None
        self._follow([holder[0]])
        if not lives(*holder):
            self._report_status()
            self.close()
        if not self._watched:
            self._start_rescan()

    def close(self) -> None:
        """Stop watching."""
        if self._rescan_task:
            self._rescan_task.cancel()
        for pid in list(self._watched):
            self._unfollow(pid)

    def _follow(self, pids: Iterable[int]) -> None:
        """Watch processes that have not ended. Raises OSError."""
        for pid in pids:
            if pid in self._watched:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._watched[pid] = descriptor
            self._loop.add_reader(descriptor, self._on_process_end, pid)

    def _unfollow(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _report_status(self) -> None:
        pid, ticks = self._holder
        if pid in self._watched:
            status = exit_status(self._watched[pid], pid, ticks)
            if status is not None:
                self._on_status(status)

    def _on_process_end(self, pid: int) -> None:
        if pid == self._holder[0]:
            self._report_status()
        self._unfollow(pid)
        if not self._watched:
            self._start_rescan()

    def _start_rescan(self) -> None:
        self._rescan_task = self._loop.create_task(self._rescan())

    async def _rescan(self) -> None:
        while True:
            scan = await self._scan()
            try:
                self._follow(scan.pids(self._lease)[:MAX_WATCHED])
            except OSError:  # for instance, no descriptor is left
                scan = ProcessScan(scan.holders, scan.unreadable, complete=False)
            if self._watched:
                return
            # The processes found have ended since, and may have left children.
            if scan.complete and not scan.pids(self._lease):
                break
            await asyncio.sleep(0 if scan.complete else RESCAN_DELAY_S)
        self._rescan_task = None
        self._on_end()
