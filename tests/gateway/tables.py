"""Routing tables in short."""

from fenka.jobs.routing_table import ReplicaEntry, RoutingTable, VersionEntry

LOOPBACK = "127.0.0.1"


def version(name: str, *replicas: ReplicaEntry, weight: int = 1) -> VersionEntry:
    """Return a version."""
    return VersionEntry(name, weight, list(replicas))


def table(*versions: VersionEntry, generation: int = 0) -> RoutingTable:
    """Return a routing table."""
    return RoutingTable("fenka.gateway/1", "bert", list(versions), generation)
