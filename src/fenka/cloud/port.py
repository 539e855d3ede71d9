"""The port to a cloud: five methods, their promises, and their errors.

Which nodes and how many is the planner's decision. A provider only knows offers, and launches and ends what
it is told to. Every provider passes the same contract test (tests/cloud/contract.py).
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from fenka.cluster.autoscaling import CloudType
from fenka.core.errors import TEMPORARY_FAILURE, FenkaError
from fenka.core.nodes.case import Capacity

CLUSTER = "fenka.io/cluster"
"""The tag, or label, of this cluster's instances."""

TYPE_LABEL = "node.kubernetes.io/instance-type"

T = TypeVar("T")


def in_parts(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return a list in parts of limited length, such as one call may have."""
    return [items[start : start + most] for start in range(0, len(items), most)]


@dataclass(frozen=True, slots=True)
class OfferKey:
    """The name of an offer: an instance type of a group, in a zone, on demand or as spot."""

    group: str
    type: str
    zone: str
    capacity: Capacity

    def __str__(self) -> str:
        return f"{self.type} in {self.zone} ({self.capacity}) of group {self.group}"


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer as it is now.

    Attributes:
        price: per hour.
        stock: how many can be had, None if that is not known.
        until: the time up to which price and stock hold, None if that is not known.
        machine: what the cloud says of its type, None if it says nothing.
    """

    key: OfferKey
    price: float
    stock: int | None = None
    until: float | None = None
    machine: CloudType | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """So many nodes of one offer, asked for once.

    Attributes:
        token: the same token is the same order, however often it is launched. At most 64 characters.
        count: how many.
        whole: all of them or none.
        cap: the highest price of a spot node per hour, None for any.
    """

    token: str
    offer: OfferKey
    count: int
    whole: bool = False
    cap: float | None = None


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine with this cluster's tag.

    Attributes:
        id: the cloud's.
        provider_id: what its Node has as providerID, empty if that is not known yet.
        order: the token of its order, empty if it is of none.
    """

    id: str
    provider_id: str
    offer: OfferKey
    order: str
    state: InstanceState
    launched_at: float


@dataclass(frozen=True, slots=True)
class ReclaimNotice:
    """An instance will be taken back. at: the time."""

    instance: str
    at: float
    why: str


class Provider(Protocol):
    """A cloud. Every method may raise ProviderError."""

    async def offers(self) -> Sequence[Offer]:
        """Return all offers as they are now."""

    async def instances(self) -> Sequence[Instance]:
        """Return all instances of this cluster, also starting and ending ones; never a part of them."""

    async def launch(self, order: Order) -> Sequence[str]:
        """Ask for the nodes of an order. Return the ids that are known by now, perhaps none.

        The same token twice is one order. Fewer may come than are asked for, unless the order is `whole`.
        """

    async def end(self, ids: Collection[str]) -> None:
        """End instances. Those that are gone are no error; those without this cluster's tag stay."""

    async def notices(self) -> Sequence[ReclaimNotice]:
        """Return the take-backs that the cloud has announced for instances that are not gone."""


_PASSING = re.compile(
    r"\s*encoded authorization failure message: \S+"
    r"|\s*server string to sign is.*"
    r"|[\s,;]*\(?request ?id:? *[\w-]+\)?"
    r"| at 0x[0-9a-f]+"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b[0-9]{4}-?[0-9]{2}-?[0-9]{2}T[0-9]{2}:?[0-9]{2}:?[0-9]{2}[.0-9]*Z?",
    re.IGNORECASE | re.DOTALL,
)
"""Parts of a cloud's message that belong to one call alone: ids of requests, times, encoded details."""

MAX_MESSAGE = 1000
"""Characters of an error. Status, events and orders have it."""


class ProviderError(FenkaError):
    """A call failed; nothing was done, except for Unknown.

    The message is the same when the call fails again for the same reason: status, events and log change
    with it.
    """

    exit_code = TEMPORARY_FAILURE

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(_PASSING.sub("", message).split())[:MAX_MESSAGE])


class OutOfStock(ProviderError):
    """The cloud has none of the offer: back off from it, and plan again at once."""

    def __init__(self, offer: OfferKey) -> None:
        super().__init__(f"{offer} is out of stock")
        self.offer = offer


class TooDear(ProviderError):
    """The market's price is above the order's cap."""

    def __init__(self, offer: OfferKey, price: float, cap: float) -> None:
        super().__init__(f"{offer} costs {price:g} an hour, above the cap of {cap:g}")
        self.offer = offer


class Quota(ProviderError):
    """The account may have no more of this group."""

    def __init__(self, group: str) -> None:
        super().__init__(f"the account's quota allows no more nodes of group {group}")
        self.group = group


class Throttled(ProviderError):
    """Too many calls.

    Attributes:
        after_s: when to call again, by default where the cloud does not say so.
        spent: whether this is the cloud's answer to the order's token, which it repeats from now on. If not,
            an earlier call with this token may have launched something: the next one must have the same.
    """

    def __init__(self, after_s: float = 5, *, spent: bool = False) -> None:
        super().__init__(f"the cloud answers again in {after_s:.0f} s")
        self.after_s, self.spent = after_s, spent


class Denied(ProviderError):
    """The account may not do this: stop, and tell the operator."""


class NoOffer(Denied):
    """The configuration, or the cloud, has no such offer."""

    def __init__(self, offer: OfferKey) -> None:
        super().__init__(f"there is no offer {offer}")


class Unknown(ProviderError):
    """No answer, or none that says whether it was done: call again **with the same token**."""


@contextmanager
def after_the_deed() -> Iterator[None]:
    """Raise Unknown for every error of the block.

    It belongs to a launch that has done something already: another error would say that nothing was done,
    and the next call would have another token.
    """
    try:
        yield
    except ProviderError as why:
        raise Unknown(f"a part is done, then: {why}") from why
