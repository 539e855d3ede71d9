"""Gives each token that a pod holds its lease, and removes what belongs to none."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fenka.cluster.objects import Pod
from fenka.core.inventory import InstanceId
from fenka.dialects.base import Dialect
from fenka.dialects.nodes import mig_shared
from fenka.hardware.nvml import NoDriver
from fenka.hardware.nvml_mig import InstanceInUse, MigError
from fenka.isolation import lease_control
from fenka.isolation.lease_control import InvalidControl
from fenka.mig.instance_driver import sentence
from fenka.node.instance_device import InstanceDevice
from fenka.node.kubelet.client import Claim, Kubelet, KubeletUnavailable
from fenka.node.lease import resolve
from fenka.node.lease.capacity import (
    Allocations,
    NodeCapacity,
    as_in_force,
    check_capacity,
    with_peak,
)
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.report import Denials, Reporter
from fenka.node.lease.resolve import (
    CardInUse,
    InstancePending,
    LeaseDenied,
    LeasePending,
    Misplaced,
)
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.mig_instances import NodeInstances
from fenka.node.node_api import NodeApi
from fenka.server.pod_spans import PodSpans, pod_attributes


@dataclass(eq=False)
class LeaseBinder:
    """Stores the leases of tokens.

    isolates: returns whether the node enforces limits. spans: gets a span of each lease, if there is one.
    """

    _api: NodeApi
    _store: LeaseStore
    _files: LeaseFiles
    _allocations: Allocations
    _dialects: tuple[Dialect, ...]
    _isolates: Callable[[], bool]
    _spans: PodSpans | None = None
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
        if self._spans is not None:
            begun_ns = int(token.made_at * 1e9)
            self._spans.add(lease.uid, "lease", begun_ns, _span_attributes(lease))
        # Annotations that mark a pod as having its slices.
        marks = {dialect.LEASED: dialect.ASSIGNED for dialect in self._dialects if dialect.ASSIGNED}
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
            limits = lease_control.read_interrupted(page).limits
            return as_in_force(lease, limits, capacity.share.node.cards)
        return None


RETRY_S = 1.0
"""For this time a failed attempt is the answer to all starts."""


@dataclass(frozen=True, slots=True)
class _Failure:
    at: float
    error: LeaseDenied


@dataclass(eq=False)
class LeaseInstances:
    """Provides leases with their instances. clock: seconds since the epoch.

    The order is lease, instance, lease with the instance's device, files. A program that is killed between
    two of them does what is missing when it runs again: the lease names the place, and the place is the
    instance's.
    """

    _store: LeaseStore
    _files: LeaseFiles
    _instances: NodeInstances
    _clock: Callable[[], float]
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _failures: dict[str, _Failure] = field(default_factory=dict)

    async def provide(self, token: Token) -> Token:
        """Return the token with the devices of its lease's instances.

        Raises:
            InstancePending: They are being created. Repeat the call.
            LeaseDenied: They cannot be created now.
            OSError: Repeat the call later.
        """
        instances = _instances(token)
        if not instances:
            return token
        devices = self._devices(instances)
        if devices is not None and token.name not in self._tasks:
            return await self._record(token, devices)
        failure = self._failures.get(token.name)
        if failure is not None and self._clock() - failure.at < RETRY_S:
            raise failure.error
        if token.name not in self._tasks:
            task = self._instances.spawn(self._create(token.name, instances))
            self._tasks[token.name] = task
            task.add_done_callback(lambda _: self._tasks.pop(token.name))
        names = ", ".join(map(str, instances))
        raise InstancePending(
            f"fenka: the driver has not created {names} yet; the start is repeated"
        )

    def retain(self, tokens: Collection[str]) -> None:
        """Forget the failures of all other tokens."""
        self._failures = {
            name: failure for name, failure in self._failures.items() if name in tokens
        }

    def _devices(self, instances: Sequence[InstanceId]) -> Mapping[str, InstanceDevice] | None:
        found = {instance.device: self._instances.device(instance) for instance in instances}
        devices: dict[str, InstanceDevice] = {
            place: device for place, device in found.items() if device is not None
        }
        return devices if len(devices) == len(instances) else None

    async def _record(self, token: Token, devices: Mapping[str, InstanceDevice]) -> Token:
        async with self._store.lock:
            token = self._store.tokens.get(token.name, token)
            lease = token.lease
            if lease is None or lease.instances == devices:
                return token
            if lease.instances:
                # The files name devices that are no more.
                await asyncio.to_thread(self._files.remove, token.name)
            lease = msgspec.structs.replace(lease, instances=dict(devices))
            token = msgspec.structs.replace(token, lease=lease)
            await asyncio.to_thread(self._store.put, token)
            return token

    async def _create(self, name: str, instances: Sequence[InstanceId]) -> None:
        try:
            await self._instances.create(instances)
            self._failures.pop(name, None)
        except (MigError, NoDriver, OSError) as error:
            # Another node may have room, except for what is only waited for.
            later = isinstance(error, (InstanceInUse, NoDriver, OSError))
            kind: type[LeaseDenied] = InstancePending if later else Misplaced
            denied, former = kind(f"fenka: {sentence(error)}"), self._failures.get(name)
            if former is None or str(former.error) != str(denied):
                _LOG.warning("%s", sentence(error))
            self._failures[name] = _Failure(self._clock(), denied)


def _instances(token: Token) -> list[InstanceId]:
    """Return the instances that a token's slices are on."""
    slices = token.lease.slices if token.lease else ()
    instances = (piece.instance for piece in slices)
    return list(dict.fromkeys(instance for instance in instances if instance is not None))


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


