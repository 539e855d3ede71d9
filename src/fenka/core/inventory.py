"""Cards and the nodes they are in."""

from dataclasses import dataclass

WHOLE_COMPUTE = 100
"""A card's compute capacity: percent of its time."""


@dataclass(frozen=True, slots=True)
class Card:
    """One physical GPU.

    index: its number on the node. model: as NVML names it ("Tesla T4"). memory_mib: what the driver
    reports, in MiB. compute: percent. Unhealthy and cordoned cards admit nobody.
    """

    index: int
    uuid: str
    model: str
    memory_mib: int
    compute: int = WHOLE_COMPUTE
    healthy: bool = True
    cordoned: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. cpu_milli (thousandths of a core) and memory_mib (host memory): None = not counted."""

    name: str
    cards: tuple[Card, ...]
    cpu_milli: int | None = None
    memory_mib: int | None = None
