"""Requests, and the slices and placements that they become."""

from typing import Literal, NamedTuple, Self, get_args

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card, DeviceId, InstanceId, Node, card_of, value_class
from fenka.core.units import card_units, units_to_mib

ComputeMode = Literal["hard", "soft", "weight"]
"""hard: at most the share. soft: the share, and idle time. weight: no limit, but a proportion if several
programs use the card. In the order of the constants ``FENKA_COMPUTE_…``."""

COMPUTE_MODES: tuple[ComputeMode, ...] = get_args(ComputeMode)

ANY_INSTANCE = "mig"
"""The value of `Request.instance` for an instance of any profile."""

MAX_MEMORY_MIB = 16 * 1024 * 1024
"""16 TiB: no card comes near it, so a larger number is a mistake."""

MAX_CARDS = 1024

MAX_HOST = 1 << 50
"""Thousandths of a core, or MiB of host memory: no host comes near it."""


def reserved_percent(percent: int, mode: ComputeMode) -> int:
    """Return the part of a compute share that is reserved: hard and soft shares are guaranteed, weights not.

    So weights may overcommit a card, and the shares that are guaranteed on it add up to 100 at most.
    """
    return 0 if mode == "weight" else percent


class InvalidRequest(FenkaError):
    """The request is impossible; the message says what to request instead."""

    exit_code = INVALID_INPUT


@value_class(frozen=True, slots=True)
class Memory:
    """An amount of card memory: `amount` units of `unit_mib`: 1 for exact MiB, None for the node's units.

    Raises:
        InvalidRequest: for an amount that no card can have.
    """

    amount: int
    unit_mib: int | None = 1

    def __post_init__(self) -> None:
        if self.amount <= 0:
            raise InvalidRequest(f"GPU memory must be more than nothing, not {self.amount}")
        if self.unit_mib is not None and self.unit_mib <= 0:
            raise InvalidRequest(f"a unit of GPU memory must be 1 MiB or more, not {self.unit_mib}")
        if self.nominal_mib(1) > MAX_MEMORY_MIB:
            raise InvalidRequest(
                f"{self.nominal_mib(1)} MiB of GPU memory is more than any card has"
            )

    def nominal_mib(self, node_unit_mib: int) -> int:
        """Return units times unit in MiB; `mib_on` gives more if a card's MiB are no multiple of the unit."""
        return self.amount * (self.unit_mib or node_unit_mib)

    def mib_on(self, card_mib: int, node_unit_mib: int) -> int | None:
        """Return the MiB on a card of this size; None if the card has fewer units."""
        unit_mib = self.unit_mib or node_unit_mib
        if self.amount > card_units(card_mib, unit_mib):
            return None
        return units_to_mib(self.amount, card_mib, unit_mib)


