"""Resizes running pods as their annotations request (see dialects/resize.py).

Level-triggered: each pass compares the request, what is in force on the control page, what the store says and
what is recorded on the pod, and does what is missing. :mod:`fenka.isolation.limit_changes` defines the order.
Records are the pod's annotation, then the store, then the node's report.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.cluster.objects import Pod
from fenka.core.request import InvalidRequest, Slice
from fenka.dialects.base import InvalidRecord
from fenka.dialects.resize_records import (
    FINAL,
    REFUSED,
    REQUEST,
    STATUS,
    ResizeStatus,
    decode_request,
    decode_status,
    encode_status,
)
from fenka.isolation.account import InvalidAccount
from fenka.isolation.lease_control import InvalidControl
from fenka.isolation.limit_changes import InUse, ResizePlan, Sizes, resized
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import (
    Allocations,
    ResizeRejected,
    check_growth,
    has_whole_cards,
    peak,
    requested_leases,
)
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.report import Reporter
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _PodPass:
    """A pod in one pass.

    leases: by token, as they were when the pass began. annotations: with what was written since.
    """

    pod: Pod
    claims: Sequence[Claim]
    leases: Mapping[str, Lease]
    annotations: dict[str, str]

    def peak(self, sizes: Sizes) -> list[Slice]:
        """Return what the pod holds of each card at its peak if its leases have these sizes."""
        leases = ((self.leases[name], slices) for name, slices in sizes.items())
        return peak({lease.container: lease.reserved(slices) for lease, slices in leases}, self.pod)


@dataclass(eq=False)
class Resizer:
    """Resizes the node's pods."""

    _api: NodeApi
    _store: LeaseStore
    _files: LeaseFiles
    _allocations: Allocations
    _reporter: Reporter
    _rejections: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Request and kind of the rejection that was reported, by UID."""

    async def reconcile(self, claims: Sequence[Claim]) -> None:
        """Make one pass over all pods."""
        by_pod: dict[str, list[Token]] = {}
        for token in self._store.tokens.values():
            if token.lease is not None:
                by_pod.setdefault(token.lease.uid, []).append(token)
        for uid in self._rejections.keys() - by_pod.keys():
            del self._rejections[uid]
        for uid, tokens in by_pod.items():
            pod = self._api.pods.get(uid)
            # Before all containers run, what the pod holds is not known.
            if pod is None or pod.status.phase != "Running" or not _is_resized(pod, tokens):
                continue
            try:
                await self._resize(self._pod_pass(pod, tokens, claims))
            except (ApiError, ApiUnreachable, OSError, InvalidControl, InvalidAccount) as error:
                _LOG.warning("%s is resized later: %s", pod.full_name, error)

    def _pod_pass(self, pod: Pod, tokens: Sequence[Token], claims: Sequence[Claim]) -> _PodPass:
        cards = self._allocations.expected(claims).share.node.cards
        leases = {
            token.name: token.lease
            for token in tokens
            if token.lease and not has_whole_cards(token, cards)
        }
        return _PodPass(pod, claims, leases, dict(pod.metadata.annotations))

    async def _resize(self, pod: _PodPass) -> None:
        """Resize the pod as requested, or record why it keeps its size.

        Raises ApiError, ApiUnreachable, OSError, InvalidControl, InvalidAccount: the next pass continues.
        """
        before = await asyncio.to_thread(self._in_force, pod)
        request = pod.annotations.get(REQUEST)
        try:
            after = before if request is None else self._requested(pod, request, before)
            await self._transition(pod, ResizePlan(before, after), request)
        except ResizeRejected as rejection:
            await self._transition(pod, ResizePlan(before, before), None)
            if self._report(pod.pod, rejection) or REFUSED not in pod.annotations:
                final = "true" if rejection.final else None
                await self._annotate(pod, {REFUSED: str(rejection), FINAL: final})
        else:
            self._rejections.pop(pod.pod.metadata.uid, None)
            await self._annotate(pod, {REFUSED: None, FINAL: None})

    def _in_force(self, pod: _PodPass) -> Sizes:
        return {name: self._files.in_force(name, lease) for name, lease in pod.leases.items()}

    def _report(self, pod: Pod, rejection: ResizeRejected) -> bool:
        """Write an event, unless the same rejection was reported before. Return whether it is new."""
        uid = pod.metadata.uid
        reported = pod.metadata.annotations.get(REQUEST, ""), rejection.kind
        if self._rejections.get(uid) == reported:
            return False
        self._rejections[uid] = reported
        self._api.pod_event(uid, "FenkaNotResized", str(rejection))
        return True

    def _requested(self, pod: _PodPass, text: str, before: Sizes) -> Sizes:
        """Return the requested sizes. Raises ResizeRejected if they can never be granted."""
        try:
            return self._decoded(pod, text, before)
        except (InvalidRecord, InvalidRequest, ResizeRejected) as error:
            raise ResizeRejected(str(error), final=True) from None

    def _decoded(self, pod: _PodPass, text: str, before: Sizes) -> Sizes:
        """Return the requested sizes. Raises InvalidRecord, InvalidRequest, ResizeRejected."""
        node, after = self._allocations.expected(pod.claims).share.node, dict(before)
        requests = decode_request(text, node.unit_mib)
        if not pod.leases:
            raise ResizeRejected("the pod holds whole cards: there is nothing to resize")
        for name, token in requested_leases(requests, pod.leases, pod.pod).items():
            lease, size = pod.leases[token], requests[name]
            if lease.limits_mib:
                raise ResizeRejected(
                    f"nothing limits container {lease.container}, since its node does not isolate: there is "
                    "nothing to resize"
                )
            after[token] = resized(before[token], size.memory, size.compute, node)
        return after

    async def _transition(self, pod: _PodPass, plan: ResizePlan, request: str | None) -> None:
        """Execute the plan.

        Raises ResizeRejected: then the sizes before are in force, and records may be larger.
        """
        if plan.grows:
            self._check_growth(pod, plan)
            await asyncio.to_thread(self._check_use, pod, plan)
            await self._record(pod, plan.reserved, None)
            async with self._store.lock:
                # Other pods may have been placed during the API call.
                self._check_growth(pod, plan)
                await self._store_sizes(pod, plan.reserved)
            await self._reporter.publish_before_start(pod.claims)
        async with self._store.lock:
            try:
                await asyncio.to_thread(
                    plan.enforce,
                    lambda name, slices: self._files.enforce(name, pod.leases[name], slices),
                )
            except (InUse, InvalidAccount) as error:
                raise ResizeRejected(str(error), "in use") from None
            await self._store_sizes(pod, plan.after)
        await self._record(pod, plan.after, request)

    def _check_growth(self, pod: _PodPass, plan: ResizePlan) -> None:
        uid, capacity = pod.pod.metadata.uid, self._allocations.expected(pod.claims)
        check_growth(uid, pod.peak(plan.before), pod.peak(plan.reserved), capacity)

    def _check_use(self, pod: _PodPass, plan: ResizePlan) -> None:
        """Check before anything is written, so that a request that must be rejected writes nothing."""
        try:
            for name, slices in plan.after.items():
                self._files.check(name, pod.leases[name], plan.before[name], slices)
        except (InUse, InvalidAccount) as error:
            raise ResizeRejected(str(error), "in use") from None

    async def _store_sizes(self, pod: _PodPass, sizes: Sizes) -> None:
        await asyncio.to_thread(self._store.resize, sizes, pod.peak(sizes))

    async def _record(self, pod: _PodPass, sizes: Sizes, request: str | None) -> None:
        """Record on the pod what it holds, unless that is what its scheduler has written."""
        uid = pod.pod.metadata.uid
        try:
            former = decode_status(pod.annotations, uid)
        except InvalidRecord:
            former = None
        placed = {name: lease.slices for name, lease in pod.leases.items() if not lease.resized}
        if sizes == placed and request is None and STATUS not in pod.annotations:
            return
        record = ResizeStatus(
            uid,
            tuple(pod.peak(sizes)),
            {pod.leases[name].container: tuple(slices) for name, slices in sizes.items()},
            request if request is not None else former.request if former else "",
        )
        await self._annotate(pod, {STATUS: encode_status(record)})

    async def _annotate(self, pod: _PodPass, annotations: Mapping[str, str | None]) -> None:
        """Write what differs; None removes an annotation. Raises ApiError, ApiUnreachable."""
        changes = {
            key: value for key, value in annotations.items() if pod.annotations.get(key) != value
        }
        if changes:
            await self._api.annotate(pod.pod, changes)
            merged = {**pod.annotations, **changes}
            pod.annotations = {key: value for key, value in merged.items() if value is not None}


def _is_resized(pod: Pod, tokens: Iterable[Token]) -> bool:
    """Return whether the pod has or had a request."""
    return any(key in pod.metadata.annotations for key in (REQUEST, STATUS, REFUSED)) or any(
        token.lease.resized for token in tokens if token.lease
    )