def _span_attributes(lease: Lease) -> dict[str, str | int]:
    """Return what a span says of a container's lease."""
    return {
        **pod_attributes(lease.namespace, lease.pod),
        "k8s.container.name": lease.container,
        "fenka.cards": ", ".join(piece.uuid for piece in lease.slices),
        "fenka.memory_mib": sum(piece.memory_mib for piece in lease.slices),
    }


@dataclass(eq=False)
class LeaseService:
    """Serves the device plugins: tokens at Allocate, complete leases at PreStartContainer.

    trigger: requests a pass of the agent. clock: seconds. spans: gets a span of each start, if there is one.
    """

    _kubelet: Kubelet
    _store: LeaseStore
    _reconciler: LeaseReconciler
    _reporter: Reporter
    _trigger: Callable[[], None]
    _clock: Callable[[], float]
    _spans: PodSpans | None = None

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
        if self._spans is None:
            await self._prepare(resource, ids)
            return
        begun_ns, error = time.time_ns(), ""
        try:
            await self._prepare(resource, ids)
        except LeaseDenied as why:
            error = str(why)
            raise
        finally:
            for token in self._store.tokens.values():
                lease = token.lease if {*ids} == {*token.ids} else None
                if lease is not None and token.resource == resource:
                    self._spans.add(lease.uid, "start", begun_ns, _span_attributes(lease), error)

    async def _prepare(self, resource: str, ids: Sequence[str]) -> None:
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
            # The relay may have issued the token, after this program had read them.
            await asyncio.to_thread(self._store.load)
            raise LeasePending(
                "fenka: neither PodResources nor the kubelet's checkpoint says which pod these units are for"
            )


UNCLAIMED_S = 30.0
"""A token that no container holds after this time was issued for a pod that was deleted or rejected."""


@dataclass(eq=False)
class GarbageCollector:
    """Removes what no pod holds any more.

    living: returns the UIDs of pods that have processes. clock: seconds since the epoch. removed: called
    when leases were removed.
    """

    _api: NodeApi
    _store: LeaseStore
    _files: LeaseFiles
    _living: Callable[[], set[str]]
    _clock: Callable[[], float]
    _removed: Callable[[], None] = lambda: None
    lingering: set[str] = field(default_factory=set)
    """UIDs of pods that have ended for the API server, but whose processes still hold cards."""

    async def collect(self, claims: Sequence[Claim]) -> None:
        """Remove all that can be removed now. Raises OSError."""
        ended = [
            token for token in self._store.tokens.values() if not self._is_claimed(token, claims)
        ]
        if ended:
            living = await asyncio.to_thread(self._living)
            for token in ended:
                if token.lease is None or token.lease.uid not in living:
                    await self._remove(token)
            self._removed()
        uids = {lease.uid for lease in self._store.leases.values()}
        self.lingering = {uid for uid in uids if not self._api.runs(uid)}
        async with self._store.lock:
            await asyncio.to_thread(self._remove_orphans, set(self._store.tokens))

    def _is_claimed(self, token: Token, claims: Sequence[Claim]) -> bool:
        """Return whether the kubelet or the API server still shows the container that holds a token."""
        claim = resolve.claim_of(token, claims, self._api.pods)
        if token.lease is None:
            if self._clock() - token.made_at < UNCLAIMED_S:
                return True
            return claim is not None and (not claim.uid or self._api.runs(claim.uid))
        if self._api.runs(token.lease.uid):
            return True
        # PodResources shows pods that are terminating; the checkpoint also those that have ended.
        return claim is not None and not claim.uid and token.lease.uid not in self._api.pods

    async def _remove(self, token: Token) -> None:
        async with self._store.lock:
            await asyncio.to_thread(self._files.remove, token.name)
            await asyncio.to_thread(self._store.drop, token.name)
        if token.lease is not None:
            _LOG.info("%s has ended", token.lease.pod_name)

    def _remove_orphans(self, tokens: Collection[str]) -> None:
        for name in self._files.orphans(tokens):
            self._files.remove(name)
        kept = {str(self._files.library), *self._files.libraries()}
        kept |= {lease.library for lease in self._store.leases.values()}
        for library in self._files.library.parent.iterdir():
            if str(library) not in kept:
                shutil.rmtree(library, ignore_errors=True)
