"""Wires the relay of device plugins. It imports little, since every node runs it beside the node program."""

import asyncio
from collections.abc import Sequence

from fenka.node.config import STORE, RelayConfig
from fenka.node.kubelet.client import PLUGINS, Kubelet
from fenka.node.kubelet.relay import Relay
from fenka.node.lease.store import LeaseStore
from fenka.server.program import stop_requests, working_until


def run(config: RelayConfig) -> None:
    """Serve until told to stop."""
    asyncio.run(_serve(config))


async def _serve(config: RelayConfig) -> None:
    tokens = config.state / STORE

    async def issue(resource: str, ids: Sequence[str]) -> str:
        # A store of its own each time: the program removes tokens, and this process must not keep them.
        return (await asyncio.to_thread(LeaseStore(tokens).issue, resource, ids)).name

    config.directory.mkdir(parents=True, exist_ok=True)
    tokens.mkdir(parents=True, exist_ok=True)
    # Nothing here reads the pods of the kubelet.
    relay = Relay(Kubelet(PLUGINS, PLUGINS), config.directory, issue)
    async with working_until(stop_requests(), relay.run()):
        pass
