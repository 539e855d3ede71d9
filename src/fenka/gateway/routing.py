"""Selects the replica of each request, and counts requests in flight. Pure: time is passed in.

Smooth weighted round robin selects a version, so each gets its exact share of any 100 requests. Within it the
replica with the fewest requests in flight is selected, in turns among equals. A version without an accepting
replica gives its share to the others, so a crashed canary loses no request.
"""

from collections.abc import Iterator

from fenka.jobs.routing_table import ListenAddress, ReplicaEntry, RoutingTable

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
"""A replica that refuses connections is tried again after a pause, which doubles up to the limit."""

ReplicaKey = tuple[str, tuple[tuple[str, ListenAddress], ...]]


def replica_key(entry: ReplicaEntry) -> ReplicaKey:
    """Return what identifies a replica from table to table."""
    return entry.host, tuple(sorted(entry.ports.items()))


class Replica:
    """A replica, and what the gateway knows of it.

    Attributes:
        in_flight: The number of requests that it has not answered.
        terminating: It is to get no new requests.
        retry_at: It refused a connection and is not selected before this time.
        uid: The user whose program must be there; None for any.
    """

    __slots__ = (
        "failures",
        "host",
        "in_flight",
        "ports",
        "retry_at",
        "selected",
        "terminating",
        "uid",
        "version",
    )

    def __init__(self, entry: ReplicaEntry, version: str) -> None:
        self.host, self.ports, self.version = entry.host, entry.ports, version
        self.terminating, self.uid = entry.terminating, entry.uid
        self.in_flight = self.failures = self.selected = 0
        self.retry_at = 0.0


class Version:
    """A version: its weight, its replicas, and its credit of the round robin.

    used_at: when it got its last request; None before the first.
    """

    __slots__ = ("credit", "in_flight", "name", "replicas", "used_at", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.used_at: float | None = None
        self.weight = self.credit = self.in_flight = 0
        self.replicas: list[Replica] = []

    def least_loaded(self, port: str, now: float) -> Replica | None:
        """Return the accepting replica with the fewest requests in flight."""
        best: Replica | None = None
        for replica in self.replicas:
            if (
                (
                    best is None
                    or replica.in_flight < best.in_flight
                    or (replica.in_flight == best.in_flight and replica.selected < best.selected)
                )
                and replica.retry_at <= now
                and not replica.terminating
                and port in replica.ports
            ):
                best = replica
        return best


class Router:
    """The replicas of a service."""

    def __init__(self) -> None:
        self.versions: dict[str, Version] = {}
        """By name. A version that left the table stays while it has requests in flight."""
        self._replicas: dict[ReplicaKey, Replica] = {}
        self._selections = 0

    @property
    def in_flight(self) -> int:
        """Return the number of requests that replicas have not answered."""
        return sum(version.in_flight for version in self.versions.values())

    def replicas(self) -> Iterator[Replica]:
        """Return the replicas of the current table."""
        return iter(self._replicas.values())

    def update(self, table: RoutingTable) -> list[Replica]:
        """Replace the table. Return the replicas that are to get no more requests."""
        before, self._replicas = self._replicas, {}
        weights = {entry.name: entry.weight for entry in table.versions}
        if weights != {name: version.weight for name, version in self.versions.items()}:
            # Credit that other weights gave must not favour a version.
            for version in self.versions.values():
                version.credit = 0
        for version in self.versions.values():
            version.weight, version.replicas = 0, []
        for entry in table.versions:
            version = self.versions.setdefault(entry.name, Version(entry.name))
            version.weight = entry.weight
            version.replicas = [
                self._renew(before, replica, entry.name) for replica in entry.replicas
            ]
        self.versions = {
            name: version
            for name, version in self.versions.items()
            if name in weights or version.in_flight
        }
        gone = [
            replica for key, replica in before.items() if self._replicas.get(key) is not replica
        ]
        for replica in gone:
            replica.terminating = True
        return gone + [replica for replica in self._replicas.values() if replica.terminating]

    def acquire(self, port: str, now: float) -> Replica | None:
        """Select a replica for a request, and count the request as in flight there.

        Args:
            port: The name of the port that the request came to.
            now: The current time.

        Returns:
            The replica, None if no replica accepts requests.
        """
        replica = self._select(port, now)
        if replica is None:
            return None
        self._selections += 1
        replica.selected = self._selections
        replica.in_flight += 1
        version = self.versions[replica.version]
        version.in_flight += 1
        version.used_at = now
        return replica

    def release(self, replica: Replica) -> None:
        """Count a request as no longer in flight."""
        assert replica.in_flight > 0
        replica.in_flight -= 1
        self.versions[replica.version].in_flight -= 1

    def on_unreachable(self, replica: Replica, now: float) -> None:
        """Do not select the replica for a while: it accepted no connection."""
        if now < replica.retry_at:
            return  # Attempts that began together count once.
        # 2**20 exceeds any limit.
        pause_s = min(FIRST_PAUSE_S * 2 ** min(replica.failures, 20), MAX_PAUSE_S)
        replica.failures += 1
        replica.retry_at = now + pause_s

    def on_reached(self, replica: Replica) -> None:
        """Forget earlier failures."""
        replica.failures, replica.retry_at = 0, 0.0

    def _renew(
        self, before: dict[ReplicaKey, Replica], entry: ReplicaEntry, version: str
    ) -> Replica:
        key = replica_key(entry)
        replica = before.get(key)
        if replica is None or replica.version != version:
            replica = Replica(entry, version)
        replica.terminating, replica.uid = entry.terminating, entry.uid
        self._replicas[key] = replica
        return replica

    def _select(self, port: str, now: float) -> Replica | None:
        if len(self.versions) == 1:
            (only,) = self.versions.values()
            return only.least_loaded(port, now) if only.weight else None
        total = 0
        best: tuple[Version, Replica] | None = None
        for version in self.versions.values():
            if not version.weight:
                continue
            replica = version.least_loaded(port, now)
            if replica is None:
                continue
            total += version.weight
            version.credit += version.weight
            if best is None or version.credit > best[0].credit:
                best = version, replica
        if best is None:
            return None
        best[0].credit -= total
        return best[1]
