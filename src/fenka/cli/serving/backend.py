"""What commands about services need of a cluster or of this machine, and the options they share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer

from fenka.cli.errors import UserError
from fenka.cli.training.backend import LogRequest
from fenka.jobs.service import ServiceSpec
from fenka.views.services import ServiceVersion

NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="the service")]
SurgeOption = Annotated[
    bool | None,
    typer.Option(
        "--surge/--no-surge",
        help="end an old replica when its successor is ready, or before it starts; default: before, if there "
        "is no room for both",
    ),
]
VersionOption = Annotated[
    str, typer.Option("-v", "--version", metavar="VERSION", help="a version of the service")
]


@dataclass(frozen=True, slots=True)
class GatewayChoice:
    """What users say about the gateway of a service on a cluster."""

    gateway_image: Annotated[
        str,
        typer.Option(
            "--gateway-image",
            metavar="IMAGE",
            help="fenka's image; default: what the chart publishes",
        ),
    ] = ""
    gateway_replicas: Annotated[
        int, typer.Option("--gateway-replicas", metavar="N", min=1, help="number of gateways")
    ] = 1


class ServiceBackend(Protocol):
    """Services of a cluster or of this machine. All methods raise FenkaError."""

    @property
    def namespace(self) -> str:
        """Return the namespace of the services, for messages; on this machine the user."""

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""

    def deploy(self, spec: ServiceSpec, gateway: GatewayChoice) -> list[str]:
        """Deploy a valid version. Return the versions that the service had before."""

    def update(
        self,
        name: str,
        version: str,
        change: Callable[[ServiceSpec], ServiceSpec],
        gateway: GatewayChoice,
        surge: bool | None,
    ) -> ServiceSpec:
        """Change a version, or the only one if none is named. Return it as it is now.

        surge: whether replicas end when their successors are ready, or before; None: as there is room.
        """

    def undo(self, name: str, version: str, surge: bool | None) -> ServiceSpec:
        """Make a version what it was before its last update. Return it as it is now."""

    def delete(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions. route: by this HTTPRoute of a cluster."""

    def logs(self, version: ServiceVersion, request: LogRequest) -> None:
        """Print the log of a replica."""

    def attach(self, version: ServiceVersion, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in a replica, connected to this terminal. Return its exit code."""


def find_replica(version: ServiceVersion, name: str) -> str:
    """Return the name of a replica: the oldest one's if none is named. Raises UserError."""
    replica = version.replica(name) if name else next(iter(version.replicas), None)
    if replica is None:
        names = ", ".join(each.name for each in version.replicas) or "none now"
        raise UserError(
            f"version {version.version} of service {version.name} has no replica {name}".rstrip()
            + f": its replicas are {names}"
        )
    return replica.name
