"""Programs of the chart. Each function returns its command, and imports no other program."""

import asyncio
from collections.abc import Callable, Coroutine

from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.server.program import LogLevel, start_log


def scheduler() -> Callable[..., None]:
    """Return the extender of a cluster's kube-scheduler."""
    from fenka.core.policies.scores import SCORES
    from fenka.scheduler.main import ServerOptions, serve
    from fenka.scheduler.replica import Settings

    def run(server: ServerOptions, settings: Settings) -> None:
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
        settings.options()
        _serve(serve(server, settings), server.log_level)

    return run


def node() -> Callable[..., None]:
    """Return the program on every GPU node of a cluster."""
    from fenka.cli.admin import node_process
    from fenka.node.config import NodeConfig

    def run(config: NodeConfig) -> None:
        node_process.start("node_process", config)

    return run


def plugin_relay() -> Callable[..., None]:
    """Return the program that stays registered with the kubelet while the node program restarts."""
    from fenka.cli.admin import node_process
    from fenka.node.config import RelayConfig

    def run(config: RelayConfig) -> None:
        node_process.start("relay_process", config)

    return run


def gateway() -> Callable[..., None]:
    """Return the address of a service whose replicas come and go."""
    from fenka.gateway.main import GatewayOptions, serve

    def run(options: GatewayOptions) -> None:
        _serve(serve(options), options.log_level)

    return run


def _serve(program: Coroutine[object, object, None], level: LogLevel) -> None:
    """Run a program until SIGTERM or SIGINT."""
    start_log(level)
    asyncio.run(program)
