"""Two gateways of a service as processes: one sets the number of replicas, both answer KEDA."""

import contextlib
import http.client
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from fenka.cluster.service_objects import scaling_text
from fenka.core.scaling import ScalingPolicy
from fenka.gateway import external_scaler_pb2 as messages
from fenka.gateway.figures import ADMIN_PORT
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.gateway.test_endpoints import endpoint, endpoint_slice, gateway_slice
from tests.ports import free_port
from tests.waiting import wait_until

Json = dict[str, Any]


class _Replica(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class GatewayPod:
    """A gateway in a pod of this name, whose address is one of the loopback network."""

    def __init__(self, name: str, host: str, kubeconfig: Path) -> None:
        self.name, self.host, self.port, self.scaler = name, host, free_port(), free_port()
        words = [
            *("--service", "bert", "--namespace", "d", "--kubeconfig", str(kubeconfig)),
            *("--listen", f"http={host}:{self.port}", "--admin", f"{host}:{ADMIN_PORT}"),
            *("--scaler", f"{host}:{self.scaler}"),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fenka", "gateway", *words],
            env={**os.environ, "POD_NAME": name},
        )

    def get(self, port: int, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a response."""
        connection = http.client.HTTPConnection(self.host, port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    @property
    def ready(self) -> bool:
        """Whether it has its first table."""
        assert self.process.poll() is None
        with contextlib.suppress(ConnectionError):
            return self.get(ADMIN_PORT, "/readyz")[0] == 200
        return False

    def metric(self, name: str) -> str:
        """Return the value of a metric."""
        text = self.get(ADMIN_PORT, "/metrics")[1].decode()
        (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")]
        return value

    def active(self) -> bool:
        """Return what KEDA is told."""
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"{self.host}:{self.scaler}", options) as channel:
            call = channel.unary_unary(
                "/externalscaler.ExternalScaler/IsActive",
                request_serializer=messages.ScaledObjectRef.SerializeToString,
                response_deserializer=messages.IsActiveResponse.FromString,
            )
            answer = call(messages.ScaledObjectRef(metadata={"version": "v1"}), timeout=30)
            return bool(answer.active)


@pytest.fixture
def server() -> FakeApiServer:
    """Return a cluster with a service whose version has no replica."""
    server = FakeApiServer()
    annotations = {"fenka.io/scaling": scaling_text({"v1": ScalingPolicy(0, 3, 1, 0.0, 0.0)})}
    meta = {"name": "bert", "namespace": "d", "annotations": annotations}
    server.put("services", {"metadata": meta})
    meta = {"name": "bert-v1", "namespace": "d"}
    server.put("deployments", {"metadata": meta, "spec": {"replicas": 0}})
    server.put("endpointslices", endpoint_slice("v1"))
    return server


@pytest.fixture
def gateways(server: FakeApiServer, tmp_path: Path) -> Iterator[list[GatewayPod]]:
    """Return two gateways that are ready."""
    network = ".".join(["127", *(str(random.randint(1, 254)) for _ in range(2))])
    hosts = {"bert-gateway-a": f"{network}.1", "bert-gateway-b": f"{network}.2"}
    ready = (endpoint(host, name) for name, host in hosts.items())
    server.put("endpointslices", gateway_slice(*ready))
    with in_thread(server, tmp_path) as kubeconfig:
        pods = [GatewayPod(name, host, kubeconfig) for name, host in hosts.items()]
        try:
            wait_until(lambda: all(pod.ready for pod in pods))
            yield pods
        finally:
            for pod in pods:
                pod.process.kill()
                pod.process.wait()


@pytest.fixture
def replica() -> Iterator[int]:
    """Return the port of a program that answers requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Replica)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def test_request_at_any_gateway_starts_a_replica_and_gets_its_answer(
    server: FakeApiServer, gateways: list[GatewayPod], replica: int
) -> None:
    """The leader scales by the figures of all. Then the service is idle, and the replica goes."""
    leader, other = gateways

    def replicas() -> int:
        return int(server.get("deployments", "bert-v1", "d")["spec"]["replicas"])

    assert not leader.active()
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(other.get(other.port, "/")))
    client.start()
    wait_until(lambda: replicas() == 1)
    assert leader.active()
    assert other.active()
    assert leader.metric("fenka_gateway_scaling_leader") == "1.0"
    assert other.metric("fenka_gateway_scaling_leader") == "0.0"
    ports = [{"name": "http", "port": replica}]
    server.put("endpointslices", endpoint_slice("v1", endpoint("127.0.0.1", "r"), ports=ports))
    client.join(60)
    assert answers == [(200, b"ok")]
    wait_until(lambda: replicas() == 0)
    assert {path.rpartition("/")[2] for path, _ in server.writes} == {"scale"}
