"""One replica: a process that waits for its lease, runs the program in it, and leaves nothing behind.

It is a child of the service's supervisor, and supervises the program as a gang of one. Orphans of the program
become its children, which it ends. The daemon ends the program if this process is killed.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from fenka.isolation import sandbox
from fenka.jobs.processes import ErrorReporter, run_child
from fenka.jobs.routing_table import ListenAddress
from fenka.jobs.service import PortName
from fenka.jobs.spec import JobSpec
from fenka.workstation import guard, protocol, supervisor
from fenka.workstation.launch import Launcher, execute
from fenka.workstation.paths import Runtime
from fenka.workstation.serving import plan
from fenka.workstation.serving.records import VersionRecord
from fenka.workstation.workload import change_directory

STARTED = "started "
"""Begins the report after which the program runs, in the process that it names."""

FAILED = "failed: "
"""Begins the report of why the program was not started."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplicaProgram:
    """What a replica runs.

    Attributes:
        runtime: The daemon's runtime directory.
        name: The replica's name, by which its log is found.
        request: What the daemon is asked for; None without cards.
        version: The version.
        ports: Where it is to listen.
        logs: The directory of all replicas' logs.
        report_errors: The command's reporter of errors.
    """

    runtime: Runtime
    name: str
    request: JobSpec | None
    version: VersionRecord
    ports: Mapping[PortName, ListenAddress]
    logs: Path
    report_errors: ErrorReporter

    def fork(self, leave: Callable[[], None]) -> tuple[int, int]:
        """Start the replica's process. leave: closes in it what belongs to the supervisor.

        Return its PID, and the reading end of a pipe with its reports. Raises OSError.
        """
        receive, send = os.pipe()
        try:
            parent, pid = os.getpid(), os.fork()
        except OSError:
            os.close(receive)
            os.close(send)
            raise
        if pid == 0:

            def report(line: str) -> None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(send, f"{line}\n".encode())

            def body() -> NoReturn:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                guard.die_with_parent(signal.SIGTERM)
                if os.getppid() != parent:
                    sys.exit(1)
                os.close(receive)
                leave()
                self._run(report)

            run_child(body, self.report_errors(lambda sentence: report(f"{FAILED}{sentence}")))
        os.close(send)
        os.set_blocking(receive, False)
        return pid, receive

    def _run(self, report: Report) -> NoReturn:
        guard.adopt_orphans()
        os.environ.clear()
        os.environ.update(self.version.environment)
        binds = [(Path(source), Path(target)) for source, target in self.version.binds]
        with contextlib.ExitStack() as opened:
            launcher, jobs = None, list[str]()
            if self.request:
                launcher = Launcher(self.runtime, self.request, self.report_errors, binds=binds)
                connection, granted = launcher.acquire(report)
                opened.callback(connection.close)
                assert isinstance(granted, protocol.GangGranted)
                jobs = granted.jobs

            def started(pids: Sequence[int]) -> None:
                opened.close()
                report(f"{STARTED}{pids[0]}")

            result = supervisor.run(
                [supervisor.Member(self.name, partial(self._become, launcher, jobs, binds))],
                started=started,
                logs=self.logs,
                limits=supervisor.Limits(self.version.spec.grace_s),
                forward=False,
            )
        guard.end_orphans()
        sys.exit(result.status)

    def _become(
        self,
        launcher: Launcher | None,
        jobs: Sequence[str],
        binds: Sequence[sandbox.Bind],
        ready: supervisor.ReportReady,
    ) -> NoReturn:
        """Become the program, in a child."""

        def body() -> None:
            environment = dict(os.environ)
            if launcher:
                environment = launcher.enter_member(jobs[0])
            elif binds:
                sandbox.enter_without_lease(binds)
            spec = self.version.spec
            change_directory(self.version.directory)
            ready()
            execute(
                plan.program(spec, self.ports), environment | plan.environment(spec, self.ports)
            )

        run_child(body, self.report_errors())
