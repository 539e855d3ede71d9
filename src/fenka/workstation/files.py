"""The files of a workstation's daemon: its lock, configuration, state, log and libraries.

The daemon's records of ended jobs: bounded in number, age and bytes, and kept over restarts.

A file with one JSON object a line. A job is appended when it ends. The file is rewritten when many of its
lines are no longer kept. When all are too many, those of the user with the most go first.

Running jobs are recorded on disk, too: /run, where the daemon's own records are, is empty after a boot.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta

from fenka import native, procfs
from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.formats.mig_parted import CardTarget
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import account, lease_files
from fenka.isolation import lease_files as isolation_files
from fenka.isolation.sandbox import PRELOAD, SHIM
from fenka.workstation.job import Job
from fenka.workstation.lifetime import describe, log
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import MAX_COMMAND_CHARACTERS, EndedJob

SYSTEM_NATIVE = Path("/var/lib/fenka/workstation")
"""Copies of the native libraries for a system daemon, in directories named by their content."""

_LOCK_POLL_S = 0.02

MAX_LOG_BYTES = 4 << 20
"""Of a background daemon."""

MAX_FILE_BYTES = 1 << 28
"""Of a file that is read. `admission.MAX_RECORDED_BYTES` keeps the state file far below it."""

Loaded = TypeVar("Loaded")

_END_PROGRAMS = (
    "it records which job holds which slice: end the programs that hold leases, remove it, and start "
    "again"
)


class DaemonConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A daemon's cards and rules: the options of `fenka daemon`, recorded for the next one."""

    simulate: Annotated[
        str, Meta(title="SPEC", description="simulated cards: T4, 'V100-16G*2', FILE.toml")
    ] = ""
    policy: Annotated[str, Meta(description="order of the cards: binpack or spread")] = "binpack"
    unit: Annotated[str, Meta(description="unit of --gpu-mem 4: GiB or MiB")] = "GiB"
    only: Annotated[
        list[str],
        Meta(title="CARD", description="lease only this card, by index or UUID; repeatable"),
    ] = []
    mig: Annotated[
        list[str],
        Meta(
            title="CARD",
            description="divide this card into MIG instances, by index or UUID, or all; off: create none; "
            "repeatable. Cards in MIG mode are divided anyway",
        ),
    ] = []
    driver: Annotated[
        str,
        Meta(
            title="DIRECTORY",
            description="the driver's root, or the directory of its libraries; default: where the dynamic "
            "linker or the distributions have it",
        ),
    ] = ""
    card_memory: Annotated[
        str,
        Meta(
            title="SIZE",
            description="memory of the cards whose driver reports none, since they share the machine's "
            "(GB10): 96GiB leaves the rest to the machine",
        ),
    ] = ""
    metrics_port: Annotated[
        int | None,
        Meta(
            title="PORT",
            description="serve /metrics on this port of 127.0.0.1, to all users of the machine",
        ),
    ] = None
    price: Annotated[
        list[str],
        Meta(title="MODEL=PRICE", description="of an hour of a card, 'Tesla T4=0.35'; repeatable"),
    ] = []
    currency: Annotated[str, Meta(title="CODE", description="of the prices, by ISO 4217")] = "USD"
    history_size: Annotated[
        str, Meta(title="SIZE", description="of the file of history: the oldest goes first")
    ] = "200MiB"
    charge: Annotated[
        str,
        Meta(
            title="USER",
            description="who pays for root's containers that name nobody: root, a user, or refuse; "
            "annotation: believe Podman's annotations, which may be the image's",
        ),
    ] = "root"
    shim_only: Annotated[
        bool,
        Meta(
            description="start containers that cannot be kept from other cards' device nodes, too: only the "
            "shim keeps them to their cards"
        ),
    ] = False
    closed: Annotated[
        bool,
        Meta(
            description="keep the cards' device nodes for leases: no other program of an ordinary user can "
            "open a card"
        ),
    ] = False
    no_history: Annotated[
        bool, Meta(description="record neither history nor usage, and answer neither")
    ] = False


class StateFile(msgspec.Struct, forbid_unknown_fields=True):
    """All jobs on disk.

    boot: distinguishes a restart of the daemon from one of the machine.
    version: files of version 3 are read, too; their gangs have equal members. In those of version 4 jobs
    could retain their slices after their end.
    """

    boot: str
    jobs: list[Job]
    version: Literal[3, 4, 5] = 5


class CardErrorsFile(msgspec.Struct, forbid_unknown_fields=True):
    """Errors after which cards are not used, by UUID or instance. boot: a reboot resets all cards."""

    boot: str
    errors: Mapping[str, str]


class LayoutFile(msgspec.Struct, forbid_unknown_fields=True):
    """Layouts that wait for something to end, by the cards' UUIDs."""

    cards: Mapping[str, CardTarget]
    version: Literal[1] = 1


