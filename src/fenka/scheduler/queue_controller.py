"""Feeds pods to the state of the queue, and schedules the queue when an answer depends on it."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import QueueEntry
from fenka.cluster.queue_constraints import QueueConstraints
from fenka.cluster.queue_state import HEAD, QueueState
from fenka.core.request import Placement

MIN_INTERVAL_S = 0.25
"""The queue is not scheduled more often, except when a pod becomes pending and before one is rejected."""

COST_FACTOR = 4
"""After scheduling, the queue rests for this multiple of the time that scheduling took."""


class QueueController:
    """The queue on the wall clock. It hears of pods after the cluster's state does."""

    def __init__(
        self,
        state: QueueState,
        gang_placements: Callable[[], Mapping[str, tuple[Placement, ...]]] = dict,
        *,
        now: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        state: the queue.
        gang_placements: returns what is reserved for gangs that are starting, by gang.
        now: seconds since 1970.
        stopwatch: measures what scheduling costs.
        """
        self._state, self._gang_placements = state, gang_placements
        self._now, self._stopwatch = now, stopwatch
        self._scheduled_at, self._cost = -inf, 0.0

    # ---- events ----

    def replace_pods(self, pods: Sequence[Pod]) -> None:
        """Record that these are all pods of the cluster."""
        self._state.replace_pods(pods, self._now())

    def set_pod(self, pod: Pod) -> None:
        """Record a new or changed pod."""
        self._state.set_pod(pod, self._now())

    def forget_pod(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self._state.forget_pod(uid, self._now())

    def reject(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Record that none of these nodes fits the pod."""
        self._state.reject(pod, nodes, self._now())

    # ---- queries ----

    def constraints(self, pod: Pod, *, final: bool = False) -> QueueConstraints:
        """Return what is reserved for entries before this pod. final: it will be rejected otherwise."""
        if self._state.is_empty:
            return HEAD
        self._refresh(final=final)
        return self._state.constraints(pod, self._now())

    def without_served(self, constraints: QueueConstraints) -> QueueConstraints:
        """Return the constraints without what was held for entries that are bound or deleted now."""
        return self._state.without_served(constraints)

    def position(self, pod: Pod) -> str:
        """Return the pod's position as the end of a sentence, empty for a pod that no node could hold."""
        self._refresh()
        return self._state.position(pod, self._now())

    def entries(self) -> Sequence[QueueEntry]:
        """Return the pending entries, in order."""
        if not self._state.is_empty:
            self._refresh()
        return self._state.entries()

    def pods_to_requeue(self, limit: int) -> list[Pod]:
        """Return about this number of pods that fit and that kube-scheduler has not retried."""
        self.entries()
        return self._state.pods_to_requeue(limit, self._now())

    def pods_to_ungate(self, limit: int) -> list[Pod]:
        """Return gated pods that kube-scheduler is to try now, in order."""
        self._refresh()
        return self._state.pods_to_ungate(limit)

    def usage(self) -> dict[str, float]:
        """Return the card-seconds of all namespaces that have used any recently."""
        return self._state.usage(self._now())

    @property
    def max_bypass_s(self) -> float:
        """Return by how much later a request came, at most, that was served before one that still waits."""
        self.entries()
        return self._state.max_bypass_s()

    @property
    def max_bypass_bound_s(self) -> float:
        """Return the upper bound of `max_bypass_s`."""
        return self._state.max_bypass_bound_s

    def _refresh(self, *, final: bool = False) -> None:
        state, now, gangs = self._state, self._now(), self._gang_placements()
        if state.is_empty and not state.snapshot.entries:
            return
        pause = max(0.0 if final else MIN_INTERVAL_S, COST_FACTOR * self._cost)
        # A clock that was set back does not stop the queue: then the difference is negative.
        resting = 0 <= now - self._scheduled_at < pause
        if state.urgent or (not resting and state.is_stale(gangs, now)):
            begun = self._stopwatch()
            state.schedule(gangs, now)
            self._scheduled_at, self._cost = now, self._stopwatch() - begun
