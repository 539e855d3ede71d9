"""Advertises the node's cards to the kubelet: which device IDs of each resource it may allocate.

Selects whether the node shares its cards, from the node's labels.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fenka.core.request import Slice
from fenka.dialects import base, gpushare, nodes, nvidia, nvidia_mig
from fenka.dialects.base import Dialect, InvalidRecord, NodeResource
from fenka.dialects.registry import DIALECTS, leased_resources, node_resources
from fenka.formats.mig_profiles import RESOURCE_PREFIX
from fenka.node.inventory import NodeInventory, whole_slice
from fenka.node.kubelet import plugin as kubelet_plugin
from fenka.node.kubelet.client import Claim
from fenka.node.kubelet.plugin import Plugin
from fenka.node.lease import resolve
from fenka.node.lease.capacity import Allocations
from fenka.node.mig_instances import NodeInstances
from fenka.node.node_api import NodeApi


class ModeSelector:
    """The node's mode. A node whose labels stop sharing stays shared until its pods have ended."""

    def __init__(self, api: NodeApi, allocations: Allocations) -> None:
        self._api, self._allocations = api, allocations
        self.mode = nodes.EXCLUSIVE
        self.sharing: bool | None = None
        """Whether slices are offered, or only whole cards; None until the labels were read once."""
        self.draining = False
        """Whether the node is shared only because pods still hold slices."""

    @property
    def labelled(self) -> bool:
        """Whether the node has any of the labels that select a mode."""
        return nodes.has_mode_label(self._api.node.metadata.labels if self._api.node else {})

    def select(self) -> None:
        """Read the labels."""
        if self._api.node is None:
            return
        try:
            mode = nodes.node_mode(self._api.node.metadata.labels)
        except InvalidRecord as error:
            self._api.node_event("FenkaLabels", f"{error}; the node's mode stays as it is")
            return
        tokens = [
            token
            for token in self._allocations.sharing_tokens()
            # Instances are given by nodes that share nothing else, too.
            if not token.resource.startswith(RESOURCE_PREFIX)
        ]
        self.draining = not mode.memory and bool(tokens)
        if self.draining:
            pods = sorted({token.lease.pod_name for token in tokens if token.lease})
            self._api.node_event(
                "FenkaStillShared",
                f"the node stays shared while {', '.join(pods) or 'pods'} hold slices of its cards; "
                f"no new ones are given",
            )
        self.mode = nodes.SHARED if self.draining else mode
        self.sharing = self.mode.memory

    def isolates(self) -> bool:
        """Return whether limits are enforced. A label that disables that is reported on the Node."""
        if self.mode.isolated:
            return True
        self._api.node_event(
            "FenkaNotIsolated",
            "isolation is disabled by the node's labels: containers that start here may use all of their "
            "card's memory and time, whatever they requested",
        )
        return False


@dataclass(frozen=True, slots=True)
class Advertised:
    """Which resources the node advertises, in addition to what its mode selects.

    exclusive: nvidia.com/gpu while the node is not shared. labelled_only: That only while the node has a
    label at all: without one this program is about to be removed, and the kubelet remembers for minutes what
    it was offered. dialects: the resources of these. taint: whether a taint says that a card is free.
    """

    exclusive: bool = True
    labelled_only: bool = False
    dialects: tuple[Dialect, ...] = DIALECTS
    taint: bool = True


