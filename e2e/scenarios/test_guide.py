"""Run the commands of the documentation's pages for clusters verbatim.

`tools/docs/blocks.py` says how pages mark what is run. Commands for a workstation run in tests/docs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from e2e.artifacts import CHART_FILES, COMMANDS, FENKA
from e2e.cluster import Cluster, wait_until
from e2e.images import BUSYBOX, WORKLOAD
from e2e.scenarios.conftest import install, uninstall
from e2e.scenarios.installation import (
    GPUSHARE_CONFIGURATION,
    MEMORY,
    RELEASE,
    Installation,
    on_control_plane,
)
from e2e.scenarios.virtual_nodes import VirtualNodes, node_object
from e2e.supervisor import REPOSITORY
from fenka import __version__
from fenka.cluster import autoscaling
from fenka.dialects import gpushare
from tools.docs.blocks import COMMAND_LANGUAGES, Page, read_page, readable_pages, run_page
from tools.docs.shell import Shell, timed

DOCS = REPOSITORY / "docs"
NAMESPACE = "fenka-system"
NODE = "sd-cluster-04"
NEXT = "next"
"""The tag of the image to which the scenario upgrades."""
NAMES = {
    r"\bNODE\b|\bgpu-1\b": NODE,
    r"\b10\.0\.0\.11\b": "192.168.1.214",
    r"\bIMAGE\b": WORKLOAD,
}
"""Patterns of the names in pages, and this cluster's names."""
NVIDIA_PLUGIN = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-device-plugin-daemonset, namespace: kube-system}
spec:
  selector: {matchLabels: {app: nvidia}}
  template:
    metadata: {labels: {app: nvidia}}
    spec:
      containers:
      - {name: plugin, image: localhost/busybox:e2e, imagePullPolicy: Never, command: [sleep, infinity]}
"""


class Blocks:
    """The code blocks of pages that one scenario runs."""

    def __init__(self) -> None:
        self._pages: dict[str, Page] = {}
        self._used: set[tuple[str, int]] = set()

    def take(self, page: str, start: str) -> str:
        """Return the page's first code block that begins with this text."""
        blocks = self._pages.setdefault(page, read_page(DOCS / page)).blocks
        block = next(block for block in blocks if block.text.startswith(start))
        self._used.add((page, block.line))
        return block.text

    def unused(self, *pages: str) -> list[str]:
        """Return the blocks that these pages leave to a scenario, and that it has not run."""
        return [
            f"docs/{name}:{block.line}"
            for name in pages
            for page in [self._pages[name]]
            for block in page.blocks
            if page.place(block) == "scenario"
            and block.language in {*COMMAND_LANGUAGES, "yaml"}
            and (name, block.line) not in self._used
        ]


class GuideShell:
    """A user's shell in the repository, with helm, kubectl and fenka on PATH."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __call__(self, text: str) -> str:
        """Run commands verbatim, except for the node's name, and for the chart: the packaged one."""
        path = f"{COMMANDS}:{self.cluster.environment()['PATH']}"
        script = f"set -e; cd {REPOSITORY}\n" + re.sub(r"\bNODE\b", NODE, text)
        script = script.replace("deploy/chart", str(CHART_FILES.parent))
        with timed(text):
            return self.cluster.run("sh", "-c", script, environment={"PATH": path})


@pytest.fixture
def shell(installation: Installation) -> Iterator[GuideShell]:
    """Provide a cluster without fenka whose nodes have the images that the guide names."""
    cluster = installation.cluster
    try:
        uninstall(cluster, RELEASE)
        cluster.set_scheduler_configuration(None)
        for node in cluster.nodes:
            installation.label(node.name, "gpushare-", "cgpu-", "fenka.io/simulated-")
            for image, name in (
                (FENKA, f"registry.example.com/fenka:{__version__}"),
                (FENKA, f"registry.example.com/fenka:{NEXT}"),
                (BUSYBOX, "docker.io/nvidia/cuda:12.9.0-base-ubuntu24.04"),
            ):
                node.ctr("images", "tag", "--force", image, name)
        cluster.kubectl("apply", "-f", "-", stdin=NVIDIA_PLUGIN)
        # Pods of earlier pages hold their slices until they have ended.
        wait_until("earlier pods have ended", lambda: not ending_pods(cluster))
        yield GuideShell(cluster)
    finally:
        # The tests of other modules need fenka, whatever has happened here.
        cluster.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=NVIDIA_PLUGIN)
        cluster.kubectl("delete", "pod", "first", "--ignore-not-found", "--now")
        uninstall(cluster, NAMESPACE)
        install(cluster)


def ending_pods(cluster: Cluster) -> list[str]:
    """Return the pods of all namespaces that are being deleted."""
    pods = json.loads(cluster.kubectl("get", "pods", "--all-namespaces", "-o", "json"))["items"]
    return [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("deletionTimestamp")]


