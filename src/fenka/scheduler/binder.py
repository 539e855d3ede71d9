"""Binding: assumed in memory first, then one request that binds and records at once, then known for certain.

The order is the safety: what is assumed is held against everybody else from that moment, without a lock and
without waiting; it is given up only when the pod is certainly not bound.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fenka.cluster.eligibility import ineligibility_reasons
from fenka.cluster.objects import Pod, Status, pod_path
from fenka.cluster.pod_placement import Infeasible
from fenka.cluster.state import ClusterState, read_allocation
from fenka.core.request import Placement
from fenka.dialects.registry import names_any
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.informer import Backoff
from fenka.scheduler.extender_api import ExtenderBindingArgs
from fenka.scheduler.gang_scheduler import GangScheduler
from fenka.scheduler.queue_controller import QueuedEvaluator

BIND_WITHIN_S = 3.0
"""For the one request; less where the lease ends earlier."""

ANSWER_WITHIN_S = 4.5
"""kube-scheduler waits 5 s for an extender, unless it is told to wait longer."""

SETTLED_S = 1.0
"""So long after its deadline the API server has certainly stopped trying."""

CONFLICT, TOO_MANY = 409, 429


class Leadership(Protocol):
    """Whether this replica may write."""

    @property
    def time_left_s(self) -> float:
        """Within so many seconds a write must have ended; 0 or less: it must not begin."""

    @property
    def leader(self) -> str:
        """Who may, if not this one."""


@dataclass(frozen=True, slots=True)
class _BindAttempt:
    """A binding that was sent, and when the server gives up on it at the latest."""

    pod: Pod
    placements: tuple[Placement, ...]
    node: str
    over_at: float


class Binder:
    """Binds pods, each at its own pace. pods: those that the watch knows, by UID."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        world: ClusterState,
        judge: QueuedEvaluator,
        gangs: GangScheduler,
        leadership: Leadership,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        schedulers: Collection[str] = (),
    ) -> None:
        self._api, self._world, self._evaluate_node, self._gangs = api, world, judge, gangs
        self.schedulers = schedulers
        """Values of `schedulerName` whose pods are bound; empty: all."""
        self._leadership, self._pods = leadership, pods
        self._clock, self._now_ns, self._sleep = clock, now_ns, sleep
        self._running: dict[tuple[str, str, str], asyncio.Task[str]] = {}
        self.outcomes: dict[str, int] = {}
        """How often binding ended how: bound, refused, failed, unknown."""

    async def bind(self, wanted: ExtenderBindingArgs) -> str:
        """Empty if the pod is bound to that node, else why not.

        The same binding asked for again while it runs is the same binding. Cancelling does not end it.
        """
        key = wanted.namespace, wanted.name, wanted.uid
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._bind(wanted))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        done, _ = await asyncio.wait((task,), timeout=ANSWER_WITHIN_S)
        if done:
            return task.result()
        pod = self._pods().get(wanted.uid)
        # It goes on all the same: once the last one is here, all of the gang are bound.
        waiting_status = self._gangs.waiting_status(pod) if pod else None
        return (
            waiting_status
            or f"whether the pod {wanted.name} was bound to {wanted.node} is not known yet"
        )

    @property
    def busy(self) -> bool:
        """Whether a binding runs."""
        return bool(self._running)

    async def drain(self, within_s: float) -> None:
        """Wait for bindings that run, but not for ever."""
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=within_s)

    async def _bind(self, wanted: ExtenderBindingArgs) -> str:
        try:
            # One that the watch has not brought may be of a gang too.
            known = self._pods().get(wanted.uid) or await self._read(wanted)
            # A binding that will be refused must not count as a member that has arrived.
            fits = self._unfit(known, wanted) is None
            if fits and not await self._gangs.wait_for_members(known, wanted.node):
                self._count("refused")
                return f"the gang of the pod {wanted.name} did not come together in time"
            sent = await self._send(self._pods().get(wanted.uid) or known, wanted)
            if isinstance(sent, _BindAttempt):
                self._count("unknown")
                return await self._resolve_unknown(sent)
        except (ApiError, ApiUnreachable) as why:
            # Before anything was assumed: the pod could not even be read.
            self._count("failed")
            return str(why)
        self._count("refused" if sent else "bound")
        return sent

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    async def _send(self, pod: Pod, wanted: ExtenderBindingArgs) -> str | _BindAttempt:
        """Why not, empty if it is bound; or what was sent and is not known."""
        # From here to `assume` nothing waits: no other binding can come in between.
        trouble = self._unfit(pod, wanted)
        if trouble is not None:
            return trouble
        planned = self._gangs.planned_placement(pod, wanted.node)
        placements = (planned,) if planned else self._evaluate_node.placements(pod, wanted.node)
        if isinstance(placements, Infeasible):
            which = f"the pod {wanted.name} in ns {wanted.namespace}"
            return f"The node {wanted.node} can't place {which}: {placements.sentence}"
        within_s = min(BIND_WITHIN_S, self._leadership.time_left_s)
        body = self._body(pod, wanted.node, placements)
        if placements:
            self._world.assume(pod, placements)
            self._gangs.start(pod)
        sent = _BindAttempt(pod, placements, wanted.node, self._clock() + within_s + SETTLED_S)
        try:
            await self._api.create(f"{pod.path}/binding", Status, body, within_s=within_s)
        except ApiUnreachable:
            return sent
        except ApiError as why:
            if why.status >= 500 or why.status in (0, CONFLICT):
                # It may be done all the same; a conflict may be with our own earlier attempt.
                return sent
            self._world.forget_assumed(pod.metadata.uid)
            return str(why)
        return ""

    def _unfit(self, pod: Pod, wanted: ExtenderBindingArgs) -> str | None:
        """Why this pod is not to be bound now; empty if that is done already."""
        meta = pod.metadata
        trouble: str | None = None
        if self._leadership.time_left_s <= 0:
            trouble = f"not the leader: that is {self._leadership.leader or 'nobody yet'}"
        elif meta.uid != wanted.uid:
            trouble = _another(pod, wanted.uid)
        elif (meta.namespace, meta.name) != (wanted.namespace, wanted.name):
            trouble = f"the UID {wanted.uid} is that of the pod {pod.full_name}"
        elif pod.finished or meta.deletion_timestamp is not None:
            trouble = f"the pod {meta.name} in ns {meta.namespace} is ending"
        elif pod.spec.node_name:
            trouble = self._already(pod, wanted.node)
        elif self._world.is_assumed(meta.uid):
            trouble = f"whether the pod {meta.name} was bound before is not known yet"
        else:
            trouble = self._forbidden(pod, wanted.node)
        return trouble

    def _forbidden(self, pod: Pod, name: str) -> str | None:
        """Return why kube-scheduler cannot have chosen this node for this pod; None if it can have.

        Binding uses fenka's own rights: a request must not achieve more than kube-scheduler would do.
        """
        which, by = f"the pod {pod.metadata.name} in ns {pod.metadata.namespace}", self.schedulers
        if not names_any(pod.request):
            return (
                f"{which} names no resource of fenka's, so fenka does not bind it: list only resources of "
                "docs/names.md in managedResources of kube-scheduler's configuration"
            )
        if by and pod.spec.scheduler_name not in by:
            return (
                f"{which} is for the scheduler {pod.spec.scheduler_name!r}, and fenka binds pods of "
                f"{', '.join(by)}: add it to scheduler.bindsFor of fenka's chart"
            )
        node = self._world.node(name)
        if node is None:
            return f'node "{name}" not found'
        reasons = ineligibility_reasons(pod, node)
        return f"{which} may not go to the node {name}: {'; '.join(reasons)}" if reasons else None

    async def _read(self, wanted: ExtenderBindingArgs) -> Pod:
        return await self._api.get(pod_path(wanted.namespace, wanted.name), Pod)

    def _body(self, pod: Pod, node: str, placements: tuple[Placement, ...]) -> dict[str, Any]:
        annotations = {}
        if placements:
            share, dialect = self._world.shared_node(node), pod.demand(self._world.dialects).dialect
            assert share is not None
            assert dialect is not None
            annotations = dialect.encode(pod.request, share, placements, self._now_ns())
        meta = pod.metadata
        return {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "annotations": annotations,
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }

    async def _resolve_unknown(self, sent: _BindAttempt) -> str:
        """Ask until the answer is certain; the assumption holds meanwhile."""
        backoff, meta = Backoff(), sent.pod.metadata
        while True:
            last = self._clock() >= sent.over_at
            try:
                pod = await self._api.get(sent.pod.path, Pod)
            except ApiError as why:
                if why.status == 404:
                    self._world.forget_assumed(meta.uid)
                    return f'pods "{meta.name}" not found'
            except ApiUnreachable:
                pass
            else:
                if pod.metadata.uid != meta.uid:
                    self._world.forget_assumed(meta.uid)
                    return _another(pod, meta.uid)
                if pod.spec.node_name:
                    if pod.spec.node_name != sent.node:
                        self._world.forget_assumed(meta.uid)
                    # On this node the assumption is what the watch will bring, or has brought.
                    return self._already(pod, sent.node)
                if pod.metadata.deletion_timestamp is not None or last:
                    self._world.forget_assumed(meta.uid)
                    return f"the pod {meta.name} was not bound to {sent.node}"
            await self._sleep(backoff.next_s())

    def _already(self, pod: Pod, node: str) -> str:
        """Bound before: that is success if it is what was wanted and recorded."""
        name, where = pod.metadata.name, pod.spec.node_name
        if where != node:
            return f"the pod {name} is already bound to {where}"
        share = self._world.shared_node(where)
        holding = read_allocation(share, pod, self._world.dialects) if share else None
        if holding is None or holding.error is None:
            return ""
        return f"the pod {name} was bound to {where} by somebody else, without a card"


def _another(pod: Pod, expected: str) -> str:
    """gpushare's words."""
    meta = pod.metadata
    return (
        f"The pod {meta.name} in ns {meta.namespace}'s uid is {meta.uid}, "
        f"and it's not equal with expected {expected}"
    )
