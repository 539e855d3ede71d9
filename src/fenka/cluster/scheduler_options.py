"""The options by which a scheduler decides, as the leader publishes them on its Lease."""

from dataclasses import dataclass, field

from msgspec.json import Decoder

from fenka.core.evaluate import SCORES, Policy
from fenka.core.fairness import Fairness
from fenka.dialects import records
from fenka.dialects.base import Dialect
from fenka.dialects.registry import DIALECTS, WITH_HAMI

ANNOTATION = "fenka.io/options"
"""Annotation of the Lease."""

LABEL = "fenka.io/component=scheduler"
"""Label of the Lease, by which readers find it in any namespace."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What other programs need to order and place pods as the scheduler does. Raises ValueError.

    Attributes:
        hami: whether HAMi's names are read.
        fairness: what orders pods of one priority.
    """

    policy: Policy = "binpack"
    hami: bool = False
    fairness: Fairness = field(default_factory=Fairness)

    def __post_init__(self) -> None:
        if self.policy not in SCORES:
            raise ValueError(f"there is no policy {self.policy}")

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """Return the dialects that the scheduler reads."""
        return WITH_HAMI if self.hami else DIALECTS

    def encode(self) -> str:
        """Return the annotation."""
        return records.encode(self)


def decode(text: str) -> SchedulerOptions:
    """Read the annotation; fields of newer versions are ignored. Raises InvalidRecord."""
    return records.decode(text, Decoder(SchedulerOptions), f"annotation {ANNOTATION} of the Lease")
