"""All cards of all nodes as arrays: what the columnar evaluation (`columnar.py`) reads.

Each node owns a slot, and consecutive columns of the card arrays. A change of a node writes only these, so
that an event costs the same on any number of nodes.

Cards as arrays: the rows of these, and what requests are compared with.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import repeat
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import NEVER, CardClass, Placement, Request
from fenka.core.usage import CardUsage, EmptyUsage, UsageView

AnyInts = npt.NDArray[np.signedinteger[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MEMORY, COMPUTE, HOLDERS, WHOLE, FREE_MEMORY, FREE_COMPUTE = range(6)
"""Rows of `Columns.usage`."""
CLASS, INDEX, SLOT, CARD_MEMORY, CARD_COMPUTE = range(5)
"""Rows of `Columns.cards`."""
(
    FREE_MEMORY_SUM,
    FREE_COMPUTE_SUM,
    CPU_USED,
    HOST_MEMORY_USED,
    MEMORY_SUM,
    COMPUTE_SUM,
    CPU,
    HOST_MEMORY,
    CARD_POLICY,
    LINKS,
) = range(10)
"""Rows of `Columns.hosts`. The sums are over the open cards of the node."""

MAX_INDEX = (1 << 13) - 1
"""Of `Card.rank`. Cards with larger ones, which no hardware has, count as equal in scores."""


class Needs(NamedTuple):
    """The amounts that a request takes of a card, by class."""

    memory: Ints
    compute: Ints
    other_model: Bools
    other_kind: Bools


class CardColumns:
    """Cards as arrays, in groups: the cards of a node each, or the states of a card over time each.

    Attributes:
        usage: the rows MEMORY to FREE_COMPUTE, a column for each card. FREE_ rows are never negative.
        cards: the rows CLASS to CARD_COMPUTE, a column for each card. SLOT is the card's group, CARD_MEMORY
            what leases can have.
        unhealthy, cordoned: bool, one for each card.
        exists: bool, False for a column that no card has now.
        open: bool, True for cards that exist and are `Card.open`.
        starts: int64, the first column of each group.
        hosts: int64, the rows FREE_MEMORY_SUM to LINKS, a column for each group.
        classes: the number of each class of cards.
    """

    usage: AnyInts
    cards: AnyInts
    unhealthy: Bools
    cordoned: Bools
    exists: Bools
    open: Bools
    starts: Ints
    hosts: Ints
    classes: dict[CardClass, int]

    def needs(self, request: Request) -> Needs:
        """Return what the request takes of a card of each class."""
        # The columns of nodes without cards are of class 0 too, which must exist then.
        by_class = [class_.needs(request) for class_ in self.classes] or [(NEVER, 0, False, False)]
        memory, compute, other_model, other_kind = zip(*by_class, strict=True)
        return Needs(
            np.array(memory, np.int64),
            np.array(compute, np.int64),
            np.array(other_model, np.bool_),
            np.array(other_kind, np.bool_),
        )

    def class_of(self, node: Node, card: Card) -> int:
        """Return the number of the card's class, a new one if there is none."""
        return self.classes.setdefault(CardClass.of(node, card), len(self.classes))


def amounts_of(usage: CardUsage) -> tuple[int, int, int, int]:
    """Return memory, compute, holders and whole. A node's reported amounts may exceed 64 bits."""
    memory, compute, holders, whole = usage
    # Nearly always it is this, which takes half of the time of min().
    if memory < NEVER > compute:
        return usage
    return min(memory, NEVER), min(compute, NEVER), holders, whole


_OF_SLOTS = ("hosts", "starts", "sizes", "changed")
_FLAGS = ("unhealthy", "cordoned", "open", "exists")


