"""`fenka scheduler`: the extender of a cluster's kube-scheduler."""

import asyncio
import logging

from fenka.cli.errors import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.core.evaluate import SCORES
from fenka.scheduler.main import ServerOptions, serve
from fenka.scheduler.replica import Settings


def scheduler(server: ServerOptions, settings: Settings) -> None:
    """Serve kube-scheduler until SIGTERM or SIGINT."""
    if not 0 < server.largest_body <= server.bodies:
        raise UserError(
            "--largest-body must be 1 MiB or more, and --bodies at least as much", INVALID_INPUT
        )
    if settings.policy not in SCORES:
        raise UserError(
            f"--policy must be {' or '.join(SCORES)}, not {settings.policy}", INVALID_INPUT
        )
    try:
        settings.fairness()
    except ValueError:
        raise UserError(
            "--queue-penalty, --queue-max-penalty and --half-life must be 0 or more seconds",
            INVALID_INPUT,
        ) from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(server, settings))
