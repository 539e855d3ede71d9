"""`fenka ps`: programs, trainings, notebooks and services of this machine or a cluster."""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from importlib import import_module
from typing import Annotated

import msgspec
import typer

from fenka.cli import tables
from fenka.cli.common_options import OutputOption, cluster_configured, short_duration
from fenka.cli.workloads.arguments import AllNamespacesOption, JobTarget
from fenka.cli.workloads.selection import open_backend
from fenka.cli.world import snapshot_here
from fenka.jobs import notebook
from fenka.views.workloads import ServiceVersion, Workload, WorkloadRow, workload_row
from fenka.workstation import paths, protocol
from fenka.workstation.client import own_jobs
from fenka.workstation.protocol import EndedJob, describe_status

Columns = Mapping[str, Callable[[WorkloadRow], str]]


def ps(
    target: JobTarget,
    ended: Annotated[
        bool, typer.Option("--all", "-a", help="also jobs that have ended, and how")
    ] = False,
    all_namespaces: AllNamespacesOption = False,
    output: OutputOption = "table",
) -> None:
    """Print jobs, trainings, notebooks and services of this machine or a cluster.

    On this machine an exclamation mark after USED marks a job that exceeds its limits. A line below the table
    gives details. Further lines name the cards with memory that no lease uses: it counts as taken.
    """
    snapshot = None
    if not (target.namespace or all_namespaces):
        snapshot = snapshot_here(target, required=not cluster_configured())
    if snapshot is None:
        _print_cluster(target, output, ended=ended, all_namespaces=all_namespaces)
        return
    without_lease = _without_lease(snapshot, ended=ended)
    # `fenka ps` does not need it, and importing it takes an eighth of its start.
    past = import_module("fenka.local.runs").ended().jobs if ended else []
    jobs = [*snapshot.jobs, *without_lease]
    data = {"jobs": jobs, "ended": [*map(_document, past)]} if ended else jobs
    if tables.print_data(data, output):
        return
    rows: list[tuple[str, ...]] = [
        ("NAME", "KIND", "USER", "STATE", "GPU", "MEMORY", "CORE", "USED", "AGE", "COMMAND")
    ]
    rows += [*map(_row, snapshot.jobs), *map(_workload_row, without_lease)]
    violations = [
        f"! {job.name} {violation}; `fenka stop {job.name}` ends it"
        for job in snapshot.jobs
        for violation in job.violations
    ]
    violations += [f"! {job.name} {problem}" for job in snapshot.jobs for problem in job.problems]
    unleased = [f"card {card.index}: {card.unleased}" for card in snapshot.cards if card.unleased]
    tables.print_lines([*tables.align_to_terminal(rows), *violations, *unleased])
    if past:
        head = ("NAME", "RUN", "USER", "GPU", "PEAK", "WAITED", "RAN", "ENDED", "RESULT")
        newest = sorted(past, key=lambda job: -job.ended_at)
        tables.print_lines(["", *tables.align_wrapped([head, *map(_ended_row, newest)])])


def _without_lease(snapshot: protocol.MachineSnapshot, *, ended: bool) -> list[WorkloadRow]:
    """Return this user's trainings, notebooks and services of which the snapshot has no lease.

    Args:
        snapshot: The leases of this machine.
        ended: Return trainings that have ended and notebooks that were stopped, too.
    """
    leases = {name for job in own_jobs(snapshot) for name in (job.name, job.gang)}
    if not _have_records(leases):
        return []
    # Most users have none of them, and these modules take longer to import than the rest of `fenka ps`.
    from fenka.cli.workloads.local_backend import LocalBackend

    shown = list[WorkloadRow]()
    backend = LocalBackend()
    jobs, versions = backend.workloads()
    active = [job for job in jobs if job.trainer != "run" and (ended or not job.finished)]
    workloads: list[Workload] = [*active, *versions]
    for workload in workloads:
        own = set() if isinstance(workload, ServiceVersion) else {workload.name}
        if not (own | {process.pod for process in workload.instances}) & leases:
            shown.append(workload_row(workload))
    return shown


