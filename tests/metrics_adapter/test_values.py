"""Test the metrics: with real servers on loopback in the place of pods, gateways and node programs."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from fenka.core.request import Slice
from fenka.gateway.metrics import GatewayMetrics
from fenka.metrics_adapter.exposition import MAX_VALUE, NoValue
from fenka.metrics_adapter.values import MAX_GATEWAYS, MAX_PODS, version_selector
from fenka.node.lease.store import Lease
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import NodeUsage, SliceUsage
from tests.gateway.harness import GET, FakeReplica, Installation, installation, table, version
from tests.metrics_adapter.harness import (
    LOOPBACK,
    OWN,
    Json,
    Stage,
    pod_json,
    response,
    silence,
    stage,
)
from tests.node.harness import card
from tests.waiting import until

SELECTED = {"servingName": "bert", "servingVersion": "v1"}
SELECTOR = "servingName=bert,servingVersion=v1"
GATEWAY = {"servingName": "bert", "fenka.io_role": "gateway"}
WAITING = "vllm:num_requests_waiting"


async def replica(area: Stage, name: str, text: str) -> Json:
    """Create a pod of version v1 with these metrics."""
    return await area.pod(name, response(text.encode()), "http-metrics", **SELECTED)


async def gateway(area: Stage, name: str, text: bytes) -> Json:
    """Create a pod of the gateway with these metrics."""
    return await area.pod(name, response(text), "admin", **GATEWAY)


def gateway_text(waiting: int = 0, in_flight: int = 0) -> bytes:
    """Return what a gateway with version v1 alone exports."""
    return (
        f'fenka_gateway_requests_in_flight{{version="v1"}} {in_flight}\n'
        f'fenka_gateway_version_weight{{version="v1"}} 1\n'
        f"fenka_gateway_requests_waiting {waiting}\n"
    ).encode()


async def test_gauge_is_the_sum_over_the_selected_pods() -> None:
    """Pods of other versions, services and namespaces are not asked."""
    async with stage() as area:
        await replica(area, "a", f'{WAITING}{{model="m"}} 2\n')
        await replica(area, "b", f"{WAITING} 3\n")
        port = await area.listen(response(f"{WAITING} 100\n".encode()))
        area.api.put("pods", pod_json("c", port, "http-metrics", servingName="bert"))
        area.api.put("pods", pod_json("a", port, "http-metrics", "other", **SELECTED))
        assert await area.value(WAITING, SELECTOR) == 5
        assert area.connections[port] == 0
        assert await area.value(WAITING, SELECTOR, "empty") == 0


async def test_gauge_is_an_error_when_one_pod_does_not_have_it() -> None:
    """The sum of the others would be too low."""
    async with stage() as area:
        await replica(area, "a", f"{WAITING} 2\n")
        await replica(area, "b", "other 3\n")
        with pytest.raises(NoValue, match=f"pod b does not have the metric {WAITING}"):
            await area.value(WAITING, SELECTOR)


async def test_gauge_leaves_out_pods_that_have_ended() -> None:
    """A terminating pod has ended when it refuses connections; others are an error then."""
    async with stage() as area:
        await replica(area, "a", f"{WAITING} 2\n")
        done = await replica(area, "b", "")
        done["status"]["phase"] = "Succeeded"
        closed = await asyncio.start_server(lambda *_: None, LOOPBACK, 0)
        port = closed.sockets[0].getsockname()[1]
        closed.close()
        gone = area.api.put("pods", pod_json("c", port, "http-metrics", **SELECTED))
        with pytest.raises(NoValue, match="pod c refuses connections to port http-metrics"):
            await area.value(WAITING, SELECTOR)
        gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
        assert await area.value(WAITING, SELECTOR) == 2


async def test_node_is_not_asked_when_a_pod_uses_its_network() -> None:
    """Otherwise tenants could read any port of any node."""
    async with stage() as area:
        port = await area.listen(response(f"{WAITING} 1\n".encode()))
        pod = pod_json("a", port, "http-metrics", **SELECTED)
        pod["spec"]["hostNetwork"] = True
        area.api.put("pods", pod)
        with pytest.raises(NoValue, match="pod a uses its node's network"):
            await area.value(WAITING, SELECTOR)
        assert area.connections[port] == 0


async def test_sum_is_an_error_when_it_is_too_large() -> None:
    """Each pod's value is in range, their sum is not."""
    async with stage() as area:
        for name in "ab":
            await replica(area, name, f"{WAITING} {MAX_VALUE}\n")
        with pytest.raises(NoValue, match=r"the sum of .* is more than 1e\+12"):
            await area.value(WAITING, SELECTOR)


