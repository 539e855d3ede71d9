"""What clients and the daemon say to each other: one JSON object a line over a Unix socket.

Strict and versioned: an unknown field is an error that names it, and the first line each way is a
Hello, so that a client and a daemon of different versions part with a sentence. The daemon knows who
asks from the socket's peer credentials, never from a message.
"""

from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from fenka import __version__
from fenka.core.errors import FenkaError
from fenka.isolation.control import ComputeMode

PROTOCOL = 5
"""Raised whenever a message changes."""

JobState = Literal["waiting", "starting", "running", "completing"]
Isolation = Literal["namespace", "cooperative"]
JobKind = Literal["run", "notebook"]


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages."""


class Hello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """First line, both ways; later versions may add fields to it."""

    protocol: int = PROTOCOL
    version: str = __version__


class SubmitJob(Message, tag="submit-job"):
    """A client wants a lease; answered by Waiting…, then Granted, GangGranted or Refused.

    job_id: the id of a request that waited when the daemon went away, or of the member of a gang that this
    process is to be; else empty.
    gpu_mem: memory per card, as typed; empty with whole cards.
    gpu_core: percent of each card's time, 0 for no limit; what that means says gpu_core_mode.
    cards: slices, each on a card of its own; or whole cards where `whole` is set.
    models: names of acceptable card models, empty for any.
    wait: queue if nothing is free.
    gang: so many leases, all at once; None for a single one.
    priority: the larger is served first.
    time_limit_s: seconds after which it is ended, whatever it does; None for never.
    allow_user_namespaces: its programs may make user namespaces of their own.
    """

    command: list[str]
    gpu_mem: str = ""
    gpu_core: int = 0
    gpu_core_mode: ComputeMode = "hard"
    cards: int = 1
    whole: bool = False
    models: list[str] = []
    name: str = ""
    kind: JobKind = "run"
    wait: bool = True
    directory: str = ""
    isolation: Isolation = "namespace"
    job_id: str = ""
    gang: int | None = None
    priority: int = 0
    time_limit_s: float | None = None
    allow_user_namespaces: bool = False


class ConfirmLease(Message, tag="confirm-lease"):
    """The client has entered its lease and is about to exec."""


class GetSnapshot(Message, tag="get-snapshot"):
    """Answered by Snapshot."""


class StopJob(Message, tag="stop-job"):
    """End the programs of a lease, or give up its place in the queue; answered by Done or Failure."""

    name: str
    grace_s: float = 10.0


class ResizeJob(Message, tag="resize-job"):
    """Change what a running job may have of its cards; answered by Done or Failure.

    gpu_mem: per card, as typed; empty leaves it. gpu_core: percent, 0 for no limit; None leaves it.
    gpu_core_mode: None leaves it.
    """

    name: str
    gpu_mem: str = ""
    gpu_core: int | None = None
    gpu_core_mode: ComputeMode | None = None


class Shutdown(Message, tag="shutdown"):
    """End the daemon; with leases held only if forced. Answered by Done or Failure."""

    force: bool = False


class JobQueued(Message, tag="job-queued"):
    """Where the request stands in the queue; position 1 is served next."""

    job_id: str
    name: str
    position: int
    length: int
    reason: str


class LeaseGranted(Message, tag="lease-granted"):
    """The slice, and what the client must bind and set to enter it.

    proxies: their directory. driver: the files they stand in for, by library. simulated: the node's, if any.
    """

    job_id: str
    name: str
    directory: str
    shim: str
    linker_cache: str
    library_dir: str
    hidden: list[str]
    uuids: list[str]
    proxies: str
    driver: dict[str, list[str]]
    simulated: str


class GangGranted(Message, tag="gang-granted"):
    """All slices of a gang. For each of these jobs the client starts a process, which asks for it by id."""

    name: str
    jobs: list[str]


class JobRejected(Message, tag="job-rejected"):
    """No lease: `final` if it can never be had, else it only was not free now."""

    reason: str
    final: bool


class Done(Message, tag="done"):
    """It was done."""

    text: str = ""


class Failure(Message, tag="failure"):
    """It was not done, and why."""

    reason: str


class SliceView(msgspec.Struct, frozen=True):
    """One slice as screens show it. Memory in MiB; used is None where the driver does not tell.
    compute: percent of the card's time, 0 = not limited; what that means says the mode."""

    card: int
    uuid: str
    memory_mib: int
    used_mib: int | None = None
    compute: int = 0
    compute_mode: ComputeMode = "hard"


