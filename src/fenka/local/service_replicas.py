"""The replicas of a service: groups of one with ports of their own, and decisions about them.

The decisions are values in, values out.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

import msgspec

from fenka import procfs
from fenka.core.scaling import VersionUse, version_loads
from fenka.hardware.peer_credentials import listener_uid, socket_listener_uid
from fenka.jobs import routing_table as routing
from fenka.jobs import service
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.local_ports import LOOPBACK, MAX_TAKEN
from fenka.jobs.routing_table import ListenAddress, RoutingTable
from fenka.jobs.service import CLIENT_PORTS, PortName, ServiceSpec
from fenka.local import gang, records
from fenka.local.held_ports import HeldPorts
from fenka.local.launch import GroupProgram, GroupPrograms
from fenka.local.records import ReplicaRecord, ReplicaState, ServiceRecord, VersionRecord, outcome
from fenka.local.supervisor import Body, GroupEnd, GroupStart, Home, ProcessGroup, RestartPolicy
from fenka.local.workload import NO_CARDS, parse_priority
from fenka.workstation import paths

SURGE = 1
"""How many replicas an update adds before it ends an old one."""

SOME_LOAD = 1e-6
"""Of a version that has answered requests between two looks, none of which was seen in flight."""

_ACTIVE: tuple[ReplicaState, ...] = ("Backoff", "Pending", "Starting", "Ready")
"""In the order in which replicas are given up."""

_LEASE_NAME_CHARACTERS = 48
"""Before the suffix and the number of restarts: a name has at most 63."""


class ServiceReplica(ProcessGroup):
    """One replica.

    Attributes:
        version: The version that it was started for, as it was then.
        ports: Where it listens, by the port's name.
        uid: The user whose program serves its ports; None while it is not known.
    """

    def __init__(self, home: Home, version: VersionRecord, held: HeldPorts) -> None:
        super().__init__(
            home=home,
            name=lease_name(version.spec, secrets.token_hex(3)),
            policy=RestartPolicy(None, always=True),
            grace_s=version.spec.grace_s,
        )
        self.version = version
        self.ports: dict[PortName, ListenAddress] = {}
        self.uid: int | None = None
        self._held, self._locks = held, list[FileIO]()

    @property
    def record(self) -> ReplicaRecord:
        """Its public record."""
        return ReplicaRecord(
            self.name,
            self.version.spec.version,
            self.version.revision,
            self.state,
            self.created_at,
            self._lease,
            self.pid,
            self.program,
            self.restarts,
            self.ports.copy(),
            self.reason,
        )

    @property
    def readiness(self) -> tuple[ListenAddress, str]:
        """Where it listens when it is ready, and the path that answers then; empty for none."""
        name, path = self.version.spec.readiness
        return self.ports[name], path

    @property
    def _lease(self) -> str:
        # The processes of an earlier lease may still hold its slice, and its name.
        return f"{self.name}.{self.restarts}" if self.restarts else self.name

    # --- start and end ------------------------------------------------------------------------------

    def next_start(self) -> Body:
        """Return its next start. Raises NoFreePort, InvalidRequest, OSError."""
        self._release_ports()
        directory, version = self.home.directory, self.version
        for name in version.spec.ports:
            if version.spec.unix_socket and name in CLIENT_PORTS:
                records.sockets_directory(directory).mkdir(mode=0o700, exist_ok=True)
                # Another path after each restart: few programs replace what a killed one has left.
                self.ports[name] = records.socket_path(directory)
            else:
                self.ports[name], lock = paths.port_reservations().reserve()
                self._locks.append(lock)
        programs = GroupPrograms(
            [
                GroupProgram(
                    self.name,
                    program(version.spec, self.ports),
                    environment(version.spec, self.ports),
                    lease=0,
                )
            ],
            [address for address in self.ports.values() if isinstance(address, int)],
            records.replicas_directory(directory),
            version.directory,
            version.binds,
            gang.GangLimits(self.grace_s),
            forward=False,
        )
        request = lease_request(version, self._lease)
        return GroupStart(self.home, request, lambda _: programs, version.environment).run

    def _release_ports(self) -> None:
        for lock in self._locks:
            lock.close()
        for address in self.ports.values():
            if isinstance(address, int):
                self._held.give_up(address)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(address)
        self._locks, self.ports = [], {}

    def close_inherited(self) -> None:
        """Close, in another replica's process, what belongs to this one."""
        super().close_inherited()
        for lock in self._locks:
            lock.close()

    def on_restart(self, end: GroupEnd) -> None:
        """Say why it is started again, and give up its ports."""
        if 0 < self.times_taken <= MAX_TAKEN:
            self.reason = f"another program took its port {end.taken}"
        else:
            self.reason = end.error or self.reason or self._explain(end)
        self.uid = None
        self._release_ports()

    def _explain(self, end: GroupEnd) -> str:
        line = gang.last_line(records.replica_log(self.home.directory, self.name))
        return f"ended with {outcome(end.status)}" + (f": {line}" if line else "")

    def on_gone(self) -> None:
        """Remove its ports and its log."""
        self._release_ports()
        log = records.replica_log(self.home.directory, self.name)
        shutil.rmtree(log.parent, ignore_errors=True)

    # --- readiness ----------------------------------------------------------------------------------

    def check_ports(self) -> bool:
        """Return whether its user listens where it shows readiness, and no other user on its ports.

        Otherwise the gateway must send it nothing: a ready replica becomes Starting. Raises OSError.
        """
        listening = {
            address: uid
            for address in {self.readiness[0], *client_ports(self).values()}
            if (uid := self._listener_uid(address)) is not None
        }
        # A program of root may give up its rights before it listens.
        users = {os.geteuid()} if os.geteuid() else procfs.users_below(self.pid)
        foreign = {address: uid for address, uid in listening.items() if uid not in users}
        for address, uid in foreign.items():
            self.reason = f"a program of user {uid} listens in its place, at {address}"
        ports = [port for port in client_ports(self).values() if isinstance(port, int)]
        if not foreign and self.readiness[0] in listening:
            self.uid = listening[self.readiness[0]]
            for port in ports:
                self._held.hold(port, self.pid)
            return True
        if self.state == "Ready":
            self.state = "Starting"
            for port in ports:
                self._held.give_up(port)
        return False

    def _listener_uid(self, address: ListenAddress) -> int | None:
        """Return the user whose program listens at an address; None for nobody. Raises OSError."""
        if isinstance(address, int):
            left = self._held.is_left(address)
            return None if left else listener_uid((LOOPBACK, address))
        if self.state == "Ready":
            # Its program would have to serve another connection. No other user can listen there.
            return self.uid if os.path.exists(address) else None
        return socket_listener_uid(address)

    def on_ready(self) -> None:
        """It answers: the gateway may know it."""
        self.state, self.served, self.reason, self.times_taken = "Ready", True, "", 0


