"""One resource towards the kubelet: registered whenever the kubelet is there, answered from the agent."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from fenka.node.kubelet import deviceplugin_pb2 as api
from fenka.node.kubelet.client import LEASE_KIND, Kubelet, KubeletUnavailable, listing
from fenka.node.lease.resolve import LeaseDenied

_LOG = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at whether the kubelet was restarted; it removes all plugins' sockets then."""


class Lessor(Protocol):
    """Whoever gives leases."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> str:
        """A token for these ids. Raises OSError."""

    async def prepare(self, resource: str, ids: Sequence[str]) -> None:
        """Have the lease of whoever holds these ids, before a container starts. Raises LeaseDenied."""


class Plugin:
    """A device plugin for one resource. endpoint: its sockets, beside the kubelet's, begin so.

    lessor: None for a resource that is only counted, and comes along with another that brings the lease.
    """

    def __init__(
        self, resource: str, endpoint: str, kubelet: Kubelet, lessor: Lessor | None
    ) -> None:
        self.resource = resource
        self._endpoint, self._kubelet, self._lessor = endpoint, kubelet, lessor
        self._devices: list[tuple[str, bool]] = []
        self._offers = 0
        self._offered = asyncio.Condition()
        self.registered = asyncio.Event()
        """Set while the kubelet knows of us, as far as can be told."""
        self.told = asyncio.Event()
        """Set while the kubelet knows our devices besides."""
        self.changed: Callable[[], object] = lambda: None
        """Called when that changes."""

    @property
    def devices(self) -> list[tuple[str, bool]]:
        """What is offered now: ids, and whether they can be used."""
        return self._devices

    async def offer(self, devices: list[tuple[str, bool]], *, remembered: bool = False) -> None:
        """Have the kubelet know these devices. A resource that never had one is not registered, unless the
        kubelet still remembers some that a former process offered: it must hear that there are none."""
        if devices == self._devices and not (remembered and self._offers == 0):
            return
        async with self._offered:
            self._devices = devices
            self._offers += 1
            self._offered.notify_all()

    async def run(self) -> None:
        """Serve until cancelled, and register again whenever the kubelet has been restarted."""
        async with self._offered:
            await self._offered.wait_for(lambda: self._offers > 0)
        quiet = False
        while True:
            try:
                await self._serve()
                quiet = False
            except (KubeletUnavailable, OSError, RuntimeError) as why:
                # Its absence is ordinary, and not worth a line every second.
                _LOG.log(
                    logging.DEBUG if quiet else logging.WARNING,
                    "%s is not registered: %s",
                    self.resource,
                    why,
                )
                quiet = True
            finally:
                self.registered.clear()
                self.told.clear()
                self.changed()
            await asyncio.sleep(LOOK_S)

    async def _serve(self) -> None:
        # A name of its own each time: kubelet 1.37, asked again under one whose last owner it has not seen
        # end yet, refuses it from then on, until it is restarted ("device plugin already connected").
        path = self._kubelet.plugins / f"{self._endpoint}-{secrets.token_hex(4)}.sock"
        kubelet = _identity(self._kubelet.socket)
        if kubelet is None:
            raise KubeletUnavailable(f"there is no {self._kubelet.socket}")
        _remove_dead(self._kubelet.plugins, f"{self._endpoint}*.sock")
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix://{path}")
        await server.start()
        try:
            mine = _identity(path)
            await self._kubelet.register(path.name, self.resource, self._options_now)
            _LOG.info("%s is registered with the kubelet", self.resource)
            self.registered.set()
            while (_identity(self._kubelet.socket), _identity(path)) == (kubelet, mine):
                await asyncio.sleep(LOOK_S)
            _LOG.info("the kubelet was restarted: %s registers again", self.resource)
        finally:
            await server.stop(grace=None)
            path.unlink(missing_ok=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        def unary(method: Any, kind: Any) -> "grpc.RpcMethodHandler[Any, Any]":
            return grpc.unary_unary_rpc_method_handler(method, kind.FromString, _serialize)

        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": unary(self._options, api.Empty),
                "GetPreferredAllocation": unary(self._prefer, api.PreferredAllocationRequest),
                "Allocate": unary(self._allocate, api.AllocateRequest),
                "PreStartContainer": unary(self._prestart, api.PreStartContainerRequest),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list, api.Empty.FromString, _serialize
                ),
            },
        )

    @property
    def _options_now(self) -> api.DevicePluginOptions:
        return api.DevicePluginOptions(pre_start_required=self._lessor is not None)

    async def _options(self, _: Any, __: Any) -> api.DevicePluginOptions:
        return self._options_now

    async def _prefer(self, _: Any, __: Any) -> api.PreferredAllocationResponse:
        return api.PreferredAllocationResponse()

    async def _list(self, _: Any, __: Any) -> AsyncIterator[api.ListAndWatchResponse]:
        seen = 0
        while True:
            async with self._offered:
                await self._offered.wait_for(lambda last=seen: self._offers != last)  # type: ignore[misc]
                seen, devices = self._offers, self._devices
            yield listing(devices)
            # Asked for the next one: this one is on its way.
            self.told.set()
            self.changed()

    async def _allocate(self, request: api.AllocateRequest, _: Any) -> api.AllocateResponse:
        """Decides nothing: it runs inside the kubelet's admission of a pod, before anybody can tell whose."""
        if self._lessor is None:
            empty = [api.ContainerAllocateResponse() for _ in request.container_requests]
            return api.AllocateResponse(container_responses=empty)
        return api.AllocateResponse(
            container_responses=[
                self._answer(await self._lessor.allocate(self.resource, wanted.devices_ids))
                for wanted in request.container_requests
            ]
        )

    @staticmethod
    def _answer(token: str) -> api.ContainerAllocateResponse:
        return api.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": "void"},
            cdi_devices=[api.CDIDevice(name=f"{LEASE_KIND}={token}")],
        )

    async def _prestart(
        self, request: api.PreStartContainerRequest, context: Any
    ) -> api.PreStartContainerResponse:
        if self._lessor is None:
            return api.PreStartContainerResponse()
        try:
            await self._lessor.prepare(self.resource, request.devices_ids)
        except LeaseDenied as why:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(why))
        return api.PreStartContainerResponse()


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _remove_dead(directory: Path, pattern: str) -> None:
    """Sockets of predecessors that were killed. One that still answers is about to end by itself."""
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
        found = path.stat()
        # The inode of a removed socket is soon used again.
        return found.st_dev, found.st_ino, found.st_ctime_ns
    return None
