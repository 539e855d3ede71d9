"""Kueue before fenka: the blocks of docs/do/kueue.md on a cluster with Kueue's controller."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e import engines
from e2e.cluster import Cluster, wait_until
from e2e.scenarios.installation import WORKLOAD, Installation
from e2e.supervisor import REPOSITORY

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

PAGE = (REPOSITORY / "docs" / "do" / "kueue.md").read_text()
CONFIGURATION, QUEUES, JOB = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
WORKLOADS = "workloads.kueue.x-k8s.io"
"""In full, since Kubernetes has a kind of this name, too."""
SLEEP = ["sleep", "100000"]


@pytest.fixture(scope="module")
def kueue(cluster: Cluster) -> Iterator[None]:
    """Let Kueue run with the page's configuration."""
    with engines.kueue(cluster, CONFIGURATION):
        yield


@pytest.fixture
def queues(kueue: None, shared: Installation, namespace: str) -> Iterator[Installation]:
    """Provide both nodes sharing their card, and the page's queues."""
    del kueue
    cluster = shared.cluster

    def applied() -> bool:
        cluster.apply(QUEUES, namespace)
        return True

    # Its webhooks answer some time after the controller is ready.
    wait_until("Kueue's webhooks", applied, 60)
    yield shared
    cluster.kubectl("-n", namespace, "delete", "jobs", "--all", "--wait")
    # Only the controller removes their finalizers.
    wait_until("no workloads", lambda: not cluster.list(WORKLOADS, namespace), 60)
    cluster.kubectl("-n", namespace, "delete", "-f", "-", stdin=QUEUES)


def job(name: str, **limits: int) -> str:
    """Return the page's Job with this name, an image of the cluster, and these limits instead."""
    document: dict[str, Any] = yaml.safe_load(JOB)
    document["metadata"]["name"] = name
    pod = document["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 0
    (container,) = pod["containers"]
    container |= {"image": WORKLOAD, "imagePullPolicy": "Never", "command": SLEEP}
    if limits:
        container["resources"] = {"limits": limits}
    return json.dumps(document)


def is_suspended(cluster: Cluster, namespace: str, name: str) -> bool:
    """Return whether Kueue keeps a Job from starting."""
    return bool(cluster.get("job", name, namespace)["spec"]["suspend"])


def quota_message(cluster: Cluster, namespace: str, name: str) -> str:
    """Return why a Job has no quota; empty before Kueue has looked at it, and when it has."""
    for workload in cluster.list(WORKLOADS, namespace):
        if workload["metadata"]["ownerReferences"][0]["name"] == name:
            for condition in workload.get("status", {}).get("conditions", ()):
                if (condition["type"], condition["status"]) == ("QuotaReserved", "False"):
                    return str(condition["message"])
    return ""


def wait_for_card(cluster: Cluster, namespace: str, name: str, annotation: str) -> None:
    """Wait until the pod of a Job runs, with a record of its card."""
    selector = f"batch.kubernetes.io/job-name={name}"

    def runs() -> bool:
        pods = cluster.list("pods", namespace, selector)
        return any(
            pod["status"]["phase"] == "Running" and annotation in pod["metadata"]["annotations"]
            for pod in pods
        )

    wait_until(f"{name} runs", runs, 90)


def test_job_over_its_teams_quota_waits_although_cards_are_free(
    queues: Installation, namespace: str
) -> None:
    """12 GiB are the quota, and 28 the cards. The names of another system count as well."""
    cluster = queues.cluster
    cluster.apply(job("first"), namespace)
    wait_for_card(cluster, namespace, "first", "ALIYUN_COM_GPU_MEM_IDX")
    cluster.apply(job("second"), namespace)
    wait_until("Kueue's reason", lambda: quota_message(cluster, namespace, "second"), 60)
    reason = quota_message(cluster, namespace, "second")
    assert "insufficient unused quota for fenka.io/gpu-memory" in reason
    assert is_suspended(cluster, namespace, "second")
    assert not cluster.list("pods", namespace, "batch.kubernetes.io/job-name=second")

    # 16 blocks of 256 MiB are the 4 GiB that are left.
    blocks = {"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 16}
    cluster.apply(job("blocks", **blocks), namespace)
    wait_for_card(cluster, namespace, "blocks", "tencent.com/gpu-assigned")
    cluster.apply(
        job("one-more", **{"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 1}), namespace
    )
    wait_until("Kueue's reason", lambda: quota_message(cluster, namespace, "one-more"), 60)

    cluster.kubectl("-n", namespace, "delete", "job", "first", "--wait")
    wait_for_card(cluster, namespace, "second", "ALIYUN_COM_GPU_MEM_IDX")
    assert not is_suspended(cluster, namespace, "second")
