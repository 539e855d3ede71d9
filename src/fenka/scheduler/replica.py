"""One replica of the extender: what it knows, whether it may write, and how it starts and ends."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fenka.cluster import scheduler_options
from fenka.cluster.disruption import budgets_for
from fenka.cluster.objects import Pod
from fenka.cluster.pod_placement import PodEvaluator
from fenka.cluster.scheduler_options import SchedulerOptions
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.core.fairness import Fairness
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.kubernetes.client import Api
from fenka.kubernetes.election import Election, Term
from fenka.kubernetes.events import EventRecorder
from fenka.scheduler.binder import BIND_WITHIN_S, SETTLED_S, Binder
from fenka.scheduler.descheduler import Descheduler
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.extender import Extender
from fenka.scheduler.gang_controller import GangController
from fenka.scheduler.gang_scheduler import GangScheduler
from fenka.scheduler.gate_controller import GateController
from fenka.scheduler.informers import ClusterInformers
from fenka.scheduler.queue_controller import QueueController, QueuedEvaluator
from fenka.scheduler.requeue import Requeuer

log = logging.getLogger(__name__)

DRAIN_S = BIND_WITHIN_S + SETTLED_S + 1
"""By then every binding that was sent is known, or can do no harm."""

LINGER_S = 3.0
"""So long a replica that ends passes calls on: until every node's proxy has heard that it is not ready."""
LOOK_S = 0.25
"""Meanwhile it looks so often who leads now."""


@dataclass(frozen=True, slots=True)
class Settings:
    """namespace, lease: of the Lease by which replicas agree. identity: of this process alone.

    address: the URL at which other replicas reach this one; empty: they cannot.
    hami: whether HAMi's names are understood. fairness: what orders pods of one priority, None
    for the core's own. schedulers: values of `schedulerName` whose pods are bound; empty: all.
    """

    identity: str
    policy: Policy = "binpack"
    namespace: str = "kube-system"
    lease: str = "fenka-scheduler"
    address: str = ""
    hami: bool = False
    fairness: Fairness | None = None
    schedulers: tuple[str, ...] = ()


class Replica:
    """Everything but HTTP. `run` keeps it going, `stop` ends it in order."""

    def __init__(
        self,
        api: Api,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.world = ClusterState(dialects=WITH_HAMI if settings.hami else DIALECTS)
        self.gangs = GangScheduler(
            self.world,
            settings.policy,
            lambda: self.cluster.pods.objects,
            lambda: self.cluster.group_names.by_name,
            clock,
        )
        self.judge = PodEvaluator(self.world, settings.policy, self.gangs)
        self.order = QueueController(
            self.world,
            settings.policy,
            settings.fairness,
            now=now,
            gangs=self.gangs,
        )
        self.queued_evaluator = QueuedEvaluator(self.judge, self.order)
        self.gang_controller = GangController(api, self.gangs)
        self.extender = Extender(
            self.queued_evaluator,
            self.judge,
            self.gangs,
            self.gang_controller.wake,
            lambda pod: budgets_for(pod, self.cluster.budgets.objects.values()),
        )
        self.recorder = EventRecorder(api, "fenka-scheduler", settings.identity)
        self.election = Election(
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
        self.event_reporter = EventReporter(
            self.world,
            self.judge,
            self.recorder,
            lambda: self.election.leading,
            position=self.order.position,
        )
        self.cluster = ClusterInformers(api, self.world, self.order, self.event_reporter)
        self.binder = Binder(
            api,
            self.world,
            self.queued_evaluator,
            self.gangs,
            self,
            lambda: self.cluster.pods.objects,
            clock=clock,
            sleep=sleep,
            schedulers=settings.schedulers,
        )
        self.descheduler = Descheduler(
            api, self.world, lambda: self.cluster.pods.objects, self.recorder, sleep
        )
        self.requeuer = Requeuer(api, self.order.due, lambda: self.leading, sleep)
        self.gate_controller = GateController(
            api, self.order.pods_to_ungate, lambda: self.leading, sleep
        )
        self._sleep, self._ending = sleep, False
        self._fresh_in: Term | None = None
        """The term in which everything was listed again."""
        self._refreshing: asyncio.Task[None] | None = None

    def known(self, asked: Pod) -> Pod | None:
        """Return the pod with this UID as the API server has it, None if its watch has not brought it.

        What a caller says of a pod changes nothing here: callers over plain HTTP may be anybody.
        """
        return self.cluster.pods.objects.get(asked.metadata.uid)

    @property
    def leading(self) -> bool:
        """Whether it decides: it holds the lease, and knows all that its predecessor bound."""
        return self.time_left_s > 0 and self.cluster.synced

    @property
    def ready(self) -> bool:
        """Whether kube-scheduler may be sent here: it could lead, and knows who does."""
        return self.cluster.synced and self.election.has_leader and not self._ending

    @property
    def ending(self) -> bool:
        """Whether it will be gone soon."""
        return self._ending

    @property
    def time_left_s(self) -> float:
        """Return the election's, but 0 before everything was listed again and once the replica ends."""
        return self.election.time_left_s if self._fresh and not self._ending else 0.0

    @property
    def _fresh(self) -> bool:
        return self._fresh_in is not None and self._fresh_in == self.election.term

    @property
    def leader(self) -> str:
        """Who leads."""
        return self.election.leader

    async def run(self) -> None:
        """Until cancelled; an exception is a bug, and the process is better begun anew."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cluster.run())
            group.create_task(self.recorder.run())
            group.create_task(self.gang_controller.run(lambda: self.leading))
            group.create_task(self.descheduler.run(lambda: self.leading))
            group.create_task(self._stand(group))
            group.create_task(self.requeuer.run())
            group.create_task(self.gate_controller.run())

    async def stop(self) -> None:
        """Begin nothing new, finish what runs, let another lead at once, and send late callers to it."""
        self._ending = True
        await self.binder.drain(DRAIN_S)
        if not self.binder.busy:
            await self.election.release()
        for _ in range(round(LINGER_S / LOOK_S)):
            await self._sleep(LOOK_S)
            await self.election.observe()

    async def _stand(self, group: asyncio.TaskGroup) -> None:
        """The lease first: it must be renewed however long reading takes."""
        while not self._ending:
            led, trouble = self.election.leading, self.election.last_error
            await self.election.acquire_or_renew()
            if self.election.leading != led:
                log.info("leading" if self.election.leading else "leading no more")
            if self.election.last_error not in (None, trouble):
                log.warning("the lease: %s", self.election.last_error)
            if self.election.leading and not self._fresh and self._refreshing is None:
                self._refreshing = group.create_task(self._refresh())
            await self._sleep(self.election.pause_s)

    async def _refresh(self) -> None:
        """What the former leader bound last may not have come by the watch yet."""
        term = self.election.term
        try:
            await self.cluster.relist()
            self._fresh_in = term
        finally:
            self._refreshing = None
