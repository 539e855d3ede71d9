"""The autoscaler of the chart in scenarios, with a fake cloud: whatever it launches is a real kubelet."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from e2e.artifacts import CHART
from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.cloud import CLUSTER, KEY, REGION, SECRET, FakeCloud, Offer
from e2e.scenarios.installation import RELEASE, Installation, rolled_back

NAME = "fenka-autoscaler"
CREDENTIALS = {"ALIBABA_CLOUD_ACCESS_KEY_ID": KEY, "ALIBABA_CLOUD_ACCESS_KEY_SECRET": SECRET}
CONFIG_MAPS = ("fenka-orders", "fenka-autoscaler", "fenka-shapes")


class Elastic:
    """A cluster whose nodes with cards come and go.

    Attributes:
        cloud: where they come from.
    """

    def __init__(self, installation: Installation) -> None:
        self.installation, self.cluster = installation, installation.cluster
        self.cloud = FakeCloud(self.cluster)

    @contextmanager
    def autoscaler(
        self, offers: Sequence[Offer], replicas: int = 1, **parts: Any
    ) -> Iterator[None]:
        """Let the autoscaler run for a block, and end everything that it has bought afterwards.

        Args:
            offers: what the cloud has, and the configuration's groups.
            replicas: of the Deployment.
            parts: further parts of the configuration.
        """
        shutil.rmtree(self.cloud.folder.path)
        self.cloud.folder.path.mkdir()
        self.cloud.sell(offers)
        settings = {
            "enabled": True,
            "replicas": replicas,
            "env": [{"name": name, "value": value} for name, value in CREDENTIALS.items()],
            "config": self._configuration(offers) | parts,
        }
        values = self.cluster.state / "elastic.yaml"
        values.write_text(yaml.safe_dump({"autoscaler": settings}))
        chart = (RELEASE, str(CHART), "-n", RELEASE)
        with self.cloud.running(), rolled_back(self.cluster):
            options = ("--reuse-values", "-f", str(values), "--wait", "--timeout=120s")
            self.cluster.helm("upgrade", *chart, *options)
            try:
                yield
            finally:
                self._stop()

    def _configuration(self, offers: Sequence[Offer]) -> dict[str, Any]:
        address = self.cloud.address
        endpoints = {"essEndpoint": address, "ecsEndpoint": address, "protocol": "HTTP"}
        return {
            "cluster": CLUSTER,
            "provider": {"kind": "ess", "region": REGION, **endpoints},
            "groups": [it.configuration() for it in offers],
        }

    def _stop(self) -> None:
        self.cluster.kubectl("-n", RELEASE, "scale", "deployment", NAME, "--replicas=0")
        wait_until("the end of the autoscaler", lambda: not self.replicas())
        self.cloud.end_all()
        options = ("-n", RELEASE, "--ignore-not-found")
        self.cluster.kubectl("delete", "configmap", *CONFIG_MAPS, *options)

    # What it does.

    def fenka(self, *arguments: str) -> str:
        """Return what a command of fenka prints."""
        return self.installation.fenka(*arguments)

    def orders(self) -> dict[str, Any]:
        """Return the orders of the ConfigMap."""
        with suppress(ClusterError):
            data = self.cluster.get("configmap", "fenka-orders", RELEASE).get("data") or {}
            return {name: json.loads(text) for name, text in data.items()}
        return {}

    def nodes(self) -> list[str]:
        """Return the names of the nodes that were bought."""
        listed = self.cluster.kubectl("get", "nodes", "-l", "fenka.io/group", "-o", "name")
        return sorted(line.partition("/")[2] for line in listed.splitlines())

    def status(self, node: str) -> str:
        """Return the state of a node as `fenka nodes` shows it, empty if it does not."""
        lines = (line.split(maxsplit=6) for line in self.fenka("nodes").splitlines())
        return next((line[6] for line in lines if line and line[0] == node), "")

    def wait_for_no_nodes(self, seconds: float = 120) -> None:
        """Wait until neither nodes nor instances are left."""

        def gone() -> bool:
            assert not self.nodes(), self.fenka("nodes")
            assert not self.cloud.machines
            return True

        wait_until("the end of all nodes that were bought", gone, seconds)

    # Its processes.

    def replicas(self) -> list[dict[str, Any]]:
        """Return the pods of the autoscaler."""
        return list(self.cluster.list("pods", RELEASE, "app.kubernetes.io/component=autoscaler"))

    def leader(self) -> str:
        """Return the name of the pod that leads, empty if none does."""
        holder = self.cluster.get("lease", NAME, RELEASE)["spec"].get("holderIdentity") or ""
        names = (pod["metadata"]["name"] for pod in self.replicas())
        return next((name for name in names if holder.startswith(name)), "")

    def is_ready(self, name: str) -> bool:
        """Return whether a replica is ready."""
        conditions = self.cluster.get("pod", name, RELEASE)["status"]["conditions"]
        return any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)

    def kill(self) -> None:
        """Kill the only replica; the kubelet starts it again."""
        (pod,) = self.replicas()
        self._task(pod, "kill", "--signal", "SIGKILL")

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Let a replica stand still for a block."""
        (pod,) = (pod for pod in self.replicas() if pod["metadata"]["name"] == name)
        self._task(pod, "pause")
        try:
            yield
        finally:
            self._task(pod, "resume")

    def _task(self, pod: Mapping[str, Any], *action: str) -> None:
        (status,) = pod["status"]["containerStatuses"]
        container = status["containerID"].removeprefix("containerd://")
        self.cluster.node(pod["spec"]["nodeName"]).ctr("tasks", *action, container)
