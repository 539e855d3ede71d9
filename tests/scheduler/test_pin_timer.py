"""When the pins of nodes that were bought end."""

import msgspec
import pytest

from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterState
from fenka.dialects.base import NVIDIA_GPU
from fenka.scheduler.controllers import PinTimer
from tests.builders import Json, a_pod
from tests.cluster.test_node_pins import bought


class Scene:
    """Node n, bought for pod `mine`, which is pending. now: seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pods: dict[str, Pod] = {"mine": a_pod("mine", 4, uid="mine")}
        self.state = ClusterState()
        self.timer = PinTimer(self.state, lambda: self.pods, clock=lambda: self.now)

    def set(self, document: Json) -> None:
        """Bring the node."""
        self.state.set_node(msgspec.convert(document, Node))

    def is_pinned(self, after: float = 0.0) -> bool:
        """Return whether the node has its pin after so many seconds."""
        self.now += after
        self.timer.end_due()
        return self.state.pins.get("n") is not None


def without_cards() -> Json:
    """Return the node as it joins."""
    document = bought("n", "mine", inventory=False)
    document["status"]["allocatable"] = {}
    return document


def test_pin_lasts_from_the_first_sight_of_the_cards() -> None:
    """How long a node takes to offer them is not known."""
    scene = Scene()
    scene.set(without_cards())
    assert scene.is_pinned(after=500)
    scene.set(bought("n", "mine"))
    assert scene.is_pinned()
    assert scene.is_pinned(after=59)
    assert not scene.is_pinned(after=1)


def test_pin_lasts_from_the_first_sight_of_whole_cards() -> None:
    """A node that does not share has no cards by fenka's record."""
    scene = Scene()
    document = without_cards()
    document["status"]["allocatable"] = {NVIDIA_GPU: "1"}
    scene.set(document)
    assert scene.is_pinned()
    assert not scene.is_pinned(after=60)


def test_pin_is_not_renewed_when_the_cards_are_away_for_a_moment() -> None:
    """The node program may start again."""
    scene = Scene()
    scene.set(bought("n", "mine"))
    assert scene.is_pinned()
    scene.set(without_cards())
    assert scene.is_pinned(after=30)
    scene.set(bought("n", "mine"))
    assert not scene.is_pinned(after=30)


@pytest.mark.parametrize("what", ["bound", "deleted", "ending"])
def test_pin_ends_early_when_none_of_its_pods_waits(what: str) -> None:
    """There is nobody left for whom to keep the rest."""
    scene = Scene()
    scene.pods["late"] = a_pod("late", 4, uid="late")
    scene.set(bought("n", "mine", "late"))
    scene.pods["mine"] = a_pod("mine", 4, uid="mine", node="n")
    assert scene.is_pinned()
    match what:
        case "bound":
            scene.pods["late"] = a_pod("late", 4, uid="late", node="n")
        case "deleted":
            del scene.pods["late"]
        case _:
            scene.pods["late"].metadata.deletion_timestamp = "2026-01-01T00:00:00Z"
    assert not scene.is_pinned()


def test_pin_stays_when_the_node_has_not_offered_its_cards_and_no_pod_waits() -> None:
    """The autoscaler may yet plan other pods for it."""
    scene = Scene()
    scene.pods.clear()
    scene.set(without_cards())
    assert scene.is_pinned(after=500)


def test_nothing_is_remembered_of_nodes_that_are_gone() -> None:
    """A node of the same name and order starts anew."""
    scene = Scene()
    scene.set(bought("n", "mine"))
    assert scene.is_pinned(after=59)
    scene.state.forget_node("n")
    assert not scene.is_pinned()
    scene.set(bought("n", "mine"))
    assert scene.is_pinned(after=59)
