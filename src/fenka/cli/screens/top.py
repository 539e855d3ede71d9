"""`fenka top node`: arena's layouts (v0.3 to v0.6), columns two blanks apart, in a stable order.

The layouts are drawn from `NodeRow`s, which know nothing of where the numbers come from. Today's arena's are
in `compat/arena.py`, drawn from the same rows.
"""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from fenka.cli import cluster, tables
from fenka.cli.common_options import (
    DetailsOption,
    OutputOption,
    Target,
    group,
    register,
    register_bare,
)
from fenka.cli.error_report import UserError
from fenka.cli.screen_layouts import LayoutOption, instances_screen, uses_arena
from fenka.cli.workloads.show import top_job
from fenka.cli.world import snapshot_here
from fenka.core.errors import INVALID_INPUT
from fenka.core.units import format_units, percent
from fenka.dialects.base import GIB_MIB, unit_name
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_cluster
from fenka.views.node_rows import NodeRow, ProgramRow, cluster_nodes

RULE, UNHEALTHY_RULE, SHAREABLE_RULE, BOTH_RULE = 89, 99, 96, 107
"""Lengths of arena's rule, by the optional columns above it."""


SUMMARY = "Show how much of the cards is allocated and used."

app = group(SUMMARY)

NodeMode = Literal["n", "none", "e", "exclusive", "t", "topology", "s", "share"]
"""Kinds of nodes, as arena's letters and words."""


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Which of the layouts to print."""

    share: Annotated[bool, typer.Option("-s", "--share", help="memory of shared cards")] = False
    details: DetailsOption = False
    layout: LayoutOption = None
    mode: Annotated[
        NodeMode | None,
        typer.Option("-m", "--mode", help="with --layout arena: nodes of this kind"),
    ] = None


def node_rows(target: Target) -> list[NodeRow]:
    """Return the nodes of the workstation or cluster that the options name."""
    snapshot = snapshot_here(target)
    if snapshot is not None:
        from fenka.local.views import node_row

        return [node_row(snapshot)]

    def rows(api: Api) -> Awaitable[list[NodeRow]]:
        return cluster.or_served(api, _cluster_rows(api), "nodes", NodeRow)

    return cluster.ask(target, rows, cluster.explain_screen_denial)


async def _cluster_rows(api: Api) -> list[NodeRow]:
    return cluster_nodes(cluster.keep(await read_cluster(api)))


def node(
    target: Target,
    view: ViewOptions,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="only these nodes")
    ] = None,
    output: OutputOption = "table",
) -> None:
    """Print a screen, or the data behind it. Raises UserError for unknown nodes."""
    rows = node_rows(target)
    if names:
        missing = set(names) - {row.name for row in rows}
        if missing:
            raise UserError(f"there is no node {', '.join(sorted(missing))}")
        rows = [row for row in rows if row.name in names]
    if uses_arena(view.layout):
        from fenka.cli.compat import arena

        arena.show(rows, view.mode or "", details=view.details, foot=not names, output=output)
    elif not tables.print_data(rows, output):
        tables.print_lines(_screen(rows, view))
    if output != "table":
        return
    lines = instances_screen((row.name, row.instances, row.free) for row in rows)
    if not uses_arena(view.layout):
        lines += [f"{row.name}: {row.error}" for row in rows if row.error]
        lines += [
            f"{row.name}: card {index}: {who}"
            for row in rows
            for index, who in [*row.problems.items(), *row.unleased.items()]
        ]
    if lines:
        tables.print_lines(lines)


def top(
    target: Target,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="live, with bars and keys; q ends it")
    ] = False,
) -> None:
    """Show the screen that follows what happens, or print `fenka top node`. Raises UserError."""
    if not watch:
        node(target, ViewOptions())
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        raise UserError("--watch needs a terminal: `fenka top node` prints once", INVALID_INPUT)
    # It imports Textual, which takes longer than printing a screen.
    from fenka.cli.screens.top_screen import watch_cluster, watch_machine

    if snapshot_here(target) is not None:
        watch_machine()
    else:
        watch_cluster(target)


register_bare(app, top, SUMMARY)
register(app, node, "Show the cards of this machine or cluster, and their allocation.")
register(app, top_job, "Show the cards of training jobs.", name="job")


def _screen(rows: list[NodeRow], view: ViewOptions) -> list[str]:
    unit = unit_name(next((row.unit_mib for row in rows if row.shareable), GIB_MIB))
    if view.share:
        return details_screen(rows, unit) if view.details else share_screen(rows, unit)
    return nodes_details_screen(rows) if view.details else nodes_screen(rows)


def nodes_screen(nodes: list[NodeRow]) -> list[str]:
    """Which nodes have cards, and how many are taken whole."""
    unhealthy = any(node.unhealthy for node in nodes)
    share = any(node.shareable for node in nodes)
    columns: dict[str, Callable[[NodeRow], str]] = {
        "NAME": lambda node: node.name,
        "IPADDRESS": lambda node: node.address,
        "ROLE": lambda node: node.role,
        "STATUS": lambda node: node.status,
        "GPU(Total)": lambda node: str(node.count),
        "GPU(Allocated)": lambda node: str(node.whole),
    }
    if unhealthy:
        columns["GPU(Unhealthy)"] = lambda node: str(node.unhealthy)
    if share:
        columns["GPU(Shareable)"] = lambda node: "Yes" if node.shareable else "No"
    rule = {
        (False, False): RULE,
        (True, False): UNHEALTHY_RULE,
        (False, True): SHAREABLE_RULE,
        (True, True): BOTH_RULE,
    }[unhealthy, share]
    active = [node for node in nodes if node.status == "ready"]
    lines = [
        *tables.align(tables.tabulate(nodes, columns)),
        "-" * rule,
        "Allocated/Total GPUs In Cluster:",
        _allocated_cards(nodes),
    ]
    if len(active) < len(nodes):
        lines += ["Allocated/Total GPUs(Active) In Cluster:", _allocated_cards(active)]
    if unhealthy:
        sick, total = sum(node.unhealthy for node in nodes), sum(node.count for node in nodes)
        lines += ["Unhealthy/Total GPUs In Cluster:", _of(sick, total)]
    return lines


def nodes_details_screen(nodes: list[NodeRow]) -> list[str]:
    """Each node with cards, and who takes them whole."""
    lines: list[str] = ["", ""]
    for node in nodes:
        if not node.count:
            continue
        holders = [program for program in node.programs if program.whole]
        columns: dict[str, Callable[[ProgramRow], str]] = {
            "NAMESPACE": lambda program: program.namespace,
            "NAME": lambda program: program.name,
            "GPU REQUESTS": lambda program: str(program.whole),
        }
        summary = [
            (f"Total GPUs In Node {node.name}:", str(node.count)),
            (
                f"Allocated GPUs In Node {node.name}:",
                f"{node.whole} ({percent(node.whole, node.count)}%)",
            ),
        ]
        summary += [("If Node is Shareable :", "Yes")] if node.shareable else []
        head = [("NAME:", node.name), ("IPADDRESS:", node.address), ("ROLE:", node.role)]
        lines += [*tables.align(head), ""]
        lines += [*tables.align(tables.tabulate(holders, columns)), ""] if holders else []
        lines += [*tables.align(summary), "-" * RULE, ""]
    return [*lines, f"Allocated/Total GPUs In Cluster:  {_allocated_cards(nodes)}"]


def share_screen(nodes: list[NodeRow], unit: str) -> list[str]:
    """Each sharing node's cards: units allocated of units there are."""
    shared = [node for node in nodes if node.shareable]
    most = max((_width(node) for node in shared), default=0)
    header = ["NAME", "IPADDRESS", *(f"GPU{index}(Allocated/Total)" for index in range(most))]
    pending = any(node.pending for node in shared)
    header += ["PENDING(Allocated)"] if pending else []
    rows = [_share_cells(node, most, pending=pending) for node in shared]
    return [*tables.align([header, *rows]), *_total(shared, unit, most)]


