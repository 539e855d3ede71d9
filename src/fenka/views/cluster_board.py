"""A cluster as the dashboard's messages: its snapshot, its queue and its nodes' readings in, values out."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.cluster.objects import Pod, seconds
from fenka.cluster.pod_groups import group_name
from fenka.cluster.state import ClusterState, PodAllocation
from fenka.core.inventory import Card, DeviceId
from fenka.core.mig.instances import usable_mib
from fenka.dialects import nodes
from fenka.dialects.base import GIB_MIB, InvalidRecord, SharedNode
from fenka.views import board
from fenka.views.board_sums import (
    IDLE_AFTER_S,
    MAX_WAITING,
    idle_for,
    people,
    total,
    workload_line,
)
from fenka.views.mig_rows import usable_units
from fenka.views.node_figures import CardFigures, NodeFigures, SliceFigures
from fenka.views.node_summaries import NodeSummary
from fenka.views.workloads import QueueRow, Workload, workload_row

MAX_CARDS = 64
"""Cards that are drawn one by one; more are a Fleet."""

MAX_PROGRAMS = 200
"""Programs that are listed where there are more cards: those that hold most while they are idle."""

HOT_C = 85
"""Degrees Celsius from which on a card is marked."""

UNKNOWN = 255
"""The byte of a share that is not known."""
WHOLE = 254


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node's part of the messages. It changes with its pods and its figures, and is kept till then."""

    tiles: Sequence[board.CardTile] = ()
    programs: Sequence[board.ProgramLine] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The parts of one look at a cluster.

    Attributes:
        name: of the cluster, for people.
        version: of this program.
        parts: of the nodes that share cards, by name.
        queue: the pending requests in order.
        summaries: the nodes' lines, as `fenka top` has them.
        seen_at: when each node answered last, in Unix seconds.
        notes: why a node takes nothing new, by its name.
        workloads: trainings, notebooks and versions of services.
        prices: of an hour of a node, by name.
        problems: sentences about what is not known now.
    """

    name: str
    version: str
    parts: Mapping[str, NodePart] = field(default_factory=dict)
    queue: Sequence[QueueRow] = ()
    summaries: Sequence[NodeSummary] = ()
    seen_at: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    workloads: Sequence[Workload] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    currency: str = ""
    problems: Sequence[str] = ()


def world(view: ClusterView, now: float) -> board.World:
    """Return all that the page shows of a cluster. now: Unix seconds."""
    tiles = [tile for part in view.parts.values() for tile in part.tiles]
    programs = [program for part in view.parts.values() for program in part.programs]
    free = [_free_mib(tile) for tile in tiles]
    few = len(tiles) <= MAX_CARDS
    return board.World(
        at=now,
        place="cluster",
        name=view.name,
        version=view.version,
        simulated=False,
        unit_mib=tiles[0].memory_mib // tiles[0].units if tiles and tiles[0].units else GIB_MIB,
        cards=tiles if few else [],
        programs=programs if few else _most_idle(programs),
        programs_total=len(programs),
        waiting=[_waiting(row) for row in view.queue[:MAX_WAITING]],
        waiting_total=len(view.queue),
        workloads=[
            workload_line(workload, [pod.pod for pod in workload.instances if pod.pod])
            for workload in view.workloads
        ],
        people=people(programs, [(row.namespace, row.since) for row in view.queue]),
        nodes=[_node(view, summary) for summary in view.summaries],
        free_mib=sum(free),
        largest_mib=max(free, default=0),
        problems=[*view.problems],
        currency=view.currency,
    )


def fleet(parts: Mapping[str, NodePart], now: float) -> board.Fleet:
    """Return all cards of a cluster in three bytes each. now: Unix seconds."""
    cards = bytearray()
    for part in parts.values():
        idle = {program.id for program in part.programs if program.idle_s is not None}
        for tile in part.tiles:
            held = tile.held_mib / tile.memory_mib if tile.memory_mib else 0.0
            cards += bytes((_byte(min(held, 1.0)), _byte(tile.busy), _flags(tile, idle)))
    return board.Fleet(now, [*parts], [len(part.tiles) for part in parts.values()], bytes(cards))


def node_part(
    state: ClusterState,
    name: str,
    reading: NodeFigures | None,
    workloads: Mapping[tuple[str, str], Workload],
    now: float,
    idle_after_s: float = IDLE_AFTER_S,
) -> NodePart:
    """Return a node's cards and programs; nothing of a node that does not share its cards.

    Args:
        state: the cluster.
        name: the node's name.
        reading: the node's last; None before it has answered.
        workloads: by namespace and name of their pods.
        now: Unix seconds.
        idle_after_s: without card time, before a program is called idle.
    """
    shared, node = state.shared_node(name), state.node(name)
    if shared is None or node is None:
        return NodePart()
    readings = {(piece.pod, piece.device): piece for piece in reading.slices} if reading else {}
    figures = {card.uuid: card for card in reading.cards} if reading else {}
    outside, free = nodes.unleased_memory(node.metadata.annotations), _free_units(state, shared)
    slices: dict[str, list[board.SliceTile]] = {}
    programs = []
    for held in state.allocations(name):
        for uuid, tile in _slices(shared, held, readings):
            slices.setdefault(uuid, []).append(tile)
        meta = held.pod.metadata
        workload = workloads.get((meta.namespace, meta.name))
        programs.append(_program(shared, held, readings, workload, (now, idle_after_s)))
    tiles = [
        _card(
            shared,
            card,
            free[card.uuid],
            figures.get(card.uuid),
            slices.get(card.uuid, []),
            outside.get(card.index, ""),
        )
        for card in shared.physical_cards
    ]
    return NodePart(tiles, programs)


_Readings = Mapping[tuple[str, str], SliceFigures]
"""By UID of the pod, and device."""


def _slices(
    shared: SharedNode, held: PodAllocation, readings: _Readings
) -> Iterator[tuple[str, board.SliceTile]]:
    """Yield an allocation's slices with the UUIDs of their cards."""
    devices = {card.uuid: card for card in shared.node.cards}
    meta = held.pod.metadata
    for piece in held.slices:
        read, device = readings.get((meta.uid, piece.uuid)), devices.get(piece.uuid)
        yield (
            piece.card_uuid,
            board.SliceTile(
                program=meta.uid,
                name=meta.name,
                user=meta.namespace,
                held_mib=piece.memory_mib,
                used_mib=read.used_mib if read else None,
                compute=piece.compute,
                compute_mode=held.pod.demand().core_mode,
                busy=read.busy if read else None,
                profile=device.profile if device else "",
                start=device.start if device else 0,
            ),
        )


