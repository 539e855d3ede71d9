"""Attack the extender from an ordinary pod, with client certificates required and without."""

import json
import textwrap
from collections.abc import Iterator

import pytest

from e2e.artifacts import CHART
from e2e.cluster import Cluster, wait_until
from e2e.scenarios.installation import (
    GPUSHARE_CONFIGURATION,
    MEMORY,
    RELEASE,
    SCHEDULER_CONFIGURATION,
    WORKLOAD,
    Installation,
)
from e2e.scenarios.replicas import replicas, wait_for_replicas
from e2e.scenarios.virtual_nodes import VIRTUAL_LABEL, Json, VirtualNodes

BROKEN = ("RemoteDisconnected", "ConnectionResetError", "BadStatusLine")
BIND = """
import json, ssl, sys, urllib.request
context = ssl._create_unverified_context()
url, *names = sys.argv[1:]
body = json.dumps(dict(zip(("PodName", "PodNamespace", "PodUID", "Node"), names))).encode()
try:
    print(urllib.request.urlopen(url + "/gpushare-scheduler/bind", body, 10, context=context).read().decode())
except Exception as error:
    print(type(error).__name__, error)
"""
FLOOD = """
import socket, sys, threading
host, port = sys.argv[1], int(sys.argv[2])
HEAD = b"POST /gpushare-scheduler/filter HTTP/1.1\\r\\nHost: n\\r\\nContent-Length: 200000000\\r\\n\\r\\n"
ended = []
def send():
    for _ in range(3):
        try:
            with socket.create_connection((host, port), 10) as connection:
                connection.sendall(HEAD)
                for _ in range(200):
                    connection.sendall(bytes(1000000))
        except OSError as error:
            ended.append(type(error).__name__)
threads = [threading.Thread(target=send) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(ended), "of 12 ended early")
"""
SILENT = """
import socket, sys, time
host, port = sys.argv[1], int(sys.argv[2])
print(len([socket.create_connection((host, port), 10) for _ in range(600)]), flush=True)
time.sleep(3600)
"""
READ = """
import sys, urllib.request
for path in sys.argv[2:]:
    print(urllib.request.urlopen(sys.argv[1] + path, timeout=10).read().decode()[:200])
"""


class Attacker:
    """An ordinary pod without rights, in its own namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        cluster.apply(self._pod("attacker", ["sleep", "100000"]), namespace)
        cluster.wait_for_pod("attacker", namespace)

    def _pod(self, name: str, command: list[str]) -> str:
        return textwrap.dedent(f"""\
            apiVersion: v1
            kind: Pod
            metadata: {{name: {name}}}
            spec:
              terminationGracePeriodSeconds: 0
              automountServiceAccountToken: false
              containers:
              - name: c
                image: {WORKLOAD}
                imagePullPolicy: Never
                command: {json.dumps(command)}
            """)

    def python(self, script: str, *arguments: str) -> str:
        """Run a script in the pod and return its output."""
        command = ("exec", "attacker", "--", "python3", "-c", script, *arguments)
        return self.cluster.kubectl("-n", self.namespace, *command)

    def start_in_background(self, name: str, script: str, *arguments: str) -> None:
        """Run a script in a further pod that keeps running."""
        self.cluster.apply(self._pod(name, ["python3", "-c", script, *arguments]), self.namespace)
        self.cluster.wait_for_pod(name, self.namespace)


@pytest.fixture
def attacker(installation: Installation, namespace: str) -> Attacker:
    """Provide the attacking pod."""
    return Attacker(installation.cluster, namespace)


def service_address(cluster: Cluster, name: str = "fenka-scheduler") -> str:
    """Return the address of a Service, since this cluster has no DNS."""
    address: str = cluster.get("service", name, RELEASE)["spec"]["clusterIP"]
    return address


def restart_counts(cluster: Cluster) -> dict[str, int]:
    """Return the restart counts of the extender's pods."""
    return {
        pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in replicas(cluster)
    }