def details_screen(nodes: list[NodeRow], unit: str) -> list[str]:
    """Each sharing node's programs and their units on each card."""
    shared = [node for node in nodes if node.shareable]
    lines: list[str] = []
    for node in shared:
        indexes = range(_width(node))
        header = ["NAME", "NAMESPACE", *(f"GPU{index}(Allocated)" for index in indexes)]
        header += ["Pending(Allocated)"] if node.pending else []
        rows = []
        for program in node.programs:
            units = [program.allocated.get(index, 0) for index in indexes]
            units += [program.pending] if node.pending else []
            rows.append([program.name, program.namespace, *map(format_units, units)])
        share = percent(node.allocated, node.total)
        # One node looks as in arena; the next begins a line below.
        lines += [""] if lines else []
        lines += [
            *tables.align([["NAME:", node.name], ["IPADDRESS:", node.address]]),
            "",
            *tables.align([header, *rows]),
            *tables.align(
                [
                    ["Allocated :", f"{format_units(node.allocated)} ({share}%)"],
                    ["Total :", str(node.total)],
                ]
            ),
        ]
    return [*lines, *_total(shared, unit, max((_width(node) for node in shared), default=0))]


def _width(node: NodeRow) -> int:
    """Columns that its cards take."""
    return max((card.index + 1 for card in node.cards), default=0)


def _share_cells(node: NodeRow, width: int, *, pending: bool = False) -> list[str]:
    cells = ["0/0"] * width
    for card in node.cards:
        cells[card.index] = f"{format_units(card.allocated)}/{card.total}"
    unplaced = [format_units(node.pending) if node.pending else ""] if pending else []
    return [node.name, node.address, *cells, *unplaced]


def _total(nodes: list[NodeRow], unit: str, width: int) -> list[str]:
    """The rule is arena's: the first row's cells, each ended by a tab, a newline, and 20."""
    pending = any(node.pending for node in nodes)
    first = _share_cells(nodes[0], width, pending=pending) if nodes else []
    rule = sum(len(cell) + 1 for cell in first) + 1 + 20
    allocated, total = sum(node.allocated for node in nodes), sum(node.total for node in nodes)
    return [
        "-" * rule,
        "Allocated/Total GPU Memory In GPUShare Node:",
        f"{format_units(allocated)}/{total} ({unit}) ({percent(allocated, total)}%)",
    ]


def _allocated_cards(nodes: list[NodeRow]) -> str:
    return _of(sum(node.whole for node in nodes), sum(node.count for node in nodes))


def _of(part: int, whole: int) -> str:
    return f"{part}/{whole} ({percent(part, whole)}%)"
