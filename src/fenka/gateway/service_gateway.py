"""A gateway: Envoy in front of a service's replicas, and requests that wait while it has none."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from fenka.gateway import envoy_config
from fenka.gateway.envoy_binary import EnvoyUnavailable
from fenka.gateway.envoy_config import Config
from fenka.gateway.envoy_process import POLL_S, EnvoyProcess
from fenka.gateway.held_requests import HeldRequests
from fenka.jobs.routing_table import RoutingTable

TRIED = 32
"""Replicas to which a connection is tried at a time."""
CONNECT_S = 1.0
"""For a connection that is tried."""


@dataclass(slots=True)
class ServiceGateway:
    """The gateway of one service.

    Attributes:
        envoy: What carries the bytes.
        held: The requests that wait.
        ports: The names of the replicas' ports, in the order of the configuration.
        table: The replicas; None if they are not known yet.
        used_table: The table that Envoy uses.
        draining: It ends, and clients should go elsewhere.
    """

    envoy: EnvoyProcess
    held: HeldRequests
    ports: tuple[str, ...]
    table: RoutingTable | None = None
    used_table: RoutingTable | None = None
    draining: bool = False
    _version: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def problem(self) -> str:
        """Return why it is not ready, empty if it is: from its first table until it drains."""
        if self.draining:
            return "the gateway ends"
        if self.table is None:
            return "the replicas are not known yet"
        return "" if self.envoy.running else "Envoy does not run"

    def update(self, table: RoutingTable | None) -> None:
        """Replace the table. Raises OSError."""
        self._version += 1
        for index, port in enumerate(self.ports):
            content = envoy_config.endpoints(table, port, index, str(self._version))
            self.envoy.write(envoy_config.endpoint_file(index), content)
        self.table = table
        self._changed.set()

    async def run(self) -> None:
        """Run Envoy, and release requests that wait, until cancelled. Raises EnvoyUnavailable."""
        await asyncio.gather(self.envoy.run(), self._follow_tables(), self._release())

    async def _follow_tables(self) -> None:
        """Note which table Envoy uses."""
        while True:
            await self._changed.wait()
            table, version = self.table, str(self._version)
            with contextlib.suppress(EnvoyUnavailable):
                used = await self.envoy.endpoint_versions()
                if all(used.get(port) == version for port in self.ports):
                    self.used_table = table
                    if version == str(self._version):
                        self._changed.clear()
            await asyncio.sleep(POLL_S)

    async def _release(self) -> None:
        """Let requests go on once Envoy has a replica for them."""
        while True:
            await self.held.arrived.wait()
            with contextlib.suppress(EnvoyUnavailable):
                accepting = envoy_config.accepting(await self.envoy.clusters())
                for port in self.held.ports():
                    if await _any_connects(accepting.get(port, [])):
                        self.held.release({port})
            await asyncio.sleep(POLL_S)

    # --- its end ------------------------------------------------------------------------------------

    async def announce_end(self) -> None:
        """Have clients close their connections after their next response. New ones are still accepted."""
        self.draining = True
        with contextlib.suppress(EnvoyUnavailable):
            await self.envoy.command("/healthcheck/fail")

    async def drain(self) -> None:
        """Accept no more connections, and return after the last request."""
        with contextlib.suppress(EnvoyUnavailable):
            await self.envoy.refuse_connections()
            while await self.envoy.active_requests():
                await asyncio.sleep(POLL_S)


async def _any_connects(addresses: Sequence[Config]) -> bool:
    """Return whether a replica accepts connections.

    Otherwise a request would go from one that does not to the next, and then wait again as if it were new.
    """
    tried = random.sample(addresses, min(TRIED, len(addresses)))
    return any(await asyncio.gather(*map(_connects, tried)))


async def _connects(address: Config) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            if "pipe" in address:
                _, writer = await asyncio.open_unix_connection(address["pipe"]["path"])
            else:
                place = address["socket_address"]
                _, writer = await asyncio.open_connection(place["address"], place["port_value"])
            writer.close()
            return True
    return False
