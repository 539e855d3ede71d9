"""What screens are drawn from: nodes as rows, this machine's or a cluster's, and what to show of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fenka.cli.cluster import Cluster, Target
from fenka.cluster.objects import Container, Node, Pod, limit
from fenka.cluster.state import PodAllocation
from fenka.core.units import card_units, mib_to_units
from fenka.dialects import ack, base, gpushare, node_modes
from fenka.dialects.base import InvalidRecord, SharedNode, nominal_mib
from fenka.dialects.registry import WITH_HAMI, detect
from fenka.dialects.sizes import UNITS_MIB
from fenka.workstation import protocol

GIB_MIB = UNITS_MIB["GiB"]

TOPOLOGY = "aliyun.com/gpu"
"""Extended resource: whole cards, chosen by how they are linked."""

Mode = Literal["none", "exclusive", "topology", "share"]
MODES: tuple[Mode, ...] = ("none", "exclusive", "topology", "share")
RESOURCES: dict[Mode, str] = {
    "exclusive": base.NVIDIA_GPU,
    "topology": TOPOLOGY,
    "share": gpushare.MEMORY,
}


@dataclass(frozen=True, slots=True)
class CardRow:
    """A card in units: what is allocated of what there is. core: percent of its time."""

    allocated: float
    total: int
    index: int = 0
    healthy: bool = True
    core: int = 0


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """A program (a pod), its units by card index, and the cards it takes whole.

    pending: units of which no record says on which card they are. core: percent, by card.
    """

    name: str
    namespace: str
    allocated: dict[int, float]
    whole: int = 0
    pending: float = 0
    status: str = "Running"
    core: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node. `whole` counts its cards that are taken whole, `exclusive` those that only go whole. `core`:
    whether it shares out its cards' time too.

    unhealthy: cards that admit nobody. ready: None where the node has not been heard of.
    """

    name: str
    address: str
    role: str
    status: str
    shareable: bool
    whole: int
    cards: list[CardRow]
    programs: list[ProgramRow] = field(default_factory=list)
    exclusive: int = 0
    unhealthy: int = 0
    unit_mib: int = GIB_MIB
    mode: Mode = "share"
    ready: bool | None = True
    schedulable: bool = True
    trouble: str = ""
    core: bool = False

    @property
    def allocated(self) -> float:
        """Units over all cards."""
        return sum(card.allocated for card in self.cards) + self.pending

    @property
    def pending(self) -> float:
        """Units whose card nobody knows."""
        return sum(program.pending for program in self.programs)

    @property
    def total(self) -> int:
        """Units over all cards."""
        return sum(card.total for card in self.cards)

    @property
    def count(self) -> int:
        """Its cards, whichever way they are given out."""
        return max(len(self.cards), self.exclusive)


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One request that waits; a gang is one.

    position: 1 is served next. asks: as its user wrote it. since: Unix seconds. reserved: the cards that
    are kept for it, as its world calls them. starts_by: when they will do at the latest, in Unix seconds;
    None where nobody can tell. used_s: what its namespace has had of cards, in card-seconds that decay.
    """

    position: int
    name: str
    namespace: str
    priority: int
    asks: str
    since: float
    reserved: list[str] = field(default_factory=list)
    starts_by: float | None = None
    why: str = ""
    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What to show and how; `mode` is a word of arena's or its first letter, "" for all nodes."""

    share: bool = False
    details: bool = False
    arena: bool = False
    mode: str = ""
    names: tuple[str, ...] = ()
    output: str = "table"


def rows_of(target: Target) -> list[NodeRow]:
    """The nodes of the world that these options mean, by name."""
    from fenka.cli import cluster

    here = cluster.local(target)
    return [local_node(here)] if here is not None else cluster_nodes(cluster.read(target))


# ---- this machine ----


def local_node(world: protocol.Snapshot) -> NodeRow:
    """This machine as a node. A program's namespace is its user."""
    sizes = {card.index: card.memory_mib for card in world.cards}
    programs = [
        ProgramRow(
            job.name,
            job.user,
            {
                piece.card: mib_to_units(piece.memory_mib, sizes[piece.card], world.unit_mib)
                for piece in job.slices
            },
            whole=len(job.slices) if job.whole else 0,
            core=_core((it.card, it.compute) for it in job.slices),
        )
        for job in sorted(world.jobs, key=lambda job: job.name)
        if job.slices
    ]
    return NodeRow(
        name=world.node,
        address=world.address,
        role="<none>",
        status="ready",
        shareable=True,
        whole=sum(program.whole for program in programs),
        cards=[
            CardRow(
                sum(program.allocated.get(card.index, 0) for program in programs),
                card_units(card.memory_mib, world.unit_mib),
                card.index,
                card.healthy,
                sum(program.core.get(card.index, 0) for program in programs),
            )
            for card in world.cards
        ],
        core=any(program.core for program in programs),
        programs=programs,
        unhealthy=sum(not card.healthy for card in world.cards),
        unit_mib=world.unit_mib,
    )


# ---- a cluster ----


