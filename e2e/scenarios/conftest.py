"""fenka on the cluster, installed through its chart as a user would."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, wait_until
from e2e.scenarios.kit import CERTIFICATES, MEMORY, World, ask, on_control_plane
from e2e.scenarios.lease_kit import settle, wait_for_none_left

CHART = Path(__file__).parents[2] / "deploy" / "chart"
RELEASE = "fenka"
VALUES = """
image: {repository: localhost/fenka, tag: e2e, pullPolicy: Never}
node: {metrics: {enabled: true}}
admission: {extraUsers: [former-plugin]}
simulatedCards:
- {nodeSelector: {fenka.io/simulated: t4}, spec: T4}
- {nodeSelector: {fenka.io/simulated: pair}, spec: T4*2}
"""


@pytest.fixture(scope="session")
def world(cluster: Cluster) -> Iterator[World]:
    """Two nodes with a simulated T4 each, fenka's chart, and the scheduler configured as the chart says."""
    install(cluster)
    yield World(cluster)
    if os.environ.get("FENKA_E2E_KEEP"):
        return
    cluster.helm("uninstall", RELEASE, "-n", RELEASE, "--wait")
    cluster.set_scheduler_configuration(None)


def install(cluster: Cluster) -> None:
    """As a user would, through the chart."""
    for node in cluster.nodes:
        cluster.kubectl("label", "--overwrite", "node", node.name, "fenka.io/simulated=t4")
    values = cluster.state / "values.yaml"
    values.write_text(VALUES)
    chart = ("-n", RELEASE, "--create-namespace", "-f", str(values))
    cluster.helm("upgrade", "--install", RELEASE, str(CHART), *chart, "--wait", "--timeout=90s")
    on_control_plane(cluster, f"fenka certificates -n {RELEASE} --into {CERTIFICATES}")
    cluster.set_scheduler_configuration((CHART / "files" / "scheduler-config.yaml").read_text())
    wait_until("the extender", lambda: ready(cluster), 90)


@pytest.fixture
def shared(world: World) -> Iterator[World]:
    """Both nodes share their card; afterwards none does."""
    for node in world.cluster.nodes:
        world.label(node.name, "cgpu-", "gpushare=true")
    for node in world.cluster.nodes:
        world.wait_for_allocatable(node.name, MEMORY, 14)
    yield world
    world.cluster.kubectl("delete", "deployment", "--all", "--now")
    for node in world.cluster.nodes:
        world.label(node.name, "gpushare-")
    # What the next test waits for must not be what the kubelet still says of this one.
    for node in world.cluster.nodes:
        world.wait_for_allocatable(node.name, MEMORY, 0)


@pytest.fixture
def pair(world: World) -> Iterator[str]:
    """A sharing node with two cards instead of one."""
    name = "sd-cluster-05"
    world.label("sd-cluster-04", "gpushare-", "cgpu-")
    exchange(world, name, "pair")
    world.label(name, "gpushare=true")
    world.wait_for_allocatable(name, MEMORY, 28)
    yield name
    world.cluster.kubectl("delete", "pod", "--all", "--now")
    world.label(name, "gpushare-")
    world.wait_for_allocatable(name, MEMORY, 0)
    exchange(world, name, "t4")


def exchange(world: World, node: str, cards: str) -> None:
    """Other simulated cards for a node; those that it had are gone for good."""
    world.label(node, f"fenka.io/simulated={cards}")

    component = {"t4": "cards-0", "pair": "cards-1"}[cards]

    def exchanged() -> bool:
        there = [
            it
            for it in world.cluster.list("pods", "fenka")
            if it["spec"].get("nodeName") == node
            and "scheduler" not in it["metadata"]["name"]
            # What made the certificates has ended.
            and it["status"]["phase"] != "Succeeded"
        ]
        labels = [it["metadata"]["labels"]["app.kubernetes.io/component"] for it in there]
        return labels == [component] and there[0]["status"]["phase"] == "Running"

    # Its node program has ended with the sharing label, and the next one comes with it.
    wait_until("only the new cards' keeper", exchanged, 90)
    world.cluster.kubectl("annotate", "node", node, "fenka.io/cards-")


def ready(cluster: Cluster) -> bool:
    """Whether a replica answers where kube-scheduler will ask, and as it will."""
    try:
        return ask(cluster, "https://127.0.0.1:32766/readyz").strip() == "ok"
    except Exception:
        return False


@pytest.fixture(scope="module")
def sharing(world: World) -> Iterator[str]:
    """A sharing node, for all tests of a module: without the label the agent would end each time."""
    name = "sd-cluster-05"
    world.label("sd-cluster-04", "gpushare-", "cgpu-")
    # Until the kubelet has said so too, pods would still go there, and fail.
    world.wait_for_allocatable("sd-cluster-04", MEMORY, 0)
    world.label(name, "cgpu-", "gpushare=true")
    yield name
    world.label(name, "gpushare-")
    # What the next module waits for must not be what the kubelet still says of this one.
    world.wait_for_allocatable(name, MEMORY, 0)


@pytest.fixture
def node(world: World, sharing: str) -> Iterator[str]:
    """The sharing node, empty; afterwards nothing of a lease is left on it."""
    settle(world, sharing, 14)
    yield sharing
    world.cluster.kubectl("delete", "deployment,pod", "--all", "--now")
    wait_for_none_left(world, sharing)
