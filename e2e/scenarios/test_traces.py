"""Spans of pods and of requests, as OpenTelemetry's collector gets them from fenka and from Envoy."""

import secrets
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from e2e.artifacts import CHART
from e2e.cluster import Cluster, wait_until
from e2e.otlp_collector import URL, Collector, Span, running_collector
from e2e.scenarios.containers import pod, wait_for_agent
from e2e.scenarios.installation import RELEASE, Installation, rolled_back
from e2e.scenarios.services import HTTP, Services

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

REQUEST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], b'{"input": 7}', {"traceparent": sys.argv[2]})
print(urllib.request.urlopen(request, timeout=90).read().decode())
"""


@dataclass(frozen=True)
class Traced:
    """A cluster whose programs send spans.

    Attributes:
        collector: What gets them.
        earlier: The UID of a pod that was started before.
    """

    collector: Collector
    earlier: str


def trace_of(uid: str) -> str:
    """Return the trace of a pod, as the documentation says."""
    return uid.replace("-", "")


@pytest.fixture(scope="module")
def traced(installation: Installation, sharing_node: str) -> Iterator[Traced]:
    """Provide a collector that the chart's value names, and a pod from the time before."""
    cluster = installation.cluster
    wait_for_agent(installation, sharing_node, 14)
    with running_collector(cluster) as collector, cluster.namespace("earlier") as namespace:
        cluster.apply(pod("earlier", "main=1:"), namespace)
        earlier = cluster.wait_for_pod("earlier", namespace)["metadata"]["uid"]
        with rolled_back(cluster):
            chart = ("upgrade", RELEASE, str(CHART), "-n", RELEASE, "--reuse-values", "--wait")
            cluster.helm(*chart, f"--set=tracing.endpoint={URL}")
            wait_until("schedulers that all send spans", lambda: schedulers_send(cluster))
            wait_for_agent(installation, sharing_node, 14)
            yield Traced(collector, earlier)


def schedulers_send(cluster: Cluster) -> bool:
    """Return whether no scheduler without the collector's address is left."""
    pods = cluster.list("pods", RELEASE, "app.kubernetes.io/component=scheduler")
    return all(
        f"--traces={URL}" in each["spec"]["containers"][0]["args"]
        for each in pods
        if each["status"]["phase"] == "Running"
    )


def test_pod_is_one_trace_from_its_creation_to_its_start(
    traced: Traced, installation: Installation, sharing_node: str, namespace: str
) -> None:
    """Two programs on two machines share only its UID. A pod from the time before has no span."""
    cluster, collector = installation.cluster, traced.collector
    cluster.apply(pod("traced", "main=4:"), namespace)
    uid = cluster.wait_for_pod("traced", namespace)["metadata"]["uid"]
    trace = trace_of(uid)
    names = {"pod", "filter", "bind", "lease", "start"}
    wait_until(
        "all spans of the pod",
        lambda: names <= {span.name for span in collector.spans(trace)},
    )
    spans = collector.spans(trace)
    assert sorted(span.name for span in spans) == sorted(names), spans
    by_name = {span.name: span for span in spans}
    root = by_name["pod"]
    assert {span.parent for span in spans if span is not root} == {root.id}
    assert root.parent == ""
    assert len({span.id for span in spans}) == len(spans)
    assert {span.error for span in spans} == {""}
    known = {"k8s.pod.uid": uid, "k8s.pod.name": "traced", "k8s.namespace.name": namespace}
    for span in spans:
        assert span.program == f"fenka-{'node' if span.name in ('lease', 'start') else 'scheduler'}"
        assert known.items() <= span.attributes.items()
    check_times(by_name)
    assert int(by_name["filter"].attributes["fenka.nodes.feasible"]) == 1
    assert by_name["bind"].attributes["k8s.node.name"] == sharing_node
    for name in ("lease", "start"):
        attributes = by_name[name].attributes
        assert attributes["fenka.memory_mib"] == "4308"  # 15079 × 4 / 14, rounded down
        assert attributes["fenka.cards"].startswith("GPU-")
        assert attributes["k8s.container.name"] == "main"
    assert not collector.spans(trace_of(traced.earlier))


def check_times(spans: dict[str, Span]) -> None:
    """The clock is one. The kubelet may see the binding before the scheduler gets its answer."""
    assert all(span.begin <= span.end for span in spans.values())
    root, filtered, bound = spans["pod"], spans["filter"], spans["bind"]
    # A creation has whole seconds.
    assert root.begin <= filtered.begin <= filtered.end <= bound.begin <= root.end <= bound.end
    lease, start = spans["lease"], spans["start"]
    assert bound.begin <= lease.begin <= start.begin
    assert lease.end <= start.end


def test_first_span_of_a_pod_lasts_while_it_waits(
    traced: Traced, installation: Installation, sharing_node: str, namespace: str
) -> None:
    """A pod that does not fit waits at its gate, and kube-scheduler does not ask about it."""
    del sharing_node
    cluster = installation.cluster
    cluster.apply(pod("holds", "main=10:"), namespace)
    cluster.wait_for_pod("holds", namespace)
    cluster.apply(pod("waits", "main=8:"), namespace)
    trace = trace_of(cluster.get("pod", "waits", namespace)["metadata"]["uid"])
    freed = time.time_ns()
    cluster.kubectl("-n", namespace, "delete", "pod", "holds", "--now")
    cluster.wait_for_pod("waits", namespace)
    wait_until(
        "all spans of the pod",
        lambda: {"pod", "start"} <= {span.name for span in traced.collector.spans(trace)},
    )
    root, filtered, *_ = traced.collector.spans(trace)
    assert (root.name, filtered.name) == ("pod", "filter")
    assert root.begin < freed < filtered.begin <= root.end


def test_request_is_traced_while_it_waits_and_to_the_replica(
    traced: Traced, installation: Installation, sharing_node: str, namespace: str
) -> None:
    """The gateway got the collector from the chart; its spans continue the trace of the client."""
    del sharing_node
    cluster = installation.cluster
    services = Services(installation, namespace)
    services.serve("v1", "--gpu-mem=4", "--replicas=0..1", "--down-after=5s")
    services.wait_for_answers()
    services.wait_for_replicas(0)
    client, parent = uuid.uuid4().hex, secrets.token_hex(8)
    url = f"http://{services.address}:{HTTP}/predict"
    header = f"00-{client}-{parent}-01"
    assert '"output": 21' in cluster.run("python3", "-c", REQUEST, url, header)
    wait_until("three spans", lambda: len(traced.collector.spans(client)) >= 3)
    outer, waited, held = traced.collector.spans(client)
    assert [span.name for span in (outer, waited, held)] == [
        "ingress",
        "ingress",
        "async hold egress",
    ]
    assert [span.parent for span in (outer, waited, held)] == [parent, outer.id, waited.id]
    assert outer.begin <= waited.begin <= held.begin
    assert held.end <= waited.end <= outer.end
    for span in (outer, waited, held):
        assert span.program == "fenka-gateway/model"
        assert span.error == ""
        assert span.attributes["http.status_code"] == "200"
    assert outer.attributes["http.url"].endswith("/predict")
