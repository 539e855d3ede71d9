"""Resizes running pods as their annotations request (see dialects/resize.py).

Level-triggered: each pass compares the request, what is in force on the control page, what the store says and
what is recorded on the pod, and does what is missing. :mod:`fenka.isolation.resize_plan` defines the order.
Records are the pod's annotation, then the store, then the node's report.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fenka.cluster.allocation import read_allocation
from fenka.cluster.objects import Pod
from fenka.core.request import Slice
from fenka.dialects.base import InvalidRecord, SharedNode
from fenka.dialects.resize import (
    REFUSED,
    REQUEST,
    STATUS,
    ResizeStatus,
    decode_request,
    decode_status,
    encode_status,
)
from fenka.isolation.account import InvalidAccount
from fenka.isolation.control import InvalidControl
from fenka.isolation.resize import InUse
from fenka.isolation.resize_plan import ResizePlan, Sizes
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Claim
from fenka.node.lease.allocations import Allocations
from fenka.node.lease.limits import LeaseLimits
from fenka.node.lease.report import Reporter
from fenka.node.lease.sizes import (
    ResizeRejected,
    check_growth,
    has_whole_cards,
    peak,
    requested_tokens,
    resized,
)
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """The node, and what its other pods hold of it, by UID. names: the pods' names."""

    share: SharedNode
    others: Mapping[str, Sequence[Slice]]
    names: Mapping[str, str]


class Resizer:
    """Resizes the node's pods."""

    def __init__(
        self,
        api: NodeApi,
        store: LeaseStore,
        limits: LeaseLimits,
        inventory: NodeInventory,
        allocations: Allocations,
        reporter: Reporter,
    ) -> None:
        self._api, self._store, self._limits = api, store, limits
        self._inventory, self._allocations = inventory, allocations
        self._reporter = reporter
        self._rejections: dict[str, tuple[str, str]] = {}
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
                await self._resize(pod, tokens, claims)
            except (ApiError, ApiUnreachable, OSError, InvalidControl, InvalidAccount) as error:
                _LOG.warning("%s is resized later: %s", pod.full_name, error)

    async def _resize(self, pod: Pod, tokens: Sequence[Token], claims: Sequence[Claim]) -> None:
        cards = self._inventory.cards()
        annotations = PodAnnotations(self._api, pod)
        rejection = await PodResize(
            annotations,
            [token for token in tokens if not has_whole_cards(token, cards)],
            self._limits,
            lambda: self._capacity(pod, claims),
            lambda: self._reporter.publish_before_start(claims),
            self._store.lock,
        ).run()
        if rejection is None:
            self._rejections.pop(pod.metadata.uid, None)
            await annotations.write({REFUSED: None})
        elif self._report(pod, rejection) or annotations.get(REFUSED) is None:
            await annotations.write({REFUSED: str(rejection)})

    def _report(self, pod: Pod, rejection: ResizeRejected) -> bool:
        """Write an event, unless the same rejection was reported before. Return whether it is new."""
        uid, reported = (
            pod.metadata.uid,
            (pod.metadata.annotations.get(REQUEST, ""), rejection.kind),
        )
        if self._rejections.get(uid) == reported:
            return False
        self._rejections[uid] = reported
        self._api.pod_event(uid, "FenkaNotResized", str(rejection))
        return True

    def _capacity(self, pod: Pod, claims: Sequence[Claim]) -> NodeCapacity:
        share, own = self._inventory.shared_node(), pod.metadata.uid
        others: dict[str, Sequence[Slice]] = dict(self._allocations.slices_by_pod(claims))
        names = self._allocations.pod_names()
        for uid, other in self._api.pods.items():
            # Pods that are placed here and have no lease yet.
            if uid in others or uid == own or other.finished:
                continue
            allocation = read_allocation(share, other)
            if allocation is not None and allocation.error is None:
                others[uid] = allocation.slices
                names[uid] = other.full_name
        others.pop(own, None)
        return NodeCapacity(share, others, names)


class PodAnnotations:
    """A pod's annotations, with what was written to them since the pod was read."""

    def __init__(self, api: NodeApi, pod: Pod) -> None:
        self._api, self.pod = api, pod
        self.current = dict(pod.metadata.annotations)

    def get(self, key: str) -> str | None:
        """Return the value of an annotation."""
        return self.current.get(key)

    async def write(self, annotations: Mapping[str, str | None]) -> None:
        """Write what differs; None removes an annotation. Raises ApiError, ApiUnreachable."""
        changes = {
            key: value for key, value in annotations.items() if self.current.get(key) != value
        }
        if not changes:
            return
        await self._api.annotate(self.pod, changes)
        merged = {**self.current, **changes}
        self.current = {key: value for key, value in merged.items() if value is not None}


