"""Test the chart's dashboard and monitors."""

import json
from typing import Any

from fenka.jobs.manifests.service_manifest import GatewaySettings, render_gateway
from fenka.jobs.service import ServiceSpec
from tests.deploy.chart import (
    CHART,
    Json,
    find,
    needs_helm,
    render,
)


def read_dashboard() -> Json:
    """Return the chart's dashboard."""
    board: Json = json.loads((CHART / "files" / "dashboard.json").read_text())
    return board


def test_dashboard_queries_cover_pods_and_cards() -> None:
    """Used memory, limit and utilisation of pods; temperature and power of cards."""
    queries = " ".join(
        target["expr"] for panel in read_dashboard()["panels"] for target in panel["targets"]
    )
    for metric in (
        "fenka_container_gpu_memory_used_bytes",
        "fenka_container_gpu_memory_limit_bytes",
        "fenka_container_gpu_utilization_ratio",
        "fenka_card_temperature_celsius",
        "fenka_card_power_watts",
    ):
        assert metric in queries


@needs_helm
def test_monitors_honor_labels_when_enabled() -> None:
    """Otherwise Prometheus replaces the measured pod's name by the scraped pod's."""
    monitors = monitors_of(**{"node.metrics.enabled": True})
    assert honored(monitors) == {
        "fenka-scheduler": True,
        "fenka-node": True,
        "fenka-gateways": False,
    }


def monitors_of(**values: Any) -> list[Json]:
    """Return the monitors of an installation with these values."""
    objects = render(**{"serviceMonitor.enabled": True, **values})
    return [item for item in objects if item["kind"] in ("PodMonitor", "ServiceMonitor")]


def honored(monitors: list[Json]) -> dict[str, bool]:
    """Return whether samples may name another pod than the scraped one, by monitor."""
    return {
        monitor["metadata"]["name"]: endpoint.get("honorLabels", False)
        for monitor in monitors
        for kind in ("endpoints", "podMetricsEndpoints")
        for endpoint in monitor["spec"].get(kind, [])
    }


@needs_helm
def test_monitors_select_the_ports_of_every_program() -> None:
    """A tenant may label a pod as a gateway, so what gateways say of other pods does not count."""
    config = {"cluster": "a", "provider": {"kind": "simulated"}, "groups": [{"name": "t4"}]}
    values = {"autoscaler.enabled": True, "autoscaler.config": config}
    objects = render(**values)
    monitors = monitors_of(**values)
    assert honored(monitors) == {
        "fenka-scheduler": True,
        "fenka-node": True,
        "fenka-autoscaler": True,
        "fenka-gateways": False,
    }
    autoscaler, gateways = (
        next(item["spec"] for item in monitors if item["metadata"]["name"] == f"fenka-{name}")
        for name in ("autoscaler", "gateways")
    )
    template = find(objects, "Deployment", "fenka-autoscaler")["spec"]["template"]
    assert matches(autoscaler, template)
    spec = ServiceSpec(name="bert", restful_port=80)
    made = render_gateway(spec, "team", GatewaySettings("fenka"), ["v1"])
    (deployment,) = (item for item in made if item["kind"] == "Deployment")
    assert matches(gateways, deployment["spec"]["template"])
    assert gateways["namespaceSelector"] == {"any": True}
    off = monitors_of(**{"serviceMonitor.gateways": False})
    assert "fenka-gateways" not in honored(off)


def matches(monitor: Json, template: Json) -> bool:
    """Return whether a PodMonitor scrapes a pod of this template."""
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    labels = monitor["selector"]["matchLabels"].items()
    return (
        labels <= template["metadata"]["labels"].items()
        and {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    )