def _free_units(state: ClusterState, shared: SharedNode) -> dict[DeviceId, int]:
    """Return the whole units that each card could still give, by its UUID."""
    free: dict[DeviceId, int] = {}
    for card in shared.physical_cards:
        usage = state.card_usage(shared.node.name, card.uuid)
        left = max(card.available_mib - usage.memory_mib, 0)
        size, units = usable_mib(card, shared.division), usable_units(shared, card)
        can = card.healthy and not card.cordoned and not usage.whole and not card.divided
        # `units_to_mib` rounds down, and so must this.
        free[card.uuid] = ((left + 1) * units - 1) // size if can and size else 0
    return free


def _card(
    shared: SharedNode,
    card: Card,
    free_units: int,
    read: CardFigures | None,
    slices: list[board.SliceTile],
    unleased: str,
) -> board.CardTile:
    return board.CardTile(
        id=f"{shared.node.name}/{card.index}",
        node=shared.node.name,
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory_mib=card.memory_mib,
        units=usable_units(shared, card),
        free_units=free_units,
        healthy=card.healthy,
        held_mib=sum(piece.held_mib for piece in slices),
        used_mib=read.used_mib if read else None,
        busy=read.busy if read else None,
        temperature_c=read.temperature_c if read else None,
        power_w=read.power_w if read else None,
        power_limit_w=read.power_limit_w if read else None,
        unleased_mib=card.unleased_mib,
        unleased=unleased,
        note=_note(card),
        readable="" if read else "its node's program has not answered yet",
        slices=slices,
    )