class PodResize:
    """Resizes one pod in one pass.

    capacity: what the node's other pods hold now. publish: tells the scheduler what the store says.
    lock: the store's.
    """

    def __init__(
        self,
        annotations: PodAnnotations,
        tokens: Sequence[Token],
        limits: LeaseLimits,
        capacity: Callable[[], NodeCapacity],
        publish: Callable[[], Awaitable[None]],
        lock: asyncio.Lock,
    ) -> None:
        self._pod, self._annotations, self._limits = annotations.pod, annotations, limits
        self._capacity, self._publish, self._lock = capacity, publish, lock
        self._tokens = {token.name: token for token in tokens}
        self._leases: dict[str, Lease] = {
            token.name: token.lease for token in tokens if token.lease
        }
        """As they were when the pass began."""

    async def run(self) -> ResizeRejected | None:
        """Resize the pod as requested. Return why it keeps its size, if the request is rejected.

        Raises ApiError, ApiUnreachable, OSError, InvalidControl, InvalidAccount: the next pass continues.
        """
        before = await asyncio.to_thread(self._in_force)
        request = self._annotations.get(REQUEST)
        try:
            after = before if request is None else self._requested(request, before)
            await self._transition(ResizePlan(before, after), request)
        except ResizeRejected as rejection:
            await self._transition(ResizePlan(before, before), None)
            return rejection
        return None

    def _in_force(self) -> Sizes:
        return {name: self._limits.in_force(name, lease) for name, lease in self._leases.items()}

    def _requested(self, text: str, before: Sizes) -> Sizes:
        share = self._capacity().share
        try:
            requests = decode_request(text, share.unit_mib)
        except InvalidRecord as error:
            raise ResizeRejected(str(error)) from None
        if not self._tokens:
            raise ResizeRejected("the pod holds whole cards: there is nothing to resize")
        after = dict(before)
        for name, token in requested_tokens(requests, self._tokens.values(), self._pod).items():
            lease = self._leases[token.name]
            if lease.limits_mib:
                raise ResizeRejected(
                    f"nothing limits container {lease.container}, since its node does not isolate: "
                    f"there is nothing to resize"
                )
            after[token.name] = resized(before[token.name], requests[name], share.node.cards)
        return after

    async def _transition(self, plan: ResizePlan, request: str | None) -> None:
        """Execute the plan.

        Raises ResizeRejected: then the sizes before are in force, and records may be larger.
        """
        if plan.grows:
            self._check_growth(plan)
            await asyncio.to_thread(self._check_use, plan)
            await self._annotate(plan.reserved, None)
            async with self._lock:
                # Other pods may have been placed during the API call.
                self._check_growth(plan)
                await self._store(plan.reserved)
            await self._publish()
        async with self._lock:
            try:
                await asyncio.to_thread(plan.enforce, self._apply)
            except (InUse, InvalidAccount) as error:
                raise ResizeRejected(str(error), "in use") from None
            await self._store(plan.after)
        await self._annotate(plan.after, request)

    def _check_growth(self, plan: ResizePlan) -> None:
        capacity = self._capacity()
        check_growth(
            self._peak(plan.before),
            self._peak(plan.reserved),
            capacity.others,
            capacity.share.node.cards,
            capacity.names,
        )

    def _check_use(self, plan: ResizePlan) -> None:
        """Check before anything is written, so that a request that must be rejected writes nothing."""
        try:
            for name, slices in plan.after.items():
                self._limits.check(name, self._leases[name], plan.before[name], slices)
        except (InUse, InvalidAccount) as error:
            raise ResizeRejected(str(error), "in use") from None

    def _apply(self, name: str, slices: Sequence[Slice]) -> None:
        self._limits.apply(name, self._leases[name], slices)

    async def _store(self, sizes: Sizes) -> None:
        await asyncio.to_thread(self._limits.record, sizes, self._peak(sizes))

    async def _annotate(self, sizes: Sizes, request: str | None) -> None:
        """Record on the pod what it holds, unless that is what its scheduler has written."""
        uid = self._pod.metadata.uid
        try:
            former = decode_status(self._annotations.current, uid)
        except InvalidRecord:
            former = None
        placed = {name: lease.slices for name, lease in self._leases.items() if not lease.resized}
        if sizes == placed and request is None and self._annotations.get(STATUS) is None:
            return
        record = ResizeStatus(
            uid,
            tuple(self._peak(sizes)),
            {self._leases[name].container: tuple(slices) for name, slices in sizes.items()},
            request if request is not None else former.request if former else "",
        )
        await self._annotations.write({STATUS: encode_status(record)})

    def _peak(self, sizes: Sizes) -> list[Slice]:
        by_container = {self._leases[name].container: slices for name, slices in sizes.items()}
        return peak(by_container, self._pod)


def _is_resized(pod: Pod, tokens: Iterable[Token]) -> bool:
    """Return whether the pod has or had a request."""
    return any(key in pod.metadata.annotations for key in (REQUEST, STATUS, REFUSED)) or any(
        token.lease.resized for token in tokens if token.lease
    )
