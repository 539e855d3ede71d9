"""Does what is decided for nodes that the cloud takes back."""

import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from typing import Final

from fenka.autoscaler.hands import Hands
from fenka.autoscaler.objects import ElasticNode
from fenka.autoscaler.reclaim import (
    Reclaim,
    Removal,
    back_off_reason,
    decide_reclaims,
    group_of,
)
from fenka.autoscaler.view import View
from fenka.cluster.autoscaling import ORDER, RECLAIMED, NodeStatus
from fenka.kubernetes.client import ApiError
from fenka.kubernetes.eviction import delete_pod, evict
from fenka.kubernetes.taints import add_taint, remove_taint

log = logging.getLogger(__name__)

RECLAIM = "FenkaReclaim"
TAKEN_BACK: Final = "taken back"


class Reclaimer:
    """Keeps pods from nodes that are taken back, and ends theirs in time.

    Attributes:
        counts: take-backs that were announced, by group.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def act(self, hands: Hands) -> Mapping[str, NodeStatus]:
        """Decide by a view, and do it. Return the states of nodes that are taken back."""
        view = hands.view()
        decided = decide_reclaims(view)
        for name, sentence in decided.invalid.items():
            hands.recorder.record_on_node(view.nodes[name], RECLAIM, sentence)
        for node in decided.restored:
            await self._restore(hands, node)
        for reclaim in decided.reclaims:
            if not hands.leading():
                break
            await self._reclaim(hands, view, reclaim)
        # A ConfigMap that cannot be written keeps no pod from its notice.
        for reclaim in decided.reclaims:
            if reclaim.backs_off is not None and hands.leading():
                reason = back_off_reason(reclaim.takeback.node)
                await hands.orders.fail_offer(reclaim.backs_off, TAKEN_BACK, reason, view.now)
        return {
            reclaim.takeback.node.metadata.name: _status(view, reclaim)
            for reclaim in decided.reclaims
            if ORDER in reclaim.takeback.node.metadata.labels
        }

    async def _restore(self, hands: Hands, node: ElasticNode) -> None:
        if hands.leading() and await accepted(remove_taint(hands.api, node, RECLAIMED)):
            hands.recorder.record_on_node(node, RECLAIM, "the take-back was withdrawn")

    async def _reclaim(self, hands: Hands, view: View, reclaim: Reclaim) -> None:
        node = reclaim.takeback.node
        if reclaim.announce:
            if not await accepted(add_taint(hands.api, node, RECLAIMED)):
                # Somebody else wrote the Node, or it is gone; the pods are told in any case.
                log.info("the taint of node %s is written again", node.metadata.name)
            else:
                self._announce(hands, view, reclaim)
        await remove_pods(hands, reclaim.removals)

    def _announce(self, hands: Hands, view: View, reclaim: Reclaim) -> None:
        node, sentence = reclaim.takeback.node, reclaim.takeback.sentence(view.now)
        self.counts[group_of(node)] += 1
        log.warning("node %s: %s", node.metadata.name, sentence)
        hands.recorder.record_on_node(node, RECLAIM, sentence)
        for removal in reclaim.removals:
            hands.recorder.record_on_pod(removal.pod, RECLAIM, sentence)


async def remove_pods(hands: Hands, removals: Iterable[Removal]) -> None:
    """Evict or delete pods in this order. A budget's refusal holds back the rest of the gang."""
    held = set[str]()
    for removal in removals:
        if not hands.leading():
            return
        if removal.gang in held and not removal.forced:
            continue
        if not await _remove(hands, removal) and removal.gang:
            held.add(removal.gang)


async def _remove(hands: Hands, removal: Removal) -> bool:
    """Return whether the pod ends or is gone."""
    meta, grace_s = removal.pod.metadata, removal.grace_s
    pod = meta.namespace, meta.name, meta.uid
    try:
        if removal.forced:
            await delete_pod(hands.api, *pod, grace_s or 0, RECLAIM)
        else:
            await evict(hands.api, *pod, grace_s)
    except ApiError as why:
        # 404: it is gone. 409: another pod has its name.
        if why.status in (404, 409):
            return True
        hands.warnings.warn(removal.pod.full_name, f"it stays for now: {why}")
        return False
    return True


async def accepted(request: Awaitable[None]) -> bool:
    """Return whether the object was there as expected. Raises ApiError, ApiUnreachable."""
    try:
        await request
    except ApiError as why:
        if why.status in (404, 409):
            return False
        raise
    return True


def _status(view: View, reclaim: Reclaim) -> NodeStatus:
    name = reclaim.takeback.node.metadata.name
    known = view.status.nodes.get(name)
    since = known.since if known is not None and known.state == TAKEN_BACK else view.now
    return NodeStatus(group_of(reclaim.takeback.node), TAKEN_BACK, since, reclaim.takeback.at)
