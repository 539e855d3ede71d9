"""Let a training use what a service leaves idle, and take it back."""

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.images import TRAINING
from e2e.scenarios.backfilling import MEMBER, attempts, backfill, steps
from e2e.scenarios.installation import MEMORY, Installation
from e2e.scenarios.jobs import Jobs
from e2e.scenarios.serving.observe import recorded

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

REPLICA = 4
"""Units of a replica: a card has room for one beside a member of the training."""


def service() -> str:
    """Return a Deployment of a model server that precedes jobs."""
    container: dict[str, Any] = {
        "name": "model",
        "image": TRAINING,
        "imagePullPolicy": "Never",
        "command": ["python3", "/opt/model_server.py"],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8000}, "periodSeconds": 1},
        "resources": {"limits": {MEMORY: REPLICA}},
    }
    labels = {"servingName": "model", "servingVersion": "v1"}
    spec = {"priorityClassName": "fenka-serving", "containers": [container]}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "model"},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
    )


def test_gang_is_evicted_whole_for_a_replica_and_goes_on_from_its_step(
    jobs: Jobs, shared: Installation
) -> None:
    """The third replica needs one member's memory; the member on the other node gives its own back, too."""
    cluster, namespace = shared.cluster, jobs.namespace
    nodes = [node.name for node in cluster.nodes]
    scale = ("-n", namespace, "scale", "deployment", "model")
    with recorded(cluster, namespace) as record, jobs.claim("steps", *nodes) as folder:

        def ready(replicas: int) -> bool:
            return sum(bool(pod.version) and pod.ready for pod in record.pods.values()) == replicas

        cluster.apply(service(), namespace)
        wait_until("a replica", lambda: ready(1), 120)
        backfill(jobs, folder)
        members = {pod.uid: pod for pod in record.pods.values() if pod.units == MEMBER}
        assert {pod.node for pod in members.values()} == set(nodes)

        cluster.kubectl(*scale, "--replicas=3")
        wait_until("three replicas", lambda: ready(3), 180)
        jobs.wait_for("gang", "PENDING")
        assert not members.keys() & record.pods.keys()
        before = [len(steps(folder, rank)) for rank in (0, 1)]

        cluster.kubectl(*scale, "--replicas=1")
        wait_until("steps of the next attempt", lambda: attempts(folder) == [1, 1], 180)
        for rank in (0, 1):
            numbers = [each["step"] for each in steps(folder, rank)]
            assert numbers == list(range(1, len(numbers) + 1))
            assert len(numbers) > before[rank]
        Path(folder, "end").touch()
        jobs.wait_for("gang", "SUCCEEDED")
    assert record.overcommitted() == record.violations == []
    assert record.samples