class PageShell(Shell):
    """The shell of a page's reader, with helm, kubectl and fenka on PATH and a namespace of its own."""

    def __init__(
        self, directory: Path, cluster: Cluster, namespace: str, names: Mapping[str, str]
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._names = names
        kubeconfig = directory / ".kubeconfig"
        kubeconfig.write_text(cluster.kubeconfig.read_text())
        (directory / "deploy").symlink_to(REPOSITORY / "deploy")
        known = cluster.environment()
        commands = f"{COMMANDS}:{known['PATH']}"
        own = {"KUBECONFIG": str(kubeconfig), "PATH": commands, "COLUMNS": "160", "TERM": "dumb"}
        super().__init__(directory, known | own, cluster.command())
        self.run(f"kubectl config set-context --current --namespace {namespace}")

    def run(self, script: str) -> tuple[int, str]:
        """Run commands, with this cluster's names."""
        return super().run(self.shown(script))

    def apply(self, manifest: str) -> None:
        """Apply a manifest in the page's namespace."""
        self._cluster.apply(self.shown(manifest), self._namespace)

    def shown(self, text: str) -> str:
        """Return a text with this cluster's names in place of the page's."""
        for pattern, name in self._names.items():
            text = re.sub(pattern, name, text)
        return text


def cluster_pages() -> Iterator[object]:
    """Yield the pages with commands for a cluster."""
    for page in readable_pages(sorted((REPOSITORY / "docs").rglob("*.md"))):
        if page.runs("cluster"):
            marks = [pytest.mark.full] if page.has("cluster", "full") else []
            yield pytest.param(page, id=str(page.path.relative_to(REPOSITORY)), marks=marks)


@pytest.mark.parametrize("page", [*cluster_pages()])
def test_commands_for_a_cluster_do_what_the_page_shows(
    page: Page, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Most pages find fenka on nodes that share their cards. Others say in their mark what is missing."""
    names = dict(NAMES)
    if page.has("cluster", "fenka"):
        cluster, namespace = request.getfixturevalue("shell").cluster, "default"
    else:
        shared = "installation" if page.has("cluster", "share") else "shared"
        cluster = request.getfixturevalue(shared).cluster
        names[r"\bfenka-system\b"] = RELEASE
    if page.has("cluster", "jobset"):
        request.getfixturevalue("jobset")
    # `kubectl logs -l` fails while a node that an earlier test bought is leaving.
    wait_until(
        "the end of nodes that were bought",
        lambda: not cluster.list("nodes", selector=autoscaling.GROUP),
    )
    with PageShell(tmp_path, cluster, namespace, names) as shell:
        run_page(page, "cluster", shell)


def test_commands_from_installation_to_removal_work_when_run_verbatim(
    shell: GuideShell, installation: Installation
) -> None:
    """Install, label, create the first pod, show the tables, upgrade, roll back, uninstall."""
    cluster, blocks = shell.cluster, Blocks()
    install_command = blocks.take("start/cluster.md", "helm install fenka deploy/chart")
    assert blocks.take("do/install.md", "helm install fenka deploy/chart") == install_command
    shell(install_command)
    rollout = f"kubectl -n {NAMESPACE} rollout status deployment/fenka-scheduler --timeout=180s"
    assert rollout.removesuffix(" --timeout=180s") in cluster.helm(
        "get", "notes", RELEASE, "-n", NAMESPACE
    )
    shell(rollout)
    configure(cluster, blocks)
    shell(blocks.take("do/install.md", "kubectl -n kube-system patch daemonset nvidia-device-pl"))
    share_and_look(shell, installation, blocks)

    before = container_state(cluster)
    upgrade, rollback = blocks.take("do/upgrade.md", "helm upgrade fenka").splitlines()
    watch = blocks.take("do/upgrade.md", "kubectl -n fenka-system rollout status")
    for command in (upgrade.replace("…", NEXT), rollback):
        shell(command)
        shell(watch)
    assert container_state(cluster) == before

    cluster.kubectl("delete", "pod", "first", "--now")
    cluster.set_scheduler_configuration(None)
    shell(blocks.take("do/remove.md", "helm uninstall fenka -n fenka-system"))
    wait_until("fenka's pods are gone", lambda: not cluster.list("pods", NAMESPACE))
    cluster.node(NODE).run("sh", "-c", blocks.take("do/remove.md", "rm -rf /run/fenka"))
    node = cluster.get("node", NODE)["metadata"]
    assert not {"gpushare", "cgpu"} & set(node["labels"])
    assert "fenka.io/cards" not in node["annotations"]
    pages = ("start/cluster.md", "start/without-gpu.md", "do/install.md", "do/upgrade.md")
    assert blocks.unused(*pages, "do/remove.md") == []


def share_and_look(shell: GuideShell, installation: Installation, blocks: Blocks) -> None:
    """Give a node simulated cards, create the first pod, and compare the first screen."""
    cluster = shell.cluster
    simulate = "kubectl label node NODE fenka.io/simulated=t4 gpushare=true"
    shell(blocks.take("start/without-gpu.md", simulate))
    shell(blocks.take("start/cluster.md", "kubectl label node NODE gpushare=true"))
    installation.wait_for_allocatable(NODE, MEMORY, 14)
    cluster.apply(blocks.take("start/cluster.md", "apiVersion: v1\nkind: Pod"))
    cluster.wait_for_pod("first", seconds=90)

    screen = blocks.take("start/cluster.md", "$ fenka top node -s")
    command, _, output = screen.partition("\n")
    expected = output.replace("gpu-1", NODE).replace("10.0.0.11", "192.168.1.214")
    assert table_cells(shell(command.removeprefix("$ "))) == table_cells(expected)
    assert table_cells(shell("kubectl inspect gpushare"))[1][:3] == [NODE, "192.168.1.214", "4/14"]
    assert NODE in shell("fenka why first")


def configure(cluster: Cluster, blocks: Blocks) -> None:
    """Install the certificates and the scheduler configuration on the control plane."""
    for command in (
        "fenka certificates --into",
        "install -d -m 700",
        "kubectl -n fenka-system get",
    ):
        on_control_plane(cluster, blocks.take("do/install.md", command))
    configured = on_control_plane(cluster, "cat /etc/kubernetes/scheduler-config.yaml")
    cluster.set_scheduler_configuration(configured)


def container_state(cluster: Cluster) -> tuple[str, int]:
    """Return container ID and restart count of the pod `first`."""
    (status,) = cluster.get("pod", "first")["status"]["containerStatuses"]
    return status["containerID"], status["restartCount"]


GPUSHARE_OBJECTS = """
apiVersion: v1
kind: Service
metadata: {name: gpushare-schd-extender, namespace: kube-system}
spec: {type: NodePort, ports: [{port: 12345, nodePort: 32766}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: gpushare-schd-extender, namespace: kube-system}
spec:
  replicas: 0
  selector: {matchLabels: {app: gpushare-schd-extender}}
  template:
    metadata: {labels: {app: gpushare-schd-extender}}
    spec: {containers: [{name: c, image: localhost/busybox:e2e}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: gpushare-device-plugin-ds, namespace: kube-system}
spec:
  selector: {matchLabels: {app: gpushare-device-plugin-ds}}
  template:
    metadata: {labels: {app: gpushare-device-plugin-ds}}
    spec:
      nodeSelector: {gpushare: "true"}
      containers: [{name: c, image: localhost/busybox:e2e}]
"""


def test_gpushare_pods_keep_their_cards_when_the_cluster_is_migrated(
    shell: GuideShell, installation: Installation, namespace: str
) -> None:
    """New pods are placed beside gpushare's, and nothing of gpushare is left."""
    cluster, virtual = shell.cluster, VirtualNodes(installation, namespace)
    blocks, page = Blocks(), "from/gpushare.md"
    cluster.kubectl("apply", "-f", "-", stdin=GPUSHARE_OBJECTS)
    for name in ("gpushare-schd-extender", "gpushare-device-plugin"):
        cluster.kubectl("create", "clusterrole", name, "--verb=get", "--resource=pods")
        cluster.kubectl("-n", "kube-system", "create", "serviceaccount", name)
        account = f"--serviceaccount=kube-system:{name}"
        cluster.kubectl("create", "clusterrolebinding", name, f"--clusterrole={name}", account)
    virtual.add(2, node_object("old", 2, {}, inventory=False))
    record = {gpushare.IDX: "1", gpushare.POD: "10", gpushare.DEV: "16", gpushare.ASSIGNED: "true"}
    virtual.create(virtual.pod("old-pod", 10, nodeName="old", annotations=record))
    try:
        shell(blocks.take(page, "kubectl -n kube-system delete service gpushare-schd-extender"))
        shell(blocks.take(page, "helm install fenka deploy/chart"))
        shell(f"kubectl -n {NAMESPACE} rollout status deployment/fenka-scheduler --timeout=180s")
        cluster.set_scheduler_configuration(GPUSHARE_CONFIGURATION)
        assert ["old-pod", namespace, "0", "10"] in table_cells(
            shell("kubectl inspect gpushare -d")
        )
        wait_until(
            "the extender knows the node",
            lambda: virtual.reported_units() == {"old": {"1": 10}},
        )
        virtual.create(virtual.pod("new-pod", 10))
        assert virtual.wait_for_placed(2)["new-pod"] == ("old", "0")
        shell(blocks.take(page, "helm upgrade fenka deploy/chart"))
        configure(cluster, blocks)
        virtual.create(virtual.pod("by-tls", 4))
        assert virtual.wait_for_placed(3)["by-tls"][0] == "old"
        shell(blocks.take(page, "kubectl delete clusterrolebinding gpushare-schd-extender"))
        remaining = cluster.kubectl(
            "get", "all,sa,clusterrole,clusterrolebinding", "-A", "-o", "name"
        )
        assert "gpushare-" not in remaining
        assert blocks.unused(page) == []
    finally:
        cluster.kubectl("-n", namespace, "delete", "pods", "--all", "--grace-period=0", "--force")
        cluster.kubectl("delete", "node", "old")


def table_cells(text: str) -> list[list[str]]:
    """Return the cells of each line, without horizontal rules."""
    return [line.split() for line in text.strip().splitlines() if line.strip("-= ")]
