"""A cluster whose kube-scheduler cannot be configured: the chart's second one places pods with a card."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.artifacts import CHART
from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.image_files import archive, hash_of, image_of
from e2e.images import BUSYBOX
from e2e.programs import chosen_kubernetes
from e2e.scenarios.conftest import install, install_jobset, uninstall
from e2e.scenarios.installation import (
    MEMORY,
    RELEASE,
    SCHEDULER_CONFIGURATION,
    WORKLOAD,
    Installation,
    deployment,
)
from e2e.scenarios.tenant import TENANT, Mallory, record, with_annotations

SCHEDULER_IMAGE = "localhost/kube-scheduler:e2e"
OTHER = "fenka.io/scheduler"
"""The label of namespaces whose pods get no scheduler here."""
DEFAULT, SECOND = "default-scheduler", "fenka"
TEMPLATE = """
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: IMAGE
        imagePullPolicy: Never
        command: [sleep, "100000"]
        resources: {limits: {aliyun.com/gpu-mem: 2}}
"""
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: job}
spec:
  backoffLimit: 0"""
JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: set}
spec:
  replicatedJobs:
  - name: workers
    template:
      spec:
        backoffLimit: 0"""


def scheduler_image() -> Path:
    """Build an image of the cluster's own kube-scheduler, like the one of registry.k8s.io."""
    program = chosen_kubernetes().directory() / "bin" / "kube-scheduler"

    def make(target: Path) -> None:
        files = {"bin/kube-scheduler": program.read_bytes()}
        config = {"Env": ["PATH=/bin"]}
        target.write_bytes(image_of(SCHEDULER_IMAGE, config, files, ()))

    return archive("kube-scheduler", hash_of(str(program.resolve())), make)


def enable(cluster: Cluster) -> None:
    """Upgrade the release to one with a second scheduler. Kube-scheduler loses its configuration."""
    node = cluster.nodes[1]
    node.import_image(scheduler_image())
    cluster.set_scheduler_configuration(None)
    selector = {"matchExpressions": [{"key": OTHER, "operator": "NotIn", "values": ["other"]}]}
    second = {
        "enabled": True,
        "image": SCHEDULER_IMAGE,
        "nodeSelector": {"kubernetes.io/hostname": node.name},
        "assign": {"enabled": True, "namespaceSelector": selector},
    }
    cluster.helm(
        *("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values"),
        f"--set-json=secondScheduler={json.dumps(second)}",
        *("--wait", "--timeout=90s"),
    )
    probe = pod_text("probe", {MEMORY: 1})
    dry_run = ("create", "--dry-run=server", "-o", "json", "-f", "-")

    def assigned() -> bool:
        created = json.loads(cluster.kubectl(*dry_run, stdin=probe))
        return bool(created["spec"]["schedulerName"] == SECOND)

    # The API server reads policies through a watch.
    wait_until("the policy is effective", assigned)


@pytest.fixture
def second_scheduler(shared: Installation) -> Iterator[Installation]:
    """Run the chart's second scheduler on one node; the default one is not configured for fenka."""
    enable(shared.cluster)
    yield shared
    shared.cluster.helm(
        *("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values"),
        "--set=secondScheduler.enabled=false",
    )
    configuration = SCHEDULER_CONFIGURATION.read_text()
    shared.cluster.set_scheduler_configuration(configuration)


def pod_text(name: str, limits: dict[str, int], image: str = WORKLOAD, **spec: Any) -> str:
    """Return a pod of one container that sleeps."""
    container = {
        "name": "c",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sleep", "100000"],
        "resources": {"limits": limits},
    }
    body = {"terminationGracePeriodSeconds": 0, "containers": [container], **spec}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body})


def scheduler_of(pod: dict[str, Any]) -> str:
    """Return the name of a pod's scheduler."""
    return str(pod["spec"]["schedulerName"])


def indented(text: str, spaces: int) -> str:
    """Return a text with all its lines shifted."""
    return "\n".join(" " * spaces + line for line in text.splitlines())