class JobView(msgspec.Struct, frozen=True):
    """A lease, or a request that waits for one. Times are Unix seconds.

    A gang that waits is one, under its own name and id; its members are one each once they are granted.
    gang, rank, size: of a gang; rank is None while it waits. ends_at: when it is ended whatever it does.
    reserved: indices of the cards that are kept for it; starts_by: when they will do at the latest.
    used_s: what its user has had of cards, in card-seconds that decay.
    reason: why it waits, or why its slice is held after its end. offences: what it does beyond its limits.
    unreadable_pids: processes that may be in the lease and cannot be inspected; they keep it while they live.
    allow_user_namespaces: its programs may make user namespaces, in which they can undo its limits.
    """

    id: str
    name: str
    user: str
    uid: int
    pid: int
    kind: str
    state: JobState
    command: list[str]
    directory: str
    requested_at: float
    started_at: float | None
    isolation: Isolation
    summary: str
    whole: bool
    slices: list[SliceView] = []
    pids: list[int] = []
    position: int | None = None
    reason: str = ""
    priority: int = 0
    deadline: float | None = None
    gang: str = ""
    rank: int | None = None
    size: int = 1
    reserved: list[int] = []
    starts_by: float | None = None
    used_s: float = 0.0
    violations: list[str] = []
    unreadable_pids: list[int] = []
    allow_user_namespaces: bool = False


class ProcessView(msgspec.Struct, frozen=True):
    """A process that uses a card and is in no lease. used_mib: None where the driver does not tell."""

    card: int
    pid: int
    user: str
    program: str
    used_mib: int | None


class CardView(msgspec.Struct, frozen=True):
    """A card and what the driver reads on it now (None where it does not tell)."""

    index: int
    uuid: str
    model: str
    memory_mib: int
    healthy: bool
    context_mib: int | None
    leased_mib: int
    used_mib: int | None
    utilisation: int | None
    temperature_c: int | None
    power_w: float | None


class Snapshot(Message, tag="snapshot"):
    """All that the daemon knows."""

    version: str
    pid: int
    node: str
    address: str
    driver: str
    cuda: str
    simulated: bool
    library_dir: str
    policy: str
    unit_mib: int
    cards: list[CardView]
    jobs: list[JobView]
    unleased: list[ProcessView] = []


ToDaemon = SubmitJob | ConfirmLease | GetSnapshot | StopJob | ResizeJob | Shutdown
FromDaemon = JobQueued | LeaseGranted | GangGranted | JobRejected | Done | Failure | Snapshot

encode = msgspec.json.Encoder().encode
_requests = msgspec.json.Decoder(ToDaemon)
_answers = msgspec.json.Decoder(FromDaemon)
_hellos = msgspec.json.Decoder(Hello)


def decode_request(line: bytes) -> ToDaemon:
    """What a client says. Raises msgspec.MsgspecError."""
    return cast("ToDaemon", _decoded(_requests, line))


def decode_answer(line: bytes) -> FromDaemon:
    """What the daemon says. Raises msgspec.MsgspecError."""
    return cast("FromDaemon", _decoded(_answers, line))


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes) -> object:
    try:
        return decoder.decode(line)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise msgspec.DecodeError("it is not UTF-8") from None


def failure_reason(answer: FromDaemon) -> str:
    """Why the daemon did not do what was asked; also for an answer that does not fit the question."""
    return getattr(answer, "reason", "the daemon answered nonsense")


class ProtocolMismatch(FenkaError):
    """The other end speaks another version; the message says which and what to do."""


def check_hello(line: bytes, socket: Path) -> Hello:
    """The other end's Hello. Raises ProtocolMismatch."""
    try:
        hello = cast("Hello", _decoded(_hellos, line))
    except msgspec.MsgspecError:
        raise ProtocolMismatch(
            f"{socket} is not served by fenka: remove it, or name another directory "
            "in FENKA_RUNTIME"
        ) from None
    if hello.protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"the daemon at {socket} is fenka {hello.version}, this command is fenka {__version__}: "
            "use the same version for both, or stop that daemon with its own `fenka daemon --stop`"
        )
    return hello