class InvalidState(FenkaError):
    """A file of the daemon is invalid, or does not match the running programs."""


class AlreadyRunning(FenkaError):
    """Another daemon serves this runtime directory."""


def lock_runtime(
    runtime: Runtime, keep_waiting: Callable[[], bool] = lambda: False
) -> contextlib.ExitStack:
    """Lock the directory until the result is closed. Raises AlreadyRunning, UnsafeDirectory, OSError.

    keep_waiting: whether to wait longer for the end of a daemon that runs there.
    """
    runtime.create()
    # A user who may read a file may also lock it, and would then prevent the next daemon's start.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context(open(os.open(runtime.lock, flags, 0o600), "r+b", buffering=0))
        with lease_files.with_file_name(runtime.lock):
            os.fchmod(lock.fileno(), 0o600)
            while not _locked(lock):
                if not keep_waiting():
                    holder = lock.read(20).decode(errors="replace").strip() or "unknown"
                    raise AlreadyRunning(
                        f"a fenka daemon is already running here (process {holder})"
                    )
                time.sleep(_LOCK_POLL_S)
            lock.truncate(0)
            lock.write(str(os.getpid()).encode())
        # systemd-tmpfiles removes nothing below a directory that is locked, however old.
        directory = os.open(runtime.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, directory)
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return opened.pop_all()


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def load_config(runtime: Runtime) -> DaemonConfig | None:
    """Return the last daemon's options, if it left any. Raises InvalidState."""
    return load_file(runtime.config, DaemonConfig)


def save_config(runtime: Runtime, config: DaemonConfig) -> None:
    """Record this daemon's options; not those with their default, which an older release may not know."""
    usual = DaemonConfig()
    # msgspec's own omission of defaults asks for the same object, which a word of the command line is not.
    chosen = {
        name: value
        for name in config.__struct_fields__
        if (value := getattr(config, name)) != getattr(usual, name)
    }
    lease_files.write_atomically(runtime.config, msgspec.json.encode(chosen))


def trim_log(path: Path) -> None:
    """Keep only the end of a log that is too long. Lines written meanwhile may be lost."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as log:
        if os.fstat(log.fileno()).st_size <= MAX_LOG_BYTES:
            return
        log.seek(-MAX_LOG_BYTES // 4, os.SEEK_END)
        kept = log.read().partition(b"\n")[2]
        log.truncate(0)
        log.seek(0)
        log.write(kept)


def load_jobs(runtime: Runtime) -> list[Job]:
    """Return the last daemon's jobs; none after a reboot. Raises InvalidState."""
    state = load_file(runtime.state, StateFile, adapt=_without_retained)
    return state.jobs if state and state.boot == procfs.boot_id() else []


def save_jobs(runtime: Runtime, jobs: list[Job]) -> None:
    """Record all jobs."""
    lease_files.write_atomically(
        runtime.state, msgspec.json.encode(StateFile(procfs.boot_id(), jobs))
    )


def load_layouts(runtime: Runtime) -> Mapping[str, CardTarget]:
    """Return the layouts that wait. Raises InvalidState."""
    advice = "remove it, start again, and apply the layout again"
    file = load_file(runtime.layouts, LayoutFile, advice)
    return file.cards if file else {}


def save_layouts(runtime: Runtime, cards: Mapping[str, CardTarget]) -> None:
    """Record the layouts that wait. Raises OSError."""
    if cards:
        lease_files.write_atomically(runtime.layouts, msgspec.json.encode(LayoutFile(cards)))
    else:
        runtime.layouts.unlink(missing_ok=True)


def _without_retained(content: Any) -> Any:
    """Return the state file of an earlier version without jobs that have ended, and what was kept of them."""
    match content:
        case {"version": 3 | 4, "jobs": [*jobs]}:
            jobs = [job for job in jobs if isinstance(job, dict)]
            for job in jobs:
                job.pop("retained", None)
                job.pop("unattributed_mib", None)
            kept = [job for job in jobs if job.get("state") != "completing"]
            return content | {"jobs": kept}
    return content


def load_file(
    path: Path,
    kind: type[Loaded],
    advice: str = _END_PROGRAMS,
    adapt: Callable[[Any], Any] = lambda content: content,
) -> Loaded | None:
    """Return the content of a file of the daemon's, if there is one. Raises InvalidState, with the advice."""
    try:
        content = lease_files.read_regular_file(path, MAX_FILE_BYTES)
        return msgspec.convert(
            adapt(lease_files.decode_json(msgspec.json.Decoder(), content)), kind
        )
    except FileNotFoundError:
        return None
    except OSError as why:
        raise InvalidState(f"{lease_files.describe_os_error(why)}; {advice}") from None
    except msgspec.DecodeError as why:
        raise InvalidState(
            f"{path} is not understood ({why}): it was written by another version or is damaged; {advice}"
        ) from None


