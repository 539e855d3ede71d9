"""The metrics: which pods each is about, and how their figures become one value."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from fenka.cluster.service_objects import GATEWAY, SERVICE, VERSION
from fenka.cluster.training_objects import ROLE
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable, Page, decoded
from fenka.metrics_adapter.exposition import LabelValues, Sums
from fenka.metrics_adapter.gateway_figures import GATEWAY_LABELS, GatewayFigures, requests_of
from fenka.metrics_adapter.pods import Endpoint, Pod, endpoints, running
from fenka.metrics_adapter.scraper import MIB, Ended, Scraper
from fenka.metrics_adapter.wire import (
    BAD_REQUEST,
    GPU_BUSY,
    MAX_VALUE,
    METRIC,
    NAMESPACE,
    REQUESTS,
    NoValue,
)

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
BUSY_LABELS: dict[str, LabelValues] = {BUSY: ("namespace", "pod", "container", "uuid")}
MAX_SLICES = 20_000
"""Of one node."""

_EQUALITY = re.compile(r"([^=!,() ]+) *==? *([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")


def version_selector(selector: str) -> tuple[str, str]:
    """Return the service and the version that a selector names. Raises NoValue."""
    matches = [_EQUALITY.fullmatch(term.strip()) for term in selector.split(",")]
    labels = {match[1]: match[2] for match in matches if match}
    if len(labels) != len(matches) or labels.keys() != {SERVICE, VERSION}:
        raise NoValue(
            f"{REQUESTS} is of one version of a service: select it by matchLabels {SERVICE} and {VERSION}",
            BAD_REQUEST,
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
        if not NAMESPACE.fullmatch(namespace):
            raise NoValue("the name of the namespace is invalid", BAD_REQUEST)
        if not METRIC.fullmatch(metric):
            raise NoValue("the metric's name is not one of Prometheus' format", BAD_REQUEST)
        if not selector:
            raise NoValue(
                "no pods are selected: set metric.selector of the autoscaler", BAD_REQUEST
            )
        try:
            async with asyncio.timeout(WITHIN_S):
                value = await self._compute(namespace, metric, selector)
        except TimeoutError:
            raise NoValue(f"not all pods answered within {WITHIN_S:g} s") from None
        if value > MAX_VALUE:
            raise NoValue(f"the sum of {metric} is more than {MAX_VALUE:.0e}")
        return value

    async def _compute(self, namespace: str, metric: str, selector: str) -> float:
        if metric == REQUESTS:
            return await self._requests(namespace, *version_selector(selector))
        if metric == GPU_BUSY:
            return await self._gpu_busy(namespace, selector)
        return await self._gauge(namespace, metric, selector)

    async def _requests(self, namespace: str, service: str, version: str) -> float:
        selector = f"{SERVICE}={service},{ROLE}={GATEWAY}"
        pods = await self._pods(namespace, MAX_GATEWAYS, labelSelector=selector)
        answers = await self._ask(endpoints(pods, GATEWAY_PORT, self._now()), GATEWAY_LABELS)
        if not answers:
            raise NoValue(f"no gateway of service {service} runs in namespace {namespace}")
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
                raise NoValue(
                    f"node {pod.spec.node_name} reports no slice of pod {pod.metadata.name}: it has "
                    "requested none, or started a moment ago"
                )
        return sum(sum(values) / len(values) for values in shares.values() if values)

    async def _node_program(self, node: str) -> Endpoint:
        on_node = f"spec.nodeName={node}"
        pods = await self._pods(self._namespace, labelSelector=NODE_PROGRAMS, fieldSelector=on_node)
        for endpoint in endpoints(pods, NODE_PORT, self._now()):
            if not endpoint.ending:
                return endpoint
        raise NoValue(f"no node program of fenka runs on node {node}")

    async def _gauge(self, namespace: str, metric: str, selector: str) -> float:
        pods = await self._pods(namespace, labelSelector=selector)
        total = 0.0
        asked = endpoints(pods, METRICS_PORT, self._now())
        for endpoint, sums in await self._ask(asked, {metric: ()}):
            if () not in sums[metric]:
                raise NoValue(f"pod {endpoint.pod} does not have the metric {metric}")
            total += sums[metric][()]
        return total

    async def _ask(
        self, asked: Iterable[Endpoint], labels: Mapping[str, LabelValues], *bounds: int
    ) -> list[tuple[Endpoint, Sums]]:
        """Return the answers of all pods that have not ended. Raises NoValue."""
        asked = list(asked)
        results = await asyncio.gather(*(self._answer(each, labels, *bounds) for each in asked))
        answers = zip(asked, results, strict=True)
        return [(endpoint, sums) for endpoint, sums in answers if sums is not None]

    async def _answer(
        self, endpoint: Endpoint, labels: Mapping[str, LabelValues], *bounds: int
    ) -> Sums | None:
        try:
            return await self._scraper.sums(endpoint, labels, *bounds)
        except Ended:
            return None

    async def _pods(self, namespace: str, most: int = MAX_PODS, **query: str) -> list[Pod]:
        """List pods. Raises NoValue."""
        path, listed = f"/api/v1/namespaces/{namespace}/pods", bytearray()
        try:
            async for block in self._api.stream(path, limit=most, **query):
                listed += block
                if len(listed) > MAX_LIST:
                    raise NoValue(f"the selected pods are larger than {MAX_LIST // MIB} MiB")
            page = decoded(bytes(listed), Page[Pod])
        except ApiError as error:
            raise NoValue(f"the pods cannot be listed: {error}") from None
        except ApiUnreachable:
            raise NoValue("the pods cannot be listed: the API server does not answer") from None
        if page.metadata.continue_:
            raise NoValue(f"more than {most} pods are selected")
        return page.items or []
