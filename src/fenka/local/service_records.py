"""The directories and records of this machine's services.

`service.json` is what the user wants: commands change it, one at a time. `status.json` is what there is: the
supervisor alone writes it. Both are replaced atomically. Programs of the same user can write everything here.
So records are checked when they are read, and a status is believed only while its supervisor lives.
"""

import contextlib
import fcntl
import ipaddress
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.isolation.lease_files import decode_json, read_regular_file, write_atomically
from fenka.jobs.routing_table import ListenAddress
from fenka.jobs.service import PortName, ServiceSpec
from fenka.jobs.workload import NAME
from fenka.local.records import Supervised, create_at_once
from fenka.workstation import paths

MAX_RECORD_BYTES = 16 << 20

MAX_VERSIONS = 64

ReplicaState = Literal["Pending", "Starting", "Ready", "Draining", "Ending", "Backoff"]
"""Pending: it waits for its lease. Starting: its program runs and does not answer yet. Draining: it gets no
new requests and finishes its own. Ending: its program has got SIGTERM. Backoff: it is started again soon."""

_Decoded = TypeVar("_Decoded")


class ServiceNotFound(FenkaError):
    """No service has this name."""


class InvalidService(FenkaError):
    """The record of a service cannot be read."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(
            f"the record of service {name} is not understood ({why}): remove it with "
            f"`fenka serve delete {name}`"
        )
        self.name = name


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
    """What there is of a service.

    Attributes:
        uid: The service's identity.
        wanted: The number of replicas by version.
        metrics: Where the gateway shows its metrics; empty while there is none.
        gateway_pid: The gateway's process; 0 while there is none.
        reason: Why something is not as wanted.
    """

    uid: str
    wanted: dict[str, int] = msgspec.field(default_factory=dict)
    replicas: list[ReplicaRecord] = msgspec.field(default_factory=list)
    metrics: str = ""
    gateway_pid: int = 0
    reason: str = ""


# --- directories ----------------------------------------------------------------------------------------


def directory_of(name: str) -> Path:
    """Return the directory of a service. Raises ServiceNotFound."""
    if not exists(name):
        raise ServiceNotFound(
            f"service {name[:80]} not found on this machine: `fenka serve list` shows all"
        )
    return place_of(name)


def place_of(name: str) -> Path:
    """Return the directory that a service has, or will have."""
    return paths.services_directory() / name


def exists(name: str) -> bool:
    """Return whether there is a service of this name, also one whose record cannot be read."""
    return bool(NAME.fullmatch(name)) and (place_of(name) / "service.json").exists()


def names() -> list[str]:
    """Return the names of all services."""
    try:
        return sorted(name for name in os.listdir(paths.services_directory()) if exists(name))
    except (FileNotFoundError, NotADirectoryError, paths.UnsafeDirectory):
        return []


def log_of(directory: Path, replica: str) -> Path:
    """Return the log of a replica."""
    return replicas_directory(directory) / replica / "log"


def replicas_directory(directory: Path) -> Path:
    """Return the directory of all replicas' logs."""
    return directory / "replicas"


def sockets_directory(directory: Path) -> Path:
    """Return the directory of all replicas' Unix sockets, which only their user may enter."""
    return directory / "sockets"


def socket_path(directory: Path) -> str:
    """Return a path for a replica's Unix socket that none has had."""
    return str(sockets_directory(directory) / secrets.token_hex(4))


def create(name: str, record: ServiceRecord) -> Path:
    """Create the directory of a service. Raises OSError, UnsafeDirectory."""
    directory = place_of(name)
    paths.check_parents(directory)
    # What is left of one that was not removed completely.
    shutil.rmtree(directory, ignore_errors=True)

    def fill(new: Path) -> None:
        replicas_directory(new).mkdir(mode=0o700)
        save(new, record)

    create_at_once(directory, fill)
    return directory


@contextlib.contextmanager
def changing() -> Iterator[int]:
    """Let no other command change a service while the block runs, and a child has the descriptor.

    Raises OSError.
    """
    services = paths.services_directory()
    services.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.check_parents(services / "any")
    descriptor = os.open(services, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


# --- records --------------------------------------------------------------------------------------------


def save(directory: Path, record: ServiceRecord) -> None:
    """Write what the user wants. Raises OSError."""
    write_atomically(directory / "service.json", msgspec.json.encode(record))


def load(name: str) -> ServiceRecord:
    """Read what the user wants. Raises ServiceNotFound, InvalidService."""
    directory = directory_of(name)
    record = _read(directory / "service.json", name, ServiceRecord)
    try:
        _check(record, name)
    except (InvalidRequest, ValueError, RecursionError) as why:
        raise InvalidService(name, why) from None
    return record


def _check(record: ServiceRecord, name: str) -> None:
    """Raise InvalidRequest or ValueError if a record does not describe a service of this name."""
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


def save_status(directory: Path, status: ServiceStatus) -> None:
    """Write what there is. Raises OSError."""
    write_atomically(directory / "status.json", msgspec.json.encode(status))


def load_status(name: str) -> ServiceStatus | None:
    """Read what there is; None if its supervisor does not live, and if the file cannot be read."""
    with contextlib.suppress(InvalidService, OSError, OverflowError):
        status = _read(place_of(name) / "status.json", name, ServiceStatus)
        return status if status.supervised else None
    return None


def _read(path: Path, name: str, kind: type[_Decoded]) -> _Decoded:
    try:
        content = read_regular_file(path, MAX_RECORD_BYTES)
        return decode_json(msgspec.json.Decoder(kind), content)
    except (OSError, msgspec.MsgspecError) as why:
        raise InvalidService(name, why) from None
