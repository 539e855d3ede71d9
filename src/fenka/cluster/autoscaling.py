"""Names and records that the autoscaler shares with the scheduler, the node program and the screens.

fenka.io/group, /capacity, /order   labels of a node that was bought
fenka.io/slot, /pin                 annotations of it: which node of its order it is, and for how long its
                                    planned pods alone are admitted once it offers its cards, in seconds
fenka.io/planned-pods               annotation of it: {"UID": [0, 2]}, its planned pods and the cards of each.
                                    It is written in one patch with the label fenka.io/order
fenka.io/spot-admit, /protected-until
                                    annotations of a spot node: `marked` or `all`, which pods it admits, and
                                    when the cloud may take it back, RFC 3339
fenka.io/planned                    annotation of a pod, for people: {"order": "t4-a-17", "slot": 0}. Its
                                    owner may change it, so nothing is decided by it
ConfigMap fenka-orders              one key for each order, an `OrderRecord`
ConfigMap fenka-autoscaler          key `status`, a `Status`: what the leader last did and why
ConfigMap fenka-shapes              what nodes of each type were when they came
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Literal

import msgspec
from msgspec.json import Decoder

from fenka.cluster.objects import Node
from fenka.core.nodes.case import Capacity
from fenka.dialects import card_records
from fenka.dialects.base import InvalidRecord

GROUP = "fenka.io/group"
CAPACITY = "fenka.io/capacity"
ORDER = "fenka.io/order"
SLOT = "fenka.io/slot"
PIN = "fenka.io/pin"
PLANNED = "fenka.io/planned"
PLANNED_PODS = "fenka.io/planned-pods"
SPOT_ADMIT = "fenka.io/spot-admit"
PROTECTED_UNTIL = "fenka.io/protected-until"
INTERRUPTIBLE = "fenka.io/interruptible"
"""Annotation of a pod that may run on spot nodes: "true"."""
KEEP = "fenka.io/keep"
"""Label or annotation of a node that never ends by itself: "true"."""
RECLAIM_AT = "fenka.io/reclaim-at"
"""Annotation of a spot node: when it is taken back, RFC 3339."""
RECLAIM_SOURCE = "fenka.io/reclaim-source"
"""Annotation beside it: which metadata service said so. Without it a person wrote the time."""
ENDING = "fenka.io/ending"
"""Key of the taint of a node that is about to end."""
RECLAIMED = "fenka.io/reclaimed"
"""Key of the taint of a node that is being taken back."""

KEPT_FROM_OTHERS = {
    "cluster-autoscaler.kubernetes.io/scale-down-disabled": "true",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations by which other autoscalers leave a node alone: a group has one owner."""

ORDERS_MAP, SHAPES_MAP, STATUS_MAP = "fenka-orders", "fenka-shapes", "fenka-autoscaler"
STATUS_KEY = "status"

OrderState = Literal["written", "asked", "known", "joined", "offering", "ending", "gone", "failed"]


Failure = Literal["out of stock", "too dear", "quota", "denied", "never joined", "taken back"]
"""Why an offer is not tried again at once."""


