"""The queue as rows of the screens: requests that wait, in the order in which they are scheduled."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A pending request; a gang is one.

    Attributes:
        position: 1 is scheduled next.
        asks: the request as its user wrote it.
        since: Unix seconds.
        reserved: the cards that are reserved for it: indexes, on a cluster NODE/INDEX.
        starts_by: when they are free at the latest, in Unix seconds; None if unknown.
        used_s: card-seconds that its namespace has used; they decay.
    """

    position: int
    name: str
    namespace: str
    priority: int
    asks: str
    since: float
    reserved: list[str] = field(default_factory=list)
    starts_by: float | None = None
    why: str = ""
    used_s: float = 0.0
