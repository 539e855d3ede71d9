"""What a card model can be divided into. NVML reports it at run time; `tables.py` has it for simulation."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fenka.core.inventory import WHOLE_COMPUTE

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
class Place:
    """A profile at a start: what identifies an instance within a layout."""

    profile: Profile
    start: int

    @property
    def mask(self) -> int:
        """The slices of the memory axis, as bits."""
        return ((1 << self.profile.size) - 1) << self.start

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
    def places(self) -> tuple[Place, ...]:
        """Every profile at each of its starts."""
        return tuple(Place(each, start) for each in self.profiles for start in each.starts)

    def compute_percent(self, profile: Profile) -> int:
        """Return the compute of an instance in percent of the whole card, rounded down."""
        return WHOLE_COMPUTE * profile.sms // self.sms

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
    eighths = -(-memory_mib * 2**20 * 8 // total_bytes)
    total_gib = -(-total_bytes // 2**30)
    # Half of a gigabyte rounds up, as in Go.
    return f"{compute}g.{(eighths * total_gib * 2 + 8) // 16}gb{attribute}"
