"""Submits trainings to a cluster, follows them, and creates, stops and starts its notebooks."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

from fenka.cli import cluster, tables
from fenka.cli.common_options import Target
from fenka.cli.error_report import UserError
from fenka.cli.workload_options import DryRunOutput, print_manifests
from fenka.cli.workloads import waiting
from fenka.cli.workloads.arguments import JobTarget, report_submission
from fenka.cli.workloads.cluster_backend import ClusterBackend
from fenka.cli.workloads.selection import follow_job
from fenka.cli.workloads.waiting import ProgressLine, polls
from fenka.cluster.training_objects import KIND, BatchJob, Root
from fenka.core.errors import INVALID_INPUT
from fenka.jobs.collection import Contents, collect
from fenka.jobs.kubernetes import notebook_stops
from fenka.jobs.kubernetes.submission import submit, submit_notebook
from fenka.jobs.manifests import notebook_manifest
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.notebook_spec import NotebookSpec, validate_password
from fenka.jobs.training import TrainingSpec
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.reader import read_roots
from fenka.views.cluster_workloads import EXTERNAL_ADDRESS
from fenka.views.workloads import TrainingJob


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
    report_submission(spec.name, f"fenka get {spec.name}")
    if follow:
        follow_job(ClusterBackend(target, place), spec.name)


EXTERNAL_ADDRESS_S = 60.0
"""A cloud's load balancer has an address by then. Clusters without one never have."""

_FAILING = ("CrashLoopBackOff", "ImagePullBackOff", "InvalidImageName", "RunContainerError")
"""States that a pod seldom leaves unless somebody changes something."""


def print_objects(
    spec: NotebookSpec, password: str, target: Target, namespace: str, output: DryRunOutput
) -> None:
    """Print the objects of a notebook. Raises InvalidRequest, InvalidSize."""
    validate_password(password)
    rendered = notebook_manifest.render(spec, password)
    objects = [rendered.root, *rendered.dependents]
    print_manifests(objects, namespace or cluster.namespace(target), output)


def create(spec: NotebookSpec, password: str, target: Target, namespace: str) -> JobTarget:
    """Create a notebook. Return where it is. Raises UserError, InvalidRequest, InvalidSize."""
    validate_password(password)
    # An API server that does not answer is an error here, whatever runs on this machine.
    target = replace(target, cluster=True)
    place, now = namespace or cluster.namespace(target), datetime.now(UTC)
    cluster.converse(
        target, lambda api: submit_notebook(api, place, spec, password, now), cluster.explain_denial
    )
    print(f"{spec.name}: created, see `fenka get {spec.name}`", flush=True)
    return JobTarget(target.local, target.cluster, target.kubeconfig, target.context, place)


def start(target: JobTarget, name: str) -> None:
    """Start a notebook again. Raises UserError, SubmissionRefused."""
    now = datetime.now(UTC)
    _change(target, name, lambda api, root, runs: notebook_stops.start(api, root, runs, now))
    print(f"{name}: started, see `fenka get {name}`", flush=True)


def stop(target: JobTarget, name: str) -> str:
    """Stop a notebook. Return what to say of it. Raises UserError."""
    _change(target, name, notebook_stops.stop)
    return f"{name}: stopped"


def _change(
    target: JobTarget, name: str, change: Callable[[Api, Root, list[BatchJob]], Awaitable[None]]
) -> None:
    place = target.namespace or cluster.namespace(target)
    jobs = ClusterBackend(target, place)
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
    jobs = ClusterBackend(target, target.namespace or cluster.namespace(target))
    progress, ready_at = ProgressLine(name), None

    def late() -> str:
        waited = f"{timeout_s:g} s ({progress.text})"
        return f"{name} does not answer after {waited}: it stays, see fenka get {name}"

    for _ in polls(timeout_s, waiting.POLL_S, late):
        job, now = jobs.require(name), time.monotonic()
        if job.address:
            ready_at = ready_at or now
            if job.why != EXTERNAL_ADDRESS or now - ready_at > EXTERNAL_ADDRESS_S:
                break
        _check_alive(job)
        progress.show(_progress(jobs, job))
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


def _progress(jobs: ClusterBackend, job: TrainingJob) -> str:
    """Return what a notebook waits for."""
    chief = job.chief
    if chief is None:
        # A Job reports by events alone that its pod cannot be created.
        warnings = [event.message for event in jobs.events(job) if event.kind == "Warning"]
        return job.note or job.why or next(reversed(warnings), "waits for its pod")
    if job.status == "PENDING" and not chief.node:
        return f"waits for its slice: {jobs.explain(chief) or job.why or chief.status}"
    return job.why or f"its pod is {chief.status}"