@dataclass(eq=False)
class DeviceAdvertiser:
    """Keeps the inventory on the Node and the device lists of all plugins current. plugins: by resource."""

    _api: NodeApi
    _mode: ModeSelector
    _inventory: NodeInventory
    _instances: NodeInstances
    _allocations: Allocations
    _plugins: Mapping[str, Plugin]
    _advertised: Advertised

    async def update_inventory(self, *, draining: bool) -> None:
        """Apply the Node's annotations about its cards, and publish the cards.

        draining: whether the program is about to end, so that the scheduler must send no more pods.
        """
        await self._inventory.apply_annotations()
        sharing = bool(self._mode.sharing)
        # The kubelet fails pods that arrive before it knows the devices, or after they are gone.
        serving = not draining and self._listed
        await self._inventory.publish(shared=sharing, schedulable=serving or not sharing)

    @property
    def registered(self) -> bool:
        """Whether the kubelet knows of every plugin that has devices."""
        return all(plugin.registered.is_set() for plugin in self._with_devices())

    @property
    def _listed(self) -> bool:
        """Whether the kubelet has read the device list of every plugin that has devices.

        The relay reads the list before the kubelet does, and answers the registration afterwards.
        """
        plugins = self._plugins[gpushare.MEMORY], *self._with_devices()
        return all(plugin.listed.is_set() and plugin.registered.is_set() for plugin in plugins)

    def _with_devices(self) -> Iterator[Plugin]:
        return (plugin for plugin in self._plugins.values() if plugin.devices)

    async def update_devices(self, claims: Sequence[Claim]) -> None:
        """Advertise what the node has now; nothing changes before its mode is known."""
        mode = self._mode
        if mode.sharing is None:
            return
        if mode.sharing:
            await self._record_whole_cards(claims)
        of_instances = nvidia_mig.node_resources(self._instances.offered())
        for resource, plugin in self._plugins.items():
            remembered = self._remembered(resource)
            if resource.startswith(RESOURCE_PREFIX):
                devices = self._instance_devices(resource, of_instances.get(resource))
                await plugin.advertise(devices, remembered=remembered)
            elif mode.sharing:
                devices = self._shared_devices(resource, claims)
                await plugin.advertise(devices, remembered=remembered)
            elif resource != base.NVIDIA_GPU:
                await plugin.advertise([], remembered=remembered)
            elif self._advertised.exclusive and (
                mode.labelled or not self._advertised.labelled_only
            ):
                exclusive = self._allocations.exclusive_cards(claims)
                divided = self._inventory.divided - exclusive
                cards = [
                    replace(card, cordoned=card.cordoned or card.uuid in divided)
                    for card in self._inventory.cards()
                ]
                await plugin.advertise(kubelet_plugin.whole(cards, exclusive))

    def _instance_devices(
        self, resource: str, described: NodeResource | None
    ) -> list[tuple[str, bool]]:
        """Return the device IDs of a MIG profile, also while pods have some that is not offered any more."""
        cards, node = self._inventory.cards(), self._inventory.shared_node().node
        allocated = list(self._allocated(resource, ()))
        units = {card.uuid: described.units_on(node, card) if described else 0 for card in cards}
        ids = kubelet_plugin.device_list(
            cards, units, allocated, (), self._instances.unhealthy_places()
        )
        listed = {device for device, _ in ids}
        left = (device for ids in allocated for device in ids.ids if device not in listed)
        return [*ids, *((device, True) for device in dict.fromkeys(left))]

    def _remembered(self, resource: str) -> bool:
        """Return whether the kubelet counts devices of ours, perhaps of an earlier process."""
        if resource == base.NVIDIA_GPU and not self._advertised.exclusive:
            return False  # Another plugin's.
        capacity = self._api.node.status.capacity if self._api.node else {}
        return capacity.get(resource, "0") != "0"

    def _shared_devices(self, resource: str, claims: Sequence[Claim]) -> list[tuple[str, bool]]:
        """Return all device IDs of a resource that a sharing node advertises."""
        cards, exclusive = self._inventory.cards(), self._allocations.exclusive_cards(claims)
        node = self._inventory.shared_node().node
        described = node_resources(self._advertised.dialects)[resource]
        offered = described.offered(self._mode.mode)
        units = {card.uuid: described.units_on(node, card) for card in cards}
        # IDs that are allocated stay advertised: the kubelet would not restart their containers.
        allocated = list(self._allocated(resource, claims))
        whole = [(uuid, True) for uuid in sorted(exclusive)] if resource == base.NVIDIA_GPU else []
        if not offered and not allocated:
            return whole if self._mode.mode.whole else []
        unavailable: Collection[str] = (
            exclusive if offered and not self._mode.draining else self._inventory.by_uuid.keys()
        )
        if described in nvidia.NODE_RESOURCES:
            unavailable = {*unavailable, *self._inventory.divided}
        return [*kubelet_plugin.device_list(cards, units, allocated, unavailable), *whole]

    def _allocated(
        self, resource: str, claims: Sequence[Claim]
    ) -> Iterator[kubelet_plugin.AllocatedIds]:
        if resource in leased_resources(self._advertised.dialects):
            for token in self._allocations.sharing_tokens():
                if token.resource == resource:
                    slices = tuple(token.lease.slices) if token.lease else ()
                    yield kubelet_plugin.AllocatedIds(tuple(token.ids), slices)
            return
        for claim in claims:
            if claim.resource == resource:
                slices = self._allocations.slices_of(claim)
                yield kubelet_plugin.AllocatedIds(tuple(sorted(claim.ids)), slices)

    async def _record_whole_cards(self, claims: Sequence[Claim]) -> None:
        """Record on pods which whole cards they were given before the node was shared.

        No annotation says so yet, whichever plugin gave them, and the scheduler must know those cards.
        """
        cards = self._inventory.by_uuid
        by_pod: dict[str, dict[str, list[Slice]]] = {}
        for claim in claims:
            if claim.resource != base.NVIDIA_GPU:
                continue
            pod = resolve.pod_of(claim, self._api.pods)
            if pod is None or nvidia.RECORD in pod.metadata.annotations:
                continue
            slices = [whole_slice(cards[uuid]) for uuid in sorted(claim.ids & cards.keys())]
            if slices:
                by_pod.setdefault(pod.metadata.uid, {})[claim.container] = slices
        for uid, by_container in by_pod.items():
            await self._api.try_annotate(self._api.pods[uid], nvidia.record(by_container))