def test_pods_that_request_a_card_get_the_second_scheduler_unasked(
    second_scheduler: Installation, namespace: str
) -> None:
    """Of a Deployment, a Job, another dialect. Pods without cards, and with a scheduler, are left alone."""
    cluster = second_scheduler.cluster
    cluster.apply(deployment("plain", MEMORY, 4))
    (pod,) = second_scheduler.wait_for_running("plain", 1)
    assert scheduler_of(pod) == SECOND
    assert pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] == "0"

    cluster.apply(JOB + TEMPLATE.replace("IMAGE", WORKLOAD), namespace)
    blocks = {"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 4}
    cluster.apply(pod_text("blocks", blocks), namespace)
    cluster.apply(pod_text("no-card", {}, BUSYBOX), namespace)
    # Nobody but this scheduler places it.
    cluster.apply(pod_text("named", {MEMORY: 1}, schedulerName="own"), namespace)

    (of_job,) = wait_for_pods_of_job(cluster, namespace, "job")
    for name, scheduler in ((of_job, SECOND), ("blocks", SECOND), ("no-card", DEFAULT)):
        assert scheduler_of(cluster.wait_for_pod(name, namespace, seconds=90)) == scheduler
    named = cluster.get("pod", "named", namespace)
    assert (scheduler_of(named), "nodeName" in named["spec"]) == ("own", False)

    # A namespace that the values exclude: the default scheduler places the pod without a card.
    cluster.kubectl("label", "namespace", namespace, f"{OTHER}=other")
    wait_until("the namespace is excluded", lambda: is_left_alone(cluster, namespace))
    cluster.apply(pod_text("astray", {MEMORY: 1}), namespace)
    second_scheduler.wait_for_event(
        "astray", "not placed by fenka's scheduler", namespace=namespace
    )
    assert scheduler_of(cluster.get("pod", "astray", namespace)) == DEFAULT


def test_tenant_gains_nothing_by_naming_a_scheduler(
    second_scheduler: Installation, mallory: Mallory
) -> None:
    """Records, nodes and the policy itself stay out of reach; pods without cards get none."""
    cluster = second_scheduler.cluster
    card = {MEMORY: 1}
    for scheduler in (DEFAULT, SECOND, "own"):
        forged = with_annotations(pod_text("a", card, schedulerName=scheduler), **record(0, 14))
        with pytest.raises(ClusterError, match="is reserved for fenka"):
            mallory.create(forged)
        with pytest.raises(ClusterError, match=r"spec\.nodeName is set and the pod requests a GPU"):
            mallory.create(
                pod_text("a", card, schedulerName=scheduler, nodeName=cluster.nodes[0].name)
            )
    # An extended resource without a limit is no request.
    with pytest.raises(ClusterError, match="Limit must be set"):
        mallory.create(pod_text("a", card).replace('"limits"', '"requests"'))
    with pytest.raises(ClusterError, match="cannot patch resource"):
        mallory.kubectl("label", "namespace", TENANT, f"{OTHER}=other")
    for kind in ("mutatingadmissionpolicies", "mutatingadmissionpolicybindings"):
        with pytest.raises(ClusterError, match="cannot delete resource"):
            mallory.kubectl("delete", kind, "fenka-second-scheduler")

    # A scheduler that nobody runs: the tenant cannot be it, and cannot take another one afterwards.
    mallory.create(pod_text("own", card, schedulerName="own"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "own", "annotations": record(0, 14)},
        "target": {"apiVersion": "v1", "kind": "Node", "name": cluster.nodes[0].name},
    }
    path = f"/api/v1/namespaces/{TENANT}/pods/own/binding"
    with pytest.raises(ClusterError, match="pods/binding"):
        mallory.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
    change = json.dumps({"spec": {"schedulerName": DEFAULT}})
    with pytest.raises(ClusterError, match="pod updates may not change fields"):
        mallory.kubectl("patch", "pod", "own", "--type=merge", "-p", change)

    # The scheduler of pods with cards places one without, and writes no record.
    mallory.create(pod_text("none", {}, schedulerName=SECOND))
    # The card of an init container is one.
    initial = json.loads(pod_text("first", {}))
    first = initial["spec"]["containers"][0] | {"name": "i", "command": ["true"]}
    first["resources"] = {"limits": card}
    initial["spec"]["initContainers"] = [first]
    mallory.create(json.dumps(initial))
    for name, records in (("none", False), ("first", True)):
        pod = cluster.wait_for_pod(name, TENANT, seconds=90)
        annotations = pod["metadata"].get("annotations", {})
        assert (scheduler_of(pod), "ALIYUN_COM_GPU_MEM_IDX" in annotations) == (SECOND, records)
    assert "nodeName" not in cluster.get("pod", "own", TENANT)["spec"]


def is_left_alone(cluster: Cluster, namespace: str) -> bool:
    """Return whether a pod with a card would keep the default scheduler."""
    probe = pod_text("probe", {MEMORY: 1})
    command = ("-n", namespace, "create", "--dry-run=server", "-o", "json", "-f", "-")
    return scheduler_of(json.loads(cluster.kubectl(*command, stdin=probe))) == DEFAULT


def wait_for_pods_of_job(cluster: Cluster, namespace: str, job: str) -> list[str]:
    """Wait until a Job has pods, and return their names."""
    selector = f"batch.kubernetes.io/job-name={job}"

    def names() -> list[str]:
        return [pod["metadata"]["name"] for pod in cluster.list("pods", namespace, selector)]

    wait_until(f"pods of {job}", names)
    return names()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_pod_waits_for_the_second_scheduler_when_fenka_is_uninstalled(
    installation: Installation, namespace: str
) -> None:
    """Pods of a JobSet run by it before. New pods get the default scheduler afterwards."""
    cluster, node = installation.cluster, "sd-cluster-04"
    try:
        install_jobset(cluster)
        enable(cluster)
        installation.label(node, "gpushare=true")
        installation.wait_for_allocatable(node, MEMORY, 14)
        cluster.apply(JOBSET + indented(TEMPLATE.replace("IMAGE", WORKLOAD), 6), namespace)
        (name,) = wait_for_pods_of_job(cluster, namespace, "set-workers-0")
        assert scheduler_of(cluster.wait_for_pod(name, namespace, seconds=90)) == SECOND
        # These wait, since no card has room.
        cluster.apply(deployment("waits", MEMORY, 14, replicas=6), namespace)
        wait_until("the pods", lambda: len(cluster.list("pods", namespace, "app=waits")) == 6)

        # In this order, so that none of them takes the JobSet's place.
        installation.label(node, "gpushare-")
        installation.wait_for_allocatable(node, MEMORY, 0)
        cluster.kubectl("-n", namespace, "delete", "jobset", "set")
        uninstall(cluster, RELEASE)
        assert "add --end-waiting" in installation.fenka("uninstall", "-n", RELEASE)
        output = installation.fenka("uninstall", "-n", RELEASE, "--end-waiting")
        assert output.count(": deleted") >= 6
        wait_until("their successors", lambda: all_are_ordinary(cluster, namespace))
    finally:
        installation.label(node, "gpushare-")
        cluster.kubectl("-n", namespace, "delete", "deployments", "--all")
        uninstall(cluster, RELEASE)
        install(cluster)


def all_are_ordinary(cluster: Cluster, namespace: str) -> bool:
    """Return whether the default scheduler knows all pods of the Deployment."""
    pods = cluster.list("pods", namespace, "app=waits")
    reasons = [
        condition.get("reason")
        for pod in pods
        for condition in pod["status"].get("conditions", ())
        if condition["type"] == "PodScheduled"
    ]
    return (
        len(pods) == 6
        and {scheduler_of(pod) for pod in pods} == {DEFAULT}
        # Not SchedulingGated.
        and set(reasons) == {"Unschedulable"}
    )
