"""Ends the processes of jobs, and no others, although the daemon may have the right to signal any process."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fenka.procfs import lives, real_uid
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
                send_signal(pid, number, job.uid, partial(self._belongs, job))
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

    def _belongs(self, job: Job, pid: int) -> bool:
        """Return whether the current process of this PID requested the job, or is in its lease."""
        requested = pid == job.pid and lives(pid, job.start_ticks)
        return requested or self.processes.lease_of(pid) == job.id


def send_signal(pid: int, number: int, uid: int, belongs: Callable[[int], bool]) -> None:
    """Send a signal to a process, unless it has ended or is not the job's.

    Args:
        pid: The process.
        number: The signal.
        uid: The job's user. Processes of root's jobs may run as any user.
        belongs: Returns whether the current process of a PID is the job's.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The descriptor is older than these answers. If another process has taken the PID in between, the
        # descriptor's process has ended, and the kernel sends nothing.
        if belongs(pid) and uid in (0, real_uid(pid)):
            signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(descriptor)
