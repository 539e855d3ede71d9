"""Selects the machine or cluster, and the job, that a command is about."""

from fenka.cli.errors import UserError
from fenka.cli.options import Target
from fenka.cli.training.backend import TYPE_NAMES, JobBackend, JobTarget, TypeName
from fenka.cli.world import announce, cluster_configured
from fenka.views.jobs import TrainingJob


def open_backend(target: JobTarget, *, all_namespaces: bool = False) -> JobBackend:
    """Return the jobs that a command is about. Raises UserError."""
    here = runs_here(target, target.namespace)
    announce(target, here=here)
    if here:
        from fenka.cli.training.local_backend import LocalJobs

        return LocalJobs()
    from fenka.cli import cluster
    from fenka.cli.training.cluster_backend import ClusterJobs

    namespace = target.namespace or cluster.namespace(target)
    return ClusterJobs(target, namespace, all_namespaces=all_namespaces)


def runs_here(target: Target, namespace: str = "") -> bool:
    """Return whether a command is about trainings of this machine, as where no cluster is configured."""
    return target.local or not (target.of_cluster or namespace or cluster_configured())


def find_job(
    backend: JobBackend, name: str, type_: TypeName | None = None, *, positions: bool = False
) -> TrainingJob:
    """Return the job with this name; fenka's own before those of other programs. Raises UserError."""
    jobs = of_type(backend.jobs(name, positions=positions), type_)
    if not jobs:
        raise UserError(f"job {name} not found in namespace {backend.namespace}")
    return min(jobs, key=lambda job: job.foreign)


def of_type(jobs: list[TrainingJob], type_: TypeName | None) -> list[TrainingJob]:
    """Return the jobs of one framework."""
    return [job for job in jobs if type_ is None or type_ in TYPE_NAMES[job.trainer]]
