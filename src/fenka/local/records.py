"""The directories of jobs in the background, and the records of trainings in them.

A training's directory is kept until it is deleted, with the code, each process's log and the record. Its
supervisor alone writes the record, atomically. Any process may have been killed at any time, and programs of
the same user can write everything here. So a record is checked when it is read, and one that says that the
training runs is believed only while its supervisor lives.

The directories of programs in the background: the last run of a name, and its earlier ones.

    NAME/log, log-times, 0/log …   the last run; the numbered directories are a gang's members
    NAME/run                       its number
    NAME/end                       how it ended, by its keeper (jobs/exit_keeper.py)
    NAME/.runs/2/                  the same of run 2

Programs of the same user can write everything here, so it is checked when it is read.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeGuard, TypeVar

import msgspec

from fenka import procfs
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.isolation.lease_files import decode_json, read_regular_file, write_atomically
from fenka.jobs.job_spec import NAME
from fenka.jobs.processes import JobNotStarted
from fenka.jobs.training import TrainingSpec
from fenka.procfs import boot_id
from fenka.views.workloads import JobStatus
from fenka.workstation import paths
from fenka.workstation.client import Connection, jobs_called
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import EndedJob, EndedJobs, GetEnded, describe_status

Record = TypeVar("Record", bound="Supervised")

OWN = ".fenka"
"""The directory of fenka's files in a training's directory, which is the program's working directory."""

MAX_RECORD_BYTES = 16 << 20
"""Of a record. One of 256 processes has 60 KB, and a command may have 2 MB."""

INTERRUPTED_REASON = "its supervisor has ended without a result, so its processes were ended"


class JobNotFound(FenkaError):
    """No training has this name."""


class InvalidRecord(FenkaError):
    """A training's record cannot be read. created_at: when its directory was changed last, Unix seconds."""

    def __init__(self, directory: Path, why: object) -> None:
        name = directory.name
        super().__init__(
            f"the record of job {name} is not understood ({why}): remove it with `fenka delete {name}`"
        )
        self.name = name
        try:
            self.created_at = directory.stat().st_mtime
        except OSError:
            self.created_at = time.time()


class InstanceRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A process of a training. Times are Unix seconds.

    lease: its rank among the processes with cards, which is that of its lease; None without cards.
    requested: its cards, slices as shares of one; None until it has a lease for the first time.
    pid, start_ticks: its process in this attempt; 0 before it has started.
    exit_code: None while it has not ended; negative for a signal.
    ended_with_job: it was ended because the training had succeeded or failed.
    """

    name: str
    role: str
    index: int
    chief: bool
    lease: int | None = None
    requested: float | None = None
    pid: int = 0
    start_ticks: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    ended_with_job: bool = False


class Supervised(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a supervisor records. boot, pid, start_ticks: its process, or its guard."""

    boot: str = ""
    pid: int = 0
    start_ticks: int = 0

    @property
    def supervised(self) -> bool:
        """Whether its supervisor lives. Raises OSError."""
        return self.boot == boot_id() and procfs.lives(self.pid, self.start_ticks)


class TrainingRecord(Supervised, forbid_unknown_fields=True):
    """A training. Times are Unix seconds.

    uid: its identity: a later training of the same name has another.
    directory: the working directory.
    reason: why it is pending or has failed; empty if nothing is known.
    exit_code: that of the training; None before its end.
    restarts: how often its processes were started again after a failure.
    evictions: how often they were evicted and started again.
    node, address: this machine, as screens show it.
    binds: files and directories that programs see in another place, too.
    """

    uid: str
    spec: TrainingSpec
    directory: str
    created_at: float
    node: str
    address: str
    status: JobStatus = "PENDING"
    reason: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    restarts: int = 0
    evictions: int = 0
    tensorboard: str = ""
    binds: list[tuple[str, str]] = []
    instances: list[InstanceRecord] = []
    version: Literal[1] = 1

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status in ("SUCCEEDED", "FAILED")

    @property
    def starts_before(self) -> int:
        """How often its processes were started before this attempt."""
        return self.restarts + self.evictions

    @property
    def chief(self) -> InstanceRecord:
        """The process whose log is the training's."""
        return next((instance for instance in self.instances if instance.chief), self.instances[0])

    def instance(self, name: str) -> InstanceRecord | None:
        """Return the process of this name or with this lease; the chief if the name is empty."""
        if not name:
            return self.chief
        lease = name.removeprefix(f"{self.spec.name}/")
        return next(
            (
                instance
                for instance in self.instances
                if name == instance.name
                or (instance.lease is not None and lease == str(instance.lease))
            ),
            None,
        )


def supervised_by_me(record: Record) -> Record:
    """Return the record with this process as the supervisor."""
    ticks = procfs.start_ticks(os.getpid()) or 0
    return msgspec.structs.replace(record, boot=boot_id(), pid=os.getpid(), start_ticks=ticks)


