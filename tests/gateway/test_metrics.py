"""What the gateway's metrics make of Envoy's answers: recorded ones, and none."""

import asyncio
import re
from pathlib import Path
from typing import Any

from fenka.gateway.envoy_binary import EnvoyUnavailable
from fenka.gateway.held_requests import HeldRequests
from fenka.gateway.metrics import GatewayMetrics, HostUse, report
from fenka.gateway.service_gateway import ServiceGateway
from fenka.jobs.routing_table import ReplicaEntry
from tests.gateway.tables import table, version

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

TABLE = table(
    version("v1", ReplicaEntry("10.0.0.1", {"http": 80, "grpc": 81}), weight=90),
    version(
        "v2",
        ReplicaEntry("10.0.0.2", {"http": "/run/s"}, terminating=True),
        ReplicaEntry("fd00::3", {"http": 80}),
        weight=10,
    ),
    generation=3,
)


def host(
    address: dict[str, Any], active: int, total: int, *, failed: bool = False
) -> dict[str, Any]:
    """Return a host as Envoy reports it: figures of 0 have no value."""
    figures = {"rq_active": active, "rq_total": total}
    return {
        "address": address,
        "health_status": {"eds_health_status": "HEALTHY"}
        | ({"failed_active_health_check": True} if failed else {}),
        "stats": [
            {"name": name} | ({"value": str(value)} if value else {})
            for name, value in figures.items()
        ],
    }


def place(address: str, port: int) -> dict[str, Any]:
    """Return an address."""
    return {"socket_address": {"address": address, "port_value": port}}


CLUSTERS: list[dict[str, Any]] = [
    {
        "name": "http",
        "host_statuses": [
            host(place("10.0.0.1", 80), 2, 5),
            host({"pipe": {"path": "/run/s"}}, 1, 1),
            host(place("fd00::3", 80), 0, 0, failed=True),
            host({"pipe": {"path": "waiting-0"}}, 4, 4),
        ],
    },
    {"name": "grpc", "host_statuses": [host(place("10.0.0.1", 81), 1, 7)]},
    {"name": "hold"},
]
STATISTICS = (GOLDEN / "statistics.txt").read_text()


class FakeEnvoy:
    """An Envoy that answers what was recorded, or nothing.

    Attributes:
        answers: It does.
    """

    running, starts, answers = True, 2, True

    async def clusters(self) -> list[dict[str, Any]]:
        """Return the hosts."""
        if not self.answers:
            raise EnvoyUnavailable("Envoy does not answer")
        return CLUSTERS

    async def statistics(self) -> str:
        """Return the statistics."""
        return STATISTICS


def metrics(envoy: FakeEnvoy, clock: list[float]) -> GatewayMetrics:
    """Return the metrics of a gateway at which one request waits."""
    held = HeldRequests(10, 60)
    held._waiting[asyncio.get_running_loop().create_future()] = "http"
    held.held = 3
    held.refused.update({"buffer_full": 2, "buffer_timeout": 1})
    gateway = ServiceGateway(envoy, held, ("http", "grpc"), TABLE, TABLE)  # type: ignore[arg-type]
    return GatewayMetrics(gateway, lambda: True, lambda: clock[0])


def test_hosts_are_reported_by_address() -> None:
    """All ports of a replica together; one that does not accept on one of them is unreachable."""
    made = report(CLUSTERS, STATISTICS)
    first, ending, refusing = (replica for row in TABLE.versions for replica in row.replicas)
    assert made.of(first) == HostUse(3, 12, True, True)
    assert made.of(ending) == HostUse(1, 1, True, True)
    assert made.of(refusing) == HostUse(0, 0, False, True)
    assert made.of(ReplicaEntry("10.9.9.9", {"http": 1})) == HostUse()


def test_ends_have_reasons() -> None:
    """Of several flags the one that says why; a hang-up while waiting counts once."""
    made = report([], STATISTICS)
    assert made.ends == {
        "invalid_request": 3,
        "abandoned": 6,
        "replica_failed": 9,
        "replica_timeout": 5,
        "overload": 2,
    }
    assert made.responses == {("v1", "200"): 8, ("v1", "404"): 1, ("v2", "200"): 1}


def test_nothing_is_reported_of_nothing() -> None:
    """An Envoy that has just begun."""
    made = report([], "")
    assert (made.hosts, made.responses, made.connections) == ({}, {}, 0)


async def test_metrics_are_those_of_the_golden_file() -> None:
    """Every name, label and value."""
    clock = [100.0]
    made = metrics(FakeEnvoy(), clock)
    await made.refresh()
    clock[0] = 107.5
    text = "".join(part.decode() for part in made.text())
    assert text == (GOLDEN / "metrics.txt").read_text()


async def test_last_figures_stay_when_envoy_does_not_answer() -> None:
    """A restart of Envoy must not look like the end of all load."""
    envoy, clock = FakeEnvoy(), [100.0]
    made = metrics(envoy, clock)
    await made.refresh()
    before = list(made.text())
    envoy.answers = False
    await made.refresh()
    assert list(made.text()) == before


async def test_version_is_idle_since_its_last_request() -> None:
    """A version that answers between two looks is not idle; one that never got any has no figure."""
    envoy, clock = FakeEnvoy(), [100.0]
    made = metrics(envoy, clock)
    await made.refresh()
    clock[0] = 105.0
    await made.refresh()
    text = b"".join(made.text()).decode()
    # Both have requests at their replicas.
    assert 'fenka_gateway_version_idle_seconds{version="v1"} 0.0' in text
    assert 'fenka_gateway_version_idle_seconds{version="v2"} 0.0' in text


async def test_documented_names_are_those_that_exist() -> None:
    """Each metric in the table of the document, and no other."""
    made = metrics(FakeEnvoy(), [0.0])
    await made.refresh()
    text = b"".join(made.text()).decode()
    exist = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    document = DOCUMENT.read_text().partition("## Of the gateway")[2].partition("\n## ")[0]
    # Those of scaling exist on clusters only: see test_service_scaling.py.
    documented = set(re.findall(r"`(fenka_gateway_(?!scaling_)[a-z_]+)", document))
    assert documented == exist
