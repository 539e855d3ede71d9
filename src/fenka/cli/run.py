"""`fenka run` and `fenka notebook`."""

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from fenka.cli import tables
from fenka.cli.errors import UserError, print_error, report_errors
from fenka.cli.jobs import running_names
from fenka.cli.options import CoreModeOption, CoreOption, MemoryOption
from fenka.core.errors import INTERRUPTED, INVALID_INPUT, PROGRAM_NOT_FOUND
from fenka.jobs import notebook as jupyter
from fenka.workstation import launch, paths, protocol, submission, supervisor
from fenka.workstation.client import Connection
from fenka.workstation.paths import Runtime

FAILED = "failed: "
"""Begins a detached child's report that it will not start."""

INTERRUPTED_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL for a detached program whose start was interrupted."""

NOTEBOOK_READY_S = 60.0
"""A cold start of JupyterLab takes a few seconds; a minute covers a slow disk."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job gets, and how it starts."""

    gpu_mem: MemoryOption = ""
    gpu_core: CoreOption = None
    gpu_core_mode: CoreModeOption = None
    cards: Annotated[int, typer.Option("--cards", help="slices on this many different cards")] = 1
    gpus: Annotated[int, typer.Option("--gpus", help="whole cards instead of slices")] = 0
    model: Annotated[
        list[str] | None, typer.Option("--model", help="only cards of this model; repeatable")
    ] = None
    name: Annotated[str, typer.Option("--name", help="name for ps, logs and stop")] = ""
    no_wait: Annotated[bool, typer.Option("--no-wait", help="fail if nothing is free now")] = False
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="longest wait for a slice"),
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="run in the background; see fenka logs")
    ] = False
    isolation: Annotated[
        protocol.Isolation,
        typer.Option(
            "--isolation", help="cooperative: by environment alone; a program can undo its limits"
        ),
    ] = "namespace"
    allow_user_namespaces: Annotated[
        bool,
        typer.Option(
            "--allow-user-namespaces",
            help="for bubblewrap, apptainer, browsers; with them a program can undo its limits",
        ),
    ] = False
    priority: Annotated[
        int, typer.Option("--priority", metavar="N", help="larger numbers are served first")
    ] = 0
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", metavar="SECONDS", help="end the job then; short jobs may start earlier"
        ),
    ] = None

    def ask(
        self, kind: protocol.JobKind, command: list[str], gang: int | None = None
    ) -> protocol.SubmitJob:
        """The request. Raises UserError for options that contradict each other, and InvalidRequest."""
        if self.gpu_core_mode and not self.gpu_core:
            raise UserError("--gpu-core-mode requires --gpu-core", INVALID_INPUT)
        if self.gpus and self.gpu_core:
            raise UserError(
                "--gpus takes whole cards, with all their compute: leave out --gpu-core",
                INVALID_INPUT,
            )
        if self.gpus and (self.gpu_mem or self.cards != 1):
            raise UserError(
                "--gpus takes whole cards: leave out --gpu-mem and --cards, or leave out --gpus",
                INVALID_INPUT,
            )
        if not self.gpus and not self.gpu_mem:
            raise UserError(
                "no amount given: use --gpu-mem 4 for a slice, or --gpus 1 for a card",
                INVALID_INPUT,
            )
        if self.timeout is not None and not math.isfinite(self.timeout):
            raise UserError(
                "--timeout must be a number of seconds; leave it out to wait indefinitely",
                INVALID_INPUT,
            )
        ask = protocol.SubmitJob(
            command=command,
            gpu_mem=self.gpu_mem,
            gpu_core=self.gpu_core or 0,
            gpu_core_mode=self.gpu_core_mode or "hard",
            cards=self.gpus or self.cards,
            whole=bool(self.gpus),
            models=self.model or [],
            name=self.name or submission.generate_name(command),
            kind=kind,
            wait=not self.no_wait,
            directory=str(Path.cwd()),
            isolation=self.isolation,
            gang=gang,
            priority=self.priority,
            time_limit_s=self.time_limit,
            allow_user_namespaces=self.allow_user_namespaces,
        )
        submission.validate(ask)
        return ask


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="the program and its arguments")
    ],
    options: JobOptions,
    gang: Annotated[
        int | None,
        typer.Option("--gang", metavar="N", help="N processes with such a slice each, all or none"),
    ] = None,
) -> None:
    """Become the program, or a gang's supervisor; or leave it running in the background."""
    ask = options.ask("run", _found(command), gang)
    if options.detach:
        _detached(ask, options.timeout, _job_dir(ask.name), {})
    if ask.gang:
        _be_gang(ask, options.timeout, print_error)
    _become(ask, options.timeout, {}, print_error)


