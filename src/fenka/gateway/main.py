"""`fenka gateway`: serves until the process is told to stop, then finishes what it has begun."""

import asyncio
import contextlib
import logging
import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.units import MIB
from fenka.gateway import client_sockets, envoy_config
from fenka.gateway.client_sockets import ConnectionRelay
from fenka.gateway.endpoints import EndpointSource
from fenka.gateway.envoy_binary import find_envoy
from fenka.gateway.envoy_config import EnvoySettings
from fenka.gateway.envoy_process import EnvoyProcess, raise_descriptor_limit
from fenka.gateway.held_requests import HeldRequests
from fenka.gateway.metrics import GatewayMetrics
from fenka.gateway.service_gateway import ServiceGateway
from fenka.gateway.service_scaling import ScalingMetrics, ServiceScaling, scaling_of
from fenka.isolation.lease_files import open_regular_file
from fenka.jobs.routing_table import NAME, InvalidTable, RoutingTable, decode
from fenka.kubernetes.api_client import Api
from fenka.server.listener import listening_socket as admin_socket
from fenka.server.pod_spans import Traces
from fenka.server.probes import serve_probes
from fenka.server.program import Kubeconfig, LogLevel, ReplicaName, stop_requests, working_until

log = logging.getLogger(__name__)

HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]{0,250}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")

POLL_S = 0.2
"""Between two looks at the file."""
MAX_BYTES = 4 * MIB
SPARE_DESCRIPTORS = 64
"""For files, and for Envoy's administration."""