class NodeColumns(CardColumns):
    """Nodes, their cards, and what is allocated of them. It is a `UsageView` of these nodes.

    Attributes:
        usage, cards: int64.
        sizes: int64, the number of columns of each slot.
        nodes: the node of each slot, None for a slot that no node has now.
        card_policies: the number of each policy that nodes have of their own, in the row CARD_POLICY.
        links: the number of each `Node.distances`, in the row LINKS; 0 there if they are not known.
        most_cards: the most cards that a node has had.
        changed: int64, by slot: the number of the last change of its node, or of what is allocated of it.
        last_change: the largest number of a change.
        computed: what policies compute from these columns, which they bring up to date by `changed`.
    """

    usage: Ints
    cards: Ints
    sizes: Ints
    nodes: list[Node | None]
    card_policies: dict[str, int]
    links: dict[bytes, int]
    most_cards: int
    changed: Ints
    computed: dict[str, Any]
    last_change: int = 0
    _slots: dict[str, int]
    _ranks: Ints | None = None

    def copy(self) -> Self:
        """Return a copy whose usage changes independently."""
        twin = copy(self)
        twin.usage, twin.hosts = self.usage.copy(), self.hosts.copy()
        twin.changed, twin.computed = self.changed.copy(), {}
        return twin

    def part(self, slots: Ints) -> "PartOfColumns":
        """Return a copy of these slots, in this order."""
        return PartOfColumns(self, slots)

    def changed_since(self, change: int) -> Ints:
        """Return the slots that have changed after the change of this number."""
        return np.flatnonzero(self.changed > change)

    def columns_of(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the columns of these slots, and where among them those of each slot start."""
        sizes = self.sizes[slots]
        starts = sizes.cumsum() - sizes
        columns = (self.starts[slots] - starts).repeat(sizes)
        columns += np.arange(columns.size)
        return columns, starts

    # ---- reading ----

    def slot(self, name: str) -> int:
        """Return the slot of a node; -1 for an unknown one."""
        return self._slots.get(name, -1)

    def ranks(self) -> Ints:
        """Return the position of each slot's node among all nodes by name."""
        if self._ranks is None:
            self._ranks = np.zeros(len(self.nodes), np.int64)
            self._ranks[[self._slots[name] for name in sorted(self._slots)]] = np.arange(
                len(self._slots)
            )
        return self._ranks

    # ---- a UsageView ----

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card."""
        (column, *_) = self._columns_of_device(self._slots[node], device)
        return CardUsage(*self.usage[:FREE_MEMORY, column].tolist())

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated on this node."""
        cpu, memory = self.hosts[CPU_USED:MEMORY_SUM, self._slots[node]].tolist()
        return cpu, memory

    # ---- what is allocated ----

    def add(self, *placements: Placement) -> None:
        """Add placements. Those on unknown nodes, or of unknown devices, do not count."""
        self._count(placements, 1)

    def remove(self, *placements: Placement) -> None:
        """Remove placements."""
        self._count(placements, -1)

    def take(self, columns: Ints, request: Request, needs: Needs) -> None:
        """Allocate these cards for a request, and its part of the host once for each of their nodes.

        The sums of free memory and compute are not renewed.
        """
        cards, usage = self.cards[:, columns], self.usage[:, columns]
        usage[MEMORY] += needs.memory[cards[CLASS]]
        usage[COMPUTE] += needs.compute[cards[CLASS]]
        usage[HOLDERS] += 1
        usage[WHOLE] += request.whole
        usage[FREE_MEMORY:] = _free(cards, usage)
        self.usage[:, columns] = usage
        self._mark(cards[SLOT])
        if request.cpu_milli or request.host_memory_mib:
            slots = np.flatnonzero(np.bincount(cards[SLOT]))
            self.hosts[CPU_USED, slots] += request.cpu_milli
            self.hosts[HOST_MEMORY_USED, slots] += request.host_memory_mib

    # ---- inside ----

    def _mark(self, slots: Ints | int) -> None:
        """Note that these slots change."""
        self.last_change += 1
        self.changed[slots] = self.last_change

    def _columns_of_device(self, slot: int, device: DeviceId) -> list[int]:
        node = self.nodes[slot]
        assert node is not None
        first = int(self.starts[slot])
        return [column for column, card in enumerate(node.cards, first) if card.uuid == device]

    def _count(self, placements: Sequence[Placement], sign: int) -> None:
        columns: list[int] = []
        amounts: list[tuple[int, int, int, int]] = []
        for placement in placements:
            slot = self.slot(placement.node)
            if slot < 0:
                continue
            self._mark(slot)
            for piece in placement.slices:
                of_device = self._columns_of_device(slot, piece.uuid)
                columns += of_device
                amount = piece.memory_mib, piece.compute, 1, int(placement.whole)
                amounts += [amount] * len(of_device)
            self.hosts[CPU_USED, slot] += sign * placement.cpu_milli
            self.hosts[HOST_MEMORY_USED, slot] += sign * placement.host_memory_mib
        if not columns:
            return
        for row, values in enumerate(zip(*amounts, strict=True)):
            np.add.at(self.usage[row], columns, sign * np.array(values, np.int64))
        self._renew_free(np.array(sorted(set(columns)), np.int64))

    def _renew_free(self, columns: Ints) -> None:
        """Compute what is free of these cards, and the sums of their nodes."""
        free = _free(self.cards[:, columns], self.usage[:, columns])
        more = (free - self.usage[FREE_MEMORY:, columns]) * self.open[columns]
        self.usage[FREE_MEMORY:, columns] = free
        for row in (FREE_MEMORY_SUM, FREE_COMPUTE_SUM):
            np.add.at(self.hosts[row], self.cards[SLOT, columns], more[row])


class PartOfColumns(NodeColumns):
    """Some of the slots of other columns. Attributes: columns: the columns that it has of those, int64."""

    def __init__(self, whole: NodeColumns, slots: Ints) -> None:
        self.columns, self.starts = whole.columns_of(slots)
        self.sizes = whole.sizes[slots]
        self.usage = whole.usage.take(self.columns, axis=1)
        self.cards = whole.cards.take(self.columns, axis=1)
        self.cards[SLOT] = np.arange(slots.size).repeat(self.sizes)
        self.unhealthy, self.cordoned = whole.unhealthy[self.columns], whole.cordoned[self.columns]
        self.exists, self.open = whole.exists[self.columns], whole.open[self.columns]
        self.hosts, self.classes = whole.hosts[:, slots], whole.classes
        self.nodes = [whole.nodes[slot] for slot in slots.tolist()]
        self.card_policies, self.links = whole.card_policies, whole.links
        self.most_cards = whole.most_cards
        self.changed, self.computed = np.zeros(slots.size, np.int64), {}
        self._slots = {node.name: slot for slot, node in enumerate(self.nodes) if node is not None}


class Columns(NodeColumns):
    """All nodes, which come, change and go."""

    def __init__(self, nodes: Iterable[Node] = (), view: UsageView | None = None) -> None:
        self.nodes: list[Node | None] = []
        self.classes: dict[CardClass, int] = {}
        self.card_policies: dict[str, int] = {}
        self.links: dict[bytes, int] = {}
        self._slots: dict[str, int] = {}
        self._spans: list[slice] = []
        """The card columns of each slot."""
        self._vacant: dict[int, list[int]] = {}
        """Slots without a node, by their number of columns."""
        self._columns: dict[DeviceId, tuple[int, ...]] = {}
        self.computed = {}
        self._width = self.most_cards = 0
        """The number of card columns that slots own."""
        self._arrays: dict[str, Ints | Bools] = {
            "usage": np.zeros((6, 0), np.int64),
            "cards": np.zeros((5, 0), np.int64),
            "hosts": np.zeros((10, 0), np.int64),
            "starts": np.zeros(0, np.int64),
            "sizes": np.zeros(0, np.int64),
            "changed": np.zeros(0, np.int64),
            **{name: np.zeros(0, np.bool_) for name in _FLAGS},
        }
        self._shared = False
        """Whether a copy may share everything but `usage` and `hosts`."""
        self._show()
        for node in nodes:
            self.set_node(node, view)

    def copy(self) -> Self:
        """Return a copy that changes independently. Only what is allocated is copied at once."""
        self._shared = True
        return super().copy()

    def emptied(self) -> Self:
        """Return a copy in which nothing is allocated."""
        twin = self.copy()
        twin.usage[:FREE_MEMORY] = 0
        twin.usage[FREE_MEMORY:] = twin.cards[CARD_MEMORY:]
        twin.hosts[:CPU_USED] = twin.hosts[MEMORY_SUM:CPU]
        twin.hosts[CPU_USED:MEMORY_SUM] = 0
        return twin

    # ---- reading ----

    @property
    def count(self) -> int:
        """Return the number of nodes."""
        return len(self._slots)

    def slots(self, names: Iterable[str]) -> Ints:
        """Return the slot of each node; -1 for unknown ones."""
        return np.fromiter(map(self._slots.get, names, repeat(-1)), np.int64)

    def mask_of(self, devices: Iterable[DeviceId]) -> Bools:
        """Return an array that is True for these devices' columns."""
        mask = np.zeros(self._width, np.bool_)
        for device in devices:
            for column in self._columns.get(device, ()):
                mask[column] = True
        return mask

    # ---- changes ----

    def set_node(self, node: Node, view: UsageView | None = None) -> None:
        """Take a node that is new or has changed, with its usage by this view."""
        self._unshare()
        size = max(len(node.cards), 1)
        slot = self._slots.get(node.name)
        if slot is not None and _size(self._spans[slot]) != size:
            self.remove_node(node.name)
            slot = None
        if slot is None:
            slot = self._slots[node.name] = self._new_slot(size)
            self._ranks = None
        else:
            self._forget_devices(slot)
        self.nodes[slot] = node
        rows = []
        for column, card in enumerate(node.cards, int(self.starts[slot])):
            number, index = self.class_of(node, card), min(card.rank, MAX_INDEX)
            rows.append((number, index, slot, card.available_mib, card.compute))
            self._columns[card.uuid] = (*self._columns.get(card.uuid, ()), column)
        columns = self._spans[slot]
        if rows:
            self.cards[:, columns] = np.array(rows, np.int64).T
            self.unhealthy[columns] = [not card.healthy for card in node.cards]
            self.cordoned[columns] = [card.cordoned for card in node.cards]
            self.open[columns] = [card.open for card in node.cards]
        else:
            self.open[columns] = False
        self.exists[columns] = bool(node.cards)
        totals = self.cards[CARD_MEMORY:, columns] * self.open[columns]
        self.hosts[MEMORY_SUM:CPU, slot] = totals.sum(axis=1)
        self.hosts[CPU, slot] = NEVER if node.cpu_milli is None else node.cpu_milli
        self.hosts[HOST_MEMORY, slot] = NEVER if node.memory_mib is None else node.memory_mib
        number = len(self.card_policies) + 1
        own = node.card_policy
        self.hosts[CARD_POLICY, slot] = self.card_policies.setdefault(own, number) if own else 0
        number, distances = len(self.links) + 1, node.distances
        self.hosts[LINKS, slot] = self.links.setdefault(distances, number) if distances else 0
        self.set_usage(node.name, view or EmptyUsage())

    def remove_node(self, name: str) -> None:
        """Drop a node. Its slot is kept for another node of as many cards."""
        self._unshare()
        slot = self._slots.pop(name)
        columns = self._spans[slot]
        self._mark(slot)
        self._forget_devices(slot)
        self.nodes[slot] = self._ranks = None
        self.open[columns] = self.exists[columns] = False
        self._vacant.setdefault(_size(columns), []).append(slot)

    def set_usage(self, name: str, view: UsageView) -> None:
        """Take what is allocated of a node."""
        slot = self._slots[name]
        node = self.nodes[slot]
        assert node is not None
        # For one node this is faster than expressions over arrays.
        rows: list[tuple[int, ...]] = []
        free_memory = free_compute = 0
        for card in node.cards:
            memory, compute, *others = amounts_of(view.card_usage(name, card.uuid))
            free = max(card.available_mib - memory, 0), max(card.compute - compute, 0)
            rows.append((memory, compute, *others, *free))
            if card.open:
                free_memory += free[0]
                free_compute += free[1]
        if rows:
            self.usage[:, self._spans[slot]] = np.array(rows, np.int64).T
        cpu, host_memory = view.host_usage(name)
        used = min(cpu, NEVER), min(host_memory, NEVER)
        self.hosts[:MEMORY_SUM, slot] = free_memory, free_compute, *used
        self._mark(slot)

    # ---- inside ----

    def _unshare(self) -> None:
        """Copy what a copy may share, before a node changes it."""
        if not self._shared:
            return
        self._shared = False
        self.nodes, self.classes = self.nodes.copy(), self.classes.copy()
        self.card_policies, self.links = self.card_policies.copy(), self.links.copy()
        self._slots, self._columns = self._slots.copy(), self._columns.copy()
        self._spans = self._spans.copy()
        self._vacant = {size: slots.copy() for size, slots in self._vacant.items()}
        self._arrays = {name: getattr(self, name).copy() for name in self._arrays}
        self._show()

    def _new_slot(self, size: int) -> int:
        if self._vacant.get(size):
            return self._vacant[size].pop()
        slot, first = len(self.nodes), self._width
        self.nodes.append(None)
        self._spans.append(slice(first, first + size))
        self._width += size
        self.most_cards = max(self.most_cards, size)
        for name, array in self._arrays.items():
            if self._length(name) > array.shape[-1]:
                more = np.zeros((*array.shape[:-1], self._length(name)), array.dtype)
                self._arrays[name] = np.concatenate((array, more), axis=-1)
        self._show()
        self.starts[slot], self.sizes[slot] = first, size
        self.cards[SLOT, first : first + size] = slot
        return slot

    def _show(self) -> None:
        """Bind the attributes to the part of each array that is in use."""
        for name, array in self._arrays.items():
            setattr(self, name, array[..., : self._length(name)])

    def _length(self, name: str) -> int:
        return len(self.nodes) if name in _OF_SLOTS else self._width

    def _forget_devices(self, slot: int) -> None:
        node = self.nodes[slot]
        assert node is not None
        for device in {card.uuid for card in node.cards}:
            others = tuple(
                column for column in self._columns[device] if self.cards[SLOT, column] != slot
            )
            if others:
                self._columns[device] = others
            else:
                del self._columns[device]


def _size(columns: slice) -> int:
    return int(columns.stop - columns.start)


def _free(cards: Ints, usage: Ints) -> Ints:
    """Return free memory and free compute of these cards; none of an overcommitted card."""
    free: Ints = np.maximum(cards[CARD_MEMORY:] - usage[MEMORY:HOLDERS], 0)
    return free
