"""`fenka dashboard`: a page in the browser with cards, queue and programs of this machine or a cluster."""

import os
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

import typer

from fenka.cli.common_options import Target, cluster_configured
from fenka.cli.world import snapshot_here
from fenka.dashboard.main import (
    Auth,
    CannotServe,
    DashboardOptions,
    serve,
    serve_cluster,
    write_launcher,
)
from fenka.dashboard.usage_meter import MeterOptions
from fenka.server.loopback_name import tunnel_sentence
from fenka.workstation.client import DaemonUnavailable


@dataclass(frozen=True, slots=True)
class SignInOptions:
    """How viewers of a cluster sign in."""

    ONLY_OF_CLUSTER: ClassVar = True

    auth: Annotated[
        Auth,
        typer.Option(
            "--auth",
            help="of a cluster: none: whoever reaches the server may look; kubernetes: with a token of the "
            "cluster; proxy: as a proxy says",
        ),
    ] = "token"
    proxy_secret: Annotated[
        Path | None,
        typer.Option("--proxy-secret", metavar="FILE", help="has what only the proxy knows"),
    ] = None


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of the page that only a cluster has."""

    ONLY_OF_CLUSTER: ClassVar = True

    cluster_name: Annotated[
        str,
        typer.Option(
            "--cluster-name",
            metavar="NAME",
            help="a cluster's name on the page; default: the context, or the API server's address",
        ),
    ] = ""
    prometheus: Annotated[
        str, typer.Option("--prometheus", metavar="URL", help="a cluster's figures over time")
    ] = ""
    prometheus_token: Annotated[
        Path | None,
        typer.Option("--prometheus-token", metavar="FILE", help="has Prometheus' bearer token"),
    ] = None


def dashboard(
    target: Target,
    metering: MeterOptions,
    sign_in: SignInOptions,
    of_cluster: ClusterOptions,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=1,
            max=65535,
            help="default: a free one, drawn at random",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="IP address to listen on")
    ] = "127.0.0.1",
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="further name of this server, behind a proxy"),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="PATH", help="serve below this path, behind a proxy")
    ] = "/",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="nothing can be stopped or resized")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="open no browser")] = False,
) -> None:
    """Serve the page until Ctrl-C, and print its address. Raises CannotServe, OSError."""

    def announce(url: str, socket_path: Path | None) -> None:
        print(url, flush=True)
        if socket_path is not None:
            tunnel = tunnel_sentence(urlsplit(url).port or 0, str(socket_path))
            print(tunnel, file=sys.stderr, flush=True)
        if not no_open and _has_display():
            webbrowser.open(write_launcher(url).as_uri())

    options = DashboardOptions(
        *(port, listen, tuple(host or ()), prefix, read_only),
        auth=sign_in.auth,
        proxy_secret=sign_in.proxy_secret,
        prometheus=of_cluster.prometheus,
        prometheus_token=of_cluster.prometheus_token,
        cluster_name=of_cluster.cluster_name,
    )
    try:
        here = snapshot_here(target, required=not cluster_configured()) is not None
    except DaemonUnavailable as why:
        raise CannotServe(f"there is nothing to show: {why}") from None
    if here and metering.usage_file:
        raise CannotServe("--usage-file is of a cluster: this machine's daemon records its usage")
    if here:
        serve(options, announce)
    else:
        serve_cluster(options, target.kubeconfig, target.context, announce, metering)


def _has_display() -> bool:
    """Return whether a browser of its own window can be opened. One in the terminal would take that."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
