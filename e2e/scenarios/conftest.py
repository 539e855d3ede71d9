"""fenka on the cluster, installed through its chart as a user would."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, wait_until
from e2e.scenarios.containers import wait_for_agent, wait_for_no_leases
from e2e.scenarios.installation import (
    CERTIFICATES,
    MEMORY,
    Installation,
    call_extender,
    on_control_plane,
)

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
def installation(cluster: Cluster) -> Iterator[Installation]:
    """Two nodes with a simulated T4 each, fenka's chart, and the scheduler configured as the chart says."""
    install(cluster)
    yield Installation(cluster)
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
    wait_until("the extender", lambda: extender_is_ready(cluster), 90)


@pytest.fixture
def shared(installation: Installation) -> Iterator[Installation]:
    """Both nodes share their card; afterwards none does."""
    for node in installation.cluster.nodes:
        installation.label(node.name, "cgpu-", "gpushare=true")
    for node in installation.cluster.nodes:
        installation.wait_for_allocatable(node.name, MEMORY, 14)
    yield installation
    installation.cluster.kubectl("delete", "deployment", "--all", "--now")
    for node in installation.cluster.nodes:
        installation.label(node.name, "gpushare-")
    # What the next test waits for must not be what the kubelet still says of this one.
    for node in installation.cluster.nodes:
        installation.wait_for_allocatable(node.name, MEMORY, 0)


@pytest.fixture
def two_card_node(installation: Installation) -> Iterator[str]:
    """A sharing node with two cards instead of one."""
    name = "sd-cluster-05"
    installation.label("sd-cluster-04", "gpushare-", "cgpu-")
    replace_cards(installation, name, "pair")
    installation.label(name, "gpushare=true")
    installation.wait_for_allocatable(name, MEMORY, 28)
    yield name
    installation.cluster.kubectl("delete", "pod", "--all", "--now")
    installation.label(name, "gpushare-")
    installation.wait_for_allocatable(name, MEMORY, 0)
    replace_cards(installation, name, "t4")


def replace_cards(installation: Installation, node: str, cards: str) -> None:
    """Other simulated cards for a node; those that it had are gone for good."""
    installation.label(node, f"fenka.io/simulated={cards}")

    component = {"t4": "cards-0", "pair": "cards-1"}[cards]

    def replaced() -> bool:
        pods = [
            pod
            for pod in installation.cluster.list("pods", "fenka")
            if pod["spec"].get("nodeName") == node
            and "scheduler" not in pod["metadata"]["name"]
            # What made the certificates has ended.
            and pod["status"]["phase"] != "Succeeded"
        ]
        labels = [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods]
        return labels == [component] and pods[0]["status"]["phase"] == "Running"

    # Its node program has ended with the sharing label, and the next one comes with it.
    wait_until("only the new cards' keeper", replaced, 90)
    installation.cluster.kubectl("annotate", "node", node, "fenka.io/cards-")


def extender_is_ready(cluster: Cluster) -> bool:
    """Whether a replica answers where kube-scheduler will ask, and as it will."""
    try:
        return call_extender(cluster, "https://127.0.0.1:32766/readyz").strip() == "ok"
    except Exception:
        return False


@pytest.fixture(scope="module")
def sharing_node(installation: Installation) -> Iterator[str]:
    """A sharing node, for all tests of a module: without the label the agent would end each time."""
    name = "sd-cluster-05"
    installation.label("sd-cluster-04", "gpushare-", "cgpu-")
    # Until the kubelet has said so too, pods would still go there, and fail.
    installation.wait_for_allocatable("sd-cluster-04", MEMORY, 0)
    installation.label(name, "cgpu-", "gpushare=true")
    yield name
    installation.label(name, "gpushare-")
    # What the next module waits for must not be what the kubelet still says of this one.
    installation.wait_for_allocatable(name, MEMORY, 0)


@pytest.fixture
def node(installation: Installation, sharing_node: str) -> Iterator[str]:
    """The sharing node, empty; afterwards nothing of a lease is left on it."""
    wait_for_agent(installation, sharing_node, 14)
    yield sharing_node
    installation.cluster.kubectl("delete", "deployment,pod", "--all", "--now")
    wait_for_no_leases(installation, sharing_node)
