"""One replica of the extender: the wiring of its parts, and how they start and end."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fenka.cluster import scheduler_options
from fenka.cluster.disruption import budgets_for
from fenka.cluster.gang_members import GangMembers
from fenka.cluster.gang_reservations import GangScheduler
from fenka.cluster.objects import Pod
from fenka.cluster.pod_columns import ColumnarPodEvaluator
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_state import queue_state
from fenka.cluster.scheduler_options import SchedulerOptions
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.core.fairness import Fairness
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.kubernetes.client import Api
from fenka.kubernetes.election import Election
from fenka.kubernetes.events import EventRecorder
from fenka.scheduler.binder import BIND_TIMEOUT_S, SETTLE_S, Binder
from fenka.scheduler.descheduler import Descheduler
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.extender import Extender
from fenka.scheduler.gang_barrier import GangBarrier
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.leadership import Leadership
from fenka.scheduler.pod_patcher import (
    REQUEUE_INTERVAL_S,
    UNGATE_INTERVAL_S,
    PodPatcher,
    requeue_body,
    ungate_body,
)
from fenka.scheduler.queue_controller import QueueController

DRAIN_S = BIND_TIMEOUT_S + SETTLE_S + 1
"""By then the outcome of every binding that was sent is known, or it can do no harm."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a replica.

    Attributes:
        identity: names this process, and no other, in the lease.
        policy: the placement policy.
        namespace: the namespace of the lease.
        lease: the name of the Lease by which replicas elect a leader.
        address: the URL at which other replicas reach this one; empty if they cannot.
        hami: whether HAMi's names are understood.
        fairness: how pods of one priority are ordered; None for the core's defaults.
        schedulers: values of `schedulerName` whose pods are bound; empty for all.
        max_nodes: how many nodes filter returns at most; 0 for all that fit.
    """

    identity: str
    policy: Policy = "binpack"
    namespace: str = "kube-system"
    lease: str = "fenka-scheduler"
    address: str = ""
    hami: bool = False
    fairness: Fairness | None = None
    schedulers: tuple[str, ...] = ()
    max_nodes: int = 0


class Replica:
    """Everything but HTTP."""

    def __init__(
        self,
        api: Api,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        cluster = self.cluster = ClusterState(dialects=WITH_HAMI if settings.hami else DIALECTS)
        members = GangMembers(
            cluster,
            lambda: self.informers.pod_listener.gang_pods,
            lambda: self.informers.pod_groups.by_name,
        )
        gangs = self.gangs = GangScheduler(members, cluster, settings.policy, clock)
        evaluator = ColumnarPodEvaluator(cluster, settings.policy, gangs.live)
        state = queue_state(cluster, settings.policy, settings.fairness, members.all_exist)
        queue = self.queue = QueueController(state, gangs.reserved, now=now, sleep=sleep)
        recorder = EventRecorder(api, "fenka-scheduler", settings.identity)
        reporter = EventReporter(
            cluster, evaluator, recorder, lambda: election.leading, position=queue.position
        )
        self.informers = ClusterInformers(api, cluster, queue, reporter)
        election = self.election = Election(
            api,
            settings.namespace,
            settings.lease,
            settings.identity,
            address=settings.address,
            annotations={
                scheduler_options.ANNOTATION: SchedulerOptions(
                    settings.policy, settings.hami, settings.fairness or Fairness()
                ).encode()
            },
            labels=dict([scheduler_options.LABEL.split("=")]),
            clock=clock,
        )
        leadership = self.leadership = Leadership(election, self.informers, sleep)
        patcher = partial(PodPatcher, api, is_leading=self._is_leading, sleep=sleep)
        requeuer = patcher(
            requeue_body,
            lambda limit: queue.refreshed().pods_to_requeue(limit, now()),
            interval_s=REQUEUE_INTERVAL_S,
            retry_after_s=0.0,
        )
        ungater = patcher(
            ungate_body,
            lambda limit: queue.refreshed().pods_to_ungate(limit),
            interval_s=UNGATE_INTERVAL_S,
        )
        preemption = PodPreemption(
            cluster,
            settings.policy,
            gangs.live.usage,
            budgets=lambda pod: budgets_for(pod, self.informers.budgets.objects.values()),
            gang_key=gangs.key,
        )
        self.extender = Extender(
            self._pods,
            queue,
            evaluator,
            gangs,
            preemption,
            on_filter=reporter.filtered,
            requeue=requeuer.patch_soon,
            max_nodes=settings.max_nodes,
        )
        self.binder = Binder(
            api,
            cluster,
            self.extender.placements,
            gangs,
            GangBarrier(gangs),
            leadership,
            self._pods,
            clock=clock,
            sleep=sleep,
            schedulers=settings.schedulers,
        )
        self._tasks = (
            self.informers.run,
            recorder.run,
            leadership.run,
            Descheduler(
                api, cluster, self._pods, gangs, recorder, self._is_leading, sleep=sleep
            ).run,
            queue.run,
            requeuer.run,
            ungater.run,
        )

    def _pods(self) -> Mapping[str, Pod]:
        return self.informers.pods.objects

    def _is_leading(self) -> bool:
        return self.leadership.leading

    async def run(self) -> None:
        """Run until cancelled. An exception is a bug: the process should be restarted."""
        async with asyncio.TaskGroup() as group:
            for task in self._tasks:
                group.create_task(task())

    async def stop(self) -> None:
        """Begin nothing new, finish what runs, let another lead at once, and forward late calls to it."""
        self.leadership.end()
        await self.binder.drain(DRAIN_S)
        await self.leadership.resign(release=not self.binder.busy)
