"""Binds tokens to the pods that hold them: the record is resolved, checked, and stored as a lease."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from fenka.dialects.base import Dialect
from fenka.isolation import control
from fenka.isolation.control import InvalidControl
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Claim
from fenka.node.lease import resolve
from fenka.node.lease.allocations import Allocations
from fenka.node.lease.capacity import check_capacity
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.limits import as_in_force
from fenka.node.lease.sizes import with_peak
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)


class LeaseResolver:
    """Resolves the lease of a token from its pod's record, and from what is in force already.

    isolates: whether the node enforces limits. library: the native libraries, prepared for leases.
    """

    def __init__(
        self,
        inventory: NodeInventory,
        allocations: Allocations,
        dialects: tuple[Dialect, ...],
        isolates: Callable[[], bool],
        library: Path,
    ) -> None:
        self._inventory, self._allocations = inventory, allocations
        self._dialects, self._isolates, self._library = dialects, isolates, library

    def resolve(
        self, token: Token, pod: Pod, container: str, siblings: Sequence[Lease], page: Path
    ) -> Lease:
        """Return the lease. Raises LeaseDenied, OSError.

        Args:
            token: The token.
            pod: The pod that holds it.
            container: Its container that holds it.
            siblings: The leases of the pod's other containers.
            page: The lease's control page, which need not exist.
        """
        if self._allocations.is_exclusive(token):
            lease = resolve.whole_lease(self._inventory.cards(), pod, container, token.ids)
        else:
            lease = self._share_lease(token, pod, container)
            in_force = self._in_force(lease, page)
            if in_force is None:
                resolve.check_siblings(lease, siblings)
            lease = with_peak(in_force or lease, siblings, pod)
        return msgspec.structs.replace(lease, library=str(self._library))

    def check_capacity(self, lease: Lease, claims: Sequence[Claim]) -> None:
        """Check that the lease fits beside everything that lives on its cards. Raises LeaseDenied."""
        check_capacity(
            lease,
            self._allocations.slices_by_pod(claims),
            self._inventory.cards(),
            self._allocations.pod_names(),
        )

    def _share_lease(self, token: Token, pod: Pod, container: str) -> Lease:
        lease = resolve.share_lease(
            self._inventory.shared_node(),
            pod,
            container,
            token.resource,
            len(token.ids),
            self._dialects,
        )
        return lease if self._isolates() else resolve.unlimited(lease, self._inventory.cards())

    def _in_force(self, lease: Lease, page: Path) -> Lease | None:
        """Return the lease as a page limits it: programs may run by it, even if other files are lost."""
        if lease.limits_mib or not page.exists():
            return None
        with contextlib.suppress(InvalidControl):
            limits = control.read_interrupted(page).limits
            return as_in_force(lease, limits, self._inventory.by_uuid.values())
        return None


class LeaseBinder:
    """Stores the leases of tokens.

    assigned: by resource, the annotation that marks a pod as having its slices.
    """

    def __init__(
        self,
        api: NodeApi,
        store: LeaseStore,
        files: LeaseFiles,
        resolver: LeaseResolver,
        assigned: Mapping[str, str],
    ) -> None:
        self._assigned = assigned
        self._api, self._store, self._files, self._resolver = api, store, files, resolver
        self._tasks: set[asyncio.Task[None]] = set()

    async def bind(self, token: Token, pod: Pod, container: str, claims: Sequence[Claim]) -> Token:
        """Store the token's lease, and return the token with it. Raises LeaseDenied, OSError."""
        runtime_class = pod.spec.runtime_class_name
        handler = await self._api.runtime_handler(runtime_class) if runtime_class else ""
        async with self._store.lock:
            token = self._store.tokens.get(token.name, token)
            if token.lease is not None:
                return token
            resolve.check_pod(pod, handler)
            siblings = [
                other.lease
                for other in self._store.tokens.values()
                if other.lease is not None and other.lease.uid == pod.metadata.uid
            ]
            page = self._files.control(token.name)
            lease = self._resolver.resolve(token, pod, container, siblings, page)
            self._resolver.check_capacity(lease, claims)
            token = msgspec.structs.replace(token, lease=lease)
            await asyncio.to_thread(self._store.put, token)
        slices = [f"{piece.memory_mib} MiB of card {piece.card}" for piece in lease.slices]
        _LOG.info("%s container %s holds %s", lease.pod_name, lease.container, ", ".join(slices))
        if assigned := self._assigned.get(token.resource):
            self._start(self._api.try_annotate(pod, {assigned: "true"}))
        return token

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
