"""The process of the relay of device plugins, which `fenka plugin-relay` becomes as `fenka node` does."""

from fenka.cli.admin import node_process
from fenka.cli.error_report import report_errors
from fenka.node.config import RelayConfig
from fenka.server.program import start_log


def main() -> None:
    """Run the relay with the options of the first argument."""
    from fenka.node.relay_main import run

    config = node_process.options(RelayConfig)
    start_log(config.log_level, times=False)
    with report_errors():
        run(config)


if __name__ == "__main__":
    main()
