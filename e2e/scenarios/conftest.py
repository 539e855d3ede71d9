"""Install fenka on the cluster through its chart, as a user would."""

import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from urllib.parse import quote

import pytest

from e2e.artifacts import CHART
from e2e.cluster import Cluster, wait_until
from e2e.machine import SLOWER, VIRTUAL
from e2e.programs import HELM_3, OWN, chosen_containerd, chosen_helm
from e2e.scenarios.containers import wait_for_agent, wait_for_no_leases
from e2e.scenarios.elastic import Elastic
from e2e.scenarios.installation import (
    CERTIFICATES,
    MEMORY,
    RELEASE,
    SCHEDULER_CONFIGURATION,
    Installation,
    call_extender,
    on_control_plane,
    rolled_back,
)
from e2e.scenarios.jobs import Jobs
from e2e.scenarios.tenant import RIGHTS, TENANT, Mallory
from e2e.scenarios.virtual_nodes import VIRTUAL_LABEL, VirtualNodes

VALUES = """
image: {repository: localhost/fenka, tag: e2e, pullPolicy: Never}
node: {metrics: {enabled: true}, mig: {config: layouts}}
admission: {extraUsers: [former-plugin]}
simulatedCards:
- {nodeSelector: {fenka.io/simulated: t4}, spec: T4}
- {nodeSelector: {fenka.io/simulated: pair}, spec: T4*2}
- {nodeSelector: {fenka.io/simulated: four}, spec: T4*4}
- {nodeSelector: {fenka.io/simulated: a100}, spec: A100-40G}
- {nodeSelector: {fenka.io/simulated: a30}, spec: A30}
"""

JOBSET_VALUES = """
jobset:
  enabled: true
  image: {repository: localhost/jobset, tag: e2e, pullPolicy: Never}
  controller: {resources: {requests: {cpu: 10m}}}
"""

EMPTY_JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: empty}
spec: {replicatedJobs: []}
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what fenka's containers said before they ended, for they are gone when a failure is read."""
    report = yield
    installation = getattr(item, "funcargs", {}).get("installation")
    if report.failed and installation is not None:
        report.sections += [
            (f"{name}, before its restart", text) for name, text in ended(installation)
        ]
    return report


def ended(installation: Installation) -> Iterator[tuple[str, str]]:
    """Yield the name of each container of fenka's that was restarted, and its last lines."""
    cluster = installation.cluster
    with suppress(Exception):
        for pod in cluster.list("pods", RELEASE):
            for status in pod["status"].get("containerStatuses", ()):
                if status["restartCount"]:
                    name = pod["metadata"]["name"]
                    arguments = ("-n", RELEASE, "logs", name, "-c", status["name"], "--previous")
                    yield name, cluster.kubectl(*arguments, "--tail=60")


@pytest.fixture(scope="session")
def installation(cluster: Cluster) -> Iterator[Installation]:
    """Provide two nodes with a simulated T4 each, and fenka installed and configured by its chart."""
    install(cluster)
    yield Installation(cluster)
    if os.environ.get("FENKA_E2E_KEEP"):
        return
    uninstall(cluster, RELEASE)
    cluster.set_scheduler_configuration(None)


WAIT = "--wait" if chosen_helm() is HELM_3 else "--wait=legacy"
"""helm 3's way of waiting, of either helm."""


def uninstall(cluster: Cluster, namespace: str) -> None:
    """Uninstall the release of a namespace, if there is one."""
    # The default strategy sometimes misses a deletion, and waits until it times out (helm/helm#31766).
    cluster.helm("uninstall", RELEASE, "-n", namespace, "--ignore-not-found", WAIT)


def install(cluster: Cluster) -> None:
    """Install the chart and configure kube-scheduler, as the guide describes."""
    for node in cluster.nodes:
        cluster.kubectl("label", "--overwrite", "node", node.name, "fenka.io/simulated=t4")
        # Otherwise the cards of an earlier test count as lost ones.
        cluster.kubectl("annotate", "node", node.name, "fenka.io/cards-")
    values = cluster.state / "values.yaml"
    values.write_text(VALUES)
    chart = ["-n", RELEASE, "--create-namespace", "-f", str(values)]
    if chosen_containerd() is not OWN:
        # The cluster's containerd 1.7 has enable_cdi (configuration.py).
        chart.append("--set=node.assumeCdi=true")
    if VIRTUAL:
        # The extender's replicas run where they are fast.
        chart += [
            "--set",
            rf"scheduler.nodeSelector.kubernetes\.io/hostname={cluster.nodes[0].name}",
        ]
    chart += ["--wait", f"--timeout={90 * SLOWER:g}s"]
    cluster.helm("upgrade", "--install", RELEASE, str(CHART), *chart)
    on_control_plane(cluster, f"fenka certificates -n {RELEASE} --into {CERTIFICATES}")
    cluster.set_scheduler_configuration(SCHEDULER_CONFIGURATION.read_text())
    wait_until("the extender", lambda: extender_is_ready(cluster))


@pytest.fixture(scope="module")
def jobset(installation: Installation) -> Iterator[None]:
    """Let JobSet's controller run for a module's tests."""
    with rolled_back(installation.cluster):
        install_jobset(installation.cluster)
        yield


