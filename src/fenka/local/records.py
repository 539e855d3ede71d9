"""The records on disk of this machine's trainings, services and notebooks.

Each has a directory until it is deleted. Programs of the same user can write everything in it, so a record is
checked when it is read. One that says that something runs is believed only while its supervisor lives.
"""

import contextlib
import ipaddress
import math
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.isolation.lease_files import decode_json, read_regular_file, write_atomically
from fenka.jobs import notebook as jupyter
from fenka.jobs.job_spec import NAME, JobSpec
from fenka.jobs.routing_table import ListenAddress
from fenka.jobs.service import PortName, ServiceSpec
from fenka.jobs.training import TrainingSpec
from fenka.procfs import boot_id
from fenka.views.workloads import JobStatus
from fenka.workstation import paths

T = TypeVar("T")

Record = TypeVar("Record", bound="Supervised")

OWN = ".fenka"
"""The directory of fenka's files in a training's directory, which is the program's working directory."""

MAX_RECORD_BYTES = 16 << 20
"""Of a record. One of 256 processes has 60 KB, and a command may have 2 MB."""

MAX_VERSIONS = 64

INTERRUPTED_REASON = "its supervisor has ended without a result, so its processes were ended"

ReplicaState = Literal["Pending", "Starting", "Ready", "Draining", "Ending", "Backoff"]
"""Pending: it waits for its lease. Starting: its program runs and does not answer yet. Draining: it gets no
new requests and finishes its own. Ending: its program has got SIGTERM. Backoff: it is started again soon."""


class RecordNotFound(FenkaError):
    """No training, service or notebook has this name, or no process of it."""


class UnreadableRecord(FenkaError):
    """A record cannot be read. created_at: when its directory was changed last, Unix seconds."""

    def __init__(self, kind: str, directory: Path, why: object, advice: str) -> None:
        name = directory.name
        super().__init__(f"the record of {kind} {name} is not understood ({why}): {advice}")
        self.name = name
        try:
            self.created_at = directory.stat().st_mtime
        except OSError:
            self.created_at = time.time()


@dataclass(frozen=True, slots=True)
class RecordStore(Generic[T]):
    """The records of one kind, each a file in a directory of its own. They are replaced atomically.

    Attributes:
        kind: What sentences call that which a record describes.
        home: Returns the directory of all directories.
        file: The file in each.
        type: What it is decoded to.
        check: Returns the record to believe of what was read under a name. Raises ValueError.
        list_hint: Where the user finds what there is.
        advice: What to do about a record that cannot be read, with {name} in it.
    """

    kind: str
    home: Callable[[], Path]
    file: str
    type: type[T]
    check: Callable[[T, str], T]
    list_hint: str = ""
    advice: str = ""

    def place_of(self, name: str) -> Path:
        """Return the directory that this name has, or will have."""
        return self.home() / name

    def exists(self, name: str) -> bool:
        """Return whether there is a record of this name, also one that cannot be read."""
        # One that this user may not see is another's, whose directory this cannot be.
        with contextlib.suppress(OSError):
            return bool(NAME.fullmatch(name)) and (self.place_of(name) / self.file).exists()
        return False

    def directory_of(self, name: str) -> Path:
        """Return the directory of a record. Raises RecordNotFound."""
        if not self.exists(name):
            raise RecordNotFound(
                f"{self.kind} {name[:80]} not found on this machine: {self.list_hint}"
            )
        return self.place_of(name)

    def names(self) -> list[str]:
        """Return the names of all records."""
        return [name for name in paths.directory_names(self.home) if self.exists(name)]

    def create(self, name: str, record: T, *directories: str) -> Path:
        """Create a directory that has its record, and empty directories, from the beginning.

        Raises OSError, also if it exists, UnsafeDirectory if another user could replace it.
        """
        directory = self.place_of(name)
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.check_parents(directory)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
        try:
            for own in directories:
                (new / own).mkdir(mode=0o700)
            self.save(new, record)
            new.rename(directory)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return directory

    def save(self, directory: Path, record: T) -> None:
        """Write a record. Raises OSError."""
        write_atomically(directory / self.file, msgspec.json.encode(record))

    def load(self, name: str) -> T:
        """Read a record. Raises RecordNotFound, UnreadableRecord."""
        directory = self.directory_of(name)
        try:
            content = read_regular_file(directory / self.file, MAX_RECORD_BYTES)
            return self.check(decode_json(msgspec.json.Decoder(self.type), content), name)
        except (OSError, msgspec.MsgspecError, InvalidRequest, ValueError, OverflowError) as why:
            # Another command may have removed it meanwhile.
            self.directory_of(name)
            raise UnreadableRecord(
                self.kind, directory, why, self.advice.format(name=name)
            ) from None
        except RecursionError:
            raise UnreadableRecord(
                self.kind, directory, "too deeply nested", self.advice.format(name=name)
            ) from None

    def load_all(self, only: str | None = None) -> tuple[list[T], list[UnreadableRecord]]:
        """Return all records, or that of one name, and the errors of those that cannot be read."""
        records, unreadable = list[T](), list[UnreadableRecord]()
        for name in self.names() if only is None else [only]:
            with contextlib.suppress(RecordNotFound):
                try:
                    records.append(self.load(name))
                except UnreadableRecord as why:
                    unreadable.append(why)
        return records, unreadable

    def remove(self, name: str) -> None:
        """Remove a directory with all that is in it. Raises OSError."""
        directory = self.place_of(name)
        while directory.exists():
            # Another command may be removing it, too.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)


