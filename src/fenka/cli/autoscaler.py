"""`fenka autoscaler`: buys and ends nodes; which new nodes pending requests need."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from fenka.autoscaler.options import AutoscalerOptions
from fenka.cli import tables
from fenka.cli.autoscaler_plan import from_file, plan, snapshot
from fenka.cli.errors import UserError
from fenka.cli.options import group, register, register_bare
from fenka.cloud.config_file import read_config
from fenka.cloud.required import check_required
from fenka.core.errors import INVALID_INPUT
from fenka.isolation.files import describe_os_error

SUMMARY = "Plan and operate elastic GPU nodes."

app = group(SUMMARY)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="follow the cluster, with this configuration"),
]


def autoscaler(options: AutoscalerOptions, config: ConfigOption = None) -> None:
    """Follow the cluster until SIGTERM or SIGINT. Raises UserError, InvalidConfig."""
    from fenka.autoscaler.main import serve

    if config is None:
        raise UserError("give --config FILE, or a command such as plan", INVALID_INPUT)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(config, options))
    except OSError as why:
        raise UserError(describe_os_error(why), INVALID_INPUT) from None


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the configuration, in YAML")],
) -> None:
    """Print what a configuration allows. Raises InvalidConfig, UserError."""
    config = from_file(read_config, file)
    check_required(config)
    offers = sum(len(group.types) * len(group.zones) for group in config.groups)
    most = sum(group.max for group in config.groups)
    nodes = most if config.limits.nodes is None else min(most, config.limits.nodes)
    tables.print_lines(
        [f"{file} is valid: {len(config.groups)} groups, {offers} offers, at most {nodes} nodes"]
    )


register_bare(app, autoscaler, SUMMARY)
register(app, plan, "Plan which new nodes pending requests need: of the cluster, or of a case.")
register(app, snapshot, "Print the case of the cluster, for `plan --case`.")
register(app, check, "Check a configuration, without a cluster.")
