"""Follows a service on Kubernetes: makes its routing table from its EndpointSlices and its Service.

Each version has a Service of its own, whose labels Kubernetes copies to its EndpointSlices. The Service with
the service's name has the weights, as an annotation.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from fenka.cluster.objects import Object, ObjectMeta
from fenka.cluster.service_objects import SERVICE, SERVICES_API, VERSION, WEIGHTS, gateway_name
from fenka.jobs.routing_table import InvalidTable, ReplicaEntry, RoutingTable, VersionEntry, Weight
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.informer import Informer

EQUAL_WEIGHT = 1

SLICE_SERVICE = "kubernetes.io/service-name"
"""Kubernetes' label of an EndpointSlice: the Service that it belongs to."""

ENDPOINT_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


class EndpointConditions(Object):
    """The facts of an endpoint; None means unknown.

    `ready` is true if it is missing. A pod that ends is `terminating`, and no longer `ready`.
    """

    ready: bool | None = None
    terminating: bool | None = None


class EndpointTarget(Object):
    """The pod behind an endpoint."""

    uid: str = ""
    name: str = ""


class Endpoint(Object):
    """A pod of a Service. Its addresses are equivalent."""

    addresses: tuple[str, ...] = ()
    conditions: EndpointConditions = msgspec.field(default_factory=EndpointConditions)
    target_ref: EndpointTarget | None = None


class EndpointPort(Object):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(Object):
    """Some of the endpoints of a Service. Lists may be null."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[EndpointPort, ...] | None = None


class ServiceObject(Object):
    """A Service, of which the annotations are read."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)


@dataclass(frozen=True, slots=True)
class GatewayPeer:
    """A gateway of the service, which may be this one.

    Attributes:
        pod: The pod's name.
        host: Its address.
        ready: Clients are led to it. One that is not may start, end, or have failed.
    """

    pod: str
    host: str
    ready: bool


def gateway_peers(service: str, slices: Iterable[EndpointSlice]) -> list[GatewayPeer]:
    """Return the gateways of a service by the name of their pods, from the EndpointSlices with its label."""
    peers: dict[str, GatewayPeer] = {}
    for part in sorted(slices, key=lambda part: (part.address_type, part.metadata.name)):
        if part.metadata.labels.get(SLICE_SERVICE) != gateway_name(service):
            continue
        for endpoint in part.endpoints or ():
            pod = endpoint.target_ref.name if endpoint.target_ref else ""
            if pod and endpoint.addresses and _is_address(endpoint.addresses[0]):
                conditions = endpoint.conditions
                ready = conditions.ready is not False and conditions.terminating is not True
                peers.setdefault(pod, GatewayPeer(pod, endpoint.addresses[0], ready))
    return [peer for _, peer in sorted(peers.items())]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def routing_table(
    service: str, slices: Iterable[EndpointSlice], weights: Mapping[str, int] | None
) -> RoutingTable:
    """Return the routing table of a service.

    Args:
        service: Its name.
        slices: The EndpointSlices with its label. Those without a version are of its own Service.
        weights: The weights by version; None if all are equal. A version that is missing gets no request.
    """
    versions: dict[str, dict[str, ReplicaEntry]] = {}
    # IPv4 comes first, so a pod in two slices has the same address in each table.
    for part in sorted(slices, key=lambda part: (part.address_type, part.metadata.name)):
        version = part.metadata.labels.get(VERSION, "")
        if version and part.address_type in {"IPv4", "IPv6"}:
            replicas = versions.setdefault(version, {})
            for key, replica in _replicas(part):
                known = replicas.setdefault(key, replica)
                # Anybody's Service with the version's labels may come first, and name the ports otherwise.
                replicas[key] = replace(known, ports={**replica.ports, **known.ports})
    return RoutingTable(
        "fenka.gateway/1",
        service,
        [
            VersionEntry(
                version,
                EQUAL_WEIGHT if weights is None else weights.get(version, 0),
                list(replicas.values()),
            )
            for version, replicas in sorted(versions.items())
        ],
    )


def read_weights(service: ServiceObject | None) -> dict[str, int] | None:
    """Return the weights by version, None if the Service has none. Raises InvalidTable."""
    text = service.metadata.annotations.get(WEIGHTS) if service is not None else None
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Weight])
    except msgspec.DecodeError as error:
        raise InvalidTable(f"annotation {WEIGHTS} is invalid: {error}") from error


def _replicas(part: EndpointSlice) -> Iterable[tuple[str, ReplicaEntry]]:
    """Yield the replicas of a slice that serve or end, by pod."""
    ports = {port.name or "": port.port for port in part.ports or () if port.port}
    for endpoint in part.endpoints or ():
        terminating = endpoint.conditions.terminating is True
        if endpoint.addresses and (terminating or endpoint.conditions.ready is not False):
            host = endpoint.addresses[0]
            pod = endpoint.target_ref.uid if endpoint.target_ref else ""
            yield pod or host, ReplicaEntry(host, ports, terminating)


log = logging.getLogger(__name__)


class _ChangeListener:
    """Applies the table after each change: it is made from both collections."""

    def __init__(self, source: "EndpointSource") -> None:
        self._source = source

    def on_replace(self, _: object) -> None:
        self._source.schedule()

    def on_upsert(self, _: object) -> None:
        self._source.schedule()

    def on_delete(self, _: object) -> None:
        self._source.schedule()


class EndpointSource:
    """The replicas of a service.

    Attributes:
        api: The cluster.
        namespace: The service's.
        service: Its name.
        error: Why the newest table is not used; None if it is.
    """

    def __init__(
        self, api: Api, namespace: str, service: str, apply: Callable[[RoutingTable], None]
    ) -> None:
        """apply: gets each table. While the API server does not answer, the last one stays."""
        self.api, self.namespace, self.service, self._apply = api, namespace, service, apply
        self._scheduled = False
        self.error: str | None = None
        listener = _ChangeListener(self)
        self._slices = Informer(
            api,
            ENDPOINT_SLICES.format(namespace=namespace),
            EndpointSlice,
            listener,
            query={"labelSelector": f"{SERVICE}={service}"},
        )
        self._services = Informer(
            api,
            SERVICES_API.format(namespace=namespace),
            ServiceObject,
            listener,
            query={"fieldSelector": f"metadata.name={service}"},
        )

    async def follow(self) -> None:
        """Apply each new table until cancelled."""
        await asyncio.gather(self._slices.run(), self._services.run())

    def peers(self) -> list[GatewayPeer]:
        """Return the gateways of the service, by the names of their pods."""
        return gateway_peers(self.service, self._slices.objects.values())

    def annotations(self) -> Mapping[str, str]:
        """Return the annotations of the Service of all versions, as far as they are known."""
        service = next(iter(self._services.objects.values()), None)
        return service.metadata.annotations if service is not None else {}

    def schedule(self) -> None:
        """Apply the table once after all changes of this turn of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self._scheduled = False
        if not (self._slices.synced.is_set() and self._services.synced.is_set()):
            return
        service = next(iter(self._services.objects.values()), None)
        try:
            table = routing_table(
                self.service, self._slices.objects.values(), read_weights(service)
            )
            table.validate()
        except InvalidTable as error:
            if str(error) != self.error:
                log.warning("the last routing table stays in use: %s", error)
            self.error = str(error)
            return
        self.error = None
        self._apply(table)