def notebook(
    options: JobOptions,
    password: Annotated[
        str, typer.Option("--password", envvar="PASSWORD", help="password of the login page")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--directory", help="the notebook's root directory")
    ] = Path(),
) -> None:
    """Start a Jupyter server; print its URL when it answers."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", INVALID_INPUT)
    ask = options.ask("notebook", ["notebook"])
    job_dir = _job_dir(ask.name)
    server = jupyter.render(job_dir, directory.resolve(), password)
    ask = msgspec.structs.replace(ask, command=server.command)
    if options.detach:
        _detached(ask, options.timeout, job_dir, server.environment)
    # Held back until each of the two knows what to do about it.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        _in_child(
            lambda: _become(ask, options.timeout, server.environment, print_error, _left_to_parent)
        )
    asked: list[int] = []

    def end(number: int, _: object) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    code = os.waitstatus_to_exitcode(_announce_url(child, job_dir))
    if signal.SIGINT in asked:
        sys.exit(INTERRUPTED)
    sys.exit(code if code >= 0 else 128 - code)


def _left_to_parent() -> None:
    """Until the server knows what Ctrl-C means it would die of it with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _announce_url(child: int, job_dir: Path) -> int:
    """Print the URL once there is one; the child's status when it has ended."""
    announced = False
    while True:
        pid, status = os.waitpid(child, 0 if announced else os.WNOHANG)
        if pid:
            return status
        url = jupyter.url(job_dir)
        if url:
            announced = True
            print(f"notebook: {url}", flush=True)
            # The terminal interrupts the server too, which asks whether it was meant.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            time.sleep(0.05)


def _become(
    ask: protocol.SubmitJob,
    timeout_s: float | None,
    extra: dict[str, str],
    tell: Callable[[str], None],
    before: Callable[[], None] = lambda: None,
) -> NoReturn:
    """before: called last of all."""
    runtime = paths.current()
    connection, granted = _acquire(runtime, ask, timeout_s, tell)
    assert isinstance(granted, protocol.LeaseGranted)
    environment = launch.enter(
        connection, granted, ask.isolation, user_namespaces=ask.allow_user_namespaces
    )
    environment |= extra
    before()
    _exec(ask.command, environment)


def _acquire(
    runtime: Runtime, ask: protocol.SubmitJob, timeout_s: float | None, tell: Callable[[str], None]
) -> tuple[Connection, protocol.LeaseGranted | protocol.GangGranted]:
    told = ""

    def on_wait(waiting: protocol.JobQueued) -> None:
        nonlocal told
        line = f"waiting, position {waiting.position} of {waiting.length}: {waiting.reason}"
        if line != told:
            told = line
            tell(line)

    return launch.acquire(runtime, ask, timeout_s=timeout_s, on_wait=on_wait, announce=tell)


