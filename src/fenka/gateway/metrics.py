"""Metrics of a gateway, made of what Envoy reports and of the requests that wait.

`fenka_gateway_requests` is the signal for scaling: requests at replicas and requests that wait for one.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from fenka.gateway import envoy_config
from fenka.gateway.envoy_binary import EnvoyUnavailable
from fenka.gateway.envoy_config import Config
from fenka.gateway.service_gateway import ServiceGateway
from fenka.jobs.routing_table import ReplicaEntry, RoutingTable, replica_label
from fenka.server.metrics import ProgramMetrics

_REASONS = {
    "DPE": "invalid_request",
    "UT": "replica_timeout",
    "SI": "replica_timeout",
    "OM": "overload",
    "DC": "abandoned",
    "DR": "abandoned",
}
"""Why requests ended, by Envoy's response flags; other flags mean that a replica failed.

Source: https://www.envoyproxy.io/docs/envoy/latest/configuration/observability/access_log/usage
"""
_REFUSED_BEFORE = ("", "-", "UAEX")
"""Flags of complete responses, and of requests that waited in vain, which are counted where they wait."""


@dataclass(slots=True)
class HostUse:
    """The figures that Envoy reports of one address of a replica.

    Attributes:
        in_flight: Requests that it has not answered.
        total: Requests that it was sent so far.
        reachable: It has accepted Envoy's last connection.
        known: Envoy has it.
    """

    in_flight: int = 0
    total: int = 0
    reachable: bool = True
    known: bool = False


@dataclass(slots=True)
class EnvoyReport:
    """The figures that Envoy reports.

    Attributes:
        hosts: By the name of the port, and the address.
        responses: Their number by version and status.
        ends: The number of requests that ended without a complete response, by reason.
        durations: By version: the number of requests by upper bound in milliseconds, as Prometheus counts.
        duration_sums: By version, in milliseconds.
        connections: Clients' connections.
        retries: Requests that were sent once more.
        unreachable: Connections that replicas did not accept.
    """

    hosts: dict[tuple[str, str], HostUse] = field(default_factory=dict)
    responses: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    durations: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    duration_sums: dict[str, float] = field(default_factory=dict)
    connections: float = 0
    retries: float = 0
    unreachable: float = 0

    def of(self, replica: ReplicaEntry) -> HostUse:
        """Return what Envoy reports of a replica, all its ports together."""
        addresses = [(port, envoy_config.endpoint_address(replica, port)) for port in replica.ports]
        known = [self.hosts[place] for place in addresses if place in self.hosts]
        return HostUse(
            sum(host.in_flight for host in known),
            sum(host.total for host in known),
            all(host.reachable for host in known),
            len(known) == len(addresses),
        )


def report(clusters: Iterable[Config], statistics: str) -> EnvoyReport:
    """Return what the answers of Envoy's administration say. Raises ValueError."""
    result = EnvoyReport()
    for cluster in clusters:
        for host in cluster.get("host_statuses", ()):
            counts = {row["name"]: int(row.get("value", 0)) for row in host.get("stats", ())}
            failed = bool(host.get("health_status", {}).get("failed_active_health_check"))
            use = HostUse(counts.get("rq_active", 0), counts.get("rq_total", 0), not failed, True)
            result.hosts[cluster["name"], envoy_config.address_text(host["address"])] = use
    for family in text_string_to_metric_families(statistics):
        for sample in family.samples:
            _add(result, sample.name.removeprefix("envoy_"), sample.labels, sample.value)
    return result


def _add(result: EnvoyReport, name: str, labels: dict[str, str], value: float) -> None:
    version = labels.get("version", "")
    match name.removesuffix("_total"):
        # Requests that wait have no version where clients connect, and one where they wait.
        case "fenka_responses" if version not in ("", "-"):
            result.responses[version, labels["status"]] += int(value)
        case "fenka_duration_bucket" if version not in ("", "-"):
            result.durations.setdefault(version, []).append((labels["le"], value))
        case "fenka_duration_sum" if version not in ("", "-"):
            result.duration_sums[version] = value
        # A client that hangs up ends its request in both places.
        case "fenka_waiting_ends" if labels["flags"] == "DC":
            pass
        case "fenka_clients_ends" | "fenka_waiting_ends" if labels["flags"] not in _REFUSED_BEFORE:
            flags = labels["flags"].split(",")
            reasons = [_REASONS[flag] for flag in flags if flag in _REASONS]
            result.ends[reasons[0] if reasons else "replica_failed"] += int(value)
        case "http_downstream_cx_active":
            result.connections += value
        case "cluster_upstream_rq_retry":
            result.retries += value
        case "cluster_upstream_cx_connect_fail":
            result.unreachable += value


