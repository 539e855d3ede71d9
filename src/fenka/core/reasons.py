"""A "no" as data, and the one sentence that is made of it."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Why(StrEnum):
    """Why a card, or a whole node, does not fit. The value is the sentence's wording."""

    MEMORY = "too little memory"
    COMPUTE = "too little compute"
    IN_USE = "in use"
    WHOLE = "taken whole"
    MODEL = "another model"
    UNHEALTHY = "unhealthy"
    CORDONED = "cordoned"
    RESERVED = "reserved for requests that waited longer"
    TOO_FEW = "fits, but too few others do"
    CPU = "too little CPU"
    HOST_MEMORY = "too little host memory"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one card does not fit; `needed` and `available` in the reason's own measure, else 0."""

    why: Why
    card: int
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a node does not fit: one reason a card, so that the counts add up."""

    node: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """No node fits. `hint` says what would, where that is known."""

    rejections: tuple[Rejection, ...]
    hint: str = ""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Of all cards of all nodes."""
        return tuple(reason for rejection in self.rejections for reason in rejection.reasons)

    def sentence(self) -> str:
        """`0/8 GPUs fit: 5 too little memory, 2 cordoned, 1 unhealthy`, then the hint."""
        counts = Counter(reason.why for reason in self.reasons)
        total = sum(counts.values())
        # Most frequent first; equals in the order in which the reasons are declared.
        order = {why: place for place, why in enumerate(Why)}
        parts = sorted(counts.items(), key=lambda item: (-item[1], order[item[0]]))
        listed = ", ".join(f"{count} {why.value}" for why, count in parts)
        text = f"0/{total} GPUs fit: {listed}" if total else "there is no GPU"
        return f"{text}; {self.hint}" if self.hint else text
