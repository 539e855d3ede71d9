"""Rejections as data, and the one sentence that is made of them."""

from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from enum import StrEnum

from fenka.core.inventory import Node
from fenka.core.request import ANY_INSTANCE, Request


class ReasonCode(StrEnum):
    """Why a card, or a whole node, does not fit. The value is the wording in sentences."""

    MEMORY = "too little memory"
    COMPUTE = "too little compute"
    IN_USE = "in use"
    WHOLE = "taken whole"
    MODEL = "of another model"
    DIVIDED = "divided into instances"
    INSTANCE = "no such instance"
    UNHEALTHY = "unhealthy"
    CORDONED = "cordoned"
    RESERVED = "reserved for requests before it"
    TOO_FEW = "without enough others beside it"
    NOT_LINKED = "without NVLink to enough others"
    CPU = "too little CPU"
    HOST_MEMORY = "too little host memory"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one card does not fit, by itself or because of its node.

    Attributes:
        code: the reason.
        card: its index.
        needed: MiB for memory, percent for compute, thousandths of a core for CPU, cards for TOO_FEW and
            NOT_LINKED; else 0.
        available: in the same measure.
    """

    code: ReasonCode
    card: int
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class NodeRejection:
    """Why a node does not fit: one reason for each card, so that the counts add up."""

    node: str
    reasons: tuple[Reason, ...]


class Unschedulable:
    """No node fits. hint: what to request instead, if the request can never be satisfied."""

    def __init__(self, rejections: Iterable[NodeRejection] = (), hint: str = "") -> None:
        self._rejections, self.hint = tuple(rejections), hint

    @property
    def rejections(self) -> tuple[NodeRejection, ...]:
        """Return one for each node."""
        return self._rejections

    def __eq__(self, other: object) -> bool:
        """Compare reasons and hint."""
        return isinstance(other, Unschedulable) and (self.rejections, self.hint) == (
            other.rejections,
            other.hint,
        )

    def __hash__(self) -> int:
        return hash((self.rejections, self.hint))

    def with_hint(self, hint: str) -> "Unschedulable":
        """Return the same with another hint."""
        twin = copy(self)
        twin.hint = hint
        return twin

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return the reasons of all cards of all nodes."""
        return tuple(reason for rejection in self.rejections for reason in rejection.reasons)

    def counts(self) -> Counter[ReasonCode]:
        """Return how many cards have which reason."""
        return Counter(reason.code for reason in self.reasons)

    def sentence(self) -> str:
        """Return `no GPU fits: 5 of 8 have too little memory, 2 are cordoned`, then the hint."""
        text = counts_sentence(self.counts())
        return f"{text}; {self.hint}" if self.hint else text


def counts_sentence(counts: Counter[ReasonCode]) -> str:
    """Return `no GPU fits: 5 of 8 have too little memory, 2 are cordoned, 1 is unhealthy`."""
    total = sum(counts.values())
    if not total:
        return "there is no GPU"
    (first, most), *others = _by_count(counts)
    listed = [f"{most} of {total} {_verb(first, most)} {first.value}"]
    listed += [f"{count} {_verb(code, count)} {code.value}" for code, count in others]
    return f"no GPU fits: {', '.join(listed)}"


_HAVE = frozenset(
    (
        ReasonCode.MEMORY,
        ReasonCode.COMPUTE,
        ReasonCode.INSTANCE,
        ReasonCode.CPU,
        ReasonCode.HOST_MEMORY,
    )
)
"""Reasons that a card has. It is the others."""


def _verb(code: ReasonCode, count: int) -> str:
    if code in _HAVE:
        return "has" if count == 1 else "have"
    return "is" if count == 1 else "are"


def main_reason(counts: Counter[ReasonCode]) -> ReasonCode | None:
    """Return the reason that the sentence names first; None if there is no card."""
    return next((code for code, _ in _by_count(counts)), None)


def _by_count(counts: Counter[ReasonCode]) -> list[tuple[ReasonCode, int]]:
    """Return the most frequent first, equal counts in the order of declaration."""
    return sorted(counts.items(), key=lambda item: (-item[1], _ORDER[item[0]]))


_ORDER = {code: position for position, code in enumerate(ReasonCode)}


def _fewer_cards(_: Request, most: int) -> str:
    return f"ask for fewer cards, no node has more than {most} that fit"


def _fewer_linked(_: Request, most: int) -> str:
    if not most:
        return "no node is known to have cards with NVLink, leave out the required topology"
    return f"NVLink connects no more than {most} cards that fit, ask for fewer"


def _less_host_memory(_: Request, most: int) -> str:
    return f"the largest node has {most} MiB of host memory, ask for no more"


def _less_cpu(_: Request, most: int) -> str:
    return f"the largest node has {most / 1000:g} CPU cores, ask for no more"


def _less_compute(_: Request, most: int) -> str:
    return f"no card gives more than {most} percent of compute, ask for no more"


def _instance(_: Request, __: int) -> str:
    return "ask for an instance with --mig, or for a slice inside one with --inside mig"


def _other_profile(request: Request, _: int) -> str:
    if request.instance == ANY_INSTANCE:
        return "no card here is divided into instances"
    return f"no card here can be divided into {request.instance}, ask for another profile"


def _less_memory(request: Request, most: int) -> str:
    if most == 0:
        return "no card here has a whole unit of memory"
    size = "MiB" if request.memory and request.memory.unit_mib == 1 else "units"
    return f"the largest card has {most} {size}, ask for no more"


_HINTS: tuple[tuple[ReasonCode, Callable[[Request, int], str]], ...] = (
    (ReasonCode.NOT_LINKED, _fewer_linked),
    (ReasonCode.TOO_FEW, _fewer_cards),
    (ReasonCode.HOST_MEMORY, _less_host_memory),
    (ReasonCode.CPU, _less_cpu),
    (ReasonCode.COMPUTE, _less_compute),
    (ReasonCode.MEMORY, _less_memory),
    (ReasonCode.DIVIDED, _instance),
    (ReasonCode.INSTANCE, _other_profile),
)
"""The nearest miss first: a card that failed late needs the smallest change of the request."""


def hint(request: Request, rejections: Iterable[NodeRejection], nodes: Iterable[Node]) -> str:
    """Return what to request instead, from the rejections of these nodes when nothing is allocated."""
    by_name = {node.name: node for node in nodes}
    most: dict[ReasonCode, int] = {}
    for rejection in rejections:
        unit_mib = (request.memory and request.memory.unit_mib) or by_name[rejection.node].unit_mib
        for reason in rejection.reasons:
            available = reason.available
            if reason.code is ReasonCode.MEMORY:
                available //= unit_mib
            most[reason.code] = max(available, most.get(reason.code, 0))
    unsized = sorted(
        {card.model for node in by_name.values() for card in node.cards if not card.memory_mib}
    )
    if unsized and most.get(ReasonCode.MEMORY) == 0:
        return (
            f"the driver reports no memory of {', '.join(unsized)}, so the size must be configured: on a "
            "workstation with `fenka daemon --card-memory 96GiB`"
        )
    for code, sentence in _HINTS:
        if code in most:
            return sentence(request, most[code])
    models = sorted({card.model for node in by_name.values() for card in node.cards})
    return f"the models here are {', '.join(models)}" if ReasonCode.MODEL in most else ""
