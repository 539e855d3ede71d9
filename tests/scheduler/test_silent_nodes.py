"""Nodes that are labelled to share cards and offer none: an event after a while, and again later."""

from typing import Any

import pytest

from fenka.cluster.objects import Node
from fenka.cluster.state import ClusterState
from fenka.scheduler.event_reporter import NODE_UNAVAILABLE
from fenka.scheduler.silent_nodes import GRACE_S, REPEAT_S, SilentNodes
from tests.builders import T4_MIB, a_node
from tests.fakes.clock import Clock

SHARES = {"gpushare": "true"}


class Recorded:
    """Records events on nodes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def record_on_pod(self, *_: Any) -> None:
        """Ignore an event."""

    def record_on_node(self, node: Node, reason: str, note: str) -> None:
        """Record an event."""
        self.events.append((node.metadata.name, reason, note))


def looking(node: Node, *, leads: bool = True) -> tuple[SilentNodes, Recorded, Clock]:
    """Return what looks at a cluster of this node."""
    recorded, clock = Recorded(), Clock()
    cluster = ClusterState([node], [])
    return SilentNodes(cluster, recorded, lambda: leads, clock=clock), recorded, clock


def test_node_has_an_event_when_it_is_labelled_and_offers_no_cards() -> None:
    """Not at once, since its node pod needs a moment; again before Kubernetes forgets the first one."""
    looks, recorded, clock = looking(a_node("n", labels=SHARES))
    looks.report_due()
    clock.now += GRACE_S - 1
    looks.report_due()
    assert recorded.events == []
    clock.now += 1
    looks.report_due()
    looks.report_due()
    ((name, reason, note),) = recorded.events
    assert (name, reason) == ("n", NODE_UNAVAILABLE)
    assert "its kubelet offers no aliyun.com/gpu-mem" in note
    clock.now += REPEAT_S
    looks.report_due()
    assert len(recorded.events) == 2


@pytest.mark.parametrize(
    ("sizes", "given", "leads"),
    [
        ((T4_MIB,), {"labels": SHARES}, True),
        ((), {}, True),
        ((), {"labels": {"ack.node.gpu.schedule": "default"}}, True),
        ((), {"labels": SHARES, "ready": "False"}, True),
        ((), {"labels": SHARES}, False),
    ],
)
def test_node_has_no_event_when_it_offers_cards_or_need_not(
    sizes: tuple[int, ...], given: dict[str, Any], leads: bool
) -> None:
    """Also where the whole node is away, which Kubernetes itself says."""
    looks, recorded, clock = looking(a_node("n", *sizes, **given), leads=leads)
    looks.report_due()
    clock.now += GRACE_S
    looks.report_due()
    assert recorded.events == []
