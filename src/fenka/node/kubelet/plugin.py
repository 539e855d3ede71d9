"""A device plugin: registers a resource with the kubelet, lists its IDs, and serves the kubelet's calls."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Slice
from fenka.node.kubelet import client
from fenka.node.kubelet import messages_pb2 as api

_LOG = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two checks for a restart of the kubelet, which removes all plugins' sockets."""


class StartDenied(FenkaError):
    """A container must not start now. The message is one sentence for the pod's user."""


class LeaseProvider(Protocol):
    """Gives leases to the containers that the kubelet starts."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> str:
        """Return a token for these device IDs. Raises OSError."""

    async def prepare(self, resource: str, ids: Sequence[str]) -> None:
        """Complete the lease of the container that holds these IDs. Raises StartDenied."""


@dataclass(eq=False)
class Plugin:
    """A device plugin for one resource.

    Attributes:
        resource: The extended resource.
        _endpoint: Prefix of its sockets, which stand beside the kubelet's.
        _kubelet: The kubelet to register with.
        _leases: None for a resource that is only counted, and accompanies one that brings a lease.
        _on_change: Called when `registered` or `listed` changes.
        devices: The advertised device IDs, each with whether it is healthy.
        registered: Set while the kubelet knows of this plugin, as far as can be seen.
        listed: Set while the kubelet also reads its device lists, and has read the first.
        _lost: Set when the kubelet has stopped reading them. It fails pods until the plugin registers again.
    """

    resource: str
    _endpoint: str
    _kubelet: client.Kubelet
    _leases: LeaseProvider | None
    _on_change: Callable[[], object]
    devices: list[tuple[str, bool]] = field(default_factory=list)
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    _readers: int = 0
    _version: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def advertise(self, devices: list[tuple[str, bool]], *, remembered: bool = False) -> None:
        """Send this device list to the kubelet.

        A resource that never had a device is not registered, unless the kubelet remembers devices of an
        earlier process: then it must be sent the empty list.
        """
        if devices == self.devices and not (remembered and self._version == 0):
            return
        async with self._changed:
            self.devices = devices
            self._version += 1
            self._changed.notify_all()

    async def run(self) -> None:
        """Serve until cancelled, and register again whenever the kubelet has been restarted."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version > 0)
        quiet = False
        while True:
            try:
                await self._serve()
                quiet = False
            except (client.KubeletUnavailable, OSError, RuntimeError) as error:
                # An unavailable kubelet is ordinary: one line, not one each time.
                _LOG.log(
                    logging.DEBUG if quiet else logging.WARNING,
                    "%s is not registered: %s",
                    self.resource,
                    error,
                )
                quiet = True
            finally:
                self.registered.clear()
                self.listed.clear()
                self._on_change()
            await asyncio.sleep(POLL_S)

    async def _serve(self) -> None:
        # A name of its own each time: kubelet 1.37, asked again under one whose last owner it has not seen
        # end yet, refuses it from then on, until it is restarted ("device plugin already connected").
        path = self._kubelet.plugins / f"{self._endpoint}-{secrets.token_hex(4)}.sock"
        kubelet = _identity(self._kubelet.socket)
        if kubelet is None:
            raise client.KubeletUnavailable(f"there is no {self._kubelet.socket}")
        _remove_dead(self._kubelet.plugins, f"{self._endpoint}*.sock")
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix://{path}")
        try:
            await server.start()
            own = _identity(path)
            self._lost.clear()
            await self._kubelet.register(path.name, self.resource, self._options_now)
            _LOG.info("%s is registered with the kubelet", self.resource)
            self.registered.set()
            self._on_change()
            while (_identity(self._kubelet.socket), _identity(path)) == (kubelet, own):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._lost.wait()
                        break
            _LOG.info(
                "the kubelet no longer reads the devices of %s: it registers again", self.resource
            )
        finally:
            await server.stop(grace=None)
            path.unlink(missing_ok=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        def unary(method: Any, kind: Any) -> "grpc.RpcMethodHandler[Any, Any]":
            return grpc.unary_unary_rpc_method_handler(method, kind.FromString, client.serialize)

        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": unary(self._options, api.Empty),
                "Allocate": unary(self._allocate, api.AllocateRequest),
                "PreStartContainer": unary(self._prestart, api.PreStartContainerRequest),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list, api.Empty.FromString, client.serialize
                ),
            },
        )

    @property
    def _options_now(self) -> api.DevicePluginOptions:
        return api.DevicePluginOptions(pre_start_required=self._leases is not None)

    async def _options(self, _: Any, __: Any) -> api.DevicePluginOptions:
        return self._options_now

    async def _list(self, _: Any, __: Any) -> AsyncIterator[api.ListAndWatchResponse]:
        sent = 0
        self._readers += 1
        reader = self._readers
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda last=sent: self._version != last)  # type: ignore[misc]
                    sent, devices = self._version, self.devices
                yield client.listing(devices)
                # The next list was requested: this one is on its way.
                self.listed.set()
                self._on_change()
        finally:
            # A stream of before the last registration may end after the new one has begun.
            if reader == self._readers:
                self.listed.clear()
                self._lost.set()
                self._on_change()

    async def _allocate(self, request: api.AllocateRequest, _: Any) -> api.AllocateResponse:
        """Decide nothing: while the kubelet admits a pod, nothing says yet which pod it is."""
        _LOG.debug("the kubelet allocates %s: %s", self.resource, request.container_requests)
        if self._leases is None:
            empty = [api.ContainerAllocateResponse() for _ in request.container_requests]
            return api.AllocateResponse(container_responses=empty)
        return api.AllocateResponse(
            container_responses=[
                self._answer(await self._leases.allocate(self.resource, container.devices_ids))
                for container in request.container_requests
            ]
        )

    @staticmethod
    def _answer(token: str) -> api.ContainerAllocateResponse:
        return api.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": "void"},
            cdi_devices=[api.CDIDevice(name=f"{client.LEASE_KIND}={token}")],
        )

    async def _prestart(
        self, request: api.PreStartContainerRequest, context: Any
    ) -> api.PreStartContainerResponse:
        if self._leases is None:
            return api.PreStartContainerResponse()
        try:
            await self._leases.prepare(self.resource, request.devices_ids)
        except StartDenied as error:
            _LOG.debug("a container with %s is refused: %s", self.resource, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return api.PreStartContainerResponse()


def _remove_dead(directory: Path, pattern: str) -> None:
    """Remove the sockets of killed predecessors. One that still answers is about to end by itself."""
    for path in directory.glob(pattern):
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
            contextlib.suppress(OSError),
        ):
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _identity(path: Path) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        # The inode of a removed socket is soon reused.
        return status.st_dev, status.st_ino, status.st_ctime_ns
    return None