def install_jobset(cluster: Cluster) -> None:
    """Upgrade the release to one with JobSet's controller."""
    values = cluster.state / "jobset.yaml"
    values.write_text(JOBSET_VALUES)
    options = ("-n", RELEASE, "--reuse-values", "-f", str(values), "--wait", "--timeout=90s")
    cluster.helm("upgrade", RELEASE, str(CHART), *options)
    # The controller is ready some time before kube-proxy forwards to its webhooks.
    create = ("create", "--dry-run=server", "-f", "-")
    wait_until("JobSet's webhooks", lambda: cluster.kubectl(*create, stdin=EMPTY_JOBSET))


@pytest.fixture
def elastic(installation: Installation) -> Elastic:
    """Provide a cluster whose autoscaler does not run yet."""
    return Elastic(installation)


@pytest.fixture
def jobs(jobset: None, installation: Installation, namespace: str) -> Jobs:
    """Provide the jobs of a new namespace, on a cluster with JobSet."""
    del jobset
    return Jobs(installation, namespace)


@pytest.fixture
def shared(installation: Installation) -> Iterator[Installation]:
    """Let both nodes share their card, and none afterwards."""
    for node in installation.cluster.nodes:
        installation.label(node.name, "cgpu-", "gpushare=true")
    for node in installation.cluster.nodes:
        installation.wait_for_allocatable(node.name, MEMORY, 14)
    yield installation
    installation.cluster.kubectl("delete", "deployment", "--all", "--now")
    for node in installation.cluster.nodes:
        installation.label(node.name, "gpushare-")
    # The next test must not see the kubelet's old values as the new ones.
    for node in installation.cluster.nodes:
        installation.wait_for_allocatable(node.name, MEMORY, 0)


@pytest.fixture
def create_priority_class(installation: Installation) -> Iterator[Callable[..., str]]:
    """Provide what creates a PriorityClass and returns its name; delete all of them afterwards.

    Call it some time before the pod is created: the API server reads PriorityClasses through a watch.
    """
    texts = []

    def create(name: str, value: int, **fields: str) -> str:
        metadata = {"apiVersion": "scheduling.k8s.io/v1", "metadata": {"name": name}}
        texts.append(json.dumps({"kind": "PriorityClass", **metadata, "value": value, **fields}))
        installation.cluster.apply(texts[-1])
        return name

    yield create
    for text in texts:
        installation.cluster.delete(text)


@pytest.fixture
def two_card_node(installation: Installation) -> Iterator[str]:
    """Provide a sharing node with two cards instead of one."""
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
    """Replace a node's simulated cards; the former ones do not come back."""
    installation.label(node, f"fenka.io/simulated={cards}")

    component = {"t4": "cards-0", "pair": "cards-1", "a100": "cards-3", "a30": "cards-4"}[cards]

    def replaced() -> bool:
        pods = [
            pod
            for pod in installation.cluster.list("pods", "fenka")
            if pod["spec"].get("nodeName") == node
            and "scheduler" not in pod["metadata"]["name"]
            # The Job that creates the certificates has ended.
            and pod["status"]["phase"] != "Succeeded"
        ]
        labels = [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods]
        return labels == [component] and pods[0]["status"]["phase"] == "Running"

    # The label gpushare controls the node program, so it does not run now.
    wait_until("only the new cards' server", replaced)
    installation.cluster.kubectl("annotate", "node", node, "fenka.io/cards-")


def extender_is_ready(cluster: Cluster) -> bool:
    """Return whether a replica answers at kube-scheduler's address and with its certificate."""
    try:
        return call_extender(cluster, "https://127.0.0.1:32766/readyz").strip() == "ok"
    except Exception:
        return False


@pytest.fixture(scope="module")
def sharing_node(installation: Installation) -> Iterator[str]:
    """Provide a sharing node for all tests of a module, since the agent ends when the label is removed."""
    name = "sd-cluster-05"
    installation.label("sd-cluster-04", "gpushare-", "cgpu-")
    # Until the kubelet reports it, pods would still be scheduled there, and fail.
    installation.wait_for_allocatable("sd-cluster-04", MEMORY, 0)
    installation.label(name, "cgpu-", "gpushare=true")
    yield name
    installation.label(name, "gpushare-")
    # The next module must not see the kubelet's old values as the new ones.
    installation.wait_for_allocatable(name, MEMORY, 0)


@pytest.fixture
def node(installation: Installation, sharing_node: str) -> Iterator[str]:
    """Provide the sharing node without pods; check afterwards that no lease is left on it."""
    wait_for_agent(installation, sharing_node, 14)
    yield sharing_node
    installation.cluster.kubectl("delete", "deployment,pod", "--all", "--now")
    wait_for_no_leases(installation, sharing_node)


@pytest.fixture
def virtual(installation: Installation, namespace: str) -> Iterator[VirtualNodes]:
    """Provide nodes without a kubelet, and delete them afterwards."""
    virtual = VirtualNodes(installation, namespace)
    yield virtual
    installation.cluster.kubectl(
        "-n", namespace, "delete", "pods", "--all", "--grace-period=0", "--force"
    )
    # One call: `kubectl delete -l` sends one for each of hundreds of nodes, at a limited rate.
    selected = f"/api/v1/nodes?labelSelector={quote(VIRTUAL_LABEL, safe='')}"
    installation.cluster.kubectl("delete", "--raw", selected)


@pytest.fixture
def mallory(installation: Installation) -> Iterator[Mallory]:
    """Provide the tenant and its namespace."""
    installation.cluster.kubectl("create", "namespace", TENANT)
    installation.cluster.apply(RIGHTS, TENANT)
    yield Mallory(installation)
    installation.cluster.kubectl("delete", "namespace", TENANT, "--wait=true")
