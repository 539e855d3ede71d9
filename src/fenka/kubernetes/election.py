"""Elects one of several replicas by a Lease of the API server, and says until when the leader may write.

The fence is time. Another replica takes the lease LEASE_DURATION_S after it saw the last renewal, or later.
That renewal was written after its request began. The leader counts from the beginning of that request, and
every write ends WRITE_DEADLINE_S later. The difference covers the delivery of a request.

A killed leader is replaced within LEASE_DURATION_S + RETRY_PERIOD_S. In return the leader sends one request a
second, and each other replica two.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from fenka.cluster.objects import Object, ObjectMeta, micro_time
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable

LEASE_DURATION_S = 4
"""How long a lease lasts that nobody renews. The API counts whole seconds."""
WRITE_DEADLINE_S = 3.25
"""Every write has ended this long after the last renewal began."""
RENEW_DEADLINE_S = 2.5
"""A leader that has not renewed for this long begins no write."""
ATTEMPT_TIMEOUT_S = 1.0
"""For one attempt, so that there is time for a second one before RENEW_DEADLINE_S."""
RENEW_PERIOD_S = 1.0
"""Between renewals by the leader."""
RETRY_PERIOD_S = 0.5
"""Between attempts of the other replicas."""
LEADER_KNOWN_S = 15.0
"""A replica that has not read the lease for this long does not know who leads."""

ADDRESS = "fenka.io/address"
"""Annotation of the Lease: the URL at which other replicas reach the leader."""


class LeaseSpec(Object):
    """The spec of a Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None
    renew_time: str | None = None


class CoordinationLease(Object):
    """A Lease of coordination.k8s.io/v1."""

    metadata: ObjectMeta
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)


Term = tuple[str, int]
"""A Lease's UID and its number of transitions: equal only if no other replica held the lease in between."""


