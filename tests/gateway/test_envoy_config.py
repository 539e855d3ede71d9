"""Envoy's configuration and endpoints: golden files, and what must hold for every table."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.gateway import envoy_config
from fenka.gateway.envoy_config import EnvoySettings
from fenka.jobs.routing_table import ListenAddress, ReplicaEntry, RoutingTable, VersionEntry
from tests.gateway.tables import table, version

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = EnvoySettings(wait_s=60, response_s=300, connections=1000, memory_bytes=320 << 20)
ADDRESSES = {"http": ("::1", 8080)}
TABLE = table(
    version(
        "v1",
        ReplicaEntry("10.0.0.1", {"http": 80, "grpc": 81}),
        ReplicaEntry("fd00::1", {"http": 80}, terminating=True),
        weight=90,
    ),
    version("v2", ReplicaEntry("127.0.0.1", {"http": "/run/s"}), weight=0),
    version("v3", weight=10),
)


def bootstrap() -> dict[str, Any]:
    """Return a configuration."""
    return envoy_config.bootstrap(ADDRESSES, SETTINGS)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("bootstrap", bootstrap()),
        ("endpoints", envoy_config.endpoints(TABLE, "http", 0, "7")),
        ("no-endpoints", envoy_config.endpoints(None, "grpc", 1, "1")),
    ],
)
def test_files_are_those_of_the_golden_ones(name: str, made: dict[str, Any]) -> None:
    """Every change of what Envoy gets is seen."""
    path = GOLDEN / f"{name}.json"
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    assert text == path.read_text()


def managers() -> list[dict[str, Any]]:
    """Return what serves each listener."""
    return [
        listener["filter_chains"][0]["filters"][0]["typed_config"]
        for listener in bootstrap()["static_resources"]["listeners"]
    ]


def test_heads_are_bounded_in_time_and_size() -> None:
    """A head that does not end in time ends its connection."""
    for manager in managers():
        assert manager["request_headers_timeout"] == "10.000s"
        assert manager["max_request_headers_kb"] == 64
        assert manager["common_http_protocol_options"]["max_headers_count"] == 200


def test_requests_have_the_time_of_the_options() -> None:
    """A request that waits has its response's time afterwards."""
    for manager in managers():
        waits = manager["stat_prefix"] == envoy_config.WAITING
        assert manager["stream_idle_timeout"] == ("300.000s" if waits else "360.000s")


def test_sockets_of_envoy_are_its_users() -> None:
    """Other users must not pass as clients that another proxy has named."""
    text = json.dumps(bootstrap())
    pipes = text.count('"pipe"')
    assert pipes == text.count('"mode": 384')
    assert pipes > 0


NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,10}[A-Za-z0-9])?", fullmatch=True)
HOSTS = st.ip_addresses().map(str)
PLACES: st.SearchStrategy[ListenAddress] = st.integers(1, 65535) | st.text(
    st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=100
).map("/".__add__)
REPLICAS = st.builds(
    ReplicaEntry,
    host=HOSTS,
    ports=st.dictionaries(st.sampled_from(["http", "grpc"]), PLACES),
    terminating=st.booleans(),
)
VERSIONS = st.builds(
    VersionEntry,
    name=NAMES,
    weight=st.integers(0, 1_000_000),
    replicas=st.lists(REPLICAS, max_size=4),
)


@st.composite
def tables(draw: st.DrawFn) -> RoutingTable:
    """Return any valid table."""
    rows = draw(st.lists(VERSIONS, max_size=4, unique_by=lambda row: row.name))
    return table(*rows)


@given(tables(), st.sampled_from(["http", "grpc"]))
def test_replicas_that_accept_are_those_of_the_table(made: RoutingTable, port: str) -> None:
    """Each replica with the port is an endpoint of its version; requests wait behind them all."""
    assignment = envoy_config.endpoints(made, port, 0, "1")["resources"][0]
    *localities, waiting = assignment["endpoints"]
    got = {
        (locality["locality"]["zone"], json.dumps(host["endpoint"]), host["health_status"])
        for locality in localities
        for host in locality["lb_endpoints"]
    }
    assert len(got) == sum(
        port in replica.ports
        for replica in {
            (row.name, replica.host, replica.ports.get(port), replica.terminating): replica
            for row in made.versions
            for replica in row.replicas
        }.values()
    )
    accepting = {zone for zone, _, health in got if health == "HEALTHY"}
    assert accepting == {
        row.name
        for row in made.versions
        if row.weight
        and any(port in replica.ports and not replica.terminating for replica in row.replicas)
    }
    weights = {row.name: row.weight for row in made.versions}
    for locality in localities:
        zone = locality["locality"]["zone"]
        assert locality["load_balancing_weight"] == max(1, weights[zone])
        assert locality["priority"] == 0
    assert waiting["priority"] == (1 if localities else 0)


@given(tables())
def test_endpoints_are_json(made: RoutingTable) -> None:
    """Whatever a table says, the file is read as it was meant."""
    content = envoy_config.endpoints(made, "http", 0, "1")
    assert json.loads(json.dumps(content)) == content


@given(st.sampled_from([*"\"\\\n\0'{}$%"]), st.booleans())
def test_addresses_are_called_as_envoy_calls_them(sign: str, pipe: bool) -> None:
    """Metrics find a replica by its address, however strange its path is."""
    path = f"/s{sign}"
    replica = ReplicaEntry("fd00::1", {"http": path if pipe else 80})
    assert envoy_config.endpoint_address(replica, "http") == (path if pipe else "[fd00::1]:80")


def host(**fields: Any) -> dict[str, Any]:
    """Return a host that Envoy reports, changed as given."""
    return {
        "address": {"pipe": {"path": "/s"}},
        "health_status": {"eds_health_status": "HEALTHY"},
        "locality": {"zone": "v1"},
        **fields,
    }


@pytest.mark.parametrize(
    ("reported", "accepts"),
    [
        (host(), True),
        (host(health_status={"eds_health_status": "DRAINING"}), False),
        (
            host(
                health_status={"eds_health_status": "HEALTHY", "failed_active_health_check": True}
            ),
            False,
        ),
        (host(priority=1), False),
        (host(locality={}), False),
    ],
)
def test_requests_go_on_only_with_a_replica_that_accepts(
    reported: dict[str, Any], accepts: bool
) -> None:
    """Not where requests wait, and not to a replica that ends or refuses connections."""
    statuses: list[dict[str, Any]] = [
        {"name": "http", "host_statuses": [reported]},
        {"name": "grpc"},
    ]
    assert envoy_config.accepting(statuses) == {
        "http": [{"pipe": {"path": "/s"}}] if accepts else [],
        "grpc": [],
    }
