"""Test the programs of others that `engines` installs: they do in the cluster what fenka relies on."""

import re
from collections import Counter

import pytest

from e2e.cluster import Cluster, wait_until
from e2e.engines import GatewayApi
from e2e.images import BUSYBOX, TRAINING, WORKLOAD
from e2e.test_harness import pod

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

# An external scaler of KEDA. It encodes messages by hand: field 1 is the metric's name, field 3 a number.
SCALER = """
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc

def load():
    return float(Path("/tmp/load").read_text())

def message(number, content):
    return bytes([number << 3 | 2, len(content)]) + content

def named(value):
    return message(1, message(1, b"load") + bytes([3 << 3 | 1]) + struct.pack("<d", value))

answers = {
    "IsActive": lambda: bytes([1 << 3, load() > 0]),
    "GetMetricSpec": lambda: named(1),
    "GetMetrics": lambda: named(load()),
}

def handler(answer):
    return grpc.unary_unary_rpc_method_handler(lambda request, context: answer())

Path("/tmp/load").write_text("0")
handlers = {name: handler(answer) for name, answer in answers.items()}
service = grpc.method_handlers_generic_handler("externalscaler.ExternalScaler", handlers)
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((service,))
server.add_insecure_port("0.0.0.0:9000")
server.start()
server.wait_for_termination()
"""
SCALED = """
apiVersion: v1
kind: Service
metadata: {name: scaler}
spec: {selector: {app: scaler}, ports: [{port: 9000}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: worker}
spec:
  replicas: 0
  selector: {matchLabels: {app: worker}}
  template:
    metadata: {labels: {app: worker}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - {name: main, image: "localhost/busybox:e2e", imagePullPolicy: Never, command: [sleep, "100000"]}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: worker}
spec:
  scaleTargetRef: {name: worker}
  pollingInterval: 1
  cooldownPeriod: 1
  minReplicaCount: 0
  maxReplicaCount: 5
  triggers:
  - {type: external, metadata: {scalerAddress: "scaler.NAMESPACE:9000"}}
"""
PORT = 8000
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: NAME}
spec: {selector: {app: NAME}, ports: [{port: 8000}]}
"""
REQUESTS = 600
SHARE = 0.1
FETCH_ALL = f"""
import sys, urllib.request
for _ in range({REQUESTS}):
    print(urllib.request.urlopen(f"http://{{sys.argv[1]}}/", timeout=10).read().decode())
"""


def test_keda_scales_a_deployment_from_zero_to_the_external_load_and_back(
    cluster: Cluster, keda: None, namespace: str
) -> None:
    """The first replica is by KEDA itself, the second by the external metrics API, which KEDA serves."""
    del keda
    node = cluster.nodes[0].name
    cluster.apply(pod("scaler", TRAINING, node, ["python3", "-c", SCALER]), namespace)
    cluster.wait_for_pod("scaler", namespace)
    set_load(cluster, namespace, 0)
    cluster.apply(SCALED.replace("NAMESPACE", namespace), namespace)

    def ready() -> bool:
        condition = "{.status.conditions[?(@.type=='Ready')].status}"
        arguments = ("get", "scaledobject", "worker", "-o", f"jsonpath={condition}")
        return cluster.kubectl("-n", namespace, *arguments) == "True"

    wait_until("the ScaledObject", ready, 60)
    assert replicas(cluster, namespace) == 0
    set_load(cluster, namespace, 2)
    wait_until("two replicas", lambda: replicas(cluster, namespace) == 2, 120)
    set_load(cluster, namespace, 0)
    wait_until("no replica", lambda: replicas(cluster, namespace) == 0, 120)


def set_load(cluster: Cluster, namespace: str, load: int) -> None:
    """Set what the external scaler returns."""
    shell = ("sh", "-c", f"test -f /tmp/load && echo {load} > /tmp/load")

    def written() -> bool:
        cluster.kubectl("-n", namespace, "exec", "scaler", "--", *shell)
        return True

    wait_until("the external scaler", written)


def replicas(cluster: Cluster, namespace: str) -> int:
    """Return the number of running pods of the Deployment."""
    pods = cluster.list("pods", namespace, "app=worker")
    return sum(known["status"]["phase"] == "Running" for known in pods)


def test_route_divides_requests_by_its_weights(
    cluster: Cluster, gateway_api: GatewayApi, namespace: str
) -> None:
    """Of 600 independent requests 60 go to v2. The standard deviation is 7.3, so 23 to 97 are accepted."""
    first, second = cluster.nodes
    for name, node in {"v1": first.name, "v2": second.name}.items():
        serve = f"mkdir /www && echo {name} > /www/index.html && exec httpd -f -p {PORT} -h /www"
        cluster.apply(pod(name, BUSYBOX, node, ["sh", "-c", serve]), namespace)
        cluster.apply(SERVICE.replace("NAME", name), namespace)
    for name in ("v1", "v2"):
        cluster.wait_for_pod(name, namespace)
        gateway_api.apply_route(namespace, "web", PORT, {name: 1})
        wait_for_answer(cluster, gateway_api.address, name)
    gateway_api.apply_route(namespace, "web", PORT, {"v1": 90, "v2": 10})
    command = ["python3", "-c", FETCH_ALL, gateway_api.address]
    cluster.apply(pod("client", WORKLOAD, first.name, command, restartPolicy="Never"), namespace)
    cluster.wait_for_pod("client", namespace, "Succeeded", 120)
    answers = Counter(re.findall(r"\w+", cluster.kubectl("-n", namespace, "logs", "client")))
    assert answers.keys() == {"v1", "v2"}
    assert answers.total() == REQUESTS
    mean, deviation = REQUESTS * SHARE, (REQUESTS * SHARE * (1 - SHARE)) ** 0.5
    assert abs(answers["v2"] - mean) <= 5 * deviation


def wait_for_answer(cluster: Cluster, address: str, text: str) -> None:
    """Wait until the address answers with a text."""
    wait_until(text, lambda: cluster.fetch(f"http://{address}/").strip() == text)
