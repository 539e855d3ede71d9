"""Binds pods: assume in memory, send one request that binds and records, then confirm or forget.

An assumed pod counts against all other pods from that moment, without a lock. It is given up only when the
pod is certainly not bound.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fenka.cluster.compact import CompactPod
from fenka.cluster.gang_placement import GangScheduler
from fenka.cluster.node_admission import Infeasible, ineligibility_reasons
from fenka.cluster.objects import ApiStatus, Pod, pod_path
from fenka.cluster.state import ClusterState, read_allocation
from fenka.core.evaluate import Policy
from fenka.core.policies.candidates import in_effect
from fenka.core.request import Placement
from fenka.dialects import pod_records
from fenka.dialects.registry import names_any
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.informer import Backoff
from fenka.scheduler.extender_api import ExtenderBindingArgs
from fenka.scheduler.refused_pods import is_foreign, is_too_large


class GangBarrier:
    """Waits for what a `GangScheduler` decides.

    The bindings of a gang's members are held back until all of them may be sent.
    """

    def __init__(self, gangs: GangScheduler) -> None:
        self._gangs = gangs
        self._settled: dict[str, asyncio.Event] = {}
        gangs.on_settled = self._release

    async def wait_for_members(self, pod: Pod, node: str) -> bool:
        """Return whether the pod may be bound to this node, once that is decided."""
        decision = self._gangs.arrive(pod, node)
        if isinstance(decision, bool):
            return decision
        settled = self._settled.setdefault(decision.gang, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(decision.timeout_s):
                await settled.wait()
        self._gangs.expire()
        return self._gangs.may_bind(pod, node)

    def _release(self, gang: str) -> None:
        settled = self._settled.pop(gang, None)
        if settled is not None:
            settled.set()


BIND_TIMEOUT_S = 3.0
"""Of the request that binds; less if the lease ends earlier."""

ANSWER_TIMEOUT_S = 4.5
"""kube-scheduler waits 5 s for an extender, unless it is configured to wait longer."""

SETTLE_S = 1.0
"""This long after a request's deadline the API server has certainly stopped working on it."""

NOT_FOUND, CONFLICT = 404, 409

OUTCOMES = "bound", "refused", "failed", "unknown"
"""Of a binding. The last one is found out by reading the pod."""


class WritePermission(Protocol):
    """Whether this replica may write."""

    @property
    def time_left_s(self) -> float:
        """Return within how many seconds a write must have ended; 0 or less if none may begin."""

    @property
    def leader(self) -> str:
        """Return the identity of the replica that may write; empty if there is none."""


@dataclass(frozen=True, slots=True)
class _BindAttempt:
    """A binding that was sent.

    Attributes:
        settled_at: the server has given the request up by then.
        refused: the message of the program that may have refused it; empty without one.
    """

    pod: Pod
    node: str
    settled_at: float
    refused: str = ""


