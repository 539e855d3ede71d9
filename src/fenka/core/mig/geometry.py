"""A card model's MIG profiles and their places, with tables of the known models.

NVML reports it at run time, where names and sizes differ between drivers. The tables are for simulation, for
plans on paper and for tests.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fenka.core.inventory import WHOLE_COMPUTE, DeviceId, InstanceId
from fenka.core.units import MIB

EXCLUSIVE = ("me", "me.all")
"""Attributes of profiles with media engines, of which a card has only one set."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of GPU instance.

    Attributes:
        name: as NVML prints it, without "MIG ": `1g.5gb`, `1g.5gb+me`.
        profile_id: the number that nvidia-smi shows and takes.
        enum: NVML's GPU instance profile, the argument of nvmlDeviceGetGpuInstanceProfileInfo.
        compute: compute slices.
        size: slices of the memory axis.
        starts: where an instance may begin on the memory axis, ascending.
        limit: how many a card can have.
        memory_mib: the memory of an instance.
        sms: the multiprocessors of its largest compute instance.
    """

    name: str
    profile_id: int
    enum: int
    compute: int
    size: int
    starts: tuple[int, ...]
    limit: int
    memory_mib: int
    sms: int

    def __hash__(self) -> int:
        # Layouts are looked up thousands of times a second, and the names of a card's profiles differ.
        return hash(self.name)

    @property
    def plain(self) -> bool:
        """Whether the profile has no attribute."""
        return "+" not in self.name and "-" not in self.name

    @property
    def exclusive(self) -> bool:
        """Whether a card has at most one instance of this and all other exclusive profiles."""
        return self.name.partition("+")[2] in EXCLUSIVE


@dataclass(frozen=True, slots=True)
class SliceSize:
    """The size of a part of an instance: MiB, and percent of the whole card's compute."""

    memory_mib: int
    compute: int = 0

    def holds(self, other: "SliceSize") -> bool:
        """Return whether the other one is not larger in any respect."""
        return self.memory_mib >= other.memory_mib and self.compute >= other.compute

    def less(self, other: "SliceSize") -> "SliceSize":
        """Return what remains beside the other one."""
        return SliceSize(self.memory_mib - other.memory_mib, self.compute - other.compute)


@dataclass(frozen=True, slots=True)
class Place:
    """A profile at a start: what identifies an instance within a layout."""

    profile: Profile
    start: int

    @property
    def mask(self) -> int:
        """The slices of the memory axis, as bits."""
        return ((1 << self.profile.size) - 1) << self.start

    def on(self, card: DeviceId) -> InstanceId:
        """Return the id of an instance at this place of a card."""
        return InstanceId(card, self.start, self.profile.name)

    def name(self, index: int) -> str:
        """Return what people call an instance at this place. index: of its card."""
        return f"{index}/{self.start} {self.profile.name}"

    def __str__(self) -> str:
        return f"{self.profile.name} at {self.start}"


