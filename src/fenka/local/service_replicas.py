"""A replica of a service as its supervisor sees it: a group of one, with ports of its own."""

import contextlib
import os
import secrets
import shutil
from io import FileIO

from fenka import procfs
from fenka.hardware.peer_credentials import listener_uid, socket_listener_uid
from fenka.jobs.notebook import LOOPBACK, MAX_TAKEN
from fenka.jobs.routing_table import ListenAddress
from fenka.jobs.service import CLIENT_PORTS, PortName
from fenka.local import gang, records, service_plan
from fenka.local.launch import GroupProgram, GroupPrograms
from fenka.local.records import ReplicaRecord, VersionRecord, outcome
from fenka.local.supervisor import Body, GroupEnd, GroupStart, Home, ProcessGroup, RestartPolicy
from fenka.workstation import paths


class ServiceReplica(ProcessGroup):
    """One replica.

    Attributes:
        version: The version that it was started for, as it was then.
        ports: Where it listens, by the port's name.
        uid: The user whose program serves its ports; None while it is not known.
    """

    def __init__(self, home: Home, version: VersionRecord) -> None:
        super().__init__(
            home=home,
            name=service_plan.lease_name(version.spec, secrets.token_hex(3)),
            policy=RestartPolicy(None, always=True),
            grace_s=version.spec.grace_s,
        )
        self.version = version
        self.ports: dict[PortName, ListenAddress] = {}
        self.uid: int | None = None
        self._locks: list[FileIO] = []

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
                    service_plan.program(version.spec, self.ports),
                    service_plan.environment(version.spec, self.ports),
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
        request = service_plan.lease_request(version, self._lease)
        return GroupStart(self.home, request, lambda _: programs, version.environment).run

    def _release_ports(self) -> None:
        for lock in self._locks:
            lock.close()
        for address in self.ports.values():
            if isinstance(address, str):
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
            for address in {self.readiness[0], *service_plan.client_ports(self).values()}
            if (uid := self._listener_uid(address)) is not None
        }
        # A program of root may give up its rights before it listens.
        users = {os.geteuid()} if os.geteuid() else procfs.users_below(self.pid)
        foreign = {address: uid for address, uid in listening.items() if uid not in users}
        for address, uid in foreign.items():
            self.reason = f"a program of user {uid} listens in its place, at {address}"
        if not foreign and self.readiness[0] in listening:
            self.uid = listening[self.readiness[0]]
            return True
        if self.state == "Ready":
            self.state = "Starting"
        return False

    def _listener_uid(self, address: ListenAddress) -> int | None:
        """Return the user whose program listens at an address; None for nobody. Raises OSError."""
        if isinstance(address, int):
            return listener_uid((LOOPBACK, address))
        if self.state == "Ready":
            # Its program would have to serve another connection. No other user can listen there.
            return self.uid if os.path.exists(address) else None
        return socket_listener_uid(address)

    def on_ready(self) -> None:
        """It answers: the gateway may know it."""
        self.state, self.served, self.reason, self.times_taken = "Ready", True, "", 0
