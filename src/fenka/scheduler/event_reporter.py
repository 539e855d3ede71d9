"""Events that the leader writes where people look: on pods that wait or cannot be read, and on nodes.

Each is told once per object and sentence; the recorder counts and bounds the rest.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_placement import PodEvaluator
from fenka.cluster.state import ClusterState, requests_gpu
from fenka.dialects.base import InvalidRecord

UNSCHEDULABLE, INVALID_RECORD, NODE_UNAVAILABLE = (
    "FenkaUnschedulable",
    "FenkaInvalidRecord",
    "FenkaNodeUnavailable",
)

MIN_INTERVAL_S = 1.0
_REMEMBERED = 10_000

K = TypeVar("K")


class Recorder(Protocol):
    """Where events go."""

    def on_pod(self, pod: Pod, reason: str, note: str) -> None:
        """On a pod."""

    def on_node(self, node: Node, reason: str, note: str) -> None:
        """On a node."""


class EventReporter:
    """Says what people would not be told otherwise. Silent on a replica that does not lead."""

    def __init__(
        self,
        world: ClusterState,
        judge: PodEvaluator,
        recorder: Recorder,
        leading: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        position: Callable[[Pod], str] = lambda _: "",
    ) -> None:
        """position: how a pod stands in line, as its sentence ends."""
        self._world, self._evaluate_node, self._recorder, self._leading = (
            world,
            judge,
            recorder,
            leading,
        )
        self._position = position
        self._clock, self._since = clock, clock()
        self._whys: dict[tuple[object, ...], str | None] = {}
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def asked(self, pod: Pod) -> None:
        """kube-scheduler asked about this pod: its own event has the reasons."""
        _remember(self._asked, pod.metadata.uid)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._asked.pop(uid, None)

    def pod(self, pod: Pod) -> None:
        """The pod is so now, and the world knows it."""
        if not self._leading():
            return
        holding = self._world.allocation(pod.metadata.uid)
        if holding is not None and holding.error is not None:
            if self._first(pod.metadata.uid, holding.error):
                note = (
                    f"fenka: {holding.error}; the pod is counted for what it asks where it was placed, "
                    f"or on the first cards of its node"
                )
                self._recorder.on_pod(pod, INVALID_RECORD, note)
        elif _waits(pod) and pod.metadata.uid not in self._asked:
            why = self._why(pod)
            if why is not None:
                self._recorder.on_pod(pod, UNSCHEDULABLE, f"fenka: {why}{self._position(pod)}")
        if _waits(pod):
            # The next time that it is found unschedulable counts anew.
            self._asked.pop(pod.metadata.uid, None)

    def node(self, node: Node) -> None:
        """The node is so now, and the world knows it."""
        name = node.metadata.name
        trouble = self._world.node_error(name)
        if trouble is None or not self._leading():
            return
        held = len(self._world.allocations(name))
        stay = f"; what {held} of its pods hold stays theirs until they end" if held else ""
        if self._first(node.metadata.uid, trouble):
            self._recorder.on_node(
                node, NODE_UNAVAILABLE, f"fenka: admits no new pods: {trouble}{stay}"
            )

    def _why(self, pod: Pod) -> str | None:
        """Pods that wait come by the hundred, of few sizes: an answer holds for a moment."""
        if self._clock() >= self._since + MIN_INTERVAL_S:
            self._whys.clear()
            self._since = self._clock()
        try:
            shape = self._evaluate_node.shape(pod)
        except InvalidRecord as why:
            return str(why)
        if shape not in self._whys:
            self._whys[shape] = self._evaluate_node.why(pod)
        return self._whys[shape]

    def _first(self, uid: str, sentence: str) -> bool:
        return _remember(self._told, (uid, sentence))


def _remember(known: "OrderedDict[K, None]", key: K) -> bool:
    """Whether it is new."""
    new = key not in known
    known[key] = None
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
    return new


def _waits(pod: Pod) -> bool:
    """kube-scheduler has found no node for it, and it wants a slice."""
    if pod.spec.node_name or pod.finished or pod.metadata.deletion_timestamp is not None:
        return False
    return pod.unschedulable is not None and requests_gpu(pod)
