"""`kubectl inspect gpushare [node] [-d]`, and `fenka inspect`: gpushare's layouts, in a stable order.

It reads the annotations that gpushare itself writes, so it also shows clusters that run the original. As in
the original, a node's total is its allocatable, and a pod's units are those of its containers' limits. A pod
whose annotations name no card is pending.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli import tables
from fenka.cli.cluster import ask
from fenka.cli.options import ClusterTarget, DetailsOption, OutputOption
from fenka.cluster.allocation import PodAllocation
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.core.errors import FenkaError
from fenka.core.units import format_units, percent
from fenka.dialects import base, gpushare
from fenka.dialects.base import SharedNode
from fenka.kubernetes.client import Api
from fenka.kubernetes.cluster_reader import read_cluster

USAGE = "the node to show; default: all"


@dataclass(frozen=True, slots=True)
class PodUnits:
    """A pod's units by card index, and its units on unknown cards."""

    name: str
    namespace: str
    cards: dict[int, float] = field(default_factory=dict)
    pending: float = 0

    @property
    def units(self) -> float:
        """All units of the pod."""
        return sum(self.cards.values()) + self.pending


@dataclass(frozen=True, slots=True)
class NodeUnits:
    """A shared node: units by card index, the kubelet's total, and the pods that hold them."""

    name: str
    address: str
    unit: str
    cards: dict[int, int]
    total: int
    pods: list[PodUnits]

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
        return sum(pod.units for pod in self.pods)

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
        return read_nodes(await read_cluster(api, node or None))

    nodes = ask(target.target, question)
    if tables.print_data(nodes, output):
        return
    lines = details_screen(nodes) if details else summary_screen(nodes)
    sys.stdout.write("\n".join([*map(tables.escape, lines), ""]))


def read_nodes(cluster: ClusterSnapshot) -> list[NodeUnits]:
    """Return all shared nodes, by name."""
    return [_node(cluster, share) for share in cluster.state.shared_nodes()]


def _node(cluster: ClusterSnapshot, share: SharedNode) -> NodeUnits:
    node = cluster.state.node(share.node.name)
    return NodeUnits(
        name=share.node.name,
        address=node.address if node else "unknown",
        unit=base.unit_name(share.unit_mib),
        cards={card.index: share.card_units(card.index) for card in share.node.cards},
        total=base.parse_quantity(node.status.allocatable.get(gpushare.MEMORY, 0)) if node else 0,
        pods=[_pod(share, holding) for holding in cluster.state.allocations(share.node.name)],
    )


def _pod(share: SharedNode, holding: PodAllocation) -> PodUnits:
    meta = holding.pod.metadata
    if holding.error is None:
        return PodUnits(meta.name, meta.namespace, gpushare.shown_units(share, holding.slices))
    return PodUnits(meta.name, meta.namespace, pending=holding.pod.demand().units(share))


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
    allocated, total = _sums(nodes)
    return tables.align_tabs(
        [
            "\t".join(header),
            *rows,
            "-" * ((len(rows[0]) + 1 if rows else 0) + 20),
            "Allocated/Total GPU Memory In Cluster:",
            f"{format_units(allocated)}/{total} ({percent(allocated, total)}%)\t",
        ]
    )


def _cells(node: NodeUnits, width: int, *, pending: bool) -> list[str]:
    cards = [
        f"{format_units(node.used(index))}/{node.cards.get(index, 0)}" for index in range(width)
    ]
    unplaced = [format_units(node.pending) if node.pending else ""] if pending else []
    return [
        node.name,
        node.address,
        *cards,
        *unplaced,
        f"{format_units(node.allocated)}/{node.total}",
    ]


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
    allocated, total = _sums(nodes)
    share = percent(allocated, total)
    last = f"{format_units(allocated)}/{total} ({share}%)\t"
    return tables.align_tabs([*lines, "", "", f"Allocated/Total GPU Memory In Cluster:\t{last}"])


def _pod_rows(node: NodeUnits) -> list[str]:
    rows = []
    for pod in node.pods:
        units = [format_units(pod.cards.get(index, 0)) for index in range(node.width)]
        units += [format_units(pod.pending)] if node.pending else []
        rows.append("".join(f"{cell}\t" for cell in (pod.name, pod.namespace, *units)))
    return rows


def _sums(nodes: Sequence[NodeUnits]) -> tuple[float, int]:
    return sum(node.allocated for node in nodes), sum(node.total for node in nodes)


def main(arguments: Sequence[str] | None = None) -> None:
    """The kubectl plugin `kubectl-inspect-gpushare`."""
    parser = argparse.ArgumentParser(
        prog="kubectl inspect gpushare", description="Show how GPU memory is shared."
    )
    parser.add_argument("node", nargs="?", help=USAGE)
    parser.add_argument("-d", "--details", action="store_true", help="one line a pod")
    parser.add_argument("--kubeconfig", type=Path, help="else $KUBECONFIG, else ~/.kube/config")
    parser.add_argument("--context", help="of the kubeconfig")
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    given = parser.parse_args(arguments)
    try:
        target = ClusterTarget(given.kubeconfig, given.context)
        inspect(target, given.node or "", given.details, given.output)
    except FenkaError as why:
        # On stdout and with the same beginning as gpushare's plugin.
        tables.print_lines([f"Failed due to {why}"])
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
