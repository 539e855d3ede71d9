"""Gives each token that a pod holds its lease, and serves the device plugins' requests for one."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from fenka.node.kubelet.client import Claim, Kubelet, KubeletUnavailable
from fenka.node.lease import resolve
from fenka.node.lease.binder import LeaseBinder
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.instances import LeaseInstances
from fenka.node.lease.report import Denials, Reporter
from fenka.node.lease.resolve import CardInUse, InstancePending, LeaseDenied, LeasePending
from fenka.node.lease.store import LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

START_TIMEOUT_S = 8.0
"""How long a container's start waits for its lease. The kubelet gives up after 30 s."""
LONG_TIMEOUT_S = 25.0
"""The same for a lease whose MIG instances are being created, or whose card is about to be free."""
_RETRY_S = 0.1
_IN_USE_RETRY_S = 0.5


@dataclass(eq=False)
class LeaseReconciler:
    """Completes leases: bound to their pods in the store, and their files made.

    leased: resources whose allocation brings a lease.
    """

    _api: NodeApi
    _store: LeaseStore
    _files: LeaseFiles
    _binder: LeaseBinder
    _instances: LeaseInstances
    _denials: Denials
    _leased: Container[str]

    async def reconcile(self, claims: Sequence[Claim]) -> None:
        """Complete the leases of all tokens that a pod holds. Raises OSError."""
        await self.recover(claims)
        for token in list(self._store.tokens.values()):
            with contextlib.suppress(LeaseDenied):
                await self.complete(token, claims)
        self._denials.retain(self._store.tokens)
        self._instances.retain(self._store.tokens)

    async def recover(self, claims: Sequence[Claim]) -> None:
        """Issue tokens again that the kubelet remembers and the store has lost."""
        for claim in claims:
            ours = claim.resource in self._leased and claim.token
            if ours and claim.token not in self._store.tokens and self._api.runs(claim.uid):
                await asyncio.to_thread(
                    self._store.issue, claim.resource, claim.ids, name=claim.token
                )

    async def complete(self, token: Token, claims: Sequence[Claim]) -> bool:
        """Complete the token's lease if a pod holds it, and return whether one does.

        Raises LeaseDenied, OSError.
        """
        pods = self._api.pods
        claim = resolve.claim_of(token, claims, pods)
        if claim is None:
            return False
        pod = resolve.pod_of(claim, pods)
        if token.lease is None:
            if pod is None:
                raise LeasePending("fenka: the API server has not shown this node the pod yet")
            if pod.finished:
                return False
        try:
            if token.lease is None and pod is not None:
                token = await self._binder.bind(token, pod, claim.container, claims)
            token = await self._instances.provide(token)
        except LeaseDenied as error:
            uid = token.lease.uid if token.lease else pod.metadata.uid if pod else ""
            self._denials.add(token.name, uid, error)
            raise
        self._denials.discard(token.name)
        async with self._store.lock:
            if token.name in self._store.tokens and token.lease is not None:
                await asyncio.to_thread(self._files.make, token.name, token.lease)
        return True


@dataclass(eq=False)
class LeaseService:
    """Serves the device plugins: tokens at Allocate, complete leases at PreStartContainer.

    trigger: requests a pass of the agent. clock: seconds.
    """

    _kubelet: Kubelet
    _store: LeaseStore
    _reconciler: LeaseReconciler
    _reporter: Reporter
    _trigger: Callable[[], None]
    _clock: Callable[[], float]

    async def allocate(self, resource: str, ids: Sequence[str]) -> str:
        """Issue a token. It is on disk before the kubelet receives it."""
        token = await asyncio.to_thread(self._store.issue, resource, ids)
        self._trigger()
        return token.name

    async def prepare(self, resource: str, ids: Sequence[str]) -> None:
        """Complete the lease of the container that holds these IDs. Raises LeaseDenied.

        It waits a moment for records that are not visible yet, since each failed start costs the pod some
        10 s.
        """
        began = self._clock()
        while True:
            try:
                await self._complete(resource, frozenset(ids))
            except LeasePending as error:
                in_use = isinstance(error, CardInUse)
                takes_long = in_use or isinstance(error, InstancePending)
                if self._clock() - began >= (LONG_TIMEOUT_S if takes_long else START_TIMEOUT_S):
                    raise
                if in_use:
                    # A pass removes the leases of pods whose processes have ended.
                    self._trigger()
                await asyncio.sleep(_IN_USE_RETRY_S if in_use else _RETRY_S)
            else:
                return

    async def _complete(self, resource: str, ids: frozenset[str]) -> None:
        try:
            claims = await self._kubelet.claims()
        except KubeletUnavailable as error:
            raise LeasePending(f"fenka: {error}") from None
        await self._reconciler.recover(claims)
        completed = False
        for token in list(self._store.tokens.values()):
            if token.resource == resource and ids == set(token.ids):
                completed |= await self._reconciler.complete(token, claims)
        await self._reporter.publish_before_start(claims)
        if not completed:
            raise LeasePending(
                "fenka: neither PodResources nor the kubelet's checkpoint says which pod these units are for"
            )
