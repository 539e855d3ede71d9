"""Workloads of this machine, for the commands about them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fenka.cli.error_report import UserError, print_error, report_errors
from fenka.cli.workloads.arguments import GatewayChoice, LogRequest, require_instance
from fenka.cli.workloads.local_logs import print_log
from fenka.core.errors import INVALID_INPUT
from fenka.jobs.service import ServiceSpec
from fenka.local import lease_jobs, records, runs, service_commands, training_commands
from fenka.local.records import NOTEBOOKS, SERVICES
from fenka.views.workloads import JobEvent, ServiceVersion, TrainingJob, Workload, is_program
from fenka.workstation import paths
from fenka.workstation.client import jobs_called, known_snapshot


class LocalBackend:
    """The workloads of this user on this machine."""

    def not_found(self, kind: str, name: str) -> str:
        """Return a sentence: there is none of this kind and name, or it is another user's."""
        snapshot = known_snapshot()
        for job in snapshot.jobs if snapshot else ():
            if name in (job.name, job.gang) and job.container_id:
                command = f"{job.engine or 'docker'} logs {job.container_id[:12]}"
                return f"{name} is a container: `{command}` prints its output"
            if name in (job.name, job.gang):
                return f"job {name} is {job.user}'s: only {job.user} can use it"
        return f"{kind} {name} not found on this machine: `fenka ps -a` lists all"

    def workloads(
        self, name: str | None = None, *, positions: bool = False
    ) -> tuple[list[TrainingJob], list[ServiceVersion]]:
        """Return what `jobs` and `versions` do."""
        return self.jobs(name, positions=positions), self.versions(name)

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or the one with this name, the newest first. Their positions are known."""
        del positions
        jobs = [*training_commands.jobs(name), *lease_jobs.jobs(name)]
        return sorted(jobs, key=lambda job: -job.created)

    def events(self, workload: Workload) -> list[JobEvent]:
        """Return what the record tells of a job's past."""
        if isinstance(workload, ServiceVersion) or workload.trainer == "notebook":
            return []
        if workload.trainer == "run":
            return lease_jobs.events(workload.name)
        return training_commands.events(workload.name)

    def delete_jobs(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that is left of them."""
        for job in jobs:
            if job.trainer == "run" or NOTEBOOKS.exists(job.name):
                lease_jobs.delete(job.name)
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

    def logs(self, workload: Workload, request: LogRequest) -> Workload:
        """Print the log of an instance of a workload. Return the workload as it is at its end."""
        if isinstance(workload, ServiceVersion):
            log, alive = _replica_log(workload, request)
        elif is_program(workload):
            log, alive = _program_log(workload, request)
        else:
            log, alive = _training_log(workload, request)
        if not (log.exists() or request.follow):
            raise UserError(f"{log.parent.name} has no log yet: see fenka get {workload.name}")
        print_log(log, request, lambda: not (request.follow and alive()))
        if is_program(workload):
            number = request.run or runs.last_run(runs.place_of(workload.name))
            if sentence := runs.run_outcome(workload.name, number):
                # Not on stdout, which has what the program has printed.
                print_error(sentence)
        return workload

    def attach(self, workload: Workload, request: LogRequest, command: Sequence[str]) -> NoReturn:
        """Become a command in the lease of an instance."""
        name, instance = workload.name, request.instance
        sys.stdout.flush()
        if isinstance(workload, ServiceVersion):
            replica = require_instance(workload, instance)
            service_commands.attach_to(name, replica.name, command)
        if is_program(workload):
            lease_jobs.attach_to(name, instance, command)
        training_commands.attach_to(name, instance, command)

    def exit_code(self, job: TrainingJob) -> int:
        """Return the exit code of a training that has ended."""
        return training_commands.exit_code(job.name)


IsAlive = Callable[[], bool]
"""Return whether more may be written to a log."""


def _training_log(job: TrainingJob, request: LogRequest) -> tuple[Path, IsAlive]:
    log = training_commands.log_file(job.name, request.instance, request.container)
    return log, lambda: not training_commands.record(job.name).finished


def _replica_log(version: ServiceVersion, request: LogRequest) -> tuple[Path, IsAlive]:
    if request.container:
        raise UserError(
            "a replica on this machine has one log: leave out --container", INVALID_INPUT
        )
    name = require_instance(version, request.instance).name
    log = records.replica_log(SERVICES.directory_of(version.name), name)
    return log, lambda: service_commands.has_replica(version.name, name)


def _program_log(job: TrainingJob, request: LogRequest) -> tuple[Path, IsAlive]:
    """Return the log of a program or notebook in the background, or of a gang's member. Raises UserError."""
    name, current = job.name, runs.place_of(job.name)
    if request.container:
        raise UserError(f"{name} is one process with one log: leave out --container", INVALID_INPUT)
    directory = runs.place_of_run(name, request.run) if request.run else current
    member = "" if request.instance == name else request.instance.removeprefix(f"{name}/")
    if member and not member.isdecimal():
        raise UserError(f"job {name} has no instance {member}: fenka get {name} lists them")
    log = directory / member / "log"
    if log.exists():
        return log, lambda: directory == current and bool(jobs_called(paths.current(), name))
    if request.run and (current / "log").exists():
        known = ", ".join(map(str, runs.numbers(name)))
        raise UserError(f"run {request.run} of {name} has no log any more: there are {known}")
    raise UserError(
        f"{name} prints to the terminal that it was started from: only --detach keeps a log"
    )


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
