"""Train by TensorFlow and PyTorch, and resume from a checkpoint after a drain: the second tier."""

import json
from collections.abc import Callable

import pytest

from e2e.cluster import wait_until
from e2e.images import FRAMEWORKS
from e2e.scenarios.containers import wait_for_no_leases
from e2e.scenarios.installation import Installation
from e2e.scenarios.jobs import CODE, Jobs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_chief_trains_through_workers_and_a_parameter_server_without_a_card(
    jobs: Jobs, node: str
) -> None:
    """The roles talk by gRPC; the parameter server and the workers end after the chief."""
    options = ["--image", FRAMEWORKS, "--ps=1", "--workers=2", "--chief", "--gpu-mem=2", CODE]
    command = ["/opt/tensorflow/bin/python3", "code/parameter_server.py"]
    jobs.submit("tfjob", "counting", *options, command=command)
    jobs.wait_for("counting", "RUNNING", 300)
    limits = [
        container["resources"].get("limits", {})
        for pod in jobs.pods("ps").values()
        for container in pod["spec"]["containers"]
    ]
    assert limits
    assert not any("gpu" in name for each in limits for name in each)
    jobs.wait_for("counting", "SUCCEEDED", 300)
    output = jobs.fenka("logs", "counting")
    assert "total=40 of=ps hosts=counting-worker-0-0,counting-worker-0-1" in output
    wait_until("the chief is left", lambda: set(jobs.pods()) == set(jobs.pods("chief")))
    wait_for_no_leases(jobs.installation, node)


def kill(jobs: Jobs, pod: str) -> None:
    """Kill the programs of a pod."""
    # The first process of a PID namespace gets no signal from inside, so its descendants end.
    command = ("exec", pod, "--", "sh", "-c", "kill -9 -1")
    jobs.installation.cluster.kubectl("-n", jobs.namespace, *command)


def evict(jobs: Jobs, pod: str) -> None:
    """Evict a pod, as a drain of its node does."""
    metadata = {"name": pod, "namespace": jobs.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{jobs.namespace}/pods/{pod}/eviction"
    jobs.installation.cluster.kubectl(
        "create", "--raw", path, "-f", "-", stdin=json.dumps(eviction)
    )


@pytest.mark.parametrize(("end", "retries"), [(kill, 1), (evict, 0)])
def test_all_members_of_a_bare_torchrun_restart_when_one_is_gone(
    jobs: Jobs, end: Callable[[Jobs, str], None], retries: int
) -> None:
    """`torchrun` finds its members by the environment; the second attempt ends with the sum.

    The other member fails, too. After an eviction this is not counted as a failure of the job.
    """
    options = ["--image", FRAMEWORKS, "--workers=2", f"--retry={retries}", CODE]
    command = ["torchrun", "code/sum_members.py"]
    jobs.submit("pytorchjob", "members", *options, command=command)
    first = "rank=0 sum=3 attempt=0"
    wait_until("the first attempt's sum", lambda: first in jobs.fenka("logs", "members"), 300)
    before = set(jobs.pods())
    end(
        jobs,
        next(
            pod["metadata"]["name"]
            for pod in jobs.pods().values()
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "1"
        ),
    )
    jobs.wait_for("members", "SUCCEEDED", 300)
    assert "rank=0 sum=3 attempt=1" in jobs.fenka("logs", "members")
    assert not before & set(jobs.pods())


def test_training_goes_on_from_its_step_when_its_node_is_drained(
    jobs: Jobs, installation: Installation, node: str
) -> None:
    """An eviction is not a failure: without retries the job starts again, and not from step 0."""
    cluster = installation.cluster
    options = ["--workers=2", "--gpu-mem=4", "--checkpoint=checkpoints", CODE]
    command = ["python3", "code/checkpointing.py"]
    with jobs.claim("checkpoints", node) as folder:
        jobs.submit("pytorchjob", "steps", *options, command=command)

        def advanced() -> bool:
            return int(cluster.node(node).run("cat", f"{folder}/step-0")) >= 5

        wait_until("five steps", advanced, 180)
        try:
            only = ("--pod-selector=fenka.io/job", "--delete-emptydir-data", "--timeout=120s")
            cluster.kubectl("drain", node, *only)
            jobs.wait_for("steps", "PENDING")
        finally:
            cluster.kubectl("uncordon", node)
        jobs.wait_for("steps", "SUCCEEDED", 300)
    lines = [line for line in jobs.lines("steps") if line["rank"] == "0"]
    assert int(lines[-1]["first"]) >= 5
    assert int(lines[-1]["attempt"]) >= 1
    wait_for_no_leases(installation, node)
