"""The node's life: leases bound and taken back, cards offered and withdrawn.

Everything is level-triggered: `reconcile` looks at what is there (the store, the kubelet, the API server,
the cards) and does what is missing, in any order of events and after any crash. Whatever cannot be done
now is done by the next pass.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Slice
from fenka.core.units import card_units
from fenka.dialects import (
    ack,
    base,
    gpu_manager,
    gpushare,
    hami,
    node_inventory,
    node_modes,
    nvidia,
)
from fenka.dialects.base import InvalidRecord, SharedNode
from fenka.dialects.leases import LeaseReport, Lingering, Refusal
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.isolation import control
from fenka.isolation.control import InvalidControl
from fenka.kubernetes.client import ApiError as ApiRefused
from fenka.kubernetes.client import ApiUnreachable
from fenka.node.kubelet import device_ids
from fenka.node.kubelet.client import Claim, Kubelet, KubeletUnavailable
from fenka.node.kubelet.plugin import Plugin
from fenka.node.lease import pod_processes, resolve
from fenka.node.lease.cdi import ContainerEdits, NoDriverFiles
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.report import Reporter
from fenka.node.lease.resize import NodeCapacity, Resizer, as_in_force, with_peak
from fenka.node.lease.resolve import LeaseDenied, LeasePending, Misplaced
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.monitor.health import CardHealth
from fenka.node.node_api import RESET, NodeApi

_LOG = logging.getLogger(__name__)

RECONCILE_S = 5.0
PATIENCE_S = 8.0
"""How long a container's start waits for what is on its way; the kubelet gives up after 30 s."""
_ASK_AGAIN_S = 0.1
LEAVE_S = 10.0
"""The chart gives the program 15 s to end."""
ON_THEIR_WAY_S = 3.0
"""From the scheduler's choice to the kubelet's question."""
REFUSED_S = 60.0
"""A pod that was refused for so long is reported, so that the scheduler moves it."""
UNCLAIMED_S = 30.0
"""A token that nobody holds after this long belongs to no pod: its pod was deleted or refused meanwhile."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent is told at its start.

    library: the native libraries, prepared for leases. contexts_mib: what a context takes, by card UUID.
    exclusive: whether nvidia.com/gpu is served while the node is not shared.
    labelled_only: but only while it has a label at all: without one this program is about to be taken away,
    and the kubelet remembers for minutes what it was offered.
    hami: whether HAMi's names are understood.
    """

    unit_mib: int
    library: Path
    contexts_mib: Mapping[str, int]
    driver: Callable[[Sequence[Slice]], ContainerEdits]
    exclusive: bool = True
    labelled_only: bool = False
    hami: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What the agent works on. living: UIDs of pods that have processes. clock: seconds since the epoch."""

    cluster: NodeApi
    kubelet: Kubelet
    cards: CardHealth
    store: LeaseStore
    leases: LeaseFiles
    living: Callable[[], set[str]] = pod_processes.living_pods
    clock: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class _Refused:
    """A pod that does not start. since: of the agent's clock."""

    uid: str
    since: float
    refusal: Refusal


ENDPOINTS = {
    gpushare.MEMORY: "fenka-gpu-mem",
    base.NVIDIA_GPU: "fenka-gpu-whole",
    ack.CORE: "fenka-gpu-core",
    gpu_manager.CORE: "fenka-vcuda-core",
    gpu_manager.MEMORY: "fenka-vcuda-memory",
}
"""What is offered, and how the plugins' sockets are called."""

LEASED = frozenset(dialect.LEASED for dialect in WITH_HAMI)
"""Those whose allocation brings a lease. The others are only counted: they come along with one of these."""

ASSIGNED = {gpushare.MEMORY: gpushare.ASSIGNED, gpu_manager.CORE: gpu_manager.ASSIGNED}
"""What is written on a pod that has its slice, as the former plugins did."""


