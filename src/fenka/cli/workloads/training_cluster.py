"""Training jobs of a cluster, for the commands about them.

Submits trainings to a cluster, and follows them.

Notebooks of a cluster: create, stop and start them, and wait until they answer.
"""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

from fenka.cli import cluster, tables
from fenka.cli.errors import UserError
from fenka.cli.options import Target
from fenka.cli.workload_options import DryRunOutput, print_manifests
from fenka.cli.workloads.backend import JobTarget, LogRequest, report_submission
from fenka.cluster import training_objects
from fenka.cluster.objects import seconds
from fenka.core.errors import FAILURE, INVALID_INPUT, TEMPORARY_FAILURE, FenkaError
from fenka.jobs.collection import Contents, collect
from fenka.jobs.kubernetes import submission
from fenka.jobs.kubernetes.submission import submit, submit_notebook
from fenka.jobs.manifests import notebook_manifest
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.notebook import NotebookSpec, validate_password
from fenka.jobs.training import TrainingSpec
from fenka.kubernetes import pod_logs
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.kubernetes.pod_logs import LogOptions, LogSource, follow_log, log_container, read_log
from fenka.kubernetes.reader import read_events, read_roots, read_training_objects
from fenka.views.cluster_workloads import EXTERNAL_ADDRESS, Queue, training_jobs
from fenka.views.workloads import JobEvent, JobProcess, TrainingJob

MAX_DELETIONS = 32
"""Requests at a time."""

_NAME = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")


