"""Does what is decided about nodes that nobody needs: taint, second look, evictions, end."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from fenka.autoscaler.hands import Hands
from fenka.autoscaler.objects import ElasticNode, ElasticPod
from fenka.autoscaler.reclaim import evictable, has_taint
from fenka.autoscaler.reclaim_actor import accepted, remove_pods
from fenka.autoscaler.scale_in import Marked, Step, decide_scale_in
from fenka.autoscaler.view import View
from fenka.cluster.autoscaling import ENDING, NodeStatus
from fenka.cluster.objects import node_path
from fenka.kubernetes.taints import add_taint, remove_taint

log = logging.getLogger(__name__)

SCALE_IN = "FenkaScaleIn"
UNSEEN_S = 60.0
"""A taint that was written is seen by then, or was removed at once."""


class ScaleInActor:
    """Ends nodes. What it remembers only delays: after a change of the leader each look is repeated."""

    def __init__(self) -> None:
        self._marked: dict[str, Marked] = {}

    async def act(self, hands: Hands) -> Mapping[str, NodeStatus]:
        """Decide by a view, and do it. Return the states of nodes that offer their cards."""
        view = hands.view()
        self._remember(view)
        decided = decide_scale_in(view, self._marked)
        for step in decided.steps:
            if not hands.leading():
                break
            await self._do(hands, view, step)
        return decided.states

    def _remember(self, view: View) -> None:
        """Follow which nodes have the taint, with the pods that were there at first."""
        tainted = [node.metadata.name for node in view.own_nodes() if has_taint(node, ENDING)]
        unseen = {
            name: marked
            for name, marked in self._marked.items()
            if not marked.seen and name in view.nodes and view.now < marked.since + UNSEEN_S
        }
        seen = {
            name: replace(self._marked.get(name) or _marked(view, name), seen=True)
            for name in tainted
        }
        # The clock may have been set back.
        seen = {
            name: replace(marked, since=min(marked.since, view.now))
            for name, marked in seen.items()
        }
        # Whoever removes the taint keeps the node.
        self._marked = {**unseen, **seen}

    async def _do(self, hands: Hands, view: View, step: Step) -> None:
        node, name = step.node, step.node.metadata.name
        match step.action:
            case "mark":
                if await accepted(add_taint(hands.api, node, ENDING)):
                    # Only from now on schedulers can know.
                    now = hands.view().now
                    self._marked[name] = replace(_marked(view, name), since=now, seen=False)
                    hands.recorder.record_on_node(node, SCALE_IN, step.why)
            case "unmark":
                if await accepted(remove_taint(hands.api, node, ENDING)):
                    del self._marked[name]
                    hands.recorder.record_on_node(node, SCALE_IN, step.why)
            case "empty":
                await remove_pods(hands, step.removals)
            case "end":
                await self._end(hands, step)

    async def _end(self, hands: Hands, step: Step) -> None:
        """End instance and Node, if the API server itself shows no pod that came in this moment."""
        node = step.node
        if step.instance is not None:
            if await _has_pods(hands, node) or not hands.leading():
                return
            await hands.provider.end([step.instance.id])
            log.info("node %s is ended", node.metadata.name)
            hands.recorder.record_on_node(node, SCALE_IN, "the node is ended: nothing needs it")
        if hands.leading():
            body = {"preconditions": {"uid": node.metadata.uid}}
            await accepted(hands.api.delete(node_path(node.metadata.name), body))


def _marked(view: View, name: str) -> Marked:
    pods = evictable(view.pods_on.get(name, ()))
    return Marked(view.now, frozenset(pod.metadata.uid for pod in pods))


async def _has_pods(hands: Hands, node: ElasticNode) -> bool:
    selector = f"spec.nodeName={node.metadata.name}"
    pods, _ = await hands.api.list("/api/v1/pods", ElasticPod, fieldSelector=selector)
    return bool(evictable(pods))
