"""Watches the processes of all jobs, and of the programs that started gangs."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from fenka.procfs import start_ticks
from fenka.workstation.job import Gang, Job
from fenka.workstation.process_scan import ProcessScan
from fenka.workstation.process_watch import ProcessWatch

__all__ = ["ExitListener", "JobWatches"]


class ExitListener(Protocol):
    """Hears when processes have ended."""

    def on_exit(self, job_id: str) -> None:
        """The last process of a job has ended."""

    def cancel(self, queue_id: str) -> None:
        """The process that requested a gang has ended."""


class JobWatches:
    """One watch for each job, and one for the starting process of each gang."""

    def __init__(self, scan: Callable[[], Awaitable[ProcessScan]]) -> None:
        self._scan = scan
        self._watches: dict[str, ProcessWatch] = {}
        """By job id; for a gang's starting process, by queue id."""

    def watch(self, jobs: Sequence[Job], listener: ExitListener) -> None:
        """Watch all jobs of one queue entry."""
        for job in jobs:
            if not job.gang or job.pid != job.gang.pid:
                self.watch_job(job, listener)
        gang, queue_id = (jobs[0].gang, jobs[0].queue_id) if jobs else (None, "")
        if gang and start_ticks(gang.pid) == gang.start_ticks:
            self._follow(queue_id, gang, partial(listener.cancel, queue_id))
        elif gang:
            listener.cancel(queue_id)

    def watch_job(self, job: Job, listener: ExitListener) -> None:
        """Watch one job, instead of the process that was watched for it before."""
        self._follow(job.id, job, partial(listener.on_exit, job.id))

    def keep(self, names: Collection[str]) -> None:
        """Stop all watches but those of these jobs and queue entries."""
        for name in self._watches.keys() - set(names):
            self._watches.pop(name).close()

    def close(self) -> None:
        """Stop all watches."""
        self.keep(())

    def _follow(self, name: str, process: Job | Gang, on_end: Callable[[], None]) -> None:
        if name in self._watches:
            self._watches.pop(name).close()
        self._watches[name] = ProcessWatch(
            name, process.pid, process.start_ticks, on_end, self._scan
        )