class GatewayMetrics(ProgramMetrics):
    """The metrics of one gateway process."""

    prefix = "fenka_gateway_"

    def __init__(
        self,
        gateway: ServiceGateway,
        table_valid: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway, self._table_valid, self._clock = gateway, table_valid, clock
        self._report = EnvoyReport()
        self._used_at = dict[str, float]()
        super().__init__()

    async def refresh(self) -> None:
        """Fetch what Envoy reports. While it does not answer, its last report stays in use."""
        envoy, before = self._gateway.envoy, self._report
        with contextlib.suppress(EnvoyUnavailable):
            self._report = report(await envoy.clusters(), await envoy.statistics())
        table, now = self._gateway.table, self._clock()
        for version in table.versions if table else ():
            for replica in version.replicas:
                use = self._report.of(replica)
                if use.in_flight or use.total not in (0, before.of(replica).total):
                    self._used_at[version.name] = now

    def collect(self) -> Iterator[Metric]:
        """Implement prometheus_client's Collector."""
        gateway = self._gateway
        table = gateway.table or RoutingTable("fenka.gateway/1", "")
        in_flight = {
            version.name: sum(self._report.of(replica).in_flight for replica in version.replicas)
            for version in table.versions
        }
        waiting = len(gateway.held)
        yield self.gauge(
            "requests",
            "Requests at replicas or waiting for one",
            sum(in_flight.values()) + waiting,
        )
        yield self.gauge("requests_waiting", "Requests that wait for a replica", waiting)
        yield self.gauge("connections", "Connections of clients", self._report.connections)
        yield self.gauge(
            "table_valid", "0 if the newest routing table is invalid", self._table_valid()
        )
        used = gateway.used_table
        yield self.gauge(
            "table_generation", "Number of the table in use", used.generation if used else 0
        )
        yield self.gauge("envoy_running", "0 while Envoy does not run", gateway.envoy.running)
        yield self.gauges(
            "requests_in_flight",
            "Requests at replicas",
            ("version",),
            (((name,), number) for name, number in in_flight.items()),
        )
        yield from self._versions(table)
        yield from self._responses()
        yield from self._outcomes()

    def _versions(self, table: RoutingTable) -> Iterator[Metric]:
        states = Counter[tuple[str, str]]()
        ending = list[tuple[tuple[str, str], float]]()
        for version in table.versions:
            for replica in version.replicas:
                use = self._report.of(replica)
                if not use.known:
                    continue
                state = "ready" if use.reachable else "unreachable"
                if replica.terminating:
                    state = "terminating"
                    label = replica_label(replica.host, replica.ports)
                    ending.append(((version.name, label), use.in_flight))
                states[version.name, state] += 1
        now = self._clock()
        yield self.gauges(
            "version_weight",
            "Weight of a version",
            ("version",),
            (((version.name,), version.weight) for version in table.versions),
        )
        yield self.gauges(
            "version_idle_seconds",
            "Time since a version got its last request",
            ("version",),
            (
                ((version.name,), now - self._used_at[version.name])
                for version in table.versions
                if version.name in self._used_at
            ),
        )
        yield self.gauges("replicas", "Replicas by state", ("version", "state"), states.items())
        yield self.gauges(
            "terminating_requests",
            "Requests at a replica that gets no new ones",
            ("version", "replica"),
            ending,
        )

    def _responses(self) -> Iterator[Metric]:
        yield self.counters(
            "responses",
            "Responses by version and status",
            ("version", "status"),
            self._report.responses.items(),
        )
        seconds = HistogramMetricFamily(
            f"{self.prefix}request_seconds", "Time to the end of the response", labels=("version",)
        )
        for version, rows in self._report.durations.items():
            total = self._report.duration_sums.get(version, 0.0)
            seconds.add_metric(
                (version,), [(_seconds(bound), count) for bound, count in rows], total / 1000
            )
        yield seconds

    def _outcomes(self) -> Iterator[Metric]:
        held, ends = self._gateway.held, self._report.ends
        rejected = held.refused + ends
        abandoned = rejected.pop("abandoned", 0)
        yield self.counters(
            "rejected",
            "Requests without a complete response",
            ("reason",),
            (((reason,), count) for reason, count in rejected.items()),
        )
        for name, text, count in (
            ("buffered", "Requests that waited for a replica", held.held),
            ("abandoned", "Requests whose clients hung up", abandoned),
            ("retries", "Requests that were sent once more", self._report.retries),
            ("unreachable", "Connections that replicas did not accept", self._report.unreachable),
            ("envoy_starts", "Starts of Envoy", self._gateway.envoy.starts),
        ):
            yield CounterMetricFamily(self.prefix + name, text, value=count)


def _seconds(bound_ms: str) -> str:
    return bound_ms if bound_ms == "+Inf" else f"{float(bound_ms) / 1000:g}"
