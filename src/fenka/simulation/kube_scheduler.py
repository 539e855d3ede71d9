"""Places pods without cards on virtual nodes as kube-scheduler does, which calls no extender for them.

`core` decides which nodes fit. The scores are those of Kubernetes 1.37.1 (pkg/scheduler/framework/plugins)
for pods without affinity that belong to no service: all other plugins give each node the same score.
Requests are as written; kube-scheduler counts 100 thousandths of a core and 200 MB for a pod that has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from fenka.core.columnar import Judgement
from fenka.core.columns import (
    CPU,
    CPU_USED,
    HOLDERS,
    HOST_MEMORY,
    HOST_MEMORY_USED,
    Bools,
    Ints,
    NodeColumns,
)
from fenka.core.request import Request

MAX_SCORE = 100
"""MaxNodeScore of kube-scheduler's framework."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The nodes that fit a pod, as the plugins read them. The arrays have a row for CPU and one for memory.

    Attributes:
        total: the amounts that the nodes have.
        used: the amounts that pods have requested there.
        needed: the same with the pod that is placed.
        tainted: whether the node has a taint PreferNoSchedule, which the pod does not tolerate.
    """

    total: Ints
    used: Ints
    needed: Ints
    tainted: Bools


Plugin = Callable[[Hosts], Ints]


def least_allocated(hosts: Hosts) -> Ints:
    """NodeResourcesFit by LeastAllocated: the mean of (total - needed) * 100 / total, each rounded down."""
    return _mean(hosts, np.maximum(hosts.total - hosts.needed, 0))


def most_allocated(hosts: Hosts) -> Ints:
    """NodeResourcesFit by MostAllocated: the mean of needed * 100 / total, each rounded down."""
    return _mean(hosts, np.minimum(hosts.needed, hosts.total))


def balanced_allocation(hosts: Hosts) -> Ints:
    """NodeResourcesBalancedAllocation: 75 if the balance of CPU and memory stays, more if it improves.

    Balance is (1 - deviation) * 100, where the deviation is half of the distance between the used parts.
    """
    improved: Ints = MAX_SCORE // 2 + _balance(hosts, hosts.needed) - _balance(hosts, hosts.used)
    return MAX_SCORE // 2 + improved // 2


def taint_toleration(hosts: Hosts) -> Ints:
    """TaintToleration: 0 with a taint and 100 without one. All get 100 if no node has one."""
    return np.where(hosts.tainted, 0, MAX_SCORE)


_BY_DEFAULT = ((1, least_allocated), (1, balanced_allocation))

PROFILES: dict[str, tuple[tuple[int, Plugin], ...]] = {
    "kube-scheduler": _BY_DEFAULT,
    "most-allocated": ((1, most_allocated), (1, balanced_allocation)),
    "taint": (*_BY_DEFAULT, (3, taint_toleration)),
}
"""Plugins with their weights, by name. kube-scheduler: the default ones. most-allocated: a profile with this
strategy. taint: the default ones, with the taint that `fenka node` keeps while a card is free as a whole."""


class KubeScheduler:
    """Chooses nodes by a profile. Of equal nodes it takes any, as kube-scheduler does."""

    def __init__(self, profile: str, random: Random) -> None:
        """profile: a name in PROFILES."""
        self._plugins, self._random = PROFILES[profile], random

    def choose(self, columns: NodeColumns, request: Request) -> str | None:
        """Return the name of the node for a request without cards, None if none fits."""
        slots = np.flatnonzero(Judgement(columns, request).fits)
        if not slots.size:
            return None
        hosts = _hosts(columns, request, slots)
        scores = sum(weight * plugin(hosts) for weight, plugin in self._plugins)
        best = slots[np.flatnonzero(scores == np.max(scores))]
        node = columns.nodes[int(best[self._random.randrange(best.size)])]
        assert node is not None
        return node.name


def _hosts(columns: NodeColumns, request: Request, slots: Ints) -> Hosts:
    total = columns.hosts[[CPU, HOST_MEMORY]][:, slots]
    used = columns.hosts[[CPU_USED, HOST_MEMORY_USED]][:, slots]
    asked = np.array([[request.cpu_milli], [request.host_memory_mib]], np.int64)
    # The twin of `fenka.node.free_cards`.
    free = columns.open & (columns.usage[HOLDERS] == 0)
    tainted = np.add.reduceat(free, columns.starts, dtype=np.int64)[slots] > 0
    return Hosts(total, used, used + asked, tainted)


def _mean(hosts: Hosts, parts: Ints) -> Ints:
    """Return the mean of these parts of the totals, in percent. A total of 0 does not count."""
    known = hosts.total > 0
    percent = np.where(known, parts * MAX_SCORE // np.maximum(hosts.total, 1), 0)
    mean: Ints = percent.sum(axis=0) // np.maximum(known.sum(axis=0), 1)
    return mean


def _balance(hosts: Hosts, used: Ints) -> Ints:
    parts = np.minimum(used / np.maximum(hosts.total, 1), 1)
    deviation = np.where((hosts.total > 0).all(axis=0), np.abs(parts[0] - parts[1]) / 2, 0)
    balance: Ints = ((1 - deviation) * MAX_SCORE).astype(np.int64)
    return balance
