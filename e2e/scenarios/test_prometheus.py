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

from e2e.artifacts import CHART, CHART_FILES
from e2e.cluster import wait_until
from e2e.scenarios.containers import installed_with, pod, wait_for_agent
from e2e.scenarios.installation import Installation

ADDRESS = "127.0.0.1:19090"
CAP_BYTES = (15079 * 4 // 14) << 20
DASHBOARD = CHART_FILES / "dashboard.json"

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
        configuration.write_text(yaml.safe_dump({"scrape_configs": jobs}))
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


def query_samples(installation: Installation, query: str) -> list[Json]:
    """Return the samples of an instant query, or none while Prometheus does not answer."""
    url = f"http://{ADDRESS}/api/v1/query?{urlencode({'query': query})}"
    try:
        answer = json.loads(installation.cluster.fetch(url))
    except Exception:
        return []
    samples: list[Json] = answer["data"]["result"]
    return samples


def panels() -> dict[str, str]:
    """Return the dashboard's queries by title, with every namespace and node selected."""
    board = json.loads(DASHBOARD.read_text())
    return {
        panel["title"]: panel["targets"][0]["expr"]
        .replace("$namespace", ".*")
        .replace("$node", ".*")
        for panel in board["panels"]
    }


def test_dashboard_queries_return_one_series_per_pod_when_three_share_a_card(
    installation: Installation, prometheus: str
) -> None:
    """Series carry the pods' own names, though one node program exports all; also check the scheduler's."""
    names = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")
    for name in names:
        installation.cluster.apply(pod(name, "notebook=4:"))
        installation.cluster.wait_for_pod(name)
    pods = {("default", name) for name in names}
    queries = panels()

    def lines(title: str) -> dict[tuple[str, str], float]:
        return {
            (sample["metric"]["namespace"], sample["metric"]["pod"]): float(sample["value"][1])
            for sample in query_samples(installation, queries[title])
        }

    def seen() -> bool:
        return lines("GPU memory of pods: limit") == dict.fromkeys(pods, CAP_BYTES)

    wait_until("three series", seen)
    for title in queries:
        if "of pods" in title:
            assert set(lines(title)) == pods, title
        else:
            assert {
                sample["metric"]["node"] for sample in query_samples(installation, queries[title])
            } == {prometheus}
    limits = query_samples(installation, "fenka_container_gpu_memory_limit_bytes")
    assert {sample["metric"]["container"] for sample in limits} == {"notebook"}
    # Prometheus adds the labels that a sample lacks, such as the replica that it comes from.
    wait_until(
        "the scheduler's",
        lambda: query_samples(installation, 'up{job="fenka/fenka-scheduler"} == 1'),
    )
    wait_until("the node's", lambda: query_samples(installation, 'up{job="fenka/fenka-node"} == 1'))
