"""`kubectl inspect gpushare [node] [-d]`, and `fenka inspect`: gpushare's layouts, in a stable order.

It reads the annotations that gpushare itself writes, so it also shows clusters that run the original. As in
the original, a node's total is its allocatable, and a pod's units are those of its containers' limits. A pod
whose annotations name no card is pending.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from fenka.cli import tables
from fenka.cli.cluster import ask, keep
from fenka.cli.common_options import ClusterTarget, DetailsOption, OutputOption, register, single
from fenka.cli.error_report import report_errors
from fenka.cli.screen_layouts import instances_screen
from fenka.cluster.state import ClusterSnapshot, PodAllocation
from fenka.core.units import format_units, percent
from fenka.dialects import base, gpushare
from fenka.dialects.base import SharedNode
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_cluster
from fenka.views.mig_rows import InstanceRow, node_instances, usable_units


@dataclass(frozen=True, slots=True)
class PodUnits:
    """A pod's units by card index, and its units on unknown cards."""

    name: str
    namespace: str
    cards: dict[int, float]
    pending: float


@dataclass(frozen=True, slots=True)
class NodeUnits:
    """A shared node: units by card index, the kubelet's total, and the pods that hold them.

    The total of a node with divided cards is less what dividing costs. instances, free: as of `NodeRow`.
    """

    name: str
    address: str
    unit: str
    cards: dict[int, int]
    total: int
    pods: list[PodUnits]
    instances: list[InstanceRow] = field(default_factory=list)
    free: dict[int, dict[str, int]] = field(default_factory=dict)

    def used(self, card: int) -> float:
        """Return the allocated units of this card."""
        return sum(pod.cards.get(card, 0) for pod in self.pods)

    @property
    def pending(self) -> float:
        """Units on unknown cards."""
        return sum(pod.pending for pod in self.pods)

    @property
    def allocated(self) -> float:
        """Units of all pods."""
        return sum(sum(pod.cards.values()) for pod in self.pods) + self.pending

    @property
    def width(self) -> int:
        """Columns of its cards, which are numbered by index."""
        return max(self.cards, default=-1) + 1


def inspect(
    target: ClusterTarget,
    node: Annotated[str, typer.Argument(metavar="[NODE]", help="only this node")] = "",
    details: DetailsOption = False,
    output: OutputOption = "table",
) -> None:
    """Print one of the two screens, or their data."""

    async def question(api: Api) -> list[NodeUnits]:
        return read_nodes(keep(await read_cluster(api, node or None)))

    nodes = ask(target.target, question)
    if tables.print_data(nodes, output):
        return
    lines = details_screen(nodes) if details else summary_screen(nodes)
    lines += instances_screen((node.name, node.instances, node.free) for node in nodes)
    sys.stdout.write("\n".join([*map(tables.escape, lines), ""]))


def read_nodes(cluster: ClusterSnapshot) -> list[NodeUnits]:
    """Return all shared nodes, by name."""
    return [_node(cluster, share) for share in cluster.state.shared_nodes()]


def _node(cluster: ClusterSnapshot, shared: SharedNode) -> NodeUnits:
    node = cluster.state.node(shared.node.name)
    assert node is not None
    allocations = cluster.state.allocations(shared.node.name)
    instances, free = node_instances(shared, allocations)
    cards = {card.index: usable_units(shared, card) for card in shared.physical_cards}
    total = base.parse_quantity(node.status.allocatable.get(gpushare.MEMORY, 0))
    if free:
        # A node that shares only instances advertises no units.
        total = (total or shared.total_units) - shared.total_units + sum(cards.values())
    return NodeUnits(
        name=shared.node.name,
        address=node.address,
        unit=base.unit_name(shared.unit_mib),
        cards=cards,
        total=total,
        pods=[_pod(shared, held) for held in allocations],
        instances=instances,
        free=free,
    )


def _pod(shared: SharedNode, held: PodAllocation) -> PodUnits:
    cards, pending = gpushare.shown_units(shared, held.slices), 0.0
    if held.error is not None:
        # A card that such a node gives whole is none of its shared ones.
        cards, pending = {}, held.pod.demand().units(shared) if shared.shares_cards else 0
    return PodUnits(held.pod.metadata.name, held.pod.metadata.namespace, cards, pending)


def summary_screen(nodes: Sequence[NodeUnits]) -> list[str]:
    """Return one line per node: allocated and total units of each card."""
    width = max((node.width for node in nodes), default=0)
    pending = any(node.pending for node in nodes)
    header = [
        *("NAME", "IPADDRESS"),
        *(f"GPU{index}(Allocated/Total)" for index in range(width)),
        *(["PENDING(Allocated)"] if pending else []),
        f"GPU Memory({nodes[0].unit if nodes else 'GiB'})",
    ]
    rows = ["\t".join(_cells(node, width, pending=pending)) for node in nodes]
    return tables.align_tabs(
        [
            "\t".join(header),
            *rows,
            "-" * ((len(rows[0]) + 1 if rows else 0) + 20),
            "Allocated/Total GPU Memory In Cluster:",
            _sum(nodes),
        ]
    )


def _cells(node: NodeUnits, width: int, *, pending: bool) -> list[str]:
    cards = [
        f"{format_units(node.used(index))}/{node.cards.get(index, 0)}" for index in range(width)
    ]
    unplaced = [format_units(node.pending) if node.pending else ""] if pending else []
    total = f"{format_units(node.allocated)}/{node.total}"
    return [node.name, node.address, *cards, *unplaced, total]


def details_screen(nodes: Sequence[NodeUnits]) -> list[str]:
    """Return one block per node, with one line per pod."""
    lines: list[str] = []
    # The rule under every node is 10 longer than the rows of the first node's pods.
    rule = sum(len(row) + 1 for row in _pod_rows(nodes[0])) + 10 if nodes else 0
    for node in nodes:
        share = percent(node.allocated, node.total)
        columns = [f"GPU{index}(Allocated)" for index in range(node.width)]
        columns += ["Pending(Allocated)"] if node.pending else []
        lines += [
            "",
            f"NAME:\t{node.name}",
            f"IPADDRESS:\t{node.address}",
            "",
            "".join(f"{cell}\t" for cell in ("NAME", "NAMESPACE", *columns)),
            *_pod_rows(node),
            f"Allocated :\t{format_units(node.allocated)} ({share}%)\t",
            f"Total :\t{node.total} \t",
            "-" * rule,
        ]
    last = f"Allocated/Total GPU Memory In Cluster:\t{_sum(nodes)}"
    return tables.align_tabs([*lines, "", "", last])


def _pod_rows(node: NodeUnits) -> list[str]:
    rows = []
    for pod in node.pods:
        units = [format_units(pod.cards.get(index, 0)) for index in range(node.width)]
        units += [format_units(pod.pending)] if node.pending else []
        rows.append("".join(f"{cell}\t" for cell in (pod.name, pod.namespace, *units)))
    return rows


def _sum(nodes: Sequence[NodeUnits]) -> str:
    allocated, total = sum(node.allocated for node in nodes), sum(node.total for node in nodes)
    return f"{format_units(allocated)}/{total} ({percent(allocated, total)}%)\t"


def main(arguments: Sequence[str] | None = None) -> None:
    """The kubectl plugin `kubectl-inspect-gpushare`."""
    app = single()
    register(app, inspect, "Show how GPU memory is shared.")
    # On stdout and with the same beginning as gpushare's plugin.
    with report_errors(lambda why: tables.print_lines([f"Failed due to {why}"])):
        app(arguments, prog_name="kubectl inspect gpushare")
