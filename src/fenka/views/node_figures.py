"""Figures of a node's cards and slices, which the dashboard asks its program for every few seconds.

Arrays instead of objects: a node with eight cards and forty slices takes 2.8 kB. A field that is added comes
last and has a default, so that a dashboard and a node of two releases understand each other.
"""

import msgspec


class CardFigures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A card's figures; None if the driver does not report one. busy: share of time in which a kernel ran."""

    uuid: str
    used_mib: int | None = None
    busy: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class SliceFigures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A container's use of a card or MIG instance.

    Attributes:
        pod: the pod's UID.
        device: UUID of the card; of an instance its place, `<UUID of the card>/<start>/<profile>`.
        busy: share of the card's time; None if the driver does not report it.
        idle_s: seconds since the card last worked for it, or since the node's program first saw it.
        violation: a limit that it exceeds, in a sentence; empty for none.
    """

    pod: str
    device: str
    used_mib: int | None = None
    busy: float | None = None
    idle_s: float | None = None
    violation: str = ""


class NodeFigures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All of a node's. at: Unix seconds."""

    at: float
    cards: list[CardFigures] = []
    slices: list[SliceFigures] = []