@value_class(frozen=True, slots=True)
class PercentOfCard(Memory):
    """`amount` percent of the card's memory, rounded down."""

    def mib_on(self, card_mib: int, node_unit_mib: int) -> int | None:  # noqa: ARG002
        """Return the MiB on a card of this size, at least 1."""
        return max(card_mib * self.amount // 100, 1) if self.amount <= 100 else None


@value_class(frozen=True, slots=True)
class Request:
    """Slices of equal size on `cards` different cards of one node, or whole cards; or its host alone.

    Attributes:
        memory: per card; None for a request of compute alone, and for whole cards.
        compute: percent per card; 0 for no share of its own.
        cards: the number of cards; 0 for CPU or memory of a host alone.
        whole: whether it is for whole cards.
        models: names of acceptable models, empty for any.
        instance: the MIG profile of the instances that it is for, or ANY_INSTANCE; empty for cards.
        linked: whether each two of its cards must be connected by NVLink.
        near: whether nodes are compared by how their cards are connected, before the policy.
        cpu_milli: CPU of the node, in thousandths of a core.
        host_memory_mib: memory of the node.

    Raises:
        InvalidRequest: if no node could ever satisfy it.
    """

    memory: Memory | None = None
    compute: int = 0
    cards: int = 1
    whole: bool = False
    models: frozenset[str] = frozenset()
    cpu_milli: int = 0
    host_memory_mib: int = 0
    instance: str = ""
    linked: bool = False
    near: bool = False

    def __post_init__(self) -> None:
        if not self.of_host_alone and not 1 <= self.cards <= MAX_CARDS:
            raise InvalidRequest(f"the number of cards must be 1 to {MAX_CARDS}, not {self.cards}")
        if not 0 <= self.compute <= 100:
            raise InvalidRequest(
                f"compute is a percentage of one card, 0 to 100, not {self.compute}"
            )
        if self.cpu_milli < 0 or self.host_memory_mib < 0:
            raise InvalidRequest("CPU and host memory cannot be negative")
        if self.cpu_milli > MAX_HOST or self.host_memory_mib > MAX_HOST:
            raise InvalidRequest("no host has so much CPU or memory: ask for less")
        if self.whole and (self.memory is not None or self.compute):
            raise InvalidRequest(
                "a whole card comes with all its memory and compute: ask for neither"
            )
        if self.cards and not self.whole and self.memory is None and not self.compute:
            raise InvalidRequest("ask for GPU memory, for compute, or for whole cards")
        if self.linked and self.instance:
            raise InvalidRequest("MIG instances have no NVLink: leave out the required topology")

    @property
    def by_links(self) -> bool:
        """Whether its cards are chosen by their connections. Instances do not use NVLink."""
        return self.cards > 1 and not self.instance

    @property
    def of_one_card(self) -> bool:
        """Whether it is for a part of one card, so that the choice of the card matters to policies."""
        return self.cards == 1 and not self.whole

    @property
    def of_host_alone(self) -> bool:
        """Whether it is for CPU or memory of a host, beside its cards."""
        of_cards = self.cards or self.whole or self.memory is not None or self.compute
        return not of_cards and bool(self.cpu_milli or self.host_memory_mib)

    def is_for(self, profile: str, *, divided: bool) -> bool:
        """Return whether it is for instances of this profile; for an empty one, for cards."""
        if divided:
            return False
        return self.instance in (ANY_INSTANCE, profile) if profile else not self.instance


@value_class(frozen=True, slots=True)
class Slice:
    """One container's slice of one card: memory in MiB, compute in percent. card: its index, for people."""

    card: int
    uuid: DeviceId
    memory_mib: int
    compute: int

    @property
    def instance(self) -> InstanceId | None:
        """Its instance; None if it is a slice of a card."""
        return InstanceId.parse(self.uuid)

    @property
    def card_uuid(self) -> DeviceId:
        """The id of its card, or of the card that its instance is on."""
        return card_of(self.uuid)


@value_class(frozen=True, slots=True)
class Placement:
    """Slices on cards of one node, with CPU and memory of its host."""

    node: str
    slices: tuple[Slice, ...]
    cpu_milli: int = 0
    host_memory_mib: int = 0
    whole: bool = False


NEVER = 1 << 60
"""More than any card or host has."""


class CardClass(NamedTuple):
    """The properties of cards that a request is compared with, apart from usage and health. A cluster has few
    classes."""

    memory_mib: int
    unit_mib: int
    compute: int
    model: str
    profile: str = ""
    divided: bool = False
    drawn_mib: int = 0

    @classmethod
    def of(cls, node: Node, card: Card) -> Self:
        """Return the class of a card of this node."""
        return cls(
            *(card.memory_mib, node.unit_mib, card.compute, card.model),
            *(card.profile, card.divided, card.drawn_mib),
        )

    def needs(self, request: Request) -> tuple[int, int, bool, bool]:
        """Return memory, compute, and whether model and kind are others: the definition decides.

        The memory is NEVER for a card with too few units.
        """
        memory: int | None = max(self.memory_mib - self.drawn_mib, 0) if request.whole else 0
        if request.memory is not None:
            memory = request.memory.mib_on(self.memory_mib, self.unit_mib)
        return (
            NEVER if memory is None else memory,
            self.compute if request.whole else request.compute,
            bool(request.models) and self.model not in request.models,
            not request.is_for(self.profile, divided=self.divided),
        )
