"""Binds tokens to the pods that hold them: the record is resolved, checked, and stored as a lease."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from fenka.cluster.objects import Pod
from fenka.dialects.base import Dialect
from fenka.dialects.node_modes import mig_shared
from fenka.isolation import control
from fenka.isolation.control import InvalidControl
from fenka.node.kubelet.client import Claim
from fenka.node.lease import resolve
from fenka.node.lease.allocations import Allocations
from fenka.node.lease.capacity import NodeCapacity, check_capacity
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.resolve import CardInUse, Misplaced
from fenka.node.lease.sizes import as_in_force, with_peak
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class LeaseBinder:
    """Stores the leases of tokens. isolates: returns whether the node enforces limits."""

    _api: NodeApi
    _store: LeaseStore
    _files: LeaseFiles
    _allocations: Allocations
    _dialects: tuple[Dialect, ...]
    _isolates: Callable[[], bool]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def bind(self, token: Token, pod: Pod, container: str, claims: Sequence[Claim]) -> Token:
        """Store the token's lease, and return the token with it. Raises LeaseDenied, OSError."""
        runtime_class = pod.spec.runtime_class_name
        handler = await self._api.runtime_handler(runtime_class) if runtime_class else ""
        async with self._store.lock:
            token = self._store.tokens.get(token.name, token)
            if token.lease is not None:
                return token
            resolve.check_pod(pod, handler)
            capacity = self._allocations.capacity(claims)
            lease = self._resolve(token, pod, container, capacity)
            labels = self._api.node.metadata.labels if self._api.node else {}
            try:
                check_capacity(lease, capacity, share_instances=mig_shared(labels))
            except Misplaced as error:
                if self._is_ending(lease, capacity):
                    raise CardInUse(str(error)) from None
                raise
            lease = msgspec.structs.replace(lease, library=str(self._files.library))
            token = msgspec.structs.replace(token, lease=lease)
            await asyncio.to_thread(self._store.put, token)
        slices = [f"{piece.memory_mib} MiB of card {piece.card}" for piece in lease.slices]
        _LOG.info("%s container %s holds %s", lease.pod_name, lease.container, ", ".join(slices))
        # Annotations that mark a pod as having its slices.
        marks = {each.LEASED: each.ASSIGNED for each in self._dialects if each.ASSIGNED}
        if mark := marks.get(token.resource):
            task = asyncio.create_task(self._api.try_annotate(pod, {mark: "true"}))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return token

    def _is_ending(self, lease: Lease, capacity: NodeCapacity) -> bool:
        """Return whether a pod on the lease's cards has ended for the API server, and not on the node."""
        cards = {piece.card for piece in lease.holds}
        return any(
            uid in capacity.names
            and not self._api.runs(uid)
            and not cards.isdisjoint(piece.card for piece in slices)
            for uid, slices in capacity.held.items()
            if uid != lease.uid
        )

    def _resolve(self, token: Token, pod: Pod, container: str, capacity: NodeCapacity) -> Lease:
        if self._allocations.is_exclusive(token):
            return resolve.whole_lease(capacity.share.node.cards, pod, container, token.ids)
        share = resolve.with_own_instances(capacity.share, pod)
        uid = pod.metadata.uid
        siblings = [lease for lease in self._store.leases.values() if lease.uid == uid]
        amount = len(token.ids)
        lease = resolve.share_lease(share, pod, container, token.resource, amount, self._dialects)
        if not self._isolates():
            lease = resolve.unlimited(lease, share.node.cards)
        in_force = self._in_force(token, lease, capacity)
        if in_force is None:
            resolve.check_siblings(lease, siblings)
        return with_peak(in_force or lease, siblings, pod)

    def _in_force(self, token: Token, lease: Lease, capacity: NodeCapacity) -> Lease | None:
        """Return the lease as its page limits it: programs may run by it, even if other files are lost."""
        page = self._files.control(token.name)
        if lease.limits_mib or not page.exists():
            return None
        with contextlib.suppress(InvalidControl):
            limits = control.read_interrupted(page).limits
            return as_in_force(lease, limits, capacity.share.node.cards)
        return None