def _have_records(leases: Set[str]) -> bool:
    """Return whether a training, a notebook or a service of this user may have none of these leases."""
    names = {*paths.directory_names(paths.jobs_directory)} - leases
    services = bool(paths.directory_names(paths.services_directory))
    if services or not names:
        return services
    from fenka.local.records import NOTEBOOKS, TRAININGS

    # The others are logs.
    return any(store.exists(name) for store in (TRAININGS, NOTEBOOKS) for name in names)


def _workload_row(row: WorkloadRow) -> tuple[str, ...]:
    age = short_duration(time.time() - row.created)
    detail = row.why or row.address
    return (row.name, row.kind, row.user, row.state, "-", "-", "-", "-", age, detail)


def _print_cluster(target: JobTarget, output: str, *, ended: bool, all_namespaces: bool) -> None:
    """Print the workloads of a cluster. ended: those that have ended, too."""
    target = replace(target, cluster=True)
    backend = open_backend(target, all_namespaces=all_namespaces)
    jobs, versions = backend.workloads()
    active = [job for job in jobs if ended or not job.finished]
    rows = [*map(workload_row, active), *map(workload_row, versions)]
    if tables.print_data(rows, output):
        return
    now = time.time()
    namespace: Columns = {"NAMESPACE": lambda row: row.user} if all_namespaces else {}
    columns: Columns = {
        **namespace,
        "NAME": lambda row: row.name,
        "KIND": lambda row: row.kind,
        "VERSION": lambda row: row.version or "-",
        "STATE": lambda row: row.state,
        "GPU": lambda row: "-" if row.requested is None else f"{row.requested:g}",
        "AGE": lambda row: short_duration(now - row.created),
        "NODE": lambda row: row.node or "-",
        "DETAIL": lambda row: row.why or row.address or "-",
    }
    if not any(row.version for row in rows):
        columns = {title: cell for title, cell in columns.items() if title != "VERSION"}
    tables.print_lines(tables.align_to_terminal(tables.tabulate(rows, columns)))


def _ended_row(job: EndedJob) -> tuple[str, ...]:
    return (
        job.name,
        str(job.run or "-"),
        job.user,
        ",".join(map(str, job.cards)) or "-",
        "+".join(f"{mib}MiB" for mib in job.peak_mib) or "-",
        short_duration(job.waited_s),
        "-" if job.ran_s is None else short_duration(job.ran_s),
        f"{short_duration(time.time() - job.ended_at)} ago",
        job.sentence,
    )


def _document(job: EndedJob) -> dict[str, object]:
    """Return a job as data: its record, with the exit code or the signal."""
    number = None if job.status is None else job.status & 0x7F
    return {
        **msgspec.structs.asdict(job),
        "exit_code": None if number != 0 else job.exit_code,
        "signal": describe_status(job.status) if job.status is not None and number else None,
        "waited_s": job.waited_s,
        "ran_s": job.ran_s,
        "why": job.sentence,
    }


def _row(job: protocol.JobView) -> tuple[str, ...]:
    state = f"waiting ({job.position})" if job.state == "waiting" else job.state
    if job.container_id and job.state == "running" and not job.pids:
        state = "kept"  # for its next start
    used = [slice_.used_mib for slice_ in job.slices if slice_.used_mib is not None]
    return (
        job.name,
        job.kind,
        job.user,
        state,
        ",".join(map(_place, job.slices)) or "-",
        "+".join(f"{slice_.memory_mib}MiB" for slice_ in job.slices) or job.summary,
        _core(job),
        (f"{sum(used)}MiB" if used else "-") + ("!" if job.violations or job.problems else ""),
        short_duration(time.time() - (job.started_at or job.requested_at)),
        job.reason if job.state == "waiting" else _command(job),
    )


def _place(piece: protocol.SliceView) -> str:
    """Return `0`, or `0/4 3g.20gb` for an instance."""
    return f"{piece.card}/{piece.start} {piece.profile}" if piece.profile else str(piece.card)


def _core(job: protocol.JobView) -> str:
    """Return the share of each card's time."""
    if not job.slices or not job.slices[0].compute:
        return "-"
    first = job.slices[0]
    return f"{first.compute}%" + ("" if first.compute_mode == "hard" else f" {first.compute_mode}")


def _command(job: protocol.JobView) -> str:
    # Names are each user's own.
    own = job.kind == "notebook" and job.uid == os.geteuid()
    url = notebook.url(paths.jobs_directory() / job.name) if own else None
    return url or shlex.join(job.command)
