"""The shared nodes of a cluster as columns, which follow the cluster's state."""

from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from fenka.cluster.node_admission import AdmissionRule, admission_rule
from fenka.cluster.state import ClusterState
from fenka.core.card_columns import Ints
from fenka.core.columns import Columns
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.usage import UsageOverlay, UsageView

V = TypeVar("V")

MAX_SPARE_VALUES = 64
"""Values that no node has any more, of nodes whose errors or cards change; beyond that all are read again."""


class SlotValues(Generic[V]):
    """A value for each slot. Of many slots few values are different; each of these has a number.

    Attributes:
        numbers: the number of each value.
        of_slot: the number of each slot's value.
    """

    def __init__(self) -> None:
        self.numbers: dict[V, int] = {}
        self.of_slot: Ints = np.zeros(0, np.int64)

    def set(self, slot: int, value: V) -> None:
        """Set the value of a slot."""
        if slot >= self.of_slot.size:
            more = np.zeros(slot + 1, np.int64)
            self.of_slot = np.concatenate((self.of_slot, more))
        self.of_slot[slot] = self.numbers.setdefault(value, len(self.numbers))


class LiveColumns:
    """Columns that follow the cluster: an event only names its node until they are read or follow.

    Attributes:
        usage: what is used of the cards.
        version: changes whenever the columns do.
        rules: the admission rule of each slot's node.
        kinds: each slot's node as far as that decides what it could hold if nothing were allocated.
    """

    def __init__(self, cluster: ClusterState, usage: UsageOverlay | None = None) -> None:
        """usage: what is used of the cards, if that is more than the cluster's pods use."""
        self._cluster = cluster
        self.usage: UsageView = usage or cluster
        self._changed = set[str]()
        cluster.watch(self._changed)
        if usage is not None:
            usage.watch(self._changed)
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self._columns = Columns()
        self.rules, self.kinds = SlotValues[AdmissionRule](), SlotValues[Node]()
        self._changed.update(shared.node.name for shared in self._cluster.shared_nodes())

    def read(self) -> Columns:
        """Return the columns as of now."""
        while self._changed:
            names = list(self._changed)
            # A set that is emptied by pop() stays as large as it was, and each pop() looks through it.
            self._changed.clear()
            for name in names:
                self.version += 1
                self._follow(name)
            most = self._columns.count + MAX_SPARE_VALUES
            if max(len(self.rules.numbers), len(self.kinds.numbers)) > most:
                self._begin()
        return self._columns

    def follow(self) -> None:
        """Bring the columns up to date, once they have been read: between requests rather than in one."""
        if self._columns.count:
            self.read()

    def _follow(self, name: str) -> None:
        columns, shared = self._columns, self._cluster.shared_node(name)
        slot = columns.slot(name)
        if shared is None or not shared.shares_cards:
            if slot >= 0:
                columns.remove_node(name)
            return
        node = self._cluster.card_node(name)
        if slot < 0 or columns.nodes[slot] is not node:
            columns.set_node(node, self.usage)
            slot = columns.slot(name)
            self.kinds.set(slot, _kind(node))
        else:
            columns.set_usage(name, self.usage)
        self.rules.set(slot, admission_rule(self._cluster, name))


def _kind(node: Node) -> Node:
    """Return a node that holds the same when empty, and is equal for all such nodes."""
    usable = (
        (card.memory_mib, card.unleased_mib, card.drawn_mib, card.compute, card.model, card.profile)
        for card in node.cards
        if card.open
    )
    cards = tuple(
        Card(
            *(index, DeviceId(str(index)), model, memory_mib, compute),
            profile=profile,
            unleased_mib=unleased_mib,
            drawn_mib=drawn_mib,
        )
        for index, (memory_mib, unleased_mib, drawn_mib, compute, model, profile) in enumerate(
            sorted(usable)
        )
    )
    return replace(node, name="", cards=cards)
