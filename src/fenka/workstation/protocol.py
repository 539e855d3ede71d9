"""The messages between clients and the daemon: one JSON object a line over a Unix socket.

The protocol is strict and versioned. An unknown field is an error that names it. The first line each way is a
Hello, so that a client and a daemon of different versions report the mismatch. The daemon takes the client's
identity from the socket's peer credentials, never from a message.

Ended jobs: what is kept of one, and the sentence about it.

The daemon keeps these records (`history.py`), and commands show them. Names, commands and figures come from
users, so they are bounded before they are kept.
"""

import os
import signal
from pathlib import Path
from typing import Literal, cast

import msgspec

from fenka import __version__
from fenka.build import build_id
from fenka.core.errors import FenkaError
from fenka.core.request import ComputeMode
from fenka.formats.mig_parted import CardTarget
from fenka.history.series import FigureSeries, HistoryEvent, UsageGroup, UsageRecord
from fenka.isolation.lease_files import decode_json
from fenka.isolation.sandbox import LeaseMounts
from fenka.jobs.job_spec import Isolation, JobSpec
from fenka.views.board import WhatIf, WhatIfAnswer
from fenka.views.mig_rows import MigCardView

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""They end the daemon in order. A client blocks them while it starts one."""

GRANT_TTL_S = 30.0
"""Until an unconfirmed grant expires. A client takes milliseconds; the rest covers a machine that swaps."""

MAX_COMMAND_CHARACTERS = 256
"""As much of a command is kept after its end, for people to recognise it."""

EndCause = Literal[
    "exit", "stopped", "cancelled", "time-limit", "evicted", "shutdown", "unobserved"
]
"""exit: by itself, or by a signal that is not fenka's. cancelled: the process that requested it has ended.
shutdown: its daemon ended all jobs. unobserved: it ended while no daemon ran."""


class EndedJob(msgspec.Struct, frozen=True):
    """A job that has ended. Times are Unix seconds.

    Attributes:
        run: Its number among the runs of this name; 0 if it left no log.
        restarted: Whether the machine's restart or power loss ended it.
        gang, rank, size: The gang's name, the member's number, and the number of members.
        started_at: None if its program was never started.
        status: Its program's wait status, as os.waitstatus_to_exitcode takes it; None if it is not known.
        stopped_by: The user who stopped it, if one did.
        lost_card: Index of a card of it that was unhealthy at its end, or lost; None without one.
        refused: How often memory beyond its slice was refused.
        peak_mib: The most memory that it held of each of its cards, by its own account.
    """

    id: str
    name: str
    user: str
    uid: int
    kind: str
    run: int
    command: list[str]
    summary: str
    requested_at: float
    started_at: float | None
    ended_at: float
    status: int | None = None
    cause: EndCause = "exit"
    stopped_by: str = ""
    lost_card: int | None = None
    refused: int = 0
    cards: list[int] = []
    peak_mib: list[int] = []
    gang: str = ""
    rank: int = 0
    size: int = 1
    restarted: bool = False

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, 128 + the number of a signal that ended it; None if it is not known."""
        return None if self.status is None else exit_code(self.status)

    @property
    def waited_s(self) -> float:
        """Seconds that it waited for its slice."""
        return max((self.started_at or self.ended_at) - self.requested_at, 0)

    @property
    def ran_s(self) -> float | None:
        """Seconds that it held its slice; None if its program was never started."""
        return None if self.started_at is None else max(self.ended_at - self.started_at, 0)

    @property
    def sentence(self) -> str:
        """How it ended and why."""
        return "; ".join(filter(None, [self._outcome(), self._cause(), *self._circumstances()]))

    def _outcome(self) -> str:
        if self.started_at is None:
            return "never started"
        return "exit code unknown" if self.status is None else describe_status(self.status)

    def _cause(self) -> str:
        if self.restarted:
            return "the machine restarted"
        if self.cause == "stopped":
            return f"stopped by {self.stopped_by}"
        return {
            "exit": "",
            "cancelled": "the command that requested it ended",
            "time-limit": "its time limit was over",
            "evicted": "evicted for a request of higher priority",
            "shutdown": "its daemon ended all jobs",
            "unobserved": "it ended while no daemon ran",
        }[self.cause]

    def _circumstances(self) -> list[str]:
        lost = [] if self.lost_card is None else [f"card {self.lost_card} was lost or unhealthy"]
        if not self.refused:
            return lost
        times = "once" if self.refused == 1 else f"{self.refused} times"
        return [*lost, f"memory beyond its slice was refused {times}"]


