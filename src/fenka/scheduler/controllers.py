"""Background controllers of a replica: they change pods, and tell the cluster's state. `run` is the task of
each class.

`PodPatcher` has kube-scheduler try pods: it removes fenka's scheduling gate, or changes a label.

When a card becomes free, kube-scheduler tries all pending pods one after another, and each rejected pod
backs off. With hundreds of pending pods the first one waits for seconds. Therefore the chart's admission
policy adds a scheduling gate to pods that request cards. kube-scheduler does not try gated pods. The leader
removes the gate when the pod is to be scheduled. Pods without the gate are served in the same order.

kube-scheduler retries a rejected pod when a pod ends or a node changes, or after five minutes. The end of a
reservation is neither, nor is a new member of its gang; a pod whose label changes is retried.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fenka.cluster.gang_placement import GangScheduler
from fenka.cluster.growth import GrownPod, GrowthReclaim
from fenka.cluster.mappings import RecentDict
from fenka.cluster.node_pins import Pin
from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import is_open
from fenka.cluster.queue_snapshot import POSITION
from fenka.cluster.state import ClusterState
from fenka.dialects.base import readable_quantity
from fenka.dialects.lease_records import Refusal
from fenka.dialects.registry import resource_names
from fenka.dialects.resize_records import REQUEST
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.eviction import evict
from fenka.scheduler.event_reporter import Recorder

log = logging.getLogger(__name__)

REQUEUED_LABEL = "fenka.io/requeued-at"
"""On a pod: when fenka last had kube-scheduler retry it, in seconds since 1970."""

UNGATE_INTERVAL_S = 0.1
REQUEUE_INTERVAL_S = 0.25
REQUEUE_GANGS_INTERVAL_S = 2.0
"""Pods of a gang come in groups, so its members are not tried again at each of them."""

POSITION_INTERVAL_S, POSITION_RETRY_AFTER_S = 2.0, 30.0
"""Positions change often. A pod's is published at most once in this time, so that all have their turn."""

MAX_PODS = 20
"""Pods at a time. Each is one request; they are sent together."""

RETRY_AFTER_S = 5.0
"""Pause before a failed or unanswered request to remove the same gate is repeated."""

Body = Mapping[str, Any]


def ungate_body(_: Pod) -> Body:
    """Return the patch that removes the scheduling gates.

    Nobody can add a gate to an existing pod, and fenka's is the last one on it. So removing all is exact.
    """
    return {"spec": {"schedulingGates": None}}


def requeue_body(_: Pod) -> Body:
    """Return the patch that has kube-scheduler retry a pod."""
    return {"metadata": {"labels": {REQUEUED_LABEL: str(int(time.time()))}}}


def position_body(position: int | None) -> Body:
    """Return the patch that publishes a pod's position in the queue, or removes it."""
    text = None if position is None else str(position)
    return {"metadata": {"annotations": {POSITION: text}}}


