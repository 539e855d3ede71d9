"""Sets the number of replicas of a service's versions, where KEDA does not.

The leader is the first ready gateway by the name of its pod in the EndpointSlices, without a Lease. For a
moment there may be two. That is harmless: both compute the same absolute number from the same figures. A new
leader removes no replica before `down_after_s` is over.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from fenka.cluster.objects import Object
from fenka.cluster.service_objects import InvalidScaling, read_scaling
from fenka.cluster.training_objects import DEPLOYMENTS_API
from fenka.core.scaling import ReplicaScaler, ScalingPolicy
from fenka.gateway.endpoints import EndpointSource
from fenka.gateway.figures import FiguresReader, LoadReading
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.server.metrics import ProgramMetrics

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the gateways' figures."""
RECENT_S = 2 * LOOK_S
"""A version that got a request within this time is in use, so that no look misses short requests."""
SCALE_S = 10.0
"""A number of replicas that others may have changed is read again after this time."""


class ScaleSpec(Object):
    """The wanted number of replicas."""

    replicas: int = 0


class Scale(Object):
    """The scale of a Deployment, a subresource."""

    spec: ScaleSpec = msgspec.field(default_factory=ScaleSpec)


@dataclass(slots=True)
class _ScaledVersion:
    """A version that is scaled here.

    Attributes:
        policy: As the annotation has it.
        scaler: Decides.
        replicas: The number that was read or set last.
        read_at: When it was read.
        load: At the last look.
        problem: Why the number cannot be read or set.
    """

    policy: ScalingPolicy
    scaler: ReplicaScaler
    replicas: int = 0
    read_at: float | None = None
    load: float = 0.0
    problem: str = ""