class Election:
    """A candidate. Call `acquire_or_renew` again after `pause_s`.

    Args:
        annotations, labels: what the leader publishes on the Lease.

    Attributes:
        address: the URL that other replicas read while this one leads.
        term: the term in which this replica last held the lease.
        leader: the holder when the lease was last read; empty for none.
        leader_address: the URL of the leader, empty if it gives none.
        last_error: why the last attempt failed, None if it did not.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        *,
        address: str = "",
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api, self._name, self._namespace = api, name, namespace
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.identity, self.address = identity, address
        self._annotations, self._labels = dict(annotations or {}), dict(labels or {})
        self._clock, self._now = clock, now
        self._renewed_at: float | None = None
        self._read_at: float | None = None
        self._held: CoordinationLease | None = None
        """The lease as this replica wrote it last, so that it can be renewed without being read."""
        self._seen: tuple[str, float] | None = None
        """The last version of another holder's lease, and when this replica saw it first."""
        self._expires_at: float | None = None
        self._one_at_a_time = asyncio.Lock()
        self.term: Term | None = None
        self.leader = ""
        self.leader_address = ""
        self.last_error: str | None = None

    @property
    def leading(self) -> bool:
        """Return whether a write may begin now."""
        return self._renewed_at is not None and self._clock() < self._renewed_at + RENEW_DEADLINE_S

    @property
    def time_left_s(self) -> float:
        """Return the seconds within which a write that begins now must end; 0 if none may begin."""
        if self._renewed_at is None or not self.leading:
            return 0.0
        return self._renewed_at + WRITE_DEADLINE_S - self._clock()

    @property
    def has_leader(self) -> bool:
        """Return whether the lease was read lately and some replica held it."""
        recent = self._read_at is not None and self._clock() < self._read_at + LEADER_KNOWN_S
        return recent and bool(self.leader)

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next attempt: no later than another's lease expires."""
        if self._renewed_at is not None:
            return RENEW_PERIOD_S
        left = self._expires_at - self._clock() if self._expires_at is not None else 0.0
        return min(left, RETRY_PERIOD_S) if left > 0 else RETRY_PERIOD_S

    async def acquire_or_renew(self) -> bool:
        """Take or renew the lease if that is possible now. Return whether this replica leads then."""
        return await self._attempt(self._acquire_or_renew)

    async def observe(self) -> None:
        """Read who leads, without taking the lease."""
        await self._attempt(self._observe)

    async def release(self) -> None:
        """Let another replica lead at once. Nothing may be written after this call."""
        # An attempt that runs meanwhile would take the lease again.
        async with self._one_at_a_time:
            was_leading, self._renewed_at, self._held = self.leading, None, None
            if not was_leading:
                return
            self._set_leader("", "")
            try:
                lease = await self._read()
                if lease is not None and lease.spec.holder_identity == self.identity:
                    await self._write(lease, holder="", duration_s=1)
            except (ApiError, ApiUnreachable) as error:
                # The others wait until the lease expires.
                self.last_error = str(error)

    async def _attempt(self, action: Callable[[], Awaitable[bool]]) -> bool:
        async with self._one_at_a_time:
            begun = self._clock()
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                    holds = await action()
            except (ApiError, ApiUnreachable, TimeoutError) as error:
                # The lease is still this replica's until its time is over: nobody could take it.
                self._held = None
                self.last_error = str(error) or "the API server did not answer in time"
                return self.leading
            self.last_error = None
            self._read_at = begun
            self._renewed_at = begun if holds else None
            return self.leading

    async def _acquire_or_renew(self) -> bool:
        if self._held is not None:
            try:
                return await self._hold(self._held, acquire=False)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        lease = await self._read()
        if lease is None:
            return await self._hold(None, acquire=True)
        holder = lease.spec.holder_identity or ""
        if holder == self.identity:
            return await self._hold(lease, acquire=False)
        if not holder or self._has_expired(lease):
            return await self._hold(lease, acquire=True)
        self._set_leader(holder, _address(lease))
        return False

    async def _observe(self) -> bool:
        lease = await self._read()
        if lease is not None:
            self._set_leader(lease.spec.holder_identity or "", _address(lease))
        return False

    def _set_leader(self, identity: str, address: str) -> None:
        self.leader, self.leader_address = identity, address

    def _has_expired(self, lease: CoordinationLease) -> bool:
        """Count from when this replica saw the version first: clocks of two machines differ."""
        version, now = lease.metadata.resource_version, self._clock()
        if self._seen is None or self._seen[0] != version:
            self._seen = version, now
        duration_s = lease.spec.lease_duration_seconds or LEASE_DURATION_S
        self._expires_at = self._seen[1] + duration_s
        return now >= self._expires_at

    async def _read(self) -> CoordinationLease | None:
        """Return the lease, None if it does not exist."""
        try:
            return await self._api.get(f"{self._collection}/{self._name}", CoordinationLease)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _hold(self, lease: CoordinationLease | None, *, acquire: bool) -> bool:
        written = await self._write(
            lease, holder=self.identity, duration_s=LEASE_DURATION_S, acquire=acquire
        )
        self._held = written
        self.term = written.metadata.uid, written.spec.lease_transitions or 0
        self._set_leader(self.identity, self.address)
        return True

    async def _write(
        self,
        lease: CoordinationLease | None,
        *,
        holder: str,
        duration_s: int,
        acquire: bool = False,
    ) -> CoordinationLease:
        """Change the lease, or create it if it does not exist."""
        stamp = micro_time(self._now())
        metadata: dict[str, Any] = {
            "labels": self._labels,
            "annotations": {**self._annotations, ADDRESS: self.address if holder else None},
        }
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": duration_s,
            "renewTime": stamp,
        }
        if acquire:
            earlier = -1 if lease is None else lease.spec.lease_transitions or 0
            spec |= {"acquireTime": stamp, "leaseTransitions": earlier + 1}
        body = {"metadata": metadata, "spec": spec}
        if lease is None:
            metadata |= {"name": self._name, "namespace": self._namespace}
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            return await self._api.create(self._collection, CoordinationLease, kind | body)
        # With the version that was read: of two writers the second receives 409.
        metadata["resourceVersion"] = lease.metadata.resource_version
        return await self._api.patch(f"{self._collection}/{self._name}", CoordinationLease, body)


def _address(lease: CoordinationLease) -> str:
    return lease.metadata.annotations.get(ADDRESS, "")
