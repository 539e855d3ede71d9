"""Spans of a pod from the scheduler and the node, as a collector gets them."""

import asyncio
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from fenka.server import pod_spans
from fenka.server.pod_spans import (
    ROOT,
    InvalidTraces,
    PodSpans,
    root_id,
    sent_to,
    trace_id,
)
from tests.builders import T4_MIB, node_json, pod_json
from tests.fakes.api_server import api_server
from tests.fakes.collector import FakeCollector, attributes, collector
from tests.node.harness import card, node_harness
from tests.scheduler.harness import extender
from tests.waiting import until

UID = "5b0b1b1c-9d54-4b13-8a63-1e9f7d2c0a01"


def whole(spans: FakeCollector) -> list[tuple[str, str]]:
    """Return program and name of each span."""
    return [(program, span.name) for program, span in spans.spans]


async def test_pod_is_one_trace_from_its_filter_to_its_start(library: Path) -> None:
    """The scheduler and the node share nothing but the pod's UID."""
    pod = pod_json("train", 4, uid=UID)
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    async with collector() as got:
        async with (
            sent_to(got.url, "fenka-scheduler") as spans,
            api_server() as server,
            extender(server, spans=spans) as scheduler,
        ):
            server.put("nodes", node_json("n", T4_MIB))
            server.put("pods", pod)
            await scheduler.takes_over()
            await until(lambda: scheduler.knows(pod))
            await scheduler.filter(pod, "n", "nowhere")
            assert await scheduler.bind(pod, "n") == ""
            assert "it's not equal" in await scheduler.bind(
                {**pod, "metadata": {**pod["metadata"], "uid": str(uuid.uuid4())}}, "n"
            )
        async with (
            sent_to(got.url, "fenka-node") as spans,
            node_harness(card(0, T4_MIB), library=library) as node,
        ):
            await node.kill()
            node.spans = spans
            await node.start()
            await node.ready()
            started = node.pod("train", 4)
            await node.run(started)
            node_uid = started["metadata"]["uid"]
    assert whole(got)[:4] == [
        ("fenka-scheduler", "filter"),
        ("fenka-scheduler", ROOT),
        ("fenka-scheduler", "bind"),
        ("fenka-scheduler", "bind"),
    ]
    assert sorted(whole(got)[4:]) == [("fenka-node", "lease"), ("fenka-node", "start")]
    by_uid = {UID: got.spans[:3], node_uid: got.spans[4:]}
    for uid, spans_of_pod in by_uid.items():
        for _, span in spans_of_pod:
            assert span.trace_id.hex() == uuid.UUID(uid).hex
            parent = b"" if span.name == ROOT else root_id(uid).to_bytes(8)
            assert span.parent_span_id == parent
            assert attributes(span)["k8s.pod.name"] == "train"
            assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
    (root,) = got.named(ROOT)
    assert root.span_id == root_id(UID).to_bytes(8)
    assert root.start_time_unix_nano == 1767225600 * 10**9
    (filtered,) = got.named("filter")
    assert attributes(filtered)["fenka.nodes.feasible"] == "1"
    assert attributes(filtered)["fenka.nodes.infeasible"] == "1"
    assert "not found" in attributes(filtered)["fenka.reason"]
    bound, refused = got.named("bind")
    assert (bound.status.code, refused.status.code) == (0, 2)
    assert "it's not equal" in refused.status.message
    (leased,) = got.named("lease")
    assert attributes(leased)["fenka.memory_mib"] == "4308"
    assert attributes(leased)["fenka.cards"] == card(0).uuid


async def test_pods_go_on_when_the_collector_is_away() -> None:
    """Nothing waits for it, and its end has a limit."""
    spans = PodSpans("http://127.0.0.1:9", "fenka-node")
    for number in range(5000):
        spans.add(f"pod {number}", "start", 0, {})
    await asyncio.to_thread(spans.close)


def test_ids_are_the_pod_s() -> None:
    """A UID is the trace's ID; a text that is no UUID has one, too, which is the same everywhere."""
    assert f"{trace_id(UID):032x}" == uuid.UUID(UID).hex
    assert trace_id("pod 1") == trace_id("pod 1") != trace_id("pod 2")
    assert 0 < root_id(UID) < 1 << 64
    assert trace_id(str(uuid.UUID(int=0))) == 1


@pytest.mark.parametrize(
    "url", ["collector:4318", "ftp://a", "http://", "http://a:port", "http://a/?b=c"]
)
def test_url_is_refused_that_leads_to_no_collector(url: str) -> None:
    """Before anything is served."""
    with pytest.raises(InvalidTraces, match="expected a collector's URL"):
        pod_spans.collector(url)


def test_collector_has_a_port_when_its_url_has_none() -> None:
    """That of OTLP, or that of HTTPS."""
    assert pod_spans.collector("http://collector") == ("http", "collector", 4318)
    assert pod_spans.collector("https://collector/otlp") == ("https", "collector", 443)


def test_nothing_is_imported_when_spans_are_off() -> None:
    """Neither by the programs nor by the command line; and its absence is one sentence."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, fenka.scheduler.main, fenka.node.main, fenka.gateway.main; "
            "assert not [name for name in sys.modules if 'opentelemetry' in name or name == 'requests']; "
            "sys.modules['opentelemetry.sdk.trace'] = None; from fenka.server.pod_spans import PodSpans\n"
            "try: PodSpans('http://a', 'b')\nexcept Exception as why: print(why)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("--traces needs OpenTelemetry's libraries: `")
    assert "opentelemetry-sdk" in done.stdout
