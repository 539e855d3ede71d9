"""Assembles the parts of the node program, also for tests with fakes at the edges. Has its control loop."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.inventory import DeviceId
from fenka.dialects import nvidia_mig
from fenka.dialects.mig_records import DividedCard
from fenka.dialects.registry import leased_resources, node_resources
from fenka.hardware.driver_edits import NoDriverFiles
from fenka.isolation.lease_control import InvalidControl
from fenka.node.advertiser import Advertised, DeviceAdvertiser, ModeSelector
from fenka.node.free_cards import FreeCardsTaint
from fenka.node.inventory import CardHealth, NodeInventory
from fenka.node.kubelet.client import Claim, Kubelet, KubeletUnavailable
from fenka.node.kubelet.plugin import Plugin
from fenka.node.lease import pod_processes, reconciler
from fenka.node.lease.capacity import Allocations
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.pod_processes import OverduePods
from fenka.node.lease.report import Denials, Reporter
from fenka.node.lease.resize import Resizer
from fenka.node.lease.store import LeaseStore
from fenka.node.mig_instances import ClosedCards, NodeInstances
from fenka.node.mig_layouts import NodeLayouts
from fenka.node.node_api import NodeApi
from fenka.server.pod_spans import PodSpans

_LOG = logging.getLogger(__name__)

RECONCILE_S = 5.0
DRAIN_S = 10.0
"""The chart gives the program 15 s to end."""
REMOVAL_S = 3.0
"""For the taint. `fenka uninstall` removes it, too."""
ADMISSION_S = 3.0
"""From the scheduler's decision to the kubelet's call of Allocate."""


Phase = Callable[[Sequence[Claim]], Awaitable[None]]
"""A part of a pass, given what the kubelet says of device IDs."""


@dataclass(eq=False)
class Agent:
    """Makes passes. phases: called in order. wanted: set to request a pass.

    Everything is level-triggered. A pass looks at what exists: the store, the kubelet, the API server, the
    cards. It does what is missing, in any order of events and after any crash. The next pass does what
    fails now.
    """

    _api: NodeApi
    _kubelet: Kubelet
    _mode: ModeSelector
    _advertiser: DeviceAdvertiser
    _phases: Sequence[Phase]
    _taint: FreeCardsTaint
    _wanted: asyncio.Event
    _draining: bool = False

    async def run(self) -> None:
        """Make a pass on every change, and every few seconds, until cancelled."""
        while True:
            self._wanted.clear()
            try:
                await self.reconcile()
            except (OSError, InvalidControl, NoDriverFiles) as error:
                _LOG.error("the pass failed and is repeated: %s", error)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: Python 3.11's may swallow a cancellation.
                async with asyncio.timeout(RECONCILE_S):
                    await self._wanted.wait()

    async def reconcile(self) -> None:
        """Make one pass. Raises OSError, InvalidControl, NoDriverFiles."""
        self._mode.select()
        await self._advertiser.update_inventory(draining=self._draining)
        claims: Sequence[Claim] = ()
        with contextlib.suppress(KubeletUnavailable):
            claims = await self._kubelet.claims()
            if self._api.synced:
                for phase in self._phases:
                    await phase(claims)
        await self._advertiser.update_devices(claims)

    @property
    def problem(self) -> str:
        """Return why it is not ready, empty if the kubelet knows all devices that the node advertises."""
        ready = self._mode.sharing is not None and self._advertiser.registered
        return "" if ready else "not registered with the kubelet"

    async def drain(self) -> None:
        """Stop the scheduler from sending pods, and serve those that it sent; `run` continues meanwhile.

        The kubelet fails a pod that arrives while there is no plugin, and tells the scheduler only with its
        next status. The extender reads the inventory at once.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOVAL_S):
                await self._taint.end()
        if self._mode.sharing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._advertiser.update_inventory(draining=True)
                    await asyncio.sleep(ADMISSION_S)


@dataclass(frozen=True, slots=True)
class Edges:
    """The program's surroundings: the outside world, and its files on disk.

    layouts: a file of mig-parted, if there is one. living: returns the UIDs of pods that have processes.
    kill: kills the processes of pods; None: programs that outlive their pods are not ended.
    clock: seconds since the epoch. spans: gets spans of pods; None: nobody does.
    """

    api: NodeApi
    kubelet: Kubelet
    health: CardHealth
    store: LeaseStore
    files: LeaseFiles
    instances: NodeInstances
    unit_mib: int
    advertised: Advertised = field(default_factory=Advertised)
    layouts: Path | None = None
    living: Callable[[], set[str]] = pod_processes.living_pods
    kill: Callable[[Collection[str]], int] | None = pod_processes.kill_pods
    clock: Callable[[], float] = time.time
    spans: PodSpans | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """The assembled parts that run, or that others read. trigger: requests a pass of the agent."""

    agent: Agent
    inventory: NodeInventory
    instances: NodeInstances
    closed: ClosedCards
    plugins: Mapping[str, Plugin]
    trigger: Callable[[], None]


def assemble(edges: Edges) -> Program:
    """Connect all parts."""
    api, kubelet, store, files = edges.api, edges.kubelet, edges.store, edges.files
    wanted = asyncio.Event()
    api.changed = wanted.set
    dialects = edges.advertised.dialects
    instances = edges.instances
    # A card's profiles are known before it is divided.
    of_instances = nvidia_mig.node_resources(
        DividedCard(DeviceId(uuid), geometry, on_demand=True, instances={})
        for uuid, geometry in instances.geometries.items()
    )
    leased = leased_resources(dialects)
    denials = Denials(edges.clock)
    inventory = NodeInventory(api, edges.health, instances, edges.unit_mib)
    allocations = Allocations(api, store, inventory)
    instances.held, instances.changed = allocations.held_places, wanted.set
    instances.error = edges.health.instance_error
    mode = ModeSelector(api, allocations)
    collector = reconciler.GarbageCollector(
        api, store, files, edges.living, edges.clock, instances.trigger
    )
    reporter = Reporter(api, allocations, denials, lambda: collector.lingering)
    spans = edges.spans
    binder = reconciler.LeaseBinder(api, store, files, allocations, dialects, mode.isolates, spans)
    of_leases = reconciler.LeaseInstances(store, files, instances, edges.clock)
    leases = reconciler.LeaseReconciler(api, store, files, binder, of_leases, denials, leased)
    service = reconciler.LeaseService(
        kubelet, store, leases, reporter, wanted.set, edges.clock, spans
    )
    resizer = Resizer(api, store, files, allocations, reporter)
    plugins = {
        name: Plugin(
            name, resource.plugin, kubelet, service if name in leased else None, wanted.set
        )
        for name, resource in {**node_resources(dialects), **of_instances}.items()
    }
    advertiser = DeviceAdvertiser(
        api, mode, inventory, instances, allocations, plugins, edges.advertised
    )
    closed = ClosedCards(api, instances, edges.clock)
    layouts = NodeLayouts(
        api, instances, inventory, allocations, closed, edges.clock, edges.layouts
    )
    taint = FreeCardsTaint(api, mode, inventory, allocations, edges.advertised, edges.clock)
    overdue = [OverduePods(api, store, edges.kill, edges.clock).end] if edges.kill else []
    phases = (
        *overdue,
        *(leases.reconcile, resizer.reconcile, collector.collect, reporter.publish),
        layouts.reconcile,
        taint.reconcile,
    )
    agent = Agent(api, kubelet, mode, advertiser, phases, taint, wanted)
    return Program(agent, inventory, instances, closed, plugins, wanted.set)