@dataclass(frozen=True, slots=True)
class AllocatedIds:
    """A container's IDs and the slices that they stand for; no slices until the lease is bound."""

    ids: tuple[str, ...]
    slices: tuple[Slice, ...] = ()


def device_list(
    cards: Sequence[Card],
    units: Mapping[DeviceId, int],
    allocated: Sequence[AllocatedIds],
    unavailable: Collection[str],
    unhealthy_instances: Collection[str] = (),
) -> list[tuple[str, bool]]:
    """Return all IDs of a resource, each with whether it is healthy.

    IDs are interchangeable and name no card. An unavailable card removes as many free IDs as it has units.

    Of an unhealthy card the allocated IDs are unhealthy, and as many free IDs as it has other units. Of a
    cordoned or unavailable card only the free IDs are.

    Args:
        cards: The node's cards.
        units: Units of the resource per card, by UUID.
        allocated: What containers hold.
        unavailable: UUIDs of cards that give no slices now.
        unhealthy_instances: MIG instances by their place.
    """
    ids = [client.unit_id(number) for number in range(sum(units[card.uuid] for card in cards))]
    in_use = {device for container in allocated for device in container.ids}
    free = [device for device in ids if device not in in_use]
    unhealthy = {id_ for place in unhealthy_instances for id_ in _ids_on(place, allocated)}
    reserved = 0
    for card in cards:
        if card.healthy and not card.cordoned and card.uuid not in unavailable:
            continue
        on_card = _ids_on(card.uuid, allocated)
        reserved += max(units[card.uuid] - len(on_card), 0)
        if not card.healthy:
            unhealthy |= on_card
    unhealthy.update(free[max(len(free) - reserved, 0) :])
    return [(device, device not in unhealthy) for device in ids]


def _ids_on(uuid: str, allocated: Iterable[AllocatedIds]) -> set[str]:
    """Return the allocated IDs of a card, or of an instance by its place.

    Each slice of a container has its part of the IDs, in order.
    """
    ids: set[str] = set()
    for container in allocated:
        part = len(container.ids) // max(len(container.slices), 1)
        for number, piece in enumerate(container.slices):
            if uuid in (piece.uuid, piece.card_uuid):
                ids.update(container.ids[number * part : (number + 1) * part])
    return ids


def whole(cards: Sequence[Card], allocated: Collection[str]) -> list[tuple[str, bool]]:
    """Return all cards by UUID, each with whether it is healthy.

    Cordoned cards are unhealthy unless they are allocated already.
    """
    return [
        (card.uuid, card.healthy and (card.uuid in allocated or not card.cordoned))
        for card in cards
    ]
