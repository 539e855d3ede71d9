"""What a real Prometheus makes of fenka's metrics, scraped as the Operator would by the chart's monitors."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from e2e.cluster import wait_until
from e2e.scenarios.conftest import CHART
from e2e.scenarios.containers import installed_with, pod, wait_for_agent
from e2e.scenarios.installation import Installation

ADDRESS = "127.0.0.1:19090"
CAP_BYTES = (15079 * 4 // 14) << 20
DASHBOARD = CHART / "files" / "dashboard.json"
FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"

Json = dict[str, Any]


def rule(target: str, *source: str, **more: str) -> Json:
    """A relabelling."""
    return {"source_labels": list(source), "target_label": target, **more}


def keep(source: str, value: str) -> Json:
    """Only targets of which this is so."""
    return {"source_labels": [source], "regex": value, "action": "keep"}


def escape_label(label: str) -> str:
    """As Prometheus names a label of Kubernetes."""
    return "".join(letter if letter.isalnum() else "_" for letter in label)


def meta_labels(kind: str, labels: dict[str, str]) -> dict[str, str]:
    """Labels of an object as service discovery has them."""
    return {f"__meta_kubernetes_{kind}_label_{escape_label(k)}": v for k, v in labels.items()}


def discover_pods(installation: Installation, namespace: str) -> list[Json]:
    """Targets, one for each port of a container: Debian's Prometheus has no discovery in Kubernetes."""
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
    """Targets, one for each address of a Service."""
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
    """What the Prometheus Operator makes of a PodMonitor's or ServiceMonitor's only endpoint."""
    pods = monitor["kind"] == "PodMonitor"
    spec, namespace = monitor["spec"], monitor["metadata"]["namespace"]
    (end,) = spec["podMetricsEndpoints" if pods else "endpoints"]
    meta = "__meta_kubernetes_"
    selected = f"{meta}{'pod' if pods else 'service'}_label_"
    port = f"{meta}{'pod_container_port_name' if pods else 'endpoint_port_name'}"
    rules = [
        *(keep(selected + escape_label(k), v) for k, v in spec["selector"]["matchLabels"].items()),
        keep(port, end["port"]),
        rule("namespace", f"{meta}namespace"),
        rule("container", f"{meta}pod_container_name"),
        rule("pod", f"{meta}pod_name"),
        rule("job", replacement=f"{namespace}/{monitor['metadata']['name']}"),
        rule("endpoint", replacement=end["port"]),
    ]
    if not pods:
        rules.append(rule("service", f"{meta}service_name"))
    return {
        "job_name": f"{monitor['kind']}/{namespace}/{monitor['metadata']['name']}/0",
        "honor_labels": end.get("honorLabels", False),
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": targets,
        "relabel_configs": rules,
    }


def monitors(installation: Installation) -> list[Json]:
    """The chart's, with the values of the release that runs."""
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
    """Debian's, beside the control plane; the sharing node."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on the PATH: .ci/run installs Debian's")
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
    """The samples of an instant query, by Prometheus' own API; none before it answers."""
    url = f"http://{ADDRESS}/api/v1/query?{urlencode({'query': query})}"
    try:
        answer = json.loads(installation.cluster.run("python3", "-c", FETCH, url))
    except Exception:
        return []
    samples: list[Json] = answer["data"]["result"]
    return samples


def panels() -> dict[str, str]:
    """The board's queries by title, with every namespace and node chosen."""
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
    """By their own names, though one program of fenka's tells of all of them; and the scheduler's too."""
    names = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")
    for name in names:
        installation.cluster.apply(pod(name, "notebook=4:"))
        installation.cluster.wait_for_pod(name)
    wanted = {("default", name) for name in names}
    queries = panels()

    def lines(title: str) -> dict[tuple[str, str], float]:
        return {
            (sample["metric"]["namespace"], sample["metric"]["pod"]): float(sample["value"][1])
            for sample in query_samples(installation, queries[title])
        }

    def seen() -> bool:
        return lines("GPU memory of pods: allowed") == dict.fromkeys(wanted, CAP_BYTES)

    wait_until("three lines", seen, 90)
    for title in queries:
        if "of pods" in title:
            assert set(lines(title)) == wanted, title
        else:
            assert {
                sample["metric"]["node"] for sample in query_samples(installation, queries[title])
            } == {prometheus}
    limits = query_samples(installation, "fenka_container_gpu_memory_limit_bytes")
    assert {sample["metric"]["container"] for sample in limits} == {"notebook"}
    # Whom a sample does not name, Prometheus does: which replica it comes from.
    wait_until(
        "the scheduler's",
        lambda: query_samples(installation, 'up{job="fenka/fenka-scheduler"} == 1'),
        60,
    )
    wait_until(
        "the node's", lambda: query_samples(installation, 'up{job="fenka/fenka-node"} == 1'), 60
    )
