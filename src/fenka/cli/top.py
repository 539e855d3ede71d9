"""`fenka top node`: arena's layouts (v0.3 to v0.6), columns two blanks apart, in a stable order.

The layouts are drawn from `NodeRow`s, which know nothing of where the numbers come from.
"""

from dataclasses import dataclass, field

from fenka.cli import tables
from fenka.cli.listing import current
from fenka.core.units import card_units, format_units, mib_to_units, percent
from fenka.dialects.sizes import UNITS_MIB
from fenka.workstation import protocol

NODE_RULE = "-" * 96
GIB_MIB = UNITS_MIB["GiB"]


@dataclass(frozen=True, slots=True)
class CardRow:
    """A card in units: what is allocated of what there is."""

    allocated: float
    total: int


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """A program (a pod) and its units by card index."""

    name: str
    namespace: str
    allocated: dict[int, float]


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node. `whole` counts its cards that are taken whole."""

    name: str
    address: str
    role: str
    status: str
    shareable: bool
    whole: int
    cards: list[CardRow]
    programs: list[ProgramRow] = field(default_factory=list)

    @property
    def allocated(self) -> float:
        """Units over all cards."""
        return sum(card.allocated for card in self.cards)

    @property
    def total(self) -> int:
        """Units over all cards."""
        return sum(card.total for card in self.cards)


def node(*, share: bool, details: bool, output: str) -> None:
    """Print one of the three screens, or the data behind all of them."""
    world = current()
    rows, unit = [local_node(world)], "GiB" if world.unit_mib == GIB_MIB else "MiB"
    if tables.show(rows, output):
        return
    if not share and not details:
        lines = nodes_screen(rows)
    elif details:
        lines = details_screen(rows, unit)
    else:
        lines = share_screen(rows, unit)
    print("\n".join(lines))


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
        whole=sum(len(job.slices) for job in world.jobs if job.whole),
        cards=[
            CardRow(
                sum(program.allocated.get(card.index, 0) for program in programs),
                card_units(card.memory_mib, world.unit_mib),
            )
            for card in world.cards
        ],
        programs=programs,
    )


def nodes_screen(nodes: list[NodeRow]) -> list[str]:
    """Which nodes have cards, and how many are taken whole."""
    header = (
        "NAME",
        "IPADDRESS",
        "ROLE",
        "STATUS",
        "GPU(Total)",
        "GPU(Allocated)",
        "GPU(Shareable)",
    )
    rows = [
        (
            node.name,
            node.address,
            node.role,
            node.status,
            str(len(node.cards)),
            str(node.whole),
            "Yes" if node.shareable else "No",
        )
        for node in nodes
    ]
    taken, total = sum(node.whole for node in nodes), sum(len(node.cards) for node in nodes)
    return [
        *tables.columns([header, *rows]),
        NODE_RULE,
        "Allocated/Total GPUs In Cluster:",
        f"{taken}/{total} ({percent(taken, total)}%)",
    ]


def share_screen(nodes: list[NodeRow], unit: str) -> list[str]:
    """Each sharing node's cards: units allocated of units there are."""
    shared = [node for node in nodes if node.shareable]
    most = max((len(node.cards) for node in shared), default=0)
    header = ["NAME", "IPADDRESS", *(f"GPU{index}(Allocated/Total)" for index in range(most))]
    rows = [_share_cells(node, most) for node in shared]
    return [*tables.columns([header, *rows]), *_total(shared, unit, most)]


def details_screen(nodes: list[NodeRow], unit: str) -> list[str]:
    """Each sharing node's programs and their units on each card."""
    shared = [node for node in nodes if node.shareable]
    lines: list[str] = []
    for node in shared:
        indexes = range(len(node.cards))
        header = ["NAME", "NAMESPACE", *(f"GPU{index}(Allocated)" for index in indexes)]
        rows = [
            [
                program.name,
                program.namespace,
                *(format_units(program.allocated.get(index, 0)) for index in indexes),
            ]
            for program in node.programs
        ]
        share = percent(node.allocated, node.total)
        lines += [
            *tables.columns([["NAME:", node.name], ["IPADDRESS:", node.address]]),
            "",
            *tables.columns([header, *rows]),
            *tables.columns(
                [
                    ["Allocated :", f"{format_units(node.allocated)} ({share}%)"],
                    ["Total :", str(node.total)],
                ]
            ),
        ]
    return [*lines, *_total(shared, unit, max((len(node.cards) for node in shared), default=0))]


def _share_cells(node: NodeRow, width: int) -> list[str]:
    cards = [f"{format_units(card.allocated)}/{card.total}" for card in node.cards]
    return [node.name, node.address, *cards, *["0/0"] * (width - len(cards))]


def _total(nodes: list[NodeRow], unit: str, width: int) -> list[str]:
    """The rule is arena's: the first row's cells, each ended by a tab, a newline, and 20."""
    first = _share_cells(nodes[0], width) if nodes else []
    rule = sum(len(cell) + 1 for cell in first) + 1 + 20
    allocated, total = sum(node.allocated for node in nodes), sum(node.total for node in nodes)
    return [
        "-" * rule,
        "Allocated/Total GPU Memory In GPUShare Node:",
        f"{format_units(allocated)}/{total} ({unit}) ({percent(allocated, total)}%)",
    ]
