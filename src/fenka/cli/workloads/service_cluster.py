"""Services of a cluster, for the commands about them."""

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
from fenka.cluster.training_objects import TrainingPod
from fenka.jobs.collection import Contents, read_config_files
from fenka.jobs.kubernetes import service_changes
from fenka.jobs.kubernetes.service_deployment import GatewayRequest, deploy
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes import pod_logs
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.pod_logs import LogOptions, LogSource, follow_log, log_container, read_log
from fenka.kubernetes.reader import read_services
from fenka.views.cluster_workloads import service_versions
from fenka.views.workloads import ServiceVersion

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


class ClusterServices:
    """Services of one namespace, or of all; see ServiceBackend."""

    def __init__(self, target: JobTarget, namespace: str, *, all_namespaces: bool = False) -> None:
        if not _NAME.fullmatch(namespace):
            raise UserError(f"invalid namespace {namespace!r}: no cluster can have it")
        # An API server that does not answer is an error here, whatever runs on this machine.
        self._target, self.namespace = replace(target, cluster=True), namespace
        self._scope = None if all_namespaces else namespace

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""
        if name is not None and not _NAME.fullmatch(name):
            return []

        async def read(api: Api) -> list[ServiceVersion]:
            return service_versions(await read_services(api, self._scope, name), time.time())

        return self._ask(read)

    def deploy(self, spec: ServiceSpec, gateway: GatewayChoice) -> list[str]:
        """Deploy a version. Return the versions that the service had before."""
        contents = Contents(config_files=read_config_files(spec))
        now, options = datetime.now(UTC), _options(gateway)
        state = self._ask(lambda api: deploy(api, self.namespace, spec, contents, options, now))
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
        self._check(name)
        options = _options(gateway)
        return self._ask(
            lambda api: service_changes.update(
                api, self.namespace, name, version, change, options, surge=surge
            )
        )

    def undo(self, name: str, version: str, surge: bool | None) -> ServiceSpec:
        """Make a version what it was before its last update. Return it as it is now."""
        self._check(name)
        options = _options(GatewayChoice())
        return self._ask(
            lambda api: service_changes.undo(
                api, self.namespace, name, version, options, surge=surge
            )
        )

    def delete(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""
        self._check(name)
        self._ask(lambda api: service_changes.delete(api, self.namespace, name, version))

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions. route: by this HTTPRoute."""
        self._check(name)
        if route and not _NAME.fullmatch(route):
            raise UserError(f"HTTPRoute {route} not found in namespace {self.namespace}")
        self._ask(lambda api: service_changes.split(api, self.namespace, name, weights, route))

    def logs(self, version: ServiceVersion, request: LogRequest) -> None:
        """Print the log of a replica."""
        name = find_replica(version, request.instance)
        self._ask(lambda api: self._print_log(api, version, name, request))

    def attach(self, version: ServiceVersion, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in a replica, connected to this terminal. Return its exit code."""
        from fenka.cli.workloads.terminal import run_attached

        name = find_replica(version, request.instance)

        async def run(api: Api) -> int:
            pod = await self._pod(api, version, name)
            if pod is None or pod.status.phase != "Running":
                raise UserError(
                    f"replica {name} is not running: see fenka serve get {version.name}"
                )
            container = request.container or pod.main_container
            return await run_attached(api, pod.path, container, command)

        return self._ask(run)

    async def _print_log(
        self, api: Api, version: ServiceVersion, name: str, request: LogRequest
    ) -> None:
        options = LogOptions(request.container, request.tail, request.since_s, request.timestamps)

        async def find() -> LogSource:
            pod = await self._pod(api, version, name)
            return LogSource(pod, last=pod is None or pod.finished)

        if request.follow:
            async for line in follow_log(api, find, options, pod_logs.POLL_S):
                tables.write_bytes(f"{line}\n".encode())
            return
        pod = await self._pod(api, version, name)
        container = log_container(pod, request.container) if pod else ""
        if pod is None or not container:
            raise UserError(f"replica {name} has no log yet: see fenka serve get {version.name}")
        async for block in read_log(api, pod, replace(options, container=container)):
            tables.write_bytes(block)

    async def _pod(self, api: Api, version: ServiceVersion, name: str) -> TrainingPod | None:
        objects = await read_services(api, version.namespace, version.name)
        return next((pod for pod in objects.pods if pod.metadata.name == name), None)

    def _check(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UserError(f"service {name} not found in namespace {self.namespace}")

    def _ask(self, question: Callable[[Api], Awaitable[T]]) -> T:
        return cluster.converse(self._target, question, cluster.explain_denial)


def _options(gateway: GatewayChoice) -> GatewayRequest:
    def report(text: str) -> None:
        print(tables.escape(text), file=sys.stderr, flush=True)

    return GatewayRequest(gateway.gateway_image, gateway.gateway_replicas, report)
