"""Services of this machine, for the commands about them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from fenka.cli import local_logs
from fenka.cli.errors import UserError, print_error, report_errors
from fenka.cli.local_logs import LogPart
from fenka.cli.serving.backend import GatewayChoice, find_replica
from fenka.cli.training.backend import LogRequest
from fenka.core.errors import INVALID_INPUT
from fenka.hardware.peer_credentials import user_name
from fenka.jobs.service import ServiceSpec
from fenka.views.services import ServiceVersion
from fenka.workstation import paths
from fenka.workstation.serving import manage, records


class LocalServices:
    """The services of this user on this machine; see ServiceBackend."""

    @property
    def namespace(self) -> str:
        """The user."""
        return user_name(os.geteuid())

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""
        return manage.versions(name)

    def deploy(self, spec: ServiceSpec, gateway: GatewayChoice) -> list[str]:
        """Deploy a version. Return the versions that the service had before."""
        _refuse_gateway_options(gateway)
        return manage.deploy(paths.current(), spec, print_error, report_errors)

    def update(
        self,
        name: str,
        version: str,
        change: Callable[[ServiceSpec], ServiceSpec],
        gateway: GatewayChoice,
        surge: bool | None,
    ) -> ServiceSpec:
        """Change a version, or the only one if none is named. Return it as it is now."""
        _refuse_gateway_options(gateway)
        _refuse_surge(surge)
        return manage.update(paths.current(), name, version, change, print_error, report_errors)

    def undo(self, name: str, version: str, surge: bool | None) -> ServiceSpec:
        """Make a version what it was before its last update. Return it as it is now."""
        _refuse_surge(surge)
        return manage.undo(paths.current(), name, version, print_error, report_errors)

    def delete(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""
        manage.delete(name, version)

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions."""
        if route:
            raise UserError(
                "--http-route requires a cluster: leave it out, the service's own gateway divides requests",
                INVALID_INPUT,
            )
        manage.split(name, weights)

    def logs(self, version: ServiceVersion, request: LogRequest) -> None:
        """Print the log of a replica."""
        if request.container:
            raise UserError(
                "a replica on this machine has one log: leave out --container", INVALID_INPUT
            )
        replica = find_replica(version, request.instance)
        log = records.log_of(records.directory_of(version.name), replica)
        if not (log.exists() or request.follow):
            raise UserError(f"replica {replica} has no log yet: see fenka serve get {version.name}")

        def ended() -> bool:
            return not request.follow or not manage.has_replica(version.name, replica)

        part = LogPart(request.tail, request.since_s, request.timestamps)
        local_logs.print_log(log, part, ended)

    def attach(
        self, version: ServiceVersion, request: LogRequest, command: Sequence[str]
    ) -> NoReturn:
        """Become a command in a replica's lease."""
        replica = find_replica(version, request.instance)
        sys.stdout.flush()
        manage.attach_to(version.name, replica, command)


def _refuse_surge(surge: bool | None) -> None:
    if surge is not None:
        raise UserError(
            "--surge and --no-surge require a cluster: on this machine an old replica ends first when its "
            "successor finds no room, leave them out",
            INVALID_INPUT,
        )


def _refuse_gateway_options(gateway: GatewayChoice) -> None:
    if gateway != GatewayChoice():
        raise UserError(
            "--gateway-image and --gateway-replicas require a cluster: leave them out",
            INVALID_INPUT,
        )
