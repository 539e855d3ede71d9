"""Run the job engine that fenka's jobs of several pods stand on: JobSet, installed by the chart."""

import json
from typing import Any

import pytest

from e2e.cluster import Cluster, wait_until
from e2e.images import WORKLOAD

WORKER = """
import http.server
http.server.HTTPServer(("", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
LAUNCHER = """
import urllib.request
for number in range(2):
    url = f"http://pair-worker-0-{number}.pair:8000/etc/hostname"
    print(urllib.request.urlopen(url, timeout=20).read().decode().strip())
"""


def role(name: str, program: str, pods: int, **fields: Any) -> dict[str, Any]:
    """Return one replicated job of a JobSet."""
    container: dict[str, Any] = {
        "name": "main",
        "image": WORKLOAD,
        "imagePullPolicy": "Never",
        "command": ["python3", "-u", "-c", program],
        "workingDir": "/",
    }
    if name == "worker":
        container["readinessProbe"] = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    job = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": {"spec": pod}}
    return {"name": name, "template": {"spec": job}, **fields}


@pytest.mark.usefixtures("jobset")
def test_jobset_runs_to_its_end_when_the_launcher_depends_on_ready_workers(
    cluster: Cluster, namespace: str
) -> None:
    """Pods reach each other by name; the launcher's success ends the workers and the job."""
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "pair"},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
            "replicatedJobs": [
                role("worker", WORKER, 2),
                role(
                    "launcher",
                    LAUNCHER,
                    1,
                    dependsOn=[{"name": "worker", "status": "Ready"}],
                ),
            ],
        },
    }
    cluster.apply(json.dumps(document), namespace)

    def completed() -> bool:
        status = cluster.get("jobset", "pair", namespace).get("status", {})
        assert status.get("terminalState") == "Completed", status
        return True

    wait_until("the JobSet's end", completed)
    launcher = cluster.list("pods", namespace, "jobset.sigs.k8s.io/replicatedjob-name=launcher")
    output = cluster.kubectl("-n", namespace, "logs", launcher[0]["metadata"]["name"])
    assert output.split() == ["pair-worker-0-0", "pair-worker-0-1"]
    wait_until(
        "the workers' end",
        lambda: len(cluster.list("pods", namespace)) == 1,
    )
