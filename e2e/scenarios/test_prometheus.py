"""Query fenka's metrics in a real Prometheus, scraped as the Operator would with the chart's monitors."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from e2e.artifacts import CHART
from e2e.cluster import wait_until
from e2e.scenarios.containers import installed_with, pod, wait_for_agent
from e2e.scenarios.installation import Installation
from tests.monitoring import BOARDS, FILES, board_queries, panel_queries, rule_queries, samples

ADDRESS = "127.0.0.1:19090"
CAP_BYTES = (15079 * 4 // 14) << 20

Json = dict[str, Any]


def rule(target: str, *source: str, **more: str) -> Json:
    """Return a relabelling rule."""
    return {"source_labels": list(source), "target_label": target, **more}


def keep(source: str, value: str) -> Json:
    """Return a rule that keeps only targets whose source label has this value."""
    return {"source_labels": [source], "regex": value, "action": "keep"}


def escape_label(label: str) -> str:
    """Return Prometheus' name for a Kubernetes label."""
    return "".join(letter if letter.isalnum() else "_" for letter in label)


def meta_labels(kind: str, labels: dict[str, str]) -> dict[str, str]:
    """Return an object's labels as service discovery provides them."""
    return {f"__meta_kubernetes_{kind}_label_{escape_label(k)}": v for k, v in labels.items()}


def discover_pods(installation: Installation, namespace: str) -> list[Json]:
    """Return a target for each container port, since Debian's Prometheus cannot discover in Kubernetes."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_namespace": namespace,
                "__meta_kubernetes_pod_name": pod["metadata"]["name"],
                "__meta_kubernetes_pod_container_name": container["name"],
                "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
                **meta_labels("pod", pod["metadata"]["labels"]),
            },
        }
        for pod in installation.cluster.list("pods", namespace)
        if pod["status"]["phase"] == "Running"
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
    ]


def discover_endpoints(installation: Installation, namespace: str) -> list[Json]:
    """Return a target for each address of each Service."""
    services = {
        service["metadata"]["name"]: service
        for service in installation.cluster.list("services", namespace)
    }
    return [
        {
            "targets": [f"{address['ip']}:{port['port']}"],
            "labels": {
                "__meta_kubernetes_namespace": namespace,
                "__meta_kubernetes_pod_name": address["targetRef"]["name"],
                "__meta_kubernetes_endpoint_port_name": port.get("name", ""),
                "__meta_kubernetes_service_name": name,
                **meta_labels("service", services[name]["metadata"]["labels"]),
            },
        }
        for endpoints in installation.cluster.list("endpoints", namespace)
        if (name := endpoints["metadata"]["name"]) in services
        for subset in endpoints.get("subsets", [])
        for address in subset.get("addresses", [])
        for port in subset["ports"]
    ]


def scrape_config(monitor: Json, targets: list[Json]) -> Json:
    """Return the scrape configuration that the Operator generates for a monitor's only endpoint."""
    pods = monitor["kind"] == "PodMonitor"
    spec, namespace = monitor["spec"], monitor["metadata"]["namespace"]
    (endpoint,) = spec["podMetricsEndpoints" if pods else "endpoints"]
    meta = "__meta_kubernetes_"
    selected = f"{meta}{'pod' if pods else 'service'}_label_"
    port = f"{meta}{'pod_container_port_name' if pods else 'endpoint_port_name'}"
    rules = [
        *(keep(selected + escape_label(k), v) for k, v in spec["selector"]["matchLabels"].items()),
        keep(port, endpoint["port"]),
        rule("namespace", f"{meta}namespace"),
        rule("container", f"{meta}pod_container_name"),
        rule("pod", f"{meta}pod_name"),
        rule("job", replacement=f"{namespace}/{monitor['metadata']['name']}"),
        rule("endpoint", replacement=endpoint["port"]),
    ]
    if not pods:
        rules.append(rule("service", f"{meta}service_name"))
    return {
        "job_name": f"{monitor['kind']}/{namespace}/{monitor['metadata']['name']}/0",
        "honor_labels": endpoint.get("honorLabels", False),
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": targets,
        "relabel_configs": rules,
    }


def monitors(installation: Installation) -> list[Json]:
    """Return the chart's monitors, rendered with the values of the installed release."""
    values = installation.cluster.helm("get", "values", "fenka", "-n", "fenka", "-o", "yaml")
    made = installation.cluster.state / "monitored.yaml"
    made.write_text(yaml.safe_dump(yaml.safe_load(values) | {"serviceMonitor": {"enabled": True}}))
    text = installation.cluster.helm(
        "template", "fenka", str(CHART), "-n", "fenka", "-f", str(made)
    )
    return [
        document | {"metadata": {"namespace": "fenka", **document["metadata"]}}
        for document in yaml.safe_load_all(text)
        if document and document["kind"] in ("PodMonitor", "ServiceMonitor")
    ]