class Supervised(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A record of a supervisor. boot, pid, start_ticks: its process, or its guard."""

    boot: str = ""
    pid: int = 0
    start_ticks: int = 0

    @property
    def supervised(self) -> bool:
        """Whether its supervisor lives. Raises OSError, OverflowError."""
        return self.boot == boot_id() and procfs.lives(self.pid, self.start_ticks)


def supervised_by_me(record: Record) -> Record:
    """Return the record with this process as the supervisor."""
    ticks = procfs.start_ticks(os.getpid()) or 0
    return msgspec.structs.replace(record, boot=boot_id(), pid=os.getpid(), start_ticks=ticks)


def outcome(code: int) -> str:
    """Return how a process ended, in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# --- trainings ----------------------------------------------------------------------------------------
class ProcessRecord(msgspec.Struct, forbid_unknown_fields=True):
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
    instances: list[ProcessRecord] = []
    version: Literal[1] = 1

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def starts_before(self) -> int:
        """How often its processes were started before this attempt."""
        return self.restarts + self.evictions

    @property
    def chief(self) -> ProcessRecord:
        """The process whose log is the training's."""
        return next((instance for instance in self.instances if instance.chief), self.instances[0])

    def instance(self, name: str) -> ProcessRecord | None:
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


def log_of(directory: Path, instance: str) -> Path:
    """Return the log of a training's process."""
    return directory / OWN / instance / "log"


def _check_training(record: TrainingRecord, name: str) -> TrainingRecord:
    """Return a training; one whose supervisor is gone has failed."""
    if record.spec.name != name or not record.instances:
        raise ValueError("it describes no job of this name")
    return record if record.finished or record.supervised else interrupted(record)


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


TRAININGS = RecordStore(
    "job",
    paths.jobs_directory,
    f"{OWN}/record.json",
    TrainingRecord,
    _check_training,
    "`fenka list` shows all",
    "remove it with `fenka delete {name}`",
)
"""A training's supervisor alone writes its record."""


# --- notebooks ----------------------------------------------------------------------------------------


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


def _check_notebook(record: NotebookRecord, name: str) -> NotebookRecord:
    record.spec.validate()
    if record.spec.name != name or not 0 < (record.idle_s or 1) < math.inf:
        raise ValueError("it describes another notebook")
    return record


NOTEBOOKS = RecordStore(
    "notebook",
    paths.jobs_directory,
    "notebook.json",
    NotebookRecord,
    _check_notebook,
    "it was never started",
    "start it by fenka notebook",
)
"""The options of notebooks, to start them again."""


# --- services -----------------------------------------------------------------------------------------


class VersionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version as submitted.

    Attributes:
        spec: What was submitted.
        revision: Replicas of another revision are replaced by new ones.
        created_at: Unix seconds.
        directory: The programs' working directory.
        environment: That of the command that submitted it.
        binds: Files and directories that programs see in another place, too.
        previous: The spec before its last update; None before the first one.
    """

    spec: ServiceSpec
    revision: int
    created_at: float
    directory: str
    environment: dict[str, str]
    binds: list[tuple[str, str]] = []
    previous: ServiceSpec | None = None


class ServiceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service.

    Attributes:
        uid: Its identity: a later service of the same name has another.
        address: Where the gateway listens.
        ports: The gateway's ports. Each replica has its own.
        versions: The versions; none if it is being deleted.
        weights: Shares of the requests by version. A version that is missing gets none.
    """

    uid: str
    address: str
    ports: dict[PortName, int]
    versions: list[VersionRecord]
    weights: dict[str, int]
    format: Literal[1] = 1

    def version(self, name: str) -> VersionRecord | None:
        """Return a version."""
        return next((version for version in self.versions if version.spec.version == name), None)

    def weight(self, version: str) -> int:
        """Return a version's share of the requests."""
        return self.weights.get(version, 0)


class ReplicaRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica. Times are Unix seconds.

    Attributes:
        name: Its name, stable over restarts.
        revision: That of its version when it was started first.
        lease: The name of its request in the daemon's queue, another one after each restart.
        pid: The process that supervises its program; 0 for none.
        program: Its program's process, and when that was started; zeros for none.
        ports: Where it listens, by the port's name.
        reason: Why it waits, or why it is started again.
    """

    name: str
    version: str
    revision: int
    state: ReplicaState
    created_at: float
    lease: str = ""
    pid: int = 0
    program: tuple[int, int] = (0, 0)
    restarts: int = 0
    ports: dict[PortName, ListenAddress] = {}
    reason: str = ""


class ServiceStatus(Supervised, forbid_unknown_fields=True):
    """The state of a service.

    Attributes:
        uid: The service's identity.
        wanted: The number of replicas by version.
        metrics: Where the gateway shows its metrics; empty while there is none.
        gateway_pid: The gateway's process; 0 while there is none.
        requests_per_s: Answered requests a second by version; empty while they are not known.
        waiting_requests: Requests that wait for a replica; None if that is not known.
        reason: Why something is not as wanted.
        page_host: The name by which browsers reach its ports, of this start; empty if it has none.
    """

    uid: str
    wanted: dict[str, int] = msgspec.field(default_factory=dict)
    replicas: list[ReplicaRecord] = msgspec.field(default_factory=list)
    metrics: str = ""
    gateway_pid: int = 0
    requests_per_s: dict[str, float] = msgspec.field(default_factory=dict)
    waiting_requests: int | None = None
    reason: str = ""
    page_host: str = ""


def _check_service(record: ServiceRecord, name: str) -> ServiceRecord:
    """Return a service. Raises InvalidRequest, ValueError if it is none of this name."""
    versions = [version.spec.version for version in record.versions]
    ipaddress.ip_address(record.address)
    if not 0 <= len(set(versions)) == len(versions) <= MAX_VERSIONS:
        raise ValueError("its versions are not different, or too many")
    if not all(0 <= weight <= 100 for weight in record.weights.values()):
        raise ValueError("a weight is not from 0 to 100")
    if not record.ports or not all(0 < port < 65536 for port in record.ports.values()):
        raise ValueError("its ports are no ports")
    for version in record.versions:
        version.spec.validate()
        if version.spec.name != name:
            raise ValueError("it describes another service")
    return record


def _check_status(status: ServiceStatus, _name: str) -> ServiceStatus:
    if not status.supervised:
        raise ValueError("its supervisor does not live")
    return status


SERVICES = RecordStore(
    "service",
    paths.services_directory,
    "service.json",
    ServiceRecord,
    _check_service,
    "`fenka serve list` shows all",
    "remove it with `fenka serve delete {name}`",
)
"""The services that the user wants: commands change them, one at a time."""

STATUSES = RecordStore(
    "service", paths.services_directory, "status.json", ServiceStatus, _check_status
)
"""The state of services: a service's supervisor alone writes it."""


def service_status(name: str) -> ServiceStatus | None:
    """Return what there is; None if its supervisor does not live, and if the file cannot be read."""
    with contextlib.suppress(RecordNotFound, UnreadableRecord):
        return STATUSES.load(name)
    return None


def replicas_directory(directory: Path) -> Path:
    """Return the directory of all replicas' logs."""
    return directory / "replicas"


def replica_log(directory: Path, replica: str) -> Path:
    """Return the log of a service's replica."""
    return replicas_directory(directory) / replica / "log"


def socket_path(directory: Path) -> str:
    """Return a path for a replica's Unix socket that none has had."""
    return str(sockets_directory(directory) / secrets.token_hex(4))


def sockets_directory(directory: Path) -> Path:
    """Return the directory of all replicas' Unix sockets, which only their user may enter."""
    return directory / "sockets"
