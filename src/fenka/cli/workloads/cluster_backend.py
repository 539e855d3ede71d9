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
from fenka.cli.errors import UserError
from fenka.cli.workloads.backend import GatewayChoice, JobTarget, LogRequest, find_replica
from fenka.cluster import training_objects
from fenka.cluster.objects import seconds
from fenka.jobs.collection import Contents, read_config_files
from fenka.jobs.kubernetes import service_changes
from fenka.jobs.kubernetes.service_deployment import GatewayRequest, deploy
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes import pod_logs
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.kubernetes.pod_logs import LogOptions, LogSource, follow_log, log_container, read_log
from fenka.kubernetes.reader import read_events, read_roots, read_services, read_training_objects
from fenka.views.cluster_workloads import Queue, service_versions, training_jobs
from fenka.views.workloads import JobEvent, JobProcess, ServiceVersion, TrainingJob

MAX_DELETIONS = 32
"""Requests at a time."""

_NAME = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""Names of namespaces, services and routes."""

T = TypeVar("T")

FindPod = Callable[[Api], Awaitable[training_objects.TrainingPod]]


class ClusterBackend:
    """Workloads of one namespace, or of all; see Backend."""

    def __init__(self, target: JobTarget, namespace: str, *, all_namespaces: bool = False) -> None:
        if not _LABEL.fullmatch(namespace):
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

    def logs(self, workload: str | ServiceVersion, request: LogRequest) -> TrainingJob | None:
        """Print the log of a job's instance or of a replica. Return the job as it is at the end of it."""
        if isinstance(workload, str):
            return self._converse(lambda api: self._print_job_log(api, workload, request))
        name = find_replica(workload, request.instance)
        self._converse(lambda api: self._print_replica_log(api, workload, name, request))
        return None

    def attach(
        self, workload: TrainingJob | ServiceVersion, request: LogRequest, command: Sequence[str]
    ) -> int:
        """Run a command in an instance or a replica, connected to this terminal. Return its exit code."""
        from fenka.cli.workloads.terminal import run_attached

        find = (
            self._find_replica_pod(workload, request)
            if isinstance(workload, ServiceVersion)
            else self._find_instance_pod(workload, request)
        )

        async def run(api: Api) -> int:
            pod = await find(api)
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

    def _find_instance_pod(self, job: TrainingJob, request: LogRequest) -> FindPod:
        """Return what reads the pod of an instance that runs. Raises UserError, as that does."""
        instance = require_instance(job, request.instance)
        if instance.phase != "Running":
            raise UserError(f"{instance.name} is not running: it is {instance.status}")

        async def find(api: Api) -> training_objects.TrainingPod:
            objects = await read_training_objects(api, job.namespace, job.name, pods_only=True)
            pod = _pod_of(objects, instance)
            if pod is None:
                raise UserError(f"pod {instance.pod} has ended meanwhile")
            _require_container(instance, pod, request.container)
            return pod

        return find

    def _find_replica_pod(self, version: ServiceVersion, request: LogRequest) -> FindPod:
        """Return what reads the pod of a replica that runs. Raises UserError, as that does."""
        name = find_replica(version, request.instance)

        async def find(api: Api) -> training_objects.TrainingPod:
            pod = await self._replica_pod(api, version, name)
            if pod is None or pod.status.phase != "Running":
                raise UserError(
                    f"replica {name} is not running: see fenka serve get {version.name}"
                )
            return pod

        return find

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

        cluster.ask(self._target, delete, cluster.explain_denial)

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""
        if name is not None and not _LABEL.fullmatch(name):
            return []

        async def read(api: Api) -> list[ServiceVersion]:
            return service_versions(await read_services(api, self._scope, name), time.time())

        return self._converse(read)

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
            raise UserError(f"service {name} not found in namespace {self.namespace}")

    def _converse(self, conversation: Callable[[Api], Awaitable[T]]) -> T:
        return cluster.converse(self._target, conversation, cluster.explain_denial)

    async def _print_job_log(self, api: Api, name: str, request: LogRequest) -> TrainingJob:
        job, pod = await self._look(api, name, request.instance)
        options = _log_options(request)
        may_come = request.follow and job.status in ("QUEUING", "PENDING")
        if not (may_come and pod is None):
            # What is named does not exist, and will not.
            instance = require_instance(job, request.instance)
            _require_container(instance, pod, request.container)

        async def find() -> LogSource:
            nonlocal job
            job, pod = await self._look(api, name, request.instance)
            shown = _shown_instance(job, request.instance)
            if shown is not None:
                _require_container(shown, pod, options.container)
            ended = shown is not None and not shown.chief and shown.phase == "Succeeded"
            return LogSource(pod, last=job.finished or ended)

        if request.follow:
            await _follow(api, find, options)
        elif not await _print_log(api, pod, options):
            raise UserError(f"{instance.name} has no log yet: it is {instance.status}")
        return job

    async def _print_replica_log(
        self, api: Api, version: ServiceVersion, name: str, request: LogRequest
    ) -> None:
        options = _log_options(request)

        async def find() -> LogSource:
            pod = await self._replica_pod(api, version, name)
            return LogSource(pod, last=pod is None or pod.finished)

        if request.follow:
            await _follow(api, find, options)
        elif not await _print_log(api, await self._replica_pod(api, version, name), options):
            raise UserError(f"replica {name} has no log yet: see fenka serve get {version.name}")

    async def _replica_pod(
        self, api: Api, version: ServiceVersion, name: str
    ) -> training_objects.TrainingPod | None:
        objects = await read_services(api, version.namespace, version.name)
        return next((pod for pod in objects.pods if pod.metadata.name == name), None)

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


def _log_options(request: LogRequest) -> LogOptions:
    return LogOptions(request.container, request.tail, request.since_s, request.timestamps)


async def _follow(api: Api, find: Callable[[], Awaitable[LogSource]], options: LogOptions) -> None:
    async for line in follow_log(api, find, options, pod_logs.POLL_S):
        tables.write_bytes(f"{line}\n".encode())


async def _print_log(
    api: Api, pod: training_objects.TrainingPod | None, options: LogOptions
) -> bool:
    """Print a pod's log; return False if it has none yet."""
    container = log_container(pod, options.container) if pod else ""
    if pod is None or not container:
        return False
    async for block in read_log(api, pod, replace(options, container=container)):
        tables.write_bytes(block)
    return True


def _gateway_request(gateway: GatewayChoice) -> GatewayRequest:
    def report(text: str) -> None:
        print(tables.escape(text), file=sys.stderr, flush=True)

    return GatewayRequest(gateway.gateway_image, gateway.gateway_replicas, report)
