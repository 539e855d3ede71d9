"""Notebooks of a cluster: create, stop and start them, and wait until they answer."""

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from fenka.cli import cluster, tables
from fenka.cli.errors import UserError
from fenka.cli.manifests import DryRunOutput, print_manifests
from fenka.cli.options import Target
from fenka.cli.training.backend import JobTarget
from fenka.cli.training.cluster_backend import ClusterJobs
from fenka.cluster.training_objects import KIND, BatchJob, Root
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE, FenkaError
from fenka.jobs import notebook_runs
from fenka.jobs.manifests import notebook
from fenka.jobs.notebook_spec import NotebookSpec, validate_password
from fenka.jobs.submission import submit_notebook
from fenka.kubernetes.client import Api
from fenka.kubernetes.training_reader import read_roots
from fenka.views.cluster_jobs import EXTERNAL_ADDRESS
from fenka.views.jobs import TrainingJob

POLL_S = 1.0

EXTERNAL_ADDRESS_S = 60.0
"""A cloud's load balancer has an address by then. Clusters without one never have."""

_FAILING = ("CrashLoopBackOff", "ImagePullBackOff", "InvalidImageName", "RunContainerError")
"""States that a pod seldom leaves unless somebody changes something."""


def print_objects(
    spec: NotebookSpec, password: str, target: Target, namespace: str, output: DryRunOutput
) -> None:
    """Print the objects of a notebook. Raises InvalidRequest, InvalidSize."""
    validate_password(password)
    rendered = notebook.render(spec, password)
    objects = [rendered.root, *rendered.dependents]
    for item in objects:
        item["metadata"]["namespace"] = namespace or cluster.namespace(target)
    print_manifests(objects, output)


def create(spec: NotebookSpec, password: str, target: Target, namespace: str) -> JobTarget:
    """Create a notebook. Return where it is. Raises UserError, InvalidRequest, InvalidSize."""
    validate_password(password)
    # An API server that does not answer is an error here, whatever runs on this machine.
    target = replace(target, cluster=True)
    place, now = namespace or cluster.namespace(target), datetime.now(UTC)
    cluster.converse(
        target,
        lambda api: submit_notebook(api, place, spec, password, now),
        cluster.explain_denial,
    )
    print(f"{spec.name}: created, see `fenka get {spec.name}`", flush=True)
    return JobTarget(target.local, target.cluster, target.kubeconfig, target.context, place)


def start(target: JobTarget, name: str) -> None:
    """Start a notebook again. Raises UserError, SubmissionRefused."""
    now = datetime.now(UTC)
    _change(target, name, lambda api, root, runs: notebook_runs.start(api, root, runs, now))
    print(f"{name}: started, see `fenka get {name}`", flush=True)


def stop(target: JobTarget, names: Sequence[str]) -> None:
    """Stop all notebooks named, even if some of them cannot be stopped. Raises UserError."""
    failures = []
    for name in names:
        try:
            _change(target, name, notebook_runs.stop)
        except FenkaError as why:
            failures.append(str(why))
        else:
            print(f"{name}: stopped")
    if failures:
        raise UserError("; ".join(failures))


def _change(
    target: JobTarget, name: str, change: Callable[[Api, Root, list[BatchJob]], Awaitable[None]]
) -> None:
    place = target.namespace or cluster.namespace(target)
    jobs = ClusterJobs(target, place)
    jobs.require(name)

    async def find_and_change(api: Api) -> None:
        roots, runs = await read_roots(api, place, name)
        root = next((root for root in roots if root.metadata.labels.get(KIND) == "notebook"), None)
        if root is None:
            raise UserError(
                f"{name} is not a notebook: a training on a cluster is ended by fenka delete {name}",
                INVALID_INPUT,
            )
        await change(api, root, runs)

    cluster.converse(target, find_and_change, cluster.explain_denial)


def report_address(target: JobTarget, name: str, timeout_s: float | None) -> None:
    """Print where a notebook answers, once it does; until then why it does not.

    timeout_s: the longest wait; None to wait indefinitely. Raises UserError.
    """
    jobs = ClusterJobs(target, target.namespace or cluster.namespace(target))
    began, ready_at, shown = time.monotonic(), None, ""
    while True:
        job, now = jobs.require(name), time.monotonic()
        if job.address:
            ready_at = ready_at or now
            if job.why != EXTERNAL_ADDRESS or now - ready_at > EXTERNAL_ADDRESS_S:
                break
        _check_alive(job)
        progress = _progress(jobs, job)
        if progress != shown:
            print(tables.escape(f"{name}: {progress}"), file=sys.stderr, flush=True)
            shown = progress
        if timeout_s is not None and now - began > timeout_s:
            raise UserError(
                f"{name} does not answer after {timeout_s:g} s ({progress}): it stays, see fenka get {name}",
                TEMPORARY_FAILURE,
            )
        time.sleep(POLL_S)
    print(f"{name}: {tables.escape(job.address)}")


def _check_alive(job: TrainingJob) -> None:
    """Raise UserError if a notebook will not answer."""
    chief = job.chief
    if chief is not None and chief.status in _FAILING:
        raise UserError(
            f"{job.name} does not start, its pod {chief.pod} is in {chief.status}: see "
            f"fenka logs {job.name} and fenka get {job.name} -e"
        )
    if job.finished:
        raise UserError(f"{job.name} is {job.status} {job.why}".rstrip())


def _progress(jobs: ClusterJobs, job: TrainingJob) -> str:
    """Return what a notebook waits for."""
    chief = job.chief
    if chief is None:
        # A Job reports by events alone that its pod cannot be created.
        warnings = [event.message for event in jobs.events(job) if event.kind == "Warning"]
        return job.note or job.why or next(reversed(warnings), "waits for its pod")
    if job.status == "PENDING" and not chief.node:
        return f"waits for its slice: {jobs.explain(chief) or job.why or chief.status}"
    return job.why or f"its pod is {chief.status}"