class Binder:
    """Binds pods independently of each other."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        api: Api,
        cluster: ClusterState,
        placements: Callable[[Pod, str], tuple[Placement, ...] | Infeasible],
        gangs: GangScheduler,
        barrier: GangBarrier,
        permission: WritePermission,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        schedulers: Collection[str] = (),
        policy: Policy = "binpack",
    ) -> None:
        """Args:
        api: the API server.
        cluster: where assumptions are kept.
        placements: returns where a pod goes on a node.
        gangs: hears which of its members are bound.
        barrier: holds the bindings of members back.
        permission: whether this replica may write.
        pods: returns all pods, by UID.
        clock: seconds, monotonic.
        now_ns: nanoseconds since 1970, for the record.
        sleep: waits for a number of seconds.
        schedulers: values of `schedulerName` whose pods are bound; empty for all.
        policy: by which cards are chosen.
        """
        self._api, self._cluster, self._placements = api, cluster, placements
        self._gangs, self._barrier, self._policy = gangs, barrier, policy
        self._permission, self._pods, self._schedulers = permission, pods, schedulers
        self._clock, self._now_ns, self._sleep = clock, now_ns, sleep
        self._running: dict[tuple[str, str, str], asyncio.Task[str]] = {}
        self.outcomes = Counter[str]()
        """The number of bindings by outcome."""
        self.on_bound: Callable[[Pod], object] = lambda _: None
        """Called with each pod that is certainly bound."""
        self.on_refused: Callable[[Pod, str], object] = lambda *_: None
        """Called with each pod whose binding another program refuses, and its message."""

    async def bind(self, args: ExtenderBindingArgs) -> str:
        """Bind a pod to a node, and return the error; empty if it is bound.

        A binding that is requested again while it runs is not sent again. Cancelling does not end it.
        """
        key = args.namespace, args.name, args.uid
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._bind(args))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        done, _ = await asyncio.wait((task,), timeout=ANSWER_TIMEOUT_S)
        if done:
            return task.result()
        pod = self._pods().get(args.uid)
        # The task goes on: a gang is bound once its last member is here.
        waiting = self._gangs.waiting_status(pod) if pod else None
        return waiting or f"whether the pod {args.name} was bound to {args.node} is not known yet"

    @property
    def busy(self) -> bool:
        """Return whether a binding runs."""
        return bool(self._running)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the bindings that run."""
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout_s)

    async def _bind(self, args: ExtenderBindingArgs) -> str:
        try:
            # A pod that the informer has not brought may be in a gang too.
            known = self._pods().get(args.uid) or await self._read(args)
            # A binding that will be refused must not count as a member that has arrived.
            allowed = self._obstacle(known, args) is None
            if allowed and not await self._barrier.wait_for_members(known, args.node):
                self.outcomes["refused"] += 1
                return f"the gang of the pod {args.name} was not complete in time"
            outcome = await self._send(self._pods().get(args.uid) or known, args)
            if isinstance(outcome, _BindAttempt):
                self.outcomes["unknown"] += 1
                outcome = await self._resolve_unknown(outcome)
                if not outcome:
                    self.on_bound(known)
                return outcome
        except (ApiError, ApiUnreachable) as why:
            # Nothing was assumed: the pod could not even be read.
            self.outcomes["failed"] += 1
            return str(why)
        self.outcomes["refused" if outcome else "bound"] += 1
        if not outcome:
            self.on_bound(known)
        return outcome

    async def _send(self, pod: Pod, args: ExtenderBindingArgs) -> str | _BindAttempt:
        """Return the error, empty if the pod is bound; or the attempt, if its outcome is not known."""
        # There is no await from here to `assume`, so that no other binding comes in between.
        obstacle = self._obstacle(pod, args)
        if obstacle is not None:
            return obstacle
        placements = self._placements(pod, args.node)
        if isinstance(placements, Infeasible):
            return f"The node {args.node} can't place {_named(pod)}: {placements.sentence}"
        timeout_s = min(BIND_TIMEOUT_S, self._permission.time_left_s)
        body = self._body(pod, args.node, placements)
        if placements:
            self._cluster.assume(pod, placements)
            self._gangs.start(pod)
        attempt = _BindAttempt(pod, args.node, self._clock() + timeout_s + SETTLE_S)
        try:
            await self._api.create(f"{pod.path}/binding", ApiStatus, body, within_s=timeout_s)
        except ApiUnreachable:
            return attempt
        except ApiError as why:
            if (why.status >= 500 or why.status in (0, CONFLICT)) and not is_too_large(why):
                # It may be done nevertheless; a conflict may be with our own earlier attempt. The API server
                # also calls a conflict whatever else keeps it from storing a binding.
                refused = is_foreign(why) or why.status == CONFLICT
                return replace(attempt, refused=str(why)) if refused else attempt
            self._cluster.forget_assumed(pod.metadata.uid)
            if is_foreign(why):
                self.on_refused(pod, str(why))
            return str(why)
        return ""

    def _obstacle(self, pod: Pod, args: ExtenderBindingArgs) -> str | None:
        """Return why the pod is not to be bound: empty if it is bound already, None if it may be bound."""
        meta = pod.metadata
        obstacle: str | None = None
        if self._permission.time_left_s <= 0:
            obstacle = f"not the leader: that is {self._permission.leader or 'nobody yet'}"
        elif meta.uid != args.uid:
            obstacle = _another(pod, args.uid)
        elif (meta.namespace, meta.name) != (args.namespace, args.name):
            obstacle = f"the UID {args.uid} is that of the pod {pod.full_name}"
        elif pod.finished or meta.deletion_timestamp is not None:
            obstacle = f"{_named(pod)} is ending"
        elif pod.spec.node_name:
            obstacle = self._already_bound(pod, args.node)
        elif self._cluster.is_assumed(meta.uid):
            obstacle = f"whether the pod {meta.name} was bound before is not known yet"
        else:
            obstacle = self._forbidden(pod, args.node)
        return obstacle

    def _forbidden(self, pod: Pod, name: str) -> str | None:
        """Return why kube-scheduler cannot have chosen this node for this pod; None if it can have.

        Binding uses fenka's own rights: a request must not achieve more than kube-scheduler would do.
        """
        which, served = _named(pod), self._schedulers
        if not names_any(container.resources for container in pod.request.containers):
            return (
                f"{which} requests no resource of fenka, so fenka does not bind it: list only resources of "
                "docs/do/request.md in managedResources of kube-scheduler's configuration"
            )
        if served and pod.spec.scheduler_name not in served:
            return (
                f"{which} is for the scheduler {pod.spec.scheduler_name!r}, and fenka binds pods of "
                f"{', '.join(served)}: add it to scheduler.bindsFor of fenka's chart"
            )
        node = self._cluster.node(name)
        if node is None:
            return f'node "{name}" not found'
        reasons = ineligibility_reasons(pod, node)
        return f"{which} may not go to the node {name}: {'; '.join(reasons)}" if reasons else None

    async def _read(self, args: ExtenderBindingArgs) -> Pod:
        return await self._api.get(pod_path(args.namespace, args.name), CompactPod)

    def _body(self, pod: Pod, node: str, placements: tuple[Placement, ...]) -> dict[str, Any]:
        annotations = {}
        if placements:
            shared, demand = self._cluster.shared_node(node), pod.demand(self._cluster.dialects)
            assert shared is not None
            assert demand.dialect is not None
            annotations = pod_records.encode(
                demand.dialect, pod.request, shared, placements, self._now_ns()
            )
            annotations[pod_records.CHOSEN_BY] = shared.node.card_policy or str(
                in_effect(self._policy)
            )
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

    async def _resolve_unknown(self, attempt: _BindAttempt) -> str:
        """Read the pod until the outcome is certain. The assumption holds meanwhile."""
        backoff, meta = Backoff(), attempt.pod.metadata
        while True:
            last = self._clock() >= attempt.settled_at
            try:
                pod = await self._api.get(attempt.pod.path, Pod)
            except ApiError as why:
                if why.status == NOT_FOUND:
                    self._cluster.forget_assumed(meta.uid)
                    return f'pods "{meta.name}" not found'
            except ApiUnreachable:
                pass
            else:
                if pod.metadata.uid != meta.uid:
                    self._cluster.forget_assumed(meta.uid)
                    return _another(pod, meta.uid)
                if pod.spec.node_name:
                    if pod.spec.node_name != attempt.node:
                        self._cluster.forget_assumed(meta.uid)
                    # On this node the assumption is what the informer will bring, or has brought.
                    return self._already_bound(pod, attempt.node)
                if pod.metadata.deletion_timestamp is not None or last:
                    self._cluster.forget_assumed(meta.uid)
                    if attempt.refused:
                        self.on_refused(attempt.pod, attempt.refused)
                    return f"the pod {meta.name} was not bound to {attempt.node}"
            await self._sleep(backoff.next_s())

    def _already_bound(self, pod: Pod, node: str) -> str:
        """Return an error unless the pod was bound to this node, with a record."""
        name, bound_to = pod.metadata.name, pod.spec.node_name
        if bound_to != node:
            return f"the pod {name} is already bound to {bound_to}"
        shared = self._cluster.shared_node(node)
        allocation = read_allocation(shared, pod, self._cluster.dialects) if shared else None
        if allocation is None or allocation.error is None:
            return ""
        return f"another program has bound the pod {name} to {node}, without a card"


def _named(pod: Pod) -> str:
    return f"the pod {pod.metadata.name} in ns {pod.metadata.namespace}"


def _another(pod: Pod, expected: str) -> str:
    """Return gpushare's sentence for a pod with another UID."""
    meta = pod.metadata
    return (
        f"The pod {meta.name} in ns {meta.namespace}'s uid is {meta.uid}, "
        f"and it's not equal with expected {expected}"
    )
