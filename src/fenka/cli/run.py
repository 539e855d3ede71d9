"""`fenka run`, and what `fenka notebook` shares with it."""

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import msgspec
import typer

from fenka.cli import tables
from fenka.cli.common_options import (
    CoreModeOption,
    CoreOption,
    MemoryOption,
    parse_duration,
    seconds,
    whole_cards,
)
from fenka.cli.error_report import UserError, print_error, report_errors
from fenka.core.errors import INVALID_INPUT, NOT_EXECUTABLE, PROGRAM_NOT_FOUND
from fenka.jobs import notebook as jupyter
from fenka.jobs.job_spec import (
    GpuResources,
    Isolation,
    JobKind,
    JobSpec,
    Topology,
    generate_name,
)
from fenka.jobs.processes import FAILED, STARTED, BackgroundProcess, Notify, start_in_background
from fenka.local import runs
from fenka.local.launch import Launcher
from fenka.local.records import NOTEBOOKS
from fenka.local.workload import parse_priority
from fenka.server.loopback_name import tunnel_sentence
from fenka.workstation import paths


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The resources of a job, and how it starts."""

    gpu_mem: MemoryOption = ""
    gpu_core: CoreOption = None
    gpu_core_mode: CoreModeOption = None
    cards: Annotated[int, typer.Option("--cards", help="slices on this many different cards")] = 1
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus", parser=whole_cards, metavar="N", help="whole cards instead of slices"
        ),
    ] = 0
    mig: Annotated[
        str, typer.Option("--mig", metavar="PROFILE", help="a MIG instance of its own: 1g.5gb")
    ] = ""
    mig_count: Annotated[
        int, typer.Option("--mig-count", metavar="N", help="so many instances")
    ] = 1
    inside: Annotated[
        str,
        typer.Option(
            "--inside",
            metavar="PROFILE",
            help="a slice within a MIG instance: mig for any, 3g.20gb",
        ),
    ] = ""
    model: Annotated[
        list[str] | None, typer.Option("--model", help="only cards of this model; repeatable")
    ] = None
    topology: Annotated[
        Topology,
        typer.Option(
            "--topology",
            help="required: only cards that NVLink connects; preferred: the best connected",
        ),
    ] = "any"
    numa: Annotated[
        bool, typer.Option("--numa", help="bind the program to the CPUs near its cards")
    ] = False
    name: Annotated[str, typer.Option("--name", help="name for ps, logs and stop")] = ""
    no_wait: Annotated[bool, typer.Option("--no-wait", help="fail if nothing is free now")] = False
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", parser=seconds, metavar="TIME", help="longest wait for a slice: 60, 1m, 2h"
        ),
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="run in the background; see fenka logs")
    ] = False
    isolation: Annotated[
        Isolation,
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
    allow_unlimited_drivers: Annotated[
        bool,
        typer.Option(
            "--allow-unlimited-drivers",
            help="for OpenCL, Vulkan, EGL and OpenGL on the card, whose memory and time no limit covers",
        ),
    ] = False
    priority: Annotated[
        str,
        typer.Option(
            "--priority",
            metavar="N",
            help="larger numbers are served first; on a cluster a PriorityClass",
        ),
    ] = ""
    time_limit: Annotated[
        str,
        typer.Option(
            "--time-limit", metavar="TIME", help="end the job then; short jobs may start earlier"
        ),
    ] = ""

    team: Annotated[
        str,
        typer.Option(
            "--team",
            metavar="NAME",
            help="who `fenka usage --by team` counts it for; default: FENKA_TEAM, your primary group",
        ),
    ] = ""

    def resources(self) -> GpuResources:
        """Return what each process gets of the cards. Raises UserError for contradictory options."""
        self._check()
        return GpuResources(
            self.gpu_mem,
            self.gpu_core or 0,
            self.gpu_core_mode or "hard",
            self.gpus or (self.mig_count if self.mig else self.cards),
            bool(self.gpus),
            self.model or [],
            self.mig,
            self.inside,
            self.topology,
        )

    def spec(self, kind: JobKind, command: list[str], gang: int | None = None) -> JobSpec:
        """Return the job. Raises UserError for contradictory options, and InvalidRequest."""
        spec = JobSpec(
            command,
            self.resources(),
            name=self.name or generate_name(command),
            kind=kind,
            directory=str(Path.cwd()),
            gang=gang,
            priority=parse_priority(self.priority),
            time_limit_s=_time_limit_s(self.time_limit),
            isolation=self.isolation,
            allow_user_namespaces=self.allow_user_namespaces,
            allow_unlimited_drivers=self.allow_unlimited_drivers,
            team=self.team,
        )
        spec.validate()
        return spec

    def _check(self) -> None:
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
        if self.mig and self.cards != 1:
            raise UserError(
                "--mig takes instances: say how many with --mig-count, and leave out --cards",
                INVALID_INPUT,
            )
        if not self.mig and self.mig_count != 1:
            raise UserError("--mig-count requires --mig", INVALID_INPUT)
        if not self.gpus and not self.gpu_mem and not self.mig:
            raise UserError(
                "no amount given: use --gpu-mem 4 for a slice, --gpus 1 for a card, or --mig 1g.5gb for an "
                "instance",
                INVALID_INPUT,
            )
        if self.timeout is not None and not math.isfinite(self.timeout):
            raise UserError(
                "--timeout must be a number of seconds; leave it out to wait indefinitely",
                INVALID_INPUT,
            )

    def launcher(self, spec: JobSpec, environment: dict[str, str] | None = None) -> Launcher:
        """Return what starts the job."""
        return Launcher(
            paths.current(),
            spec,
            report_errors,
            # Within no time not even the answer would come.
            not self.no_wait and self.timeout != 0,
            self.timeout or None,
            environment or {},
            self.numa,
        )


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="the program and its arguments")
    ],
    options: JobOptions,
    gang: Annotated[
        int | None,
        typer.Option("--gang", metavar="N", help="N processes with such a slice each, all or none"),
    ] = None,
    status_fd: Annotated[
        int | None,
        typer.Option(
            "--status-fd",
            metavar="FD",
            help="write lines about the wait to this descriptor, at last `started` or `failed: REASON`",
        ),
    ] = None,
) -> None:
    """Become the program, or a gang's supervisor; or start it in the background."""
    if status_fd is None:
        _run(command, options, gang)
        return
    if options.detach or gang is not None:
        raise UserError("--status-fd: leave out --detach and --gang", INVALID_INPUT)
    notify = _status_lines(status_fd)

    def fail(sentence: str) -> None:
        print_error(sentence)
        notify(FAILED + sentence)

    with report_errors(fail):
        _run(command, options, None, notify)


