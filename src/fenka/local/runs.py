"""The directories of jobs in the background, of which programs of `fenka run` are described here.

    NAME/log, log-times, 0/log …   the last run; the numbered directories are a gang's members
    NAME/run                       its number
    NAME/end                       how it ended, by its keeper (jobs/exit_keeper.py)
    NAME/.runs/2/                  the same of run 2

Programs of the same user can write everything here, so it is checked when it is read.
"""

import contextlib
import os
import shutil
from datetime import datetime
from pathlib import Path

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.isolation.lease_files import decode_json, read_regular_file, with_file_name
from fenka.jobs.job_spec import NAME
from fenka.jobs.processes import JobNotStarted
from fenka.local.records import OWN, TRAININGS, TrainingRecord
from fenka.workstation import paths
from fenka.workstation.client import DaemonConnection, jobs_called
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import EndedJob, EndedJobs, GetEnded, describe_status

KEPT_RUNS = 10
"""Runs of one name whose logs are kept, the last included."""

MAX_RUN = 1_000_000_000

_OLDER = ".runs"
_MAX_BYTES = 4096
_KEPT = {"log", "log-times", "end"}


class RunEnd(msgspec.Struct, frozen=True):
    """How a run's program ended. status: its wait status. ended_at: Unix seconds."""

    status: int
    ended_at: float


_end_decoder = msgspec.json.Decoder(RunEnd)


# --- names ----------------------------------------------------------------------------------------------


def create_training_directory(runtime: Runtime, record: TrainingRecord) -> Path:
    """Return a new directory with this record. Raises what `free_place` does, and JobNotStarted for logs."""
    directory = free_place(runtime, record.spec.name)
    if (directory / "log").exists():
        raise JobNotStarted(
            f"a program called {record.spec.name} has left its log: delete it (fenka delete "
            f"{record.spec.name}) or choose another --name",
            INVALID_INPUT,
        )
    shutil.rmtree(directory, ignore_errors=True)

    try:
        return TRAININGS.create(record.spec.name, record, OWN)
    except OSError:
        if directory.exists():
            raise _taken(record.spec.name) from None
        raise


def free_place(runtime: Runtime, name: str) -> Path:
    """Return the place of a new job's directory, where an earlier job's may be.

    Raises JobNotStarted if a job of this name exists, because its log is being written, and if a training has
    left its records. Raises UnsafeDirectory if another user could replace the directory.
    """
    check_name_is_free(name)
    if jobs_called(runtime, name):
        raise JobNotStarted(
            f"a job called {name} already exists: choose another --name", INVALID_INPUT
        )
    jobs = paths.jobs_directory()
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = place_of(name)
    paths.check_parents(directory)
    return directory


def check_name_is_free(name: str) -> None:
    """Raise JobNotStarted if a training, also a finished one, has this name."""
    if TRAININGS.exists(name):
        raise _taken(name)


def _taken(name: str) -> JobNotStarted:
    return JobNotStarted(
        f"job {name} already exists on this machine: delete it (fenka delete {name}) or choose another "
        "--name",
        INVALID_INPUT,
    )


def place_of(name: str) -> Path:
    """Return the directory that a job has, or will have."""
    return paths.jobs_directory() / name


def create_job_directory(runtime: Runtime, name: str) -> tuple[Path, int]:
    """Return a directory for the log and files of a new run of this name, and the run's number.

    The logs of the earlier runs are kept in it. Raises what `free_place` does.
    """
    directory = free_place(runtime, name)
    number = 1
    if directory.exists():
        number = last_run(directory) + 1
        _archive(directory, number - 1)
    directory.mkdir(mode=0o700, exist_ok=True)
    with with_file_name(directory / "run"):
        (directory / "run").write_text(f"{number}\n")
    return directory, number


def last_run(directory: Path) -> int:
    """Return the number of the last run in a job's directory."""
    with contextlib.suppress(OSError, ValueError):
        return min(max(int(read_regular_file(directory / "run", _MAX_BYTES)), 1), MAX_RUN)
    return 1


def has_runs(name: str) -> bool:
    """Return whether a program that ran in the background has left a log under this name."""
    return bool(NAME.fullmatch(name)) and (place_of(name) / "log").exists()


def place_of_run(name: str, run: int) -> Path:
    """Return the directory that a run has, or had."""
    directory = place_of(name)
    return directory if run == last_run(directory) else directory / _OLDER / str(run)


def numbers(name: str) -> list[int]:
    """Return the numbers of the runs whose logs are kept."""
    directory = place_of(name)
    last = [last_run(directory)] if (directory / "log").exists() else []
    return [*_older(directory), *last]


def end_of(directory: Path) -> RunEnd | None:
    """Return how the run of this directory ended; None if that is not known."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return decode_json(_end_decoder, read_regular_file(directory / "end", _MAX_BYTES))
    return None


def ended(name: str = "", run: int = 0) -> EndedJobs:
    """Return what the daemon knows of ended jobs; of one name if it is given. Raises DaemonUnavailable.

    The exit codes that it could not see are those that this user's keepers have recorded.
    """
    with DaemonConnection(paths.current()) as connection:
        answer = connection.request(GetEnded(name, run), EndedJobs)
    return EndedJobs([*map(_with_own_status, answer.jobs)], answer.present)


def run_outcome(name: str, run: int) -> str:
    """Return a sentence about the end of this user's run; empty if it runs, or nothing is known."""
    jobs = list[EndedJob]()
    with contextlib.suppress(FenkaError, ConnectionError):
        answer = ended(name, run)
        if answer.present and run == last_run(place_of(name)):
            return ""
        jobs = [job for job in answer.jobs if job.uid == os.geteuid()]
    if jobs:
        job = next((job for job in jobs if job.status), jobs[0])
        at, why = job.ended_at, job.sentence
    elif end := end_of(place_of_run(name, run)):
        at, why = end.ended_at, describe_status(end.status)
    else:
        return ""
    moment = datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
    return f"{name} (run {run}) ended at {moment}: {why}"


def _with_own_status(job: EndedJob) -> EndedJob:
    if job.status is not None or job.uid != os.geteuid() or not job.run or job.gang:
        return job
    end = end_of(place_of_run(job.name, job.run)) if NAME.fullmatch(job.name) else None
    return msgspec.structs.replace(job, status=end.status) if end else job


def delete(name: str) -> None:
    """Remove all that is left of a program that has ended."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(place_of(name))


def _older(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory / _OLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 10)


def _archive(directory: Path, number: int) -> None:
    """Move the logs of the last run away, and remove its other files."""
    place = directory / _OLDER / str(number)
    # If the last attempt was killed meanwhile, a part is there already.
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in list(directory.iterdir()):
        if entry.name == _OLDER:
            continue
        if entry.name in _KEPT or (entry.name.isdecimal() and (entry / "log").exists()):
            entry.rename(place / entry.name)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    for old in _older(directory)[: -(KEPT_RUNS - 1)]:
        shutil.rmtree(directory / _OLDER / str(old), ignore_errors=True)