def _note(card: Card) -> str:
    """Return why a card takes nothing new."""
    if not card.healthy:
        return "takes no new programs: lost or unhealthy"
    if card.divided:
        return "divided into MIG instances"
    return "cordoned: takes no new programs" if card.cordoned else ""


def _free_mib(tile: board.CardTile) -> int:
    """Return the largest slice that a card could give now."""
    # As `units_to_mib`, by the card's own number of units.
    return tile.free_units * tile.memory_mib // tile.units if tile.units else 0


def _byte(share: float | None) -> int:
    return UNKNOWN if share is None else round(share * WHOLE)


def _flags(tile: board.CardTile, idle: Collection[str]) -> int:
    """Return the flags of a Fleet's card. idle: UIDs of pods."""
    flags = {
        1: not tile.healthy,
        2: tile.note.startswith("cordoned"),
        4: any(piece.program in idle for piece in tile.slices),
        8: (tile.temperature_c or 0) >= HOT_C,
        16: tile.note.startswith("divided"),
    }
    return sum(bit for bit, holds in flags.items() if holds)


def _program(
    shared: SharedNode,
    held: PodAllocation,
    readings: _Readings,
    workload: Workload | None,
    clock: tuple[float, float],
) -> board.ProgramLine:
    """Args: clock: Unix seconds, and the seconds without card time before a program is called idle."""
    pod, meta, (now, idle_after_s) = held.pod, held.pod.metadata, clock
    started = seconds(pod.status.start_time)
    read = [readings.get((meta.uid, piece.uuid)) for piece in held.slices]
    quiet = [piece.idle_s if piece else None for piece in read]
    return board.ProgramLine(
        id=meta.uid,
        name=meta.name,
        user=meta.namespace,
        kind=workload_row(workload).kind if workload else "pod",
        state="running" if pod.status.phase == "Running" else "starting",
        asks=_asked(pod),
        requested_at=seconds(meta.creation_timestamp) or 0.0,
        started_at=started,
        group=workload.name if workload else group_name(pod) or "",
        cards=[*dict.fromkeys(f"{shared.node.name}/{piece.card}" for piece in held.slices)],
        held_mib=sum(piece.memory_mib for piece in held.slices),
        used_mib=total(piece.used_mib if piece else None for piece in read),
        busy=total(piece.busy if piece else None for piece in read),
        compute=held.slices[0].compute if held.slices else 0,
        compute_mode=pod.demand().core_mode,
        idle_s=idle_for(quiet, None if started is None else now - started, idle_after_s),
        violations=[piece.violation for piece in read if piece and piece.violation],
        address=getattr(workload, "address", "") if workload else "",
    )


def _asked(pod: Pod) -> str:
    """Return what a pod requests: `8 aliyun.com/gpu-mem`."""
    try:
        amounts = pod.demand().amounts
    except InvalidRecord:
        return ""
    return ", ".join(f"{amount} {name}" for name, amount in amounts.items())


def _most_idle(programs: Sequence[board.ProgramLine]) -> list[board.ProgramLine]:
    idle = (line for line in programs if line.idle_s is not None)
    return sorted(idle, key=lambda line: (-line.held_mib, line.user, line.name))[:MAX_PROGRAMS]


def _waiting(row: QueueRow) -> board.WaitingLine:
    return board.WaitingLine(
        id=f"{row.namespace}/{row.name}",
        position=row.position,
        name=row.name,
        user=row.namespace,
        asks=row.asks,
        priority=row.priority,
        since=row.since,
        reserved=row.reserved,
        starts_by=row.starts_by,
        why=row.why,
    )


def _node(view: ClusterView, summary: NodeSummary) -> board.NodeLine:
    tiles = view.parts.get(summary.name, NodePart()).tiles
    size = tiles[0].memory_mib // tiles[0].units if tiles and tiles[0].units else 0
    return board.NodeLine(
        name=summary.name or f"({summary.order})",
        state=summary.state,
        model=", ".join(dict.fromkeys(tile.model for tile in tiles)),
        cards=summary.cards or 0,
        units=summary.total or 0,
        free_units=int(summary.free or 0),
        unit_mib=size,
        note=view.notes.get(summary.name, ""),
        price=view.prices.get(summary.name),
        seen_at=view.seen_at.get(summary.name),
    )
