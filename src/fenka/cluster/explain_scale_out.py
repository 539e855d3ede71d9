"""Explains which new node a pending pod waits for, or why no node is bought for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fenka.cluster.autoscaling import OrderRecord, Slot, Status
from fenka.cluster.objects import Event, Pod, seconds

ASKED_EVENT, REFUSED_EVENT = "FenkaScaleOut", "FenkaNoScaleOut"
"""Reasons of the autoscaler's events on pods."""


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """What the autoscaler does for a pending pod.

    Attributes:
        sentence: its end, after the pod's name.
        coming: whether a node comes for the pod.
    """

    sentence: str
    coming: bool


def explain_scale_out(
    pod: Pod, status: Status, orders: Mapping[str, OrderRecord], now: float
) -> ScaleOut | None:
    """Return what is done for a pending pod; None if the autoscaler has not decided yet."""
    for order in orders.values():
        for slot in order.slots:
            if pod.metadata.uid in slot.pods and (sentence := _waits(order, slot, now)):
                return ScaleOut(sentence, coming=True)
    refused = (why for why, pods in status.unserved.items() if pod.full_name in pods)
    return next((_refused(why) for why in refused), None)


def explain_by_events(events: Iterable[Event], now: float) -> ScaleOut | None:
    """Return the same from the pod's own events, for users who may not read what the autoscaler publishes."""
    decisions = [event for event in events if event.reason in (ASKED_EVENT, REFUSED_EVENT)]
    newest = max(decisions, key=lambda event: event.at, default=None)
    if newest is None:
        return None
    if newest.reason == REFUSED_EVENT:
        return _refused(newest.message)
    ago = _ago(seconds(newest.at), now)
    return ScaleOut(f"waits for new nodes: {newest.message}, {ago}", coming=True)


def _refused(why: str) -> ScaleOut:
    return ScaleOut(f"gets no new node: {why}", coming=False)


def _waits(order: OrderRecord, slot: Slot, now: float) -> str:
    """Return what a pod planned for the slot waits for; empty if the slot is over."""
    match slot.state:
        case "written":
            return f"waits for a node of {order.group}, which is being asked for"
        case "asked" | "known":
            return f"waits for a node of {order.group}, asked for {_ago(order.asked_at, now)}"
        case "joined":
            return (
                f"waits for node {slot.node} of {order.group}, which has joined and does not offer its "
                "cards yet"
            )
        case "offering":
            return f"waits for kube-scheduler to place it on node {slot.node} of {order.group}"
        case _:
            return ""


def _ago(moment: float | None, now: float) -> str:
    if moment is None:
        return "just now"
    past = max(int(now - moment), 0)
    return f"{past} s ago" if past < 120 else f"{past // 60} min ago"
