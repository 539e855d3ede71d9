"""`fenka queue`: who waits, in the order in which they are served."""

import time

from fenka.cli import tables
from fenka.cli.cluster import Target
from fenka.cli.listing import age
from fenka.cli.rows import QueueRow
from fenka.workstation import protocol


def queue(target: Target, output: str) -> None:
    """Print the queue of the world that these options mean."""
    rows = rows_of(target)
    if tables.show(rows, output):
        return
    if not rows:
        print("nobody waits: what is asked for now starts at once, if it fits")
        return
    tables.put(tables.fit(table(rows, time.time())))


def rows_of(target: Target) -> list[QueueRow]:
    """Who waits, in order."""
    from fenka.cli import cluster

    here = cluster.local(target)
    if here is not None:
        return local_rows(here)
    from fenka.cli.queue_cluster import cluster_rows

    return cluster_rows(target)


def local_rows(world: protocol.Snapshot) -> list[QueueRow]:
    """This machine's. A request's namespace is its user; cards are called by their index."""
    return [
        QueueRow(
            position=job.position,
            name=job.name,
            namespace=job.user,
            priority=job.priority,
            asks=job.summary,
            since=job.requested_at,
            reserved=[str(card) for card in job.reserved],
            starts_by=job.starts_by,
            why=job.reason,
            used_s=job.used_s,
        )
        for job in world.jobs
        if job.position is not None
    ]


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
