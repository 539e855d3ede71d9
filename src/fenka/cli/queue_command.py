"""`fenka queue`: the pending requests, in the order in which they are served."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import import_module

from fenka.cli import cluster, tables
from fenka.cli.common_options import OutputOption, Target, short_duration
from fenka.cli.error_report import print_error
from fenka.cli.world import snapshot_here
from fenka.cluster.objects import seconds
from fenka.cluster.pod_groups import names_pod_group
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.refusals import MAX_PAUSE_S, REFUSED
from fenka.cluster.training_objects import TrainingEvent
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.kubernetes.reader import read_cluster, read_pod_groups, read_scheduler_options
from fenka.views.workloads import QueueRow


def queue(target: Target, output: OutputOption = "table") -> None:
    """Print the queue of this machine or of a cluster."""
    rows = rows_of(target)
    if tables.print_data(rows, output):
        return
    if not rows:
        print("no request is pending: a new one starts at once if it fits")
        return
    tables.print_lines(tables.align_wrapped(table(rows, time.time())))


def rows_of(target: Target) -> list[QueueRow]:
    """Return the pending requests in order."""
    snapshot = snapshot_here(target)
    if snapshot is not None:
        from fenka.local.views import queue_rows

        return queue_rows(snapshot)

    def rows(api: Api) -> Awaitable[list[QueueRow]]:
        return cluster.or_served(api, cluster_rows(api), "queue", QueueRow)

    return cluster.ask(target, rows, cluster.explain_screen_denial)


async def cluster_rows(api: Api, report: Callable[[str], None] = print_error) -> list[QueueRow]:
    """Return the pending requests of a cluster in order. Raises ApiError, ApiUnreachable.

    report: receives a sentence if the scheduler's options cannot be read.
    """
    # fenka needs no linear algebra, whose threads would wait in a loop for 0.1 s when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    problem: Exception | None = None
    try:
        options = await read_scheduler_options(api)
    except (ApiError, InvalidRecord) as error:
        problem, options = error, SchedulerOptions()
    snapshot, refused, views = await asyncio.gather(
        # Finished pods count for what their namespaces have used.
        read_cluster(api, dialects=options.dialects, all_pods=True),
        _read_refused(api),
        # It imports numpy, while the server answers.
        asyncio.to_thread(import_module, "fenka.views.cluster_queue"),
    )
    if any(names_pod_group(pod) for pod in snapshot.pods):
        snapshot = replace(snapshot, groups=await read_pod_groups(api))
    if problem is not None:
        report(f"cannot read the scheduler's options, so its defaults are assumed: {problem}")
    rows: list[QueueRow] = views.cluster_queue(
        cluster.keep(snapshot), options, time.time(), refused
    )
    return rows


async def _read_refused(api: Api) -> dict[str, str]:
    """Return what the scheduler says of pods that another program refuses, by UID.

    It says so by events, as a pod that may not be changed can carry no annotation of it.
    """
    listed = await if_accepted(
        api.list("/api/v1/events", TrainingEvent, fieldSelector=f"reason={REFUSED}"), (403,)
    )
    oldest = time.time() - MAX_PAUSE_S
    recent = [event for event in (listed[0] if listed else ()) if (seconds(event.at) or 0) > oldest]
    recent.sort(key=lambda event: event.at)
    return {event.involved_object.uid: event.message for event in recent}


def table(rows: list[QueueRow], now: float) -> list[tuple[str, ...]]:
    """Return the table with its head line. The reason comes last, which narrow terminals wrap."""
    head = ("POSITION", "NAME", "NAMESPACE", "PRIORITY", "ASKS", "SINCE", "USED", "RESERVED", "WHY")
    return [
        head,
        *(
            (
                str(row.position or "-"),
                row.name,
                row.namespace,
                str(row.priority),
                row.asks,
                short_duration(now - row.since),
                short_duration(row.used_s),
                _reserved(row, now),
                row.why,
            )
            for row in rows
        ),
    ]


def _reserved(row: QueueRow, now: float) -> str:
    """Return the reserved cards, and the longest wait if it is known: `0,1 in 5m`."""
    cards = ",".join(row.reserved) or "-"
    return cards if row.starts_by is None else f"{cards} in {short_duration(row.starts_by - now)}"
