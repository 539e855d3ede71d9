"""Learns the workload that a policy expects, from the pods that the cluster has seen."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from fenka.cluster.objects import Pod, seconds
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.queue_state import cards_held
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.scores import TARGET_POLICIES
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import LearnedWorkload

INTERVAL_S = 2.0
"""Between two looks at the pods, after which prices are corrected by one step."""
RELEARN_PODS = 50
"""The workload is computed again after this number of further pods."""
KNOWN_PODS = 100
"""The workload is known from this number of pods on. Until then `bid-price` places as `binpack` does."""
PODS_A_STEP = 250
"""New pods that are looked at before others have their turn on the event loop."""
MIN_RUN_S = 60.0
"""A pod counts once it has run for this long: a tenant pays for a count with a card."""


def learning_policy(name: str) -> Policy:
    """Return the policy of this name, with an empty expected workload if it places for one."""
    return TargetPolicy(name, ExpectedWorkload(())) if name in TARGET_POLICIES else name


class WorkloadLearner:
    """Counts each pod that has run on cards for MIN_RUN_S once, and has the policy expect such pods.

    Every replica learns for itself: all see the same pods, and one that starts begins with those that exist.
    """

    def __init__(
        self,
        policy: TargetPolicy,
        cluster: ClusterState,
        live: LiveColumns,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        policy: what learns.
        cluster: its dialects say what a pod requests.
        live: the nodes for which prices are computed.
        pods: returns all pods, by UID.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        self._policy, self._cluster, self._live, self._pods = policy, cluster, live, pods
        self._sleep, self._now = sleep, now
        self._learned = LearnedWorkload()
        self._counted = set[str]()
        self._new = self._known = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            for _ in self.learn():
                await self._sleep(0)

    def learn(self) -> Iterator[None]:
        """Count the pods that are new, and correct the prices for what is free now, in short steps."""
        pods, target, now = self._pods(), self._policy.target, self._now()
        self._counted &= pods.keys()
        for number, uid in enumerate(pods.keys() - self._counted):
            pod = pods.get(uid)
            if pod is not None and self._has_run(pod, now):
                self._count(pod)
            if number % PODS_A_STEP == PODS_A_STEP - 1:
                yield
        yield
        if self._known >= KNOWN_PODS and (self._new >= RELEARN_PODS or not target.workload):
            target.expect((yield from self._learned.typical_in_steps()))
            self._new = 0
            yield
        if self._policy == "bid-price":
            target.prices.improve(self._live.read(), steps=1)

    def _has_run(self, pod: Pod, now: float) -> bool:
        """Return whether the pod runs on cards, and has for long enough."""
        started = seconds(pod.status.start_time)
        return (
            pod.status.phase == "Running"
            and started is not None
            and now - started >= MIN_RUN_S
            and self._cluster.allocation(pod.metadata.uid) is not None
        )

    def _count(self, pod: Pod) -> None:
        self._counted.add(pod.metadata.uid)
        allocation = self._cluster.allocation(pod.metadata.uid)
        demand = pod.demand(self._cluster.dialects)
        shared = self._cluster.shared_node(pod.spec.node_name or "")
        if allocation is None or shared is None or demand.dialect is None:
            return
        if demand.error is not None or demand.invalid is not None:
            return
        requests = [part.request for part in demand.parts if not part.request.instance]
        if requests:
            cards = cards_held(shared, allocation.placements) / len(requests)
            self._learned.observe(requests, pod.metadata.namespace, cards)
            self._new, self._known = self._new + len(requests), self._known + len(requests)
