"""Runs a training: one group, started again until it has succeeded or may not start again.

TensorBoard runs beside it, as long as the training, on a free port of the loopback address.
"""

import contextlib
import errno
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from signal import SIGTERM
from typing import NoReturn

from fenka import procfs
from fenka.core.errors import FAILURE, FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.local_ports import LOOPBACK, MAX_TAKEN, NoFreePort
from fenka.jobs.processes import ErrorReporter, JobNotStarted, Notify
from fenka.local import gang, mpi_processes, records, supervisor, training_plan, workload
from fenka.local.launch import GroupProgram, GroupPrograms
from fenka.local.records import OWN, TRAININGS, TrainingRecord
from fenka.local.supervisor import GroupEnd, Home, RestartPolicy, Supervisor
from fenka.local.training_plan import Process
from fenka.local.views import requested_cards
from fenka.server.loopback_name import hold_other_address, new_name, release
from fenka.workstation import paths
from fenka.workstation.client import known_snapshot
from fenka.workstation.paths import Runtime

TENSORBOARD = "tensorboard"
END_TIMEOUT_S = 5.0

DISK_RETRY_S = 1.0
"""Between attempts to record the end on a full disk."""


def check_tensorboard() -> None:
    """Raise InvalidRequest if TensorBoard is not installed."""
    if shutil.which(TENSORBOARD) is None:
        raise InvalidRequest(
            f"--tensorboard requires the program {TENSORBOARD}, which is not installed here: run "
            f"`pip install {TENSORBOARD}`, or leave the option out"
        )


def _tensorboard_port() -> tuple[int, FileIO, list[socket.socket]]:
    """Return a port that is free at all loopback addresses, its lock, and sockets that hold the port at ::1.

    Raises NoFreePort, OSError.
    """
    for _ in range(MAX_TAKEN):
        port, lock = paths.port_reservations().reserve(reuse=True)
        with contextlib.suppress(OSError):
            return port, lock, hold_other_address(LOOPBACK, port)
        lock.close()
    raise NoFreePort("other programs take all ports of ::1: end them, or leave out --tensorboard")


def run(
    runtime: Runtime, directory: Path, notify: Notify, report_errors: ErrorReporter
) -> NoReturn:
    """Run the training of this directory. Call this in a background process.

    Raises JobNotStarted if it could not be started, SystemExit with its exit code.
    """
    record = records.supervised_by_me(TRAININGS.load(directory.name))
    TRAININGS.save(directory, record)
    training = Training(Home(runtime, directory, report_errors), record, notify)
    training.run()
    record = training.record
    if record.started_at is None:
        raise JobNotStarted(record.reason, record.exit_code or FAILURE)
    raise SystemExit(record.exit_code)


