"""Feeds pods to the state of the queue, and schedules the queue when an answer depends on it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

from fenka.cluster.objects import Pod
from fenka.cluster.placement import QueueConstraints
from fenka.cluster.queue_state import HEAD, QueueState
from fenka.cluster.refusals import RefusedEntry
from fenka.core.backfill import complete
from fenka.core.request import Placement

MIN_INTERVAL_S = 0.25
"""The queue is not scheduled more often, except when a pod becomes pending and before one is rejected."""

REQUEST_INTERVAL_S = 1.0
"""This long after scheduling was begun, a request schedules the queue. `run` does so earlier."""

TICK_S = 0.05
"""How often `run` looks whether the queue is to be scheduled."""

SLICE_S = 0.002
"""After this time `run` lets requests be answered."""

PAUSE_S, MAX_PAUSE_S = 0.002, 0.006
"""For so long, and longer while a request is being answered: that takes several turns of the event loop."""

COST_FACTOR = 4
"""After scheduling, the queue rests for this multiple of the time that scheduling took."""

AT_ONCE_S = 0.05
"""A queue that took longer the last time is not scheduled at once, but in steps that a request awaits."""

AWAITED_S = 1.0
"""A request awaits these steps for so long at most. Then the last snapshot is used."""


class QueueController:
    """The queue on the wall clock. Its events come after those of the cluster's state.

    Attributes:
        state: the queue as it was scheduled last.
        now: returns the seconds since 1970.
    """

    def __init__(
        self,
        state: QueueState,
        gang_placements: Callable[[], Mapping[str, tuple[Placement, ...]]] = dict,
        *,
        now: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        state: the queue.
        gang_placements: returns what is reserved for gangs that are starting, by gang.
        now: seconds since 1970.
        stopwatch: measures what scheduling costs.
        sleep: waits for a number of seconds.
        """
        self.state, self._gang_placements = state, gang_placements
        self.now, self._stopwatch, self._sleep = now, stopwatch, sleep
        self._begun_at = self._scheduled_at = -inf
        """When scheduling was begun last, and as of when the queue is scheduled."""
        self._cost = 0.0
        self._passes = 0
        """The number of times that scheduling has begun. Only the last one may go on."""
        self._urgent = False
        """Whether the background is scheduling the queue because that was urgent: a request cannot wait."""
        self._freed = False
        """Whether a pod has left its cards since scheduling was begun: what is reserved may be there now."""
        self._answering = 0
        """The number of requests that are being answered."""
        self._refreshing = asyncio.Lock()
        self._preparing: asyncio.Task[None] | None = None
        """The pass that requests await."""

    # ---- events ----

    def replace_pods(self, pods: Sequence[Pod]) -> None:
        """Record that these are all pods of the cluster."""
        self.state.replace_pods(pods, self.now())
        self._freed = True

    def set_pod(self, pod: Pod) -> None:
        """Record a new or changed pod."""
        self.state.set_pod(pod, self.now())
        self._freed |= pod.finished

    def forget_pod(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self.state.forget_pod(uid, self.now())
        self._freed = True

    def ask(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Record that kube-scheduler asks about the pod on these nodes."""
        self.state.ask(pod, nodes)

    def reject(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Record that none of these nodes fits the pod."""
        self.state.reject(pod, nodes, self.now())

    def refuse(self, pod: Pod, what: str, why: str) -> RefusedEntry:
        """Record that another program refuses a request for the pod, such as `its binding`."""
        return self.state.refuse(pod, what, why, self.now())

    # ---- queries ----

    def pause(self, pod: Pod) -> RefusedEntry | None:
        """Return the refusal because of which the pod neither reserves nor preempts now; None without one."""
        return self.state.pause(pod, self.now())

    def constraints(self, pod: Pod, *, final: bool = False) -> QueueConstraints:
        """Return what is reserved for entries before this pod.

        final: it will be rejected otherwise. Then, and if cards have become free, the queue is scheduled
        again unless it rests: a later pod would take a card that an earlier one has waited for.
        """
        if self.state.is_empty:
            return HEAD
        state = self.refreshed(0.0 if final or self._freed else REQUEST_INTERVAL_S)
        return state.constraints(pod, self.now())

    def position(self, pod: Pod) -> str:
        """Return the pod's position as the end of a sentence, empty for a pod that no node could hold.

        It is that of the last snapshot: a sentence is no reason to schedule the queue.
        """
        return self.state.position(pod, self.now())

    @property
    def is_settled(self) -> bool:
        """Return whether all entries that may reserve cards are in the snapshot."""
        settled = not self.state.urgent and self._begun_at == self._scheduled_at
        return settled or self.state.is_empty

    def refreshed(self, min_interval_s: float = REQUEST_INTERVAL_S) -> QueueState:
        """Return the queue, scheduled again at once if anything has changed and that is due."""
        now, gangs = self.now(), self._gang_placements()
        if self._cost <= AT_ONCE_S and self._is_due(gangs, now, min_interval_s):
            begun = self._stopwatch()
            self._begun_at, self._freed = now, False
            self._passes += 1
            complete(self.state.schedule(gangs, now))
            self._scheduled_at, self._cost = now, self._stopwatch() - begun
            self._urgent = False
        return self.state

    # ---- in the background ----

    async def run(self) -> None:
        """Schedule the queue when that is due, until cancelled."""
        while True:
            await self._sleep(TICK_S)
            await self.refresh()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer a request. Meanwhile the background makes longer pauses."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    async def prepare(self) -> None:
        """Await the steps of a long queue that has to be scheduled before the next answer."""
        if self._cost <= AT_ONCE_S or self.state.is_empty:
            return
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self.refresh(0.0))
        # A pass that takes longer goes on: several requests await it.
        done, _ = await asyncio.wait({self._preparing}, timeout=AWAITED_S)
        for task in done:
            task.result()

    async def refresh(self, min_interval_s: float = MIN_INTERVAL_S) -> None:
        """Schedule the queue in steps if that is due. Requests are answered in between.

        It stops if one of them has had to schedule the queue at once.
        """
        async with self._refreshing:
            await self._refresh(min_interval_s)

    async def _refresh(self, min_interval_s: float) -> None:
        now, gangs = self.now(), self._gang_placements()
        if not self._is_due(gangs, now, min_interval_s):
            return
        self._begun_at, self._urgent, self._freed = now, self.state.urgent, False
        self._passes += 1
        number, cost, begun = self._passes, 0.0, self._stopwatch()
        for _ in self.state.schedule(gangs, now):
            spent = self._stopwatch() - begun
            if spent >= SLICE_S:
                await self._pause()
                if number != self._passes:
                    return
                cost, begun = cost + spent, self._stopwatch()
        self._scheduled_at, self._cost = now, cost + self._stopwatch() - begun
        self._urgent = False

    async def _pause(self) -> None:
        paused_s = 0.0
        while not paused_s or (self._answering and paused_s < MAX_PAUSE_S):
            await self._sleep(PAUSE_S)
            paused_s += PAUSE_S

    def _is_due(
        self, gangs: Mapping[str, tuple[Placement, ...]], now: float, min_interval_s: float
    ) -> bool:
        state = self.state
        if state.is_empty and not state.snapshot.entries:
            return False
        pause = max(min_interval_s, COST_FACTOR * self._cost)
        # A background pass that has just begun is recent enough for a request that is not rejected.
        last = self._begun_at if min_interval_s else self._scheduled_at
        # A clock that was set back does not stop the queue: then the difference is negative.
        resting = 0 <= now - last < pause
        urgent = state.urgent or self._urgent
        return urgent or (not resting and state.is_stale(gangs, now))
