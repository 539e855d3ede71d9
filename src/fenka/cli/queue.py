"""`fenka queue`: who waits, in the order in which they are served."""

import time

from fenka.cli import cluster, tables
from fenka.cli.errors import print_error
from fenka.cli.jobs import age
from fenka.cli.options import OutputOption, Target
from fenka.cluster.scheduler_options import SchedulerOptions
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.client import Api, ApiError
from fenka.kubernetes.cluster_reader import read_cluster, read_scheduler_options
from fenka.views.queue import QueueRow, cluster_queue
from fenka.workstation.views import queue_rows


def queue(target: Target, output: OutputOption = "table") -> None:
    """Print the queue of the world that these options mean."""
    rows = rows_of(target)
    if tables.show(rows, output):
        return
    if not rows:
        print("nobody waits: what is asked for now starts at once, if it fits")
        return
    tables.put(tables.fit(table(rows, time.time())))


def rows_of(target: Target) -> list[QueueRow]:
    """Return the pending requests in order."""
    snapshot = cluster.local(target)
    if snapshot is not None:
        return queue_rows(snapshot)
    return cluster.ask(target, _cluster_rows)


async def _cluster_rows(api: Api) -> list[QueueRow]:
    try:
        options = await read_scheduler_options(api)
    except (ApiError, InvalidRecord) as error:
        print_error(f"the order is by default options, the scheduler's could not be read: {error}")
        options = SchedulerOptions()
    # Finished pods count for what their namespaces have used.
    snapshot = await read_cluster(api, dialects=options.dialects, all_pods=True)
    return cluster_queue(snapshot, options, time.time())


def table(rows: list[QueueRow], now: float) -> list[tuple[str, ...]]:
    """With its head line. The sentence comes last, where a narrow terminal cuts."""
    head = ("POSITION", "NAME", "NAMESPACE", "PRIORITY", "ASKS", "SINCE", "USED", "RESERVED", "WHY")
    return [
        head,
        *(
            (
                str(it.position),
                it.name,
                it.namespace,
                str(it.priority),
                it.asks,
                age(now - it.since),
                age(it.used_s),
                _reserved(it, now),
                it.why,
            )
            for it in rows
        ),
    ]


def _reserved(row: QueueRow, now: float) -> str:
    """`0,1 in 5m`: which cards, and in how long at the latest where that is known."""
    cards = ",".join(row.reserved) or "-"
    return cards if row.starts_by is None else f"{cards} in {age(row.starts_by - now)}"
