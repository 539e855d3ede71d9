"""Services as values of the screens, of a cluster or a workstation. All times are Unix seconds."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServingPort:
    """A port that clients connect to.

    Attributes:
        name: GRPC or RESTFUL, as arena calls them.
        port: Its number at the service's address.
        node_port: The port that is open on all nodes; 0 for none.
    """

    name: str
    port: int
    node_port: int = 0

    def __str__(self) -> str:
        if self.node_port:
            return f"{self.name}:{self.node_port}->{self.port}"
        return f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of a version; on a cluster it is a pod.

    Attributes:
        status: Its state in kubectl's words.
        ready: Number of its containers that accept requests.
        containers: Number of its containers.
        node: The node's name; empty before it has one.
        requested: Cards, slices as shares of one; None if no card's size is known.
        why: Why it waits for a card; empty if it does not.
        sockets: The Unix sockets where it listens; none if it listens on ports.
        memory_units: Units of card memory that it requests.
        compute: Percent of a card's time that it requests.
        cpus: Processors that it requests.
    """

    name: str
    status: str
    created: float
    ready: int = 0
    containers: int = 1
    restarts: int = 0
    node: str = ""
    node_address: str = ""
    address: str = ""
    requested: float | None = 0
    why: str = ""
    sockets: tuple[str, ...] = ()
    memory_units: float = 0
    compute: int = 0
    cpus: float = 0


@dataclass(frozen=True, slots=True)
class ServiceVersion:
    """A version of a service.

    Attributes:
        namespace: On a workstation the user.
        uid: Its identity: a version of the same name that is deployed later has another.
        kind: custom, tensorflow or triton.
        desired: Number of replicas that it is to have now.
        available: Number of replicas that accept requests.
        rolled_out: Whether all replicas are as they were deployed or changed last, and accept requests.
        address: Where clients connect; empty for nowhere.
        share: Percent of the requests; None if they are not divided.
        note: What the user should know or do, such as that the deployment was interrupted.
    """

    name: str
    namespace: str
    uid: str
    kind: str
    version: str
    desired: int
    available: int
    created: float
    address: str = ""
    ports: tuple[ServingPort, ...] = ()
    share: int | None = None
    replicas: tuple[Replica, ...] = ()
    note: str = ""
    rolled_out: bool = True

    @property
    def requested(self) -> float | None:
        """Return the cards that its replicas request; None if that is not known of all of them."""
        known = [each.requested for each in self.replicas if each.requested is not None]
        return _total(known) if len(known) == len(self.replicas) else None

    @property
    def why(self) -> str:
        """Return why a replica waits for a card; empty if none does."""
        return next((each.why for each in self.replicas if each.why), "")

    def replica(self, name: str) -> Replica | None:
        """Return the replica of this name."""
        return next((each for each in self.replicas if each.name == name), None)


def _total(amounts: Iterable[float]) -> float:
    return round(sum(amounts), 1)
