"""Notebooks of this machine: what they were started with, to start them again, and how they are shown.

The record is in the job's directory, which its user can write. A notebook's files are in its root directory.
"""

import contextlib
import os
from dataclasses import replace

from fenka.core.errors import INVALID_INPUT
from fenka.core.request import InvalidRequest
from fenka.formats.quantities import InvalidSize
from fenka.hardware.peer_credentials import user_name
from fenka.jobs import notebook as jupyter
from fenka.jobs.notebook import LOOPBACK
from fenka.jobs.processes import JobNotStarted
from fenka.local.records import NOTEBOOKS, NotebookRecord, RecordNotFound, UnreadableRecord
from fenka.local.views import card_uses, requested_cards
from fenka.views.workloads import JobProcess, JobStatus, TrainingJob
from fenka.workstation import paths, protocol
from fenka.workstation.client import jobs_called, known_snapshot, own_jobs, stop_jobs


def load_stopped(name: str) -> NotebookRecord:
    """Return the record of a notebook that does not run.

    Raises RecordNotFound, UnreadableRecord, JobNotStarted if it runs.
    """
    NOTEBOOKS.directory_of(name)
    if jobs_called(paths.current(), name):
        raise JobNotStarted(f"notebook {name} runs or waits already: see fenka ps", INVALID_INPUT)
    return NOTEBOOKS.load(name)


# --- screens --------------------------------------------------------------------------------------------


def jobs(name: str | None = None) -> list[TrainingJob]:
    """Return all notebooks, or the one with this name, as screens show them.

    A notebook whose record cannot be read is shown as failed, so that it can be deleted.
    """
    snapshot, user = known_snapshot(), user_name(os.geteuid())
    leases = {job.name: job for job in own_jobs(snapshot)}
    shown = []
    for notebook in NOTEBOOKS.names() if name is None else filter(NOTEBOOKS.exists, [name]):
        # Another command may be deleting it.
        with contextlib.suppress(FileNotFoundError, RecordNotFound):
            shown.append(_job(notebook, leases.get(notebook), snapshot, user))
    return shown


def delete(name: str) -> None:
    """End a notebook, if it runs, and remove its records; its files stay. Raises RequestFailed, OSError."""
    if jobs_called(paths.current(), name):
        stop_jobs(paths.current(), [name])
    NOTEBOOKS.remove(name)


def _job(
    name: str, lease: protocol.JobView | None, snapshot: protocol.Snapshot | None, user: str
) -> TrainingJob:
    """Return one notebook. Raises FileNotFoundError, RecordNotFound."""
    file = (NOTEBOOKS.place_of(name) / NOTEBOOKS.file).stat()
    status: JobStatus = "STOPPED"
    if lease:
        status = "PENDING" if lease.state == "waiting" else "RUNNING"
    job = TrainingJob(
        name,
        namespace=user,
        uid=f"{file.st_ino:x}-{file.st_mtime_ns:x}",
        status=status,
        trainer="notebook",
        created=file.st_mtime,
    )
    try:
        record = NOTEBOOKS.load(name)
        if not lease or not snapshot:
            return job
        requested = requested_cards(record.spec.gpu, snapshot)
    except (UnreadableRecord, InvalidRequest, InvalidSize) as why:
        return replace(job, status="FAILED", note=str(why))
    return replace(
        job,
        instances=(_instance(name, lease, requested, snapshot),),
        priority=str(record.spec.priority or ""),
        position=lease.position,
        why=lease.reason,
        address=jupyter.url(NOTEBOOKS.place_of(name)) or "" if status == "RUNNING" else "",
    )


def _instance(
    name: str, lease: protocol.JobView, requested: float, snapshot: protocol.Snapshot
) -> JobProcess:
    runs = bool(lease.slices)
    return JobProcess(
        f"{name}-notebook-0",
        name,
        "notebook",
        0,
        chief=True,
        status="Running" if runs else "Pending",
        phase="Running" if runs else "Pending",
        created=lease.started_at or lease.requested_at,
        node=snapshot.node if runs else "",
        node_address=snapshot.address if runs else "",
        address=LOOPBACK if runs else "",
        requested=requested,
        allocated=requested if runs else 0,
        cards=card_uses(lease, snapshot),
    )