@dataclass(frozen=True)
class Geometry:
    """All profiles of a card model.

    Attributes:
        model: what people call it, "A100-40G".
        compute: compute slices of the card.
        sms: its multiprocessors.
        profiles: in NVML's order.
    """

    model: str
    compute: int
    sms: int
    profiles: tuple[Profile, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.compute, self.sms, self.profiles))

    @cached_property
    def by_name(self) -> dict[str, Profile]:
        """The profiles by name."""
        return {profile.name: profile for profile in self.profiles}

    @cached_property
    def axis(self) -> int:
        """The slices of the card's memory axis."""
        return max(profile.size for profile in self.profiles)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every profile at each of its starts."""
        return tuple(Place(profile, start) for profile in self.profiles for start in profile.starts)

    def place_of(self, instance: InstanceId) -> Place | None:
        """Return the place of an instance; None if the card cannot have it."""
        profile = self.by_name.get(instance.profile)
        return (
            Place(profile, instance.start) if profile and instance.start in profile.starts else None
        )

    def compute_percent(self, profile: Profile) -> int:
        """Return the compute of an instance in percent of the whole card, rounded down."""
        return WHOLE_COMPUTE * profile.sms // self.sms

    def largest_slice(self, profile: Profile) -> SliceSize:
        """Return what the slices in an instance of this profile can have together."""
        return SliceSize(profile.memory_mib, self.compute_percent(profile))

    def conflict(self, layout: Iterable[Place], place: Place) -> str:
        """Return why a place cannot be added to a legal layout, or an empty string if it can."""
        present = list(layout)
        for other in present:
            if other.mask & place.mask:
                return f"it overlaps {other}"
            if place.profile.exclusive and other.profile.exclusive:
                return f"a card has the media engines of {other} only once"
        same = sum(other.profile == place.profile for other in present)
        if same >= place.profile.limit:
            return f"a card has at most {place.profile.limit} of this profile"
        if sum(other.profile.compute for other in present) + place.profile.compute > self.compute:
            return f"a card has only {self.compute} compute slices"
        return ""


def profile_name(compute: int, memory_mib: int, total_bytes: int, attribute: str = "") -> str:
    """Return a profile's name as NVIDIA's programs compute it from NVML's figures.

    Args:
        compute: compute slices.
        memory_mib: the memory of an instance.
        total_bytes: the memory of the card.
        attribute: `+me` and the like.
    """
    eighths = -(-memory_mib * MIB * 8 // total_bytes)
    total_gib = -(-total_bytes // 2**30)
    # Half of a gigabyte rounds up, as in Go.
    return f"{compute}g.{(eighths * total_gib * 2 + 8) // 16}gb{attribute}"


@dataclass(frozen=True, slots=True)
class _ProfileShape:
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
    _ProfileShape("1g", 19, 0, 1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
    _ProfileShape("1g", 20, 7, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1, "+me"),
    _ProfileShape("double", 15, 9, 1, 2, (0, 2, 4, 6), 4),
    _ProfileShape("2g", 14, 1, 2, 2, (0, 2, 4), 3),
    _ProfileShape("3g", 9, 2, 3, 4, (0, 4), 2),
    _ProfileShape("4g", 5, 3, 4, 4, (0,), 1),
    _ProfileShape("7g", 0, 4, 7, 8, (0,), 1),
)
FOUR_SLICES = (
    _ProfileShape("1g", 14, 0, 1, 1, (0, 1, 2, 3), 4),
    _ProfileShape("1g", 21, 7, 1, 1, (0, 1, 2, 3), 1, "+me"),
    _ProfileShape("2g", 5, 1, 2, 2, (0, 2), 2),
    _ProfileShape("2g", 6, 8, 2, 2, (0, 2), 1, "+me"),
    _ProfileShape("4g", 0, 3, 4, 4, (0,), 1),
)
TWELVE_MEMORY_SLICES = (
    _ProfileShape("1g", 14, 0, 1, 3, (0, 3, 6, 9), 4),
    _ProfileShape("1g", 21, 7, 1, 3, (0, 3, 6, 9), 1, "+me"),
    _ProfileShape("1g", 47, 10, 1, 3, (0, 3, 6, 9), 4, "+gfx"),
    _ProfileShape("1g", 65, 15, 1, 3, (0, 3, 6, 9), 1, "+me.all"),
    _ProfileShape("1g", 67, 13, 1, 3, (0, 3, 6, 9), 4, "-me"),
    _ProfileShape("2g", 5, 1, 2, 6, (0, 6), 2),
    _ProfileShape("2g", 35, 11, 2, 6, (0, 6), 2, "+gfx"),
    _ProfileShape("2g", 64, 16, 2, 6, (0, 6), 1, "+me.all"),
    _ProfileShape("2g", 66, 14, 2, 6, (0, 6), 2, "-me"),
    _ProfileShape("4g", 0, 3, 4, 12, (0,), 1),
    _ProfileShape("4g", 32, 12, 4, 12, (0,), 1, "+gfx"),
)
KINDS = ("1g", "double", "2g", "3g", "4g", "7g")


def _seven(
    model: str, sms: int, gigabytes: str, mib: Iterable[int], multiprocessors: str
) -> Geometry:
    columns = zip(gigabytes.split(), mib, multiprocessors.split(), strict=True)
    sizes = dict(zip(KINDS, columns, strict=True))
    return _geometry(model, 7, sms, SEVEN_SLICES, sizes)


def _geometry(
    model: str,
    compute: int,
    sms: int,
    shapes: Iterable[_ProfileShape],
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
