"""Pins: which pods alone a node admits that was bought for them.

The autoscaler plans exactly which pod goes to which card of which new node. The first pod that asks could
take the place of a pod that fits nowhere else, or a card so that the others do not fit together. So for a
short time after the node offers its cards, it admits only the pods that are planned for it, and these go
there, to their planned cards. They are named by UID on the node, where tenants cannot write. Annotations that
a tenant writes on his own pods change nothing here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fenka.cluster.autoscaling import ORDER, PIN, PLANNED_PODS, decode_planned_pods
from fenka.cluster.objects import Node
from fenka.dialects.base import InvalidRecord

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
