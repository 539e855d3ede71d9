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

Pins: which pods alone a node admits that was bought for them.

The autoscaler plans exactly which pod goes to which card of which new node. The first pod that asks could
take the place of a pod that fits nowhere else, or a card so that the others do not fit together. So for a
short time after the node offers its cards, it admits only the pods that are planned for it, and these go
there, to their planned cards. They are named by UID on the node, where tenants cannot write. Annotations that
a tenant writes on his own pods change nothing here.

Spot nodes: which pods they admit, because the cloud takes them back. Pure: time comes in by `set_time`.

The autoscaler buys them only for pods that may run there. Without this rule any other pod could be placed on
one that is there, and would be lost with it.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import zip_longest
from math import inf
from typing import Literal

import msgspec
from msgspec.json import Decoder

from fenka.cluster.objects import Node, Pod
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.core.inventory import needed_protection_s
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


MAX_PIN_S = 600.0
"""A longer pin is not believed: it would keep a node from everybody."""


@dataclass(frozen=True)
class Pin:
    """Whom a node admits at first.

    Attributes:
        order: the order that the node is of.
        seconds: how long, after the node first offered its cards.
        planned: the UID of each planned pod with the indices of its cards, none for any.
    """

    order: str
    seconds: float
    planned: frozenset[tuple[str, tuple[int, ...]]]

    @cached_property
    def pods(self) -> Mapping[str, tuple[int, ...]]:
        """Return the cards of each planned pod, by its UID."""
        return dict(self.planned)

    @property
    def sentence(self) -> str:
        """Return why the node does not admit other pods."""
        return (
            f"the node was bought for other pods (order {self.order}), which alone may use it for "
            f"{self.seconds:g} s after it first offers its cards"
        )


def read_pin(node: Node) -> Pin | None:
    """Return a node's pin; None if it has none, or one that cannot be read."""
    order, annotations = node.metadata.labels.get(ORDER), node.metadata.annotations
    if not order or PIN not in annotations or PLANNED_PODS not in annotations:
        return None
    try:
        seconds, pods = float(annotations[PIN]), decode_planned_pods(annotations[PLANNED_PODS])
    except (InvalidRecord, ValueError):
        # An unreadable pin must not keep a node from everybody.
        return None
    return Pin(order, seconds, frozenset(pods.items())) if 0 <= seconds <= MAX_PIN_S else None


class NodePins:
    """The pins of all nodes that are in force."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self._ended: dict[str, str] = {}
        """The order whose pin has ended, by node."""
        self._node_of: dict[str, str] = {}
        """The node for which a pod is planned, by UID."""

    def __iter__(self) -> Iterator[tuple[str, Pin]]:
        return iter(tuple(self._pins.items()))

    def get(self, node: str) -> Pin | None:
        """Return the node's pin, None if it admits anybody."""
        return self._pins.get(node)

    def node_of(self, uid: str) -> str | None:
        """Return the node for which this pod is planned, as long as that has a pin."""
        return self._node_of.get(uid)

    def planned_cards(self, node: str, uid: str) -> tuple[int, ...]:
        """Return the cards of the node that are planned for this pod; none if it may have any."""
        pin = self._pins.get(node)
        return pin.pods.get(uid, ()) if pin is not None else ()

    def excluded(self, uid: str) -> frozenset[str]:
        """Return the nodes that admit other pods only."""
        return frozenset(name for name, pin in self._pins.items() if uid not in pin.pods)

    def set(self, name: str, pin: Pin | None) -> bool:
        """Take a node's pin, unless one of the same order has ended. Return whether that changes anything."""
        if pin is not None and self._ended.get(name) == pin.order:
            pin = None
        before = self._pins.get(name)
        if pin == before:
            return False
        self._remove(name)
        if pin is not None:
            self._pins[name] = pin
            self._node_of.update(dict.fromkeys(pin.pods, name))
        return True

    def end(self, name: str) -> bool:
        """End a node's pin for good. Return whether there was one."""
        pin = self._remove(name)
        if pin is not None:
            self._ended[name] = pin.order
        return pin is not None

    def forget(self, name: str) -> None:
        """Drop a node."""
        self._remove(name)
        self._ended.pop(name, None)

    def _remove(self, name: str) -> Pin | None:
        pin = self._pins.pop(name, None)
        for uid in pin.pods if pin else ():
            if self._node_of.get(uid) == name:
                del self._node_of[uid]
        return pin


