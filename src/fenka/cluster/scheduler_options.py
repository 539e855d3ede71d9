"""The options by which a scheduler decides, as the leader publishes them on its Lease."""

from dataclasses import dataclass, field

import msgspec

from fenka.core.evaluate import Policy
from fenka.core.fairness import Fairness
from fenka.dialects.base import Dialect, InvalidRecord
from fenka.dialects.registry import DIALECTS, WITH_HAMI

ANNOTATION = "fenka.io/options"
"""Annotation of the Lease."""

LABEL = "fenka.io/component=scheduler"
"""Label of the Lease, by which readers find it in any namespace."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What other programs need to order and place pods as the scheduler does.

    Attributes:
        hami: whether HAMi's names are read.
        fairness: what orders pods of one priority.
    """

    policy: Policy = "binpack"
    hami: bool = False
    fairness: Fairness = field(default_factory=Fairness)

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """Return the dialects that the scheduler reads."""
        return WITH_HAMI if self.hami else DIALECTS

    def encode(self) -> str:
        """Return the annotation."""
        return msgspec.json.encode(self).decode()


def decode(text: str) -> SchedulerOptions:
    """Read the annotation; fields of newer versions are ignored. Raises InvalidRecord."""
    try:
        return msgspec.json.decode(text, type=SchedulerOptions)
    except msgspec.MsgspecError as error:
        raise InvalidRecord(f"annotation {ANNOTATION} of the lease: {error}") from None