def exit_code(status: int) -> int:
    """Return a wait status as shells do: 128 + the number of a signal."""
    code = -(status & 0x7F) if status & 0x7F else status >> 8 & 0xFF
    return code if code >= 0 else 128 - code


def describe_status(status: int) -> str:
    """Return a wait status in words: `exit code 1`, `SIGKILL`."""
    number = status & 0x7F
    if not number:
        return f"exit code {status >> 8 & 0xFF}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


PROTOCOL = 11
"""Incremented when a message changes so that the last release or this one cannot read it.

A new message needs no increment, and no field with a default that is not written while the field has it. Then
both releases understand each other as long as nothing new is used."""

EVICTION_SIGNAL = signal.SIGUSR2
"""The daemon sends it to the process that requested a gang, which then ends all members."""

JobState = Literal["waiting", "starting", "running"]


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages."""


class Hello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """The first line of both sides. Later versions may add fields to it."""

    protocol: int = PROTOCOL
    version: str = __version__
    build: str = ""


class StopDaemon(msgspec.Struct, frozen=True, tag_field="type", tag="stop-daemon"):
    """End the daemon; while there are jobs only if forced. Answered by a StopAnswer.

    A client sends it as its first line, instead of a Hello. It never changes: a command of any version ends a
    daemon of any other one.
    """

    force: bool = False


class StopAnswer(msgspec.Struct, frozen=True):
    """Every version's answer to StopDaemon. type: done, or failure and its reason."""

    type: str
    reason: str = ""


class SubmitJob(Message, tag="submit-job"):
    """Request a lease. Answered by any number of JobQueued, then LeaseGranted, GangGranted or JobRejected.

    spec: the job.
    wait: whether to queue the request if nothing is free.
    job_id: empty; or the id of a pending request of an earlier daemon, or of the gang's member that this
    process is to run.
    """

    spec: JobSpec = JobSpec()
    wait: bool = True
    job_id: str = ""


class ConfirmLease(Message, tag="confirm-lease"):
    """The client has entered its lease and is about to execute its program."""


class GetSnapshot(Message, tag="get-snapshot"):
    """Request a MachineSnapshot."""


class Watch(Message, tag="watch"):
    """Request the next MachineSnapshot: after each change of a job, else each second, the same for all.

    after: the revision of the last one that was received; 0 for none.
    """

    after: int = 0


class AskWhatIf(Message, tag="ask-what-if"):
    """Ask which pending requests would start. Nothing is reserved. Answered by WhatIfAnswered or Failure."""

    question: WhatIf


MAX_STOPPED = 64
"""Names in one StopJob. Clients that stop more jobs send several."""


class StopJob(Message, tag="stop-job"):
    """End the programs of jobs, and remove pending ones from the queue first.

    Answered by JobsStopped, or Failure for more than MAX_STOPPED names.
    """

    names: list[str]
    grace_s: float = 10.0


class GetEnded(Message, tag="get-ended"):
    """Request an EndedJobs: all ended jobs, or the last run of one name, or its run of this number."""

    name: str = ""
    run: int = 0


class RemoveEnded(Message, tag="remove-ended"):
    """Remove records of one's own ended jobs. Answered by Done, with their number, or Failure.

    name: of jobs of this name only; run: of the run with this number only, 0 for all.
    before: of jobs that ended earlier only, in Unix seconds.
    """

    name: str = ""
    run: int = 0
    before: float | None = None


class ResizeJob(Message, tag="resize-job"):
    """Change the limits of a running job. Answered by Done or Failure.

    gpu_mem: per card, as typed; empty for no change. gpu_core: percent, 0 for no limit; None for no change.
    gpu_core_mode: None for no change.
    """

    name: str
    gpu_mem: str = ""
    gpu_core: int | None = None
    gpu_core_mode: ComputeMode | None = None


class PrioritizeJob(Message, tag="prioritize-job"):
    """Change the priority of a pending or running job, or of all members of a gang.

    Answered by Done, with its name, or Failure.
    """

    name: str
    priority: int


class CreateTicket(Message, tag="create-ticket"):
    """Request a ticket, which makes the client's user pay for a container. Answered by Done or Failure.

    Attributes:
        project: For all containers of a project.
        former: The project's ticket, to be opened again. If it is not the user's, the answer is a new one.
    """

    project: bool = False
    former: str = ""


class GetHelps(Message, tag="get-helps"):
    """Ask what would let a pending job start. Answered by HelpsListed."""

    id: str


class GetHistory(Message, tag="get-history"):
    """Request a HistoryRead.

    job, card: a job's id or a card's UUID; without both all cards.
    since, until: Unix seconds.
    points: as many intervals at most.
    """

    since: float
    until: float
    job: str = ""
    card: str = ""
    points: int = 1000


