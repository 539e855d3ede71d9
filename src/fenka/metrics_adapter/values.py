"""The metrics: which pods each is about, and how their figures become one value.

One version's values, from the figures of its service's gateways. Pure.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from fenka.cluster.service_objects import GATEWAY, SERVICE, VERSION
from fenka.cluster.training_objects import ROLE
from fenka.core.scaling import VersionUse, version_loads
from fenka.core.units import MIB
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable, Page, decoded
from fenka.metrics_adapter import exposition
from fenka.metrics_adapter.scraper import (
    Ended,
    ScrapedEndpoint,
    ScrapedPod,
    Scraper,
    endpoints,
    running,
)

IN_FLIGHT = "fenka_gateway_requests_in_flight"
WAITING = "fenka_gateway_requests_waiting"
WEIGHT = "fenka_gateway_version_weight"
REPLICAS = "fenka_gateway_replicas"
IDLE = "fenka_gateway_version_idle_seconds"
READY = "ready"

RECENT_S = 20.0
"""A version that got a request within this time is in use.

Autoscalers look every 15 s by default, so one of their looks is within it. More would only make
`--down-after` longer, which begins at the last look that saw a version in use.
"""
SOME_REQUESTS = 0.001
"""The smallest value that can be served."""

GATEWAY_LABELS: dict[str, exposition.LabelValues] = {
    IN_FLIGHT: ("version",),
    WAITING: (),
    WEIGHT: ("version",),
    REPLICAS: ("version", "state"),
    IDLE: ("version",),
}
"""The gateway's metrics that are read, with their labels."""


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """One gateway's figures, by version.

    Attributes:
        idle_s: Seconds since the last request.
        waiting: Requests without a replica, of all versions.
    """

    in_flight: dict[str, float]
    weights: dict[str, float]
    ready: dict[str, float]
    idle_s: dict[str, float]
    waiting: float

    @classmethod
    def of(cls, pod: str, sums: exposition.Sums) -> Self:
        """Return the figures that a pod answered. Raises NoValue."""
        if () not in sums[WAITING]:
            raise exposition.NoValue(f"pod {pod} is no gateway: it does not have {WAITING}")
        return cls(
            {version: value for (version,), value in sums[IN_FLIGHT].items()},
            {version: value for (version,), value in sums[WEIGHT].items()},
            {
                version: value
                for (version, state), value in sums[REPLICAS].items()
                if state == READY
            },
            {version: value for (version,), value in sums[IDLE].items()},
            sums[WAITING][()],
        )


def requests_of(version: str, gateways: Sequence[GatewayFigures]) -> float:
    """Return a version's load by the figures of all gateways of its service; see `version_loads`.

    An autoscaler looks now and then, and would miss all short requests of a version in use: it is never 0.
    Raises NoValue for a version that a gateway does not know.
    """
    for gateway in gateways:
        if version not in gateway.weights or version not in gateway.in_flight:
            raise exposition.NoValue(
                f"a gateway does not know version {version}: it has no Service yet"
            )
    names = {name for gateway in gateways for name in gateway.weights}
    uses = {
        name: VersionUse(
            max(gateway.weights.get(name, 0) for gateway in gateways),
            sum(gateway.in_flight.get(name, 0) for gateway in gateways),
            any(gateway.ready.get(name) for gateway in gateways),
        )
        for name in names
    }
    load = version_loads(uses, sum(gateway.waiting for gateway in gateways))[version]
    in_use = uses[version].serves and any(
        gateway.idle_s.get(version, RECENT_S) < RECENT_S for gateway in gateways
    )
    return max(load, SOME_REQUESTS) if in_use else load


WITHIN_S = 5.0
"""For one value, from the first request to the last answer."""
MAX_PODS = 500
MAX_GATEWAYS = 50
MAX_LIST = 16 * MIB
"""Bytes of the list of a selector's pods: tenants write most of a pod."""

GATEWAY_PORT, METRICS_PORT = "admin", "http-metrics"
"""The ports of a gateway's and a replica's pods with their metrics."""

NODE_PROGRAMS = "app.kubernetes.io/name=fenka,component=gpushare-device-plugin"
NODE_PORT = "metrics"
BUSY = "fenka_container_gpu_busy_ratio"
BUSY_LABELS: dict[str, exposition.LabelValues] = {BUSY: ("namespace", "pod", "container", "uuid")}
MAX_SLICES = 20_000
"""Of one node."""

_EQUALITY = re.compile(r"([^=!,() ]+) *==? *([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")


def version_selector(selector: str) -> tuple[str, str]:
    """Return the service and the version that a selector names. Raises NoValue."""
    matches = [_EQUALITY.fullmatch(term.strip()) for term in selector.split(",")]
    labels = {match[1]: match[2] for match in matches if match}
    if len(labels) != len(matches) or labels.keys() != {SERVICE, VERSION}:
        raise exposition.NoValue(
            f"{exposition.REQUESTS} is of one version of a service: select it by matchLabels "
            f"{SERVICE} and {VERSION}",
            exposition.BAD_REQUEST,
        )
    return labels[SERVICE], labels[VERSION]


