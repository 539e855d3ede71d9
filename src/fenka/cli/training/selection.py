"""Selects the machine or cluster, and the job, that a command is about."""

from fenka.cli.errors import UserError
from fenka.cli.training.backend import TYPES, JobBackend, JobTarget, TypeName
from fenka.views.jobs import TrainingJob


def open_backend(target: JobTarget, *, all_namespaces: bool = False) -> JobBackend:
    """Return the jobs that a command is about. Raises UserError."""
    if target.local:
        raise UserError("training jobs run on a cluster: leave out --local")
    from fenka.cli import cluster
    from fenka.cli.training.cluster_backend import ClusterJobs

    namespace = target.namespace or cluster.namespace(target)
    return ClusterJobs(target, namespace, all_namespaces=all_namespaces)


def find_job(backend: JobBackend, name: str, type_: TypeName | None = None) -> TrainingJob:
    """Return the job with this name; fenka's own before those of other programs. Raises UserError."""
    jobs = of_type(backend.jobs(name), type_)
    if not jobs:
        raise UserError(f"job {name} not found in namespace {backend.namespace}")
    return min(jobs, key=lambda job: job.foreign)


def of_type(jobs: list[TrainingJob], type_: TypeName | None) -> list[TrainingJob]:
    """Return the jobs of one framework."""
    return [job for job in jobs if type_ is None or job.trainer == TYPES[type_]]