# --- decisions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaChanges:
    """Steps that bring a version nearer to its wanted state.

    Attributes:
        start: How many replicas to add.
        drain: The names of replicas to end.
    """

    start: int
    drain: tuple[str, ...]


def changes(wanted: int, revision: int, replicas: Sequence[ServiceReplica]) -> ReplicaChanges:
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


def is_active(replica: ServiceReplica) -> bool:
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
        generation: The number of the table that it uses.
    """

    waiting: int
    in_flight: Mapping[str, int]
    responses: Mapping[str, int]
    terminating: Mapping[str, int]
    generation: int = 0


def loads(
    record: ServiceRecord,
    replicas: Collection[ServiceReplica],
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


def address(replica: ServiceReplica) -> str:
    """Return how the gateway calls a replica in its metrics."""
    return routing.replica_label(LOOPBACK, client_ports(replica))


def routing_table(
    service: str, record: ServiceRecord, replicas: Iterable[ServiceReplica]
) -> RoutingTable:
    """Return the gateway's table. A version that was deleted is in it until its last replica has ended."""
    entries: dict[str, list[routing.ReplicaEntry]] = {
        version.spec.version: [] for version in record.versions
    }
    for replica in replicas:
        if replica.served:
            entry = routing.ReplicaEntry(LOOPBACK, client_ports(replica), replica.state != "Ready")
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


def client_ports(replica: ServiceReplica) -> dict[str, ListenAddress]:
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
