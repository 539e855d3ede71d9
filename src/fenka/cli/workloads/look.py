"""`fenka list`, `get` and `top job`: training jobs, their instances and their cards."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from fenka.cli import layouts, tables
from fenka.cli.compat import arena
from fenka.cli.errors import UserError
from fenka.cli.layouts import LayoutOption
from fenka.cli.options import WideOutputOption
from fenka.cli.workloads import screens
from fenka.cli.workloads.backend import (
    AllNamespacesOption,
    InstanceOption,
    JobArgument,
    JobTarget,
    TypeOption,
)
from fenka.cli.workloads.screens import document, documents, is_document, print_document
from fenka.cli.workloads.selection import find_job, of_type, open_backend
from fenka.views.workloads import JobProcess, TrainingJob

REFRESH_S = 2.0


def list_jobs(
    target: JobTarget,
    all_namespaces: AllNamespacesOption = False,
    type_: TypeOption = None,
    output: WideOutputOption = "table",
    layout: LayoutOption = None,
) -> None:
    """Print all jobs, the newest first."""
    layout_screens = arena if layouts.uses_arena(layout) else screens
    backend = open_backend(target, all_namespaces=all_namespaces)
    jobs, now = of_type(backend.jobs(), type_), time.time()
    if not print_document(documents(jobs, now), output):
        lines = layout_screens.list_screen(jobs, now, all_namespaces=all_namespaces)
        tables.print_lines(lines)


def get(
    target: JobTarget,
    name: JobArgument,
    events: Annotated[bool, typer.Option("-e", "--events", help="show its events")] = False,
    gpus: Annotated[bool, typer.Option("-g", "--gpus", "--gpu", help="show its cards")] = False,
    type_: TypeOption = None,
    output: WideOutputOption = "table",
    layout: LayoutOption = None,
) -> None:
    """Print one job."""
    layout_screens = arena if layouts.uses_arena(layout) else screens
    backend = open_backend(target)
    job = find_job(backend, name, type_, positions=is_document(output))
    shown_events, now = backend.events(job) if events else [], time.time()
    if print_document(document(job, now), output):
        return
    lines = layout_screens.get_screen(job, now)
    if gpus and job.status != "SUCCEEDED":
        lines += screens.gpus_block(job)
    lines += layout_screens.tensorboard_lines(job)
    lines += screens.notebook(job)
    if events:
        lines += screens.events_block(shown_events, now)
    tables.print_lines([*lines, *screens.note(job)])


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
    layout_screens = arena if layouts.uses_arena(layout) else screens
    backend = open_backend(target, all_namespaces=all_namespaces)
    while True:
        jobs = (
            [find_job(backend, name, type_, positions=is_document(output))]
            if name
            else of_type(backend.jobs(), type_)
        )
        jobs, now = sorted(jobs, key=_most_cards_first), time.time()
        if not print_document(documents(jobs, now), output):
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