class TableFile:
    """The table in a file.

    The file is replaced by rename, so it is always complete. An invalid table is reported, and the last
    valid one stays: a gateway goes on with what it has.

    Attributes:
        error: Why the newest table is not used; None if it is.
    """

    def __init__(self, path: Path, apply: Callable[[RoutingTable], None]) -> None:
        """apply: gets each table that is new."""
        self._path, self._apply = path, apply
        self._seen: tuple[int, int, int] | None = None
        self.error: str | None = None

    def read(self) -> None:
        """Apply the table if it has changed. Raises InvalidTable and OSError, once for each change."""
        with open_regular_file(self._path, follow_link=True) as file:
            status = os.fstat(file.fileno())
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            if seen == self._seen:
                return
            self._seen = seen
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InvalidTable(f"the routing table exceeds {MAX_BYTES // MIB} MiB")
        self._apply(decode(text))
        log.debug("%s has a new routing table", self._path)
        self.error = None

    async def follow(self) -> None:
        """Apply each new table until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self.read()
            except (InvalidTable, OSError) as error:
                if str(error) != self.error:
                    log.warning("the last routing table stays in use: %s: %s", self._path, error)
                self.error = str(error)


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
    kubeconfig: Kubeconfig = None
    admin: Annotated[
        str, Meta(title="ADDRESS:PORT", description="serve /metrics, /healthz and /readyz")
    ] = ""
    pod: ReplicaName = ""
    scaler: Annotated[
        str,
        Meta(title="ADDRESS:PORT", description="with --service: serve its load to KEDA, by gRPC"),
    ] = ""
    wait: Annotated[
        float, Meta(title="SECONDS", description="how long a request waits for a replica", gt=0)
    ] = 60.0
    buffer: Annotated[int, Meta(title="N", description="number of requests that wait", ge=0)] = 1000
    memory_mib: Annotated[int, Meta(title="MIB", description="Envoy's memory at most", ge=128)] = (
        768
    )
    response_timeout: Annotated[
        float,
        Meta(title="SECONDS", description="limit from request to the head of its response", gt=0),
    ] = 300.0
    directory: Annotated[
        Path | None,
        Meta(title="DIR", description="Envoy's files and sockets; default: a temporary directory"),
    ] = None
    linger: Annotated[
        float,
        Meta(
            title="SECONDS",
            description="accept connections after SIGTERM: Services learn of it late",
            ge=0,
        ),
    ] = 0.0
    host: Annotated[
        list[str],
        Meta(
            title="NAME",
            description="host name that clients use, *.NAME for all below NAME; others get 421; default: any",
        ),
    ] = []
    traces: Traces = ""
    log_level: LogLevel = "info"
    grace: Annotated[
        float, Meta(title="SECONDS", description="limit of finishing requests at the end", ge=0)
    ] = 30.0

    def settings(self, descriptors: int) -> EnvoySettings:
        """Return Envoy's settings. descriptors: how many the process may have."""
        # Each connection of a client may need another one to a replica, or two while it waits.
        connections = max(1, (descriptors - SPARE_DESCRIPTORS) // 2)
        memory_bytes = self.memory_mib * MIB
        return EnvoySettings(
            self.wait,
            self.response_timeout,
            connections,
            memory_bytes,
            self.traces,
            self.service,
            self.hosts(),
        )

    def hosts(self) -> tuple[str, ...]:
        """Return the host names that clients may use; none for any. Raises InvalidOptions."""
        for name in self.host:
            if not HOST.fullmatch(name):
                raise InvalidOptions(
                    f"invalid --host {name[:80]!r}: expected a host name without a port, or *.NAME"
                )
        return tuple(dict.fromkeys(name.lower() for name in self.host))

    def sockets(self) -> dict[str, socket.socket]:
        """Return the listening sockets by name. Raises InvalidOptions, and OSError if a port is in use."""
        places = [entry.partition("=") for entry in self.listen]
        names = [name for name, _, _ in places]
        for name, text in zip(names, self.listen, strict=True):
            if not NAME.fullmatch(name) or names.count(name) > 1:
                raise InvalidOptions(
                    f"invalid --listen {text[:80]!r}: expected NAME=ADDRESS:PORT, each name once"
                )
        return {name: _listener(place) for name, _, place in places}


async def serve(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT, then finish requests.

    Raises:
        ApiUnreachable: There is no configuration of the cluster.
        EnvoyUnavailable: Envoy is not there, or does not start.
        InvalidTable: The routing table is invalid.
        InvalidOptions, InvalidTraces: An option is invalid.
        OSError: The table cannot be read, or a port is in use.
    """
    stop = stop_requests()
    async with contextlib.AsyncExitStack() as stack:
        gateway = await assemble(options, stack)
        source = await _source(options, gateway, stack)
        scaling: ServiceScaling | None = None
        if isinstance(source, EndpointSource):
            scaling = await stack.enter_async_context(
                scaling_of(source, options.pod, options.scaler)
            )
        if options.admin:
            metrics = GatewayMetrics(gateway, lambda: source.error is None)
            if scaling is not None:
                ScalingMetrics(scaling, metrics.registry)
            inherited = _inherited("--admin", options.admin)
            listening = inherited or admin_socket(*_address("--admin", options.admin))
            await stack.enter_async_context(
                serve_probes(listening, lambda: gateway.problem, metrics.text, metrics.refresh)
            )
        work = [gateway.run(), source.follow()]
        if scaling is not None:
            work.append(scaling.follow())
        async with working_until(stop, *work):
            await gateway.announce_end()
            await asyncio.sleep(options.linger)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.grace):
                    await gateway.drain()


async def assemble(options: GatewayOptions, stack: contextlib.AsyncExitStack) -> ServiceGateway:
    """Return the gateway, which has no replicas yet and does not run yet."""
    settings = options.settings(raise_descriptor_limit())
    binary, sockets = find_envoy(), options.sockets()
    for listener in sockets.values():
        stack.enter_context(listener)
    addresses = {name: listener.getsockname()[:2] for name, listener in sockets.items()}
    directory = _directory(options.directory, stack)
    path = Path(f"/proc/self/fd/{directory}")
    ports = tuple(addresses)
    relay = ConnectionRelay(
        sockets, lambda port: path / envoy_config.relay_socket(ports.index(port))
    )
    config = envoy_config.bootstrap(addresses, settings)
    held = HeldRequests(options.buffer, options.wait)
    runner = await held.serve(path / envoy_config.HELD_SOCKET)
    stack.push_async_callback(runner.cleanup)
    gateway = ServiceGateway(EnvoyProcess(binary, directory, config, relay), held, ports)
    gateway.update(None)
    return gateway


def _directory(wanted: Path | None, stack: contextlib.AsyncExitStack) -> int:
    """Return a descriptor of the directory for Envoy's files. Raises InvalidOptions, OSError."""
    if wanted is None:
        wanted = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fenka-gateway-")))
    wanted.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(wanted, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidOptions(
            f"--directory {wanted}: other users may enter it, and could control Envoy: chmod 700 {wanted}"
        )
    return descriptor


async def _source(
    options: GatewayOptions, gateway: ServiceGateway, stack: contextlib.AsyncExitStack
) -> TableFile | EndpointSource:
    """Return what has the routing table."""
    if options.table is not None and not options.service:
        file = TableFile(options.table, gateway.update)
        file.read()
        return file
    if options.table is not None or not options.service:
        raise InvalidOptions("use either --table FILE or --service NAME")
    api = await stack.enter_async_context(await Api.connect(options.kubeconfig))
    return EndpointSource(api, options.namespace, options.service, gateway.update)


def _listener(place: str) -> socket.socket:
    """Return the socket on which clients connect. Raises InvalidOptions, OSError."""
    inherited = _inherited("--listen", place)
    if inherited is None:
        return client_sockets.listen(*_address("--listen", place))
    client_sockets.share(inherited)
    return inherited


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
