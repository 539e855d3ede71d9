"""The daemon's records of ended jobs: bounded in number, age and bytes, and kept over restarts.

A file with one JSON object a line. A job is appended when it ends. The file is rewritten when many of its
lines are no longer kept. When all are too many, those of the user with the most go first.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from fenka.core.inventory import Card
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import account
from fenka.isolation.files import decode_json, read_regular_file, write_atomically
from fenka.workstation.ended import MAX_COMMAND_CHARACTERS, EndedJob
from fenka.workstation.job import Job
from fenka.workstation.log import describe, log

MAX_JOBS_PER_USER = 200
MAX_JOBS = 4000
MAX_AGE_S = 30 * 86400.0

MAX_FILE_BYTES = 32 << 20
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
            content = read_regular_file(self._file, MAX_FILE_BYTES)
        for line in content.splitlines():
            self._lines += 1
            with contextlib.suppress(msgspec.MsgspecError):
                job = decode_json(_decoder, line)
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
            write_atomically(self._file, b"".join(lines))
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
