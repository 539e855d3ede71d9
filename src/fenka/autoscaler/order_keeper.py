"""Does what the life of orders requires: writes them, ends instances, marks nodes and pods, learns shapes."""

import logging
from collections.abc import Mapping

from fenka.autoscaler.hands import Hands
from fenka.autoscaler.joining import (
    NodeChange,
    new_misfits,
    new_shapes,
    node_changes,
    planned_annotations,
)
from fenka.autoscaler.lifecycle import Decision, advance
from fenka.autoscaler.metrics import Counts
from fenka.autoscaler.objects import ElasticNode, ElasticPod
from fenka.autoscaler.shape_store import ShapeStore
from fenka.autoscaler.view import View
from fenka.cloud.port import ProviderError, Throttled
from fenka.cluster.autoscaling import PLANNED, NodeStatus
from fenka.cluster.objects import Node, Object, node_path
from fenka.kubernetes.client import ApiError, if_accepted

log = logging.getLogger(__name__)

NEVER_JOINED, MISFIT = "FenkaNeverJoined", "FenkaMisfit"

REFUSED = (400, 403, 413, 422)
"""The API server or a policy does not accept this change of this object."""
GONE = (404, 409)
"""The object is gone, or another one has its name, or somebody else writes it: the next pass looks again."""


class OrderKeeper:
    """The first part of a pass."""

    def __init__(self, shapes: ShapeStore, counts: Counts) -> None:
        self._shapes, self._counts = shapes, counts
        self._refused: dict[str, str] = {}
        """What could not be done, by its path or instance: each is logged once."""

    async def act(self, hands: Hands) -> Mapping[str, NodeStatus]:
        """Advance all orders. Return the states of nodes that do not offer their cards yet."""
        view = hands.view()
        decision = advance(view)
        if not hands.leading():
            return {}
        await hands.orders.save(decision.orders)
        self._report(hands, view, decision)
        refused = await self._mark(hands)
        for node in decision.removed:
            if hands.leading():
                await _delete_node(hands, node)
        # Last, and its failure ends nothing else: the cloud may refuse to end an instance for ever.
        refused |= await _end(hands, sorted(decision.ends))
        for name, why in refused.items():
            if self._refused.get(name) != why:
                log.warning("%s: %s", name, why)
        self._refused = refused
        return _starting(hands.view())

    def _report(self, hands: Hands, view: View, decision: Decision) -> None:
        self._counts.advanced(view, decision.orders)
        for missed in decision.missed:
            log.warning("order %s: %s", missed.order, missed.why)
            if missed.node is not None:
                hands.recorder.record_on_node(missed.node, NEVER_JOINED, missed.why)
            for pod in missed.pods:
                hands.recorder.record_on_pod(pod, NEVER_JOINED, missed.why)

    async def _mark(self, hands: Hands) -> dict[str, str]:
        """Write what nodes and pods lack. Return what the API server refuses, by path."""
        refused = dict[str, str]()
        for change in node_changes(hands.view()):
            if hands.leading():
                refused |= await _patch_node(hands, change)
        for pod, text in planned_annotations(hands.view()):
            if hands.leading():
                refused |= await _annotate(hands, pod, text)
        await self._learn(hands)
        return refused

    async def _learn(self, hands: Hands) -> None:
        view = hands.view()
        misfits = new_misfits(view)
        for misfit in misfits:
            note = (
                f"it does not fit the node of {misfit.offer} that was bought for it: that offer is "
                "not tried again for such pods until the configuration changes"
            )
            hands.recorder.record_on_pod(misfit.pod, MISFIT, note)
        if hands.leading():
            classes = {each.offer: set[str]() for each in misfits}
            for each in misfits:
                classes[each.offer].add(each.pod_class)
            await self._shapes.save(
                new_shapes(view), {offer: frozenset(names) for offer, names in classes.items()}
            )


def _starting(view: View) -> dict[str, NodeStatus]:
    return {
        slot.node: NodeStatus(record.group, "starting", record.written_at)
        for record in view.orders.values()
        for slot in record.slots
        if slot.node and slot.state == "joined"
    }


async def _end(hands: Hands, instances: list[str]) -> dict[str, str]:
    """End instances. Return why some could not be ended, by instance."""
    if not instances or not hands.leading():
        return {}
    try:
        await hands.provider.end(instances)
    except ProviderError as why:
        if len(instances) == 1 or isinstance(why, Throttled):
            return dict.fromkeys(instances, str(why))
    else:
        return {}
    # Perhaps one of them keeps the others: an instance may be protected.
    refused = dict[str, str]()
    for each in instances:
        refused |= await _end(hands, [each])
    return refused


async def _patch_node(hands: Hands, change: NodeChange) -> dict[str, str]:
    meta = change.node.metadata
    body = {
        "metadata": {
            "uid": meta.uid,
            "labels": change.labels,
            "annotations": change.annotations,
        }
    }
    return await _patch(hands, node_path(meta.name), Node, body)


async def _delete_node(hands: Hands, node: ElasticNode) -> None:
    log.info("node %s: its instance is gone", node.metadata.name)
    body = {"preconditions": {"uid": node.metadata.uid}}
    await if_accepted(hands.api.delete(node_path(node.metadata.name), body), GONE)


async def _annotate(hands: Hands, pod: ElasticPod, text: str) -> dict[str, str]:
    body = {"metadata": {"uid": pod.metadata.uid, "annotations": {PLANNED: text}}}
    return await _patch(hands, pod.path, Object, body)


async def _patch(
    hands: Hands, path: str, kind: type[Object], body: Mapping[str, object]
) -> dict[str, str]:
    """Patch an object. Return why the API server refuses this patch, by path; other errors are raised.

    Tenants decide what a patch may do to their pods: annotations may be full already.
    """
    try:
        await hands.api.patch(path, kind, body)
    except ApiError as why:
        if why.status in GONE:
            return {}
        if why.status not in REFUSED:
            raise
        return {path: str(why)}
    return {}
