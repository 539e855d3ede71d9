"""A gateway's routing table: which versions and replicas a service has. The program that starts replicas
writes it.

A table replaces the one before it as a whole. It has no other state, so a gateway that is killed and started
again routes as before.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fenka.core.errors import FenkaError

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""The name of a service, a version or a port, as labels of Kubernetes may have it."""
MAX_REPLICAS = 10_000
"""Of all versions: more than any cluster has cards for one service."""


MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit for the path of a Unix socket, without the final zero."""

ListenAddress = Annotated[int, Meta(ge=1, le=65535)] | str
"""Where a replica listens: a port of its host, or the absolute path of a Unix socket."""

Weight = Annotated[int, Meta(ge=0, le=1_000_000)]
"""A share of the requests, relative to the other versions' weights; 0 for none."""


class InvalidTable(FenkaError):
    """A routing table cannot be read."""


class ReplicaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica.

    Attributes:
        host: Its IP address.
        ports: Where it listens there, by the port's name.
        terminating: It finishes its requests and gets no new ones.
    """

    host: str
    ports: Mapping[str, ListenAddress]
    terminating: bool = False


class VersionEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version."""

    name: str
    weight: Weight
    replicas: list[ReplicaEntry] = []


class RoutingTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All versions of a service.

    Attributes:
        generation: A number by which the gateway's metrics tell which table is in use.
    """

    format: Literal["fenka.gateway/1"]
    service: str
    versions: list[VersionEntry] = []
    generation: Annotated[int, Meta(ge=0)] = 0

    def validate(self) -> None:
        """Check what types do not express. Raises InvalidTable."""
        names = [version.name for version in self.versions]
        for name in (self.service, *names):
            if not NAME.fullmatch(name):
                raise InvalidTable(f"invalid name {name[:80]!r} in the routing table")
        if len(set(names)) < len(names):
            raise InvalidTable("a version appears twice in the routing table")
        replicas = [replica for version in self.versions for replica in version.replicas]
        if len(replicas) > MAX_REPLICAS:
            raise InvalidTable(
                f"the routing table has {len(replicas)} replicas, the limit is {MAX_REPLICAS}"
            )
        keys = [(replica.host, *sorted(replica.ports.items())) for replica in replicas]
        if len(set(keys)) < len(keys):
            raise InvalidTable("a replica appears twice in the routing table")
        for replica in replicas:
            try:
                ipaddress.ip_address(replica.host)
                for address in replica.ports.values():
                    if isinstance(address, str):
                        check_socket_path(address)
            except ValueError as error:
                raise InvalidTable(f"invalid replica {replica.host[:80]!r}: {error}") from error


def check_socket_path(path: str) -> None:
    """Raise ValueError if no Unix socket can have this path."""
    length = len(os.fsencode(path))
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path[:80]!r} is no absolute path of a Unix socket")
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes, and {path} has {length}"
        )


def replica_label(host: str, ports: Mapping[str, ListenAddress]) -> str:
    """Return how metrics call a replica: by the first of its addresses."""
    first = ports[min(ports)] if ports else 0
    return first if isinstance(first, str) else f"{host}:{first}"


def decode(text: bytes) -> RoutingTable:
    """Return the table that a JSON text describes. Raises InvalidTable."""
    try:
        table = msgspec.json.decode(text, type=RoutingTable)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidTable(f"the routing table is invalid: {error}") from error
    table.validate()
    return table


def encode(table: RoutingTable) -> bytes:
    """Return the JSON text of a table."""
    return msgspec.json.encode(table)