def _run(
    command: list[str], options: JobOptions, gang: int | None, notify: Notify | None = None
) -> None:
    """Start the job. notify: gets the lines of `--status-fd`."""
    _check_program(command[0])  # before a slice is requested
    spec = options.spec("run", command, gang)
    runs.check_name_is_free(spec.name)
    launcher = options.launcher(spec)
    if notify:
        launcher.exec_program(notify, lambda: notify(STARTED))
    if options.detach:
        detach(*with_directory(launcher))
    launcher.start(print_error)


def _status_lines(descriptor: int) -> Notify:
    """Return a function that writes lines to a descriptor, which is closed when the program starts.

    Raises UserError if it is not open.
    """
    try:
        # Not one of the program's own.
        os.set_inheritable(descriptor if descriptor > 2 else -1, False)
    except (OSError, OverflowError):
        raise UserError(
            f"--status-fd {descriptor} is no open descriptor from 3 on: open one, as in "
            "`fenka run --status-fd 3 3>FILE`",
            INVALID_INPUT,
        ) from None

    def notify(line: str) -> None:
        with contextlib.suppress(OSError):  # The program starts though nobody reads this any more.
            os.write(descriptor, f"{tables.escape(line)}\n".encode(errors="replace"))

    return notify


def _time_limit_s(text: str) -> float | None:
    """Return the seconds of `1h30m` or of a number of seconds; None if it is empty. Raises UserError."""
    if not text:
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    return parse_duration("--time-limit", text)


def _check_program(name: str) -> None:
    """Raise UserError if there is no such program, or its file cannot be executed."""
    if shutil.which(name) is not None:
        return
    file = Path(name)
    if "/" in name and file.is_dir():
        raise UserError(f"{name} is a directory: name the program in it", NOT_EXECUTABLE)
    if "/" in name and file.exists():
        raise UserError(
            f"{name} is not executable: make it so (chmod +x {name}), or name the program that runs it, such "
            f"as sh {name}",
            NOT_EXECUTABLE,
        )
    here = f": for the file here, write ./{name}" if file.is_file() else ""
    raise UserError(f"there is no program called {name}{here}", PROGRAM_NOT_FOUND)


def with_directory(launcher: Launcher) -> tuple[Launcher, Path]:
    """Return a new directory for a run of the job, and the launcher of the job with the run's number."""
    directory, number = runs.create_job_directory(launcher.runtime, launcher.spec.name)
    return replace(launcher, spec=msgspec.structs.replace(launcher.spec, run=number)), directory


def detach(launcher: Launcher, job_dir: Path) -> NoReturn:
    """Start the job in the background, print its state, and exit."""

    def body(notify: Callable[[str], None], started: Callable[[], None]) -> None:
        launcher.start(notify, started, job_dir)

    end = job_dir / "end"
    with start_in_background(body, job_dir / "log", report_errors, end) as process:
        if process.room:
            print_error(process.room)
        _print_state(launcher.spec, process, job_dir)
    if process.logout:
        print_error(f"{launcher.spec.name} {process.logout}")
    sys.exit(0)


def print_notes(url: str, job_dir: Path, name: str) -> None:
    """Print to stderr the tunnel of a notebook, and the reason for which its address has no own name."""
    path = jupyter.socket_path(job_dir)
    if path.is_socket():
        print(tunnel_sentence(urlsplit(url).port or 0, str(path)), file=sys.stderr, flush=True)
    record = NOTEBOOKS.load(name)
    if sentence := jupyter.unnamed_sentence(job_dir, name, record.reach):
        print_error(sentence)


def _print_state(spec: JobSpec, process: BackgroundProcess, job_dir: Path) -> None:
    """Print the state of a job in the background. Raises JobNotStarted, NotebookFailed."""
    for line in process.status_lines():
        if line.startswith("waiting"):
            # It may wait for hours.
            print(f"{spec.name}: {tables.escape(line)}; it starts by itself")
            return
    if spec.kind == "notebook":
        with tables.spinner(f"{spec.name}: starting Jupyter …"):
            url = jupyter.await_url(process.pid, job_dir, spec.name)
        print(f"{spec.name}: {url}")
        print_notes(url, job_dir, spec.name)
    else:
        print(f"{spec.name}: started, see `fenka logs {spec.name}`")
