"""Selects this machine or a cluster, and the job or the version of a service, that a command is about."""

from fenka.cli.errors import UserError
from fenka.cli.workloads.backend import TYPE_NAMES, Backend, JobTarget, TypeName
from fenka.cli.world import announce, runs_here
from fenka.views.workloads import ServiceVersion, TrainingJob


def open_backend(target: JobTarget, *, all_namespaces: bool = False) -> Backend:
    """Return the workloads that a command is about. Raises UserError."""
    here = runs_here(target, target.namespace)
    announce(target, here=here)
    if here:
        from fenka.cli.workloads.local import LocalBackend

        return LocalBackend()
    from fenka.cli import cluster
    from fenka.cli.workloads.cluster_backend import ClusterBackend

    namespace = target.namespace or cluster.namespace(target)
    return ClusterBackend(target, namespace, all_namespaces=all_namespaces)


def find_job(
    backend: Backend, name: str, type_: TypeName | None = None, *, positions: bool = False
) -> TrainingJob:
    """Return the job with this name; fenka's own before those of other programs. Raises UserError."""
    jobs = of_type(backend.jobs(name, positions=positions), type_)
    if not jobs:
        raise UserError(f"job {name} not found in namespace {backend.namespace}")
    return min(jobs, key=lambda job: job.foreign)


def of_type(jobs: list[TrainingJob], type_: TypeName | None) -> list[TrainingJob]:
    """Return the jobs of one framework."""
    return [job for job in jobs if type_ is None or type_ in TYPE_NAMES[job.trainer]]


def find_versions(backend: Backend, name: str, version: str) -> list[ServiceVersion]:
    """Return the versions of a service, or the one that is named. Raises UserError."""
    versions = backend.versions(name)
    if not versions:
        raise UserError(f"service {name} not found in namespace {backend.namespace}")
    chosen = [each for each in versions if version in ("", each.version)]
    if not chosen:
        names = ", ".join(version.version for version in versions)
        raise UserError(f"service {name} has no version {version}: existing versions are {names}")
    return chosen


def find_version(backend: Backend, name: str, version: str) -> ServiceVersion:
    """Return a version of a service: the only one if none is named. Raises UserError."""
    first, *others = find_versions(backend, name, version)
    if others:
        names = ", ".join(each.version for each in (first, *others))
        raise UserError(f"service {name} has several versions: choose {names} by --version")
    return first
