"""`fenka notebook` and `fenka start`: Jupyter with a slice and a password, on a cluster or here."""

import ctypes
import getpass
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from fenka.cli import workload_options
from fenka.cli.common_options import NamespaceOption, Target, parse_duration
from fenka.cli.error_report import UserError, print_error, report_errors
from fenka.cli.run import JobOptions, detach, print_notes, with_directory
from fenka.cli.workloads.arguments import JobTarget
from fenka.cli.workloads.selection import is_here
from fenka.cli.world import runs_here
from fenka.core.errors import INVALID_INPUT
from fenka.jobs import notebook as jupyter
from fenka.jobs.job_spec import generate_name
from fenka.jobs.notebook_spec import NotebookSpec, validate_idle
from fenka.jobs.processes import run_attached
from fenka.jobs.text_fields import parse_fields
from fenka.local import lease_jobs, runs
from fenka.local.launch import Launcher
from fenka.local.records import NOTEBOOKS, NotebookRecord
from fenka.workstation import paths

MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PasswordOptions:
    """The password of a notebook."""

    password: Annotated[
        str,
        typer.Option(
            "--password",
            envvar="PASSWORD",
            help="password of the login page; for a moment, ps shows one that is given here",
        ),
    ] = ""
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file", metavar="FILE", help="first line is the password; -: standard input"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.password:
            conceal(self.password)

    def read(self, *, ask: bool) -> str:
        """Return the password. `ask`: prompt for it on a terminal if none is given. Raises UserError."""
        if self.password_file is not None:
            if self.password:
                raise UserError("--password-file: leave out --password and PASSWORD", INVALID_INPUT)
            return _first_line(self.password_file)
        if not self.password and ask and sys.stdin.isatty():
            return getpass.getpass("Password of the notebook: ")
        return self.password


def _first_line(path: Path) -> str:
    if str(path) == "-":
        line = sys.stdin.readline(MAX_FILE_BYTES)
    else:
        with path.open() as file:
            line = file.readline(MAX_FILE_BYTES)
    if not line.strip():
        raise UserError(f"{path} has no password in its first line", INVALID_INPUT)
    return line.rstrip("\r\n")


def conceal(password: str) -> None:
    """Overwrite the password among this process's arguments, which all users of the machine can read."""
    try:
        line = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start = int(fields[45])  # arg_start, the 48th field of the file
    except (OSError, IndexError, ValueError):
        return
    secret = password.encode(errors="surrogateescape")
    for match in re.finditer(rb"(?<=[\0=])%b(?=\0)" % re.escape(secret), line):
        if start:
            ctypes.memset(start + match.start(), ord("x"), len(secret))


_HERE_ONLY = (
    *("model", "no_wait", "isolation", "allow_user_namespaces", "allow_unlimited_drivers"),
    *("time_limit", "numa"),
)


_OF_ALL_JOBS = {parameter.name for parameter in fields(JobOptions)}

_ON_CLUSTER = tuple(
    field
    for field in workload_options.options_of(NotebookSpec)
    if field.parameter not in _OF_ALL_JOBS
)
"""The options of notebooks on a cluster that others do not have."""


@dataclass(frozen=True, slots=True)
class ReachOptions:
    """Where a notebook of this machine listens."""

    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="address to listen on, here; default: 127.0.0.1"
        ),
    ] = ""
    port: Annotated[
        int,
        typer.Option(
            "--port", help="port to listen on, here; default: a free one, drawn at random"
        ),
    ] = 0
    base_url: Annotated[
        str,
        typer.Option("--base-url", metavar="PATH", help="path of its URLs behind a proxy, here"),
    ] = ""

    def reach(self) -> jupyter.Reach:
        """Return where to listen. Raises InvalidRequest."""
        reach = jupyter.Reach(self.host, self.port, self.base_url)
        reach.validate()
        return reach


def notebook(
    *,
    options: JobOptions,
    password: PasswordOptions,
    reach_options: ReachOptions,
    target: Target,
    namespace: NamespaceOption = "",
    dry_run: workload_options.DryRunOption = False,
    output: workload_options.DryRunOutputOption = "yaml",
    directory: Annotated[
        Path | None,
        typer.Option("--directory", help="the notebook's root directory, on this machine"),
    ] = None,
    idle: Annotated[
        str,
        typer.Option(
            "--idle", metavar="TIME", help="end it after 2h, 30m without use of its slice"
        ),
    ] = "",
    **values: Any,
) -> None:
    """Start a Jupyter server; print its URL when it answers."""
    idle_s = parse_duration("--idle", idle) if idle else None
    given = workload_options.given_fields(values, _ON_CLUSTER)
    if runs_here(target, namespace):
        _refuse_cluster_options([*given, *(["dry-run"] if dry_run else [])])
        place = directory or Path(), reach_options.reach()
        _start_here(options, password.read(ask=False), place, idle_s)
    _refuse_local_options(options, directory, reach_options)
    spec = _spec(options, given, idle_s)
    _start_on_cluster(spec, password, options, (target, namespace), output if dry_run else None)


workload_options.add_options(notebook, _ON_CLUSTER, "notebook", taken=("-d",))