class GetUsage(Message, tag="get-usage"):
    """Request a UsageRead: the ledger's sums of some days, which are numbered from 1970 in UTC.

    daily: a sum for each day instead of one for all.
    """

    by: UsageGroup
    since_day: int
    until_day: int
    daily: bool = False


class GetDeviceAccess(Message, tag="get-device-access"):
    """Request a DeviceAccessRead."""


class GetInstances(Message, tag="get-instances"):
    """Request an InstancesListed."""


class ApplyLayout(Message, tag="apply-layout"):
    """Divide cards, by their UUIDs, as far as nobody uses them. Answered by LayoutApplied or Failure.

    The daemon does the rest when what is in use has ended. Pending steps of an earlier layout of these cards
    are given up.

    dry_run: only report what would be done.
    """

    cards: dict[str, CardTarget]
    dry_run: bool = False


class ReportReset(Message, tag="report-reset"):
    """Use cards again that were reset after an error, by index or UUID. Answered by Done or Failure."""

    cards: list[str]


class CancelLayout(Message, tag="cancel-layout"):
    """Give up what waits of layouts. Answered by LayoutApplied, with what waited, or Failure."""


class GetQuotas(Message, tag="get-quotas"):
    """Request a QuotasListed: one's own, root's and the daemon's owner those of all users."""


class BookCards(Message, tag="book-cards"):
    """Keep cards for a time. Answered by BookingsListed with this booking, or Failure.

    start, end: as typed; the daemon reads them in the machine's time zone.
    audience: `user:NAME` or `group:NAME`; empty for oneself.
    end_others_s: end jobs that would run into it from this many seconds before it; None for not.
    """

    cards: int
    start: str
    end: str
    weekly: bool = False
    audience: str = ""
    end_others_s: float | None = None


class GetBookings(Message, tag="get-bookings"):
    """Request a BookingsListed."""


class CancelBooking(Message, tag="cancel-booking"):
    """Remove one's own booking, or as root any. Answered by Done or Failure."""

    id: str


class JobQueued(Message, tag="job-queued"):
    """The request's place in the queue, of which position 1 is served next, and why it is pending."""

    job_id: str
    name: str
    position: int
    length: int
    reason: str


class LeaseGranted(Message, tag="lease-granted"):
    """A lease, and what the client must mount and set to enter it.

    library_dir: the directory of a simulated driver's libraries, or None.
    """

    job_id: str
    uuids: list[str]
    mounts: LeaseMounts
    library_dir: Path | None


class GangGranted(Message, tag="gang-granted"):
    """All leases of a gang. The client starts one process for each job, which submits that job's id."""

    name: str
    jobs: list[str]


class JobRejected(Message, tag="job-rejected"):
    """No lease. final: the request can never be granted; else nothing was free."""

    reason: str
    final: bool


class Done(Message, tag="done"):
    """The request was carried out."""

    text: str = ""


class Failure(Message, tag="failure"):
    """The request was not carried out, and why."""

    reason: str


class JobsStopped(Message, tag="jobs-stopped"):
    """The names of the jobs that were stopped, and sentences about those that could not be."""

    stopped: list[str]
    failures: list[str] = []


class EndedJobs(Message, tag="ended-jobs"):
    """Ended jobs, the oldest first. present: whether a job of the name still runs or waits."""

    jobs: list[EndedJob]
    present: bool = False


class SliceView(msgspec.Struct, frozen=True):
    """One slice as screens show it. used_mib, busy: None if the driver does not report it.

    compute: percent of the card's time, 0 for no limit; compute_mode defines its meaning.
    profile, start: of the instance that it is in, uuid's; empty for a slice of a card.
    busy: share of the card's time that its programs had lately, 0 to 1.
    """

    card: int
    uuid: str
    memory_mib: int
    used_mib: int | None = None
    compute: int = 0
    compute_mode: ComputeMode = "hard"
    profile: str = ""
    start: int = 0
    busy: float | None = None


