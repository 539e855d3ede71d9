"""Ends the processes of jobs, and no others, although the daemon may have the right to signal any process."""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from fenka import procfs
from fenka.workstation.broker import Broker
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import LeaseProcesses

KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless it waits for a device."""

POLL_S = 0.02
"""Between two checks whether the jobs have ended."""


@dataclass(slots=True)
class _Termination:
    """The termination of some jobs. kill_at: when SIGKILL is sent, of CLOCK_MONOTONIC."""

    kill_at: float
    task: asyncio.Task[bool] | None = None


@dataclass(frozen=True, slots=True)
class Terminator:
    """Sends signals to the processes of jobs."""

    broker: Broker
    processes: LeaseProcesses
    _underway: dict[tuple[str, ...], _Termination] = field(default_factory=dict)
    """By the jobs' ids. Requests wait for what is under way, so their number costs nothing."""

    async def terminate(self, jobs: Sequence[Job], grace_s: float) -> bool:
        """Send SIGTERM, and after the grace period SIGKILL. Return whether all jobs have ended.

        If they are being terminated already, the shorter grace period counts. A caller that goes away ends
        nothing of it.
        """
        key, kill_at = tuple(job.id for job in jobs), time.monotonic() + grace_s
        termination = self._underway.setdefault(key, _Termination(kill_at))
        termination.kill_at = min(termination.kill_at, kill_at)
        if termination.task is None:
            termination.task = asyncio.create_task(self._terminate(jobs, termination))
            termination.task.add_done_callback(lambda _: self._underway.pop(key, None))
        return await asyncio.shield(termination.task)

    async def _terminate(self, jobs: Sequence[Job], termination: _Termination) -> bool:
        await self._signal(jobs, signal.SIGTERM)
        while self.broker.present(jobs) and time.monotonic() < termination.kill_at:
            await asyncio.sleep(POLL_S)
        await self._signal(jobs, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self.broker.present(jobs) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return not self.broker.present(jobs)

    async def _signal(self, jobs: Sequence[Job], number: int) -> None:
        if self.broker.present(jobs):
            for pid, job in await self._running(jobs):
                procfs.send_signal(pid, number, partial(self.may_signal, job, pid))

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
