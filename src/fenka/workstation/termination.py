"""Ends the processes of jobs."""

import asyncio
import signal
import time
from collections.abc import Sequence
from functools import partial

from fenka.procfs import start_ticks
from fenka.workstation.broker import Broker
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import LeaseProcesses
from fenka.workstation.signals import send_signal

__all__ = ["Terminator"]

KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless it waits for a device."""

POLL_S = 0.02
"""Between two checks whether the jobs have ended."""


class Terminator:
    """Sends signals to the processes of jobs, and to no others."""

    def __init__(self, broker: Broker, processes: LeaseProcesses) -> None:
        self._broker, self._processes = broker, processes

    async def terminate(self, jobs: Sequence[Job], grace_s: float) -> bool:
        """Send SIGTERM, and after the grace period SIGKILL. Return whether all jobs have ended."""
        for number, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S)):
            deadline = time.monotonic() + timeout_s
            for pid, job in await self._running(jobs):
                send_signal(pid, number, job.uid, partial(self._belongs, job))
            while self._broker.present(jobs) and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
        return not self._broker.present(jobs)

    async def pids(self, jobs: Sequence[Job]) -> list[int]:
        """Return the processes of the jobs that still run."""
        return [pid for pid, _ in await self._running(jobs)]

    async def _running(self, jobs: Sequence[Job]) -> list[tuple[int, Job]]:
        scan = await self._processes.scan()
        return [
            (pid, job)
            for job in self._broker.present(jobs)
            for pid in sorted({job.pid, *scan.holders.get(job.id, [])})
            if self._belongs(job, pid)
        ]

    def _belongs(self, job: Job, pid: int) -> bool:
        """Return whether the current process of this PID requested the job, or is in its lease."""
        requested = pid == job.pid and start_ticks(pid) == job.start_ticks
        return requested or self._processes.lease_of(pid) == job.id
