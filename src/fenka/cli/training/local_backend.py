"""Trainings and notebooks of this machine, for the commands about training jobs."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fenka.cli import local_logs
from fenka.cli.errors import UserError
from fenka.cli.local_logs import LogPart
from fenka.cli.training.backend import LogRequest
from fenka.core.errors import INVALID_INPUT
from fenka.hardware.peer_credentials import user_name
from fenka.views.jobs import JobEvent, TrainingJob
from fenka.workstation import notebooks, run_jobs
from fenka.workstation.training import attach, manage


class LocalJobs:
    """The trainings and notebooks of this user on this machine; see JobBackend."""

    @property
    def namespace(self) -> str:
        """The user."""
        return user_name(os.geteuid())

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or the one with this name, the newest first. Their positions are known."""
        del positions
        jobs = [*manage.jobs(name), *notebooks.jobs(name), *run_jobs.jobs(name)]
        return sorted(jobs, key=lambda job: -job.created)

    def events(self, job: TrainingJob) -> list[JobEvent]:
        """Return what the record tells of the job's past."""
        if job.trainer == "run":
            return run_jobs.events(job.name)
        return [] if job.trainer == "notebook" else manage.events(job.name)

    def logs(self, name: str, request: LogRequest) -> TrainingJob:
        """Print a log. Return the job as it is at the end of it."""
        log = manage.log_file(name, request.instance, request.container)
        if not (log.exists() or request.follow):
            raise UserError(
                f"{log.parent.name} has no log yet: {name} is {manage.record(name).status}"
            )
        part = LogPart(request.tail, request.since_s, request.timestamps)
        local_logs.print_log(log, part, lambda: not request.follow or manage.record(name).finished)
        return self.jobs(name)[0]

    def attach(self, job: TrainingJob, request: LogRequest, command: Sequence[str]) -> NoReturn:
        """Become a command in an instance's lease."""
        if notebooks.exists(job.name):
            raise UserError(f"{job.name} is a notebook: open a terminal in it", INVALID_INPUT)
        sys.stdout.flush()
        if job.trainer == "run":
            run_jobs.attach_to(job.name, request.instance, command)
        attach.run(job.name, request.instance, command)

    def delete(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that is left of them."""
        for job in jobs:
            if job.trainer == "run":
                run_jobs.delete(job.name)
            elif notebooks.exists(job.name):
                notebooks.delete(job.name)
            else:
                manage.delete(job.name)
