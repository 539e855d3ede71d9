"""Scale a service by the metrics adapter: an autoscaler, a gateway, and what tenants may do to it."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from textwrap import dedent
from urllib.parse import quote

import pytest

from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.scenarios.installation import (
    CHART,
    EXTERNAL_METRICS,
    MEMORY,
    RELEASE,
    WORKLOAD,
    Installation,
)
from e2e.scenarios.test_sharing import COMPUTE, pod_with_limits

V1 = "servingName=bert,servingVersion=v1"
ADAPTER = "fenka-metrics-adapter"
API = "v1beta1.external.metrics.k8s.io"

# Answers with the head of a response, and ends it only with the connection. Its metrics are a gauge.
REPLICA = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        if self.path == "/metrics":
            self.send_header("Content-Length", "8")
            self.end_headers()
            self.wfile.write(b"queue 5\\n")
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self.connection.recv(1)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""

SERVICE = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: bert-gateway}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: bert-gateway}
rules:
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [services], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: bert-gateway}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: bert-gateway}
subjects: [{kind: ServiceAccount, name: bert-gateway}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: bert-gateway}
spec:
  selector: {matchLabels: {servingName: bert, fenka.io/role: gateway}}
  template:
    metadata: {labels: {servingName: bert, fenka.io/role: gateway}}
    spec:
      serviceAccountName: bert-gateway
      containers:
      - name: gateway
        image: localhost/fenka:e2e
        imagePullPolicy: Never
        args:
        - gateway
        - --service=bert
        - --namespace=NAMESPACE
        - --listen=http-serving=0.0.0.0:8080
        - --admin=0.0.0.0:9090
        ports: [{name: admin, containerPort: 9090}]
        readinessProbe: {httpGet: {path: /readyz, port: admin}, periodSeconds: 1, timeoutSeconds: 10}
---
apiVersion: v1
kind: Service
metadata: {name: bert, labels: {servingName: bert}}
spec: {selector: {servingName: bert, fenka.io/role: gateway}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: bert-v1, labels: {servingName: bert, servingVersion: v1}}
spec: {selector: {servingName: bert, servingVersion: v1}, ports: [{name: http-serving, port: 8000}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: bert-v1}
spec:
  replicas: 1
  selector: {matchLabels: {servingName: bert, servingVersion: v1}}
  template:
    metadata: {labels: {servingName: bert, servingVersion: v1}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: main
        image: WORKLOAD
        imagePullPolicy: Never
        command: [python3, -c, REPLICA]
        ports: [{name: http-metrics, containerPort: 8000}]
        readinessProbe: {tcpSocket: {port: 8000}, periodSeconds: 1}
"""

AUTOSCALER = """
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: bert-v1}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: bert-v1}
  minReplicas: 0
  maxReplicas: 3
  behavior: {scaleDown: {stabilizationWindowSeconds: 0}}
  metrics:
  - type: External
    external:
      metric: {name: fenka_requests, selector: {matchLabels: {servingName: bert, servingVersion: v1}}}
      target: {type: AverageValue, averageValue: "1"}
"""

# Sends a request, prints the status line when it comes, and hangs up when its input ends.
CLIENT = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], 80), 60); "
    "s.sendall(b'GET / HTTP/1.1\\r\\nHost: bert\\r\\n\\r\\n'); "
    "print(s.recv(15).decode(), flush=True); sys.stdin.read()"
)


def value(cluster: Cluster, namespace: str, metric: str, selector: str = V1) -> str:
    """Return a metric's value. Raise ClusterError with the adapter's sentence."""
    path = f"{EXTERNAL_METRICS}/namespaces/{namespace}/{metric}?labelSelector={quote(selector)}"
    (item,) = json.loads(cluster.kubectl("get", "--raw", path))["items"]
    return str(item["value"])


def reachable(cluster: Cluster, namespace: str) -> bool:
    """Return whether kube-proxy knows the gateway by now."""
    address = cluster.get("service", "bert", namespace)["spec"]["clusterIP"]
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 80), 5)"
    command = cluster.command("python3", "-c", connect, address)
    environment = cluster.environment()
    return not subprocess.run(command, capture_output=True, env=environment, check=False).returncode


def replicas(cluster: Cluster, namespace: str) -> int:
    """Return the number of replicas that the Deployment shall have."""
    return int(cluster.get("deployment", "bert-v1", namespace)["spec"]["replicas"])


