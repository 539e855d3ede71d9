"""`fenka list`, `get` and `top job`, and `fenka serve list`: workloads, their instances and their cards."""

import time
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from fenka.cli import screen_layouts, tables
from fenka.cli.common_options import WideOutputOption
from fenka.cli.compat import arena
from fenka.cli.error_report import UserError
from fenka.cli.screen_layouts import LayoutOption
from fenka.cli.workloads import screens
from fenka.cli.workloads.arguments import (
    SERVICE_NAMES,
    AllNamespacesOption,
    InstanceOption,
    JobTarget,
    NameArgument,
    TypeOption,
    WorkloadChoice,
)
from fenka.cli.workloads.json_output import document
from fenka.cli.workloads.selection import (
    Backend,
    find,
    find_job,
    find_jobs_or_versions,
    of_type,
    open_backend,
)
from fenka.views.workloads import JobProcess, ServiceVersion, TrainingJob

REFRESH_S = 2.0
DATA = ("json", "yaml")


def list_jobs(
    target: JobTarget,
    all_namespaces: AllNamespacesOption = False,
    type_: TypeOption = None,
    output: WideOutputOption = "table",
    layout: LayoutOption = None,
) -> None:
    """Print all jobs, the newest first."""
    if type_ in SERVICE_NAMES:
        list_services(target, all_namespaces, output=output)
        return
    layout_screens = arena if screen_layouts.uses_arena(layout) else screens
    backend = open_backend(target, all_namespaces=all_namespaces)
    jobs, now = of_type(backend.jobs(), type_), time.time()
    if not tables.print_data([document(job, now) for job in jobs], output, arena=True):
        lines = layout_screens.list_screen(jobs, now, all_namespaces=all_namespaces)
        tables.print_lines(lines)


def list_services(
    target: JobTarget,
    all_namespaces: AllNamespacesOption = False,
    server: Annotated[
        Literal["custom", "tensorflow", "tf", "triton"] | None,
        typer.Option("-T", "--type", help="only services of this kind"),
    ] = None,
    output: WideOutputOption = "table",
) -> None:
    """Print all versions of services."""
    backend = open_backend(target, all_namespaces=all_namespaces)
    kind = "tensorflow" if server == "tf" else server
    versions = [version for version in backend.versions() if kind in (None, version.kind)]
    now = time.time()
    if not tables.print_data([document(version, now) for version in versions], output, arena=True):
        tables.print_lines(screens.services_screen(versions, all_namespaces=all_namespaces))


def get(
    target: JobTarget,
    name: NameArgument,
    choice: WorkloadChoice,
    events: Annotated[bool, typer.Option("-e", "--events", help="show its events")] = False,
    gpus: Annotated[bool, typer.Option("-g", "--gpus", "--gpu", help="show its cards")] = False,
    output: WideOutputOption = "table",
    layout: LayoutOption = None,
) -> None:
    """Print a workload and its instances, of a service all versions."""
    layout_screens = arena if screen_layouts.uses_arena(layout) else screens
    backend = open_backend(target)
    job, versions = find_jobs_or_versions(backend, name, choice, positions=output in DATA)
    if len(versions) > 1:
        _print_versions(backend, versions, output, events=events)
        return
    workload = job or versions[0]
    if output not in DATA and isinstance(workload, TrainingJob) and workload.status == "PENDING":
        # The position takes all pods of the cluster, so only a job that waits is read with it.
        workload = find(backend, name, choice, positions=True)
    shown_events, now = backend.events(workload) if events else [], time.time()
    if tables.print_data(document(workload, now), output, arena=True):
        return
    if isinstance(workload, ServiceVersion):
        lines = screens.service_screen(workload, now)
    else:
        lines = layout_screens.get_screen(workload, now)
        if gpus and workload.status != "SUCCEEDED":
            lines += screens.gpus_block(workload)
        lines += layout_screens.tensorboard_lines(workload)
        lines += screens.notebook(workload)
    if events:
        lines += screens.events_block(shown_events, now)
    tables.print_lines([*lines, *screens.notes(workload)])


def _print_versions(
    backend: Backend, versions: list[ServiceVersion], output: str, *, events: bool
) -> None:
    """Print several versions of a service, one after the other."""
    now = time.time()
    if tables.print_data([document(version, now) for version in versions], output, arena=True):
        return
    for number, version in enumerate(versions):
        lines = screens.service_screen(version, now)
        if events:
            lines += screens.events_block(backend.events(version), now)
        tables.print_lines([*([""] if number else []), *lines, *screens.notes(version)])


def top_job(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="only this job")] = "",
    instance: InstanceOption = "",
    refresh: Annotated[
        bool, typer.Option("-r", "--refresh", help="print again every 2 seconds")
    ] = False,
    all_namespaces: AllNamespacesOption = False,
    type_: TypeOption = None,
    output: WideOutputOption = "table",
    layout: LayoutOption = None,
) -> None:
    """Print the cards of all jobs, or of one job's instances."""
    if instance and not name:
        raise UserError("--instance requires a job: fenka top job NAME -i INSTANCE")
    layout_screens = arena if screen_layouts.uses_arena(layout) else screens
    backend = open_backend(target, all_namespaces=all_namespaces)
    while True:
        jobs = (
            [find_job(backend, name, type_, positions=output in DATA)]
            if name
            else of_type(backend.jobs(), type_)
        )
        jobs, now = sorted(jobs, key=_most_cards_first), time.time()
        if not tables.print_data([document(job, now) for job in jobs], output, arena=True):
            lines = (
                _instances_screen(jobs[0], instance, now)
                if name
                else layout_screens.top_screen(jobs, now, all_namespaces=all_namespaces)
            )
            tables.print_lines(lines)
        if not refresh:
            return
        print(f"{'-' * 43} {screens.moment(now)} {'-' * 52}", flush=True)
        time.sleep(REFRESH_S)


def _most_cards_first(job: TrainingJob) -> tuple[float, str, str]:
    return -(job.requested or 0), job.namespace, job.name


def _instances_screen(job: TrainingJob, name: str, now: float) -> list[str]:
    instances: Sequence[JobProcess] = job.instances
    if name:
        instance = job.instance(name)
        if instance is None:
            raise UserError(
                f"job {job.name} has no instance {name}: fenka get {job.name} lists them"
            )
        instances = [instance]
    header = (
        "NAME",
        "STATUS",
        "GPU(Request)",
        "NODE",
        "GPU(DeviceIndex)",
        "GPU(DutyCycle)",
        "GPU_MEMORY(Used/Total)",
    )
    rows = [
        row
        for instance in instances
        for row in screens.card_rows(
            instance,
            (
                instance.name,
                instance.status,
                screens.cards(instance.requested),
                instance.node_address or screens.UNKNOWN,
            ),
        )
    ]
    # arena's last rule is shorter than its title.
    table = screens.block("Instances:", header, rows, rules={"GPU_MEMORY(Used/Total)": 15})
    return [*screens.head(job, now), *table, "", "GPUs:", screens.totals(job)]
