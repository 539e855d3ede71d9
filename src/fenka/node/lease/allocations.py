"""What pods hold of the node's cards: by the leases in the store, and by the kubelet's claims."""

from collections.abc import Iterable, Sequence

from fenka.core.request import Slice
from fenka.dialects import base
from fenka.isolation.resize_plan import larger
from fenka.node.inventory import NodeInventory, whole_slice
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import NodeCapacity
from fenka.node.lease.store import LeaseStore, Token


class Allocations:
    """Views of the store. The kubelet's claims add whole cards that another plugin has given away."""

    def __init__(self, store: LeaseStore, inventory: NodeInventory) -> None:
        self._store, self._inventory = store, inventory

    def is_exclusive(self, token: Token) -> bool:
        """Return whether the kubelet chose whole cards by UUID, on a node that does not share."""
        return token.resource == base.NVIDIA_GPU and not self._inventory.by_uuid.keys().isdisjoint(
            token.ids
        )

    def sharing_tokens(self) -> list[Token]:
        """Return the tokens of slices."""
        return [token for token in self._store.tokens.values() if not self.is_exclusive(token)]

    def exclusive_cards(self, claims: Iterable[Claim]) -> set[str]:
        """Return the UUIDs of cards that the kubelet has allocated by UUID."""
        ids = {
            device
            for token in self._store.tokens.values()
            if self.is_exclusive(token)
            for device in token.ids
        }
        for claim in claims:
            if claim.resource == base.NVIDIA_GPU:
                ids |= claim.ids
        return ids & self._inventory.by_uuid.keys()

    def pod_names(self) -> dict[str, str]:
        """Return the names of the pods that hold a lease, by UID."""
        return {lease.uid: lease.pod_name for lease in self._store.leases.values()}

    def slices_of(self, claim: Claim) -> tuple[Slice, ...]:
        """Return the slices of the container that a claim names; none while it has no lease."""
        for lease in self._store.leases.values():
            same_pod = lease.uid == claim.uid or (
                (lease.namespace, lease.pod) == (claim.namespace, claim.pod)
            )
            if same_pod and lease.container == claim.container:
                return tuple(lease.slices)
        return ()

    def slices_by_pod(self, claims: Sequence[Claim]) -> dict[str, list[Slice]]:
        """Return what each pod holds, by UID; for whole cards of another plugin by the pod's name."""
        pods: dict[str, dict[str, Slice]] = {}
        for lease in self._store.leases.values():
            # All leases of a pod repeat its slices, and add different whole cards. While a pod is
            # resized they differ: then the larger ones count.
            slices = pods.setdefault(lease.uid, {})
            for piece in lease.holds:
                slices[piece.uuid] = larger(slices.get(piece.uuid, piece), piece)
        ours = {device for token in self._store.tokens.values() for device in token.ids}
        cards = self._inventory.by_uuid
        for claim in claims:
            if claim.resource != base.NVIDIA_GPU or not claim.pod:
                continue
            for uuid in (claim.ids - ours) & cards.keys():
                slices = pods.setdefault(f"{claim.namespace}/{claim.pod}", {})
                slices[uuid] = whole_slice(cards[uuid])
        return {uid: list(slices.values()) for uid, slices in pods.items()}

    def capacity(self, claims: Sequence[Claim]) -> NodeCapacity:
        """Return the node with all that its pods hold."""
        share = self._inventory.shared_node()
        return NodeCapacity(share, self.slices_by_pod(claims), self.pod_names())
