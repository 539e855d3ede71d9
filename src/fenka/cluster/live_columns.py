"""The shared nodes of a cluster as columns, which follow the cluster's state."""

from collections.abc import Mapping

import numpy as np

from fenka.cluster.node_admission import AdmissionRule, admission_rule
from fenka.cluster.state import ClusterState
from fenka.core.columns import Columns, Ints
from fenka.core.usage import UsageOverlay, UsageView

MAX_SPARE_RULES = 64
"""Rules that no node has any more, of nodes whose errors change; beyond that all are numbered again."""


class LiveColumns:
    """Columns that are brought up to date when they are read: an event only names its node until then."""

    def __init__(self, cluster: ClusterState, usage: UsageOverlay | None = None) -> None:
        """usage: what is used of the cards, if that is more than the cluster's pods use."""
        self._cluster = cluster
        self.usage: UsageView = usage or cluster
        self._columns = Columns()
        self._changed = {shared.node.name for shared in cluster.shared_nodes()}
        cluster.watch(self._changed)
        if usage is not None:
            usage.watch(self._changed)
        self._numbers: dict[AdmissionRule, int] = {}
        self._rule_of_slot: Ints = np.zeros(0, np.int64)

    def read(self) -> Columns:
        """Return the columns as of now. What a caller changes it has to undo before it returns."""
        while self._changed:
            self._follow(self._changed.pop())
        return self._columns

    def rules(self) -> tuple[Mapping[AdmissionRule, int], Ints]:
        """Return the number of each rule, and that of each slot. Call `read` first."""
        return self._numbers, self._rule_of_slot

    def _follow(self, name: str) -> None:
        columns, shared = self._columns, self._cluster.shared_node(name)
        slot = columns.slot(name)
        if shared is None:
            if slot >= 0:
                columns.remove_node(name)
            return
        if slot < 0 or columns.nodes[slot] is not shared.node:
            columns.set_node(shared.node, self.usage)
            slot = columns.slot(name)
        else:
            columns.set_usage(name, self.usage)
        if slot >= self._rule_of_slot.size:
            more = np.zeros(slot + 1, np.int64)
            self._rule_of_slot = np.concatenate((self._rule_of_slot, more))
        rule = admission_rule(self._cluster, name)
        if rule not in self._numbers and len(self._numbers) >= columns.count + MAX_SPARE_RULES:
            self._numbers.clear()
            self._changed.update(node.name for node in columns.nodes if node is not None)
        self._rule_of_slot[slot] = self._numbers.setdefault(rule, len(self._numbers))