def start(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the notebook")],
    detach_: Annotated[
        bool, typer.Option("-d", "--detach", help="on a cluster: do not wait until it answers")
    ] = False,
) -> None:
    """Start a notebook again; print its URL when it answers."""
    if is_here(target, name):
        record = lease_jobs.load_stopped(name)
        launcher = Launcher(paths.current(), record.spec, report_errors)
        _run_here(record, launcher, detached=True)
    from fenka.cli.workloads import cluster_submission as of_cluster

    of_cluster.start(target, name)
    if not detach_:
        of_cluster.report_address(target, name, None)


def _refuse_cluster_options(given: Collection[str]) -> None:
    for option in given:
        if option != "image":
            raise UserError(
                f"--{option} is for a notebook on a cluster: leave it out, or use --cluster",
                INVALID_INPUT,
            )
    if given:
        print_error("--image is ignored on this machine, where notebooks run without containers")


def _refuse_local_options(options: JobOptions, directory: Path | None, reach: ReachOptions) -> None:
    given = {name for name in _HERE_ONLY if getattr(options, name) != getattr(JobOptions(), name)}
    given |= {field.name for field in fields(reach) if getattr(reach, field.name)}
    for name in [*sorted(given), *(["directory"] if directory else [])]:
        raise UserError(
            f"--{name.replace('_', '-')} is for a notebook on this machine: leave it out, or use --local",
            INVALID_INPUT,
        )


def _spec(options: JobOptions, given: Mapping[str, Any], idle_s: float | None) -> NotebookSpec:
    """Return a notebook on a cluster. Raises UserError, InvalidRequest."""
    gpu = options.resources()
    own = {
        "name": options.name or generate_name(["notebook"]),
        "gpus": gpu.cards if gpu.whole else 0,
        "gpu-mem": gpu.memory,
        "gpu-core": gpu.core,
        "gpu-core-mode": gpu.core_mode,
        "cards": 1 if gpu.whole else gpu.cards,
        "mig": gpu.mig,
        "inside": gpu.inside,
        "topology": gpu.topology,
        "priority": options.priority,
    }
    spec = parse_fields({**own, **given}, NotebookSpec)
    spec = msgspec.structs.replace(spec, idle_s=idle_s)
    spec.validate()
    return spec


def _start_on_cluster(
    spec: NotebookSpec,
    password: PasswordOptions,
    options: JobOptions,
    place: tuple[Target, str],
    dry_run: workload_options.DryRunOutput | None,
) -> None:
    from fenka.cli.workloads import cluster_submission as of_cluster

    secret = password.read(ask=True)
    target, namespace = place
    if dry_run is not None:
        of_cluster.print_objects(spec, secret, target, namespace, dry_run)
        return
    if spec.idle_s is not None and not spec.data:
        print_error("the notebook's files are lost when it ends: --data CLAIM:PATH keeps them")
    created = of_cluster.create(spec, secret, target, namespace)
    if not options.detach:
        of_cluster.report_address(created, spec.name, options.timeout)
        if spec.ingress:
            scheme = "https" if spec.tls_secret else "http"
            print(f"{spec.name}: {scheme}://{spec.ingress}/lab, by its Ingress")


def _start_here(
    options: JobOptions, password: str, place: tuple[Path, jupyter.Reach], idle_s: float | None
) -> NoReturn:
    directory, reach = place
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", INVALID_INPUT)
    if idle_s is not None:
        validate_idle(idle_s)
    spec = options.spec("notebook", ["notebook"])
    runs.check_name_is_free(spec.name)
    hashed = jupyter.hash_password(password) if password else ""
    record = NotebookRecord(spec, str(directory.resolve()), hashed, idle_s, reach)
    if reach.exposed:
        print_error(
            f"the notebook listens on {reach.host} without encryption, unless your Jupyter settings "
            "name a certificate: `ssh -L` to a notebook on 127.0.0.1 is encrypted"
        )
    _run_here(record, detached=options.detach, launcher=options.launcher(spec))


def _run_here(record: NotebookRecord, launcher: Launcher, *, detached: bool) -> NoReturn:
    """Run a notebook of this machine, and exit: with its code if it is not detached."""
    launcher, job_dir = with_directory(launcher)
    NOTEBOOKS.save(job_dir, record)
    server = jupyter.render(
        job_dir,
        Path(record.root),
        record.hashed_password,
        paths.port_reservations(),
        record.idle_s,
        record.reach,
    )
    launcher = replace(
        launcher,
        spec=msgspec.structs.replace(launcher.spec, command=server.command),
        environment=server.environment,
    )
    if detached:
        detach(launcher, job_dir)
    code = run_attached(
        lambda: launcher.exec_program(print_error, jupyter.ignore_interrupts),
        lambda pid: jupyter.follow(
            pid, job_dir, lambda url: _announce(url, job_dir, launcher.spec.name)
        ),
        report_errors,
    )
    sys.exit(code)


def _announce(url: str, job_dir: Path, name: str) -> None:
    print(f"notebook: {url}", flush=True)
    print_notes(url, job_dir, name)