@contextmanager
def request(cluster: Cluster, namespace: str) -> Iterator[subprocess.Popen[str]]:
    """Send a request to the gateway that lasts as long as the block."""
    address = cluster.get("service", "bert", namespace)["spec"]["clusterIP"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = cluster.command("python3", "-c", CLIENT, address)
    with subprocess.Popen(command, text=True, env=cluster.environment(), **pipes) as client:  # type: ignore[call-overload]
        yield client


@pytest.fixture
def service(metrics_adapter: Installation, namespace: str) -> str:
    """Provide the namespace of service bert, with a gateway and one replica of version v1."""
    cluster = metrics_adapter.cluster
    text = SERVICE.replace("NAMESPACE", namespace).replace("WORKLOAD", WORKLOAD)
    cluster.apply(text.replace("REPLICA", json.dumps(dedent(REPLICA))), namespace)
    for name in ("bert-gateway", "bert-v1"):
        cluster.kubectl("-n", namespace, "rollout", "status", f"deployment/{name}", "--timeout=60s")
    wait_until("the Service accepts connections", lambda: reachable(cluster, namespace))
    return namespace


def test_service_scales_from_zero_by_its_requests(
    metrics_adapter: Installation, service: str
) -> None:
    """An idle service ends. Its next request is answered, three have three replicas, and it ends again."""
    cluster = metrics_adapter.cluster
    assert value(cluster, service, "fenka_requests") == "0"
    cluster.apply(AUTOSCALER, service)
    wait_until("no replica", lambda: replicas(cluster, service) == 0)
    with ExitStack() as stack:
        first = stack.enter_context(request(cluster, service))
        assert first.stdout is not None
        assert first.stdout.readline() == "HTTP/1.1 200 OK\n"
        assert replicas(cluster, service) == 1
        for _ in range(2):
            stack.enter_context(request(cluster, service))
        wait_until("three requests", lambda: value(cluster, service, "fenka_requests") == "3")
        wait_until("three replicas", lambda: replicas(cluster, service) == 3)
    wait_until("no replica again", lambda: replicas(cluster, service) == 0)


def test_value_is_an_error_when_a_gateway_does_not_answer(
    metrics_adapter: Installation, service: str
) -> None:
    """A second gateway that is no gateway, and a pod in its node's network."""
    cluster = metrics_adapter.cluster
    assert value(cluster, service, "queue") == "5"
    pod = """
    apiVersion: v1
    kind: Pod
    metadata: {name: fake, labels: {servingName: bert, fenka.io/role: gateway, app: fake}}
    spec:
      hostNetwork: HOST
      containers:
      - name: main
        image: localhost/busybox:e2e
        imagePullPolicy: Never
        command: [sleep, infinity]
        ports: [{name: admin, containerPort: 10249}]
    """
    for host, sentence in (
        ("false", "pod fake refuses connections to port admin"),
        ("true", "pod fake uses its node's network"),
    ):
        cluster.apply(dedent(pod).replace("HOST", host), service)
        cluster.wait_for_pod("fake", service)
        with pytest.raises(ClusterError, match=sentence):
            value(cluster, service, "fenka_requests")
        cluster.delete(dedent(pod), service)
    assert value(cluster, service, "fenka_requests") == "0"


@pytest.mark.usefixtures("node")
def test_busy_share_of_a_slice_is_read_from_its_node(metrics_adapter: Installation) -> None:
    """One program computes all the time, another never. A pod without a slice is an error."""
    cluster = metrics_adapter.cluster
    for name, limits, program in (
        ("busy", {MEMORY: 2}, COMPUTE),
        ("idle", {MEMORY: 2}, ""),
        ("none", {}, ""),
    ):
        group = "none" if name == "none" else "slices"
        cluster.apply(pod_with_limits(name, limits, program, app=name, group=group))
        cluster.wait_for_pod(name)

    def share(selector: str) -> float:
        text = value(cluster, "default", "fenka_gpu_busy", selector)
        return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)

    wait_until("the busy slice's share", lambda: share("app=busy") > 0.5)
    assert share("app=idle") == 0
    assert 0.5 < share("group=slices") <= 1
    # It may be on the node that shares no cards.
    with pytest.raises(
        ClusterError, match=r"reports no slice of pod none|no node program of fenka"
    ):
        share("app=none")


def test_api_is_left_to_another_program_when_it_has_it(metrics_adapter: Installation) -> None:
    """The adapter is not ready and says why. A new installation would not contain it."""
    cluster = metrics_adapter.cluster
    change = ("patch", "apiservice", API, "--type=merge", "-p")
    other = json.dumps({"spec": {"service": {"namespace": "keda", "name": "keda-metrics"}}})
    own = json.dumps({"spec": {"service": {"namespace": RELEASE, "name": ADAPTER}}})
    cluster.kubectl(*change, other)
    try:
        upgrade = ("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values")
        rendered = cluster.helm(*upgrade, "--dry-run=server")
        assert f"name: {ADAPTER}\n" not in rendered
        assert "belongs to Service keda/keda-metrics, and" in rendered
        restart = ("rollout", "restart", f"deployment/{ADAPTER}", "-n", RELEASE)
        cluster.kubectl(*restart)

        def says_why() -> bool:
            component = "app.kubernetes.io/component=metrics-adapter"
            logs = cluster.kubectl("-n", RELEASE, "logs", "--tail=20", "-l", component)
            return "belongs to Service keda/keda-metrics" in logs

        wait_until("the adapter's sentence", says_why)
    finally:
        cluster.kubectl(*change, own)
    wait_until("the external metrics", lambda: cluster.kubectl("get", "--raw", EXTERNAL_METRICS))
