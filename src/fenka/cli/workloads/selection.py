"""Selects this machine or a cluster, and the workload of a name, that a command is about."""

import sys
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from fenka.cli.error_report import UserError
from fenka.cli.workloads.arguments import (
    TYPE_NAMES,
    JobTarget,
    LogRequest,
    TypeName,
    WorkloadChoice,
)
from fenka.cli.world import announce, runs_here
from fenka.core.errors import INVALID_INPUT
from fenka.views.workloads import ServiceVersion, TrainingJob, Workload

if TYPE_CHECKING:
    from fenka.cli.workloads.cluster_backend import ClusterBackend
    from fenka.cli.workloads.local_backend import LocalBackend

Backend: TypeAlias = "ClusterBackend | LocalBackend"
"""The workloads of a cluster, or of this user on this machine. All methods raise FenkaError."""


class WorkloadNotFound(UserError):
    """There is none of this name."""


def open_backend(
    target: JobTarget, *, all_namespaces: bool = False, here: bool | None = None
) -> Backend:
    """Return the workloads that a command is about. Raises UserError.

    here: whether these are of this machine, if that is known; see `is_here`.
    """
    here = runs_here(target, target.namespace) if here is None else here
    announce(target, here=here)
    if here:
        from fenka.cli.workloads.local_backend import LocalBackend

        return LocalBackend()
    from fenka.cli import cluster
    from fenka.cli.workloads.cluster_backend import ClusterBackend

    namespace = target.namespace or cluster.namespace(target)
    return ClusterBackend(target, namespace, all_namespaces=all_namespaces)


def is_here(target: JobTarget, *names: str) -> bool:
    """Return whether a command is about this machine: it knows a name, or there is no cluster."""
    if runs_here(target, target.namespace):
        return True
    if target.of_cluster or target.namespace:
        return False
    from fenka.local import records, runs
    from fenka.workstation.client import known_snapshot

    snapshot = known_snapshot()
    leases = {
        name for job in (snapshot.jobs if snapshot else ()) for name in (job.name, job.gang, job.id)
    }
    stores = (records.TRAININGS, records.NOTEBOOKS, records.SERVICES)
    return any(
        name in leases
        or runs.has_runs(name.partition("/")[0])
        or any(store.exists(name) for store in stores)
        or (snapshot is not None and bool(runs.ended(name).jobs))
        for name in names
    )


def find_jobs_or_versions(
    backend: Backend, name: str, choice: WorkloadChoice, *, positions: bool = False
) -> tuple[TrainingJob | None, list[ServiceVersion]]:
    """Return the job with this name, or versions of the service: all of them if none is named.

    fenka's own jobs have precedence over those of other programs. Raises UserError for none or both.
    """
    if choice.only_services:
        return None, _versions(backend, name, choice, backend.versions(name))
    if choice.type_ is None:
        jobs, versions = backend.workloads(name, positions=positions)
    else:
        jobs, versions = of_type(backend.jobs(name, positions=positions), choice.type_), []
    own = [job for job in jobs if not job.foreign] or jobs
    kinds = sorted({job.trainer for job in own}) + (["service"] if versions else [])
    if len(kinds) > 1:
        raise UserError(
            f"{name} is the name of a {' and a '.join(kinds)}: choose one by --type "
            f"{' or --type '.join(kinds)}",
            INVALID_INPUT,
        )
    if own:
        return own[0], []
    kind = "job" if choice.type_ else "job or service"
    return None, _versions(backend, name, choice, versions, kind)


def find_job(
    backend: Backend, name: str, type_: TypeName | None = None, *, positions: bool = False
) -> TrainingJob:
    """Return the job with this name; fenka's own before those of other programs. Raises UserError."""
    jobs = of_type(backend.jobs(name, positions=positions), type_)
    if not jobs:
        raise WorkloadNotFound(backend.not_found("job", name))
    return min(jobs, key=lambda job: job.foreign)


def find(
    backend: Backend, name: str, choice: WorkloadChoice, *, positions: bool = False
) -> Workload:
    """Return the job or the version of a service with this name. Raises UserError."""
    job, versions = find_jobs_or_versions(backend, name, choice, positions=positions)
    if job is not None:
        return job
    if len(versions) > 1:
        names = ", ".join(version.version for version in versions)
        raise UserError(f"service {name} has several versions: choose {names} by --version")
    return versions[0]


def of_type(jobs: list[TrainingJob], type_: TypeName | None) -> list[TrainingJob]:
    """Return the jobs of one framework."""
    return [job for job in jobs if type_ is None or type_ in TYPE_NAMES[job.trainer]]


def find_version(backend: Backend, name: str, version: str) -> ServiceVersion:
    """Return a version of a service: the only one if none is named. Raises UserError."""
    found = find(backend, name, WorkloadChoice("service", version))
    assert isinstance(found, ServiceVersion)
    return found


def follow_job(backend: Backend, name: str) -> NoReturn:
    """Print the log of a training, and exit with its code."""
    job = backend.logs(find_job(backend, name), LogRequest(follow=True))
    assert isinstance(job, TrainingJob)
    sys.exit(backend.exit_code(job))


def _versions(
    backend: Backend,
    name: str,
    choice: WorkloadChoice,
    versions: list[ServiceVersion],
    kind: str = "service",
) -> list[ServiceVersion]:
    """Return the versions of a service, or the one that is named. Raises UserError."""
    if not versions:
        raise WorkloadNotFound(backend.not_found(kind, name))
    chosen = [version for version in versions if choice.version in ("", version.version)]
    if not chosen:
        names = ", ".join(version.version for version in versions)
        raise UserError(
            f"service {name} has no version {choice.version}: existing versions are {names}"
        )
    return chosen