class JobView(msgspec.Struct, frozen=True):
    """A job as screens show it. Times are Unix seconds.

    A pending gang is one view with the gang's name and id; once it is granted, each member has a view.
    gang, rank, size: the gang's name, the member's number (None while pending), and the number of members.
    run: its number among the runs of this name that have left a log; 0 if it leaves none.
    deadline: when it is terminated.
    reserved: indices of the cards reserved for it. starts_by: when these will be free at the latest.
    used_s: its user's recent use of cards, in decaying card-seconds.
    reason: why it is pending. violations: sentences about exceeded limits. problems: about unhealthy cards.
    unreadable_pids: processes that may be in the lease and cannot be inspected; they keep it while they live.
    allow_user_namespaces: its programs may create user namespaces, in which they can undo its limits.
    allow_unlimited_drivers: they may use parts of the driver that its limits do not cover.
    last_active: when it last had card time, or was granted if it never had any; None if that is not known.
    refusals: how often memory beyond its slice was refused; None if that is not known.
    helps: what would let a pending job start, in sentences; only in answers to Watch.
    starts: ids of pending jobs that would start if it ended; only there, too.
    container_id: the engine's id of a container; empty for a program of this machine.
    engine: the command that manages it, if that is known.
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
    run: int = 0
    reserved: list[int] = []
    starts_by: float | None = None
    used_s: float = 0.0
    violations: list[str] = []
    problems: list[str] = []
    unreadable_pids: list[int] = []
    allow_user_namespaces: bool = False
    allow_unlimited_drivers: bool = False
    last_active: float | None = None
    refusals: int | None = None
    helps: list[str] = []
    starts: list[str] = []
    container_id: str = ""
    engine: str = ""


class ProcessView(msgspec.Struct, frozen=True):
    """A process that uses a card and is in no lease. used_mib: None if the driver does not report it."""

    card: int
    pid: int
    user: str
    program: str
    used_mib: int | None


class CardView(msgspec.Struct, frozen=True):
    """A card and what is held of it. None: the driver does not report it.

    utilisation: percent of the last second or so in which a kernel ran.
    unleased_mib: memory in use by no lease, which counts as taken. unleased: by whom, in a sentence.
    free_mib: memory that new slices can have; 0 if the card takes none.
    cordoned: it takes no new slices, because its layout is to change.
    xids: the last errors that the driver reported, in sentences, the newest first.
    memory_mib: 0 if the driver reports none.
    problem: why it is unhealthy, and what clears that.
    """

    index: int
    uuid: str
    model: str
    memory_mib: int
    healthy: bool
    context_mib: int | None
    leased_mib: int
    used_mib: int | None
    utilisation: int | None = None
    unleased_mib: int = 0
    unleased: str = ""
    free_mib: int | None = None
    cordoned: bool = False
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    xids: list[str] = []
    problem: str = ""


class QuotaView(msgspec.Struct, frozen=True):
    """A user's present use and caps. None: there is no cap.

    memory_mib, cards: held now; a slice counts for the larger of its shares of memory and compute.
    card_hours: used since midnight.
    time_limit_s: of jobs that name none; time_limit_at_most_s: the longest.
    """

    user: str
    uid: int
    memory_mib: int
    cards: float
    card_hours: float
    memory_at_most_mib: float | None = None
    cards_at_most: float | None = None
    card_hours_at_most: float | None = None
    time_limit_s: float | None = None
    time_limit_at_most_s: float | None = None


class BookingView(msgspec.Struct, frozen=True):
    """A booking, with its present or next time in Unix seconds.

    audience: who may use its cards, as `user:NAME` or `group:NAME`.
    when: its time as the machine's clocks show it.
    card_indices: the cards that it would have, or has; they are chosen again until it begins.
    certain: whether these are certain to be free when it begins.
    """

    id: str
    user: str
    audience: str
    cards: int
    start: float
    end: float
    when: str
    weekly: bool = False
    end_others_s: float | None = None
    card_indices: list[int] = []
    certain: bool = True


class QuotasListed(Message, tag="quotas-listed"):
    """Quotas by user."""

    quotas: list[QuotaView]


class BookingsListed(Message, tag="bookings-listed"):
    """Bookings by their start."""

    bookings: list[BookingView]


class HistoryRead(Message, tag="history"):
    """Figures by the job's id, or by the cards' UUIDs; events of all that, in order.

    problem: why nothing is recorded now, or what was lost.
    """

    series: dict[str, FigureSeries]
    events: list[HistoryEvent] = []
    problem: str = ""


class UsageRead(Message, tag="usage"):
    """Sums of the ledger, and the daemon's prices, in millionths of the currency's unit, by model.

    since_day: the first day of which anything is recorded; None for none.
    problem: as in HistoryRead.
    """

    records: list[UsageRecord]
    prices: dict[str, int]
    currency: str
    since_day: int | None = None
    problem: str = ""


class InstancesListed(Message, tag="instances-listed"):
    """All cards with their instances."""

    cards: list[MigCardView]


class LayoutApplied(Message, tag="layout-applied"):
    """The finished steps, in sentences, and those that wait for something to end."""

    done: list[str]
    waiting: list[str] = []


class MachineSnapshot(Message, tag="snapshot"):
    """All cards and jobs. divided: cards in MIG mode. unleased: processes on cards that are in no lease.

    revision: grows with each answer to a Watch; only these have it.
    """

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
    divided: list[MigCardView] = []
    unleased: list[ProcessView] = []
    revision: int | msgspec.UnsetType = msgspec.UNSET


class WhatIfAnswered(Message, tag="what-if-answered"):
    """The answer to AskWhatIf."""

    answer: WhatIfAnswer


class HelpsListed(Message, tag="helps-listed"):
    """Sentences, each of which alone would let the job start, or one that says that nothing alone does."""

    helps: list[str]


class DeviceAccessRead(Message, tag="device-access"):
    """Whether containers can be kept from other cards' device nodes.

    version: of the control groups that do it; 0 if none can, and problem says why.
    shim_only: whether a container is started that cannot be kept from them.
    closed: whether only leases have cards' device nodes.
    """

    version: int
    problem: str
    shim_only: bool
    closed: bool = False


ToDaemon = (
    SubmitJob
    | ConfirmLease
    | GetSnapshot
    | Watch
    | AskWhatIf
    | GetHelps
    | GetInstances
    | ApplyLayout
    | CancelLayout
    | ReportReset
    | StopJob
    | GetEnded
    | RemoveEnded
    | ResizeJob
    | PrioritizeJob
    | CreateTicket
    | GetHistory
    | GetUsage
    | GetQuotas
    | BookCards
    | GetBookings
    | CancelBooking
    | GetDeviceAccess
)
FromDaemon = (
    JobQueued
    | LeaseGranted
    | GangGranted
    | JobRejected
    | Done
    | EndedJobs
    | JobsStopped
    | Failure
    | MachineSnapshot
    | InstancesListed
    | LayoutApplied
    | WhatIfAnswered
    | HelpsListed
    | HistoryRead
    | UsageRead
    | QuotasListed
    | BookingsListed
    | DeviceAccessRead
)

encode = msgspec.json.Encoder(enc_hook=os.fspath).encode
_requests = msgspec.json.Decoder(ToDaemon)
_answers = msgspec.json.Decoder(FromDaemon, dec_hook=lambda _, path: Path(path))
_first_lines = msgspec.json.Decoder(Hello | StopDaemon)
_stop_answers = msgspec.json.Decoder(StopAnswer)


def decode_request(line: bytes) -> ToDaemon:
    """Decode a client's message. Raises msgspec.MsgspecError."""
    return cast("ToDaemon", decode_json(_requests, line))


