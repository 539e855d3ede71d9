"""Who of several replicas may write: a Lease of the API server, held by renewing it.

Fenced by time: another replica takes the lease at the earliest LEASE_S after it saw the last renewal, which
was written after its request was begun. So whoever counts from the beginning of its last successful request
and stops earlier never writes beside another. The lease of a process that is known to have ended need not
run out.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fenka.cluster.objects import Object, ObjectMeta, micro_time, seconds
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable

LEASE_DURATION_S = 15
"""How long a lease lasts that nobody renews."""
RENEW_DEADLINE_S = 10.0
"""A leader that has not renewed for so long does not lead any more."""
RETRY_PERIOD_S = 2.0
"""Between attempts to renew or to take the lease."""
ATTEMPT_S = 4.0
"""For one attempt, so that a connection that died without a word leaves time for a second one."""
FENCE_S = 13.0
"""Every write has ended so long after the beginning of the last renewal."""
LAST_WRITE_S = 4.0
"""Every write of a process that has ended is over so long after its end."""

ADDRESS = "fenka.io/address"
"""Annotation of the Lease: the URL at which the others reach the leader."""


class LeaseSpec(Object):
    """spec of a Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Object):
    """coordination.k8s.io/v1."""

    metadata: ObjectMeta
    spec: LeaseSpec


class Election:
    """A candidate. `run` keeps it standing; `leading` says whether it may begin to write.

    address: the URL that others are told while this one leads. ended: whether the process of this identity,
    which renewed at that time (seconds since 1970), is known to have ended; then its lease need not run out.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        *,
        address: str = "",
        ended: Callable[[str, float], bool] = lambda *_: False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._name, self._namespace = api, name, namespace
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.identity, self.address = identity, address
        self._ended = ended
        self._dead: tuple[str, float] | None = None
        self._clock, self._now, self._sleep = clock, now, sleep
        self._renewed: float | None = None
        self._seen: tuple[str, float] | None = None
        self._heard: float | None = None
        self._alone = asyncio.Lock()
        self.leader = ""
        """Who led when it was last looked at; empty for nobody."""
        self.leader_address = ""
        """Where that one is reached, if it says so."""
        self.last_error: str | None = None
        """Why the last attempt failed."""

    @property
    def leading(self) -> bool:
        """Whether a write may begin now."""
        return self._renewed is not None and self._clock() < self._renewed + RENEW_DEADLINE_S

    @property
    def time_left_s(self) -> float:
        """Within so many seconds a write that begins now must have ended; 0 or less: it must not begin."""
        return self._renewed + FENCE_S - self._clock() if self.leading and self._renewed else 0.0

    @property
    def has_leader(self) -> bool:
        """Whether it is known who leads: the lease was read lately, and somebody holds it."""
        heard = self._heard is not None and self._clock() < self._heard + LEASE_DURATION_S
        return heard and bool(self.leader)

    async def run(self) -> None:
        """Stand for election until cancelled."""
        while True:
            await self.attempt()
            await self._sleep(RETRY_PERIOD_S)

    async def attempt(self, *, stand: bool = True) -> bool:
        """Take or renew the lease if that is possible now; whether this replica leads then.

        stand=False: only look who leads.
        """
        async with self._alone:
            return await self._attempt(stand)

    async def _attempt(self, stand: bool) -> bool:
        begun = self._clock()
        try:
            async with asyncio.timeout(ATTEMPT_S):
                held = await (self._try() if stand else self._look())
        except (ApiError, ApiUnreachable, TimeoutError) as why:
            # Leading goes on until its time is over: the lease is ours as long as nobody could take it.
            self.last_error = str(why) or "the API server does not answer in time"
            return self.leading
        self.last_error = None
        self._heard = begun
        self._renewed = begun if held else None
        return self.leading

    async def release(self) -> None:
        """Let others lead at once. Nothing may be written after this is called."""
        # An attempt that runs would take it again.
        async with self._alone:
            was_leading, self._renewed = self.leading, None
            if not was_leading:
                return
            self._leads("", "")
            try:
                lease = await self._api.get(f"{self._collection}/{self._name}", Lease)
                if lease.spec.holder_identity == self.identity:
                    await self._write(lease, holder="", seconds=1, transition=False)
            except (ApiError, ApiUnreachable) as why:
                # Others wait until it runs out.
                self.last_error = str(why)

    async def _try(self) -> bool:
        try:
            lease = await self._api.get(f"{self._collection}/{self._name}", Lease)
        except ApiError as why:
            if why.status != 404:
                raise
            return await self._create()
        holder = lease.spec.holder_identity or ""
        if holder == self.identity:
            await self._write(lease, holder=holder, seconds=LEASE_DURATION_S, transition=False)
        elif not holder or self._run_out(lease) or self._orphaned(lease, holder):
            await self._write(
                lease, holder=self.identity, seconds=LEASE_DURATION_S, transition=True
            )
        else:
            self._leads(holder, _address(lease))
            return False
        self._leads(self.identity, self.address)
        return True

    async def _look(self) -> bool:
        lease = await self._api.get(f"{self._collection}/{self._name}", Lease)
        self._leads(lease.spec.holder_identity or "", _address(lease))
        return False

    def _leads(self, who: str, address: str) -> None:
        self.leader, self.leader_address = who, address

    def _run_out(self, lease: Lease) -> bool:
        """By this replica's own clock, since it saw this version: clocks of two machines differ."""
        if self._seen is None or self._seen[0] != lease.metadata.resource_version:
            self._seen = lease.metadata.resource_version, self._clock()
        duration = lease.spec.lease_duration_seconds or LEASE_DURATION_S
        return self._clock() >= self._seen[1] + duration

    def _orphaned(self, lease: Lease, holder: str) -> bool:
        """Return whether its holder has ended so long ago that nothing it sent can arrive any more."""
        renewed, version = seconds(lease.spec.renew_time or ""), lease.metadata.resource_version
        if renewed is None or not self._ended(holder, renewed):
            self._dead = None
            return False
        if self._dead is None or self._dead[0] != version:
            self._dead = version, self._clock()
        return self._clock() >= self._dead[1] + LAST_WRITE_S

    async def _create(self) -> bool:
        stamp = micro_time(self._now())
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "annotations": {ADDRESS: self.address},
            },
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": LEASE_DURATION_S,
                "acquireTime": stamp,
                "renewTime": stamp,
                "leaseTransitions": 0,
            },
        }
        await self._api.create(self._collection, Lease, body)
        self._leads(self.identity, self.address)
        return True

    async def _write(self, lease: Lease, *, holder: str, seconds: int, transition: bool) -> None:
        stamp = micro_time(self._now())
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "renewTime": stamp,
        }
        if transition:
            spec["acquireTime"] = stamp
            spec["leaseTransitions"] = (lease.spec.lease_transitions or 0) + 1
        # With its version: whoever was quicker wins, the other is told 409.
        body = {
            "metadata": {
                "resourceVersion": lease.metadata.resource_version,
                "annotations": {ADDRESS: self.address if holder else None},
            },
            "spec": spec,
        }
        path = f"{self._collection}/{self._name}"
        await self._api.patch(path, Lease, body)


def _address(lease: Lease) -> str:
    return lease.metadata.annotations.get(ADDRESS, "")