def _exec(command: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        launch.exec_program(command, environment)
    except OSError as why:
        raise UserError(
            f"{command[0]} cannot be started: {why.strerror}", PROGRAM_NOT_FOUND
        ) from None


def _be_gang(
    ask: protocol.SubmitJob,
    timeout_s: float | None,
    tell: Callable[[str], None],
    started: Callable[[], None] = lambda: None,
    logs: Path | None = None,
) -> NoReturn:
    """Start a gang's members, stay until all have ended, and end as they did."""
    runtime = paths.current()
    connection, granted = _acquire(runtime, ask, timeout_s, tell)
    assert isinstance(granted, protocol.GangGranted)
    jobs, port = granted.jobs, _free_port()

    def member(rank: int, ready: supervisor.ReportReady) -> NoReturn:
        def body() -> NoReturn:
            # The gang's own place is the parent's to give up.
            environment = launch.enter(
                *launch.claim_member(runtime, jobs[rank]),
                ask.isolation,
                user_namespaces=ask.allow_user_namespaces,
            ) | _gang_environment(rank, len(jobs), port)
            ready()
            _exec(ask.command, environment)

        _in_child(body)

    def all_started() -> None:
        connection.close()
        started()

    ended = supervisor.run(len(jobs), member, started=all_started, logs=logs)
    if ended.never_started is not None:
        raise UserError(
            f"{ask.name} was not started: member {ended.never_started} could not be",
            ended.status,
        )
    sys.exit(ended.status)


def _gang_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun says to the only process of a node: each member sees its own cards and no others, so
    its first card is card 0 and LOCAL_RANK, by which scripts choose a card, is 0."""
    return {
        "FENKA_GANG_RANK": str(rank),
        "FENKA_GANG_SIZE": str(size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _detached(
    ask: protocol.SubmitJob, timeout_s: float | None, job_dir: Path, extra: dict[str, str]
) -> NoReturn:
    """Start the program in a session of its own, report how it stands, and leave."""
    receive, send = os.pipe()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        os.close(receive)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        _redirect(job_dir / "log")

        def tell(text: str) -> None:
            # Who started this has left once it was told that this waits.
            with contextlib.suppress(BrokenPipeError):
                os.write(send, f"{text}\n".encode())

        def body() -> NoReturn:
            if ask.gang:
                _be_gang(ask, timeout_s, tell, lambda: os.close(send), job_dir)
            _become(ask, timeout_s, extra, tell)

        _in_child(body, lambda why: tell(f"{FAILED}{why}"))
    os.close(send)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        _report(ask, child, receive, job_dir)
    except KeyboardInterrupt:
        # Given up before it was said how it stands: then nothing is to be left of it.
        _end_detached(child)
        raise
    sys.exit(0)


def _report(ask: protocol.SubmitJob, child: int, receive: int, job_dir: Path) -> None:
    """How a detached program stands. Raises UserError if it has not started."""
    with os.fdopen(receive) as reports:
        # The pipe closes when the program is executed, or when it could not be.
        for line in map(str.strip, reports):
            if line.startswith("waiting"):
                # It may wait for hours; it will start by itself.
                print(f"{ask.name}: {tables.shown(line)}; it starts by itself")
                return
            if line.startswith(FAILED):
                _, status = os.waitpid(child, 0)
                raise UserError(line.removeprefix(FAILED), os.waitstatus_to_exitcode(status))
    if ask.kind == "notebook":
        with tables.busy(f"{ask.name}: starting Jupyter …"):
            url = _await_url(child, ask.name, job_dir)
        print(f"{ask.name}: {url}")
    else:
        print(f"{ask.name}: started, see `fenka logs {ask.name}`")


def _end_detached(child: int) -> None:
    """With what it has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)
        deadline = time.monotonic() + INTERRUPTED_GRACE_S
        while time.monotonic() < deadline:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.02)


def _await_url(child: int, name: str, job_dir: Path) -> str:
    deadline = time.monotonic() + NOTEBOOK_READY_S
    while (url := jupyter.url(job_dir)) is None:
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            raise UserError(f"{name} {'ended' if ended else 'is silent'}: see `fenka logs {name}`")
        time.sleep(0.02)
    return url


def _in_child(
    body: Callable[[], object], on_failure: Callable[[str], None] = print_error
) -> NoReturn:
    """Run what replaces this process; whatever fails, never return into the parent's code."""
    code = 1
    try:
        with report_errors(on_failure):
            body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _found(command: list[str]) -> list[str]:
    """Before a slice is asked for. Raises UserError."""
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no program called {command[0]}", PROGRAM_NOT_FOUND)
    return command


def _job_dir(name: str) -> Path:
    """A fresh directory for a job's log and files; that of a job of this name that has ended goes.

    Raises UserError if one of this name is still here: its log is being written. Raises UnsafeDirectory where
    another user could put something else in its place.
    """
    if name in running_names():
        raise UserError(
            f"a job called {name} is already here: choose another --name", INVALID_INPUT
        )
    jobs = paths.jobs_directory()
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = jobs / name
    paths.check_parents(directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    return directory


def _redirect(log: Path) -> None:
    descriptors = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600),
    )
    os.dup2(descriptors[0], 0)
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[1], 2)
    for descriptor in descriptors:
        os.close(descriptor)
