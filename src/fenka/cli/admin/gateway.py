"""`fenka gateway`: the address of a service whose replicas come and go."""

import asyncio
import logging

from fenka.gateway.main import GatewayOptions, serve


def gateway(options: GatewayOptions) -> None:
    """Serve clients until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(options))
