"""Placing many requests on many nodes: each node is judged once for requests of one shape, until it changes.

It decides as `evaluate.place` does, and no differently: that is what its tests compare it with.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator

from fenka.core.evaluate import Policy, Verdict, evaluate
from fenka.core.inventory import Node
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import CardUsage, UsageView

MAX_SHAPES = 64
"""Requests of so many different shapes are remembered."""

_State = tuple[tuple[int, int], tuple[CardUsage, ...]]


class VerdictCache:
    """Remembers verdicts on these nodes. Placing raises KeyError for an unknown policy."""

    def __init__(self, nodes: Iterable[Node], policy: Policy) -> None:
        self._nodes, self._policy = tuple(nodes), policy
        self._home = _home(self._nodes)
        self._states: dict[str, _State] = {}
        self._known: OrderedDict[Request, dict[str, tuple[frozenset[str], Verdict]]] = OrderedDict()
        """By shape and node, with the cards that were reserved there then."""

    def set_nodes(self, nodes: Iterable[Node]) -> set[str]:
        """The nodes are these now; the names of those that came, went or changed."""
        before, after = set(self._nodes), tuple(nodes)
        changed = {node.name for node in before.symmetric_difference(after)}
        for name in changed:
            self.invalidate(name)
        self._nodes = after
        if changed:
            self._home = _home(after)
        return changed

    def refresh(self, view: UsageView) -> None:
        """Forget the nodes of which something else is held than when this was last called."""
        for node in self._nodes:
            cards = tuple(view.used(node.name, card.index) for card in node.cards)
            state = view.host_used(node.name), cards
            if self._states.get(node.name) != state:
                self.invalidate(node.name)
                self._states[node.name] = state

    def invalidate(self, node: str) -> None:
        """Something is held of this node that was not, or is no more."""
        self._states.pop(node, None)
        for by_node in self._known.values():
            by_node.pop(node, None)

    def place(
        self,
        view: UsageView,
        request: Request,
        reserved: Collection[str] = (),
        among: Collection[str] | None = None,
    ) -> Placement | Unschedulable:
        """As `evaluate.place`. `view` must be the one that it was renewed with, but for nodes forgotten.

        among: the names of the nodes that it may go to, None for any.
        """
        best: tuple[tuple[float, ...], str] | None = None
        found: Placement | None = None
        rejections: list[NodeRejection] = []
        for node, verdict in self.evaluate(view, request, reserved, among):
            if isinstance(verdict, NodeRejection):
                rejections.append(verdict)
            elif best is None or (verdict.score, node.name) < best:
                best, found = (verdict.score, node.name), verdict.placement
        return found or Unschedulable(tuple(rejections))

    def evaluate(
        self,
        view: UsageView,
        request: Request,
        reserved: Collection[str] = (),
        among: Collection[str] | None = None,
    ) -> Iterator[tuple[Node, Verdict]]:
        """As `evaluate`, node by node, of those that it may go to."""
        by_node = self._of_shape(request)
        kept: dict[str, set[str]] = {}
        for uuid in reserved:
            if uuid in self._home:
                kept.setdefault(self._home[uuid], set()).add(uuid)
        for node in self._nodes:
            if among is not None and node.name not in among:
                continue
            here = frozenset(kept.get(node.name, ()))
            known = by_node.get(node.name)
            if known is None or known[0] != here:
                (verdict,) = evaluate(view, request, self._policy, (node,), here)
                by_node[node.name] = here, verdict
            else:
                verdict = known[1]
            yield node, verdict

    def _of_shape(self, request: Request) -> dict[str, tuple[frozenset[str], Verdict]]:
        by_node = self._known.setdefault(request, {})
        self._known.move_to_end(request)
        if len(self._known) > MAX_SHAPES:
            self._known.popitem(last=False)
        return by_node


def _home(nodes: Iterable[Node]) -> dict[str, str]:
    """The name of each card's node."""
    return {card.uuid: node.name for node in nodes for card in node.cards}
