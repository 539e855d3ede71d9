"""The routing table of a service on Kubernetes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from fenka.gateway.endpoints import (
    EndpointSlice,
    EndpointSource,
    GatewayPeer,
    ServiceObject,
    gateway_peers,
    read_weights,
    routing_table,
)
from fenka.jobs.routing_table import InvalidTable, ReplicaEntry, RoutingTable
from tests.fakes.api_server import FakeApiServer, api_server
from tests.waiting import until

Json = dict[str, Any]
PORTS = [{"name": "http-serving", "port": 8501}, {"name": "grpc-serving", "port": 8500}]
READY = {"ready": True, "serving": True, "terminating": False}
ENDING = {"ready": False, "serving": True, "terminating": True}
STARTING = {"ready": False, "serving": False, "terminating": False}


def endpoint(address: str, pod: str, conditions: Json = READY) -> Json:
    """Return an endpoint."""
    target = {"kind": "Pod", "name": pod, "uid": pod}
    return {"addresses": [address], "conditions": conditions, "targetRef": target}


def endpoint_slice(
    version: str, *endpoints: Json, name: str = "", family: str = "IPv4", ports: Any = PORTS
) -> Json:
    """Return an EndpointSlice of a version."""
    return {
        "metadata": {
            "name": name or f"bert-{version}-x",
            "namespace": "d",
            "labels": {"servingName": "bert", **({"servingVersion": version} if version else {})},
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": ports,
    }


def table_of(*slices: Json, weights: dict[str, int] | None = None) -> RoutingTable:
    """Return the table of these slices."""
    table = routing_table(
        "bert", (msgspec.convert(each, EndpointSlice) for each in slices), weights
    )
    table.validate()
    return table


def replicas(table: RoutingTable, version: str) -> list[ReplicaEntry]:
    """Return the replicas of a version."""
    (row,) = (row for row in table.versions if row.name == version)
    return row.replicas


def test_ready_and_terminating_pods_are_replicas() -> None:
    """A pod that starts is none yet."""
    table = table_of(
        endpoint_slice(
            "v1",
            endpoint("10.0.0.1", "a"),
            endpoint("10.0.0.2", "b", ENDING),
            endpoint("10.0.0.3", "c", STARTING),
            endpoint("10.0.0.4", "d", {}),
        )
    )
    ports = {"http-serving": 8501, "grpc-serving": 8500}
    assert replicas(table, "v1") == [
        ReplicaEntry("10.0.0.1", ports),
        ReplicaEntry("10.0.0.2", ports, terminating=True),
        ReplicaEntry("10.0.0.4", ports),
    ]


def test_version_without_pods_is_listed() -> None:
    """A version that was scaled to zero keeps its weight."""
    table = table_of(endpoint_slice("v1", ports=None), weights={"v1": 100})
    assert [(row.name, row.weight, row.replicas) for row in table.versions] == [("v1", 100, [])]


def test_pod_in_several_slices_is_one_replica() -> None:
    """A pod with two addresses, or that moves between slices, gets no double share."""
    table = table_of(
        endpoint_slice("v1", endpoint("fd00::1", "a"), name="six", family="IPv6"),
        endpoint_slice("v1", endpoint("10.0.0.1", "a"), name="four"),
        endpoint_slice("v1", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"), name="other"),
        endpoint_slice("v1", endpoint("example.com", "c"), name="name", family="FQDN"),
    )
    assert [replica.host for replica in replicas(table, "v1")] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("name", ["another", "other"])
def test_ports_of_several_services_of_a_version_are_one_replicas(name: str) -> None:
    """`kubectl expose deployment bert-v1` copies the labels of a version, and names no port."""
    exposed = [{"name": "", "port": 8501}]
    table = table_of(
        endpoint_slice("v1", endpoint("10.0.0.1", "a")),
        endpoint_slice("v1", endpoint("10.0.0.1", "a"), name=name, ports=exposed),
    )
    (replica,) = replicas(table, "v1")
    assert replica.ports == {"": 8501, "http-serving": 8501, "grpc-serving": 8500}


def test_slices_of_the_service_of_all_versions_are_left_out() -> None:
    """Its pods are in the slices of their versions."""
    assert table_of(endpoint_slice("", endpoint("10.0.0.1", "a"))).versions == []


def peers_of(*slices: Json) -> list[GatewayPeer]:
    """Return the gateways of these slices."""
    return gateway_peers("bert", (msgspec.convert(part, EndpointSlice) for part in slices))


def gateway_slice(*endpoints: Json, service: str = "bert-gateway", family: str = "IPv4") -> Json:
    """Return an EndpointSlice of the gateways' Service."""
    part = endpoint_slice("", *endpoints, name=f"{service}-{family}", family=family)
    part["metadata"]["labels"]["kubernetes.io/service-name"] = service
    return part