RECHECK_S = 30.0
"""While nodes are protected, the queue is scheduled again so often: pods outlast what is left."""


def is_interruptible(pod: Pod) -> bool:
    """Return whether its user says that it may be ended at any time."""
    return pod.metadata.annotations.get(INTERRUPTIBLE) == "true"


def protection_needed_s(pod: Pod) -> float:
    """Return for how long a spot node must be protected to run the pod, its termination grace included."""
    return needed_protection_s(time_limit_s(pod), interruptible=is_interruptible(pod))


@dataclass(frozen=True, slots=True)
class SpotRule:
    """Which pods a spot node admits.

    Attributes:
        protected_until: when it may be taken back, in seconds since 1970; 0 for at any time.
    """

    protected_until: float = 0.0

    def admits(self, pod: Pod, now: float) -> bool:
        """Return whether the pod may run there from now on."""
        return protection_needed_s(pod) <= self.left_s(now)

    def left_s(self, now: float) -> float:
        """Return for how long the node is still protected."""
        return max(self.protected_until - now, 0.0)

    @property
    def sentence(self) -> str:
        """Return why the node does not admit other pods."""
        return (
            f'spot node, taken back at any time: annotate the pod {INTERRUPTIBLE}: "true" '
            "if it may restart"
        )


UNPROTECTED = SpotRule()


def read_spot_rule(node: Node) -> SpotRule | None:
    """Return a node's rule; None if it is no spot node that was bought, or admits every pod.

    An annotation that is missing or cannot be read protects nothing.
    """
    labels, annotations = node.metadata.labels, node.metadata.annotations
    if labels.get(CAPACITY) != "spot" or not labels.get(GROUP):
        return None
    if annotations.get(SPOT_ADMIT) == "all":
        return None
    try:
        return SpotRule(decode_time(annotations.get(PROTECTED_UNTIL, "")))
    except InvalidRecord:
        return UNPROTECTED


class SpotNodes:
    """The rules of all spot nodes.

    Attributes:
        now: seconds since 1970. Until a time is set, no protection counts.
    """

    def __init__(self) -> None:
        self.now = inf
        self._rules: dict[str, SpotRule] = {}
        self._checked_at = -inf

    def get(self, node: str) -> SpotRule | None:
        """Return the node's rule, None if it admits any pod. All that are not protected have the same."""
        rule = self._rules.get(node)
        return rule if rule is None or rule.left_s(self.now) else UNPROTECTED

    def excluded(self, pod: Pod) -> frozenset[str]:
        """Return the nodes that do not admit the pod."""
        needed = protection_needed_s(pod)
        return frozenset(
            name for name, rule in self._rules.items() if needed > rule.left_s(self.now)
        )

    def set(self, name: str, rule: SpotRule | None) -> bool:
        """Take a node's rule, None for none. Return whether that changes anything."""
        before = self.get(name)
        self._rules.pop(name, None)
        if rule is not None:
            self._rules[name] = rule
        return self.get(name) != before

    def set_time(self, now: float) -> frozenset[str]:
        """Take the time. Return the nodes whose protection has ended by it."""
        before = self._protected()
        self.now = now
        # A clock that was set back protects nodes again.
        return before ^ self._protected()

    def is_recheck_due(self) -> bool:
        """Return, every RECHECK_S, whether nodes are protected, for less time than at the last check."""
        if 0 <= self.now - self._checked_at < RECHECK_S or not self._protected():
            return False
        self._checked_at = self.now
        return True

    def _protected(self) -> frozenset[str]:
        return frozenset(name for name, rule in self._rules.items() if rule.left_s(self.now))
