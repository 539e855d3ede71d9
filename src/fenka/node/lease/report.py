"""Writes on the Node what its pods hold and which pods it denies a lease (see dialects/lease_records.py).

Owners of pods cannot write there. Best effort: while the API server is unreachable containers start all the
same, and the node's own check of each card's capacity protects its pods.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fenka.dialects.base import InvalidRecord
from fenka.dialects.lease_records import REPORT, LeaseReport, Lingering, Refusal, encode_report
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.kubernetes.informer import newer
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import Allocations
from fenka.node.lease.resolve import LeaseDenied, LeasePending, Misplaced
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

BEFORE_START_S = 1.0
"""The longest that a container's start waits for the write."""

REPORT_AFTER_S = 60.0
"""A pod that is denied a lease for so long is reported to the scheduler."""


@dataclass(frozen=True, slots=True)
class _Denial:
    uid: str
    since: float
    refusal: Refusal


@dataclass(eq=False)
class Denials:
    """Denials by token. clock: seconds since the epoch."""

    _clock: Callable[[], float]
    _denials: dict[str, _Denial] = field(default_factory=dict)

    def add(self, token: str, uid: str, error: LeaseDenied) -> None:
        """Remember the denial with its first time. A lease that is only pending is none."""
        if isinstance(error, LeasePending) and not isinstance(error, Misplaced):
            return
        former = self._denials.get(token)
        since = former.since if former is not None else self._clock()
        self._denials[token] = _Denial(
            uid, since, Refusal(str(error), isinstance(error, Misplaced))
        )

    def discard(self, token: str) -> None:
        """Forget the denial of a token that has its lease."""
        self._denials.pop(token, None)

    def retain(self, tokens: Collection[str]) -> None:
        """Forget the denials of all other tokens."""
        self._denials = {name: denial for name, denial in self._denials.items() if name in tokens}

    def reportable(self) -> dict[str, Refusal]:
        """Return the denials that have lasted, by the pod's UID."""
        now = self._clock()
        return {
            denial.uid: denial.refusal
            for denial in self._denials.values()
            if now - denial.since >= REPORT_AFTER_S
        }


@dataclass(eq=False)
class Reporter:
    """Writes one report at a time; changes meanwhile go with the next. lingering: see GarbageCollector."""

    _api: NodeApi
    _allocations: Allocations
    _denials: Denials
    _lingering: Callable[[], set[str]]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _text: str | None = None
    _version: str = ""
    _unreachable: bool = False

    async def publish_before_start(self, claims: Sequence[Claim]) -> None:
        """Publish the report before a container starts, unless the API server is unreachable or slow."""
        if self._unreachable:
            return
        try:
            async with asyncio.timeout(BEFORE_START_S):
                await self.publish(claims)
        except TimeoutError:
            self._unreachable = True

    async def publish(self, claims: Sequence[Claim]) -> None:
        """Write the report unless the Node has it."""
        async with self._lock:
            node = self._api.node
            if node is None or not self._api.synced:
                return
            try:
                text = encode_report(self._report(claims))
                if text != self._current(node.metadata.annotations.get(REPORT)):
                    self._version = await self._api.write_report(text)
                    self._text = text
                self._unreachable = False
            except InvalidRecord as error:
                self._api.node_event(
                    "FenkaReport", f"{error}: the scheduler uses the records on pods instead"
                )
            except (ApiError, ApiUnreachable) as error:
                self._unreachable = True
                _LOG.warning("what pods hold could not be reported: %s", error)

    def _report(self, claims: Sequence[Claim]) -> LeaseReport:
        names, runs = self._allocations.pod_names(), self._api.runs
        uids = {pod.full_name: uid for uid, pod in self._api.pods.items()}
        held = {
            uids.get(pod, pod): tuple(slices)
            for pod, slices in self._allocations.slices_by_pod(claims).items()
        }
        lingering = self._lingering()
        return LeaseReport(
            {uid: slices for uid, slices in held.items() if runs(uid)},
            {
                uid: Lingering(names.get(uid, uid), slices)
                for uid, slices in held.items()
                if uid in lingering and not runs(uid)
            },
            {uid: refusal for uid, refusal in self._denials.reportable().items() if runs(uid)},
        )

    def _current(self, shown: str | None) -> str | None:
        """Return the report on the Node: the last one written until the watch shows that or a newer one."""
        node = self._api.node
        visible = node is not None and newer(node.metadata.resource_version, self._version)
        return shown if visible else self._text