class Training(supervisor.ProcessGroup):
    """All processes of a training. Each change is recorded at once.

    Args:
        home: As for all groups.
        record: The training's record.
        notify: Receives lines until the processes run.
    """

    def __init__(self, home: Home, record: TrainingRecord, notify: Notify) -> None:
        spec = record.spec
        policy = RestartPolicy(spec.retry)
        super().__init__(home=home, name=spec.name, policy=policy, grace_s=spec.grace_s)
        self.record, self._notify = record, notify
        self._processes = list[Process]()
        self._request: JobSpec | None = None

    def run(self) -> None:
        """Return when the training has ended, and its record says how."""
        record, runner = self.record, Supervisor[Training]()
        try:
            self._processes = training_plan.processes(record.spec)
            self._request = training_plan.lease_request(
                record.spec, self._processes, record.directory
            )
            with self._tensorboard(runner.children):
                runner.add(self)
                runner.run()
        except (FenkaError, OSError) as why:
            code = why.exit_code if isinstance(why, FenkaError) else FAILURE
            self.end = GroupEnd(code, error=str(why))
        mpi_processes.remove_mpi_sockets(record)
        self._finish(self.end or GroupEnd(FAILURE))

    @contextlib.contextmanager
    def _tensorboard(self, children: set[int]) -> Iterator[None]:
        """Run TensorBoard if the training has it. Raises NoFreePort, OSError."""
        if not self.record.spec.tensorboard:
            yield
            return
        port, lock, held = _tensorboard_port()
        log = records.log_of(self.home.directory, TENSORBOARD)
        log.parent.mkdir(mode=0o700, exist_ok=True)
        options = [f"--logdir={self.record.spec.logdir}", f"--host={LOOPBACK}", f"--port={port}"]
        with (
            lock,
            contextlib.ExitStack() as holding,
            log.open("ab") as output,
            subprocess.Popen(
                [TENSORBOARD, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.record.directory,
                preexec_fn=partial(procfs.die_with_parent, SIGTERM),  # noqa: PLW1509
            ) as program,
        ):
            holding.callback(release, held)
            children.add(program.pid)
            # A browser keeps nothing of it for another server.
            self._update(tensorboard=f"http://{new_name()}:{port}")
            try:
                yield
            finally:
                program.terminate()
                try:
                    program.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    program.kill()
        self._update(tensorboard="")

    # --- starts -------------------------------------------------------------------------------------

    def next_start(self) -> supervisor.Body:
        """Return its next start."""
        return supervisor.GroupStart(self.home, self._request, self._prepare, releases=True).run

    def _prepare(self, opened: contextlib.ExitStack) -> GroupPrograms:
        """Return the programs, in the process of a start. Raises NoFreePort, OSError."""
        record, directory = self.record, self.home.directory
        workers = [process.name for process in self._processes if not process.chief]
        mpi = record.spec.kind == "mpi"
        if mpi:
            mpi_processes.prepare_mpi(record, directory, workers)
            opened.callback(mpi_processes.remove_mpi_sockets, record)
        ports = dict[training_plan.Address, int]()
        for process in self._processes:
            ports[process.address], lock = paths.port_reservations().reserve()
            opened.enter_context(lock)

        def program(process: Process) -> GroupProgram:
            command, environment, before = record.spec.argv, dict[str, str](), _nothing
            if mpi and process.chief:
                environment = mpi_processes.mpi_launcher_environment(record, directory)
                before = partial(mpi_processes.await_agents, record, workers)
            elif mpi:
                environment = mpi_processes.mpi_worker_environment(record, directory, process.name)
                command = mpi_processes.mpi_agent_command(directory, process.name)
            environment |= training_plan.environment(
                record.spec, process, ports, record.starts_before
            )
            return GroupProgram(
                process.name, command, environment, process.lease, process.required, before
            )

        return GroupPrograms(
            [program(process) for process in self._processes],
            ports.values(),
            directory / OWN,
            record.directory,
            record.binds,
            gang.GangLimits(self.grace_s, training_plan.time_left_s(record)),
        )

    # --- the record ---------------------------------------------------------------------------------

    def on_report(self, report: supervisor.Report) -> None:
        """Record it."""
        instances, now = self.record.instances, time.time()
        match report:
            case supervisor.Waiting(reason=reason):
                self._update(reason=reason)
                self._notify(reason)
            case supervisor.Started(processes=processes):
                self._record_requests()
                for instance, process in zip(instances, processes, strict=True):
                    (instance.pid, instance.start_ticks), instance.started_at = process, now
                started_at = self.record.started_at or now
                self._update(status="RUNNING", reason="", started_at=started_at)
                self._notify(workload.STARTED)
            case supervisor.MemberEnded(member=member, code=code, ending=ending):
                instance = instances[member]
                instance.exit_code, instance.ended_at = code, now
                instance.ended_with_job = ending
                self._update()

    def _record_requests(self) -> None:
        snapshot = known_snapshot() if self._request else None
        for instance, process in zip(self.record.instances, self._processes, strict=True):
            if process.gpu and snapshot:
                instance.requested = requested_cards(process.gpu, snapshot)

    def on_restart(self, end: GroupEnd) -> None:
        """Record that the processes are started again."""
        reason = "it is started again"
        if end.cause == "eviction":
            self.record.evictions += 1
            reason = "it was evicted and is started again"
        elif self.times_taken:
            reason = f"another program took its port {end.taken}: {reason} with others"
        for instance in self.record.instances:
            instance.pid = instance.start_ticks = 0
            instance.started_at = instance.ended_at = instance.exit_code = None
            instance.ended_with_job = False
        self._update(status="PENDING", reason=reason, restarts=self.failures)

    def _explain(self, end: GroupEnd) -> str:
        """Return why the training failed."""
        if end.error or end.lost:
            killed = end.status < 0 and f"its supervisor was ended by {records.outcome(end.status)}"
            return end.error or killed or self.record.reason
        if end.never_started is not None:
            name = self._processes[end.never_started].name
            why = gang.last_line(records.log_of(self.home.directory, name))
            return f"{name} could not be started" + (f": {why}" if why else "")
        match end.cause:
            case "signal":
                return "it was stopped"
            case "timeout":
                return "its time limit is over"
        if self.times_taken:
            return f"other programs took its ports {self.times_taken} times, {end.taken} last"
        failed = min(
            (
                instance
                for instance in self.record.instances
                if instance.exit_code and not instance.ended_with_job
            ),
            key=lambda instance: instance.ended_at or 0,
            default=None,
        )
        return (
            f"{failed.name} ended with {records.outcome(failed.exit_code or 0)}" if failed else ""
        )

    def _update(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self.record, name, value)
        # A full disk must not end the programs: the next change is recorded with this one.
        with contextlib.suppress(OSError):
            TRAININGS.save(self.home.directory, self.record)

    def _finish(self, end: GroupEnd) -> None:
        if end.lost:
            self.record = records.interrupted(self.record)
        status = end.status if end.status >= 0 else 128 - end.status
        stopped = end.cause == "signal" and not (end.error or end.lost)
        self._update(
            status="SUCCEEDED" if not status else "STOPPED" if stopped else "FAILED",
            reason=self._explain(end) if status else "",
            exit_code=status,
            ended_at=time.time(),
        )
        while not self._recorded():
            time.sleep(DISK_RETRY_S)

    def _recorded(self) -> bool:
        """Return whether the end is on disk, or never will be."""
        try:
            TRAININGS.save(self.home.directory, self.record)
        except OSError as why:
            return why.errno not in (errno.ENOSPC, errno.EDQUOT)
        return True


def _nothing() -> None:
    """Do nothing."""
