"""Helpers of all scenarios: fenka as installed by its chart, and the manifests that users write."""

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.artifacts import CHART_FILES, COMMANDS
from e2e.cluster import Cluster, wait_until

HERE = Path(__file__).parent
SCHEDULER_CONFIGURATION = CHART_FILES / "scheduler-config.yaml"
FENKA = (str(COMMANDS / "fenka"),)
RELEASE = "fenka"
WORKLOAD = "localhost/fenka-workload:e2e"
MEMORY, WHOLE = "aliyun.com/gpu-mem", "nvidia.com/gpu"


CERTIFICATES = "/etc/kubernetes/fenka"
"""The folder of certificates on the control plane that kube-scheduler's configuration names."""
CALL_EXTENDER = """
import ssl, sys, urllib.request
url, folder = sys.argv[1:]
context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
context.load_cert_chain(f"{folder}/client.crt", f"{folder}/client.key")
# Certificates do not contain the addresses of replicas.
context.check_hostname = "127.0.0.1" in url
body = sys.stdin.buffer.read() or None
print(urllib.request.urlopen(url, body, timeout=10, context=context).read().decode())
"""

GPUSHARE_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
extenders:
- urlPrefix: "http://127.0.0.1:32766/gpushare-scheduler"
  filterVerb: filter
  bindVerb: bind
  enableHTTPS: false
  nodeCacheCapable: true
  managedResources:
  - name: aliyun.com/gpu-mem
    ignoredByScheduler: false
  ignorable: false
"""


def on_control_plane(cluster: Cluster, command: str) -> str:
    """Run a shell command on the control plane, with fenka on PATH."""
    path = f"PATH={COMMANDS}:$PATH; "
    return cluster.control_plane.run("sh", "-c", path + command)


def call_extender(cluster: Cluster, url: str, body: str = "") -> str:
    """Return the extender's answer to a caller with kube-scheduler's certificate."""
    command = ("python3", "-c", CALL_EXTENDER, url, CERTIFICATES)
    return cluster.control_plane.run(*command, stdin=body)


def kubeconfig_of(cluster: Cluster, account: str, namespace: str, target: Path) -> Path:
    """Write a kubeconfig with the token of a ServiceAccount, and return its path."""
    token = cluster.kubectl("-n", namespace, "create", "token", account).strip()
    written = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in written["users"]:
        user["user"] = {"token": token}
    target.write_text(yaml.safe_dump(written))
    return target


@contextmanager
def rolled_back(cluster: Cluster) -> Iterator[None]:
    """Return to the release's present revision after the `with` block; such blocks may be nested."""
    of_release = (RELEASE, "-n", RELEASE)
    revision = json.loads(cluster.helm("status", *of_release, "-o", "json"))["version"]
    yield
    cluster.helm("rollback", RELEASE, str(revision), "-n", RELEASE, "--wait")


@dataclass(frozen=True)
class Installation:
    """A cluster with fenka installed."""

    cluster: Cluster

    def fenka(self, *arguments: str) -> str:
        """Run `fenka …` in the control plane's network, as a user of the cluster would."""
        return self.cluster.run(*FENKA, *arguments)

    def inspect(self, *arguments: str) -> str:
        """Run `kubectl inspect gpushare …`; kubectl finds the plugin by its name."""
        path = f"{COMMANDS}:{self.cluster.environment()['PATH']}"
        return self.cluster.run(
            "kubectl", "inspect", "gpushare", *arguments, environment={"PATH": path}
        )

    def label(self, node: str, *labels: str) -> None:
        """Run `kubectl label node`, overwriting present labels."""
        self.cluster.kubectl("label", "--overwrite", "node", node, *labels)

    def allocatable(self, node: str, resource: str) -> int:
        """Return a node's allocatable units of an extended resource, 0 if it has none."""
        status = self.cluster.get("node", node)["status"]
        return int(status.get("allocatable", {}).get(resource, 0))

    def wait_for_allocatable(self, node: str, resource: str, units: int) -> None:
        """Wait until exactly this number of units is allocatable."""
        wait_until(
            f"{node}: {units} of {resource}",
            lambda: self.allocatable(node, resource) == units,
        )

    def pods(self, app: str) -> list[dict[str, Any]]:
        """Return the pods of a Deployment that are not being deleted, sorted by name."""
        pods = self.cluster.list("pods", selector=f"app={app}")
        alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return sorted(alive, key=lambda pod: str(pod["metadata"]["name"]))

    def wait_for_running(self, app: str, replicas: int) -> list[dict[str, Any]]:
        """Wait until this number of pods of a Deployment runs, and return them."""

        def running() -> bool:
            return len(self._running(app)) == replicas

        try:
            wait_until(f"{app}: {replicas} running", running)
        except Exception as error:
            names = [str(pod["metadata"]["name"]) for pod in self.pods(app)]
            messages = [line for name in names for line in self.cluster.events(name)[-4:]]
            raise AssertionError("\n".join([str(error), *messages])) from error
        return self._running(app)

    def _running(self, app: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods(app) if pod["status"]["phase"] == "Running"]

    def wait_for_event(self, pod: str, *parts: str, namespace: str = "default") -> str:
        """Wait until an event of the pod contains all these parts, and return its message."""
        matching: list[str] = []

        def has_event() -> bool:
            messages = self.cluster.events(pod, namespace)
            matching[:] = [line for line in messages if all(part in line for part in parts)]
            assert matching, messages
            return True

        wait_until(f"an event of {pod} with {parts}", has_event)
        return matching[0]


def deployment(name: str, resource: str, units: int, replicas: int = 1, command: str = "") -> str:
    """Return a Deployment of pods that request `units` of `resource` and run a shell command (or sleep)."""
    return textwrap.dedent(f"""\
        apiVersion: apps/v1
        kind: Deployment
        metadata: {{name: {name}}}
        spec:
          replicas: {replicas}
          selector: {{matchLabels: {{app: {name}}}}}
          template:
            metadata: {{labels: {{app: {name}}}}}
            spec:
              terminationGracePeriodSeconds: 0
              containers:
              - name: {name}
                image: {WORKLOAD}
                imagePullPolicy: Never
                command: [sh, -c, {json.dumps(command or "exec sleep 100000")}]
                resources: {{limits: {{{resource}: {units}}}}}
        """)


def notebook(name: str, units: int) -> str:
    """Return the article's objects: a Deployment, and a LoadBalancer Service from port 80 to 8888."""
    return textwrap.dedent(f"""\
        apiVersion: apps/v1
        kind: Deployment
        metadata: {{name: {name}, labels: {{app: {name}}}}}
        spec:
          selector: {{matchLabels: {{app: {name}}}}}
          template:
            metadata: {{labels: {{app: {name}}}}}
            spec:
              terminationGracePeriodSeconds: 0
              containers:
              - name: {name}
                image: {WORKLOAD}
                imagePullPolicy: Never
                command: [python3, /notebook/notebook.py]
                env: [{{name: PASSWORD, value: mypassw0rd}}]
                ports: [{{containerPort: 8888}}]
                readinessProbe: {{tcpSocket: {{port: 8888}}, periodSeconds: 1}}
                resources: {{limits: {{{MEMORY}: {units}}}}}
                volumeMounts: [{{name: notebook, mountPath: /notebook}}]
              volumes: [{{name: notebook, configMap: {{name: notebook}}}}]
        ---
        apiVersion: v1
        kind: Service
        metadata: {{name: {name}}}
        spec:
          type: LoadBalancer
          selector: {{app: {name}}}
          ports: [{{port: 80, targetPort: 8888}}]
        """)
