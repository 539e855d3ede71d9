"""Assembles the parts of the node program. Also used by tests, with fakes at the edges."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.request import Slice
from fenka.dialects.registry import leased_resources, node_resources
from fenka.node.advertiser import Advertised, DeviceAdvertiser
from fenka.node.agent import Agent
from fenka.node.health import CardHealth
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Kubelet
from fenka.node.kubelet.plugin import Plugin
from fenka.node.lease import pod_processes
from fenka.node.lease.allocations import Allocations
from fenka.node.lease.binder import LeaseBinder, LeaseResolver
from fenka.node.lease.cdi import ContainerEdits
from fenka.node.lease.collector import GarbageCollector
from fenka.node.lease.denials import Denials
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.limits import LeaseLimits
from fenka.node.lease.reconciler import LeaseReconciler, LeaseService
from fenka.node.lease.report import Reporter
from fenka.node.lease.resize import Resizer
from fenka.node.lease.store import Lease, LeaseStore
from fenka.node.mode import ModeSelector
from fenka.node.node_api import NodeApi


@dataclass(frozen=True, slots=True)
class Settings:
    """What the program is given at its start.

    library: Directory of the native libraries, prepared for leases. contexts_mib: context overhead by card
    UUID. driver: the driver's part of a lease's container edits.
    """

    unit_mib: int
    library: Path
    contexts_mib: Mapping[str, int]
    driver: Callable[[Sequence[Slice]], ContainerEdits]
    advertised: Advertised = field(default_factory=Advertised)


@dataclass(frozen=True, slots=True)
class Edges:
    """The outside world, and what the program keeps on disk.

    living: UIDs of pods that have processes. clock: seconds since the epoch.
    """

    api: NodeApi
    kubelet: Kubelet
    health: CardHealth
    store: LeaseStore
    files: LeaseFiles
    living: Callable[[], set[str]] = pod_processes.living_pods
    clock: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Program:
    """The assembled parts that run, or that others read. trigger: requests a pass of the agent."""

    agent: Agent
    inventory: NodeInventory
    plugins: Mapping[str, Plugin]
    trigger: Callable[[], None]


def assemble(settings: Settings, edges: Edges) -> Program:
    """Connect all parts."""
    api, kubelet, store, files = edges.api, edges.kubelet, edges.store, edges.files
    wanted = asyncio.Event()
    api.changed = wanted.set
    denials = Denials(edges.clock)
    inventory = NodeInventory(api, edges.health, settings.unit_mib)
    allocations = Allocations(store, inventory)
    mode = ModeSelector(api, allocations)
    collector = GarbageCollector(api, store, files, settings.library, edges.living, edges.clock)
    reporter = Reporter(api, allocations, denials, lambda: collector.lingering)
    dialects = settings.advertised.dialects
    leased = leased_resources(dialects)
    assigned = {dialect.LEASED: dialect.ASSIGNED for dialect in dialects if dialect.ASSIGNED}
    resolver = LeaseResolver(inventory, allocations, dialects, mode.isolates, settings.library)

    def make_files(token: str, lease: Lease) -> None:
        if not files.is_complete(token):
            files.make(token, lease, settings.contexts_mib, settings.driver(lease.slices))

    binder = LeaseBinder(api, store, files, resolver, assigned)
    leases = LeaseReconciler(api, store, binder, denials, make_files, leased)
    service = LeaseService(kubelet, store, leases, reporter, wanted.set, edges.clock)
    limits = LeaseLimits(store, files, settings.contexts_mib)
    resizer = Resizer(api, store, limits, inventory, allocations, reporter)
    plugins = {
        name: Plugin(
            name, resource.plugin, kubelet, service if name in leased else None, wanted.set
        )
        for name, resource in node_resources(dialects).items()
    }
    advertiser = DeviceAdvertiser(api, mode, inventory, allocations, plugins, settings.advertised)
    phases = leases.reconcile, resizer.reconcile, collector.collect, reporter.publish
    agent = Agent(api, kubelet, mode, advertiser, phases, wanted)
    return Program(agent, inventory, plugins, wanted.set)
