"""The profiles of known card models, for simulation, for plans on paper and for tests.

A running card is described by NVML alone: names and sizes differ between drivers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fenka.core.mig.geometry import Geometry, Profile


@dataclass(frozen=True, slots=True)
class _Shape:
    """A profile without a model: its numbers in NVML, and its place on the memory axis.

    Attributes:
        kind: which of the model's sizes it has.
        attribute: `+me` and the like.
    """

    kind: str
    profile_id: int
    enum: int
    compute: int
    size: int
    starts: tuple[int, ...]
    limit: int
    attribute: str = ""


SEVEN_SLICES = (
    _Shape("1g", 19, 0, 1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
    _Shape("1g", 20, 7, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1, "+me"),
    _Shape("double", 15, 9, 1, 2, (0, 2, 4, 6), 4),
    _Shape("2g", 14, 1, 2, 2, (0, 2, 4), 3),
    _Shape("3g", 9, 2, 3, 4, (0, 4), 2),
    _Shape("4g", 5, 3, 4, 4, (0,), 1),
    _Shape("7g", 0, 4, 7, 8, (0,), 1),
)
FOUR_SLICES = (
    _Shape("1g", 14, 0, 1, 1, (0, 1, 2, 3), 4),
    _Shape("1g", 21, 7, 1, 1, (0, 1, 2, 3), 1, "+me"),
    _Shape("2g", 5, 1, 2, 2, (0, 2), 2),
    _Shape("2g", 6, 8, 2, 2, (0, 2), 1, "+me"),
    _Shape("4g", 0, 3, 4, 4, (0,), 1),
)
TWELVE_MEMORY_SLICES = (
    _Shape("1g", 14, 0, 1, 3, (0, 3, 6, 9), 4),
    _Shape("1g", 21, 7, 1, 3, (0, 3, 6, 9), 1, "+me"),
    _Shape("1g", 47, 10, 1, 3, (0, 3, 6, 9), 4, "+gfx"),
    _Shape("1g", 65, 15, 1, 3, (0, 3, 6, 9), 1, "+me.all"),
    _Shape("1g", 67, 13, 1, 3, (0, 3, 6, 9), 4, "-me"),
    _Shape("2g", 5, 1, 2, 6, (0, 6), 2),
    _Shape("2g", 35, 11, 2, 6, (0, 6), 2, "+gfx"),
    _Shape("2g", 64, 16, 2, 6, (0, 6), 1, "+me.all"),
    _Shape("2g", 66, 14, 2, 6, (0, 6), 2, "-me"),
    _Shape("4g", 0, 3, 4, 12, (0,), 1),
    _Shape("4g", 32, 12, 4, 12, (0,), 1, "+gfx"),
)
KINDS = ("1g", "double", "2g", "3g", "4g", "7g")


def _seven(model: str, sms: int, gigabytes: str, mib: Iterable[int], each: str) -> Geometry:
    sizes = dict(zip(KINDS, zip(gigabytes.split(), mib, each.split(), strict=True), strict=True))
    return _geometry(model, 7, sms, SEVEN_SLICES, sizes)


def _geometry(
    model: str,
    compute: int,
    sms: int,
    shapes: Iterable[_Shape],
    sizes: Mapping[str, tuple[str, int, str]],
) -> Geometry:
    profiles = []
    for shape in shapes:
        gigabytes, mib, multiprocessors = sizes[shape.kind]
        profiles.append(
            Profile(
                f"{shape.compute}g.{gigabytes}gb{shape.attribute}",
                *(shape.profile_id, shape.enum, shape.compute, shape.size),
                *(shape.starts, shape.limit, mib, int(multiprocessors)),
            )
        )
    return Geometry(model, compute, sms, tuple(profiles))


_A100, _H100, _B200 = "14 14 28 42 56 98", "16 26 32 60 64 132", "18 30 36 70 72 148"

TABLES: dict[str, Geometry] = {
    geometry.model: geometry
    for geometry in (
        _seven("A100-40G", 108, "5 10 10 20 20 40", (4864, 9984, 9984, 20096, 20096, 40320), _A100),
        _seven(
            "A100-80G", 108, "10 20 20 40 40 80", (9856, 19968, 19968, 40192, 40192, 80384), _A100
        ),
        _seven(
            "H100-80G", 132, "10 20 20 40 40 80", (9984, 20096, 20096, 40448, 40448, 81152), _H100
        ),
        _seven(
            "H200-141G",
            132,
            "18 35 35 71 71 141",
            (16384, 33024, 33024, 71168, 71168, 143104),
            _H100,
        ),
        _seven(
            "B200", 148, "23 45 45 90 90 180", (20992, 45312, 45312, 91136, 91136, 182784), _B200
        ),
        _seven(
            "H100-NVL",
            132,
            "12 24 24 47 47 94",
            (11008, 22144, 22144, 47488, 47488, 95360),
            _H100,
        ),
        # The sizes of the next two models are inferred.
        _seven(
            "H100-96G",
            132,
            "12 24 24 48 48 96",
            (11968, 24064, 24064, 48512, 48512, 97408),
            _H100,
        ),
        _seven(
            "GB200",
            152,
            "23 47 47 93 93 186",
            (22528, 46592, 46592, 93184, 93184, 187392),
            "18 32 38 74 76 152",
        ),
        _geometry(
            "RTXPRO6000",
            4,
            188,
            TWELVE_MEMORY_SLICES,
            {"1g": ("24", 24192, "46"), "2g": ("48", 48512, "94"), "4g": ("96", 97280, "188")},
        ),
        _geometry(
            "A30",
            4,
            56,
            FOUR_SLICES,
            {"1g": ("6", 5952, "14"), "2g": ("12", 11968, "28"), "4g": ("24", 24000, "56")},
        ),
    )
}
"""By the names that plans use."""
