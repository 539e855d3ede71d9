"""One replica of the extender: the wiring of its parts, and how they start and end."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from fenka.cluster import queue_snapshot
from fenka.cluster.gang_placement import GangMembers, GangScheduler
from fenka.cluster.growth import GrowthReclaim
from fenka.cluster.objects import Pod
from fenka.cluster.pod_columns import ColumnarPodEvaluator
from fenka.cluster.pod_preemption import PodPreemption, budgets_for
from fenka.cluster.queue_snapshot import SchedulerOptions, TopologyLevels
from fenka.cluster.queue_state import QueueState, queue_state
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.queue import Fairness
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.election import Election
from fenka.kubernetes.events import EventRecorder
from fenka.kubernetes.leadership import Leadership
from fenka.scheduler import controllers
from fenka.scheduler.binder import BIND_TIMEOUT_S, SETTLE_S, Binder, GangBarrier
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.extender import Extender
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController
from fenka.scheduler.refused_pods import RefusedPods
from fenka.scheduler.silent_nodes import SilentNodes
from fenka.scheduler.unstarted_evictions import UnstartedEvictions
from fenka.scheduler.workload_learner import WorkloadLearner, learning_policy
from fenka.server.program import ReplicaName

DRAIN_S = BIND_TIMEOUT_S + SETTLE_S + 1
"""By then the outcome of every binding that was sent is known, or it can do no harm."""


class Settings(msgspec.Struct, frozen=True):
    """How replicas decide, and how they agree on a leader: options of `fenka scheduler`."""

    namespace: Annotated[
        str,
        Meta(description="namespace of the replicas' Lease", extra={"envvar": "POD_NAMESPACE"}),
    ] = "kube-system"
    lease: Annotated[str, Meta(description="Lease by which the replicas elect a leader")] = (
        "fenka-scheduler"
    )
    name: ReplicaName = ""
    advertise: Annotated[
        str,
        Meta(
            description="IP address at which other replicas reach this one",
            extra={"envvar": "POD_IP"},
        ),
    ] = ""
    queue_penalty: Annotated[
        float,
        Meta(
            title="SECONDS",
            description="delay for each card that the pod's namespace already uses or has requested before "
            "it; 0: order by time alone",
        ),
    ] = 60
    queue_max_penalty: Annotated[
        float,
        Meta(
            title="SECONDS",
            description="longest delay of a namespace's first pod, whatever its usage",
        ),
    ] = 3600
    half_life: Annotated[
        float, Meta(title="SECONDS", description="past usage counts half after this time")
    ] = 3600
    policy: Annotated[
        Policy,
        Meta(
            description="order of the nodes and cards: binpack, spread, bid-price, fgd, bestfit, packing, "
            "clustering, dotprod or random"
        ),
    ] = "binpack"
    max_nodes: Annotated[
        int,
        Meta(
            title="N",
            ge=0,
            description="filter returns the N best nodes; 0: all that fit. Needs prioritize with weight 100",
        ),
    ] = 0
    topology_level: TopologyLevels = []
    hami_names: Annotated[
        bool, Meta(description="also accept nvidia.com/gpumem and nvidia.com/gpucores")
    ] = False
    scheduler_name: Annotated[
        list[str],
        Meta(title="NAME", description="bind only pods of this schedulerName; repeatable"),
    ] = []
    backfill_only: Annotated[
        list[str],
        Meta(
            title="CLASS",
            description="for pods of this PriorityClass only pods of class fenka-backfill are evicted; "
            "repeatable",
        ),
    ] = []

    take_growth_back: Annotated[
        bool,
        Meta(
            description="pods that have grown beyond what they requested shrink to that again if the first "
            "pod that waits would fit then"
        ),
    ] = False

    evict_unstarted_after: Annotated[
        float,
        Meta(
            title="SECONDS",
            ge=0,
            description="evict a pod that holds cards for this long without starting, while a request waits; "
            "0: never",
        ),
    ] = 0

    unhealthy_maps: Annotated[
        bool,
        Meta(
            description="also read gpushare's ConfigMaps unhealthy-gpu-NODE in kube-system, which its health "
            "daemon writes"
        ),
    ] = False

    def fairness(self) -> Fairness:
        """Return how pods of one priority are ordered. Raises ValueError."""
        return Fairness(self.queue_penalty, self.queue_max_penalty, self.half_life)

    def options(self) -> SchedulerOptions:
        """Return what other programs need to decide as this one. Raises ValueError."""
        levels = tuple(self.topology_level)
        return SchedulerOptions(self.policy, self.hami_names, self.fairness(), levels)


def _election(
    api: Api,
    settings: Settings,
    options: SchedulerOptions,
    identity: str,
    address: str,
    clock: Callable[[], float],
) -> Election:
    """Return the election of a leader, who publishes its options."""
    return Election(
        api,
        settings.namespace,
        settings.lease,
        identity,
        address=address,
        annotations={queue_snapshot.ANNOTATION: options.encode()},
        labels=dict([queue_snapshot.LABEL.split("=")]),
        clock=clock,
    )


class _Runs(Protocol):
    async def run(self) -> None:
        """Run until cancelled."""


class SchedulerReplica:
    """One of the scheduler's processes: everything but HTTP."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        settings: Settings,
        identity: str,
        address: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        api: the API server.
        settings: how it decides.
        identity: names this process, and no other, in the lease.
        address: the URL at which other replicas reach this one; empty if they cannot.
        clock: seconds, monotonic.
        sleep: waits for a number of seconds.
        now: seconds since 1970.
        """
        self._clock, self._sleep, self._now = clock, sleep, now
        policy = self._policy = learning_policy(settings.policy)
        options = settings.options()
        cluster = self.cluster = ClusterState(dialects=options.dialects)
        cluster.topology_levels = options.topology_levels
        members = GangMembers(
            cluster,
            lambda: self.informers.pod_listener.gang_pods,
            lambda: self.informers.pod_groups.by_name,
        )
        gangs = self.gangs = GangScheduler(members, cluster, policy, clock)
        evaluator = ColumnarPodEvaluator(cluster, policy, gangs.live, settings.max_nodes)
        state = queue_state(cluster, policy, options.fairness, members.all_exist, gangs.live)
        queue = self.queue = QueueController(state, gangs.reserved, now=now, sleep=sleep)
        recorder = EventRecorder(api, "fenka-scheduler", identity)
        reporter = EventReporter(
            cluster,
            evaluator,
            recorder,
            lambda: election.leading,
            position=queue.position,
            is_settled=lambda: queue.is_settled,
            sleep=sleep,
        )
        self.informers = ClusterInformers(
            api, cluster, gangs.live, queue, reporter, unhealthy_maps=settings.unhealthy_maps
        )
        election = self.election = _election(api, settings, options, identity, address, clock)
        leadership = self.leadership = Leadership(election, self.informers, sleep)
        refused = RefusedPods(queue.refuse, recorder, now)
        requeuer, *patchers = self._patchers(api, state, refused)
        self.extender = Extender(
            self._pods,
            queue,
            evaluator,
            gangs,
            self._preemption(settings),
            on_filter=reporter.filtered,
            on_preempt=reporter.preempted,
            requeue=requeuer.patch_soon,
            clock=clock,
        )
        self.binder = self._binder(api, settings, refused)
        running: list[_Runs] = [self.informers, recorder, leadership, queue, reporter, requeuer]
        running += [*patchers, *self._controllers(api, settings, state, recorder)]
        self._tasks = [part.run for part in running]

    def _binder(self, api: Api, settings: Settings, refused: RefusedPods) -> Binder:
        binder = Binder(
            api,
            self.cluster,
            self.extender.placements,
            self.gangs,
            GangBarrier(self.gangs),
            self.leadership,
            self._pods,
            clock=self._clock,
            sleep=self._sleep,
            schedulers=settings.scheduler_name,
            policy=self._policy,
        )
        binder.on_refused = refused.binding
        return binder

    def _patchers(
        self, api: Api, state: QueueState, refused: RefusedPods
    ) -> list[controllers.PodPatcher]:
        """Return what has kube-scheduler retry pods, then what ungates them and publishes their positions."""
        patcher = partial(
            controllers.PodPatcher, api, is_leading=self._is_leading, sleep=self._sleep
        )
        ungater = patcher(
            controllers.ungate_body,
            lambda limit: state.pods_to_ungate(limit, self._now()),
            interval_s=controllers.UNGATE_INTERVAL_S,
        )
        ungater.on_refused = refused.gate
        return [
            patcher(
                controllers.requeue_body,
                lambda limit: state.pods_to_requeue(limit, self._now()),
                interval_s=controllers.REQUEUE_INTERVAL_S,
                retry_after_s=0.0,
            ),
            patcher(
                controllers.requeue_body,
                self.gangs.wrongly_informed,
                interval_s=controllers.REQUEUE_GANGS_INTERVAL_S,
                retry_after_s=0.0,
            ),
            ungater,
            patcher(
                lambda pod: controllers.position_body(state.published_position(pod)),
                state.pods_to_position,
                interval_s=controllers.POSITION_INTERVAL_S,
                retry_after_s=controllers.POSITION_RETRY_AFTER_S,
            ),
        ]

    def _preemption(self, settings: Settings) -> PodPreemption:
        return PodPreemption(
            self.cluster,
            self._policy,
            self.gangs.live.usage,
            budgets=lambda pod: budgets_for(pod, self.informers.budgets.objects.values()),
            gang_key=self.gangs.key,
            backfill_only=settings.backfill_only,
        )

    def _controllers(
        self, api: Api, settings: Settings, state: QueueState, recorder: EventRecorder
    ) -> Iterator[_Runs]:
        """Yield what changes pods, and what tells the cluster's state the time."""
        cluster, sleep = self.cluster, self._sleep
        yield controllers.Descheduler(
            api, cluster, self._pods, self.gangs, recorder, self._is_leading, sleep=sleep
        )
        yield SilentNodes(cluster, recorder, self._is_leading, clock=self._clock, sleep=sleep)
        yield controllers.PinTimer(cluster, self._pods, clock=self._clock, sleep=sleep)
        yield controllers.SpotTimer(cluster, now=self._now, sleep=sleep)
        if isinstance(self._policy, TargetPolicy):
            yield WorkloadLearner(
                *(self._policy, cluster, self.gangs.live, self._pods), now=self._now, sleep=sleep
            )
        if settings.evict_unstarted_after:
            yield UnstartedEvictions(
                *(api, cluster, self._pods, settings.evict_unstarted_after, recorder),
                lambda: self._is_leading() and bool(state.snapshot.entries),
                now=self._now,
                sleep=sleep,
            )
        if settings.take_growth_back:
            yield controllers.GrowthReclaimer(
                api,
                GrowthReclaim(cluster, self._policy, self.gangs.live.usage, state),
                self._pods,
                recorder,
                self._is_leading,
                now=self._now,
                sleep=sleep,
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
