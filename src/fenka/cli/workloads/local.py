"""Workloads of this machine, for the commands about them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from fenka.cli.errors import UserError, print_error, report_errors
from fenka.cli.workloads import local_logs
from fenka.cli.workloads.backend import GatewayChoice, LogRequest, find_replica
from fenka.cli.workloads.local_logs import LogPart
from fenka.core.errors import INVALID_INPUT
from fenka.hardware.peer_credentials import user_name
from fenka.jobs.service import ServiceSpec
from fenka.local import notebooks, records, run_jobs, service_commands, training_commands
from fenka.local.records import NOTEBOOKS, SERVICES
from fenka.views.workloads import JobEvent, ServiceVersion, TrainingJob
from fenka.workstation import paths


class LocalBackend:
    """The workloads of this user on this machine; see Backend."""

    @property
    def namespace(self) -> str:
        """The user."""
        return user_name(os.geteuid())

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or the one with this name, the newest first. Their positions are known."""
        del positions
        jobs = [*training_commands.jobs(name), *notebooks.jobs(name), *run_jobs.jobs(name)]
        return sorted(jobs, key=lambda job: -job.created)

    def events(self, job: TrainingJob) -> list[JobEvent]:
        """Return what the record tells of the job's past."""
        if job.trainer == "run":
            return run_jobs.events(job.name)
        return [] if job.trainer == "notebook" else training_commands.events(job.name)

    def delete_jobs(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that is left of them."""
        for job in jobs:
            if job.trainer == "run":
                run_jobs.delete(job.name)
            elif NOTEBOOKS.exists(job.name):
                notebooks.delete(job.name)
            else:
                training_commands.delete(job.name)

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""
        return service_commands.versions(name)

    def deploy(self, spec: ServiceSpec, gateway: GatewayChoice) -> list[str]:
        """Deploy a version. Return the versions that the service had before."""
        _refuse_gateway_options(gateway)
        return service_commands.deploy(paths.current(), spec, print_error, report_errors)

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
        return service_commands.update(
            paths.current(), name, version, change, print_error, report_errors
        )

    def undo(self, name: str, version: str, surge: bool | None) -> ServiceSpec:
        """Make a version what it was before its last update. Return it as it is now."""
        _refuse_surge(surge)
        return service_commands.undo(paths.current(), name, version, print_error, report_errors)

    def delete_service(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""
        service_commands.delete(name, version)

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions."""
        if route:
            raise UserError(
                "--http-route requires a cluster: leave it out, the service's own gateway divides requests",
                INVALID_INPUT,
            )
        service_commands.split(name, weights)

    def logs(self, workload: str | ServiceVersion, request: LogRequest) -> TrainingJob | None:
        """Print the log of a job's instance or of a replica. Return the job as it is at the end of it."""
        if isinstance(workload, ServiceVersion):
            self._print_replica_log(workload, request)
            return None
        log = training_commands.log_file(workload, request.instance, request.container)
        if not (log.exists() or request.follow):
            status = training_commands.record(workload).status
            raise UserError(f"{log.parent.name} has no log yet: {workload} is {status}")

        def ended() -> bool:
            return not request.follow or training_commands.record(workload).finished

        local_logs.print_log(log, _part(request), ended)
        return self.jobs(workload)[0]

    def _print_replica_log(self, version: ServiceVersion, request: LogRequest) -> None:
        if request.container:
            raise UserError(
                "a replica on this machine has one log: leave out --container", INVALID_INPUT
            )
        replica = find_replica(version, request.instance)
        log = records.replica_log(SERVICES.directory_of(version.name), replica)
        if not (log.exists() or request.follow):
            raise UserError(f"replica {replica} has no log yet: see fenka serve get {version.name}")

        def ended() -> bool:
            return not request.follow or not service_commands.has_replica(version.name, replica)

        local_logs.print_log(log, _part(request), ended)

    def attach(
        self, workload: TrainingJob | ServiceVersion, request: LogRequest, command: Sequence[str]
    ) -> NoReturn:
        """Become a command in the lease of an instance or a replica."""
        name, instance = workload.name, request.instance
        if isinstance(workload, ServiceVersion):
            replica = find_replica(workload, instance)
            sys.stdout.flush()
            service_commands.attach_to(name, replica, command)
        if NOTEBOOKS.exists(name):
            raise UserError(f"{name} is a notebook: open a terminal in it", INVALID_INPUT)
        sys.stdout.flush()
        if workload.trainer == "run":
            run_jobs.attach_to(name, instance, command)
        run_jobs.run(name, instance, command)


def _part(request: LogRequest) -> LogPart:
    return LogPart(request.tail, request.since_s, request.timestamps)


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
