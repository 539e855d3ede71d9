"""`fenka scheduler`: the extender of a cluster's kube-scheduler."""

import asyncio
import logging
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli.errors import UserError
from fenka.cli.options import HamiOption
from fenka.core.errors import INVALID_INPUT
from fenka.core.evaluate import SCORES
from fenka.core.fairness import Fairness
from fenka.scheduler.credentials import Credentials
from fenka.scheduler.main import ServerOptions, serve, url
from fenka.scheduler.replica import Settings
from fenka.scheduler.request_bodies import MIB, BodyLimits
from fenka.scheduler.server import Access


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Where to serve, and to whom."""

    address: Annotated[str, typer.Option(help="address to listen on")] = "0.0.0.0"
    port: Annotated[int, typer.Option(envvar="PORT", help="port to listen on")] = 12345
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="serve HTTPS with these certificates, to callers with one of the same authority",
        ),
    ] = None
    read_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="serve read-only requests over HTTP to everybody"),
    ] = None
    inspect: Annotated[bool, typer.Option(help="allocations can be read without a certificate")] = (
        True
    )
    metrics: Annotated[bool, typer.Option(help="metrics can be read without a certificate")] = True
    largest_body: Annotated[int, typer.Option(metavar="MIB", help="limit of one request")] = 8
    bodies: Annotated[int, typer.Option(metavar="MIB", help="limit of concurrent requests")] = 64

    def access(self) -> Access:
        """Return who may do what. Raises UserError, InvalidCredentials."""
        if not 0 < self.largest_body <= self.bodies:
            raise UserError(
                "--largest-body must be 1 MiB or more, and --bodies at least as much", INVALID_INPUT
            )
        credentials = Credentials(self.tls) if self.tls else None
        bounds = BodyLimits(self.largest_body * MIB, self.bodies * MIB)
        return Access(bounds, self.inspect, self.metrics, credentials)


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The replica, and how it agrees with the others on a leader."""

    namespace: Annotated[
        str, typer.Option(envvar="POD_NAMESPACE", help="namespace of the replicas' Lease")
    ] = "kube-system"
    lease: Annotated[str, typer.Option(help="Lease by which the replicas elect a leader")] = (
        "fenka-scheduler"
    )
    name: Annotated[
        str, typer.Option(envvar="POD_NAME", help="this replica's name; default: the host's")
    ] = ""
    advertise: Annotated[
        str, typer.Option(envvar="POD_IP", help="IP address at which other replicas reach this one")
    ] = ""


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The order of pending pods."""

    queue_penalty: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="delay for each card that the pod's namespace already uses or has requested before it; "
            "0: order by time alone",
        ),
    ] = 60
    queue_max_penalty: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="longest delay of a namespace's first pod, whatever its usage"
        ),
    ] = 3600
    half_life: Annotated[
        float, typer.Option(metavar="SECONDS", help="past usage counts half after this time")
    ] = 3600

    def fairness(self) -> Fairness:
        """Return the core's settings. Raises UserError."""
        try:
            return Fairness(self.queue_penalty, self.queue_max_penalty, self.half_life)
        except ValueError:
            raise UserError(
                "--queue-penalty, --queue-max-penalty and --half-life must be 0 or more seconds",
                INVALID_INPUT,
            ) from None


def scheduler(
    network: NetworkOptions,
    replica: ReplicaOptions,
    queue: QueueOptions,
    policy: Annotated[
        str, typer.Option(help="order of the nodes and cards: binpack or spread")
    ] = "binpack",
    max_nodes: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="filter returns the N best nodes; 0: all that fit. Needs prioritize with weight 100",
        ),
    ] = 0,
    hami_names: HamiOption = False,
    scheduler_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="bind only pods of this schedulerName; repeatable"),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            help="default: the pod's service account, then $KUBECONFIG, then ~/.kube/config"
        ),
    ] = None,
) -> None:
    """Serve kube-scheduler until SIGTERM or SIGINT."""
    if policy not in SCORES:
        raise UserError(f"--policy must be {' or '.join(SCORES)}, not {policy}", INVALID_INPUT)
    fairness = queue.fairness()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Never the same twice: a new process must not mistake its predecessor's Lease for its own.
    identity = f"{replica.name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    access = network.access()
    scheme = "https" if access.credentials else "http"
    reached_at = url(replica.advertise, network.port, scheme) if replica.advertise else ""
    settings = Settings(
        identity,
        policy,
        replica.namespace,
        replica.lease,
        reached_at,
        hami_names,
        fairness,
        tuple(scheduler_name or ()),
        max_nodes,
    )
    listening = ServerOptions(network.address, network.port, network.read_port, kubeconfig)
    asyncio.run(serve(listening, settings, access))