def decode_answer(line: bytes) -> FromDaemon:
    """Decode the daemon's message. Raises msgspec.MsgspecError."""
    return cast("FromDaemon", decode_json(_answers, line))


def failure_reason(answer: FromDaemon) -> str:
    """Return why a request failed, also for an answer of an unexpected type."""
    return getattr(answer, "reason", "unexpected answer of the daemon")


def decode_stop_answer(line: bytes) -> StopAnswer | None:
    """Decode the answer to StopDaemon; None if it is another message, or the end of the connection."""
    try:
        answer = decode_json(_stop_answers, line)
    except msgspec.MsgspecError:
        return None
    return answer if answer.type in ("done", "failure") else None


class ProtocolMismatch(FenkaError):
    """The daemon has another version of the protocol, or is no fenka daemon."""


def decode_first_line(line: bytes, socket: Path) -> Hello | StopDaemon:
    """Decode the first line of a peer. Raises ProtocolMismatch if it is not fenka's."""
    try:
        return cast("Hello | StopDaemon", decode_json(_first_lines, line))
    except msgspec.MsgspecError:
        raise ProtocolMismatch(
            f"{socket} is not served by fenka: remove it, or name another directory "
            "in FENKA_RUNTIME"
        ) from None


def check_hello(line: bytes, socket: Path, pid: int, advice: str) -> None:
    """Check the daemon's Hello.

    Args:
        line: The first line of the connection.
        socket: The daemon's socket.
        pid: The daemon's process.
        advice: What to do about a daemon of another build.

    Raises:
        ProtocolMismatch: It has another protocol.
    """
    hello = decode_first_line(line, socket)
    if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
        theirs = getattr(hello, "build", "") or "unknown"
        raise ProtocolMismatch(
            f"the daemon at {socket} (process {pid}) is fenka {getattr(hello, 'version', '')}, build "
            f"{theirs}, this command is fenka {__version__}, build {build_id()}: {advice}"
        )