def cluster_nodes(cluster: Cluster) -> list[NodeRow]:
    """All nodes, by name; those without a card too."""
    pods: dict[str, list[Pod]] = {}
    for pod in cluster.pods:
        pods.setdefault(pod.spec.node_name, []).append(pod)
    return [
        _shared(cluster, it, share)
        if (share := cluster.world.shared_node(it.metadata.name)) is not None
        else _whole_cards(cluster, it, pods.get(it.metadata.name, []))
        for it in cluster.nodes
    ]


def _shared(cluster: Cluster, it: Node, share: SharedNode) -> NodeRow:
    programs = [_program(share, held) for held in cluster.world.allocations(share.node.name)]
    return _row(
        cluster,
        it,
        mode="share",
        shareable=True,
        whole=sum(program.whole for program in programs),
        cards=[
            CardRow(
                sum(program.allocated.get(card.index, 0) for program in programs),
                share.card_units(card.index),
                card.index,
                card.healthy,
                sum(program.core.get(card.index, 0) for program in programs),
            )
            for card in share.node.cards
        ],
        core=_quantity(it.status.allocatable, ack.CORE) > 0,
        programs=programs,
        unhealthy=sum(not card.healthy for card in share.node.cards),
        unit_mib=share.unit_mib,
    )


def _whole_cards(cluster: Cluster, it: Node, pods: list[Pod]) -> NodeRow:
    topology = it.metadata.labels.get(node_modes.MODE_LABEL) == "topology"
    mode: Mode = "topology" if topology else "exclusive"
    resource = RESOURCES[mode]
    total = _quantity(it.status.allocatable, resource)
    there = _quantity(it.status.capacity, resource)
    holders = [
        ProgramRow(
            pod.metadata.name, pod.metadata.namespace, {}, whole=count, status=pod.status.phase
        )
        for pod in pods
        if (count := whole_cards(pod, resource))
    ]
    return _row(
        cluster,
        it,
        mode=mode if max(total, there) else "none",
        shareable=False,
        whole=sum(holder.whole for holder in holders),
        cards=[],
        programs=holders,
        exclusive=max(total, there),
        unhealthy=max(there - total, 0),
    )


def _row(cluster: Cluster, it: Node, **what: object) -> NodeRow:
    fields: dict[str, object] = {
        "name": it.metadata.name,
        "address": it.address,
        "role": role(it),
        "status": "ready" if it.ready else "notReady",
        "ready": {"True": True, "False": False}.get(it.readiness),
        "schedulable": not it.spec.unschedulable,
        "trouble": cluster.world.node_error(it.metadata.name) or "",
    }
    return NodeRow(**{**fields, **what})  # type: ignore[arg-type]


def _program(share: SharedNode, holding: PodAllocation) -> ProgramRow:
    pod = holding.pod
    name, namespace, phase = pod.metadata.name, pod.metadata.namespace, pod.status.phase
    if holding.error is None:
        units = gpushare.shown_units(share, holding.slices)
        whole = sum(len(it.slices) for it in holding.placements if it.whole)
        core = _core((it.card, it.compute) for it in holding.slices)
        return ProgramRow(name, namespace, units, whole=whole, status=phase, core=core)
    whole = whole_cards(pod, base.NVIDIA_GPU)
    pending = 0 if whole else demanded(share, pod)
    return ProgramRow(name, namespace, {}, whole=whole, pending=pending, status=phase)


def _core(slices: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Percent by card, of cards of which any was asked for. slices: card and percent."""
    found: dict[int, int] = {}
    for card, percent in slices:
        if percent:
            found[card] = found.get(card, 0) + percent
    return found


def demanded(share: SharedNode, pod: Pod) -> float:
    """Units that the pod asks for; none where that cannot be read: nobody gives it any."""
    manifest = pod.manifest
    try:
        if manifest.requested_resources((gpushare.MEMORY,)):
            return gpushare.peak_units(manifest.container_units(gpushare.MEMORY))
        dialect = detect(manifest, WITH_HAMI)
        parts = dialect.parse(manifest, share.unit_mib) if dialect else ()
    except InvalidRecord:
        return 0
    card = share.node.cards[0]
    return sum(
        part.request.cards
        * mib_to_units(nominal_mib(part.request, card.memory_mib), card.memory_mib, share.unit_mib)
        for part in parts
    )


def role(node: Node) -> str:
    """From its labels, as kubectl tells it: `node-role.kubernetes.io/master`."""
    prefix = "node-role.kubernetes.io/"
    labels = node.metadata.labels
    roles = {label.removeprefix(prefix) for label in labels if label.startswith(prefix)}
    roles.add(labels.get("kubernetes.io/role", ""))
    return ",".join(sorted(roles - {""})) or "<none>"


def whole_cards(pod: Pod, resource: str) -> int:
    """Cards that the pod takes whole, by its limits: its containers' together, or an init container's."""
    apps = sum(_limit(it, resource) for it in pod.spec.containers)
    return max([apps, *(_limit(it, resource) for it in pod.spec.init_containers)])


def _limit(container: Container, resource: str) -> int:
    # Most containers have none; that need not be parsed.
    if resource not in container.resources.limits:
        return 0
    try:
        return limit(container, resource)
    except InvalidRecord:
        return 0


def _quantity(of: dict[str, str], resource: str) -> int:
    try:
        return base.parse_quantity(of.get(resource, 0))
    except InvalidRecord:
        return 0
