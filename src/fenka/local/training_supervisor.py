"""Runs a training: attempts, each with leases of its own, until it has succeeded or may not start again.

The leases of an attempt are released before the next one requests any.

What mpirun needs on one machine: launch agents on Unix sockets, their key, and lists of hosts.

The hosts' names resolve to nothing, because Open MPI starts processes without an agent on a host that is
local, and thus outside of the leases. Ranks reach each other through the loopback interface.

TensorBoard beside a training: it runs as long as the training, on a free port of the loopback address.
"""

import contextlib
import errno
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NoReturn

import msgspec

from fenka import procfs
from fenka.core.errors import FAILURE, FenkaError
from fenka.core.request import InvalidRequest
from fenka.isolation import sandbox
from fenka.jobs import training
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.notebook import LOOPBACK, MAX_TAKEN, taken_port
from fenka.jobs.processes import ErrorReporter, JobNotStarted, Notify, run_child
from fenka.local import records, supervisor, training_plan, workload
from fenka.local.launch import Launcher, execute
from fenka.local.records import OWN, TRAININGS, TrainingRecord
from fenka.local.training_plan import Address, Process
from fenka.local.views import requested_cards
from fenka.local.workload import change_directory
from fenka.workstation import paths, protocol
from fenka.workstation.client import connect, own_jobs
from fenka.workstation.paths import Runtime

POLL_S = 0.02
"""Between attempts to reach an agent that starts."""

_LOOPBACK = {
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "HYDRA_IFACE": "lo",
}


def files(directory: Path) -> Path:
    """Return the directory of the agent, the key and the lists of hosts."""
    return directory / OWN / "mpi"


def sockets(record: TrainingRecord) -> Path:
    """Return the directory of the agents' sockets and of temporary files, whose paths must be short."""
    return Path(tempfile.gettempdir()) / f"fenka-{record.uid}"


def host(worker: str) -> str:
    """Return the name by which mpirun calls a worker. No name server may know this domain (RFC 6761)."""
    return f"{worker}.invalid"


def prepare(record: TrainingRecord, directory: Path, workers: Sequence[str]) -> None:
    """Write all files for an attempt. Raises OSError."""
    place = files(directory)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    source = resources.files("fenka.jobs.in_pod") / "mpi_agent.py"
    (place / "agent.py").write_text(source.read_text())
    (place / "agent").write_text(f'#!/bin/sh\nexec {shlex.join(_agent(place))} "$@"\n')
    (place / "agent").chmod(0o700)
    (place / "key").touch(mode=0o600)
    (place / "key").write_text(secrets.token_hex(32))
    hosts = [host(worker) for worker in workers]
    slots = training.slots(record.spec)
    (place / "hosts").write_text(training.hostfile(hosts, slots, hydra=False))
    (place / "hydra-hosts").write_text(training.hostfile(hosts, slots, hydra=True))
    remove_sockets(record)
    sockets(record).mkdir(mode=0o700)
    for worker in workers:
        (sockets(record) / worker).mkdir()


def remove_sockets(record: TrainingRecord) -> None:
    """Remove the directory of the agents' sockets."""
    shutil.rmtree(sockets(record), ignore_errors=True)


def agent_command(directory: Path, worker: str) -> list[str]:
    """Return the command of a worker."""
    return [*_agent(files(directory)), "serve", host(worker)]


def launcher_environment(record: TrainingRecord, directory: Path) -> dict[str, str]:
    """Return the variables of the process that calls mpirun."""
    place = PurePosixPath(files(directory))
    variables = training.mpi_environment(place / "agent", place / "hosts", place / "hydra-hosts")
    return {
        **variables,
        **_LOOPBACK,
        "FENKA_AGENT_SOCKETS": str(sockets(record)),
        "FENKA_AGENT_KEY": str(place / "key"),
    }


def worker_environment(record: TrainingRecord, directory: Path, worker: str) -> dict[str, str]:
    """Return the variables of a worker: the launcher's, and a directory for temporary files of its own.

    Open MPI's daemons take each other's files for their own where several share a host's directory. Its own
    option for that directory would be passed on, from daemons to those that they start.
    """
    return {
        **launcher_environment(record, directory),
        "TMPDIR": str(sockets(record) / worker),
    }


