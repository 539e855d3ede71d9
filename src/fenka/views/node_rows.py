"""Nodes as rows of the screens: cards, what is allocated of them, and to which programs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot, PodAllocation
from fenka.core.request import ComputeMode
from fenka.dialects import ack, base, gpushare, nodes
from fenka.dialects.base import Dialect, SharedNode
from fenka.views.mig_rows import InstanceRow, node_instances, usable_units

TOPOLOGY = "aliyun.com/gpu"
"""Extended resource: whole cards, chosen by how they are linked."""

Mode = Literal["none", "exclusive", "topology", "share"]
NO_ROLE = "<none>"
"""kubectl's word for a node without a role."""

MODES: tuple[Mode, ...] = ("none", "exclusive", "topology", "share")
RESOURCES: dict[Mode, str] = {
    "exclusive": base.NVIDIA_GPU,
    "topology": TOPOLOGY,
    "share": gpushare.MEMORY,
}


class CardRow(msgspec.Struct, frozen=True):
    """A card, in units: what is allocated of the total. core: percent of its compute time."""

    allocated: float
    total: int
    index: int = 0
    healthy: bool = True
    core: int = 0


class ProgramRow(msgspec.Struct, frozen=True):
    """A program (on a cluster, a pod) and what it holds of a node.

    Attributes:
        allocated: units by card index.
        whole: cards that it holds whole.
        pending: units for which no record names a card.
        core: percent of compute time, by card index.
        core_mode: what the compute that it requests means.
        weight: the weight that it requests; nothing of `core` is reserved for it.
    """

    name: str
    namespace: str
    allocated: dict[int, float]
    whole: int = 0
    pending: float = 0
    status: str = "Running"
    core: dict[int, int] = {}
    core_mode: ComputeMode = "hard"
    weight: int = 0


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node.

    Attributes:
        whole: cards that are held whole.
        exclusive: cards that are only given whole.
        unhealthy: cards that admit no program.
        ready: None if the node's state is unknown.
        error: why the node admits nothing new; empty if it does.
        core: whether it shares its cards' compute time too.
        instances: those of divided cards.
        free: how many more instances fit a divided card by profile, each for itself, by the card's index.
        unleased: who uses memory of cards without a lease, in a sentence for each, by the card's index.
        problems: why cards are unhealthy, likewise; those of a cluster are in events.
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
    unit_mib: int = base.GIB_MIB
    mode: Mode = "share"
    ready: bool | None = True
    schedulable: bool = True
    error: str = ""
    core: bool = False
    instances: list[InstanceRow] = field(default_factory=list)
    free: dict[int, dict[str, int]] = field(default_factory=dict)
    unleased: dict[int, str] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def allocated(self) -> float:
        """Return the allocated units of all cards."""
        return sum(card.allocated for card in self.cards) + self.pending

    @property
    def pending(self) -> float:
        """Return the units for which no record names a card."""
        return sum(program.pending for program in self.programs)

    @property
    def total(self) -> int:
        """Return the units of all cards."""
        return sum(card.total for card in self.cards)

    @property
    def count(self) -> int:
        """Return the number of cards, however they are given out."""
        return max(len(self.cards), self.exclusive)


def card_rows(
    cards: Iterable[tuple[int, int, bool]], programs: Iterable[ProgramRow]
) -> list[CardRow]:
    """Return a node's cards with the sums over its programs. cards: index, units, and whether healthy."""
    allocated, core = defaultdict[int, float](int), defaultdict[int, int](int)
    for program in programs:
        for index, units in program.allocated.items():
            allocated[index] += units
        for index, percent in program.core.items():
            core[index] += percent
    return [
        CardRow(allocated[index], total, index, healthy, core[index])
        for index, total, healthy in cards
    ]


