"""Ends the processes of jobs, and no others, although the daemon may have the right to signal any process."""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fenka import procfs
from fenka.workstation.broker import Broker
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import LeaseProcesses

KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless it waits for a device."""

POLL_S = 0.02
"""Between two checks whether the jobs have ended."""


@dataclass(frozen=True, slots=True)
class Terminator:
    """Sends signals to the processes of jobs."""

    broker: Broker
    processes: LeaseProcesses

    async def terminate(self, jobs: Sequence[Job], grace_s: float) -> bool:
        """Send SIGTERM, and after the grace period SIGKILL. Return whether all jobs have ended."""
        for number, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S)):
            deadline = time.monotonic() + timeout_s
            for pid, job in await self._running(jobs):
                procfs.send_signal(pid, number, partial(self.may_signal, job, pid))
            while self.broker.present(jobs) and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
        return not self.broker.present(jobs)

    async def pids(self, jobs: Sequence[Job]) -> list[int]:
        """Return the processes of the jobs that still run."""
        return [pid for pid, _ in await self._running(jobs)]

    async def _running(self, jobs: Sequence[Job]) -> list[tuple[int, Job]]:
        scan = await self.processes.scan()
        return [
            (pid, job)
            for job in self.broker.present(jobs)
            for pid in sorted({job.pid, *scan.holders.get(job.id, [])})
            if self._belongs(job, pid)
        ]

    def may_signal(self, job: Job, pid: int) -> bool:
        """Return whether the process is the job's and its user's. Root's jobs may run as any user."""
        return self._belongs(job, pid) and job.uid in (0, procfs.real_uid(pid))

    def _belongs(self, job: Job, pid: int) -> bool:
        """Return whether the current process of this PID requested the job, or is in its lease."""
        requested = pid == job.pid and procfs.lives(pid, job.start_ticks)
        return requested or self.processes.lease_of(pid) == job.id
