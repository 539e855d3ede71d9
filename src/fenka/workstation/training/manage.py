"""What users do with trainings of this machine besides submitting them: look, follow, stop, delete."""

import contextlib
import os
import shutil
import time
from pathlib import Path

from fenka.core.errors import FAILURE
from fenka.hardware.peer_credentials import user_name
from fenka.jobs.training import TrainingSpec
from fenka.views.jobs import JobEvent, TrainingJob
from fenka.workstation import paths, records
from fenka.workstation.client import DaemonUnavailable, jobs_called, known_snapshot, stop_jobs
from fenka.workstation.ending import end_process, end_writers
from fenka.workstation.paths import UnsafeDirectory
from fenka.workstation.records import InvalidRecord, JobNotFound, TrainingRecord
from fenka.workstation.training import code
from fenka.workstation.training.view import training_job, unreadable_job


def jobs(name: str | None = None) -> list[TrainingJob]:
    """Return all trainings, or the one with this name, the newest first.

    A training whose record cannot be read is shown as failed, so that it can be deleted.
    """
    snapshot, user = known_snapshot(), user_name(os.geteuid())
    return [
        unreadable_job(loaded, user)
        if isinstance(loaded, InvalidRecord)
        else training_job(loaded, snapshot, user)
        for loaded in records.load_all(name)
    ]


def record(name: str) -> TrainingRecord:
    """Return a training's record. Raises JobNotFound, InvalidRecord."""
    return records.load(records.directory_of(name))


# --- logs -----------------------------------------------------------------------------------------------


def log_file(name: str, instance: str = "", container: str = "") -> Path:
    """Return the log of a process: of the chief if none is named. It may not exist yet.

    Args:
        name: The training.
        instance: The process's name, or that of its lease.
        container: `init-code` for what git printed.

    Raises:
        JobNotFound: There is no such training or process.
        InvalidRecord: Its record cannot be read.
    """
    directory, training = records.directory_of(name), record(name)
    process = training.instance(instance)
    if process is None:
        names = ", ".join(each.name for each in training.instances)
        raise JobNotFound(f"job {name} has no instance {instance[:80]}: its instances are {names}")
    cloning = not training.started_at and records.log_of(directory, code.LOG).exists()
    if container == code.LOG or (cloning and not container):
        return records.log_of(directory, code.LOG)
    if container:
        raise JobNotFound(
            f"{process.name} has no container {container[:80]}: only {code.LOG} has a log of its own"
        )
    return records.log_of(directory, process.name)


def events(name: str) -> list[JobEvent]:
    """Return what the record tells of a training's past, the oldest first. Raises InvalidRecord."""
    training = record(name)
    source = f"job/{name}"
    told = [JobEvent(source, "Normal", training.created_at, "Submitted", "waits for its leases")]
    waits = [job for job in jobs(name) if job.status == "PENDING" and job.why]
    told += [JobEvent(source, "Warning", time.time(), "Waiting", job.why) for job in waits]
    if training.started_at:
        told.append(JobEvent(source, "Normal", training.started_at, "Started", "all processes run"))
    for each in training.instances:
        if each.exit_code is not None and each.ended_at and not each.ended_with_job:
            kind = "Warning" if each.exit_code else "Normal"
            text = f"ended with {records.outcome(each.exit_code)}"
            told.append(JobEvent(f"instance/{each.name}", kind, each.ended_at, "Ended", text))
    if training.restarts:
        count = f"{training.restarts} of {training.spec.retry} restarts are used"
        at = max(each.started_at or training.created_at for each in training.instances)
        told.append(JobEvent(source, "Warning", at, "Restarted", count))
    if training.evictions:
        text = f"evicted {training.evictions} times for requests of higher priority"
        at = max(each.started_at or training.created_at for each in training.instances)
        told.append(JobEvent(source, "Normal", at, "Evicted", text))
    if training.status == "FAILED":
        at = training.ended_at or training.created_at
        told.append(JobEvent(source, "Warning", at, "Failed", training.reason))
    return sorted(told, key=lambda event: event.at)


def exit_code(name: str) -> int:
    """Return the exit code of a training that has ended. Raises JobNotFound, InvalidRecord."""
    code = record(name).exit_code
    return FAILURE if code is None else code


# --- the end --------------------------------------------------------------------------------------------


def runs(name: str) -> bool:
    """Return whether a training's processes run now, or its record cannot be read."""
    try:
        return record(name).status == "RUNNING"
    except InvalidRecord:
        return True


def stop(name: str) -> None:
    """End a training; its records stay. Raises JobNotFound, InvalidRecord, JobNotEnded."""
    training = record(name)
    if not training.finished:
        end_process(training.pid, lambda: training.supervised, name, training.spec.grace_s)


def delete(name: str) -> None:
    """End a training, if it runs, and remove all that is left of it.

    Raises JobNotFound, JobNotEnded, RequestFailed, OSError.
    """
    directory = records.directory_of(name)
    try:
        stop(name)
    except InvalidRecord:
        end_writers(directory / records.OWN / "log", name, TrainingSpec().grace_s)
    _release_leases(name)
    while directory.exists():
        # Another command may be deleting it, too.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)


def _release_leases(name: str) -> None:
    """Have the daemon end what is left in the training's leases. Raises RequestFailed."""
    with contextlib.suppress(DaemonUnavailable, UnsafeDirectory):
        runtime = paths.current()
        if jobs_called(runtime, name):
            stop_jobs(runtime, [name])
