"""Replays arrivals on a virtual cluster: pods arrive one by one and stay, as FGD's authors measure.

The pods are placed by `core.columnar_placer`, which also serves the queue of a live cluster.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from fenka.core.columnar import Judgement
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columns import Columns
from fenka.core.evaluate import Policy
from fenka.core.gangs import NO_LIMITS, PlacementLimits
from fenka.core.inventory import Node
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import Workload, kind, typical
from fenka.core.request import Placement
from fenka.simulation.kube_scheduler import PROFILES, KubeScheduler
from fenka.simulation.trace import Trace, TracePod

LOADS = (80, 90, 95, 100, 110, 120, 130)
"""Percent of all cards that have been requested, at which the allocation is reported."""

BY_POLICY, ELSEWHERE = "policy", "elsewhere"
WITHOUT_CARDS = (BY_POLICY, ELSEWHERE, *PROFILES)
"""Placers of pods without cards. policy: the policy. elsewhere: other nodes, which are not simulated.
Others: kube-scheduler with this profile."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay.

    Attributes:
        allocation: percent of all cards, by percent of all cards that had been requested, rounded.
        fragmentation: percent of what is free that typical pods cannot use, by the same.
        refused: pods that no node had room for.
        refused_though_fitting: pods that were refused although a node had room.
        first_refusal: percent of all cards that had been requested at the first refusal, None without one.
    """

    allocation: dict[int, float]
    fragmentation: dict[int, float]
    refused: int
    refused_though_fitting: int
    first_refusal: float | None


def replay(  # noqa: PLR0913, PLR0917
    trace: Trace,
    nodes: Sequence[Node],
    arrivals: Sequence[TracePod],
    policy: Policy,
    look_ahead: int = 1,
    seed: int = 0,
    without_cards: str = BY_POLICY,
    progress: Callable[[int], object] = lambda _: None,
    expected: Workload | None = None,
) -> Outcome:
    """Place the pods as they arrive.

    Args:
        trace: what arrives, and where.
        nodes: the trace's, as they are named for ties.
        arrivals: the pods in their order.
        policy: a name in SCORES.
        look_ahead: this number of pods is waited for, then they are placed, the largest first.
        seed: of the random policy, and of kube-scheduler's choice among equal nodes.
        without_cards: the placer of pods without cards, one of WITHOUT_CARDS.
        progress: called with the number of pods that have arrived.
        expected: the expected workload; None: that of the trace's pods.
    """
    if expected is None:
        expected = typical(Counter(kind(pod.request) for pod in trace.pods))
    target = ExpectedWorkload(expected, seed)
    kube_scheduler = (
        KubeScheduler(without_cards, Random(seed)) if without_cards in PROFILES else None
    )
    cluster = _VirtualCluster(nodes, TargetPolicy(policy, target), kube_scheduler)
    requested, parts = 0, trace.parts
    sums, counts = Counter[int](), Counter[int]()
    fragmentation = dict[int, float]()
    first_refusal = None
    for number, batch in enumerate(_batches(arrivals, look_ahead)):
        requested += sum(pod.parts for pod in batch)
        present = (pod for pod in batch if pod.parts or without_cards != ELSEWHERE)
        for pod in sorted(present, key=lambda pod: pod.parts, reverse=True):
            cluster.place(pod)
        if cluster.refused and first_refusal is None:
            first_refusal = 100 * requested / parts
        load = round(100 * requested / parts)
        sums[load] += cluster.allocated
        counts[load] += parts
        if load not in fragmentation:
            fragmentation[load] = 100 * target.fragments.share(cluster.columns)
        if number % 100 == 0:
            progress(number * max(look_ahead, 1))
    return Outcome(
        {load: 100 * sums[load] / counts[load] for load in sums},
        fragmentation,
        cluster.refused,
        cluster.refused_though_fitting,
        first_refusal,
    )


def _batches(arrivals: Sequence[TracePod], size: int) -> Iterator[Sequence[TracePod]]:
    for first in range(0, len(arrivals), max(size, 1)):
        yield arrivals[first : first + max(size, 1)]


class _VirtualCluster:
    """The virtual cluster.

    Attributes:
        columns: its nodes, with what is allocated of them.
        allocated: thousandths of cards.
        refused: the number of pods.
        refused_though_fitting: as in `Outcome`.
    """

    def __init__(
        self, nodes: Sequence[Node], policy: TargetPolicy, kube_scheduler: KubeScheduler | None
    ) -> None:
        """kube_scheduler: places pods without cards; None: the policy does."""
        self._kube_scheduler = kube_scheduler
        self.columns, self._policy = Columns(nodes), policy
        self._placer = ColumnarPlacer(self.columns)
        self.allocated = self.refused = self.refused_though_fitting = 0

    def place(self, pod: TracePod) -> None:
        """Place a pod, or refuse it."""
        self._policy.target.next(self.columns, self._policy)
        placed = self._placer.place(pod.request, self._policy, self._limits(pod))
        if isinstance(placed, Placement):
            self._placer.add(placed)
            self.allocated += pod.parts
            return
        self.refused += 1
        self.refused_though_fitting += bool(Judgement(self.columns, pod.request).fits.any())

    def _limits(self, pod: TracePod) -> PlacementLimits:
        """Return to which nodes the pod may go."""
        if pod.request.cards or self._kube_scheduler is None:
            return NO_LIMITS
        name = self._kube_scheduler.choose(self.columns, pod.request)
        return NO_LIMITS if name is None else PlacementLimits(among=frozenset({name}))
