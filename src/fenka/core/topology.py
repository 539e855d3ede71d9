"""How the cards of a node are connected.

The driver's adapter and the records of nodes make `Links`. `connections` chooses cards by them.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache


class Distance(IntEnum):
    """How far two cards are from each other, by the best connection that they have.

    NVLINK is a direct link, or one through NVSwitch. The others are NVML's levels of PCIe.
    """

    SAME = 0
    NVLINK = 1
    PCIE_SWITCH = 2
    PCIE_SWITCHES = 3
    HOST_BRIDGE = 4
    NUMA_NODE = 5
    SOCKETS = 6


MAX_LINKED_CARDS = 62
"""A set of cards is a number of 64 bits in the columns. No node has as many cards."""

UNKNOWN = Distance.SOCKETS
"""The distance of cards of which none is known."""


@dataclass(frozen=True, slots=True)
class Links:
    """The distances of the cards of a node.

    Attributes:
        devices: the ids of the cards.
        distances: a row for each of them, with its `Distance` from each; symmetric.

    Raises:
        ValueError: if there are not as many rows as cards, or one is not as long.
    """

    devices: tuple[str, ...]
    distances: bytes

    def __post_init__(self) -> None:
        if len(self.distances) != len(self.devices) ** 2:
            raise ValueError("a row of distances is missing")

    def distance(self, one: str, other: str) -> Distance:
        """Return the distance of two cards; `UNKNOWN` of cards that are not in it."""
        if one == other:
            return Distance.SAME
        if one not in self.devices or other not in self.devices:
            return UNKNOWN
        row, column = self.devices.index(one), self.devices.index(other)
        return Distance(self.distances[row * len(self.devices) + column])


def matrix_of(links: Links | None, devices: tuple[str, ...]) -> bytes | None:
    """Return the distances of these cards, a row for each; None if they are not known."""
    if links is None or not 1 < len(devices) <= MAX_LINKED_CARDS:
        return None
    # Nearly always all cards of the node, in order.
    return links.distances if devices == links.devices else _part(links, devices)


@lru_cache(1024)
def _part(links: Links, devices: tuple[str, ...]) -> bytes:
    return bytes(links.distance(one, other) for one in devices for other in devices)