def await_agents(record: TrainingRecord, workers: Iterable[str]) -> None:
    """Return when all agents listen. The supervisor ends this process if one fails."""
    for worker in workers:
        while not _listens(sockets(record) / host(worker)):
            time.sleep(POLL_S)


def _listens(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


def _agent(place: Path) -> list[str]:
    return [sys.executable, "-IS", str(place / "agent.py")]


PROGRAM = "tensorboard"
PORTS = range(6006, 65536)
END_TIMEOUT_S = 5.0


def check() -> None:
    """Raise InvalidRequest if TensorBoard is not installed."""
    if shutil.which(PROGRAM) is None:
        raise InvalidRequest(
            f"--tensorboard requires the program {PROGRAM}, which is not installed here: run "
            f"`pip install {PROGRAM}`, or leave the option out"
        )


@contextlib.contextmanager
def running(directory: Path, logdir: str, working_directory: str) -> Iterator[str]:
    """Run TensorBoard, and yield its URL. Raises NoFreePort, OSError."""
    port, lock = paths.port_reservations().reserve(PORTS, reuse=True)
    log = records.log_of(directory, PROGRAM)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with (
        lock,
        log.open("ab") as output,
        subprocess.Popen(
            [PROGRAM, f"--logdir={logdir}", f"--host={LOOPBACK}", f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=working_directory,
        ) as program,
    ):
        try:
            yield f"http://{LOOPBACK}:{port}"
        finally:
            program.terminate()
            try:
                program.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                program.kill()


RELEASE_POLL_S = 0.05
"""Between looks whether the daemon has released an attempt's leases."""

ATTACHED_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for what users have started in leases by `fenka attach`."""

DISK_RETRY_S = 1.0
"""Between attempts to record the end on a full disk."""

STARTED = "started"
"""The status line after which the processes run."""


def run(
    runtime: Runtime, directory: Path, notify: Notify, report_errors: ErrorReporter
) -> NoReturn:
    """Run the training of this directory. Its guard calls this in a background process.

    Raises JobNotStarted if it could not be started, SystemExit with its exit code.
    """
    TRAININGS.save(directory, records.supervised_by_me(TRAININGS.load(directory.name)))

    def supervise() -> int:
        record = TRAININGS.load(directory.name)
        return Supervisor(runtime, directory, record, notify, report_errors).run()

    status = workload.run(supervise)
    record = TRAININGS.load(directory.name)
    remove_sockets(record)
    if not record.finished:
        killed = os.WIFSIGNALED(status) and signal.Signals(os.WTERMSIG(status)).name
        record = msgspec.structs.replace(
            records.interrupted(record), exit_code=_exit_code(status), ended_at=time.time()
        )
        if killed:
            record.reason = f"its supervisor was ended by {killed}"
        TRAININGS.save(directory, record)
    if record.started_at is None:
        raise JobNotStarted(record.reason, record.exit_code or FAILURE)
    raise SystemExit(record.exit_code)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


@dataclass(slots=True)
class Supervisor:
    """Runs one training, and records what happens.

    Attributes:
        runtime: The daemon's runtime directory.
        directory: The training's directory.
        record: Its record.
        notify: Receives lines until the processes run.
        report_errors: The command's reporter of errors.
    """

    runtime: Runtime
    directory: Path
    record: TrainingRecord
    notify: Notify
    report_errors: ErrorReporter
    _processes: list[Process] = field(default_factory=list)
    _request: JobSpec | None = None
    _binds: Sequence[sandbox.Bind] = ()
    _taken: int | None = None
    """A port of the last attempt that another program took."""
    _times_taken: int = 0

    def run(self) -> int:
        """Return the training's exit code."""
        spec = self.record.spec
        # The members of an attempt handle it: before they exist it stays pending.
        signal.pthread_sigmask(signal.SIG_BLOCK, {protocol.EVICTION_SIGNAL})
        try:
            self._processes = training_plan.processes(spec)
            self._request = training_plan.lease_request(
                spec, self._processes, self.record.directory
            )
            self._binds = [(Path(source), Path(target)) for source, target in self.record.binds]
            with self._tensorboard():
                result = self._attempt()
                while self._starts_again(result):
                    self._reset(result)
                    result = self._attempt()
        except (FenkaError, OSError) as why:
            self._finish(why.exit_code if isinstance(why, FenkaError) else FAILURE, str(why))
            return self.record.exit_code or FAILURE
        self._finish(result.status, self._reason(result))
        return result.status

    @contextlib.contextmanager
    def _tensorboard(self) -> Iterator[None]:
        spec = self.record.spec
        if not spec.tensorboard:
            yield
            return
        with running(self.directory, spec.logdir, self.record.directory) as url:
            self._update(tensorboard=url)
            yield
        self._update(tensorboard="")

    # --- attempts -----------------------------------------------------------------------------------

    def _attempt(self) -> supervisor.GangResult:
        """Run all processes once; return when their leases are released."""
        others = procfs.children(os.getpid())
        with contextlib.ExitStack() as opened:
            jobs: list[str] = []
            launcher = None
            if self._request:
                # One that came too late for the attempt before it.
                signal.sigtimedwait({protocol.EVICTION_SIGNAL}, 0)
                launcher = Launcher(
                    self.runtime, self._request, self.report_errors, binds=self._binds
                )
                connection, granted = launcher.acquire(self._on_wait)
                opened.callback(connection.close)
                assert isinstance(granted, protocol.GangGranted)
                jobs = granted.jobs
                self._record_requests()
            if self.record.spec.kind == "mpi":
                prepare(self.record, self.directory, self._mpi_workers)
                opened.callback(remove_sockets, self.record)
            ports = self._reserve_ports(opened)
            members = [
                supervisor.Member(
                    process.name,
                    partial(self._become, process, launcher, jobs, ports),
                    process.required,
                )
                for process in self._processes
            ]

            def started(pids: Sequence[int]) -> None:
                # The programs hold the leases now.
                if self._request:
                    connection.close()
                self._on_start(pids)

            result = supervisor.run(
                members,
                started=started,
                ended=self._on_end,
                logs=self.directory / OWN,
                limits=supervisor.Limits(self.record.spec.grace_s, self._time_left_s()),
            )
        workload.end_orphans(others)
        self._taken = taken_port(ports.values()) if result.status else None
        self._await_release()
        return result

    @property
    def _mpi_workers(self) -> list[str]:
        return [process.name for process in self._processes if not process.chief]

    def _become(
        self,
        process: Process,
        launcher: Launcher | None,
        jobs: Sequence[str],
        ports: dict[Address, int],
        ready: supervisor.ReportReady,
    ) -> NoReturn:
        """Be one process of the training, in a child."""

        def body() -> None:
            environment = dict(os.environ)
            if process.lease is not None:
                assert launcher is not None
                environment = launcher.enter_member(jobs[process.lease])
            elif self._binds:
                sandbox.enter_without_lease(self._binds)
            spec = self.record.spec
            command = spec.argv
            if spec.kind == "mpi":
                if process.chief:
                    environment |= launcher_environment(self.record, self.directory)
                else:
                    environment |= worker_environment(self.record, self.directory, process.name)
                    command = agent_command(self.directory, process.name)
            environment |= training_plan.environment(
                spec, process, ports, self.record.starts_before
            )
            change_directory(self.record.directory)
            ready()
            if spec.kind == "mpi" and process.chief:
                await_agents(self.record, self._mpi_workers)
            execute(command, environment)

        run_child(body, self.report_errors())

    def _reserve_ports(self, opened: contextlib.ExitStack) -> dict[Address, int]:
        """Return a port for each process, reserved until the attempt has ended. Raises NoFreePort."""
        ports: dict[Address, int] = {}
        for process in self._processes:
            ports[process.address], lock = paths.port_reservations().reserve()
            opened.enter_context(lock)
        return ports

    def _await_release(self) -> None:
        """Wait until the daemon has released the leases of an attempt whose processes have ended."""
        name, reason = self.record.spec.name, ""
        while self._request:
            with connect(self.runtime, lambda _: None) as connection:
                snapshot = connection.request(protocol.GetSnapshot(), protocol.Snapshot)
                left = [job for job in own_jobs(snapshot) if job.gang == name]
                if not left:
                    return
                # A user may have attached to a lease, which that program holds, too.
                connection.request(protocol.StopJob([name], ATTACHED_GRACE_S), protocol.JobsStopped)
            if left[0].reason != reason:
                reason = left[0].reason
                self._update(reason=f"a lease is not released: {reason}")
            time.sleep(RELEASE_POLL_S)

    def _starts_again(self, result: supervisor.GangResult) -> bool:
        if result.cause:
            return result.cause == "eviction"
        if self._taken:
            self._times_taken += 1
            return self._times_taken <= MAX_TAKEN
        return bool(result.status) and self.record.restarts < self.record.spec.retry

    def _time_left_s(self) -> float | None:
        """Return the seconds until this attempt must end: by its own limit, or by that of the training."""
        spec = self.record.spec
        limits = [spec.time_limit_s] if spec.time_limit_s is not None else []
        if spec.running_timeout_s is not None:
            since = self.record.started_at or time.time()
            limits.append(max(since + spec.running_timeout_s - time.time(), 0))
        return min(limits, default=None)

    # --- the record ---------------------------------------------------------------------------------

    def _update(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self.record, name, value)
        # A full disk must not end the programs: the next change is recorded with this one.
        with contextlib.suppress(OSError):
            TRAININGS.save(self.directory, self.record)

    def _on_wait(self, line: str) -> None:
        self._update(reason=line)
        self.notify(line)

    def _record_requests(self) -> None:
        with connect(self.runtime, lambda _: None) as connection:
            snapshot = connection.request(protocol.GetSnapshot(), protocol.Snapshot)
        for instance, process in zip(self.record.instances, self._processes, strict=True):
            if process.gpu:
                instance.requested = requested_cards(process.gpu, snapshot)

    def _on_start(self, pids: Sequence[int]) -> None:
        now = time.time()
        for instance, pid in zip(self.record.instances, pids, strict=True):
            instance.pid, instance.start_ticks = pid, procfs.start_ticks(pid) or 0
            instance.started_at = now
        started_at = self.record.started_at or now
        self._update(status="RUNNING", reason="", started_at=started_at)
        self.notify(STARTED)

    def _on_end(self, member: int, code: int, ending: bool) -> None:
        instance = self.record.instances[member]
        instance.exit_code, instance.ended_at = code, time.time()
        instance.ended_with_job = ending
        self._update()

    def _reset(self, result: supervisor.GangResult) -> None:
        reason = "it is started again"
        if result.cause == "eviction":
            self.record.evictions += 1
            reason = "it was evicted and is started again"
        elif self._taken:
            reason = f"another program took its port {self._taken}: {reason} with others"
        else:
            self.record.restarts += 1
        for instance in self.record.instances:
            instance.pid = instance.start_ticks = 0
            instance.started_at = instance.ended_at = instance.exit_code = None
            instance.ended_with_job = False
        self._update(status="PENDING", reason=reason)

    def _reason(self, result: supervisor.GangResult) -> str:
        if result.never_started is not None:
            name = self._processes[result.never_started].name
            why = supervisor.last_line(records.log_of(self.directory, name))
            return f"{name} could not be started" + (f": {why}" if why else "")
        match result.cause:
            case "signal":
                return "it was stopped"
            case "timeout":
                return "its time limit is over"
        if self._taken:
            return f"other programs took its ports {self._times_taken} times, {self._taken} last"
        ended = [instance for instance in self.record.instances if not instance.ended_with_job]
        failed = min(
            (each for each in ended if each.exit_code),
            key=lambda each: each.ended_at or 0,
            default=None,
        )
        return (
            f"{failed.name} ended with {records.outcome(failed.exit_code or 0)}" if failed else ""
        )

    def _finish(self, status: int, reason: str) -> None:
        succeeded = status == 0
        self._update(
            status="SUCCEEDED" if succeeded else "FAILED",
            reason="" if succeeded else reason,
            exit_code=status,
            ended_at=time.time(),
        )
        while not self._recorded():
            time.sleep(DISK_RETRY_S)

    def _recorded(self) -> bool:
        """Return whether the end is on disk, or never will be."""
        try:
            TRAININGS.save(self.directory, self.record)
        except OSError as why:
            return why.errno not in (errno.ENOSPC, errno.EDQUOT)
        return True
