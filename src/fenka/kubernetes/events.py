"""Writes events on objects, which `kubectl describe` shows. A repeated event is counted, not written again.

An event that cannot be written is dropped. Nothing else fails because of it.
"""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fenka.cluster.objects import Node, Object, ObjectMeta, Pod, micro_time
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable

MAX_NOTE = 1024
"""Characters of a note: the API server refuses more."""

BURST, PER_SECOND = 50, 5.0
"""Events at once, and events a second in the long run. Events above them are dropped."""

SERIES_S = 60.0
"""Between two updates of the count of one event."""
_MAX_SERIES = 5_000
_MAX_QUEUE = 500


class _Event(Object):
    metadata: ObjectMeta


@dataclass(slots=True)
class _Series:
    name: str | None
    """None until the first one has been written."""
    count: int
    written_at: float


_Key = tuple[str, str, str]


class EventRecorder:
    """Writes events in the background: `run` is its task."""

    def __init__(
        self,
        api: Api,
        component: str,
        instance: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api, self._component, self._instance = api, component, instance
        self._clock, self._now = clock, now
        self._series: OrderedDict[_Key, _Series] = OrderedDict()
        self._queue: asyncio.Queue[tuple[_Key, str, dict[str, Any] | None]] = asyncio.Queue(
            _MAX_QUEUE
        )
        self._tokens, self._filled_at = float(BURST), clock()
        self._writing = False
        self.dropped = 0
        """Events that were not written, because of the limits or the server's answer."""

    def record_on_pod(self, pod: Pod, reason: str, note: str, *, normal: bool = False) -> bool:
        """Record an event on a pod. Return whether the limits allow it to be written.

        Args:
            reason: one word in CamelCase.
            note: a sentence.
            normal: nothing is wrong.
        """
        meta = pod.metadata
        regarding = {"kind": "Pod", "namespace": meta.namespace, "apiVersion": "v1"}
        return self._record(meta, regarding, reason, note, normal=normal)

    def record_on_node(self, node: Node, reason: str, note: str) -> None:
        """Record an event on a node."""
        regarding = {"kind": "Node", "apiVersion": "v1"}
        self._record(node.metadata, regarding, reason, note)

    async def run(self) -> None:
        """Write recorded events until cancelled."""
        while True:
            pending = await self._queue.get()
            self._writing = True
            await self._write(*pending)
            self._writing = False

    async def flush(self) -> None:
        """Write all recorded events, where `run` does not run."""
        while not self._queue.empty():
            await self._write(*self._queue.get_nowait())

    @property
    def idle(self) -> bool:
        """Return whether everything recorded so far was written or dropped."""
        return self._queue.empty() and not self._writing

    def _record(
        self,
        meta: ObjectMeta,
        regarding: dict[str, str],
        reason: str,
        note: str,
        *,
        normal: bool = False,
    ) -> bool:
        note = note if len(note) <= MAX_NOTE else note[: MAX_NOTE - 1] + "…"
        key = meta.uid or meta.name, reason, note
        namespace = meta.namespace or "default"
        series = self._series.get(key)
        if series is not None:
            series.count += 1
            self._series.move_to_end(key)
            if series.name is not None and self._clock() >= series.written_at + SERIES_S:
                self._put(key, namespace, None)
            return True
        stamp = micro_time(self._now())
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{meta.name[:220]}.{uuid.uuid4().hex[:16]}",
                "namespace": namespace,
            },
            "eventTime": stamp,
            "reportingController": self._component,
            "reportingInstance": self._instance[:128],
            "action": "Scheduling",
            "reason": reason,
            "note": note,
            "type": "Normal" if normal else "Warning",
            "regarding": {**regarding, "name": meta.name, "uid": meta.uid},
        }
        if not self._put(key, namespace, body):
            return False
        self._series[key] = _Series(None, 1, self._clock())
        if len(self._series) > _MAX_SERIES:
            self._series.popitem(last=False)
        return True

    def _put(self, key: _Key, namespace: str, body: dict[str, Any] | None) -> bool:
        if not self._token() or self._queue.full():
            self.dropped += 1
            return False
        self._queue.put_nowait((key, namespace, body))
        return True

    def _token(self) -> bool:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._filled_at) * PER_SECOND, float(BURST))
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _write(self, key: _Key, namespace: str, body: dict[str, Any] | None) -> None:
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        series = self._series.get(key)
        try:
            if body is not None:
                event = await self._api.create(path, _Event, body)
                if series is not None:
                    series.name = event.metadata.name
            elif series is not None and series.name is not None:
                series.written_at = self._clock()
                counted = {"count": series.count, "lastObservedTime": micro_time(self._now())}
                await self._api.patch(f"{path}/{series.name}", _Event, {"series": counted})
        except (ApiError, ApiUnreachable):
            self.dropped += 1
            # The next one starts a new series: this one expired, or was never written.
            self._series.pop(key, None)