def test_gateways_are_those_of_their_service() -> None:
    """By the names of their pods; one that starts, ends or has failed is not ready."""
    peers = peers_of(
        gateway_slice(
            endpoint("10.0.0.3", "c", STARTING),
            endpoint("10.0.0.2", "b", ENDING),
            endpoint("10.0.0.1", "a"),
            {**endpoint("10.0.0.4", "d", {"ready": True, "terminating": True}), "zone": None},
        ),
        gateway_slice(endpoint("fd00::1", "a"), family="IPv6"),
        gateway_slice(endpoint("10.0.0.9", "z"), service="bert"),
        gateway_slice(endpoint("10.0.0.9", "z"), service="other-gateway"),
        endpoint_slice("v1", endpoint("10.0.0.9", "z")),
    )
    assert peers == [
        GatewayPeer("a", "10.0.0.1", True),
        GatewayPeer("b", "10.0.0.2", False),
        GatewayPeer("c", "10.0.0.3", False),
        GatewayPeer("d", "10.0.0.4", False),
    ]


def test_endpoints_that_cannot_be_asked_are_no_gateways() -> None:
    """Names instead of addresses lead anywhere."""
    nameless = {"addresses": ["10.0.0.2"], "conditions": READY}
    assert (
        peers_of(
            gateway_slice(endpoint("example.com", "a"), nameless, {"addresses": []}, family="FQDN")
        )
        == []
    )
    assert peers_of(gateway_slice()) == []


def test_weights_are_those_of_the_annotation_or_equal() -> None:
    """A version that the annotation leaves out gets no request."""
    slices = [endpoint_slice(name, endpoint(f"10.0.0.{name[1]}", name)) for name in ("v1", "v2")]
    assert [row.weight for row in table_of(*slices).versions] == [1, 1]
    assert [row.weight for row in table_of(*slices, weights={"v2": 100}).versions] == [0, 100]


def service_object(weights: str | None) -> ServiceObject:
    """Return the Service of all versions."""
    annotations = {} if weights is None else {"fenka.io/traffic": weights}
    return msgspec.convert({"metadata": {"annotations": annotations}}, ServiceObject)


def test_weights_are_read_from_the_annotation() -> None:
    """A service that is not there has none."""
    assert read_weights(service_object('{"v1": 90, "v2": 10}')) == {"v1": 90, "v2": 10}
    assert read_weights(service_object(None)) is None
    assert read_weights(None) is None


@pytest.mark.parametrize("text", ["", "[]", '{"v1": "90"}', '{"v1": 1.5}', '{"v1": -1}', "v1:90"])
def test_invalid_weights_are_refused(text: str) -> None:
    """The annotation is named."""
    with pytest.raises(InvalidTable, match=r"annotation fenka\.io/traffic is invalid"):
        read_weights(service_object(text))


@contextlib.asynccontextmanager
async def followed(
    server: FakeApiServer,
) -> AsyncIterator[tuple[EndpointSource, list[RoutingTable]]]:
    """Follow the service while the block runs, and collect its tables."""
    tables: list[RoutingTable] = []
    async with server.api() as api:
        source = EndpointSource(api, "d", "bert", tables.append)
        following = asyncio.create_task(source.follow())
        try:
            yield source, tables
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def put_service(server: FakeApiServer, weights: str) -> None:
    """Create or replace the Service of all versions."""
    metadata = {"name": "bert", "namespace": "d", "annotations": {"fenka.io/traffic": weights}}
    server.put("services", {"metadata": metadata})


async def test_table_follows_the_cluster() -> None:
    """Pods and weights that change are in the next table; other services are not."""
    async with api_server() as server:
        put_service(server, '{"v1": 100}')
        server.put("endpointslices", endpoint_slice("v1", endpoint("10.0.0.1", "a")))
        other = endpoint_slice("v1", endpoint("10.0.0.9", "z"), name="other")
        other["metadata"]["labels"]["servingName"] = "gpt"
        server.put("endpointslices", other)
        async with followed(server) as (_, tables):
            await until(lambda: tables)
            assert [replica.host for replica in replicas(tables[-1], "v1")] == ["10.0.0.1"]
            server.put("endpointslices", endpoint_slice("v1", endpoint("10.0.0.1", "a", ENDING)))
            await until(lambda: replicas(tables[-1], "v1")[0].terminating)
            server.put("endpointslices", endpoint_slice("v2", endpoint("10.0.0.2", "b")))
            put_service(server, json.dumps({"v1": 90, "v2": 10}))
            await until(lambda: [row.weight for row in tables[-1].versions] == [90, 10])
            server.remove("endpointslices", "bert-v1-x", "d")
            await until(lambda: [row.name for row in tables[-1].versions] == ["v2"])


async def test_last_table_stays_when_weights_are_invalid() -> None:
    """A mistake in an annotation interrupts nothing."""
    async with api_server() as server:
        put_service(server, '{"v1": 100}')
        server.put("endpointslices", endpoint_slice("v1", endpoint("10.0.0.1", "a")))
        async with followed(server) as (source, tables):
            await until(lambda: tables)
            count = len(tables)
            put_service(server, "nonsense")
            await until(lambda: source.error)
            assert len(tables) == count
            put_service(server, '{"v1": 50}')
            await until(lambda: len(tables) > count)
            assert source.error is None
