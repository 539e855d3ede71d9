"""Serve with the rights of fenka-user alone: a second version under requests, and its withdrawal."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import Cluster, wait_until
from e2e.scenarios.installation import FENKA, WORKLOAD, Installation, kubeconfig_of

PROGRAM = Path(__file__).parent / "serving" / "echo_server.py"
PORT = 5000
KINDS = (
    "deployments",
    "replicasets",
    "pods",
    "services",
    "endpointslices",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "horizontalpodautoscalers",
    "configmaps",
)
CLIENT = """
import collections, json, select, sys, urllib.request
answers = collections.Counter()
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        answers[urllib.request.urlopen(sys.argv[1], timeout=60).read().decode()] += 1
    except OSError as error:
        answers[repr(error)] += 1
print(json.dumps(answers))
"""


@dataclass
class User:
    """A user who may do in a namespace what fenka-user allows."""

    cluster: Cluster
    namespace: str
    kubeconfig: Path
    answers: dict[str, int] = field(default_factory=dict)

    def fenka(self, *words: str) -> str:
        """Run a command of `fenka`."""
        options = ("--kubeconfig", str(self.kubeconfig), "-n", self.namespace)
        verbs = 2 if words[0] == "serve" else 1
        command = (*words[:verbs], *options, *words[verbs:])
        return self.cluster.run(*FENKA, *command)

    def serve(self, version: str) -> str:
        """Deploy a version, and wait until it accepts requests."""
        image = ("--image", WORKLOAD, "--image-pull-policy=Never", "--gpu-mem=2")
        service = ("--name=bert", f"--version={version}", f"--restful-port={PORT}")
        program = ("--env", f"VERSION={version}", "--wait", "--timeout=90", "--", "python3", "-c")
        return self.fenka("serve", "custom", *service, *image, *program, PROGRAM.read_text())

    @property
    def url(self) -> str:
        """The address of the service in the cluster."""
        service = self.cluster.get("service", "bert", self.namespace)
        return f"http://{service['spec']['clusterIP']}:{PORT}/"

    @contextmanager
    def requests(self) -> Iterator[None]:
        """Send requests while the block runs, each on a new connection; count the answers."""
        command = self.cluster.command(sys.executable, "-c", CLIENT, self.url)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=self.cluster.environment(), stdin=pipe, stdout=pipe, text=True
        ) as client:
            yield
            self.answers = json.loads(client.communicate("end\n", timeout=90)[0])

    def objects(self) -> set[str]:
        """Return all objects of the namespace."""
        kinds = ",".join(KINDS)
        return set(self.cluster.kubectl("-n", self.namespace, "get", kinds, "-o", "name").split())


def test_second_version_comes_and_goes_without_a_failed_request(
    installation: Installation, sharing_node: str, namespace: str, tmp_path: Path
) -> None:
    """The gateway is inserted beneath the clients. Deletion leaves nothing."""
    del sharing_node
    cluster = installation.cluster
    cluster.kubectl("-n", namespace, "create", "serviceaccount", "alice")
    binding = ("alice", "--clusterrole=fenka-user", f"--serviceaccount={namespace}:alice")
    cluster.kubectl("-n", namespace, "create", "rolebinding", *binding)
    kubeconfig = kubeconfig_of(cluster, "alice", namespace, tmp_path / "kubeconfig")
    user = User(cluster, namespace, kubeconfig)
    before = user.objects()
    assert "1 of 1 replicas accept requests" in user.serve("v1")
    with user.requests():
        assert "version v2 gets no requests yet" in user.serve("v2")
    assert set(user.answers) == {"v1"}
    user.fenka("traffic-split", "--name=bert", "-v", "v1:50", "-v", "v2:50")
    with user.requests():
        wait_until("an answer of v2", lambda: cluster.fetch(user.url).strip() == "v2")
        user.fenka("serve", "delete", "bert", "-v", "v2")
        selector = "servingVersion=v2"
        wait_until("the end of v2", lambda: not cluster.list("pods", namespace, selector))
    assert set(user.answers) == {"v1", "v2"}
    user.fenka("serve", "delete", "bert")
    wait_until("nothing that is left", lambda: user.objects() == before)