@pytest.mark.parametrize(
    ("namespace", "metric", "selector", "sentence"),
    [
        ("default", WAITING, "", "no pods are selected"),
        ("default", "a/b", SELECTOR, "name is not one of Prometheus"),
        ("default", "a" * 201, SELECTOR, "name is not one of Prometheus"),
        ("../nodes", WAITING, SELECTOR, "name of the namespace is invalid"),
        ("default", "fenka_requests", "servingName=bert", "by matchLabels servingName and"),
    ],
)
async def test_question_is_refused_when_it_is_invalid(
    namespace: str, metric: str, selector: str, sentence: str
) -> None:
    """Nothing is listed."""
    async with stage() as area:
        with pytest.raises(NoValue, match=sentence) as caught:
            await area.value(metric, selector, namespace)
        assert caught.value.code == 400
        assert not area.api.requests


@pytest.mark.parametrize(
    "selector",
    [
        "servingName=bert",
        "servingName=bert,servingVersion=v1,app=x",
        "servingName=bert,servingVersion=v1,servingVersion=v2",
        "servingName in (bert),servingVersion=v1",
        "servingName!=bert,servingVersion=v1",
        "servingName=bert,!servingVersion",
        "servingName=,servingVersion=v1",
        ",,",
    ],
)
def test_version_is_unknown_when_the_selector_is_no_pair_of_equalities(selector: str) -> None:
    """Requests are of exactly one version."""
    with pytest.raises(NoValue, match="select it by matchLabels"):
        version_selector(selector)
    assert version_selector(" servingVersion==v1 , servingName = bert") == ("bert", "v1")


async def test_value_is_an_error_when_pods_cannot_be_listed() -> None:
    """A refusal, nonsense, too many pods, too large pods, and no answer."""
    async with stage() as area:
        area.api.forbidden = {"pods"}
        with pytest.raises(NoValue, match="pods cannot be listed: pods is forbidden"):
            await area.value(WAITING, SELECTOR)
        area.api.forbidden = set()

        async def nonsense(_: web.Request) -> web.Response:
            return web.Response(body=b"{}{")

        area.api.before = nonsense
        with pytest.raises(NoValue, match=r"pods cannot be listed: .* not understood"):
            await area.value(WAITING, SELECTOR)

        async def large(_: web.Request) -> web.Response:
            return web.Response(body=b" " * (17 << 20))

        area.api.before = large
        with pytest.raises(NoValue, match="the selected pods are larger than 16 MiB"):
            await area.value(WAITING, SELECTOR)
        area.api.before = None
        for number in range(MAX_PODS + 1):
            area.api.put("pods", pod_json(f"p{number}", 1, "http-metrics", **SELECTED))
        with pytest.raises(NoValue, match=f"more than {MAX_PODS} pods are selected"):
            await area.value(WAITING, SELECTOR)
        await area.api.stop()
        with pytest.raises(NoValue, match="the API server does not answer"):
            await area.value(WAITING, SELECTOR)
        await area.api.start()


def exported(gateway: Installation) -> bytes:
    """Return the metrics of a real gateway."""
    return b"".join(GatewayMetrics(gateway.gateway, lambda: True).text())


async def test_requests_are_read_from_a_real_gateways_metrics() -> None:
    """Two versions without replicas share three waiting requests by weight; each gets at least 1."""
    async with stage() as area, installation() as real:
        real.dispatcher.update(table(version("v1", weight=90), version("v2", weight=10)))
        async with real.client() as first, real.client() as second, real.client() as third:
            for client in (first, second, third):
                await client.send(GET)
            await until(lambda: len(real.dispatcher.buffer) == 3)
            await gateway(area, "g1", exported(real))
            assert await area.value("fenka_requests", SELECTOR) == pytest.approx(2.7)
            other = SELECTOR.replace("v1", "v2")
            assert await area.value("fenka_requests", other) == 1


async def test_requests_at_replicas_are_read_from_a_real_gateways_metrics() -> None:
    """Those that the replicas have not answered."""
    async with (
        stage() as area,
        installation(FakeReplica(handler=silence)) as real,
        real.client() as first,
        real.client() as second,
    ):
        for client in (first, second):
            await client.send(GET)
        await until(lambda: real.in_flight == 2)
        await gateway(area, "g1", exported(real))
        assert await area.value("fenka_requests", SELECTOR) == 2


async def test_requests_are_summed_over_gateways() -> None:
    """All of them, or none: a gateway that does not answer makes the value an error."""
    async with stage() as area:
        await gateway(area, "g1", gateway_text(in_flight=3, waiting=1))
        await gateway(area, "g2", gateway_text(in_flight=4))
        assert await area.value("fenka_requests", SELECTOR) == 8
        await gateway(area, "g3", b"")
        with pytest.raises(NoValue, match="pod g3 is no gateway"):
            await area.value("fenka_requests", SELECTOR)


