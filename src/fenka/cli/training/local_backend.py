"""Trainings of this machine, for the commands about training jobs."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from fenka.cli import tables
from fenka.cli.errors import UserError
from fenka.cli.training.backend import LogRequest
from fenka.core.errors import INVALID_INPUT
from fenka.hardware.peer_credentials import user_name
from fenka.views.jobs import JobEvent, TrainingJob
from fenka.workstation.training import attach, manage

FOLLOW_INTERVAL_S = 0.1

BLOCK_BYTES = 1 << 16


class LocalJobs:
    """The trainings of this user on this machine; see JobBackend."""

    @property
    def namespace(self) -> str:
        """The user."""
        return user_name(os.geteuid())

    def jobs(self, name: str | None = None) -> list[TrainingJob]:
        """Return all jobs, or the one with this name, the newest first."""
        return manage.jobs(name)

    def events(self, job: TrainingJob) -> list[JobEvent]:
        """Return what the record tells of the job's past."""
        return manage.events(job.name)

    def logs(self, name: str, request: LogRequest) -> TrainingJob:
        """Print a log. Return the job as it is at the end of it."""
        if request.since_s is not None or request.timestamps:
            raise UserError(
                "--since and --timestamps require a cluster: logs on a workstation have no times",
                INVALID_INPUT,
            )
        log = manage.log_file(name, request.instance, request.container)
        if not (log.exists() or request.follow):
            raise UserError(
                f"{log.parent.name} has no log yet: {name} is {manage.record(name).status}"
            )
        for block in _blocks(name, log, request):
            tables.write_bytes(block)
        return self.jobs(name)[0]

    def attach(self, job: TrainingJob, request: LogRequest, command: Sequence[str]) -> NoReturn:
        """Become a command in an instance's lease."""
        sys.stdout.flush()
        attach.run(job.name, request.instance, command)

    def delete(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that is left of them."""
        for job in jobs:
            manage.delete(job.name)


def _blocks(name: str, log: Path, request: LogRequest) -> Iterator[bytes]:
    """Yield a log; if it is followed, until its job has ended."""
    position = 0
    while True:
        ended = not request.follow or manage.record(name).finished
        if log.exists():
            with log.open("rb") as file:
                if not position and request.tail is not None:
                    position = _start_of_tail(file.read(), request.tail)
                file.seek(position)
                while block := file.read(BLOCK_BYTES):
                    position += len(block)
                    yield block
        if ended:
            return
        time.sleep(FOLLOW_INTERVAL_S)


def _start_of_tail(content: bytes, lines: int) -> int:
    last = content.splitlines(keepends=True)[-lines:] if lines else []
    return len(content) - sum(map(len, last))
