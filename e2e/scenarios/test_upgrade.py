"""A cluster goes from the last release to this one and back, under thirty pods that share its cards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.artifacts import CHART, FENKA, LAST_FENKA, last_release_image
from e2e.cluster import Cluster, wait_until
from e2e.scenarios.conftest import VALUES, WAIT, extender_is_ready, install, uninstall
from e2e.scenarios.containers import PRINT_VISIBLE_MIB, wait_for_no_leases
from e2e.scenarios.installation import (
    CERTIFICATES,
    MEMORY,
    RELEASE,
    WORKLOAD,
    Installation,
    on_control_plane,
)
from tests.skew.last_release import last_release_tree

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

HOLD = (
    "import ctypes as c, time; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); p=c.c_void_p(); d.cuInit(0); "
    "d.cuDevicePrimaryCtxRetain(c.byref(x),0); d.cuCtxSetCurrent(x); "
    "assert d.cuMemAlloc_v2(c.byref(p),c.c_size_t(500<<20)) == 0; time.sleep(100000)"
)
NODE_PROGRAM = "daemonset/fenka-node-simulated-2"
"""The one of nodes with four simulated cards, which are the third of VALUES."""
CORE = "aliyun.com/gpu-core.percentage"
DEPLOYMENTS: dict[str, tuple[int, dict[str, int], dict[str, str]]] = {
    # name: replicas, limits, labels. 14 * 2 + 10 * 3 + 5 * 4 + 8 = 86 of 8 * 14 = 112 units.
    "small": (14, {MEMORY: 2}, {}),
    "limited": (10, {MEMORY: 3, CORE: 20}, {}),
    "large": (5, {MEMORY: 4}, {}),
    "pair": (1, {MEMORY: 8}, {"aliyun.com/gpu-count": "2"}),
}
SERVING = (WAIT, "--timeout=180s")
"""Simulated cards stay until their pods are deleted, for which helm 4's own way of waiting has no end."""
PODS = sum(replicas for replicas, _, _ in DEPLOYMENTS.values())


def workload(name: str, replicas: int, limits: dict[str, int], labels: dict[str, str]) -> str:
    """Return a Deployment of pods that hold 500 MiB of their first card."""
    labels = {"app": name, "test": "upgrade", **labels}
    container = {
        "name": "main",
        "image": WORKLOAD,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", HOLD],
        "resources": {"limits": limits},
    }
    pod = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    metadata = {"name": name}
    return json.dumps(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    )


def running(cluster: Cluster) -> dict[str, Any]:
    """Return of each running pod of the test what an upgrade must not change."""
    return {
        pod["metadata"]["name"]: (
            pod["spec"]["nodeName"],
            [(status["containerID"], status["restartCount"]) for status in statuses],
            pod["metadata"]["annotations"].get("scheduler.framework.gpushare.allocation"),
        )
        for pod in cluster.list("pods", selector="test=upgrade")
        if pod["status"]["phase"] == "Running"
        and (statuses := pod["status"]["containerStatuses"])
        and "deletionTimestamp" not in pod["metadata"]
    }


def leases(cluster: Cluster) -> dict[str, Any]:
    """Return the slices that the nodes report of each pod, by UID."""
    reports = [
        json.loads(cluster.get("node", node.name)["metadata"]["annotations"]["fenka.io/leases"])
        for node in cluster.nodes
    ]
    return {
        uid: [(report["cards"][card], *size) for card, *size in slices]
        for report in reports
        for uid, slices in report["pods"].items()
    }