async def test_requests_are_an_error_when_no_gateway_runs() -> None:
    """One that has not started does not count."""
    async with stage() as area:
        pending = await gateway(area, "g1", gateway_text())
        pending["status"]["phase"] = "Pending"
        with pytest.raises(NoValue, match="no gateway of service bert runs in namespace default"):
            await area.value("fenka_requests", SELECTOR)
        for number in range(MAX_GATEWAYS + 1):
            area.api.put("pods", pod_json(f"g{number}", 1, "admin", **GATEWAY))
        with pytest.raises(NoValue, match=f"more than {MAX_GATEWAYS} pods"):
            await area.value("fenka_requests", SELECTOR)


NODE_LABELS = {"app.kubernetes.io_name": "fenka", "component": "gpushare-device-plugin"}


def node_text(*shares: tuple[str, float | None, int]) -> bytes:
    """Return a real node program's metrics. shares: pod, share of the card and requested percent."""
    exporter = Exporter("n1")
    usages = tuple(usage(pod, share, percent) for pod, share, percent in shares)
    exporter.sample = NodeUsage(usages, (card(0),))
    registry = CollectorRegistry()
    registry.register(exporter)
    return generate_latest(registry)


async def node_program(area: Stage, text: bytes) -> None:
    """Run the node program of node n1."""
    port = await area.listen(response(text))
    area.api.put("pods", pod_json("fenka-node-x", port, "metrics", OWN, **NODE_LABELS))


def usage(pod: str, share: float | None, percent: int) -> SliceUsage:
    """Return what a pod uses of card 0."""
    piece = Slice(0, card(0).uuid, 100, percent)
    lease = Lease(f"uid-{pod}", "default", pod, "main", [piece], [piece], {})
    return SliceUsage(f"t-{pod}", lease, piece, 0, 0, 1, share)


async def test_busy_share_is_read_from_real_node_programs_metrics() -> None:
    """0.5 of the card is all of a slice of 40 %, and half of one that requests no share."""
    async with stage() as area:
        for name in ("a", "b", "c"):
            await replica(area, name, "")
        await node_program(area, node_text(("a", 0.5, 40), ("b", 0.5, 0), ("c", 0.2, 40)))
        assert await area.value("fenka_gpu_busy", SELECTOR) == pytest.approx(1 + 0.5 + 0.5)


def test_busy_share_is_the_cards_when_the_slices_compute_is_a_weight() -> None:
    """A weight reserves nothing."""
    reserved = usage("a", 0.2, 40)
    weighted = replace(reserved, lease=msgspec.structs.replace(reserved.lease, weighted=True))
    assert [reserved.busy, weighted.busy] == pytest.approx([0.5, 0.2])


async def test_busy_share_of_a_pod_is_the_mean_of_its_slices() -> None:
    """An autoscaler's target is a share of one pod."""
    row = 'fenka_container_gpu_busy_ratio{namespace="default",pod="a",container="main",uuid="%s"} %s\n'
    async with stage() as area:
        await replica(area, "a", "")
        await node_program(area, (row % (1, 0.2) + row % (2, 0.6)).encode())
        assert await area.value("fenka_gpu_busy", SELECTOR) == pytest.approx(0.4)


async def test_busy_share_is_an_error_when_it_is_not_known_of_each_pod() -> None:
    """No program on its node, no slice, no metrics port, and a driver that reports nothing."""
    async with stage() as area:
        await replica(area, "a", "")
        with pytest.raises(NoValue, match="no node program of fenka runs on node n1"):
            await area.value("fenka_gpu_busy", SELECTOR)
        await node_program(area, node_text(("other", 0.5, 0)))
        with pytest.raises(NoValue, match="node n1 reports no slice of pod a"):
            await area.value("fenka_gpu_busy", SELECTOR)
        await node_program(area, node_text(("a", None, 0)))
        with pytest.raises(NoValue, match="node n1 reports no slice of pod a"):
            await area.value("fenka_gpu_busy", SELECTOR)
        program = pod_json("fenka-node-x", 1, "http", OWN, **NODE_LABELS)
        area.api.put("pods", program)
        with pytest.raises(NoValue, match="pod fenka-node-x has no port named metrics"):
            await area.value("fenka_gpu_busy", SELECTOR)
        assert await area.value("fenka_gpu_busy", SELECTOR, "empty") == 0


async def test_busy_share_ignores_node_programs_of_other_namespaces() -> None:
    """Any tenant can label a pod as one."""
    async with stage() as area:
        await replica(area, "a", "")
        port = await area.listen(response(node_text(("a", 0.1, 0))))
        area.api.put("pods", pod_json("fake", port, "metrics", "default", **NODE_LABELS))
        with pytest.raises(NoValue, match="no node program"):
            await area.value("fenka_gpu_busy", SELECTOR)