class PodPatcher:
    """Patches pods as they become due, while this replica leads. `run` is its task."""

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        body: Callable[[Pod], Body],
        due: Callable[[int], Sequence[Pod]],
        is_leading: Callable[[], bool],
        interval_s: float,
        *,
        retry_after_s: float = RETRY_AFTER_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        api: the API server.
        body: returns the patch for a pod.
        due: returns about this number of pods that are to be patched now, in order.
        is_leading: whether this replica may write.
        interval_s: pause between two looks.
        retry_after_s: pause between two patches of the same pod.
        sleep: waits for a number of seconds.
        clock: seconds, monotonic.
        """
        self._api, self._body, self._due, self._is_leading = api, body, due, is_leading
        self._interval_s, self._retry_after_s = interval_s, retry_after_s
        self._sleep, self._clock = sleep, clock
        self._patched_at: dict[str, float] = {}
        self._last_error = ""
        self.on_refused: Callable[[Pod, ApiError], object] = lambda *_: None
        """Called with each pod whose patch the API server refuses, and the error."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(self._interval_s)
            if self._is_leading():
                oldest = self._clock() - self._retry_after_s
                self._patched_at = {uid: at for uid, at in self._patched_at.items() if at > oldest}
                pods = self._due(MAX_PODS + len(self._patched_at))
                due = [pod for pod in pods if pod.metadata.uid not in self._patched_at]
                await asyncio.gather(*map(self.patch, due))

    def patch_soon(self, pods: Sequence[Pod]) -> None:
        """Patch these pods in the background, whether or not they are due."""
        for pod in pods:
            task = asyncio.create_task(self.patch(pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def patch(self, pod: Pod) -> None:
        """Patch one pod. An error is logged, once while it stays the same."""
        self._patched_at[pod.metadata.uid] = self._clock()
        body = self._body(pod)
        metadata = {**body.get("metadata", {}), "uid": pod.metadata.uid}
        try:
            await self._api.patch(pod.path, Pod, {**body, "metadata": metadata})
        except (ApiError, ApiUnreachable) as why:
            if isinstance(why, ApiError):
                self.on_refused(pod, why)
            if str(why) != self._last_error:
                self._last_error = str(why)
                log.warning(
                    "cannot patch %s, so kube-scheduler may not try it: %s", pod.full_name, why
                )


INTERVAL_S = 5.0
EVICTED, LEASE_DENIED = "FenkaEvicted", "FenkaLeaseDenied"


class Descheduler:
    """Evicts pods that their node refuses to start, and members of gangs that are incomplete for too long.

    The card that was chosen for a pod that is refused for a minute is used by something that the scheduler
    did not know of. After the eviction the pod's controller makes another pod, which is placed by what the
    node reports now. An incomplete gang restarts completely. Best effort: what fails is tried again.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        cluster: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        gangs: GangScheduler,
        recorder: Recorder,
        is_leading: Callable[[], bool],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        api: the API server.
        cluster: what nodes report.
        pods: returns all pods, by UID.
        gangs: the gangs that are starting.
        recorder: posts the events.
        is_leading: whether this replica leads.
        sleep: waits for a number of seconds.
        """
        self._api, self._cluster, self._pods, self._gangs = api, cluster, pods, gangs
        self._recorder, self._is_leading, self._sleep = recorder, is_leading, sleep
        self._posted: RecentDict[str, None] = RecentDict()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            self._gangs.expire()
            if self._is_leading():
                await self.evict_refused()
                for pod in self._gangs.incomplete_gangs():
                    await self._evict(pod, "its gang has been incomplete for too long")

    async def evict_refused(self) -> None:
        """Evict the pods that are refused now."""
        pods = self._pods()
        for node in self._cluster.nodes():
            name = node.metadata.name
            for uid, refusal in self._cluster.refusals(name).items():
                pod = pods.get(uid)
                if pod is not None and pod.spec.node_name == name and _runs_nothing(pod):
                    await self._evict_refused(pod, refusal)

    async def _evict_refused(self, pod: Pod, refusal: Refusal) -> None:
        meta = pod.metadata
        evictable = refusal.movable and _has_controller(pod)
        if meta.uid not in self._posted:
            self._posted[meta.uid] = None
            refused = f"fenka: its node has refused it for a minute: {refusal.sentence}"
            if evictable:
                note = f"{refused}; it is evicted, and its controller makes another"
                self._recorder.record_on_pod(pod, EVICTED, note)
            elif refusal.movable:
                note = f"{refused}; no controller would make another: delete it and create it again"
                self._recorder.record_on_pod(pod, LEASE_DENIED, note)
        if evictable:
            await self._evict(pod, refusal.sentence)

    async def _evict(self, pod: Pod, why: str) -> None:
        log.warning("evicting %s: %s", pod.full_name, why)
        with contextlib.suppress(ApiError, ApiUnreachable):
            await evict(self._api, pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)


def _runs_nothing(pod: Pod) -> bool:
    """Return whether no container of the pod runs: nothing is lost with it."""
    return pod.status.phase == "Pending" and pod.metadata.deletion_timestamp is None


def _has_controller(pod: Pod) -> bool:
    return any(owner.controller and owner.kind != "Node" for owner in pod.metadata.owner_references)


PIN_INTERVAL_S = 0.25


class PinTimer:
    """Ends the pins of nodes that were bought: in time, or when none of their pods waits any more.

    Every replica measures the time itself, from when it first saw the cards, so a change of leaders does not
    renew it. A replica that starts later does not know that time, but the autoscaler removes old pins.
    """

    def __init__(
        self,
        cluster: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        cluster: the nodes.
        pods: returns all pods, by UID.
        clock: seconds, monotonic.
        sleep: waits for a number of seconds.
        """
        self._cluster, self._pods = cluster, pods
        self._clock, self._sleep = clock, sleep
        self._offered_at: dict[tuple[str, str], float] = {}
        """When the cards of a pinned node were first seen, by node and order."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(PIN_INTERVAL_S)
            self.end_due()

    def end_due(self) -> None:
        """End the pins that are due."""
        now, pins = self._clock(), dict(self._cluster.pins)
        current = {(name, pin.order) for name, pin in pins.items()}
        self._offered_at = {key: at for key, at in self._offered_at.items() if key in current}
        for name, pin in pins.items():
            if self._offers_cards(name):
                self._offered_at.setdefault((name, pin.order), now)
            offered_at = self._offered_at.get((name, pin.order))
            if offered_at is not None and (
                now - offered_at >= pin.seconds or not self._is_awaited(pin)
            ):
                self._cluster.end_pin(name)

    def _offers_cards(self, name: str) -> bool:
        """Return whether the node offers cards, whole or in slices."""
        node, placed = self._cluster.node(name), resource_names(self._cluster.dialects)
        return node is not None and any(
            resource in placed and readable_quantity(node.status.allocatable, resource) > 0
            for resource in node.status.allocatable
        )

    def _is_awaited(self, pin: Pin) -> bool:
        """Return whether a planned pod still has no node."""
        pods = self._pods()
        return any(uid in pods and is_open(pods[uid]) for uid in pin.pods)


SPOT_INTERVAL_S = 1.0


class SpotTimer:
    """Tells the cluster's state the time, by which the protection of spot nodes ends."""

    def __init__(
        self,
        cluster: ClusterState,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        cluster: the nodes.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        self._cluster, self._now, self._sleep = cluster, now, sleep

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._cluster.set_time(self._now())
            await self._sleep(SPOT_INTERVAL_S)


TAKEN_BACK = "FenkaGrowthTakenBack"


class GrowthReclaimer:
    """Requests that running pods which have grown shrink to their first size, for a pod that waits.

    It writes the annotation by which users resize a pod. The node program shrinks the pod once its programs
    hold no more than that. Best effort: what fails is tried again.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        reclaim: GrowthReclaim,
        pods: Callable[[], Mapping[str, Pod]],
        recorder: Recorder,
        is_leading: Callable[[], bool],
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        api: the API server.
        reclaim: chooses the pods.
        pods: returns all pods, by UID.
        recorder: posts the events.
        is_leading: whether this replica leads.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        self._api, self._reclaim, self._pods, self._recorder = api, reclaim, pods, recorder
        self._is_leading, self._now, self._sleep = is_leading, now, sleep

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            if self._is_leading():
                await self.reclaim()

    async def reclaim(self) -> None:
        """Request what is due now, and was not requested before."""
        waiting, grown = self._reclaim.due(self._pods(), self._now())
        for change in grown:
            shown = change.pod.metadata.annotations.get(REQUEST)
            if waiting is not None and shown != change.request:
                await self._request(change, waiting)

    async def _request(self, grown: GrownPod, waiting: Pod) -> None:
        pod = grown.pod
        metadata = {"uid": pod.metadata.uid, "annotations": {REQUEST: grown.request}}
        try:
            await self._api.patch(pod.path, Pod, {"metadata": metadata})
        except (ApiError, ApiUnreachable) as why:
            log.warning("the growth of %s is taken back later: %s", pod.full_name, why)
            return
        note = (
            f"fenka: what it has grown by is taken back ({REQUEST}: {grown.request}), because pod "
            f"{waiting.full_name} waits and would fit then; memory that its programs use is not taken"
        )
        self._recorder.record_on_pod(pod, TAKEN_BACK, note)
