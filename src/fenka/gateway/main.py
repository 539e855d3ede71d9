"""`fenka gateway`: serves until the process is told to stop, then finishes what it has begun."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.gateway.buffer import MIB, BufferLimits
from fenka.gateway.dispatcher import ReplicaTimeouts
from fenka.gateway.endpoint_source import EndpointSource
from fenka.gateway.loop_errors import LoopErrors
from fenka.gateway.metrics import GatewayMetrics, admin_app
from fenka.gateway.server import (
    Gateway,
    GatewayLimits,
    listening_socket,
    raise_descriptor_limit,
)
from fenka.gateway.table_file import TableFile
from fenka.jobs.routing_table import NAME
from fenka.kubernetes.client import Api
from fenka.kubernetes.http_listener import MAX_READERS, HttpListener, serve_app
from fenka.kubernetes.http_listener import listening_socket as admin_socket
from fenka.kubernetes.program_lifetime import stop_requests


class InvalidOptions(FenkaError):
    """An option is invalid."""

    exit_code = INVALID_INPUT


class GatewayOptions(msgspec.Struct, frozen=True):
    """Options of `fenka gateway`."""

    listen: Annotated[
        list[str],
        Meta(
            title="NAME=ADDRESS:PORT",
            description="where to listen for the replicas' port of this name; fd:N for an open socket",
        ),
    ]
    table: Annotated[Path | None, Meta(title="FILE", description="file with the routing table")] = (
        None
    )
    service: Annotated[
        str, Meta(title="NAME", description="follow this service on Kubernetes instead")
    ] = ""
    namespace: Annotated[str, Meta(title="NAME", description="the service's namespace")] = "default"
    kubeconfig: Annotated[
        Path | None,
        Meta(
            title="FILE",
            description="default: the pod's service account, then $KUBECONFIG, then ~/.kube/config",
        ),
    ] = None
    admin: Annotated[
        str, Meta(title="ADDRESS:PORT", description="serve /metrics, /healthz and /readyz")
    ] = ""
    wait: Annotated[
        float, Meta(title="SECONDS", description="how long a request waits for a replica", gt=0)
    ] = 60.0
    buffer: Annotated[int, Meta(title="N", description="number of requests that wait", ge=0)] = 1000
    buffer_mib: Annotated[
        int, Meta(title="MIB", description="memory of requests that wait", ge=0)
    ] = 64
    response_timeout: Annotated[
        float,
        Meta(title="SECONDS", description="limit from request to the head of its response", gt=0),
    ] = 300.0
    linger: Annotated[
        float,
        Meta(
            title="SECONDS",
            description="accept connections after SIGTERM: Services learn of it late",
            ge=0,
        ),
    ] = 0.0
    grace: Annotated[
        float, Meta(title="SECONDS", description="limit of finishing requests at the end", ge=0)
    ] = 30.0

    def limits(self) -> GatewayLimits:
        """Return the limits of the gateway."""
        return GatewayLimits(
            BufferLimits(self.buffer, self.buffer_mib * MIB, self.wait),
            ReplicaTimeouts(response_s=self.response_timeout),
        )

    def sockets(self) -> dict[str, socket.socket]:
        """Return the listening sockets by name. Raises InvalidOptions, and OSError if a port is in use."""
        places = [entry.partition("=") for entry in self.listen]
        names = [name for name, _, _ in places]
        for name, text in zip(names, self.listen, strict=True):
            if not NAME.fullmatch(name) or names.count(name) > 1:
                raise InvalidOptions(
                    f"invalid --listen {text[:80]!r}: expected NAME=ADDRESS:PORT, each name once"
                )
        return {
            name: _inherited("--listen", place) or listening_socket(*_address("--listen", place))
            for name, _, place in places
        }


async def serve(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT, then finish requests.

    Raises:
        ApiUnreachable: There is no configuration of the cluster.
        InvalidTable: The routing table is invalid.
        InvalidOptions: An option is invalid.
        OSError: The table cannot be read, or a port is in use.
    """
    stop = stop_requests()
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    raise_descriptor_limit()
    gateway = Gateway(options.limits())
    async with contextlib.AsyncExitStack() as stack:
        source = await _source(options, gateway, stack)
        if options.admin:
            metrics = GatewayMetrics(gateway, lambda: source.error is None)
            inherited = _inherited("--admin", options.admin)
            listening = inherited or admin_socket(*_address("--admin", options.admin))
            readers = HttpListener(max_connections=MAX_READERS)
            await stack.enter_async_context(
                serve_app(admin_app(gateway, metrics), listening, readers)
            )
        await stack.enter_async_context(gateway.serve(options.sockets()))
        following = asyncio.create_task(source.follow())
        stack.callback(following.cancel)
        await stop.wait()
        gateway.clients.draining = True
        await asyncio.sleep(options.linger)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.grace):
                await gateway.drain()


async def _source(
    options: GatewayOptions, gateway: Gateway, stack: contextlib.AsyncExitStack
) -> TableFile | EndpointSource:
    """Return what has the routing table."""
    update = gateway.dispatcher.update
    if options.table is not None and not options.service:
        file = TableFile(options.table, update)
        file.read()
        return file
    if options.table is not None or not options.service:
        raise InvalidOptions("use either --table FILE or --service NAME")
    api = await stack.enter_async_context(await Api.connect(options.kubeconfig))
    return EndpointSource(api, options.namespace, options.service, update)


def _inherited(option: str, text: str) -> socket.socket | None:
    """Return the listening socket of `fd:N`, which the process was started with; None for an address."""
    if not text.startswith("fd:"):
        return None
    try:
        return socket.socket(fileno=int(text.removeprefix("fd:")))
    except (OSError, ValueError):
        raise InvalidOptions(f"invalid {option} {text[:80]!r}: no open socket") from None


def _address(option: str, text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise InvalidOptions(f"invalid {option} {text[:80]!r}: expected ADDRESS:PORT")
    return host.strip("[]"), int(port)