# --- directories --------------------------------------------------------------------------------------


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

    # With its record it appears at once, so that nobody takes it for the rest of a finished job.
    def fill(new: Path) -> None:
        (new / OWN).mkdir(mode=0o700)
        save(new, record)

    try:
        create_at_once(directory, fill)
    except OSError:
        if directory.exists():
            raise _taken(record.spec.name) from None
        raise
    return directory


def create_at_once(directory: Path, fill: Callable[[Path], None]) -> None:
    """Create a directory that has its content from the beginning. Raises OSError, also if it exists."""
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
    try:
        fill(new)
        new.rename(directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
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
    if exists(name):
        raise _taken(name)


def _taken(name: str) -> JobNotStarted:
    return JobNotStarted(
        f"job {name} already exists on this machine: delete it (fenka delete {name}) or choose another "
        "--name",
        INVALID_INPUT,
    )


def directory_of(name: str) -> Path:
    """Return the directory of a training. Raises JobNotFound."""
    if not exists(name):
        raise JobNotFound(f"job {name[:80]} not found on this machine: `fenka list` shows all")
    return place_of(name)


def place_of(name: str) -> Path:
    """Return the directory that a training has, or will have."""
    return paths.jobs_directory() / name


def log_of(directory: Path, instance: str) -> Path:
    """Return the log of a process."""
    return directory / OWN / instance / "log"


def outcome(code: int) -> str:
    """Return how a process ended, in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def exists(name: str) -> bool:
    """Return whether a training has left its records under this name."""
    if not NAME.fullmatch(name):
        return False
    # A record that this user may not read is another's, whose directory this cannot be.
    with contextlib.suppress(OSError):
        return (place_of(name) / OWN / "record.json").exists()
    return False


# --- records ------------------------------------------------------------------------------------------


def save(directory: Path, record: TrainingRecord) -> None:
    """Write a record. Raises OSError."""
    write_atomically(directory / OWN / "record.json", msgspec.json.encode(record))


def load(directory: Path) -> TrainingRecord:
    """Read a record; one whose supervisor is gone has failed. Raises InvalidRecord."""
    path = directory / OWN / "record.json"
    try:
        record = msgspec.json.decode(read_regular_file(path, MAX_RECORD_BYTES), type=TrainingRecord)
        valid = record.spec.name == directory.name and record.instances
        alive = record.finished or record.supervised
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
        raise InvalidRecord(directory, why) from None
    if not valid:
        raise InvalidRecord(directory, "it describes no job of this name")
    return record if alive else interrupted(record)


def interrupted(record: TrainingRecord) -> TrainingRecord:
    """Return the record of a training whose supervisor has ended without a result.

    Its processes have been killed, those that had started.
    """
    started = record.status == "RUNNING" or record.starts_before
    reason = INTERRUPTED_REASON if started else "it was interrupted before it had started"
    instances = [
        instance
        if instance.exit_code is not None
        else msgspec.structs.replace(
            instance, exit_code=-signal.SIGKILL, ended_with_job=instance.started_at is None
        )
        for instance in record.instances
    ]
    return msgspec.structs.replace(record, status="FAILED", reason=reason, instances=instances)


def load_all(only: str | None = None) -> Iterator[TrainingRecord | InvalidRecord]:
    """Yield all records or that of one name, newest first, then the errors of those that cannot be read."""
    names = [name for name in (job_names() if only is None else [only]) if exists(name)]
    loaded = [_try(place_of(name)) for name in names]
    yield from sorted(filter(_is_record, loaded), key=lambda record: -record.created_at)
    yield from (error for error in loaded if isinstance(error, InvalidRecord))


def _is_record(loaded: TrainingRecord | InvalidRecord) -> TypeGuard[TrainingRecord]:
    return isinstance(loaded, TrainingRecord)


def job_names() -> list[str]:
    """Return the names of all jobs that have a directory, trainings and others."""
    try:
        return sorted(os.listdir(paths.jobs_directory()))
    except (FileNotFoundError, paths.UnsafeDirectory):
        return []


def _try(directory: Path) -> TrainingRecord | InvalidRecord:
    try:
        return load(directory)
    except InvalidRecord as why:
        return why


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


def create_job_directory(runtime: Runtime, name: str) -> tuple[Path, int]:
    """Return a directory for the log and files of a new run of this name, and the run's number.

    The logs of the earlier runs are kept in it. Raises what `records.free_place` does.
    """
    directory = free_place(runtime, name)
    number = 1
    if directory.exists():
        number = last_run(directory) + 1
        _archive(directory, number - 1)
    directory.mkdir(mode=0o700, exist_ok=True)
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
    with Connection(paths.current()) as connection:
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
