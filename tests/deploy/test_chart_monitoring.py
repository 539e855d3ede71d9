"""Test the chart's dashboard and monitors."""

import json

from tests.deploy.chart import (
    CHART,
    Json,
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
    objects = render(**{"serviceMonitor.enabled": True, "node.metrics.enabled": True})
    endpoints = [
        endpoint
        for document in objects
        for kind in ("endpoints", "podMetricsEndpoints")
        for endpoint in document.get("spec", {}).get(kind, [])
    ]
    assert [endpoint["honorLabels"] for endpoint in endpoints] == [True, True]