class ServiceScaling:
    """Scales the versions of one service while this gateway leads.

    Attributes:
        error: Why the annotation about scaling is not used; empty if it is.
        leads: Whether this gateway scales.
        versions: The versions that it scales, by name.
    """

    def __init__(
        self,
        source: EndpointSource,
        reader: FiguresReader,
        pod: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pod: the name of this gateway's pod; empty for the host's name."""
        self._source, self._reader, self._clock = source, reader, clock
        self._pod = pod or socket.gethostname()
        self._missing: Mapping[str, str] = {}
        self.error = ""
        self.leads = False
        self.versions: dict[str, _ScaledVersion] = {}

    async def follow(self) -> None:
        """Scale until cancelled. A failure must not end the gateway, whose requests matter more."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("no version is scaled")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Set the numbers of replicas once, if this gateway leads."""
        policies = self._policies()
        first = next((peer.pod for peer in self._source.peers() if peer.ready), None)
        self.leads = first == self._pod
        if not (self.leads and policies):
            # The next leader begins with pauses of its own.
            self.versions = {}
            return
        self.versions = {
            version: known
            if (known := self.versions.get(version)) and known.policy == policy
            else _ScaledVersion(policy, ReplicaScaler(policy))
            for version, policy in policies.items()
        }
        reading = await self._reader.read()
        self._report(reading)
        # One after the other: a service has few versions, and the API server has many services.
        for version, scaled in self.versions.items():
            await self._scale(version, scaled, reading)

    def _policies(self) -> Mapping[str, ScalingPolicy]:
        try:
            policies, error = read_scaling(self._source.annotations()), ""
        except InvalidScaling as invalid:
            policies, error = {}, str(invalid)
        if error and error != self.error:
            log.warning("no version is scaled: %s", error)
        self.error = error
        return policies

    def _report(self, reading: LoadReading) -> None:
        if reading.missing and reading.missing.keys() != self._missing.keys():
            pod, reason = next(iter(reading.missing.items()))
            log.warning(
                "no replica is removed while %d gateways are missing: %s %s",
                len(reading.missing),
                pod,
                reason,
            )
        self._missing = reading.missing

    async def _scale(self, version: str, scaled: _ScaledVersion, reading: LoadReading) -> None:
        try:
            await self._set(version, scaled, reading)
            problem = ""
        except ApiError as error:
            scaled.read_at = None
            # An entry may outlive its version.
            problem = "" if error.status == 404 else str(error)
        except ApiUnreachable as error:
            scaled.read_at, problem = None, str(error)
        if problem and problem != scaled.problem:
            log.warning("version %s is not scaled: %s", version, problem)
        scaled.problem = problem

    async def _set(self, version: str, scaled: _ScaledVersion, reading: LoadReading) -> None:
        """Read the number of replicas now and then, and change it. Raises ApiError, ApiUnreachable."""
        now = self._clock()
        fresh = scaled.read_at is None or now - scaled.read_at > SCALE_S
        if fresh:
            await self._read_scale(version, scaled, now)
        wanted = self._wanted(version, scaled, reading, now)
        if wanted != scaled.replicas and not fresh:
            # Somebody else may have changed it since.
            await self._read_scale(version, scaled, now)
            wanted = self._wanted(version, scaled, reading, now)
        if wanted == scaled.replicas:
            return
        await self._source.api.patch(
            self._path(version), msgspec.Raw, {"spec": {"replicas": wanted}}
        )
        log.info(
            "version %s: %d -> %d replicas for a load of %.4g",
            version,
            scaled.replicas,
            wanted,
            scaled.load,
        )
        scaled.replicas = wanted

    def _wanted(
        self, version: str, scaled: _ScaledVersion, reading: LoadReading, now: float
    ) -> int:
        current, policy = scaled.replicas, scaled.policy
        scaled.load = reading.load(version, RECENT_S)
        if current == 0 and policy.least > 0:
            # As with Kubernetes' autoscaler: somebody has stopped it, or it is still being deployed.
            return 0
        # The load of the gateways that answer is a lower bound. So it may add replicas, and remove none.
        floor = 0.0 if reading.complete(version) else current * policy.target
        return scaled.scaler.step(now, current, max(scaled.load, floor))

    async def _read_scale(self, version: str, scaled: _ScaledVersion, now: float) -> None:
        scale = await self._source.api.get(self._path(version), Scale)
        scaled.replicas, scaled.read_at = scale.spec.replicas, now

    def _path(self, version: str) -> str:
        source = self._source
        deployments = f"{DEPLOYMENTS_API}/namespaces/{source.namespace}/deployments"
        return f"{deployments}/{source.service}-{version}/scale"


class ScalingMetrics(ProgramMetrics):
    """Metrics of the scaling."""

    prefix = "fenka_gateway_scaling_"

    def __init__(self, scaling: ServiceScaling, registry: CollectorRegistry) -> None:
        self._scaling = scaling
        super().__init__(registry)

    def collect(self) -> Iterator[Metric]:
        """Implement prometheus_client's Collector."""
        scaling = self._scaling
        rows = {(name,): version for name, version in scaling.versions.items()}
        yield self.gauge("valid", "0 if the annotation about scaling is invalid", not scaling.error)
        yield self.gauge("leader", "1 if this gateway sets the numbers of replicas", scaling.leads)
        yield self.gauges(
            "load",
            "Requests in flight, and the share of those that wait, of a version that this gateway scales",
            ("version",),
            ((name, version.load) for name, version in rows.items()),
        )
        yield self.gauges(
            "replicas",
            "Replicas that this gateway wants",
            ("version",),
            ((name, version.replicas) for name, version in rows.items()),
        )
        yield self.gauges(
            "failed",
            "1 if a version's number of replicas cannot be read or set",
            ("version",),
            ((name, bool(version.problem)) for name, version in rows.items()),
        )


@contextlib.asynccontextmanager
async def scaling_of(
    source: EndpointSource, pod: str, address: str
) -> AsyncIterator[ServiceScaling]:
    """Return what scales a service, and serve its figures to KEDA at an address while the block runs.

    address: empty to serve none. Raises OSError if its port is in use.
    """
    async with FiguresReader(source.peers) as reader, contextlib.AsyncExitStack() as stack:
        if address:
            # gRPC takes 20 MiB, and a workstation does not have it.
            from fenka.gateway.external_scaler import serve_scaler

            await stack.enter_async_context(serve_scaler(address, reader))
        yield ServiceScaling(source, reader, pod)
