"""Notebooks of this machine: what they were started with, to start them again, and how they are shown.

The record is in the job's directory, which its user can write. A notebook's files are in its root directory.
"""

import contextlib
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.request import InvalidRequest
from fenka.formats.quantities import InvalidSize
from fenka.hardware.peer_credentials import user_name
from fenka.isolation.lease_files import read_regular_file, write_atomically
from fenka.jobs import notebook as jupyter
from fenka.jobs.job_spec import NAME, JobSpec
from fenka.jobs.notebook import LOOPBACK
from fenka.jobs.processes import JobNotStarted
from fenka.local.records import JobNotFound, job_names, place_of
from fenka.local.views import card_uses, requested_cards
from fenka.views.workloads import Instance, JobStatus, TrainingJob
from fenka.workstation import paths, protocol
from fenka.workstation.client import jobs_called, known_snapshot, own_jobs, stop_jobs

MAX_RECORD_BYTES = 1 << 20


class NotebookRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A notebook.

    Attributes:
        spec: What it gets of the cards; its command is not the server's.
        root: The directory that it shows.
        hashed_password: As Jupyter checks it; empty for a random token in the URL.
        idle_s: It ends after so many seconds without use of its slice; None to run indefinitely.
        reach: Where it listens.
    """

    spec: JobSpec
    root: str
    hashed_password: str = ""
    idle_s: float | None = None
    reach: jupyter.Reach = jupyter.Reach()
    version: Literal[1] = 1


class InvalidNotebook(FenkaError):
    """A notebook's record cannot be read."""


def save(record: NotebookRecord) -> None:
    """Write the record of a notebook whose directory exists. Raises OSError."""
    write_atomically(_file(record.spec.name), msgspec.json.encode(record))


def exists(name: str) -> bool:
    """Return whether a notebook of this name was started on this machine."""
    return bool(NAME.fullmatch(name)) and _file(name).exists()


def load_stopped(name: str) -> NotebookRecord:
    """Return the record of a notebook that does not run.

    Raises JobNotFound, InvalidNotebook, JobNotStarted if it runs, OSError.
    """
    if not exists(name):
        raise JobNotFound(f"notebook {name[:80]} not found on this machine: it was never started")
    if jobs_called(paths.current(), name):
        raise JobNotStarted(f"notebook {name} runs or waits already: see fenka ps", INVALID_INPUT)
    return _load(name)


def _load(name: str) -> NotebookRecord:
    """Read a record. Raises InvalidNotebook, OSError."""
    try:
        data = read_regular_file(_file(name), MAX_RECORD_BYTES)
        record = msgspec.json.decode(data, type=NotebookRecord)
        record.spec.validate()
        usable = record.spec.name == name and 0 < (record.idle_s or 1) < math.inf
    except (msgspec.MsgspecError, InvalidRequest, UnicodeDecodeError, RecursionError) as why:
        raise InvalidNotebook(_invalid(name, why)) from None
    if not usable:
        raise InvalidNotebook(_invalid(name, "it describes another notebook"))
    return record


def _invalid(name: str, why: object) -> str:
    return f"the record of notebook {name} is invalid ({why}): start it by fenka notebook"


def _file(name: str) -> Path:
    return place_of(name) / "notebook.json"


# --- screens --------------------------------------------------------------------------------------------


def jobs(name: str | None = None) -> list[TrainingJob]:
    """Return all notebooks, or the one with this name, as screens show them.

    A notebook whose record cannot be read is shown as failed, so that it can be deleted.
    """
    snapshot, user = known_snapshot(), user_name(os.geteuid())
    leases = {job.name: job for job in own_jobs(snapshot)}
    shown = []
    for each in job_names() if name is None else [name]:
        # Another command may be deleting it.
        with contextlib.suppress(FileNotFoundError):
            if exists(each):
                shown.append(_job(each, leases.get(each), snapshot, user))
    return shown


def delete(name: str) -> None:
    """End a notebook, if it runs, and remove its records; its files stay. Raises RequestFailed, OSError."""
    if jobs_called(paths.current(), name):
        stop_jobs(paths.current(), [name])
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(place_of(name))


def _job(
    name: str, lease: protocol.JobView | None, snapshot: protocol.Snapshot | None, user: str
) -> TrainingJob:
    """Return one notebook. Raises FileNotFoundError."""
    file = _file(name).stat()
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
        record = _load(name)
        if not lease or not snapshot:
            return job
        requested = requested_cards(record.spec.gpu, snapshot)
    except (InvalidNotebook, InvalidRequest, InvalidSize, OSError) as why:
        return replace(job, status="FAILED", note=str(why))
    return replace(
        job,
        instances=(_instance(name, lease, requested, snapshot),),
        priority=str(record.spec.priority or ""),
        position=lease.position,
        why=lease.reason,
        address=jupyter.url(place_of(name)) or "" if status == "RUNNING" else "",
    )


def _instance(
    name: str, lease: protocol.JobView, requested: float, snapshot: protocol.Snapshot
) -> Instance:
    runs = bool(lease.slices)
    return Instance(
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
