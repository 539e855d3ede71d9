"""Cards, nodes and requests for the core's tests, by hand and by Hypothesis."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import combinations

from hypothesis import strategies as st

from fenka.core.backfill import Backfill, Timeline, complete, held_by_user
from fenka.core.gangs import PlainPlacer
from fenka.core.inventory import Card, DeviceId, Links, Node
from fenka.core.ledger import Entry
from fenka.core.preemption import VictimCandidate
from fenka.core.queue import (
    Allocation,
    Fairness,
    PendingRequest,
    SchedulingResult,
    UsageHistory,
    history_lookup,
    queue_order,
)
from fenka.core.request import ANY_INSTANCE, Memory, Placement, Request, Slice
from fenka.core.usage import CardUsage, UsageTotals, UsageView

GIB = 1024
T4_MIB, P4_MIB, V100_MIB = 15079, 7611, 16130
SIZES = {"Tesla T4": T4_MIB, "Tesla P4": P4_MIB, "Tesla V100-SXM2-16GB": V100_MIB}


def device(index: int = 0, node: str = "a") -> DeviceId:
    """The id of the card with this index on the node."""
    return DeviceId(f"GPU-{node}-{index}")


def card(
    index: int = 0,
    memory_mib: int = T4_MIB,
    *,
    node: str = "a",
    model: str = "Tesla T4",
    healthy: bool = True,
    cordoned: bool = False,
    divided: bool = False,
) -> Card:
    """A card; its UUID tells node and index."""
    return Card(
        *(index, DeviceId(f"GPU-{node}-{index}"), model, memory_mib),
        healthy=healthy,
        cordoned=cordoned,
        divided=divided,
    )


def instance(index: int = 0, profile: str = "3g.20gb", start: int = 0, *, node: str = "a") -> Card:
    """An instance of a card; its UUID tells node, index and start."""
    sizes = {"1g.5gb": (4864, 12), "3g.20gb": (20096, 38)}
    return Card(
        *(index, DeviceId(f"MIG-{node}-{index}-{start}"), "Tesla T4", *sizes[profile]),
        parent=DeviceId(f"GPU-{node}-{index}"),
        profile=profile,
        start=start,
    )


def node(*sizes: int, name: str = "a", cpu: int | None = None, memory: int | None = None) -> Node:
    """A node with cards of these sizes in MiB."""
    cards = tuple(card(index, size, node=name) for index, size in enumerate(sizes))
    return Node(name, cards, cpu, memory)


def piece(index: int, mib: int, compute: int = 0, *, name: str = "a") -> Slice:
    """A slice of a card of `node`."""
    return Slice(index, DeviceId(f"GPU-{name}-{index}"), mib, compute)


def placement(*pieces: Slice, name: str = "a", whole: bool = False) -> Placement:
    """Slices of one node."""
    return Placement(name, pieces, whole=whole)


def t4_mib(amount: int) -> int:
    """The MiB of this number of a T4's 14 units."""
    return T4_MIB * amount // 14


def on(index: int, amount: int, name: str = "a") -> Placement:
    """Units of a T4 with this index."""
    return placement(piece(index, t4_mib(amount), name=name), name=name)


def held(index: int, amount: int, deadline: float | None = None, name: str = "a") -> Allocation:
    """An allocation of units of a T4 with this index."""
    return Allocation(on(index, amount, name), deadline)


def holding(*placements: Placement) -> UsageTotals:
    """A view in which these hold. It is not checked against any card."""
    tally = UsageTotals()
    for each in placements:
        tally.add(each)
    return tally


def held_by(candidates: Iterable[VictimCandidate]) -> UsageTotals:
    """A view in which all of them hold their placements."""
    return holding(*(it.placement for it in candidates))


def units(amount: int, *, cards: int = 1, compute: int = 0) -> Request:
    """GiB units on each of so many cards."""
    return Request(Memory(amount, GIB), compute=compute, cards=cards)


def exact(mib: int, *, cards: int = 1, compute: int = 0) -> Request:
    """MiB on each of so many cards."""
    return Request(Memory(mib), compute=compute, cards=cards)


def whole(cards: int = 1) -> Request:
    """Whole cards."""
    return Request(whole=True, cards=cards)


def recomputed(entries: Iterable[Entry]) -> dict[tuple[str, DeviceId], CardUsage]:
    """What is held of each card, from the entries alone and not with the ledger's code."""
    found: dict[tuple[str, DeviceId], list[tuple[int, int, bool]]] = {}
    for entry in entries:
        for each in entry.placement.slices:
            where = entry.placement.node, each.uuid
            part = each.memory_mib, each.compute, entry.placement.whole
            found.setdefault(where, []).append(part)
    return {
        where: CardUsage(
            sum(mib for mib, _, _ in parts),
            sum(compute for _, compute, _ in parts),
            len(parts),
            any(taken for _, _, taken in parts),
        )
        for where, parts in found.items()
    }