class Values:
    """Computes values. namespace: where the node programs are."""

    def __init__(
        self,
        api: Api,
        scraper: Scraper,
        namespace: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api, self._scraper, self._namespace, self._now = api, scraper, namespace, now

    async def value(self, namespace: str, metric: str, selector: str) -> float:
        """Return the value of a metric for the pods that a selector matches. Raises NoValue."""
        if not exposition.NAMESPACE.fullmatch(namespace):
            raise exposition.NoValue("the name of the namespace is invalid", exposition.BAD_REQUEST)
        if not exposition.METRIC.fullmatch(metric):
            raise exposition.NoValue(
                "the metric's name is not one of Prometheus' format", exposition.BAD_REQUEST
            )
        if not selector:
            raise exposition.NoValue(
                "no pods are selected: set metric.selector of the autoscaler",
                exposition.BAD_REQUEST,
            )
        try:
            async with asyncio.timeout(WITHIN_S):
                value = await self._compute(namespace, metric, selector)
        except TimeoutError:
            raise exposition.NoValue(f"not all pods answered within {WITHIN_S:g} s") from None
        if value > exposition.MAX_VALUE:
            raise exposition.NoValue(f"the sum of {metric} is more than {exposition.MAX_VALUE:.0e}")
        return value

    async def _compute(self, namespace: str, metric: str, selector: str) -> float:
        if metric == exposition.REQUESTS:
            return await self._requests(namespace, *version_selector(selector))
        if metric == exposition.GPU_BUSY:
            return await self._gpu_busy(namespace, selector)
        return await self._gauge(namespace, metric, selector)

    async def _requests(self, namespace: str, service: str, version: str) -> float:
        selector = f"{SERVICE}={service},{ROLE}={GATEWAY}"
        pods = await self._pods(namespace, MAX_GATEWAYS, labelSelector=selector)
        answers = await self._ask(endpoints(pods, GATEWAY_PORT, self._now()), GATEWAY_LABELS)
        if not answers:
            raise exposition.NoValue(
                f"no gateway of service {service} runs in namespace {namespace}"
            )
        return requests_of(
            version, [GatewayFigures.of(endpoint.pod, sums) for endpoint, sums in answers]
        )

    async def _gpu_busy(self, namespace: str, selector: str) -> float:
        """Return the sum over pods of the busy share of their slices, of each pod's slices the mean."""
        pods = await self._pods(namespace, labelSelector=selector)
        selected = list(running(pods, self._now()))
        nodes = sorted({pod.spec.node_name for pod in selected})
        programs = await asyncio.gather(*map(self._node_program, nodes))
        shares: dict[str, list[float]] = {pod.metadata.name: [] for pod in selected}
        for _, sums in await self._ask(programs, BUSY_LABELS, MAX_SLICES):
            for (owner, pod_name, _, _), share in sums[BUSY].items():
                if owner == namespace and pod_name in shares:
                    shares[pod_name].append(share)
        for pod in selected:
            if not shares[pod.metadata.name] and not pod.ending:
                raise exposition.NoValue(
                    f"node {pod.spec.node_name} reports no slice of pod {pod.metadata.name}: it has "
                    "requested none, or started a moment ago"
                )
        return sum(sum(values) / len(values) for values in shares.values() if values)

    async def _node_program(self, node: str) -> ScrapedEndpoint:
        on_node = f"spec.nodeName={node}"
        pods = await self._pods(self._namespace, labelSelector=NODE_PROGRAMS, fieldSelector=on_node)
        for endpoint in endpoints(pods, NODE_PORT, self._now()):
            if not endpoint.ending:
                return endpoint
        raise exposition.NoValue(f"no node program of fenka runs on node {node}")

    async def _gauge(self, namespace: str, metric: str, selector: str) -> float:
        pods = await self._pods(namespace, labelSelector=selector)
        total = 0.0
        asked = endpoints(pods, METRICS_PORT, self._now())
        for endpoint, sums in await self._ask(asked, {metric: ()}):
            if () not in sums[metric]:
                raise exposition.NoValue(f"pod {endpoint.pod} does not have the metric {metric}")
            total += sums[metric][()]
        return total

    async def _ask(
        self,
        asked: Iterable[ScrapedEndpoint],
        labels: Mapping[str, exposition.LabelValues],
        *bounds: int,
    ) -> list[tuple[ScrapedEndpoint, exposition.Sums]]:
        """Return the answers of all pods that have not ended. Raises NoValue."""
        asked = list(asked)
        results = await asyncio.gather(
            *(self._answer(endpoint, labels, *bounds) for endpoint in asked)
        )
        answers = zip(asked, results, strict=True)
        return [(endpoint, sums) for endpoint, sums in answers if sums is not None]

    async def _answer(
        self, endpoint: ScrapedEndpoint, labels: Mapping[str, exposition.LabelValues], *bounds: int
    ) -> exposition.Sums | None:
        try:
            return await self._scraper.sums(endpoint, labels, *bounds)
        except Ended:
            return None

    async def _pods(self, namespace: str, most: int = MAX_PODS, **query: str) -> list[ScrapedPod]:
        """List pods. Raises NoValue."""
        path, listed = f"/api/v1/namespaces/{namespace}/pods", bytearray()
        try:
            async for block in self._api.stream(path, limit=most, **query):
                listed += block
                if len(listed) > MAX_LIST:
                    raise exposition.NoValue(
                        f"the selected pods are larger than {MAX_LIST // MIB} MiB"
                    )
            page = decoded(bytes(listed), Page[ScrapedPod])
        except ApiError as error:
            raise exposition.NoValue(f"the pods cannot be listed: {error}") from None
        except ApiUnreachable:
            raise exposition.NoValue(
                "the pods cannot be listed: the API server does not answer"
            ) from None
        if page.metadata.continue_:
            raise exposition.NoValue(f"more than {most} pods are selected")
        return page.items or []
