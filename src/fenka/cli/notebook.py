"""`fenka notebook` and `fenka start`: Jupyter with a slice, on a cluster or on this machine."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from fenka.cli.durations import parse_duration
from fenka.cli.errors import UserError, print_error, report_errors
from fenka.cli.manifests import DryRunOption, DryRunOutputOption
from fenka.cli.options import NamespaceOption, Target
from fenka.cli.password import PasswordOptions
from fenka.cli.run import JobOptions, detach, with_directory
from fenka.cli.training.backend import JobTarget
from fenka.cli.training.selection import runs_here
from fenka.core.errors import INVALID_INPUT
from fenka.jobs import notebook as jupyter
from fenka.jobs.notebook_spec import NotebookSpec, validate_idle
from fenka.jobs.processes import run_attached
from fenka.jobs.spec import generate_name
from fenka.jobs.workload import ServiceType
from fenka.workstation import notebooks, paths, records
from fenka.workstation.launch import Launcher
from fenka.workstation.notebooks import NotebookRecord

_HERE_ONLY = (
    *("model", "no_wait", "isolation", "allow_user_namespaces", "priority", "time_limit"),
    *("mig", "mig_count", "inside"),
)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What a notebook on a cluster has besides its slice."""

    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="image with Jupyter, on a cluster")
    ] = ""
    service: Annotated[
        ServiceType | None,
        typer.Option("--service", help="how it is reached; default: LoadBalancer"),
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="CLAIM:PATH", help="mount a PersistentVolumeClaim"),
    ] = None
    cpu: Annotated[
        str, typer.Option("--cpu", metavar="N", help="processors, for example 2 or 500m")
    ] = ""
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="memory, for example 4Gi")
    ] = ""
    interruptible: Annotated[
        bool,
        typer.Option(
            "--interruptible", help="may run on spot instances, which the cloud takes back"
        ),
    ] = False
    dry_run: DryRunOption = False
    output: DryRunOutputOption = "yaml"


def notebook(
    options: JobOptions,
    password: PasswordOptions,
    cluster_options: ClusterOptions,
    target: Target,
    namespace: NamespaceOption = "",
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
) -> None:
    """Start a Jupyter server; print its URL when it answers."""
    idle_s = parse_duration("--idle", idle) if idle else None
    if runs_here(target, namespace):
        _refuse_cluster_options(cluster_options)
        _start_here(options, password.read(ask=False), directory or Path(), idle_s)
    else:
        _refuse_local_options(options, directory)
        _start_on_cluster(options, password, cluster_options, (target, namespace), idle_s)


def start(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the notebook")],
    detach_: Annotated[
        bool, typer.Option("-d", "--detach", help="on a cluster: do not wait until it answers")
    ] = False,
) -> None:
    """Start a notebook again; print its URL when it answers."""
    if runs_here(target, target.namespace) or (not target.of_cluster and notebooks.exists(name)):
        record = notebooks.load_stopped(name)
        launcher = Launcher(paths.current(), record.spec, report_errors)
        _run_here(record, launcher, detached=True)
    from fenka.cli.training import notebooks as of_cluster

    of_cluster.start(target, name)
    if not detach_:
        of_cluster.report_address(target, name, None)


def _refuse_cluster_options(options: ClusterOptions) -> None:
    for field in fields(ClusterOptions):
        if field.name in ("image", "output") or not getattr(options, field.name):
            continue
        option = field.name.replace("_", "-")
        raise UserError(
            f"--{option} is for a notebook on a cluster: leave it out, or use --cluster",
            INVALID_INPUT,
        )
    if options.image:
        print_error("--image is ignored on this machine, where notebooks run without containers")


def _refuse_local_options(options: JobOptions, directory: Path | None) -> None:
    given = {name for name in _HERE_ONLY if getattr(options, name) != getattr(JobOptions(), name)}
    for name in [*sorted(given), *(["directory"] if directory else [])]:
        raise UserError(
            f"--{name.replace('_', '-')} is for a notebook on this machine: leave it out, or use --local",
            INVALID_INPUT,
        )


def _start_on_cluster(
    options: JobOptions,
    password: PasswordOptions,
    given: ClusterOptions,
    place: tuple[Target, str],
    idle_s: float | None,
) -> None:
    from fenka.cli.training import notebooks as of_cluster

    spec = NotebookSpec(
        options.name or generate_name(["notebook"]),
        given.image,
        options.resources(),
        cpu=given.cpu,
        memory=given.memory,
        service=given.service or "LoadBalancer",
        data=given.data or [],
        interruptible=given.interruptible,
        idle_s=idle_s,
    )
    spec.validate()
    secret = password.read(ask=True)
    target, namespace = place
    if given.dry_run:
        of_cluster.print_objects(spec, secret, target, namespace, given.output)
        return
    if spec.idle_s is not None and not spec.data:
        print_error("the notebook's files are lost when it ends: --data CLAIM:PATH keeps them")
    created = of_cluster.create(spec, secret, target, namespace)
    if not options.detach:
        of_cluster.report_address(created, spec.name, options.timeout)


def _start_here(
    options: JobOptions, password: str, directory: Path, idle_s: float | None
) -> NoReturn:
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", INVALID_INPUT)
    if idle_s is not None:
        validate_idle(idle_s)
    spec = options.spec("notebook", ["notebook"])
    records.check_name_is_free(spec.name)
    hashed = jupyter.hash_password(password) if password else ""
    record = NotebookRecord(spec, str(directory.resolve()), hashed, idle_s)
    _run_here(record, detached=options.detach, launcher=options.launcher(spec))


def _run_here(record: NotebookRecord, launcher: Launcher, *, detached: bool) -> NoReturn:
    """Run a notebook of this machine, and exit: with its code if it is not detached."""
    launcher, job_dir = with_directory(launcher)
    notebooks.save(record)
    server = jupyter.render(
        job_dir,
        Path(record.root),
        record.hashed_password,
        paths.port_reservations(),
        record.idle_s,
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
        lambda pid: jupyter.follow(pid, job_dir, _announce),
        report_errors,
    )
    sys.exit(code)


def _announce(url: str) -> None:
    print(f"notebook: {url}", flush=True)
