"""What pods request and hold of cards, counted in cards: a slice is a share of its card."""

from collections.abc import Iterable, Sequence

from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterState
from fenka.cluster.training_objects import TrainingPod
from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.units import card_units, mib_to_units
from fenka.dialects.base import InvalidRecord, SharedNode, SliceRequest
from fenka.dialects.placements import nominal_mib
from fenka.views.jobs import CardUse
from fenka.views.nodes import TOPOLOGY


class PodCards:
    """The nodes of pods, and what the pods hold of their cards."""

    def __init__(self, nodes: Sequence[Node] | None, pods: Iterable[Pod]) -> None:
        """Args: nodes: None without the right to list them: a pod's host tells its node's address."""
        pods = [pod for pod in pods if not pod.finished]
        names = {pod.spec.node_name for pod in pods}
        self._addresses = (
            None if nodes is None else {node.metadata.name: node.address for node in nodes}
        )
        known = nodes or ()
        self._state = ClusterState((node for node in known if node.metadata.name in names), pods)
        self._any = next(iter(self._state.shared_nodes()), None) or _first_shared(known)

    def node_address(self, pod: TrainingPod) -> str:
        """Return the address of a pod's node; empty before there is a node, and when it is gone."""
        if self._addresses is None:
            return pod.status.host_ip
        return self._addresses.get(pod.spec.node_name, "")

    def requested(self, pod: Pod) -> float | None:
        """Return the cards that a pod requests, rounded to a tenth; None if that cannot be told.

        Shares of a pod without a node are those of some sharing node's first card.
        """
        demand = pod.demand()
        if not demand.requests_gpu:
            return pod.amount(TOPOLOGY)
        shared = self._state.shared_node(pod.spec.node_name) or self._any
        try:
            shares = [_share(part, shared) for part in demand.parts]
        except InvalidRecord:
            return None
        known = [share for share in shares if share is not None]
        return round(sum(known), 1) if len(known) == len(shares) else None

    def allocated(self, pod: Pod) -> float | None:
        """Return the cards that a pod holds, from the time at which it has a node until it ends.

        None if that cannot be told.
        """
        return self.requested(pod) if pod.spec.node_name and not pod.finished else 0

    def held(self, pod: Pod) -> tuple[CardUse, ...]:
        """Return the cards that are known to be a pod's, by index."""
        allocation = self._state.allocation(pod.metadata.uid)
        if allocation is None or allocation.error is not None:
            return ()
        held: dict[int, int] = {}
        for piece in allocation.slices:
            held[piece.card] = held.get(piece.card, 0) + piece.memory_mib
        return tuple(CardUse(index, total_mib=mib) for index, mib in sorted(held.items()))


def _first_shared(nodes: Iterable[Node]) -> SharedNode | None:
    for node in nodes:
        shared = ClusterState([node]).shared_node(node.metadata.name)
        if shared is not None:
            return shared
    return None


def _share(part: SliceRequest, shared: SharedNode | None) -> float | None:
    """Return what a container requests, in cards; None if no card's size is known."""
    request = part.request
    if request.whole:
        return request.cards
    if request.memory is None:
        return request.cards * request.compute / WHOLE_COMPUTE
    if shared is None:
        return None
    card = shared.node.cards[0]
    size = card_units(card.memory_mib, shared.unit_mib)
    units = mib_to_units(nominal_mib(request, shared.node, card), card.memory_mib, shared.unit_mib)
    return units / size * request.cards if size else 0