def victims(virtual: VirtualNodes) -> list[tuple[Json, str]]:
    """Create two pods of another user, and return each with a node that it does not select."""
    virtual.node("virtual-0", 1)
    virtual.node("virtual-1", 1)
    unplaceable = {"nodeSelector": {VIRTUAL_LABEL: "yes", "kubernetes.io/hostname": "nowhere"}}
    plain = virtual.pod("plain", 1, **unplaceable)
    plain["spec"]["containers"][0].pop("resources")
    virtual.create(plain, virtual.pod("chooser", 4, **unplaceable))
    chosen = (pod for pod in virtual.pods() if pod["metadata"]["name"] in ("plain", "chooser"))
    return [(pod, "virtual-1") for pod in chosen]


def forge_binding(attacker: Attacker, url: str, pod: Json, node: str) -> str:
    """Send a forged binding and return the answer."""
    meta = pod["metadata"]
    return attacker.python(BIND, url, meta["name"], meta["namespace"], meta["uid"], node)


def test_forged_bindings_and_floods_change_nothing_when_sent_without_a_certificate(
    virtual: VirtualNodes, attacker: Attacker
) -> None:
    """Send bindings without a certificate, large bodies and silent connections while pods are placed."""
    cluster = virtual.cluster
    wait_for_replicas(cluster)
    before, host = restart_counts(cluster), service_address(cluster)
    node = cluster.nodes[0].address
    for pod, where in victims(virtual):
        for url in (f"https://{host}:12345", f"https://{node}:32766", f"http://{host}:12345"):
            output = forge_binding(attacker, url, pod, where)
            assert output.split()[0] in ("URLError", "SSLError", *BROKEN), output
    print(attacker.python(FLOOD, host, "12345"))
    read_host = service_address(cluster, "fenka-scheduler-read")
    print(attacker.python(FLOOD, read_host, "12346"))
    attacker.start_in_background("silent", SILENT, host, "12345")
    attacker.start_in_background("silent-readers", SILENT, read_host, "12346")
    virtual.create(*(virtual.pod(f"served-{number}", 4) for number in range(6)))
    wait_until("pods are placed", lambda: len(virtual.placed()) == 6)
    assert not [name for name in virtual.placed() if name in ("plain", "chooser")]
    answers = attacker.python(
        READ, f"http://{read_host}:12346", "/gpushare-scheduler/inspect", "/metrics"
    )
    assert '"nodes"' in answers
    assert "# HELP" in answers
    wait_for_replicas(cluster)
    assert restart_counts(cluster) == before


@pytest.fixture
def plain(installation: Installation) -> Iterator[Installation]:
    """Run fenka without TLS, with kube-scheduler's configuration for gpushare."""
    cluster = installation.cluster
    upgrade = ("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values", "--wait")
    cluster.helm(*upgrade, "--set=scheduler.tls.enabled=false", "--timeout=90s")
    cluster.set_scheduler_configuration(GPUSHARE_CONFIGURATION)
    yield installation
    cluster.helm(*upgrade, "--set=scheduler.tls.enabled=true", "--timeout=90s")
    cluster.set_scheduler_configuration(SCHEDULER_CONFIGURATION.read_text())
    wait_for_replicas(cluster)


def test_forged_bindings_are_rejected_by_the_pod_specs_when_tls_is_off(
    plain: Installation, virtual: VirtualNodes, attacker: Attacker
) -> None:
    """Also check that gpushare's configuration works and that large bodies are rejected."""
    cluster = plain.cluster
    wait_for_replicas(cluster)
    before, host = restart_counts(cluster), service_address(cluster)
    url = f"http://{host}:12345"
    (chooser, where), (nothing, _) = sorted(
        victims(virtual), key=lambda victim: str(victim[0]["metadata"]["name"])
    )
    assert "may not go to the node virtual-1" in forge_binding(attacker, url, chooser, where)
    assert "requests no resource of fenka" in forge_binding(attacker, url, nothing, where)
    nameless = {"metadata": {**chooser["metadata"], "uid": ""}}
    assert "PodUID" in forge_binding(attacker, url, nameless, where)
    print(attacker.python(FLOOD, host, "12345"))
    attacker.start_in_background("silent", SILENT, host, "12345")
    virtual.create(virtual.pod("served", 4))
    assert "served" in virtual.wait_for_placed(1)
    assert restart_counts(cluster) == before
    assert MEMORY in json.dumps(chooser)
