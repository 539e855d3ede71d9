"""Workloads of a cluster, for the commands about them."""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from fenka.cli import cluster, tables
from fenka.cli.common_options import Target
from fenka.cli.error_report import UserError
from fenka.cli.workloads.arguments import GatewayChoice, LogRequest, require_instance
from fenka.cluster.objects import seconds
from fenka.cluster.service_objects import ServiceObjects
from fenka.cluster.training_objects import Root, TrainingEvent, TrainingObjects, TrainingPod
from fenka.core.errors import FAILURE
from fenka.jobs.collection import Contents, read_config_files
from fenka.jobs.kubernetes import service_changes
from fenka.jobs.kubernetes.gateway_insertion import GatewayRequest
from fenka.jobs.kubernetes.service_deployment import deploy
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes import pod_logs
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.kubernetes.pod_logs import LogOptions, LogSource, follow_log, log_container, read_log
from fenka.kubernetes.reader import read_events, read_roots, read_services, read_training_objects
from fenka.views.cluster_workloads import Queue, service_versions, training_jobs
from fenka.views.workloads import JobEvent, JobProcess, ServiceVersion, TrainingJob, Workload

MAX_DELETIONS = 32
"""Requests at a time."""

_NAME = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""Names of namespaces, services and routes."""

T = TypeVar("T")


class ClusterBackend:
    """Workloads of one namespace, or of all."""

    def __init__(self, target: Target, namespace: str, *, all_namespaces: bool = False) -> None:
        if not _LABEL.fullmatch(namespace):
            raise UserError(f"invalid namespace {namespace!r}: no cluster can have it")
        self._target, self.namespace = target, namespace
        self._scope = None if all_namespaces else namespace

    def not_found(self, kind: str, name: str) -> str:
        """Return a sentence: there is none of this kind and name."""
        return f"{kind} {name} not found in namespace {self.namespace}"

    def workloads(
        self, name: str | None = None, *, positions: bool = False
    ) -> tuple[list[TrainingJob], list[ServiceVersion]]:
        """Return what `jobs` and `versions` do. The right to read one of both is enough to find a name."""

        async def read(api: Api) -> tuple[list[TrainingJob], list[ServiceVersion]]:
            jobs, versions = await asyncio.gather(
                self._read_jobs(api, name, positions=positions),
                self._read_versions(api, name),
                return_exceptions=True,
            )
            for error, others in ((jobs, versions), (versions, jobs)):
                if isinstance(error, BaseException):
                    denied = isinstance(error, ApiError) and error.status == 403
                    found = bool(others) and not isinstance(others, BaseException)
                    if not (name and denied and found):
                        raise error
            return _known(jobs), _known(versions)

        return self._ask(read)

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or those with this name, the newest first.

        positions: read the queue of the cluster if a job waits.
        """
        return self._ask(lambda api: self._read_jobs(api, name, positions=positions))

    async def _read_jobs(self, api: Api, name: str | None, *, positions: bool) -> list[TrainingJob]:
        if name is not None and not _NAME.fullmatch(name):
            return []
        objects = await read_training_objects(api, self._scope, name)
        waiting = any(not (pod.spec.node_name or pod.finished) for pod in objects.pods)
        queue = await _read_queue(api) if positions and waiting else None
        return training_jobs(objects, time.time(), queue)

    def require(self, name: str) -> TrainingJob:
        """Return the job of fenka with this name. Raises UserError."""
        own = [job for job in self.jobs(name) if not job.foreign]
        if not own:
            raise UserError(self.not_found("job", name))
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

        return self._ask(ask)

    def events(self, workload: Workload) -> list[JobEvent]:
        """Return the events of a workload and its instances, the oldest first."""
        foreign = isinstance(workload, TrainingJob) and workload.foreign

        async def read(api: Api) -> list[JobEvent]:
            objects = await _read_objects(api, workload)
            uids = {workload.uid, *(pod.metadata.uid for pod in objects.pods)}
            runs = (
                [objects.current(root) for root in objects.roots]
                if isinstance(objects, TrainingObjects) and not foreign
                else []
            )

            def concerns(event: TrainingEvent) -> bool:
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
                for event in await read_events(api, workload.namespace, concerns)
            ]

        return self._ask(read)

    def logs(self, workload: Workload, request: LogRequest) -> Workload:
        """Print the log of an instance of a workload. Return the workload as it is at its end."""
        return self._converse(lambda api: _print_log(api, workload, request))

    def exit_code(self, job: TrainingJob) -> int:
        """Return the exit code of a job that has ended: the chief's, or that of a process that failed."""
        if job.status == "SUCCEEDED":
            return 0
        instances = [job.chief, *job.instances]
        codes = (instance.exit_code for instance in instances if instance is not None)
        return next(filter(None, codes), FAILURE)

    def attach(self, workload: Workload, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in an instance, connected to this terminal. Return its exit code."""
        from fenka.cli.workloads.terminal import run_attached

        instance = require_instance(workload, request.instance)

        async def run(api: Api) -> int:
            pod = _pod_of(await _read_objects(api, workload), instance)
            if pod is None or pod.status.phase != "Running":
                raise UserError(f"{instance.name} is not running: it is {instance.status}")
            _require_container(instance, pod, request.container)
            container = request.container or pod.main_container
            try:
                return await run_attached(api, pod.path, container, command)
            except ApiError as why:
                if why.status != 403:
                    raise
                raise UserError(
                    f"you may not run commands in pods of namespace {workload.namespace}: ask for the "
                    "ClusterRole fenka-user"
                ) from None

        return self._converse(run)

    def delete_jobs(self, jobs: Sequence[TrainingJob]) -> None:
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

        self._ask(delete)

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""
        return self._converse(lambda api: self._read_versions(api, name))

    async def _read_versions(self, api: Api, name: str | None) -> list[ServiceVersion]:
        if name is not None and not _LABEL.fullmatch(name):
            return []
        return service_versions(await read_services(api, self._scope, name), time.time())

    def deploy(self, spec: ServiceSpec, gateway: GatewayChoice) -> list[str]:
        """Deploy a version. Return the versions that the service had before."""
        contents = Contents(config_files=read_config_files(spec))
        now, options = datetime.now(UTC), _gateway_request(gateway)
        state = self._converse(
            lambda api: deploy(api, self.namespace, spec, contents, options, now)
        )
        return sorted(state.versions)

    def update(
        self,
        name: str,
        version: str,
        change: Callable[[ServiceSpec], ServiceSpec],
        gateway: GatewayChoice,
        surge: bool | None,
    ) -> ServiceSpec:
        """Change a version, or the only one if none is named. Return it as it is now."""
        self._check_service(name)
        options = _gateway_request(gateway)
        return self._converse(
            lambda api: service_changes.update(
                api, self.namespace, name, version, change, options, surge=surge
            )
        )

    def undo(self, name: str, version: str, surge: bool | None) -> ServiceSpec:
        """Make a version what it was before its last update. Return it as it is now."""
        self._check_service(name)
        options = _gateway_request(GatewayChoice())
        return self._converse(
            lambda api: service_changes.undo(
                api, self.namespace, name, version, options, surge=surge
            )
        )

    def delete_service(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""
        self._check_service(name)
        self._converse(lambda api: service_changes.delete(api, self.namespace, name, version))

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions. route: by this HTTPRoute."""
        self._check_service(name)
        if route and not _LABEL.fullmatch(route):
            raise UserError(f"HTTPRoute {route} not found in namespace {self.namespace}")
        self._converse(lambda api: service_changes.split(api, self.namespace, name, weights, route))

    def _check_service(self, name: str) -> None:
        if not _LABEL.fullmatch(name):
            raise UserError(self.not_found("service", name))

    def _ask(self, question: Callable[[Api], Awaitable[T]]) -> T:
        return cluster.ask(self._target, question, cluster.explain_denial)

    def _converse(self, conversation: Callable[[Api], Awaitable[T]]) -> T:
        return cluster.converse(self._target, conversation, cluster.explain_denial)


def _known(read: list[T] | BaseException) -> list[T]:
    return [] if isinstance(read, BaseException) else read


async def _read_queue(api: Api) -> Queue | None:
    """Return the cluster's queue; None without the right to read it. Raises ApiError, ApiUnreachable."""
    from fenka.cli.queue_command import cluster_rows

    rows = await if_accepted(cluster_rows(api, report=lambda _: None), (403,))
    if rows is None:
        return None
    return {(row.namespace, row.name): row.position for row in rows if row.position}


async def _delete(api: Api, root: Root, at_once: asyncio.Semaphore) -> None:
    """Delete a root object, unless somebody else has. Raises ApiError, ApiUnreachable."""
    uid = {"uid": root.metadata.uid}
    async with at_once:
        request = api.delete(root.path, {"propagationPolicy": "Background", "preconditions": uid})
        # 409: the name is another job's now.
        await if_accepted(request, (404, 409))


def _require_container(instance: JobProcess, pod: TrainingPod | None, name: str) -> None:
    """Raise UserError if the instance's pod has no container of this name."""
    if pod is None or not name:
        return
    names = [container.name for container in (*pod.spec.init_containers, *pod.spec.containers)]
    if name not in names:
        raise UserError(
            f"{instance.name} has no container {name}: its containers are {', '.join(names)}"
        )


async def _read_objects(api: Api, workload: Workload) -> TrainingObjects | ServiceObjects:
    """Return the objects of a workload. Raises ApiError, ApiUnreachable."""
    if isinstance(workload, ServiceVersion):
        return await read_services(api, workload.namespace, workload.name)
    return await read_training_objects(api, workload.namespace, workload.name, pods_only=True)


def _pod_of(objects: TrainingObjects | ServiceObjects, instance: JobProcess) -> TrainingPod | None:
    return next((pod for pod in objects.pods if pod.metadata.name == instance.pod), None)


async def _print_log(api: Api, workload: Workload, request: LogRequest) -> Workload:
    """Print the log of an instance. Raises UserError, ApiError, ApiUnreachable."""
    options = LogOptions(request.container, request.tail, request.since_s, request.timestamps)
    instance = workload.instance(request.instance) if request.instance else workload.chief
    awaited = isinstance(workload, TrainingJob) and workload.status in ("QUEUING", "PENDING")
    if not (request.follow and awaited):
        instance = require_instance(workload, request.instance)

    async def find() -> LogSource:
        nonlocal workload, instance
        objects = await _read_objects(api, workload)
        ended = False
        if isinstance(objects, TrainingObjects):
            workload = _same_job(objects, workload)
            instance = workload.instance(request.instance) if request.instance else workload.chief
            worker = instance is not None and not instance.chief and instance.phase == "Succeeded"
            ended = workload.finished or worker
        pod = _pod_of(objects, instance) if instance else None
        if instance is not None:
            _require_container(instance, pod, options.container)
        gone = isinstance(workload, ServiceVersion) and (pod is None or pod.finished)
        return LogSource(pod, last=ended or gone)

    if request.follow:
        async for line in follow_log(api, find, options, pod_logs.POLL_S):
            tables.write_bytes(f"{line}\n".encode())
        return workload
    pod = (await find()).pod
    container = log_container(pod, options.container) if pod else ""
    if pod is None or not container:
        instance = require_instance(workload, request.instance)
        raise UserError(f"{instance.name} has no log yet: it is {instance.status}")
    async for block in read_log(api, pod, replace(options, container=container)):
        tables.write_bytes(block)
    return workload


def _same_job(objects: TrainingObjects, job: Workload) -> TrainingJob:
    """Return what a job is now. Raises UserError if it has been deleted."""
    assert isinstance(job, TrainingJob)
    for known in training_jobs(objects, time.time()):
        if (known.trainer, known.foreign) == (job.trainer, job.foreign):
            return known
    raise UserError(f"job {job.name} not found in namespace {job.namespace}")


def _gateway_request(gateway: GatewayChoice) -> GatewayRequest:
    def report(text: str) -> None:
        print(tables.escape(text), file=sys.stderr, flush=True)

    return GatewayRequest(gateway.gateway_image, gateway.gateway_replicas, report)
