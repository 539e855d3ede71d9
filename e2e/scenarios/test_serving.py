"""Serve a model on slices: streams, versions, a gateway that is killed, a service without a replica."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from e2e.administrator import FETCH
from e2e.cluster import wait_until
from e2e.scenarios.containers import wait_for_no_leases
from e2e.scenarios.installation import Installation
from e2e.scenarios.services import HTTP, NAME, Services
from e2e.scenarios.serving.load import read

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SLICE = ("--gpu-mem=4", "--gpu-core=30")
FORMER_AUTOSCALER = """
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: model-v1}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: model-v1}
  minReplicas: 1
  maxReplicas: 2
  metrics:
  - type: External
    external:
      metric: {name: fenka_requests, selector: {matchLabels: {servingName: model, servingVersion: v1}}}
      target: {type: AverageValue, averageValue: "1"}
"""
POST = FETCH.replace("sys.argv[1],", "sys.argv[1], sys.argv[2].encode(),")


@pytest.fixture
def services(shared: Installation, namespace: str) -> Services:
    """Provide a namespace for services."""
    return Services(shared, namespace)


def test_idle_service_has_no_replica_and_answers_the_next_request(services: Services) -> None:
    """The gateway keeps the request until a replica is there."""
    cluster = services.installation.cluster
    services.serve("v1", *SLICE, "--replicas=0..1", "--target=1", "--down-after=5s")
    services.wait_for_answers()
    services.wait_for_replicas(0)
    for node in cluster.nodes:
        wait_for_no_leases(services.installation, node.name)
    url = f"http://{services.address}:{HTTP}/predict"
    answer = cluster.run("python3", "-c", POST.replace("=10", "=60"), url, '{"input": 7}')
    assert json.loads(answer) == {"version": "v1", "output": 21}
    services.wait_for_replicas(0)


def test_streams_pass_the_gateway_as_they_are_sent(services: Services) -> None:
    """Each event and message takes the card's time, so a buffered response would come at once."""
    services.serve("v1", *SLICE, "--replicas=1..2", cost_us=50_000)
    services.wait_for_answers()
    received = services.talk()
    products = [str(3 * number) for number in range(1, 6)]
    assert [event for _, event in received["events"]] == [f"data: {each}" for each in products]
    assert received["echoes"] == products
    assert received["call"] == "21"
    assert [message for _, message in received["stream"]] == products
    for times in ([at for at, _ in received[name]] for name in ("events", "stream")):
        # Four kernels of 50 ms run between the first and the last.
        assert times[-1] - times[0] >= 0.1


def test_canary_gets_its_share_and_harms_nobody_when_it_crashes(
    services: Services, tmp_path: Path
) -> None:
    """2,000 requests at 90:10; then v2 crashes under load, and is withdrawn under load."""
    for version in ("v1", "v2"):
        services.serve(version, *SLICE)
    for version in ("v1", "v2"):
        services.wait_for_replicas(1, f"servingVersion={version}")
    services.fenka("traffic-split", "--name", NAME, "-v", "v1:90", "-v", "v2:10")
    services.wait_for_answers()
    requests = services.send(tmp_path / "split", "50x40")
    assert all(request.right for request in requests)
    versions = Counter(request.version for request in requests)
    assert versions.total() == 2000
    assert 160 <= versions["v2"] <= 240

    (pod,) = services.pods("servingVersion=v2")
    cluster = services.installation.cluster
    with services.load(tmp_path / "crash", "50x20"):
        wait_until("requests", lambda: len(lines(tmp_path / "crash")) > 100)
        crash = f"http://{pod['status']['podIP']}:{HTTP}/crash"
        with pytest.raises(Exception, match="RemoteDisconnected"):
            cluster.run("python3", "-c", POST, crash, "")
        crashed_at = time.time()
    requests = services.send(tmp_path / "rest", "50x1")
    requests = [*read(tmp_path / "crash"), *requests]
    failed = [request for request in requests if request.status != 200]
    assert all(request.right for request in requests if request.status == 200)
    # Those that v2 had begun, however many a busy machine has let it begin.
    assert [request for request in failed if request.at > crashed_at] == []
    assert {request.status for request in failed} <= {502}

    with services.load(tmp_path / "withdrawal", "50x20"):
        wait_until("requests", lambda: len(lines(tmp_path / "withdrawal")) > 100)
        services.fenka("serve", "delete", NAME, "-v", "v2")
    requests = read(tmp_path / "withdrawal")
    assert all(request.right for request in requests)
    assert requests[-1].version == "v1"


def test_clients_see_a_connection_error_at_most_when_a_gateway_is_killed(
    services: Services, tmp_path: Path
) -> None:
    """Two gateways; one is killed under load, and comes back."""
    services.serve("v1", *SLICE, "--replicas=1..2", "--gateway-replicas=2")
    services.wait_for_answers()
    wait_until("two gateways", lambda: services.ready("fenka.io/role=gateway") == 2)
    file = tmp_path / "requests"
    with services.load(file, "50x30"):
        wait_until("requests", lambda: len(lines(file)) > 200)
        services.kill(services.pods("fenka.io/role=gateway")[0])
    requests = read(file)
    assert {request.status for request in requests} <= {0, 200}
    assert all(request.right for request in requests if request.status == 200)
    assert all(request.right for request in requests[-200:])
    wait_until("two gateways", lambda: services.ready("fenka.io/role=gateway") == 2)


def test_service_of_an_earlier_release_loses_no_request_when_it_is_moved(
    services: Services, tmp_path: Path
) -> None:
    """It has an autoscaler of a metric that nobody serves, and a gateway that cannot scale."""
    cluster, namespace = services.installation.cluster, services.namespace
    services.serve("v1", *SLICE, "--replicas=1..2", "--target=1", "--scaler=fenka")
    services.wait_for_answers()
    service = ("-n", namespace, "annotate", "service", NAME, "fenka.io/scaling-")
    cluster.kubectl(*service)
    gateway = cluster.get("deployment", f"{NAME}-gateway", namespace)
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    container["args"] = [word for word in container["args"] if not word.startswith("--scaler")]
    container["ports"] = [port for port in container["ports"] if port["name"] != "scaler"]
    patch = json.dumps({"spec": {"template": {"spec": {"containers": [container]}}}})
    change = ("patch", "deployment", f"{NAME}-gateway", "--type=merge", "-p", patch)
    cluster.kubectl("-n", namespace, *change)
    cluster.kubectl("-n", namespace, "delete", "service", f"{NAME}-gateway")
    status = ("rollout", "status", f"deployment/{NAME}-gateway", "--timeout=90s")
    cluster.kubectl("-n", namespace, *status)
    cluster.apply(FORMER_AUTOSCALER, namespace)
    file = tmp_path / "requests"
    with services.load(file, "50x40"):
        wait_until("requests", lambda: len(lines(file)) > 200)
        services.fenka("serve", "update", "custom", f"--name={NAME}")
        assert not cluster.list("horizontalpodautoscalers.autoscaling", namespace)
    requests = read(file)
    assert {request.status for request in requests} == {200}
    assert all(request.right for request in requests)


def lines(file: Path) -> list[str]:
    """Return the lines of a file that may not exist yet."""
    return file.read_text().splitlines() if file.exists() else []
