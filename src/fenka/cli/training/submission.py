"""Submits trainings to a cluster, and follows them."""

import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

from fenka.cli import cluster
from fenka.cli.options import Target
from fenka.cli.training.backend import JobTarget, LogRequest, report_submission
from fenka.core.errors import FAILURE
from fenka.jobs.collection import collect
from fenka.jobs.manifests.contents import Contents
from fenka.jobs.manifests.render import render
from fenka.jobs.submission import submit
from fenka.jobs.training import TrainingSpec
from fenka.views.jobs import TrainingJob


def submit_to_cluster(spec: TrainingSpec, target: Target, namespace: str, *, follow: bool) -> None:
    """Submit a training; if it is followed, print its log and exit with its code.

    Raises InvalidRequest, UserError.
    """
    # An API server that does not answer is an error here, whatever runs on this machine.
    target = replace(target, cluster=True)
    place = namespace or cluster.namespace(target)
    # Before the code is read or a repository is asked.
    render(spec, Contents())
    public, contents = collect(spec)
    now = datetime.now(UTC)
    cluster.ask(
        target, lambda api: submit(api, place, public, contents, now), cluster.explain_denial
    )
    report_submission(spec.name)
    if follow:
        _follow(spec.name, target, place)


def _follow(name: str, target: Target, namespace: str) -> NoReturn:
    # Most submissions read nothing of other jobs.
    from fenka.cli.training.cluster_backend import ClusterJobs

    jobs = ClusterJobs(
        JobTarget(target.local, target.cluster, target.kubeconfig, target.context), namespace
    )
    sys.exit(_exit_code(jobs.logs(name, LogRequest(follow=True))))


def _exit_code(job: TrainingJob) -> int:
    """Return the exit code of a job that has ended: its chief's, or that of another process that failed."""
    if job.status == "SUCCEEDED":
        return 0
    instances = [job.chief, *job.instances]
    codes = (instance.exit_code for instance in instances if instance is not None)
    return next(filter(None, codes), FAILURE)
