"""Starts a job on this machine: waits for its lease, then becomes its program or its gang's supervisor."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fenka.core.errors import INVALID_INPUT, PROGRAM_NOT_FOUND
from fenka.jobs.gang import free_port, member_environment
from fenka.jobs.processes import ErrorReporter, JobNotStarted, Notify, run_child
from fenka.jobs.spec import JobSpec
from fenka.workstation import launch, paths, protocol, supervisor
from fenka.workstation.client import Connection, job_names
from fenka.workstation.paths import Runtime


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts a job, and never returns: the process that calls it is replaced or ends.

    Attributes:
        runtime: The daemon's runtime directory.
        spec: The job.
        report_errors: The command's reporter of errors.
        wait: Queue if nothing is free now.
        timeout_s: The longest wait; None to wait indefinitely.
        environment: Variables to add to the program's own.
    """

    runtime: Runtime
    spec: JobSpec
    report_errors: ErrorReporter
    wait: bool = True
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(
        self, notify: Notify, started: Callable[[], None] = lambda: None, logs: Path | None = None
    ) -> NoReturn:
        """Become the job's program, or the supervisor of its gang.

        Args:
            notify: Receives lines about the wait for the lease.
            started: Called once a gang's members run.
            logs: The directory in which each member of a gang gets a log.
        """
        if self.spec.gang:
            self._supervise(notify, started, logs)
        self.exec_program(notify)

    def exec_program(
        self, notify: Notify, before_exec: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """Become the job's program; `before_exec` is called last."""
        connection, granted = self._acquire(notify)
        assert isinstance(granted, protocol.LeaseGranted)
        environment = self._enter(connection, granted)
        before_exec()
        self._exec(environment)

    def _supervise(
        self, notify: Notify, started: Callable[[], None], logs: Path | None
    ) -> NoReturn:
        connection, granted = self._acquire(notify)
        assert isinstance(granted, protocol.GangGranted)
        jobs, port = granted.jobs, free_port()

        def become_member(rank: int, ready: supervisor.ReportReady) -> NoReturn:
            def body() -> None:
                # The parent's connection stands for the gang as a whole.
                lease = launch.claim_member(self.runtime, jobs[rank])
                environment = self._enter(*lease) | member_environment(rank, len(jobs), port)
                ready()
                self._exec(environment)

            run_child(body, self.report_errors())

        def all_started() -> None:
            connection.close()
            started()

        result = supervisor.run(len(jobs), become_member, started=all_started, logs=logs)
        if result.never_started is not None:
            raise JobNotStarted(
                f"{self.spec.name} was not started: member {result.never_started} could not be",
                result.status,
            )
        sys.exit(result.status)

    def _acquire(
        self, notify: Notify
    ) -> tuple[Connection, protocol.LeaseGranted | protocol.GangGranted]:
        last_line = ""

        def on_wait(queued: protocol.JobQueued) -> None:
            nonlocal last_line
            line = f"waiting, position {queued.position} of {queued.length}: {queued.reason}"
            if line != last_line:
                last_line = line
                notify(line)

        return launch.acquire(
            self.runtime,
            protocol.SubmitJob(self.spec, self.wait),
            timeout_s=self.timeout_s,
            on_wait=on_wait,
            announce=notify,
        )

    def _enter(self, connection: Connection, granted: protocol.LeaseGranted) -> dict[str, str]:
        environment = launch.enter(
            connection,
            granted,
            self.spec.isolation,
            user_namespaces=self.spec.allow_user_namespaces,
        )
        return {**environment, **self.environment}

    def _exec(self, environment: Mapping[str, str]) -> NoReturn:
        program = self.spec.command[0]
        try:
            launch.exec_program(self.spec.command, environment)
        except OSError as why:
            raise JobNotStarted(
                f"{program} cannot be started: {why.strerror}", PROGRAM_NOT_FOUND
            ) from None


def create_job_directory(runtime: Runtime, name: str) -> Path:
    """Return a new directory for a job's log and files; that of a finished job of this name is removed.

    Raises JobNotStarted if a job of this name exists, because its log is being written. Raises
    UnsafeDirectory if another user could replace the directory.
    """
    if name in job_names(runtime):
        raise JobNotStarted(
            f"a job called {name} already exists: choose another --name", INVALID_INPUT
        )
    jobs = paths.jobs_directory()
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = jobs / name
    paths.check_parents(directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    return directory
