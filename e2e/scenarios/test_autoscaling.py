"""Scale a service by its requests: by its gateways' leader, and by KEDA where the cluster has it."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from e2e.cluster import Cluster, wait_until
from e2e.scenarios.installation import WORKLOAD, Installation

PORT = 8000

# Answers with the head of a response, and ends it only with the connection.
REPLICA = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self.connection.recv(1)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""

# Sends a request, prints the status line when it comes, and hangs up when its input ends.
CLIENT = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], 8000), 60); "
    "s.sendall(b'GET / HTTP/1.1\\r\\nHost: bert\\r\\n\\r\\n'); "
    "print(s.recv(15).decode(), flush=True); sys.stdin.read()"
)


@dataclass(frozen=True)
class Scaled:
    """Service `bert` with a version v1, which has from none to three replicas."""

    cluster: Cluster
    namespace: str

    @property
    def replicas(self) -> int:
        """The number of replicas that the Deployment shall have."""
        return int(self.cluster.get("deployment", "bert-v1", self.namespace)["spec"]["replicas"])

    @property
    def gateways(self) -> list[dict[str, Any]]:
        """The gateways' pods that are not being deleted, by name."""
        pods = self.cluster.list("pods", self.namespace, "servingName=bert,fenka.io/role=gateway")
        current = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return sorted(current, key=lambda pod: str(pod["metadata"]["name"]))

    @contextmanager
    def request(self) -> Iterator[subprocess.Popen[str]]:
        """Send a request that lasts as long as the block."""
        address = self.cluster.get("service", "bert", self.namespace)["spec"]["clusterIP"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = self.cluster.command("python3", "-c", CLIENT, address)
        environment = self.cluster.environment()
        with subprocess.Popen(command, text=True, env=environment, **pipes) as client:  # type: ignore[call-overload]
            yield client


@pytest.fixture
def scaler(request: pytest.FixtureRequest) -> str:
    """Return what scales: `keda` needs a fixture of this name, which installs KEDA."""
    name = str(request.param)
    if name == "keda":
        try:
            request.getfixturevalue("keda")
        except pytest.FixtureLookupError:
            pytest.skip("this cluster has no KEDA")
    return name


def serve(installation: Installation, namespace: str, *options: str) -> Scaled:
    """Deploy the service, and wait until its gateways are ready."""
    cluster = installation.cluster
    installation.fenka(
        *("serve", "custom", "-n", namespace, "--name=bert", "--version=v1", "--grace=1s"),
        *("--image", WORKLOAD, "--image-pull-policy=Never", f"--restful-port={PORT}"),
        *("--replicas=0..3", "--target=1", "--down-after=5s", *options),
        *("--", "python3", "-c", dedent(REPLICA)),
    )
    status = ("rollout", "status", "deployment/bert-gateway", "--timeout=90s")
    cluster.kubectl("-n", namespace, *status)
    return Scaled(cluster, namespace)


@pytest.mark.parametrize(
    "scaler", ["fenka", pytest.param("keda", marks=pytest.mark.full)], indirect=True
)
def test_service_scales_from_zero_by_its_requests(
    installation: Installation, namespace: str, scaler: str
) -> None:
    """An idle service ends. Its next request is answered, three have three replicas, and it ends again."""
    bert = serve(installation, namespace, f"--scaler={scaler}")
    wait_until("no replica", lambda: bert.replicas == 0, 120)
    with ExitStack() as stack:
        first = stack.enter_context(bert.request())
        assert first.stdout is not None
        assert first.stdout.readline() == "HTTP/1.1 200 OK\n"
        for _ in range(2):
            stack.enter_context(bert.request())
        wait_until("three replicas", lambda: bert.replicas == 3, 120)
    wait_until("no replica again", lambda: bert.replicas == 0, 120)


def test_another_gateway_scales_when_the_leader_is_gone(
    installation: Installation, namespace: str
) -> None:
    """Its requests end with it; those of the others keep their replicas."""
    bert = serve(installation, namespace, "--scaler=fenka", "--gateway-replicas=2")
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(bert.request())
        wait_until("two gateways", lambda: len(bert.gateways) == 2)
        leader = bert.gateways[0]["metadata"]["name"]
        bert.cluster.kubectl("-n", namespace, "delete", "pod", leader, "--now")
        for _ in range(3):
            stack.enter_context(bert.request())
        wait_until("three replicas", lambda: bert.replicas == 3)
    wait_until("no replica", lambda: bert.replicas == 0)


def test_gateway_may_scale_nothing_but_its_versions(
    installation: Installation, namespace: str
) -> None:
    """The API server refuses it the scale of other Deployments, and everything else of its own."""
    serve(installation, namespace, "--scaler=fenka")
    account = f"--as=system:serviceaccount:{namespace}:bert-gateway"

    def may(verb: str, *what: str) -> bool:
        command = ("auth", "can-i", verb, *what, "-n", namespace, account)
        done = subprocess.run(
            installation.cluster.command("kubectl", *command),
            capture_output=True,
            text=True,
            env=installation.cluster.environment(),
            check=False,
        )
        return done.stdout.strip() == "yes"

    assert may("patch", "deployments/bert-v1", "--subresource=scale")
    assert not may("patch", "deployments/bert-gateway", "--subresource=scale")
    assert not may("patch", "deployments/bert-v1")
    assert not may("get", "secrets")


def test_switching_leaves_one_scaler_only(installation: Installation, namespace: str) -> None:
    """From a range to a number and back: the annotation and the right go and come together."""
    bert = serve(installation, namespace, "--scaler=fenka")

    def state() -> tuple[bool, bool]:
        service = bert.cluster.get("service", "bert", namespace)
        rules = bert.cluster.get("role", "bert-gateway", namespace)["rules"]
        annotated = "fenka.io/scaling" in service["metadata"].get("annotations", {})
        return annotated, "deployments/scale" in json.dumps(rules)

    assert state() == (True, True)
    change = ("serve", "update", "custom", "-n", namespace, "--name=bert")
    installation.fenka(*change, "--replicas=1")
    assert state() == (False, False)
    installation.fenka(*change, "--replicas=0..2")
    assert state() == (True, True)


@contextmanager
def prometheus(cluster: Cluster, target: str, folder: Path) -> Iterator[str]:
    """Run Debian's Prometheus in the control plane's network, which reads one target. Return its address."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on the PATH: .ci/run installs Debian's")
    job = {"job_name": "gateway", "static_configs": [{"targets": [target]}]}
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    file = folder / "prometheus.yaml"
    file.write_text(json.dumps(configuration))
    address = f"{cluster.control_plane.address}:19091"
    words = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            cluster.command("prometheus", *words, f"--web.listen-address={address}"),
            env=cluster.environment(),
            stdout=log,
            stderr=log,
        )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.parametrize("scaler", ["keda"], indirect=True)
def test_autoscaler_follows_a_metric_of_prometheus(
    installation: Installation, namespace: str, scaler: str, tmp_path: Path
) -> None:
    """Kubernetes' autoscaler sets the number of a version without a range, by the gateway's own metric."""
    del scaler
    bert = serve(installation, namespace, "--scaler=fenka", "--replicas=1..2")
    change = ("serve", "update", "custom", "-n", namespace, "--name=bert", "--replicas=1")
    installation.fenka(*change)
    (gateway,) = bert.gateways
    with prometheus(bert.cluster, f"{gateway['status']['podIP']}:9090", tmp_path) as address:
        trigger = {
            "serverAddress": f"http://{address}",
            "query": "sum(fenka_gateway_requests)",
            "threshold": "1",
        }
        behavior = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        scaled = {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": "own"},
            "spec": {
                "scaleTargetRef": {"name": "bert-v1"},
                "minReplicaCount": 1,
                "maxReplicaCount": 3,
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
                "triggers": [{"type": "prometheus", "metadata": trigger}],
            },
        }
        bert.cluster.apply(json.dumps(scaled), namespace)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(bert.request())
            wait_until("three replicas", lambda: bert.replicas == 3, 120)
        wait_until("one replica again", lambda: bert.replicas == 1, 180)
        bert.cluster.kubectl("-n", namespace, "delete", "scaledobject", "own")