class ClusterJobs:
    """Training jobs of one namespace, or of all; see JobBackend."""

    def __init__(self, target: JobTarget, namespace: str, *, all_namespaces: bool = False) -> None:
        if not _NAME.fullmatch(namespace):
            raise UserError(f"invalid namespace {namespace!r}: no cluster can have it")
        self._target, self.namespace = target, namespace
        self._scope = None if all_namespaces else namespace

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or those with this name, the newest first.

        positions: read the queue of the cluster if a job waits.
        """
        if name is not None and not _NAME.fullmatch(name):
            return []

        async def read(api: Api) -> list[TrainingJob]:
            objects = await read_training_objects(api, self._scope, name)
            waiting = any(not (pod.spec.node_name or pod.finished) for pod in objects.pods)
            queue = await _read_queue(api) if positions and waiting else None
            return training_jobs(objects, time.time(), queue)

        return cluster.ask(self._target, read, cluster.explain_denial)

    def require(self, name: str) -> TrainingJob:
        """Return the job of fenka with this name. Raises UserError."""
        own = [job for job in self.jobs(name) if not job.foreign]
        if not own:
            raise UserError(f"job {name} not found in namespace {self.namespace}")
        return own[0]

    def explain(self, instance: JobProcess) -> str:
        """Return why an instance is pending, as `fenka why` does; empty if neither cards nor nodes are."""
        from fenka.cli.why import explain_pod

        async def ask(api: Api) -> str:
            explanation = await if_accepted(
                explain_pod(api, self.namespace, instance.pod, time.time()), (403, 404)
            )
            if explanation is None:
                return ""
            return "; ".join(filter(None, (explanation.sentence, explanation.scale_out)))

        return cluster.ask(self._target, ask, cluster.explain_denial)

    def events(self, job: TrainingJob) -> list[JobEvent]:
        """Return the events of a job and its instances, the oldest first."""

        async def read(api: Api) -> list[JobEvent]:
            objects = await read_training_objects(api, job.namespace, job.name, pods_only=True)
            uids = {job.uid, *(pod.metadata.uid for pod in objects.pods)}
            runs = [objects.current(root) for root in objects.roots if not job.foreign]

            def concerns(event: training_objects.TrainingEvent) -> bool:
                return event.involved_object.uid in uids or any(
                    event.concerns_jobs_of(run) for run in runs
                )

            return [
                JobEvent(
                    f"{event.involved_object.kind.lower()}/{event.involved_object.name}",
                    event.type,
                    seconds(event.at) or 0,
                    event.reason,
                    event.message,
                )
                for event in await read_events(api, job.namespace, concerns)
            ]

        return cluster.ask(self._target, read, cluster.explain_denial)

    def logs(self, name: str, request: LogRequest) -> TrainingJob:
        """Print a log. Return the job as it is at the end of it."""
        return cluster.converse(
            self._target, lambda api: self._logs(api, name, request), cluster.explain_denial
        )

    def attach(self, job: TrainingJob, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in an instance, connected to this terminal. Return its exit code."""
        from fenka.cli.workloads.terminal import run_attached

        instance = require_instance(job, request.instance)
        if instance.phase != "Running":
            raise UserError(f"{instance.name} is not running: it is {instance.status}")

        async def run(api: Api) -> int:
            objects = await read_training_objects(api, job.namespace, job.name, pods_only=True)
            pod = _pod_of(objects, instance)
            if pod is None:
                raise UserError(f"pod {instance.pod} has ended meanwhile")
            _require_container(instance, pod, request.container)
            container = request.container or pod.main_container
            try:
                return await run_attached(api, pod.path, container, command)
            except ApiError as why:
                if why.status != 403:
                    raise
                raise UserError(
                    f"you may not run commands in pods of namespace {job.namespace}: ask for the "
                    "ClusterRole fenka-user"
                ) from None

        return cluster.converse(self._target, run, cluster.explain_denial)

    def delete(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs by one request each: the garbage collector removes what their root object owns."""
        for job in jobs:
            if job.foreign:
                raise UserError(
                    f"job {job.name} was not created by fenka, which therefore leaves it as it is: use "
                    f"kubectl delete {job.trainer} {job.name} -n {job.namespace}"
                )
        uids = {job.uid for job in jobs}

        async def delete(api: Api) -> None:
            roots, _ = await read_roots(api, self._scope)
            at_once = asyncio.Semaphore(MAX_DELETIONS)
            deletions = [_delete(api, root, at_once) for root in roots if root.metadata.uid in uids]
            # All of them, even if some are refused.
            for result in await asyncio.gather(*deletions, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

        cluster.ask(self._target, delete, cluster.explain_denial)

    async def _logs(self, api: Api, name: str, request: LogRequest) -> TrainingJob:
        job, pod = await self._look(api, name, request.instance)
        options = LogOptions(request.container, request.tail, request.since_s, request.timestamps)
        may_come = request.follow and job.status in ("QUEUING", "PENDING")
        if not (may_come and pod is None):
            # What is named does not exist, and will not.
            instance = require_instance(job, request.instance)
            _require_container(instance, pod, request.container)
        if request.follow:
            return await self._follow(api, name, request.instance, options)
        assert pod is not None
        container = log_container(pod, request.container)
        if not container:
            raise UserError(f"{instance.name} has no log yet: it is {instance.status}")
        async for block in read_log(api, pod, replace(options, container=container)):
            tables.write_bytes(block)
        return job

    async def _follow(self, api: Api, name: str, instance: str, options: LogOptions) -> TrainingJob:
        job: TrainingJob | None = None

        async def find() -> LogSource:
            nonlocal job
            job, pod = await self._look(api, name, instance)
            shown = _shown_instance(job, instance)
            if shown is not None:
                _require_container(shown, pod, options.container)
            ended = shown is not None and not shown.chief and shown.phase == "Succeeded"
            return LogSource(pod, last=job.finished or ended)

        async for line in follow_log(api, find, options, pod_logs.POLL_S):
            tables.write_bytes(f"{line}\n".encode())
        assert job is not None
        return job

    async def _look(
        self, api: Api, name: str, instance: str
    ) -> tuple[TrainingJob, training_objects.TrainingPod | None]:
        """Return a job and the pod of one of its instances; None if that does not exist now."""
        objects = training_objects.TrainingObjects()
        if _NAME.fullmatch(name):
            objects = await read_training_objects(api, self.namespace, name, pods_only=True)
        jobs = sorted(training_jobs(objects, time.time()), key=lambda job: job.foreign)
        if not jobs:
            raise UserError(f"job {name} not found in namespace {self.namespace}")
        shown = _shown_instance(jobs[0], instance)
        return jobs[0], _pod_of(objects, shown) if shown else None


async def _read_queue(api: Api) -> Queue | None:
    """Return the cluster's queue; None without the right to read it. Raises ApiError, ApiUnreachable."""
    from fenka.cli.queue import cluster_rows

    rows = await if_accepted(cluster_rows(api, report=lambda _: None), (403,))
    return None if rows is None else {(row.namespace, row.name): row.position for row in rows}


async def _delete(api: Api, root: training_objects.Root, at_once: asyncio.Semaphore) -> None:
    """Delete a root object, unless somebody else has. Raises ApiError, ApiUnreachable."""
    uid = {"uid": root.metadata.uid}
    async with at_once:
        request = api.delete(root.path, {"propagationPolicy": "Background", "preconditions": uid})
        # 409: the name is another job's now.
        await if_accepted(request, (404, 409))


def require_instance(job: TrainingJob, name: str) -> JobProcess:
    """Return an instance of a job: the chief if none is named. Raises UserError."""
    instance = _shown_instance(job, name)
    if instance is not None:
        return instance
    names = ", ".join(instance.name for instance in job.instances) or "none now"
    if name:
        raise UserError(f"job {job.name} has no instance {name}: its instances are {names}")
    raise UserError(
        f"job {job.name} is {job.status}, and its chief does not exist now: its instances are {names} (-i)"
    )


def _require_container(
    instance: JobProcess, pod: training_objects.TrainingPod | None, name: str
) -> None:
    """Raise UserError if the instance's pod has no container of this name."""
    if pod is None or not name:
        return
    names = [container.name for container in (*pod.spec.init_containers, *pod.spec.containers)]
    if name not in names:
        raise UserError(
            f"{instance.name} has no container {name}: its containers are {', '.join(names)}"
        )


def _shown_instance(job: TrainingJob, name: str) -> JobProcess | None:
    return job.instance(name) if name else job.chief


def _pod_of(
    objects: training_objects.TrainingObjects, instance: JobProcess
) -> training_objects.TrainingPod | None:
    return next((pod for pod in objects.pods if pod.metadata.name == instance.pod), None)


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
    rendered = notebook_manifest.render(spec, password)
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
    _change(target, name, lambda api, root, runs: submission.start(api, root, runs, now))
    print(f"{name}: started, see `fenka get {name}`", flush=True)


def stop(target: JobTarget, names: Sequence[str]) -> None:
    """Stop all notebooks named, even if some of them cannot be stopped. Raises UserError."""
    failures = []
    for name in names:
        try:
            _change(target, name, submission.stop)
        except FenkaError as why:
            failures.append(str(why))
        else:
            print(f"{name}: stopped")
    if failures:
        raise UserError("; ".join(failures))


def _change(
    target: JobTarget,
    name: str,
    change: Callable[
        [Api, training_objects.Root, list[training_objects.BatchJob]], Awaitable[None]
    ],
) -> None:
    place = target.namespace or cluster.namespace(target)
    jobs = ClusterJobs(target, place)
    jobs.require(name)

    async def find_and_change(api: Api) -> None:
        roots, runs = await read_roots(api, place, name)
        root = next(
            (
                root
                for root in roots
                if root.metadata.labels.get(training_objects.KIND) == "notebook"
            ),
            None,
        )
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
