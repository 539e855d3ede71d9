"""Decides what a service's supervisor does: values in, values out."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fenka.core.scaling import VersionUse, version_loads
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.notebook import LOOPBACK
from fenka.jobs.routing_table import (
    ListenAddress,
    ReplicaEntry,
    RoutingTable,
    VersionEntry,
    replica_label,
)
from fenka.jobs.service import (
    CLIENT_PORTS,
    PORT_VARIABLES,
    SOCKET_VARIABLES,
    PortName,
    ServiceSpec,
)
from fenka.local.records import ReplicaState, ServiceRecord, VersionRecord
from fenka.local.workload import NO_CARDS, parse_priority

SURGE = 1
"""How many replicas an update adds before it ends an old one."""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Before a replica that has ended is started again: doubled each time, up to the limit."""

STABLE_S = 60.0
"""A replica that ran so long begins with the first pause again."""

END_SLACK_S = 5.0
"""After the grace period, until the gateway or a replica's own process is killed that has not ended."""

SOME_LOAD = 1e-6
"""Of a version that has answered requests between two looks, none of which was seen in flight."""

_ACTIVE: tuple[ReplicaState, ...] = ("Backoff", "Pending", "Starting", "Ready")
"""In the order in which replicas are given up."""

_LEASE_NAME_CHARACTERS = 48
"""Before the suffix and the number of restarts: a name has at most 63."""


class AnyReplica(Protocol):
    """What decisions need of a replica."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def version(self) -> VersionRecord:
        """The version that it was started for, as it was then."""

    @property
    def state(self) -> ReplicaState:
        """Its state."""

    @property
    def ports(self) -> Mapping[PortName, ListenAddress]:
        """Where it listens."""

    @property
    def uid(self) -> int | None:
        """The user whose program serves its ports."""

    @property
    def served(self) -> bool:
        """Whether it has been ready since its start."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What brings a version nearer to what is wanted.

    Attributes:
        start: How many replicas to add.
        drain: The names of replicas to end.
    """

    start: int
    drain: tuple[str, ...]


def changes(wanted: int, revision: int, replicas: Sequence[AnyReplica]) -> Changes:
    """Return what to do about one version.

    Replicas of another revision are replaced one by one: a new one is added, and an old one ends when the new
    one is ready. If the new one has to wait for room, an old one ends before.

    Args:
        wanted: The number of replicas to have.
        revision: What replicas should be of.
        replicas: Those of the version, the oldest first.
    """
    active = [replica for replica in replicas if replica.state in _ACTIVE]
    current = [each for each in active if each.version.revision == revision]
    old = [each for each in active if each.version.revision != revision]
    serving = [each for each in old if each.state == "Ready"]
    given_up = sorted(enumerate(current), key=lambda each: (_ACTIVE.index(each[1].state), -each[0]))
    drained = [each for _, each in given_up][: max(len(current) - wanted, 0)]
    drained += [each for each in old if each.state != "Ready"]
    kept = [each for each in current if each not in drained]
    spare = sum(each.state == "Ready" for each in kept) + len(serving) - wanted
    blocked = any(each.state == "Pending" for each in kept) and len(active) == len(replicas)
    ending = serving[: max(spare, int(blocked and not drained), 0)]
    missing = wanted - len(kept)
    if left := len(serving) - len(ending):
        missing = min(missing, wanted + SURGE - len(kept) - left)
    return Changes(max(missing, 0), tuple(each.name for each in (*drained, *ending)))


def is_active(replica: AnyReplica) -> bool:
    """Return whether a replica serves, or will."""
    return replica.state in _ACTIVE


def pause_s(failures: int) -> float:
    """Return the seconds before a replica is started again that has ended so many times."""
    return float(min(FIRST_PAUSE_S * 2 ** min(failures - 1, 20), MAX_PAUSE_S))


@dataclass(frozen=True, slots=True)
class GatewayUse:
    """What the gateway reports.

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
        use: What the gateway reports.
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
    return replica_label(LOOPBACK, client_ports(replica))


def routing_table(
    service: str, record: ServiceRecord, replicas: Iterable[AnyReplica]
) -> RoutingTable:
    """Return the gateway's table. A version that was deleted is in it until its last replica has ended."""
    entries: dict[str, list[ReplicaEntry]] = {
        version.spec.version: [] for version in record.versions
    }
    for replica in replicas:
        if replica.served:
            entry = ReplicaEntry(
                LOOPBACK, client_ports(replica), replica.state != "Ready", replica.uid
            )
            entries.setdefault(replica.version.spec.version, []).append(entry)
    return RoutingTable(
        "fenka.gateway/1",
        service,
        [
            VersionEntry(version, record.weight(version) if record.version(version) else 0, of_it)
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
        (PORT_VARIABLES if isinstance(address, int) else SOCKET_VARIABLES)[name]: str(address)
        for name, address in ports.items()
    }
    return variables | ({} if spec.gpu else NO_CARDS) | spec.env
