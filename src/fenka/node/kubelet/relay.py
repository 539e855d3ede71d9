"""The relay keeps the device plugins registered with the kubelet while the node program is away.

The kubelet reads each plugin's device list from a stream. When the stream breaks, the kubelet fails every pod
that it admits, for good, until the plugin has registered again. So a small process in a container of its own
owns the streams. The node program registers with it as with the kubelet, and gets the kubelet's calls. While
the program is away, the relay keeps its last device list, answers Allocate itself, and lets starts wait.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fenka.node.kubelet import client
from fenka.node.kubelet import messages_pb2 as api
from fenka.node.kubelet.plugin import Plugin, StartDenied

_LOG = logging.getLogger(__name__)

REGISTER_S = 4.0
"""How long the program's registration waits for the kubelet's. The program gives up after 5 s."""
ALLOCATE_S = 2.0
"""How long Allocate waits for the program. The kubelet admits no other pod meanwhile."""
START_S = 28.0
"""How long a container's start waits for the program. The kubelet gives up after 30 s."""
RETRY_S = 0.1
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes of calls to a program that is not there, or that ends meanwhile."""

Issue = Callable[[str, Sequence[str]], Awaitable[str]]
"""Stores a token for a resource's device IDs, and returns its name. Raises OSError."""


@dataclass(eq=False)
class RelayedResource:
    """A resource: its plugin for the kubelet, and the program's plugin behind it.

    Attributes:
        _issue: Stores tokens while the program is away.
        plugin: The plugin that the kubelet knows.
        _socket: The program's plugin; None while it is away.
        _known: Set while the kubelet reads the device list.
        _following: Reads the program's device list.
    """

    _issue: Issue
    plugin: Plugin = field(init=False)
    _socket: Path | None = None
    _present: asyncio.Event = field(default_factory=asyncio.Event)
    _known: asyncio.Event = field(default_factory=asyncio.Event)
    _following: "asyncio.Task[None] | None" = None

    def on_change(self) -> None:
        """Break the program's stream if the kubelet has broken this one, so that it registers again."""
        plugin = self.plugin
        if plugin.registered.is_set() and plugin.listed.is_set():
            self._known.set()
        elif self._known.is_set():
            self._known.clear()
            if self._following is not None:
                self._following.cancel()

    async def attach(self, socket: Path) -> None:
        """Relay to the program's plugin on this socket, and wait until the kubelet knows its devices."""
        if self._following is not None:
            self._following.cancel()
        self._following = asyncio.create_task(self._follow(socket))
        await self._known.wait()

    def end(self) -> None:
        """Stop relaying."""
        if self._following is not None:
            self._following.cancel()

    async def _follow(self, socket: Path) -> None:
        self._socket = socket
        self._present.set()
        try:
            async for devices in client.device_lists(socket):
                await self.plugin.advertise(devices, remembered=True)
        except grpc.aio.AioRpcError as error:
            _LOG.warning(
                "the node program is away, and pods with %s wait for it: %s",
                self.plugin.resource,
                error.details(),
            )
        finally:
            if self._socket == socket:
                self._socket = None
                self._present.clear()

    async def allocate(self, resource: str, ids: Sequence[str]) -> str:
        """Return a token of the program's, or one of the relay's own if the program does not answer."""
        request = api.AllocateRequest(
            container_requests=[api.ContainerAllocateRequest(devices_ids=ids)]
        )
        try:
            answer = await self._ask("Allocate", request, api.AllocateResponse, ALLOCATE_S)
            return client.token_of(answer.container_responses[0])
        except grpc.aio.AioRpcError as error:
            _LOG.info("the relay answers Allocate for %s: %s", resource, error.details())
        return await self._issue(resource, ids)

    async def prepare(self, resource: str, ids: Sequence[str]) -> None:
        """Have the program complete the lease. Wait while the program is away. Raises StartDenied."""
        _LOG.debug("a container with %s starts", resource)
        request = api.PreStartContainerRequest(devices_ids=ids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while True:
                    await self._present.wait()
                    try:
                        await self._ask(
                            "PreStartContainer", request, api.PreStartContainerResponse, START_S
                        )
                    except grpc.aio.AioRpcError as error:
                        if error.code() not in _AWAY:
                            raise StartDenied(error.details() or "") from None
                        await asyncio.sleep(RETRY_S)
                    else:
                        return
        raise StartDenied(
            "fenka: the node program on this node does not answer, and the start is repeated: see whether "
            "the node's pod fenka-node runs, and why it ended"
        )

    async def _ask(self, method: str, request: Any, kind: type[Any], timeout_s: float) -> Any:
        """Return the program's answer. Raises AioRpcError."""
        # A path that does not exist is UNAVAILABLE, as a program that has just ended.
        socket = self._socket or Path("/nonexistent")
        return await client.call(
            socket, f"/v1beta1.DevicePlugin/{method}", request, kind, timeout_s
        )


@dataclass(eq=False)
class Relay:
    """Takes registrations in a directory as the kubelet does in its own, and relays them.

    Attributes:
        _kubelet: The kubelet.
        _directory: Where the program registers. Nobody else may write there.
        _issue: Stores tokens while the program is away.
    """

    _kubelet: client.Kubelet
    _directory: Path
    _issue: Issue
    _resources: dict[str, RelayedResource] = field(default_factory=dict)
    _plugins: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def run(self) -> None:
        """Serve until cancelled."""
        socket = self._directory / "kubelet.sock"
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        # A killed predecessor's.
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix://{socket}")
        try:
            await server.start()
            await asyncio.Event().wait()
        finally:
            await server.stop(grace=None)
            for resource in self._resources.values():
                resource.end()
            for task in self._plugins:
                task.cancel()
            await asyncio.gather(*self._plugins, return_exceptions=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        register = grpc.unary_unary_rpc_method_handler(
            self._register, api.RegisterRequest.FromString, client.serialize
        )
        return grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": register})

    async def _register(self, request: api.RegisterRequest, context: Any) -> api.Empty:
        """Return when the kubelet knows the program's devices, so that the scheduler may send pods."""
        resource = self._resources.get(request.resource_name)
        if resource is None:
            resource = self._resources[request.resource_name] = self._relayed(request)
            self._plugins.append(asyncio.create_task(resource.plugin.run()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REGISTER_S):
                await resource.attach(self._directory / Path(request.endpoint).name)
                return api.Empty()
        await context.abort(
            grpc.StatusCode.UNAVAILABLE, f"the kubelet has not registered {request.resource_name}"
        )
        raise AssertionError

    def _relayed(self, request: api.RegisterRequest) -> RelayedResource:
        resource = RelayedResource(self._issue)
        prefix = request.endpoint.rpartition("-")[0]
        leases = resource if request.options.pre_start_required else None
        resource.plugin = Plugin(
            request.resource_name, prefix, self._kubelet, leases, resource.on_change
        )
        return resource
