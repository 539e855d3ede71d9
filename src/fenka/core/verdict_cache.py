"""Place many requests on many nodes: each node is judged once for equal requests, until its usage changes.

It decides exactly as `evaluate.place` does; the tests compare the two.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from fenka.core.evaluate import Policy, Verdict, evaluate
from fenka.core.inventory import DeviceId, Node
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.shape_cache import ShapeCache
from fenka.core.usage import UsageView

_NO_CARDS: frozenset[DeviceId] = frozenset()


class _CachedVerdict(NamedTuple):
    generation: int
    reserved: frozenset[DeviceId]
    verdict: Verdict


class VerdictCache:
    """Caches verdicts on these nodes. Placing raises KeyError for an unknown policy."""

    def __init__(self, nodes: Iterable[Node], policy: Policy) -> None:
        self._nodes, self._policy = tuple(nodes), policy
        self._node_of: dict[DeviceId, str] | None = None
        self._by_request: ShapeCache[Request, _CachedVerdict] = ShapeCache()

    def set_nodes(self, nodes: Iterable[Node]) -> set[str]:
        """Replace the nodes. Return the names of those that were added, removed or changed."""
        before, after = set(self._nodes), tuple(nodes)
        changed = {node.name for node in before.symmetric_difference(after)}
        self._by_request.forget(changed)
        self._nodes = after
        if changed:
            self._node_of = None
        return changed

    def place(
        self,
        view: UsageView,
        request: Request,
        reserved: Collection[DeviceId] = (),
        among: Collection[str] | None = None,
    ) -> Placement | Unschedulable:
        """Return what `evaluate.place` would.

        Args:
            view: what is allocated. All views given to one cache must share their generations.
            request: what to place.
            reserved: cards that are kept for others.
            among: names of the nodes that are eligible, None for all.
        """
        best: tuple[tuple[float, ...], str] | None = None
        placement: Placement | None = None
        rejections: list[NodeRejection] = []
        for node, verdict in self.evaluate(view, request, reserved, among):
            if isinstance(verdict, NodeRejection):
                rejections.append(verdict)
            elif best is None or (verdict.score, node.name) < best:
                best, placement = (verdict.score, node.name), verdict.placement
        return placement or Unschedulable(tuple(rejections))

    def evaluate(
        self,
        view: UsageView,
        request: Request,
        reserved: Collection[DeviceId] = (),
        among: Collection[str] | None = None,
    ) -> Iterator[tuple[Node, Verdict]]:
        """Yield each eligible node with its verdict, as `evaluate.evaluate` gives it."""
        verdicts = self._by_request.by_node(request)
        reserved_on = self._by_node(reserved)
        for node in self._nodes:
            name = node.name
            if among is not None and name not in among:
                continue
            generation, here = view.generation(name), reserved_on.get(name, _NO_CARDS)
            cached = verdicts.get(name)
            if cached is None or cached.generation != generation or cached.reserved != here:
                (verdict,) = evaluate(view, request, self._policy, (node,), here)
                cached = verdicts[name] = _CachedVerdict(generation, here, verdict)
            yield node, cached.verdict

    def _by_node(self, devices: Collection[DeviceId]) -> dict[str, frozenset[DeviceId]]:
        if not devices:
            return {}
        if self._node_of is None:
            self._node_of = {card.uuid: node.name for node in self._nodes for card in node.cards}
        by_node: dict[str, set[DeviceId]] = {}
        for device in devices:
            if device in self._node_of:
                by_node.setdefault(self._node_of[device], set()).add(device)
        return {name: frozenset(cards) for name, cards in by_node.items()}
