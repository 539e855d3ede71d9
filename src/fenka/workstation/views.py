"""This machine as rows of the screens. A program's namespace is its user."""

from fenka.core.units import card_units, mib_to_units
from fenka.views.nodes import NodeRow, ProgramRow, card_rows, compute_by_card
from fenka.views.queue import QueueRow
from fenka.workstation.protocol import Snapshot


def node_row(snapshot: Snapshot) -> NodeRow:
    """Return this machine as a node."""
    sizes = {card.index: card.memory_mib for card in snapshot.cards}
    programs = [
        ProgramRow(
            job.name,
            job.user,
            {
                piece.card: mib_to_units(piece.memory_mib, sizes[piece.card], snapshot.unit_mib)
                for piece in job.slices
            },
            whole=len(job.slices) if job.whole else 0,
            core=compute_by_card((piece.card, piece.compute) for piece in job.slices),
        )
        for job in sorted(snapshot.jobs, key=lambda job: job.name)
        if job.slices
    ]
    return NodeRow(
        name=snapshot.node,
        address=snapshot.address,
        role="<none>",
        status="ready",
        shareable=True,
        whole=sum(program.whole for program in programs),
        cards=card_rows(
            (
                (card.index, card_units(card.memory_mib, snapshot.unit_mib), card.healthy)
                for card in snapshot.cards
            ),
            programs,
        ),
        core=any(program.core for program in programs),
        programs=programs,
        unhealthy=sum(not card.healthy for card in snapshot.cards),
        unit_mib=snapshot.unit_mib,
    )


def queue_rows(snapshot: Snapshot) -> list[QueueRow]:
    """Return the pending jobs in order. Cards are named by their index."""
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
        for job in snapshot.jobs
        if job.position is not None
    ]
