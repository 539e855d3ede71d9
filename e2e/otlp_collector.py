"""OpenTelemetry's collector on the control plane, which pods reach at `collector.monitoring`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster, wait_until
from e2e.programs import COLLECTOR, build

DAEMON, NAMESPACE, PORT = "collector", "monitoring", 4318
URL = f"http://{DAEMON}.{NAMESPACE}:{PORT}"
SERVICE = f"""
apiVersion: v1
kind: Service
metadata: {{name: {DAEMON}}}
spec: {{ports: [{{name: otlp, port: {PORT}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {DAEMON}, labels: {{kubernetes.io/service-name: {DAEMON}}}}}
addressType: IPv4
ports: [{{name: otlp, port: {PORT}}}]
endpoints: [{{addresses: [ADDRESS], conditions: {{ready: true}}}}]
"""


@dataclass(frozen=True)
class Span:
    """A span as the collector wrote it.

    Attributes:
        program: The name under which its program is shown.
        trace: The ID of its trace, in hexadecimal digits as the others.
        id: Its own.
        parent: That of its parent; empty if it has none.
        name: What was done.
        begin: In nanoseconds since 1970.
        end: The same.
        error: Its error's sentence; empty if it has none.
        attributes: The rest.
    """

    program: str
    trace: str
    id: str
    parent: str
    name: str
    begin: int
    end: int
    error: str
    attributes: Mapping[str, str]


@dataclass(frozen=True)
class Collector:
    """A collector that runs. file: where it writes what it gets."""

    file: Path

    def spans(self, trace: str) -> list[Span]:
        """Return the spans of a trace that came up to now, by their begin."""
        spans = [span for span in self._all() if span.trace == trace]
        return sorted(spans, key=lambda span: span.begin)

    def _all(self) -> Iterator[Span]:
        for line in self.file.read_text().splitlines(keepends=True):
            # The last one may be half written.
            if not line.endswith("\n"):
                return
            for part in json.loads(line)["resourceSpans"]:
                program = _attributes(part["resource"])["service.name"]
                for scope in part["scopeSpans"]:
                    yield from (_span(program, span) for span in scope["spans"])


def _span(program: str, span: Mapping[str, Any]) -> Span:
    status = span["status"]
    return Span(
        program,
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        span["name"],
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        status.get("message", "") if status.get("code") else "",
        _attributes(span),
    )


def _attributes(of: Mapping[str, Any]) -> dict[str, str]:
    return {item["key"]: str(*item["value"].values()) for item in of.get("attributes", ())}


@contextmanager
def running_collector(cluster: Cluster) -> Iterator[Collector]:
    """Run a collector and its Service; end it and remove both afterwards."""
    build(COLLECTOR)
    machine = cluster.control_plane
    collector = Collector(machine.logs / "spans.json")
    collector.file.unlink(missing_ok=True)
    settings = cluster.state / "collector.json"
    pipeline = {"receivers": ["otlp"], "exporters": ["file"]}
    written = {"path": str(collector.file), "flush_interval": "100ms"}
    settings.write_text(
        json.dumps(
            {
                "receivers": {
                    "otlp": {"protocols": {"http": {"endpoint": f"{machine.address}:{PORT}"}}}
                },
                "exporters": {"file": written},
                "service": {
                    "telemetry": {"metrics": {"level": "none"}},
                    "pipelines": {"traces": pipeline},
                },
            }
        )
    )
    machine.start(DAEMON, [str(COLLECTOR.directory() / "bin" / DAEMON), f"--config={settings}"])
    log = machine.log(DAEMON)
    wait_until("the collector", lambda: "Everything is ready" in log.read_text(), log=log)
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        cluster.apply(SERVICE.replace("ADDRESS", machine.address), NAMESPACE)
        yield collector
    finally:
        machine.kill(DAEMON)
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