def install_native(runtime: Runtime) -> Path:
    """Return a directory of the native libraries that all users of the daemon can read.

    A system daemon copies them, because it may be installed in a private home directory. Raises
    FileNotFoundError, OSError.
    """
    if runtime.system:
        return install_system_native()
    isolation_files.require_native()
    return native.DIRECTORY


def install_system_native() -> Path:
    """Return the libraries of a system daemon and of containers. Raises FileNotFoundError."""

    def add_preload(directory: Path) -> None:
        path = directory / PRELOAD.name
        with isolation_files.with_file_name(path):
            path.write_text(f"{SHIM}\n")

    return isolation_files.install_native(SYSTEM_NATIVE, add_preload)


MAX_JOBS_PER_USER = 200
MAX_JOBS = 4000
MAX_AGE_S = 30 * 86400.0

MAX_HISTORY_BYTES = 32 << 20
"""Of a file that is read. All jobs that are kept need a quarter of it."""

MAX_REFUSED = 1_000_000_000
"""More are counted as so many: the count is the programs' own."""

_SPARE_LINES = 500
"""Lines that are no longer kept, until the file is rewritten."""

_decoder = msgspec.json.Decoder(EndedJob)


class History:
    """Ended jobs, the oldest first. If its file cannot be written, they are kept in memory."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """file: need not exist yet."""
        self._file, self._clock = file, clock
        self._jobs: dict[str, EndedJob] = {}
        self._lines = 0
        self._failed = False

    def load(self) -> None:
        """Read what earlier daemons have recorded. Lines that cannot be read are dropped."""
        content = b""
        with contextlib.suppress(FileNotFoundError), self._reporting():
            content = lease_files.read_regular_file(self._file, MAX_HISTORY_BYTES)
        for line in content.splitlines():
            self._lines += 1
            with contextlib.suppress(msgspec.MsgspecError):
                job = lease_files.decode_json(_decoder, line)
                self._jobs[job.id] = job
        self._drop_old()

    def add(self, job: EndedJob) -> None:
        """Record a job, unless it is recorded already."""
        if job.id in self._jobs:
            return
        self._jobs[job.id] = job
        with self._reporting():
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._file, flags, 0o600)
            with open(descriptor, "ab") as file:
                file.write(msgspec.json.encode(job) + b"\n")
            self._lines += 1
        self._drop_old()

    def jobs(self) -> list[EndedJob]:
        """Return all jobs that are kept."""
        self._drop_old()
        return [*self._jobs.values()]

    def sentence(self, job_id: str) -> str:
        """Return how a job has ended and why; empty if that is not kept."""
        job = self._jobs.get(job_id)
        return job.sentence if job else ""

    def called(self, name: str, uid: int, run: int = 0) -> list[EndedJob]:
        """Return the last run of this name or id, of all members of a gang; none if it is unknown.

        uid: whose command names it. Each user has names of their own; those of others come after.
        run: the number of the run instead; 0 for the last.
        """
        found = [
            job
            for job in self._jobs.values()
            if name in (job.name, job.id, job.gang) and run in (0, job.run)
        ]
        found = [job for job in found if job.uid == uid] or found
        if not found or not found[-1].gang or name != found[-1].gang:
            return found[-1:]
        # The members of one gang have requested their slices in one message.
        return [
            job
            for job in found
            if (job.uid, job.requested_at) == (found[-1].uid, found[-1].requested_at)
        ]

    def remove(self, uid: int, unwanted: Callable[[EndedJob], bool]) -> int:
        """Remove a user's jobs, and return how many."""
        ids = [job.id for job in self._jobs.values() if job.uid == uid and unwanted(job)]
        self._discard(ids)
        if ids:
            self._rewrite()
        return len(ids)

    def _discard(self, ids: Iterable[str]) -> None:
        for job_id in ids:
            del self._jobs[job_id]

    def _drop_old(self) -> None:
        """Keep to the limits; rewrite the file if that is worth it."""
        since = self._clock() - MAX_AGE_S
        self._discard([job.id for job in self._jobs.values() if job.ended_at < since])
        by_user: dict[int, list[str]] = {}
        for job in self._jobs.values():
            by_user.setdefault(job.uid, []).append(job.id)
        for ids in by_user.values():
            self._discard(ids[:-MAX_JOBS_PER_USER])
            del ids[:-MAX_JOBS_PER_USER]
        while len(self._jobs) > MAX_JOBS:
            most = max(by_user.values(), key=len)
            self._discard([most.pop(0)])
        if self._lines > len(self._jobs) + _SPARE_LINES:
            self._rewrite()

    def _rewrite(self) -> None:
        with self._reporting():
            lines = [msgspec.json.encode(job) + b"\n" for job in self._jobs.values()]
            lease_files.write_atomically(self._file, b"".join(lines))
            self._lines = len(lines)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as why:
            if not self._failed:
                log(f"ended jobs are not recorded: {describe(why)}")
            self._failed = True