class Agent:
    """A Lessor for all resources of one node."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.settings = settings
        self.cluster, self.kubelet, self.cards = parts.cluster, parts.kubelet, parts.cards
        self.store, self.leases = parts.store, parts.leases
        self._living, self._clock = parts.living, parts.clock
        self.plugins = {
            resource: Plugin(resource, endpoint, self.kubelet, self if resource in LEASED else None)
            for resource, endpoint in ENDPOINTS.items()
        }
        self.units, self.whole = self.plugins[gpushare.MEMORY], self.plugins[base.NVIDIA_GPU]
        for plugin in self.plugins.values():
            plugin.changed = self.trigger
        self.sharing: bool | None = None
        """Whether slices are offered, or whole cards alone; None while the labels have said nothing."""
        self._mode = node_modes.EXCLUSIVE
        self._draining = False
        self._leaving = False
        self._inventory_seen = False
        self._binding = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reporter = Reporter(self.cluster, self._report)
        self._resizer = Resizer(
            self.cluster,
            self.store,
            self.leases,
            settings.contexts_mib,
            self._binding,
            self._reporter.tell,
        )
        self._claims: Sequence[Claim] = ()
        self._lingering: set[str] = set()
        """UIDs of pods that are over for the API server, and hold on."""
        self._refusals: dict[str, _Refused] = {}
        """By token."""

    # ---- what the kubelet asks ----

    async def allocate(self, resource: str, ids: Sequence[str]) -> str:
        """A token, on the disk before the kubelet hears of it."""
        token = await asyncio.to_thread(self.store.issue, resource, ids)
        self.trigger()
        return token.name

    async def prepare(self, resource: str, ids: Sequence[str]) -> None:
        """Waits a moment for what is on its way, since every refusal costs the pod some 10 s."""
        deadline = self._clock() + PATIENCE_S
        while True:
            try:
                await self._serve(resource, frozenset(ids))
            except LeasePending:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                return

    async def _serve(self, resource: str, ids: frozenset[str]) -> None:
        try:
            claims = await self.kubelet.claims()
        except KubeletUnavailable as why:
            raise LeasePending(f"fenka: {why}") from None
        await self._recover(claims)
        served = False
        for token in list(self.store.tokens.values()):
            if token.resource == resource and ids == set(token.ids):
                served |= await self._ensure(token, claims)
        self._claims = claims
        await self._reporter.tell()
        if not served:
            raise LeasePending(
                "fenka: neither PodResources nor the kubelet's checkpoint says which pod these units are for"
            )

    # ---- one pass over everything ----

    def trigger(self) -> None:
        """Have a pass soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled: passes when something happens, and every few seconds."""
        self.cluster.changed = self.trigger
        while True:
            self._wanted.clear()
            try:
                await self.reconcile()
            except (OSError, InvalidControl, NoDriverFiles) as why:
                _LOG.error("not everything could be done, it is tried again: %s", why)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: Python 3.11's may swallow a cancellation.
                async with asyncio.timeout(RECONCILE_S):
                    await self._wanted.wait()

    async def reconcile(self) -> None:
        """Do all that is missing."""
        self._select_mode()
        await self._apply_annotations()
        await self._publish_inventory()
        try:
            claims = await self.kubelet.claims()
        except KubeletUnavailable:
            claims = None
        if claims is not None and self.cluster.synced:
            await self._recover(claims)
            for token in list(self.store.tokens.values()):
                with contextlib.suppress(LeaseDenied):
                    await self._ensure(token, claims)
            known = claims
            await self._resizer.look(
                lambda: NodeCapacity(self.share(), self._held(known), self._names())
            )
            await self._collect(claims)
            self._claims = claims
            await self._reporter.keep_up()
        await self._update_devices(claims or [])

    # ---- sharing or exclusive ----

    def _select_mode(self) -> None:
        node = self.cluster.node
        if node is None:
            return
        try:
            mode = node_modes.node_mode(node.metadata.labels)
        except InvalidRecord as why:
            self.cluster.node_event("FenkaLabels", f"{why}; until then nothing changes")
            return
        held = [it for it in self.store.tokens.values() if not self._exclusive(it)]
        self._draining = not mode.memory and bool(held)
        if self._draining:
            pods = sorted({f"{it.lease.namespace}/{it.lease.pod}" for it in held if it.lease})
            self.cluster.node_event(
                "FenkaStillShared",
                f"the node stays shared while {', '.join(pods) or 'pods'} hold slices of its cards; "
                f"no new ones are given",
            )
        self._mode = node_modes.SHARED if self._draining else mode
        self.sharing = self._mode.memory

    def _exclusive(self, token: Token) -> bool:
        """Whether the kubelet chose the cards: by their UUIDs, on a node that does not share."""
        return token.resource == base.NVIDIA_GPU and not self._by_uuid().keys().isdisjoint(
            token.ids
        )

    def _by_uuid(self) -> dict[str, Card]:
        return {card.uuid: card for card in self.cards.known}

    @property
    def _labelled(self) -> bool:
        return node_modes.has_mode_label(
            self.cluster.node.metadata.labels if self.cluster.node else {}
        )

    async def _apply_annotations(self) -> None:
        """What people have written on the node about its cards."""
        node = self.cluster.node
        if node is None:
            return
        written = node.metadata.annotations
        if self._inventory_seen and base.CARDS not in written:
            _LOG.info("annotation %s was removed: cards that are lost are forgotten", base.CARDS)
            self.cards.forget_lost()
        self._inventory_seen = base.CARDS in written
        if RESET in written:
            _LOG.info("annotation %s=%s: these cards are used again", RESET, written[RESET])
            await asyncio.to_thread(self.cards.reset, node_inventory.parse_indexes(written[RESET]))
            with contextlib.suppress(ApiRefused, ApiUnreachable):
                await self.cluster.take_reset()

    async def _publish_inventory(self) -> None:
        cards = self.now()
        if self.sharing and (self._leaving or not self._told):
            # Whoever came now would be failed by the kubelet.
            shown = tuple(replace(card, healthy=False) for card in cards)
        else:
            shown = cards
        inventory = node_inventory.encode_inventory(shown, self.settings.unit_mib)
        try:
            await self.cluster.describe(inventory, len(cards) if self.sharing else 0)
        except (ApiRefused, ApiUnreachable) as why:
            _LOG.warning("the node's cards could not be written: %s", why)

    def now(self) -> tuple[Card, ...]:
        """The cards with their health, cordoned as the node's annotation says."""
        annotations = self.cluster.node.metadata.annotations if self.cluster.node else {}
        return self.cards.now(
            node_inventory.parse_indexes(annotations.get(node_inventory.CORDONED, ""))
        )

    def containers(self) -> dict[str, str]:
        """Containers' names by their runtime's ids."""
        return {
            status.container_id.rpartition("/")[2]: status.name
            for pod in self.cluster.pods.values()
            for status in (*pod.status.container_statuses, *pod.status.init_container_statuses)
        }

    def share(self) -> SharedNode:
        """The node as gpushare's dialect has it."""
        return SharedNode(Node(self.cluster.name, self.now()), self.settings.unit_mib)

    async def _update_devices(self, claims: Sequence[Claim]) -> None:
        if self.sharing is None:
            return
        exclusive = self._held_exclusively(claims)
        if self.sharing:
            await self._record(claims)
            for resource, plugin in self.plugins.items():
                coins = self._coins(resource, claims, exclusive)
                await plugin.offer(coins, remembered=self._remembered(resource))
            return
        for resource, plugin in self.plugins.items():
            if resource != base.NVIDIA_GPU:
                await plugin.offer([], remembered=self._remembered(resource))
        if self.settings.exclusive and (self._labelled or not self.settings.labelled_only):
            await self.whole.offer(device_ids.whole(self.now(), exclusive, ()))

    def _remembered(self, resource: str) -> bool:
        """Whether the kubelet counts any, perhaps of a process before this one. Not of another plugin."""
        if resource == base.NVIDIA_GPU and not self.settings.exclusive:
            return False
        capacity = self.cluster.node.status.capacity if self.cluster.node else {}
        return capacity.get(resource, "0") != "0"

    def _held_exclusively(self, claims: Sequence[Claim]) -> set[str]:
        """UUIDs of cards that the kubelet has given away itself."""
        cards = self._by_uuid()
        ids = {one for it in self.store.tokens.values() if self._exclusive(it) for one in it.ids}
        ids |= {one for it in claims if it.resource == base.NVIDIA_GPU for one in it.ids}
        return ids & cards.keys()

    def _coins(
        self, resource: str, claims: Sequence[Claim], exclusive: set[str]
    ) -> list[tuple[str, bool]]:
        """All ids of a resource that a sharing node offers; none of one that its mode leaves out."""
        cards, mode, unit = self.now(), self._mode, self.settings.unit_mib
        worth: dict[str, tuple[bool, Callable[[Card], int]]] = {
            gpushare.MEMORY: (mode.memory, lambda it: card_units(it.memory_mib, unit)),
            ack.CORE: (mode.compute, lambda it: it.compute),
            gpu_manager.CORE: (mode.compute, lambda it: it.compute),
            gpu_manager.MEMORY: (
                mode.compute,
                lambda it: card_units(it.memory_mib, gpu_manager.UNIT_MIB),
            ),
            base.NVIDIA_GPU: (
                mode.whole or self.settings.hami,
                lambda _: hami.SPLIT if self.settings.hami else 1,
            ),
        }
        wanted, worth_of = worth[resource]
        # What is held of a resource stays offered: the kubelet would not start its container again.
        held = list(self._coins_held(resource, claims))
        kept = [(one, True) for one in sorted(exclusive)] if resource == base.NVIDIA_GPU else []
        if not wanted and not held:
            return kept if self._mode.whole else []
        withheld = exclusive if wanted and not self._draining else self._by_uuid().keys()
        return [*device_ids.device_list(cards, worth_of, held, withheld), *kept]

    def _coins_held(self, resource: str, claims: Sequence[Claim]) -> Iterator[device_ids.Held]:
        if resource in LEASED:
            for token in self.store.tokens.values():
                if token.resource == resource and not self._exclusive(token):
                    slices = tuple(token.lease.slices) if token.lease else ()
                    yield device_ids.Held(tuple(token.ids), slices)
            return
        leases = [it.lease for it in self.store.tokens.values() if it.lease]
        for claim in claims:
            if claim.resource == resource:
                slices = next(
                    (
                        tuple(it.slices)
                        for it in leases
                        if it.container == claim.container
                        and (
                            it.uid == claim.uid
                            or (it.namespace, it.pod) == (claim.namespace, claim.pod)
                        )
                    ),
                    (),
                )
                yield device_ids.Held(tuple(sorted(claim.ids)), slices)

    async def _record(self, claims: Sequence[Claim]) -> None:
        """Pods that were given whole cards before the node was shared, by whomever, say so nowhere: the
        scheduler must know which cards those are."""
        cards, pods = self._by_uuid(), list(self.cluster.pods.values())
        found: dict[str, dict[str, list[Slice]]] = {}
        for claim in claims:
            pod = resolve.pod_of(claim, pods) if claim.resource == base.NVIDIA_GPU else None
            if pod is None or nvidia.RECORD in pod.metadata.annotations:
                continue
            slices = [
                Slice(cards[one].index, DeviceId(one), cards[one].memory_mib, cards[one].compute)
                for one in sorted(claim.ids & cards.keys())
            ]
            if slices:
                found.setdefault(pod.metadata.uid, {})[claim.container] = slices
        for uid, by_container in found.items():
            await self.cluster.note(self.cluster.pods[uid], nvidia.record(by_container))

    @property
    def _told(self) -> bool:
        """Whether the kubelet knows all slices that are offered."""
        return self.units.told.is_set() and all(
            it.told.is_set() for it in self.plugins.values() if it.devices
        )

    @property
    def ready(self) -> bool:
        """Whether the kubelet knows all that the node has to offer now, be it nothing."""
        offered = [it for it in self.plugins.values() if it.devices]
        return self.sharing is not None and all(it.registered.is_set() for it in offered)

    async def drain(self) -> None:
        """Have no new pod sent here, and serve those that are on their way; `run` goes on meanwhile.

        The kubelet fails a pod at once that comes while there is no plugin, and tells the scheduler only
        with its next status. The extender hears of it at once.
        """
        self._leaving = True
        if self.sharing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._publish_inventory()
                    await asyncio.sleep(ON_THEIR_WAY_S)

    # ---- leases ----

    async def _recover(self, claims: Sequence[Claim]) -> None:
        """Tokens that the kubelet remembers and the store does not: the store was lost."""
        for claim in claims:
            ours = claim.resource in LEASED and claim.token
            if ours and claim.token not in self.store.tokens and self._runs(claim.uid):
                await asyncio.to_thread(
                    self.store.issue, claim.resource, claim.ids, name=claim.token
                )

    async def _ensure(self, token: Token, claims: Sequence[Claim]) -> bool:
        """Have the token's lease if a pod holds it; whether one does. Raises LeaseDenied, OSError."""
        pods = list(self.cluster.pods.values())
        claim = resolve.claim_of(token, claims, pods)
        if claim is None:
            return False
        if token.lease is None:
            pod = resolve.pod_of(claim, pods)
            if pod is None:
                raise LeasePending("fenka: the API server has not shown this node the pod yet")
            if pod.finished:
                return False
            try:
                token = await self._bind(token, pod, claim.container, claims)
            except LeaseDenied as why:
                self._refuse(token, pod, why)
                raise
            self._refusals.pop(token.name, None)
        async with self._binding:
            if token.name in self.store.tokens and token.lease is not None:
                await asyncio.to_thread(self._make, token.name, token.lease)
        return True

    async def _bind(self, token: Token, pod: Pod, container: str, claims: Sequence[Claim]) -> Token:
        runtime_class = pod.spec.runtime_class_name
        handler = await self.cluster.handler(runtime_class) if runtime_class else ""
        async with self._binding:
            token = self.store.tokens.get(token.name, token)
            if token.lease is not None:
                return token
            resolve.check_pod(pod, handler)
            lease = self._whole_story(token, self._decided(token, pod, container), pod)
            resolve.check_capacity(lease, self._held(claims), self.now(), self._names())
            lease = msgspec.structs.replace(lease, library=str(self.settings.library))
            token = msgspec.structs.replace(token, lease=lease)
            await asyncio.to_thread(self.store.put, token)
        _LOG.info(
            "%s/%s container %s holds %s",
            lease.namespace,
            lease.pod,
            container,
            ", ".join(f"{it.memory_mib} MiB of card {it.card}" for it in lease.slices),
        )
        if assigned := ASSIGNED.get(token.resource):
            self._later(self.cluster.note(pod, {assigned: "true"}))
        return token

    def _whole_story(self, token: Token, lease: Lease, pod: Pod) -> Lease:
        """With what is in force already, and what the pod's other containers have."""
        siblings = [
            it.lease
            for it in self.store.tokens.values()
            if it.lease is not None and it.lease.uid == lease.uid
        ]
        if self._exclusive(token):
            return lease
        found = None
        page = self.leases.control(token.name)
        if not lease.limits_mib and page.exists():
            # Programs may run by it, also where other files of the lease are lost.
            with contextlib.suppress(InvalidControl):
                found = as_in_force(lease, control.read_interrupted(page).limits, self.cards.known)
        if found is None:
            resolve.check_siblings(lease, siblings)
        return with_peak(found or lease, siblings, pod)

    def _decided(self, token: Token, pod: Pod, container: str) -> Lease:
        if self._exclusive(token):
            return resolve.whole_lease(self.now(), pod, container, token.ids)
        lease = resolve.share_lease(
            self.share(),
            pod,
            container,
            token.resource,
            len(token.ids),
            WITH_HAMI if self.settings.hami else DIALECTS,
        )
        return lease if self._isolated() else resolve.unlimited(lease, self.now())

    def _isolated(self) -> bool:
        """A limit that cannot be enforced is an error; some labels ask for none."""
        if self._mode.isolated:
            return True
        self.cluster.node_event(
            "FenkaNotIsolated",
            "by its labels this node does not isolate: containers that start here may use all of their "
            "card's memory and time, whatever they asked for",
        )
        return False

    def _make(self, name: str, lease: Lease) -> None:
        if not self.leases.complete(name):
            edits = self.settings.driver(lease.slices)
            self.leases.make(name, lease, self.settings.contexts_mib, edits)

    def _held(self, claims: Sequence[Claim]) -> dict[str, list[Slice]]:
        """What pods hold, by UID; whole cards that another plugin has given away, by the pod's name."""
        held: dict[str, dict[str, Slice]] = {}
        for token in self.store.tokens.values():
            if token.lease is not None:
                # All tokens of a pod speak of the same slices, and of different whole cards.
                # But for a pod that is being resized: then the larger ones count.
                of_pod = held.setdefault(token.lease.uid, {})
                for piece in token.lease.holds:
                    of_pod[piece.uuid] = _larger(of_pod.get(piece.uuid, piece), piece)
        ours = {one for it in self.store.tokens.values() for one in it.ids}
        cards: dict[str, Card] = {card.uuid: card for card in self.cards.known}
        for claim in claims:
            for one in claim.ids - ours if claim.resource == base.NVIDIA_GPU else ():
                if (card := cards.get(one)) is not None and claim.pod:
                    of_pod = held.setdefault(f"{claim.namespace}/{claim.pod}", {})
                    of_pod[one] = Slice(card.index, DeviceId(one), card.memory_mib, card.compute)
        return {uid: list(slices.values()) for uid, slices in held.items()}

    def _refuse(self, token: Token, pod: Pod, why: LeaseDenied) -> None:
        if isinstance(why, LeasePending):
            return
        known = self._refusals.get(token.name)
        since = known.since if known is not None else self._clock()
        refusal = Refusal(str(why), isinstance(why, Misplaced))
        self._refusals[token.name] = _Refused(pod.metadata.uid, since, refusal)

    def _report(self) -> LeaseReport:
        """What the scheduler is to know of this node's pods, in a place that their owners cannot write."""
        pods, names = self.cluster.pods, self._names()
        uids = {it.full_name: uid for uid, it in pods.items()}
        held = {
            uids.get(name, name): tuple(slices) for name, slices in self._held(self._claims).items()
        }
        now = self._clock()
        return LeaseReport(
            {uid: slices for uid, slices in held.items() if self._runs(uid)},
            {
                uid: Lingering(names.get(uid, uid), slices)
                for uid, slices in held.items()
                if uid in self._lingering and not self._runs(uid)
            },
            {
                it.uid: it.refusal
                for it in self._refusals.values()
                if now - it.since >= REFUSED_S and self._runs(it.uid)
            },
        )

    def _names(self) -> dict[str, str]:
        leases = (it.lease for it in self.store.tokens.values() if it.lease)
        return {it.uid: f"{it.namespace}/{it.pod}" for it in leases}

    async def _collect(self, claims: Sequence[Claim]) -> None:
        """Take away what nobody holds any more: leases of dead pods, files without a token, old libraries."""
        dead = [it for it in self.store.tokens.values() if not self._shown(it, claims)]
        if dead:
            living = await asyncio.to_thread(self._living)
            for token in dead:
                if token.lease is None or token.lease.uid not in living:
                    await self._remove(token)
        leases = [it.lease for it in self.store.tokens.values() if it.lease is not None]
        self._lingering = {it.uid for it in leases if not self._runs(it.uid)}
        self._refusals = {
            name: it for name, it in self._refusals.items() if name in self.store.tokens
        }
        async with self._binding:
            await asyncio.to_thread(self._sweep, set(self.store.tokens))

    def _shown(self, token: Token, claims: Sequence[Claim]) -> bool:
        """Whether the kubelet or the API server still speaks of whoever holds it."""
        if token.lease is None:
            if self._clock() - token.made_at < UNCLAIMED_S:
                return True
            claim = resolve.claim_of(token, claims, list(self.cluster.pods.values()))
            return claim is not None and (not claim.uid or self._runs(claim.uid))
        if self._runs(token.lease.uid):
            return True
        claim = resolve.claim_of(token, claims, list(self.cluster.pods.values()))
        # PodResources shows pods that the kubelet still ends; the checkpoint also those that it has ended.
        return claim is not None and not claim.uid and token.lease.uid not in self.cluster.pods

    def _runs(self, uid: str) -> bool:
        pod = self.cluster.pods.get(uid)
        return pod is not None and not pod.finished

    async def _remove(self, token: Token) -> None:
        async with self._binding:
            await asyncio.to_thread(self.leases.remove, token.name)
            await asyncio.to_thread(self.store.drop, token.name)
        if token.lease is not None:
            _LOG.info("%s/%s has ended", token.lease.namespace, token.lease.pod)

    def _sweep(self, known: Collection[str]) -> None:
        for name in self.leases.orphans(known):
            self.leases.remove(name)
        kept = {str(self.settings.library), *self.leases.libraries()}
        kept |= {it.lease.library for it in self.store.tokens.values() if it.lease}
        for library in self.settings.library.parent.iterdir():
            if str(library) not in kept:
                shutil.rmtree(library, ignore_errors=True)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _larger(one: Slice, other: Slice) -> Slice:
    return replace(
        one,
        memory_mib=max(one.memory_mib, other.memory_mib),
        compute=max(one.compute, other.compute),
    )