@pytest.fixture
def old(installation: Installation) -> Iterator[Installation]:
    """Provide the last release with its own chart, and the pods, on eight cards."""
    cluster = installation.cluster
    try:
        archive, tree = last_release_image(), last_release_tree()
    except LookupError as why:
        pytest.skip(str(why))
    for node in cluster.nodes:
        node.import_image(archive)
    uninstall(cluster, RELEASE)
    try:
        for node in cluster.nodes:
            installation.label(node.name, "fenka.io/simulated=four", "gpushare=true")
        values = cluster.state / "old-values.yaml"
        values.write_text(VALUES.replace("tag: e2e", f"tag: {LAST_FENKA.rpartition(':')[2]}"))
        deploy(cluster, tree / "deploy" / "chart", values)
        on_control_plane(cluster, f"fenka certificates -n {RELEASE} --into {CERTIFICATES}")
        for node in cluster.nodes:
            installation.wait_for_allocatable(node.name, MEMORY, 56)
        for name, (replicas, limits, labels) in DEPLOYMENTS.items():
            cluster.kubectl("apply", "-f", "-", stdin=workload(name, replicas, limits, labels))
        wait_until("the pods run", lambda: len(running(cluster)) == PODS, seconds=300)
        yield installation
    finally:
        cluster.kubectl("delete", "deployment", *DEPLOYMENTS, "--ignore-not-found", "--wait")
        cluster.kubectl("delete", "pod", "late", "--ignore-not-found", "--now")
        for node in cluster.nodes:
            installation.label(node.name, "gpushare-")
        uninstall(cluster, RELEASE)
        install(cluster)


def deploy(cluster: Cluster, chart: Path, values: Path) -> None:
    """Install or upgrade to a chart, and wait until its programs serve."""
    chart_words = (str(chart), "-n", RELEASE, "--create-namespace", "-f", str(values))
    # `kubectl set image` has made itself a manager of the field.
    cluster.helm("upgrade", "--install", RELEASE, *chart_words, "--force-conflicts", *SERVING)
    wait_until("the extender", lambda: extender_is_ready(cluster))


def set_image(cluster: Cluster, program: str, image: str) -> None:
    """Let one program of the release run another image."""
    cluster.kubectl("-n", RELEASE, "set", "image", program, f"*={image}")
    cluster.kubectl("-n", RELEASE, "rollout", "status", program, "--timeout=180s")
    wait_until("the extender", lambda: extender_is_ready(cluster))


def check(installation: Installation, before: dict[str, Any], held: dict[str, Any]) -> None:
    """Assert that nothing was restarted or lost, and that pods are placed, resized and released."""
    cluster = installation.cluster
    assert running(cluster) == before
    wait_until("the reports", lambda: leases(cluster) == held)
    pod = workload("late", 1, {MEMORY: 3}, {})
    spec = json.loads(pod)["spec"]["template"]["spec"]
    late = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "late"}, "spec": spec}
    cluster.apply(json.dumps(late))
    cluster.wait_for_pod("late", seconds=120)
    # Smaller, since its card may be full.
    installation.fenka("resize", "late", "--gpu-mem", "2")
    output = cluster.kubectl("exec", "late", "--", "python3", "-c", PRINT_VISIBLE_MIB)
    assert output.strip() == "2154"  # 2 of 14 units of 15079 MiB
    cluster.kubectl("delete", "pod", "late", "--now")
    wait_until("its slice is free", lambda: leases(cluster) == held)
    name = next(name for name in before if name.startswith("small"))
    output = cluster.kubectl("exec", name, "--", "python3", "-c", PRINT_VISIBLE_MIB)
    assert output.strip() == "2154"  # 2 of 14 units


def test_nothing_is_restarted_or_lost_when_a_cluster_is_upgraded_and_rolled_back(
    old: Installation,
) -> None:
    """Also while one program is of one release, and the other one of the other."""
    cluster = old.cluster
    before, held = running(cluster), leases(cluster)
    assert len(held) == PODS
    # The commands of this release, and the programs of the last one.
    check(old, before, held)

    for program in (NODE_PROGRAM, "deployment/fenka-scheduler"):
        set_image(cluster, program, FENKA)
        check(old, before, held)
        set_image(cluster, program, LAST_FENKA)
        check(old, before, held)

    values = cluster.state / "values.yaml"
    values.write_text(VALUES)
    deploy(cluster, CHART, values)
    check(old, before, held)
    cluster.helm("rollback", RELEASE, "1", "-n", RELEASE, *SERVING)
    wait_until("the extender", lambda: extender_is_ready(cluster))
    check(old, before, held)
    deploy(cluster, CHART, values)
    check(old, before, held)

    cluster.kubectl("delete", "deployment", *DEPLOYMENTS, "--wait")
    for node in cluster.nodes:
        wait_for_no_leases(old, node.name)
