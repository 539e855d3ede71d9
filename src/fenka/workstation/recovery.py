"""Takes over what an earlier daemon left, which may have been killed at any moment."""

from fenka.core.ledger import Conflict
from fenka.procfs import start_ticks
from fenka.workstation import files
from fenka.workstation.controller import Controller
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import LeaseProcesses
from fenka.workstation.paths import Runtime


def recover(runtime: Runtime, processes: LeaseProcesses, controller: Controller) -> None:
    """Take over recorded jobs whose processes live, and remove all other leases.

    Raises:
        InvalidState: Programs hold slices that cannot be accounted for on these cards.
        OSError: A file or process could not be read.
    """
    recorded = files.load_jobs(runtime)
    jobs = _living(recorded, processes)
    _remove_other_leases(runtime, processes, recorded, jobs)
    try:
        controller.restore(jobs)
    except Conflict as why:
        names = ", ".join(job.name for job in jobs if job.placement)
        raise files.InvalidState(
            f"programs still hold slices of other cards than these ({names}; {why}): start the "
            "daemon as it was started for them, or end them first"
        ) from None


def _living(recorded: list[Job], processes: LeaseProcesses) -> list[Job]:
    scan = processes.recover(recorded)
    return [
        job
        for job in recorded
        if start_ticks(job.pid) == job.start_ticks
        or scan.pids(job.id)
        or not scan.complete
        or job.retained
    ]


def _remove_other_leases(
    runtime: Runtime, processes: LeaseProcesses, recorded: list[Job], kept: list[Job]
) -> None:
    known, keep = {job.id for job in recorded}, {job.id for job in kept}
    for directory in runtime.leases.iterdir():
        lease = directory.name
        if lease in keep:
            continue
        if lease not in known and (holders := processes.unrecorded_holders(lease)):
            raise files.InvalidState(
                f"processes {holders} hold a slice that {runtime.state} does not record: end them first"
            )
        files.remove_lease(directory)
