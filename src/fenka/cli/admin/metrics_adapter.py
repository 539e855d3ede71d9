"""`fenka metrics-adapter`: figures of services for autoscalers."""

import asyncio
import logging

from fenka.metrics_adapter.main import AdapterOptions, serve


def metrics_adapter(options: AdapterOptions) -> None:
    """Serve the API server until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(options))
