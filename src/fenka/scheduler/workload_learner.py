"""Learns the workload that a policy expects, from the pods that the cluster has seen."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fenka.cluster.objects import Pod
from fenka.cluster.pod_columns import LiveColumns
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


def learning_policy(name: str) -> Policy:
    """Return the policy of this name, with an empty expected workload if it places for one."""
    return TargetPolicy(name, ExpectedWorkload(())) if name in TARGET_POLICIES else name


class WorkloadLearner:
    """Counts each pod that requests cards once, and has the policy expect such pods.

    Every replica learns for itself: all see the same pods, and one that starts begins with those that exist.
    """

    def __init__(
        self,
        policy: TargetPolicy,
        cluster: ClusterState,
        live: LiveColumns,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        policy: what learns.
        cluster: its dialects say what a pod requests.
        live: the nodes for which prices are computed.
        pods: returns all pods, by UID.
        sleep: waits for a number of seconds.
        """
        self._policy, self._cluster, self._live, self._pods = policy, cluster, live, pods
        self._sleep = sleep
        self._learned = LearnedWorkload()
        self._counted = frozenset[str]()
        self._new = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            self.learn()

    def learn(self) -> None:
        """Count the pods that are new, and correct the prices for what is free now."""
        pods, target = self._pods(), self._policy.target
        for uid in pods.keys() - self._counted:
            demand = pods[uid].demand(self._cluster.dialects)
            if demand.dialect is None or demand.error is not None or demand.invalid is not None:
                continue
            requests = [part.request for part in demand.parts if not part.request.instance]
            self._learned.observe(requests)
            self._new += len(requests)
        self._counted = frozenset(pods)
        if self._new >= RELEARN_PODS or (self._new and not target.workload):
            target.expect(self._learned.typical())
            self._new = 0
        if self._policy == "bid-price":
            target.prices.improve(self._live.read(), steps=1)