@st.composite
def clusters(draw: st.DrawFn, *, most_nodes: int = 3, most_cards: int = 4) -> tuple[Node, ...]:
    """Nodes of several units with cards of three models, a few unhealthy or cordoned, some hosts counted."""
    nodes = []
    for number in range(draw(st.integers(1, most_nodes))):
        name = f"n{number}"
        cards = []
        for index in range(draw(st.integers(1, most_cards))):
            model = draw(st.sampled_from(sorted(SIZES)))
            state = draw(st.sampled_from(["well"] * 8 + ["unhealthy", "cordoned", "divided"]))
            if state == "divided":
                profiles = draw(st.lists(st.sampled_from(["1g.5gb", "3g.20gb"]), max_size=2))
                cards += [
                    instance(index, profile, 4 * half, node=name)
                    for half, profile in enumerate(profiles)
                ]
            cards.append(
                card(
                    index,
                    SIZES[model],
                    node=name,
                    model=model,
                    healthy=state != "unhealthy",
                    cordoned=state == "cordoned",
                    divided=state == "divided",
                )
            )
        cpu = draw(st.none() | st.integers(0, 16000))
        memory = draw(st.none() | st.integers(0, 64000))
        unit_mib = draw(st.sampled_from([GIB, GIB, 256, 1]))
        made = Node(name, tuple(cards), cpu, memory, unit_mib)
        nodes.append(replace(made, links=draw(st.none() | links(made))))
    return tuple(nodes)


def linked(made: Node, rows: Iterable[str]) -> Node:
    """The node with these distances, "0166" for a card with NVLink to the second of four."""
    devices = tuple(it.uuid for it in made.cards if it.parent is None)
    return replace(made, links=Links(devices, bytes(int(it) for row in rows for it in row)))


@st.composite
def links(draw: st.DrawFn, made: Node) -> Links:
    """Any distances of the node's cards."""
    devices = tuple(it.uuid for it in made.cards if it.parent is None)
    count = len(devices)
    rows = [bytearray(count) for _ in devices]
    for one, other in combinations(range(count), 2):
        rows[one][other] = rows[other][one] = draw(st.sampled_from([1, 1, 4, 6]))
    return Links(devices, b"".join(map(bytes, rows)))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Units of the node or of a fixed size, exact sizes, slices of compute alone, and whole cards."""
    kind = draw(st.sampled_from(["units", "exact", "compute", "whole"]))
    memory = None
    if kind == "units":
        memory = Memory(draw(st.integers(1, 16)), draw(st.sampled_from([None, None, GIB])))
    elif kind == "exact":
        memory = Memory(draw(st.integers(1, 17000)))
    compute = {"compute": st.integers(1, 100), "whole": st.just(0)}.get(kind, st.integers(0, 60))
    models = st.sets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2).map(frozenset)
    instance = draw(st.sampled_from([""] * 4 + [ANY_INSTANCE, "1g.5gb"]))
    return Request(
        memory=memory,
        compute=draw(compute),
        cards=draw(st.sampled_from([1, 1, 1, 2, 3])),
        whole=kind == "whole",
        models=draw(st.just(frozenset[str]()) | models),
        cpu_milli=draw(st.sampled_from([0, 0, 1000, 4000])),
        host_memory_mib=draw(st.sampled_from([0, 0, 8000])),
        instance=instance,
        linked=not instance and draw(st.booleans()),
        near=draw(st.booleans()),
    )


class NodesBackfill:
    """Serves a queue on these nodes by the plain definitions."""

    def __init__(
        self, nodes: Iterable[Node], policy: str, fairness: Fairness | None = None, depth: int = 4
    ) -> None:
        self.backfill, self.nodes = Backfill(policy, depth), tuple(nodes)
        self.fairness = fairness or Fairness()

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Replace the nodes."""
        self.nodes = tuple(nodes)
        self.backfill.forget_impossible()

    def serve(
        self,
        pending: Collection[PendingRequest],
        allocations: Iterable[Allocation],
        now: float,
        usage: UsageView | None = None,
        history: UsageHistory | None = None,
    ) -> SchedulingResult:
        """Serve once. usage: if it is not the sum of the allocations."""
        by_node: dict[str, list[Allocation]] = {}
        for allocation in allocations:
            by_node.setdefault(allocation.placement.node, []).append(allocation)
        view = usage or holding(*(it.placement for each in by_node.values() for it in each))
        timeline = Timeline(self.nodes, by_node, now)
        placer = PlainPlacer(self.nodes, view)
        history = history or UsageHistory(self.fairness)
        past = history_lookup(held_by_user(by_node), history, now)
        ordered = queue_order(pending, past, self.fairness, now)
        return complete(self.backfill.serve(ordered, placer, timeline, now))
