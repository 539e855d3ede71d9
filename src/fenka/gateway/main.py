"""`fenka gateway`: serves until the process is told to stop, then finishes what it has begun."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.units import MIB
from fenka.gateway.dispatcher import BufferLimits, ReplicaTimeouts
from fenka.gateway.endpoints import EndpointSource
from fenka.gateway.metrics import GatewayMetrics
from fenka.gateway.server import Gateway, GatewayLimits, listening_socket, raise_descriptor_limit
from fenka.isolation.lease_files import open_regular_file
from fenka.jobs.routing_table import NAME, InvalidTable, RoutingTable, decode
from fenka.kubernetes.api_client import Api
from fenka.server.listener import listening_socket as admin_socket
from fenka.server.probes import serve_probes
from fenka.server.program import Kubeconfig, stop_requests, working_until

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks at the file."""
MAX_BYTES = 4 * MIB


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


INTERVAL_S = 10.0
"""Between two lines of one kind."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LoopErrors:
    """An event loop's exception handler.

    Of each kind one line is logged in a while.

    asyncio reports each connection that cannot be accepted, with a traceback, and tries again in a second.
    """

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}
        self._suppressed = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log an error, or count it if one of its kind was logged just now."""
        why = context.get("exception")
        exhausted = isinstance(why, OSError) and why.errno in _EXHAUSTED
        kind = f"{type(why).__name__} {getattr(why, 'errno', '')}"
        now = loop.time()
        if now < self._logged_at.get(kind, -INTERVAL_S) + INTERVAL_S:
            self._suppressed += 1
            return
        self._logged_at[kind] = now
        more = f" ({self._suppressed} more errors were not logged)" if self._suppressed else ""
        self._suppressed = 0
        if exhausted:
            assert isinstance(why, OSError)
            reason = os.strerror(why.errno or 0)
            log.error("clients have to wait: no connection can be accepted: %s%s", reason, more)
        else:
            log.error("%s%s", context.get("message", "error"), more, exc_info=why)


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
            await stack.enter_async_context(
                serve_probes(listening, lambda: gateway.problem, metrics.text)
            )
        await stack.enter_async_context(gateway.serve(options.sockets()))
        async with working_until(stop, source.follow()):
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
