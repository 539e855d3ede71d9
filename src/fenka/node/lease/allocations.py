"""What pods hold of the node's cards: by the leases in the store, and by the kubelet's claims."""

from collections.abc import Iterable, Sequence

from fenka.cluster.allocation import read_allocation
from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects import base
from fenka.dialects.base import split_instance
from fenka.dialects.mig_records import with_instances
from fenka.isolation.resize_plan import larger
from fenka.node.inventory import NodeInventory, whole_slice
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import NodeCapacity
from fenka.node.lease.store import LeaseStore, Token
from fenka.node.node_api import NodeApi


class Allocations:
    """Views of the store. The kubelet's claims add whole cards that another plugin has given away."""

    def __init__(self, api: NodeApi, store: LeaseStore, inventory: NodeInventory) -> None:
        self._api, self._store, self._inventory = api, store, inventory

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
        share = with_instances(self._inventory.shared_node(), self.held_places())
        return NodeCapacity(share, self.slices_by_pod(claims), self.pod_names())

    def expected(self, claims: Sequence[Claim]) -> NodeCapacity:
        """Return the same with what pods hold that are placed here and have no lease yet."""
        capacity = self.capacity(claims)
        held, names = dict(capacity.held), dict(capacity.names)
        for uid, pod in self._api.pods.items():
            if uid in held or pod.finished:
                continue
            allocation = read_allocation(capacity.share, pod)
            if allocation is not None and allocation.error is None:
                held[uid], names[uid] = allocation.slices, pod.full_name
        return NodeCapacity(capacity.share, held, names)

    def holders(self, claims: Sequence[Claim]) -> dict[DeviceId, list[str]]:
        """Return the pods that hold each card itself and each instance, also those without a lease yet."""
        capacity = self.expected(claims)
        holders: dict[DeviceId, set[str]] = {}
        for uid, slices in capacity.held.items():
            for piece in slices:
                holders.setdefault(piece.uuid, set()).add(capacity.names.get(uid, uid))
        for uuid in self.exclusive_cards(claims):
            holders.setdefault(DeviceId(uuid), {"a pod"})
        return {device: sorted(names) for device, names in holders.items()}

    def held_places(self) -> frozenset[DeviceId]:
        """Return the MIG instances that leases name, whether or not they exist."""
        return frozenset(
            piece.uuid
            for lease in self._store.leases.values()
            for piece in (*lease.slices, *lease.holds)
            if split_instance(piece.uuid)
        )
