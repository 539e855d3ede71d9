"""Test which grown pods get their first size back for the first pod that waits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.growth import GrownPod, GrowthReclaim, grown_pod
from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.core.request import Slice
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.lease_records import REPORT, LeaseReport, encode_report
from fenka.dialects.nodes import WHOLE_LABEL
from fenka.dialects.resize_records import REFUSED, REQUEST, decode_request
from fenka.isolation.limit_changes import resized
from tests.builders import GIB, a_node, a_pod, node_json, on_card
from tests.core.builders import device
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import make

CARD = 16 * GIB
TAKEN = "gpu-mem=4096MiB"


def grown(name: str, units: int = 4, card: int = 0, **given: Any) -> Pod:
    """Return a running pod of this size at its start, which has requested another one since."""
    written = {**on_card(card, units, 16), REQUEST: "gpu-mem=12", **given.pop("annotations", {})}
    phase = given.pop("phase", "Running")
    return make(name, units, node="n", annotations=written, phase=phase, **given)


def report(**mib: tuple[int, int]) -> dict[str, str]:
    """Return the node's report: card and GiB of each pod."""
    pods = {
        name: (Slice(card, device(card, "n"), gib * GIB, 0),) for name, (card, gib) in mib.items()
    }
    return {REPORT: encode_report(LeaseReport(pods))}


def chosen(pods: list[Pod], waiting: Pod, cards: int = 1, **mib: tuple[int, int]) -> list[str]:
    """Return name and request of each pod that gets its first size back."""
    node = node_json(
        "n",
        *[CARD] * cards,
        annotations=report(**mib),
        labels={"gpushare": "true", WHOLE_LABEL: "true"},
    )
    cluster = ExtenderHarness([node])
    cluster.set(*pods)
    cluster.wait(waiting)
    cluster.queue.refreshed(0.0)
    queue, usage = cluster.queue.state, cluster.gangs.live.usage
    reclaim = GrowthReclaim(cluster.state, "binpack", usage, queue)
    first, found = reclaim.due(cluster.pods, cluster.queue.now())
    assert first == waiting
    return [f"{it.pod.metadata.name} {it.request}" for it in found]


def test_grown_pod_shrinks_when_the_first_waiting_pod_would_fit() -> None:
    """12 of 16 are held, 4 of them since the start: 8 fit once the growth is taken back."""
    assert chosen([grown("g")], make("w", 8, 1), g=(0, 12)) == [f"g {TAKEN}"]


@pytest.mark.parametrize(
    ("pod", "waiting"),
    [
        (grown("g"), make("w", 14, 1)),
        (grown("g", priority=1), make("w", 8, 1)),
        (grown("g", annotations={REQUEST: TAKEN, REFUSED: "in use"}), make("w", 8, 1)),
        (grown("g", phase="Pending"), make("w", 8, 1)),
    ],
    ids=["not enough", "more important", "in use", "not running"],
)
def test_grown_pod_keeps_its_size_when_that_would_not_help(pod: Pod, waiting: Pod) -> None:
    """Nor is anything taken for a pod of lower priority, or that programs use."""
    assert chosen([pod], waiting, g=(0, 12)) == []


def test_pod_keeps_its_size_when_it_has_not_grown() -> None:
    """Its record says 12, and its node too."""
    assert chosen([grown("g", 12)], make("w", 8, 1), g=(0, 12)) == []


def test_request_that_is_pending_counts_again() -> None:
    """Its node has neither executed nor refused it: no other pod shrinks instead."""
    pods = [grown("a", annotations={REQUEST: TAKEN}), grown("b", 2)]
    assert chosen(pods, make("w", 8, 1), a=(0, 10), b=(0, 3)) == [f"a {TAKEN}"]


def test_only_pods_shrink_that_are_needed() -> None:
    """Of two on a card the smaller growth is enough; the one on another card is not enough."""
    pods = [grown("a", 2), grown("b", 2), grown("c", 12, card=1)]
    took = chosen(pods, make("w", 6, 1), cards=2, a=(0, 8), b=(0, 6), c=(1, 13))
    assert took == ["b gpu-mem=2048MiB"]


def test_shrunk_pod_keeps_its_place_on_the_card() -> None:
    """A pod that requests a whole card gets none beside what is left of another pod."""
    whole = make("w", 0, 1)
    whole.spec.containers[0].resources.limits = {NVIDIA_GPU: "1"}
    assert chosen([grown("g")], whole, g=(0, 12)) == []


def world(memory_mib: int, *units: int) -> tuple[ClusterState, Pod]:
    """Return a pod of so many units in each container, whose node reports this memory."""
    pod = a_pod(
        "g", *units, uid="g", node="n", phase="Running",
        annotations={**on_card(0, sum(units), 16), REQUEST: "x"},
    )  # fmt: skip
    slices = (Slice(0, device(0, "n"), memory_mib, 0),)
    text = encode_report(LeaseReport({"g": slices}))
    node = a_node("n", CARD, annotations={REPORT: text})
    return ClusterState([node], [pod]), pod


@given(st.integers(1, 16), st.integers(1, CARD))
def test_no_pod_shrinks_below_what_it_was_bound_with(units: int, memory_mib: int) -> None:
    """Executed as its node does, the request leaves exactly that of what has grown, and never grows it."""
    state, pod = world(memory_mib, units)
    found = grown_pod(state, pod)
    assert (found is not None) == (memory_mib > units * GIB)
    if found is not None:
        node = state.card_node("n")
        (wanted,) = decode_request(found.request, node.unit_mib).values()
        held = [Slice(0, device(0, "n"), memory_mib, 0)]
        (after,) = resized(held, wanted.memory, wanted.compute, node)
        assert after.memory_mib == units * GIB
        (excess,) = found.excess.slices
        assert after.memory_mib + excess.memory_mib == memory_mib


def test_pod_keeps_its_size_when_several_containers_have_slices() -> None:
    """What each of them has grown by is known to its node alone."""
    state, pod = world(12 * GIB, 2, 2)
    assert grown_pod(state, pod) is None


def test_refusal_counts_for_this_request_only() -> None:
    """A refusal of what its user requested says nothing about its first size."""
    pod = grown("g", annotations={REFUSED: "no room"})
    state = ClusterState([a_node("n", CARD, annotations=report(g=(0, 12)))], [pod])
    found = grown_pod(state, pod)
    assert isinstance(found, GrownPod)
    assert not found.is_refused
