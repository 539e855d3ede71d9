"""`fenka serve delete` and `fenka traffic-split`: withdraw versions and divide requests among them."""

from typing import Annotated

import typer

from fenka.cli.errors import UserError
from fenka.cli.serving.backend import VersionOption
from fenka.cli.serving.selection import open_services
from fenka.cli.tables import escape
from fenka.cli.training.backend import JobTarget
from fenka.core.errors import FenkaError
from fenka.jobs.service import parse_weights


def delete(
    target: JobTarget,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    version: VersionOption = "",
) -> None:
    """Delete services with all their versions, or one version."""
    backend, failures = open_services(target), []
    for name in dict.fromkeys(names):
        try:
            backend.delete(name, version)
        except FenkaError as why:
            failures.append(str(why))
        else:
            which = f"version {version} of service {name}" if version else f"service {name}"
            print(f"{escape(which)}: deleted")
    if failures:
        raise UserError("; ".join(failures))


def traffic_split(
    target: JobTarget,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="the service")],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "-v",
            "--version-weight",
            metavar="VERSION:WEIGHT",
            help="percent of the requests; may be repeated",
        ),
    ] = None,
    http_route: Annotated[
        str,
        typer.Option(
            "--http-route", metavar="NAME", help="by this HTTPRoute of the Gateway API instead"
        ),
    ] = "",
) -> None:
    """Divide a service's requests among its versions."""
    shares = parse_weights(weights or [])
    open_services(target).split(name, shares, http_route)
    text = ", ".join(f"{version} {weight}%" for version, weight in shares.items())
    print(f"{escape(name)}: {text}")