@pytest.fixture
def prometheus(installation: Installation, sharing_node: str, tmp_path: Path) -> Iterator[str]:
    """Run Debian's Prometheus in the control plane's network; provide the sharing node."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on the PATH: .ci/run installs Debian's")
    with installed_with(installation, "node.metrics.enabled=true"):
        wait_for_agent(installation, sharing_node, 14)
        discover = {"PodMonitor": discover_pods, "ServiceMonitor": discover_endpoints}
        jobs = [
            scrape_config(monitor, discover[monitor["kind"]](installation, "fenka"))
            for monitor in monitors(installation)
        ]
        configuration = tmp_path / "prometheus.yaml"
        content = {
            "global": {"evaluation_interval": "1s"},
            "rule_files": [str(FILES / "rules.yaml")],
            "scrape_configs": jobs,
        }
        configuration.write_text(yaml.safe_dump(content))
        words = [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={ADDRESS}",
        ]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                installation.cluster.command(*words),
                env=installation.cluster.environment(),
                stdout=log,
                stderr=log,
            )
        try:
            yield sharing_node
        finally:
            process.kill()
            process.wait()
            installation.cluster.kubectl("delete", "pod", "--all", "--now")


def ask(installation: Installation, path: str, **arguments: str) -> Json:
    """Return an answer of Prometheus' API; an error while it does not answer."""
    url = f"http://{ADDRESS}/api/v1/{path}?{urlencode(arguments)}"
    try:
        answer: Json = json.loads(installation.cluster.fetch(url))
    except Exception as why:
        return {"status": "error", "error": f"{arguments}: {why}"}
    return answer


def query_samples(installation: Installation, query: str) -> list[tuple[dict[str, str], float]]:
    """Return the samples of an instant query. An error fails the test."""
    return samples(ask(installation, "query", query=query))


def test_boards_and_rules_are_answered_when_three_share_a_card_and_a_fourth_waits(
    installation: Installation, prometheus: str
) -> None:
    """Series carry the pods' own names, though one node program exports all; also check the scheduler's.

    No query of a board, a rule or an alert is an error.
    """
    names = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")
    for name in names:
        installation.cluster.apply(pod(name, "notebook=4:"))
        installation.cluster.wait_for_pod(name)
    installation.cluster.apply(pod("tf-notebook-4", "notebook=4:"))
    pods = {("default", name) for name in names}
    app, operators = panel_queries("gpu-app"), panel_queries("gpu-operators")

    def lines(query: str) -> dict[tuple[str, str], float]:
        found = query_samples(installation, query)
        return {(labels["namespace"], labels["pod"]): value for labels, value in found}

    def numbers(query: str) -> list[float]:
        return [value for _, value in query_samples(installation, query)]

    used, allowed = app["GPU memory of pods"]
    wait_until("Prometheus", lambda: ask(installation, "status/buildinfo")["status"] == "success")
    wait_until("three series", lambda: lines(allowed) == dict.fromkeys(pods, CAP_BYTES))
    assert set(lines(used)) == pods
    limits = query_samples(installation, "fenka_container_gpu_memory_limit_bytes")
    assert {labels["container"] for labels, _ in limits} == {"notebook"}
    throttled = app["Throttled: threads of pods that wait for their share"][0]
    wait_until("rates of three pods", lambda: set(lines(throttled)) == pods)
    for title in (
        "GPU memory of pods, used of allowed",
        "GPU utilisation of pods",
        "Refused GPU memory",
    ):
        assert set(lines(app[title][0])) == pods, title
    # Nothing limits their compute.
    assert lines(app["GPU utilisation of pods"][1]) == {}
    for title in ("Temperature of cards", "Power of cards", "GPU memory of cards, held and used"):
        for query in app[title]:
            nodes = {labels["node"] for labels, _ in query_samples(installation, query)}
            assert nodes == {prometheus}, title
    up = {"fenka/fenka-scheduler", "fenka/fenka-node"}
    wait_until(
        "all targets",
        lambda: up <= {labels["job"] for labels, _ in query_samples(installation, "up == 1")},
    )
    wait_until("the fourth pod", lambda: numbers(app["Waiting pods"][0]) == [1])
    assert numbers(operators["Leaders"][0]) == [1]
    assert numbers(operators["Cards out of use"][0]) == [0]
    reasons = query_samples(installation, operators["Waiting pods by reason"][0])
    assert [(labels["reason"], count) for labels, count in reasons] == [("memory", 1)]
    by_namespace = query_samples(installation, operators["Waiting pods by namespace"][0])
    assert [(labels["namespace"], count) for labels, count in by_namespace] == [("default", 1)]
    bound = 'sum(fenka_scheduler_binds_total{outcome="bound"})'
    assert numbers("sum(fenka_scheduler_wait_seconds_count)") >= numbers(bound) >= [3]
    for board in BOARDS:
        for query in board_queries(board):
            query_samples(installation, query)
    rules = rule_queries()
    for query in rules.values():
        query_samples(installation, query)
    records = [name for name in rules if ":" in name]
    wait_until("recording rules", lambda: all(numbers(name) for name in records))
    groups = ask(installation, "rules")["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    assert numbers('ALERTS{alertstate="firing"}') == []