def compute_by_card(slices: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Sum percents of compute time by card. slices: card index and percent."""
    by_card: dict[int, int] = {}
    for card, percent in slices:
        if percent:
            by_card[card] = by_card.get(card, 0) + percent
    return by_card


def cluster_nodes(snapshot: ClusterSnapshot) -> list[NodeRow]:
    """Return all nodes of a cluster by name, also those without a card."""
    return list(node_rows(snapshot))


def node_rows(snapshot: ClusterSnapshot) -> Iterator[NodeRow]:
    """Yield all nodes of a cluster by name, also those without a card."""
    state, pods = snapshot.state, pods_of_exclusive_nodes(snapshot)
    for node in snapshot.nodes:
        shared = state.shared_node(node.metadata.name)
        if shared is not None:
            yield _sharing_node(snapshot, node, shared)
        else:
            yield exclusive_node(snapshot, node, pods.get(node.metadata.name, []))


def pods_of_exclusive_nodes(snapshot: ClusterSnapshot) -> dict[str, list[Pod]]:
    """Return the pods of each node that does not share its cards."""
    pods: dict[str, list[Pod]] = {
        node.metadata.name: []
        for node in snapshot.nodes
        if snapshot.state.shared_node(node.metadata.name) is None
    }
    for pod in snapshot.pods if pods else ():
        if pod.spec.node_name in pods:
            pods[pod.spec.node_name].append(pod)
    return pods


def _sharing_node(snapshot: ClusterSnapshot, node: Node, shared: SharedNode) -> NodeRow:
    allocations = snapshot.state.allocations(shared.node.name)
    programs = [_program(shared, held, snapshot.state.dialects) for held in allocations]
    instances, free = node_instances(shared, allocations)
    return _row(
        snapshot,
        node,
        mode="share",
        shareable=True,
        whole=sum(program.whole for program in programs),
        cards=card_rows(
            (
                (card.index, usable_units(shared, card), card.healthy)
                for card in shared.physical_cards
            ),
            programs,
        ),
        core=base.readable_quantity(node.status.allocatable, ack.CORE) > 0,
        programs=programs,
        exclusive=0 if shared.shares_cards else _with_exclusive(node, shared),
        unhealthy=sum(not card.healthy for card in shared.physical_cards),
        unit_mib=shared.unit_mib,
        instances=instances,
        free=free,
        unleased=nodes.unleased_memory(node.metadata.annotations),
    )


def _with_exclusive(node: Node, shared: SharedNode) -> int:
    """Return the cards of a node that shares instances, and gives its other cards whole."""
    whole = base.readable_quantity(node.status.allocatable, base.NVIDIA_GPU)
    return len([*shared.physical_cards]) + whole


def exclusive_node(snapshot: ClusterSnapshot, node: Node, pods: list[Pod]) -> NodeRow:
    """Return a node whose cards are only given whole. pods: those on it."""
    topology = node.metadata.labels.get(nodes.MODE_LABEL) == "topology"
    mode: Mode = "topology" if topology else "exclusive"
    resource = RESOURCES[mode]
    allocatable = base.readable_quantity(node.status.allocatable, resource)
    capacity = base.readable_quantity(node.status.capacity, resource)
    holders = [
        ProgramRow(
            pod.metadata.name, pod.metadata.namespace, {}, whole=count, status=pod.status.phase
        )
        for pod in pods
        if (count := pod.amount(resource))
    ]
    return _row(
        snapshot,
        node,
        mode=mode if max(allocatable, capacity) else "none",
        shareable=False,
        whole=sum(holder.whole for holder in holders),
        cards=[],
        programs=holders,
        exclusive=max(allocatable, capacity),
        unhealthy=max(capacity - allocatable, 0),
    )


def _row(snapshot: ClusterSnapshot, node: Node, **fields: object) -> NodeRow:
    common: dict[str, object] = {
        "name": node.metadata.name,
        "address": node.address,
        "role": role(node),
        "status": "ready" if node.ready else "notReady",
        "ready": {"True": True, "False": False}.get(node.readiness),
        "schedulable": not node.spec.unschedulable,
        "error": snapshot.state.node_error(node.metadata.name) or "",
    }
    return NodeRow(**{**common, **fields})  # type: ignore[arg-type]


def _program(shared: SharedNode, held: PodAllocation, dialects: tuple[Dialect, ...]) -> ProgramRow:
    # By these dialects the pod has been parsed already.
    pod, demand = held.pod, held.pod.demand(dialects)
    name, namespace, phase = pod.metadata.name, pod.metadata.namespace, pod.status.phase
    if held.error is None:
        slices, whole = held.slices, 0
        units = gpushare.shown_units(shared, slices)
        # This loop takes a third of the time of sum(), and runs for each pod of a cluster.
        for placement in held.placements:
            if placement.whole:
                whole += sum(piece.instance is None for piece in placement.slices)
        core = compute_by_card([(piece.card, piece.compute) for piece in slices])
        return ProgramRow(
            *(name, namespace, units),
            whole=whole,
            status=phase,
            core=core,
            core_mode=demand.core_mode,
            weight=demand.weight,
        )
    whole = pod.amount(base.NVIDIA_GPU)
    pending = 0 if whole else demand.units(shared)
    return ProgramRow(name, namespace, {}, whole=whole, pending=pending, status=phase)


def role(node: Node) -> str:
    """Return the roles of its labels as kubectl shows them: `node-role.kubernetes.io/master`."""
    prefix = "node-role.kubernetes.io/"
    labels = node.metadata.labels
    roles = {label.removeprefix(prefix) for label in labels if label.startswith(prefix)}
    roles.add(labels.get("kubernetes.io/role", ""))
    return ",".join(sorted(roles - {""})) or NO_ROLE