class Planned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For which node of which order a pod is planned."""

    order: str
    slot: int


class Slot(msgspec.Struct, frozen=True):
    """A node of an order, before and after it has a name.

    Attributes:
        instance: the cloud's id, empty until it is known.
        node: its Node, empty until it has joined.
        pods: UIDs of the pods that are planned for it.
        cards: the indices of the cards that each of these pods was planned on.
        offering_at: when its node was seen to offer its cards first.
    """

    state: OrderState = "written"
    instance: str = ""
    node: str = ""
    pods: tuple[str, ...] = ()
    cards: tuple[tuple[int, ...], ...] = ()
    offering_at: float | None = None


class OrderRecord(msgspec.Struct, frozen=True):
    """An order, written before anything is asked for. Its name is its key in the ConfigMap.

    Times are Unix times.

    Attributes:
        group: with type, zone and capacity, the offer.
        whole: all of its nodes or none.
        cap: the highest price of a spot node.
        price: of a node per hour when it was planned.
        attempt: a part of the token; it changes only after a definite no.
        failure: for `failed`: what its offer is backed off for; the record stays until that is over.
        why: the same as a sentence.
    """

    group: str
    type: str
    zone: str
    capacity: Capacity
    slots: tuple[Slot, ...]
    state: OrderState
    price: float
    written_at: float
    asked_at: float | None = None
    changed_at: float | None = None
    whole: bool = False
    cap: float | None = None
    attempt: int = 0
    failure: Failure | None = None
    why: str = ""


class CloudType(msgspec.Struct, frozen=True, kw_only=True):
    """A cloud's figures of an instance type.

    Attributes:
        name: of the type.
        cpu_milli: of the machine.
        memory_mib: of the machine.
        cards: how many.
        model: of its cards, in the cloud's words, such as "T4" or "NVIDIA V100".
        card_mib: of each card, rounded as clouds do.
    """

    name: str
    cpu_milli: int
    memory_mib: int
    cards: int = 0
    model: str = ""
    card_mib: int = 0


class OfferStatus(msgspec.Struct, frozen=True):
    """An offer as `fenka groups` shows it.

    Attributes:
        state: `ok`, or a few words such as `out of stock`.
        again_at: when it is tried again, None if it is not backed off.
        cards: of one node, None if its shape is not known.
        machine: what the cloud says of its type, None if it says nothing.
    """

    group: str
    type: str
    zone: str
    capacity: Capacity
    price: float
    cap: float | None
    nodes: int
    starting: int
    max: int
    state: str = "ok"
    again_at: float | None = None
    cards: int | None = None
    machine: CloudType | None = None


class ElasticNodeStatus(msgspec.Struct, frozen=True):
    """A node that was bought.

    Attributes:
        state: `in use`, `idle`, `starting`, `ending`, `taken back` or `kept: WHY`.
        since: of the state.
        until: when it ends, or is taken back; None if neither is planned.
        protected_until: of a spot node, None if it is not protected.
    """

    group: str
    state: str
    since: float
    until: float | None = None
    protected_until: float | None = None


class AutoscalerStatus(msgspec.Struct, frozen=True):
    """The status that the autoscaler's leader publishes whenever it changes.

    Attributes:
        nodes: by their names.
        unserved: pods as `NAMESPACE/NAME`, by the sentence that says why no node is bought for them.
        schedulers: the schedulerNames of the pods that nodes are bought for, none for all.
    """

    offers: tuple[OfferStatus, ...] = ()
    nodes: dict[str, ElasticNodeStatus] = {}
    unserved: dict[str, list[str]] = {}
    schedulers: tuple[str, ...] = ()


_ORDER, _STATUS = Decoder(OrderRecord), Decoder(AutoscalerStatus)
_PLANNED_PODS = Decoder(dict[str, tuple[card_records.CardIndex, ...]])


def encode_planned_pods(uids: Sequence[str], cards: Sequence[tuple[int, ...]] = ()) -> str:
    """Return the annotation of a node for which these pods are planned.

    cards: the indices of the cards of each pod; none for any cards.
    """
    return card_records.encode(dict(sorted(zip_longest(uids, cards[: len(uids)], fillvalue=()))))


def decode_planned_pods(text: str) -> dict[str, tuple[card_records.CardIndex, ...]]:
    """Read a node's annotation: the cards of each planned pod, by UID. Raises InvalidRecord."""
    return card_records.decode(text, _PLANNED_PODS, f"annotation {PLANNED_PODS}")


def decode_order(name: str, text: str) -> OrderRecord:
    """Read an order of the ConfigMap. Raises InvalidRecord."""
    return card_records.decode(text, _ORDER, f"order {name} of ConfigMap {ORDERS_MAP}")


def decode_status(text: str) -> AutoscalerStatus:
    """Read what the leader published. Raises InvalidRecord."""
    return card_records.decode(text, _STATUS, f"ConfigMap {STATUS_MAP}")


def node_prices(
    nodes: Iterable[Node], status: AutoscalerStatus, orders: Mapping[str, OrderRecord]
) -> dict[str, float]:
    """Return what an hour of each node costs that was bought, by its name, as far as it is known.

    On demand it costs what it was ordered for. Clouds bill spot nodes by the market, so they cost what their
    offer does now.
    """
    offers = {
        (offer.group, offer.type, offer.zone, offer.capacity): offer.price
        for offer in status.offers
    }
    prices: dict[str, float] = {}
    for node in nodes:
        labels = node.metadata.labels
        order = orders.get(labels.get(ORDER, ""))
        if not labels.get(GROUP) or order is None:
            continue
        market = offers.get((order.group, order.type, order.zone, order.capacity), 0.0)
        ordered = (order.price, market)
        known = [*filter(None, reversed(ordered) if order.capacity == "spot" else ordered)]
        # Without a price in the configuration, and without an offer, it is 0.
        prices |= {node.metadata.name: known[0]} if known else {}
    return prices


_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})",
    re.A,
)


def decode_time(text: str) -> float:
    """Return a time of RFC 3339 in seconds since 1970. Raises InvalidRecord."""
    if _TIME.fullmatch(text):
        with contextlib.suppress(ValueError, OverflowError):
            return datetime.fromisoformat(text).timestamp()
    raise InvalidRecord(f"{text[:60]!r} is no time: write it as 2026-01-31T18:02:00Z")


def encode_time(at: float) -> str:
    """Return seconds since 1970 as a time of RFC 3339 in UTC, without fractions."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
