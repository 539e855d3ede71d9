"""Has the MIG instances of leases created, in the background, and recorded in the store.

The order is lease, instance, lease with the instance's device, files. A program that is killed between two
of them does what is missing when it runs again: the lease names the place, and the place is the instance's.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fenka.core.inventory import DeviceId
from fenka.dialects.base import split_instance
from fenka.hardware.mig_instances import InstanceInUse, MigError
from fenka.hardware.nvml import NoDriver
from fenka.node.instances import InstanceDevice, NodeInstances, sentence
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.resolve import InstancePending, LeaseDenied, Misplaced
from fenka.node.lease.store import LeaseStore, Token

_LOG = logging.getLogger(__name__)

RETRY_S = 1.0
"""An attempt that failed is the answer to all starts for so long."""


@dataclass(frozen=True, slots=True)
class _Failure:
    at: float
    error: LeaseDenied


@dataclass(eq=False)
class LeaseInstances:
    """Provides leases with their instances. clock: seconds since the epoch."""

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
        places = _places(token)
        if not places:
            return token
        devices = self._devices(places)
        if devices is not None and token.name not in self._tasks:
            return await self._record(token, devices)
        failure = self._failures.get(token.name)
        if failure is not None and self._clock() - failure.at < RETRY_S:
            raise failure.error
        if token.name not in self._tasks:
            task = self._instances.spawn(self._create(token.name, places))
            self._tasks[token.name] = task
            task.add_done_callback(lambda _: self._tasks.pop(token.name))
        names = ", ".join(places)
        raise InstancePending(
            f"fenka: the driver has not created {names} yet; the start is repeated"
        )

    def retain(self, tokens: Collection[str]) -> None:
        """Forget the failures of all other tokens."""
        self._failures = {
            name: failure for name, failure in self._failures.items() if name in tokens
        }

    def _devices(self, places: Sequence[DeviceId]) -> Mapping[str, InstanceDevice] | None:
        found = {place: self._instances.device(place) for place in places}
        devices: dict[str, InstanceDevice] = {
            place: device for place, device in found.items() if device is not None
        }
        return devices if len(devices) == len(places) else None

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

    async def _create(self, name: str, places: Sequence[DeviceId]) -> None:
        try:
            await self._instances.create(places)
            self._failures.pop(name, None)
        except (MigError, NoDriver, OSError) as error:
            # Another node may have room, except for what is only waited for.
            later = isinstance(error, (InstanceInUse, NoDriver, OSError))
            kind: type[LeaseDenied] = InstancePending if later else Misplaced
            denied, former = kind(f"fenka: {sentence(error)}"), self._failures.get(name)
            if former is None or str(former.error) != str(denied):
                _LOG.warning("%s", sentence(error))
            self._failures[name] = _Failure(self._clock(), denied)


def _places(token: Token) -> list[DeviceId]:
    """Return the places of the instances that a token's slices are on."""
    slices = token.lease.slices if token.lease else ()
    return list(dict.fromkeys(piece.uuid for piece in slices if split_instance(piece.uuid)))
