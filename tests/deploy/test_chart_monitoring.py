"""Test the chart's dashboard and monitors."""

import json
from typing import Any

import pytest
import yaml

from fenka.jobs.manifests.gateway_manifest import GatewaySettings, render_gateway
from fenka.jobs.service import ServiceSpec
from tests.deploy.chart import (
    CHART,
    Json,
    find,
    needs_helm,
    render,
)
from tools.monitoring.__main__ import boards

FILES = CHART / "files"


def test_boards_are_those_of_the_tool() -> None:
    """`python -m tools.monitoring` writes them: a change by hand would be lost."""
    for file, content in boards().items():
        assert file.read_text() == content, file.name


def test_gpu_app_has_the_panels_of_the_article() -> None:
    """Used and allowed memory of pods in one panel, their utilisation; temperature and power of cards."""
    board = json.loads((FILES / "gpu-app.json").read_text())
    panels = {panel["title"]: panel for panel in board["panels"]}
    memory = panels["GPU memory of pods"]
    assert (
        memory["fieldConfig"]["defaults"]["unit"],
        memory["fieldConfig"]["defaults"]["decimals"],
    ) == (
        "bytes",
        3,
    )
    assert len(memory["targets"]) == 2
    (override,) = memory["fieldConfig"]["overrides"]
    assert override["matcher"] == {"id": "byFrameRefID", "options": "B"}
    assert override["properties"][0]["value"]["fill"] == "dash"
    assert panels["GPU utilisation of pods"]["fieldConfig"]["defaults"]["max"] == 1
    assert {"Temperature of cards", "Power of cards", "Waiting pods"} <= panels.keys()
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "namespace", "pod", "node"]


def board_maps(**values: Any) -> dict[str, Json]:
    """Return the labels of the chart's boards by the ConfigMap's name."""
    return {
        item["metadata"]["name"]: item["metadata"]["labels"]
        for item in render(**values)
        if item["kind"] == "ConfigMap" and any(key.startswith("gpu-") for key in item["data"])
    }


@needs_helm
@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({"grafana.dashboard": True}, ("grafana_dashboard", "1")),
        ({"grafana.dashboard": True, "grafana.labels.team": "a"}, ("team", "a")),
        # As a release of 0.1.0 has them after `helm upgrade --reuse-values`.
        (
            {
                "grafana": None,
                "prometheusRule": None,
                "dashboard.enabled": True,
                "dashboard.labels.grafana_dashboard": "yes",
            },
            ("grafana_dashboard", "yes"),
        ),
    ],
)
def test_boards_are_installed_by_both_names_of_the_value(
    values: Json, label: tuple[str, str]
) -> None:
    """Grafana's sidecar finds them by their label."""
    maps = board_maps(**values)
    assert set(maps) == {"fenka-gpu-app", "fenka-gpu-operators"}
    for labels in maps.values():
        assert labels[label[0]] == label[1]
    assert not board_maps()


@needs_helm
def test_rules_are_installed_when_enabled() -> None:
    """As they are in the file, but for the alert that TensorFlow would raise all the time."""
    groups = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    for near in (False, True):
        values = {"prometheusRule.enabled": True, "prometheusRule.nearMemoryLimit": near}
        (rule,) = [item for item in render(**values) if item["kind"] == "PrometheusRule"]
        assert rule["spec"]["groups"] == [
            group for group in groups if near or group["name"] != "fenka.near-memory-limit"
        ]
    assert not [item for item in render() if item["kind"] == "PrometheusRule"]


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
