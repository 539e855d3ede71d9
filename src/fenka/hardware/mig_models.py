"""MIG of simulated cards: the core's geometries with what only the driver reports of them."""

from typing import Any

from fenka.core.mig.geometry import Geometry, Profile
from fenka.core.mig.tables import TABLES

_COPY = {
    "A100": (1, 1, 2, 3, 4, 7),
    "H100": (1, 1, 2, 3, 4, 8),
    "B200": (2, 2, 4, 6, 8, 16),
    "A30": (1, 1, 2, 2, 4, 4),
}
"""Copy engines of 1g, double memory, 2g, 3g, 4g, 7g."""
_DECODERS = {
    "A100": (0, 1, 1, 2, 2, 5),
    "H100": (1, 1, 2, 3, 4, 7),
    "B200": (1, 1, 2, 3, 4, 7),
    "A30": (0, 0, 2, 2, 4, 4),
}
"""Decoders in the same order."""
_COLUMNS = {1: 0, 2: 2, 3: 3, 4: 4, 7: 5}

_A100_CHOICE = {
    (1, 1): (6, 4, 5, 0, 1, 2, 3),
    (2, 2): (4, 0, 2),
    (1, 2): (4, 0, 2, 6),
    (3, 4): (4, 0),
}
"""The order in which the driver of an A100 chooses starts, by compute slices and size, as hardware showed."""
_H100_CHOICE = _A100_CHOICE | {(3, 4): (0, 4)}


def family(geometry: Geometry) -> str:
    """Return the model whose engines and choices a model shares."""
    model = geometry.model
    if geometry.compute == 4:
        return "A30"
    if model.startswith("A100"):
        return "A100"
    return "B200" if model.startswith(("B", "GB")) else "H100"


def engines(geometry: Geometry, profile: Profile) -> tuple[int, int, int, int, int]:
    """Return copy engines, decoders, encoders, JPEG and OFA engines."""
    kind = family(geometry)
    plain = min(each.size for each in geometry.profiles if each.compute == profile.compute)
    column = 1 if profile.size > plain else _COLUMNS[profile.compute]
    decoders = max(_DECODERS[kind][column], int(profile.exclusive))
    media = int(profile.exclusive or profile.compute == geometry.compute)
    jpeg = media if kind in ("A100", "A30") else decoders
    return (_COPY[kind][column], decoders, 0, jpeg, media)


def choice(geometry: Geometry, profile: Profile) -> tuple[int, ...]:
    """Return the starts in the order in which the driver chooses."""
    if geometry.compute == 4:
        return profile.starts
    known = _A100_CHOICE if family(geometry) == "A100" else _H100_CHOICE
    return known.get((profile.compute, profile.size), profile.starts)


def fill(target: Any, key: str, *, mirrored: bool) -> None:
    """Write a model's geometry into a card's part of the state file. key: of TABLES."""
    geometry = TABLES[key]
    target.profile_count = len(geometry.profiles)
    target.slices = geometry.compute
    target.axis = max(profile.size for profile in geometry.profiles)
    target.mirrored = mirrored
    target.keeps_mode = family(geometry) in ("A100", "A30") and key != "RTXPRO6000"
    for row, profile in zip(target.profiles, geometry.profiles, strict=False):
        row.name = profile.name.encode()
        row.kind, row.id = profile.enum, profile.profile_id
        row.slices, row.size, row.limit = profile.compute, profile.size, profile.limit
        row.sm_count, row.memory_mib = profile.sms, profile.memory_mib
        row.exclusive = profile.exclusive
        row.engines = engines(geometry, profile)
        row.start_count = len(profile.starts)
        row.starts[0 : len(profile.starts)] = list(profile.starts)
        row.choice[0 : len(profile.starts)] = list(choice(geometry, profile))