REFRESH_S = 60.0
"""A job's end by a power loss is recorded at most this much too early."""


class RunningFile(msgspec.Struct, forbid_unknown_fields=True):
    """The jobs that ran at a time, in Unix seconds, as they are recorded if the machine restarts then."""

    boot: str
    at: float
    jobs: list[EndedJob]
    version: Literal[1] = 1


class RunningJobs:
    """The file of one daemon. If it cannot be written, a restart leaves no record."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """directory: it may be another machine's, too, as a home directory on a network is."""
        self._file = directory / f"running-{os.uname().nodename}.json"
        self._clock = clock
        # Of an earlier daemon's file it is not known.
        self._written: tuple[frozenset[str] | None, float] = None, 0.0

    def lost(self) -> list[EndedJob]:
        """Return the jobs that ran when the machine restarted; none if it has not."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            content = lease_files.read_regular_file(self._file, MAX_FILE_BYTES)
            recorded = lease_files.decode_json(msgspec.json.Decoder(RunningFile), content)
            if recorded.boot != procfs.boot_id():
                return recorded.jobs
        return []

    def outdated(self, ids: frozenset[str]) -> bool:
        """Return whether the file lacks one of these jobs, has another one, or is a minute old."""
        written, at = self._written
        return ids != written or (bool(ids) and self._clock() >= at + REFRESH_S)

    def record(self, jobs: list[EndedJob]) -> None:
        """Write what would be recorded of jobs that a restart ends now."""
        self._written = frozenset(job.id for job in jobs), self._clock()
        with contextlib.suppress(OSError):
            if not jobs:
                self._file.unlink(missing_ok=True)
                return
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = RunningFile(procfs.boot_id(), self._clock(), jobs)
            lease_files.write_atomically(self._file, msgspec.json.encode(content))


def ended_job(job: Job, ended_at: float, cards: Mapping[str, Card], page: Path) -> EndedJob:
    """Return what is kept of a job that has ended.

    Args:
        job: The job.
        ended_at: When its last process ended, in Unix seconds.
        cards: The node's cards by UUID.
        page: Its account, which its programs may have written anything into, or removed.
    """
    peak_bytes: tuple[int, ...] = ()
    refused = 0
    with contextlib.suppress(OSError, account.InvalidAccount):
        written = account.read(page)
        peak_bytes, refused = written.peak_bytes, written.refused
    lost = [piece.card for piece in job.slices if not _healthy(cards.get(piece.uuid))]
    return EndedJob(
        id=job.id,
        name=job.name,
        user=user_name(job.uid),
        uid=job.uid,
        kind=job.spec.kind,
        run=job.spec.run,
        command=_shortened(job.spec.command),
        summary=job.spec.gpu.describe(),
        requested_at=job.requested_at,
        started_at=job.started_at,
        ended_at=ended_at,
        status=job.exit_status,
        cause=job.end_cause,
        stopped_by=job.stopped_by,
        lost_card=lost[0] if lost else None,
        refused=min(refused, MAX_REFUSED),
        cards=[piece.card for piece in job.slices],
        peak_mib=[
            # No program can have held more, whatever it has written.
            min(held >> 20, piece.memory_mib)
            for held, piece in zip(peak_bytes, job.slices, strict=False)
        ],
        gang=job.gang.name if job.gang else "",
        rank=job.rank,
        size=job.gang.size if job.gang else 1,
    )


def load_card_errors(runtime: Runtime) -> Mapping[str, str]:
    """Return the errors that an earlier daemon recorded; none after a reboot, or from a damaged file."""
    try:
        content = lease_files.read_regular_file(runtime.card_errors, MAX_FILE_BYTES)
        recorded = lease_files.decode_json(msgspec.json.Decoder(CardErrorsFile), content)
    except (OSError, msgspec.DecodeError):
        return {}
    return recorded.errors if recorded.boot == procfs.boot_id() else {}


def save_card_errors(runtime: Runtime, errors: Mapping[str, str]) -> None:
    """Record the errors for the next daemon. Raises OSError."""
    content = msgspec.json.encode(CardErrorsFile(procfs.boot_id(), errors))
    lease_files.write_atomically(runtime.card_errors, content)


def _healthy(card: Card | None) -> bool:
    return card is not None and card.healthy


def _shortened(command: Iterable[str]) -> list[str]:
    words, left = list[str](), MAX_COMMAND_CHARACTERS
    for word in command:
        if left < len(word):
            return [*words, word[: max(left, 0)] + "…"]
        words.append(word)
        left -= len(word) + 1
    return words
