"""Decides what a service's supervisor does: values in, values out."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fenka.core.scaling import VersionUse, version_loads
from fenka.jobs import routing_table as routing
from fenka.jobs import service
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.notebook import LOOPBACK
from fenka.jobs.routing_table import ListenAddress, RoutingTable
from fenka.jobs.service import CLIENT_PORTS, PortName, ServiceSpec
from fenka.local.records import ReplicaState, ServiceRecord, VersionRecord
from fenka.local.workload import NO_CARDS, parse_priority

SURGE = 1
"""How many replicas an update adds before it ends an old one."""

SOME_LOAD = 1e-6
"""Of a version that has answered requests between two looks, none of which was seen in flight."""

_ACTIVE: tuple[ReplicaState, ...] = ("Backoff", "Pending", "Starting", "Ready")
"""In the order in which replicas are given up."""

_LEASE_NAME_CHARACTERS = 48
"""Before the suffix and the number of restarts: a name has at most 63."""


class AnyReplica(Protocol):
    """The facts about a replica that decisions need; see ServiceReplica."""

    name: str
    version: VersionRecord
    state: ReplicaState
    ports: dict[PortName, ListenAddress]
    uid: int | None
    served: bool


@dataclass(frozen=True, slots=True)
class ReplicaChanges:
    """Steps that bring a version nearer to its wanted state.

    Attributes:
        start: How many replicas to add.
        drain: The names of replicas to end.
    """

    start: int
    drain: tuple[str, ...]


def changes(wanted: int, revision: int, replicas: Sequence[AnyReplica]) -> ReplicaChanges:
    """Return what to do about one version.

    Replicas of another revision are replaced one by one: a new one is added, and an old one ends when the new
    one is ready. If the new one has to wait for room, an old one ends before.

    Args:
        wanted: The number of replicas to have.
        revision: What replicas should be of.
        replicas: Those of the version, the oldest first.
    """
    active = [replica for replica in replicas if replica.state in _ACTIVE]
    current = [replica for replica in active if replica.version.revision == revision]
    old = [replica for replica in active if replica.version.revision != revision]
    serving = [replica for replica in old if replica.state == "Ready"]
    given_up = sorted(
        current, key=lambda replica: (_ACTIVE.index(replica.state), -current.index(replica))
    )
    drained = given_up[: max(len(current) - wanted, 0)]
    drained += [replica for replica in old if replica.state != "Ready"]
    kept = [replica for replica in current if replica not in drained]
    spare = sum(replica.state == "Ready" for replica in kept) + len(serving) - wanted
    blocked = any(replica.state == "Pending" for replica in kept) and len(active) == len(replicas)
    ending = serving[: max(spare, int(blocked and not drained), 0)]
    missing = wanted - len(kept)
    if left := len(serving) - len(ending):
        missing = min(missing, wanted + SURGE - len(kept) - left)
    return ReplicaChanges(max(missing, 0), tuple(replica.name for replica in (*drained, *ending)))


def is_active(replica: AnyReplica) -> bool:
    """Return whether a replica serves, or will."""
    return replica.state in _ACTIVE


@dataclass(frozen=True, slots=True)
class GatewayUse:
    """A report of the gateway.

    Attributes:
        waiting: Requests that wait for a replica.
        in_flight: Requests at replicas, by version.
        responses: Responses so far, by version.
        terminating: Requests at terminating replicas, by address.
    """

    waiting: int
    in_flight: Mapping[str, int]
    responses: Mapping[str, int]
    terminating: Mapping[str, int]


def loads(
    record: ServiceRecord,
    replicas: Collection[AnyReplica],
    use: GatewayUse,
    before: GatewayUse | None,
) -> dict[str, float]:
    """Return the load of each version.

    A version that has answered since the last look is not idle, though no request was seen in flight.

    Args:
        record: The service.
        replicas: All its replicas.
        use: A report of the gateway.
        before: What it reported at the last look, if this gateway has.
    """
    uses = {
        version.spec.version: VersionUse(
            record.weight(version.spec.version),
            use.in_flight.get(version.spec.version, 0),
            any(
                replica.state == "Ready" and replica.version.spec.version == version.spec.version
                for replica in replicas
            ),
        )
        for version in record.versions
    }
    result = version_loads(uses, use.waiting)
    for version, load in result.items():
        known = before.responses.get(version, 0) if before else 0
        if use.responses.get(version, 0) > known:
            result[version] = max(load, SOME_LOAD)
    return result


def address(replica: AnyReplica) -> str:
    """Return how the gateway calls a replica in its metrics."""
    return routing.replica_label(LOOPBACK, client_ports(replica))


def routing_table(
    service: str, record: ServiceRecord, replicas: Iterable[AnyReplica]
) -> RoutingTable:
    """Return the gateway's table. A version that was deleted is in it until its last replica has ended."""
    entries: dict[str, list[routing.ReplicaEntry]] = {
        version.spec.version: [] for version in record.versions
    }
    for replica in replicas:
        if replica.served:
            entry = routing.ReplicaEntry(
                LOOPBACK, client_ports(replica), replica.state != "Ready", replica.uid
            )
            entries.setdefault(replica.version.spec.version, []).append(entry)
    return RoutingTable(
        "fenka.gateway/1",
        service,
        [
            routing.VersionEntry(
                version, record.weight(version) if record.version(version) else 0, of_it
            )
            for version, of_it in sorted(entries.items())
        ],
    )


def client_ports(replica: AnyReplica) -> dict[str, ListenAddress]:
    """Return where clients' requests go to, by the port's name."""
    return {name: replica.ports[name] for name in CLIENT_PORTS if name in replica.ports}


# --- a replica's program --------------------------------------------------------------------------------


def lease_name(spec: ServiceSpec, suffix: str) -> str:
    """Return a name for a replica, as pods are called."""
    return f"{f'{spec.name}-{spec.version}'[:_LEASE_NAME_CHARACTERS]}-{suffix}"


def lease_request(version: VersionRecord, name: str) -> JobSpec | None:
    """Return what the daemon is asked for: a gang of one, so that it ends what outlives its supervisor.

    None for a replica without cards. Raises InvalidRequest.
    """
    spec = version.spec
    if spec.gpu is None:
        return None
    request = JobSpec(
        spec.argv,
        spec.gpu,
        name=name,
        kind="service",
        directory=version.directory,
        gang=1,
        priority=parse_priority(spec.priority),
    )
    request.validate()
    return request


def program(spec: ServiceSpec, ports: Mapping[PortName, ListenAddress]) -> list[str]:
    """Return the program of a replica that is to listen there, and its arguments."""
    numbers = {name: port for name, port in ports.items() if isinstance(port, int)}
    own = msgspec.structs.replace(
        spec,
        restful_port=numbers.get("http-serving", 0),
        port=numbers.get("grpc-serving", 0),
        metrics_port=numbers.get("http-metrics", 0),
    )
    return own.argv


def environment(spec: ServiceSpec, ports: Mapping[PortName, ListenAddress]) -> dict[str, str]:
    """Return the variables of a replica besides those of its lease and of the user's own."""
    variables = {
        (service.PORT_VARIABLES if isinstance(address, int) else service.SOCKET_VARIABLES)[
            name
        ]: str(address)
        for name, address in ports.items()
    }
    return variables | ({} if spec.gpu else NO_CARDS) | spec.env
