"""Assembles the parts of the node program. Also used by tests, with fakes at the edges."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.inventory import DeviceId
from fenka.dialects import nvidia_mig
from fenka.dialects.mig_records import DividedCard
from fenka.dialects.registry import leased_resources, node_resources
from fenka.node.advertiser import Advertised, DeviceAdvertiser
from fenka.node.agent import Agent
from fenka.node.closed_cards import ClosedCards
from fenka.node.health import CardHealth
from fenka.node.instances import NodeInstances
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Kubelet
from fenka.node.kubelet.plugin import Plugin
from fenka.node.lease import pod_processes
from fenka.node.lease.allocations import Allocations
from fenka.node.lease.binder import LeaseBinder
from fenka.node.lease.collector import GarbageCollector
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.instances import LeaseInstances
from fenka.node.lease.overdue import OverduePods
from fenka.node.lease.reconciler import LeaseReconciler, LeaseService
from fenka.node.lease.report import Denials, Reporter
from fenka.node.lease.resize import Resizer
from fenka.node.lease.store import LeaseStore
from fenka.node.mig_layouts import LayoutFollower
from fenka.node.mig_mode import MigConverter
from fenka.node.mode import ModeSelector
from fenka.node.node_api import NodeApi


@dataclass(frozen=True, slots=True)
class Edges:
    """What the program is given: the outside world, and what it keeps on disk.

    layouts: a file of mig-parted, if there is one. living: returns the UIDs of pods that have processes.
    kill: kills the processes of pods; None: programs that outlive their pods are not ended.
    clock: seconds since the epoch.
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
    collector = GarbageCollector(api, store, files, edges.living, edges.clock, instances.trigger)
    reporter = Reporter(api, allocations, denials, lambda: collector.lingering)
    binder = LeaseBinder(api, store, files, allocations, dialects, mode.isolates)
    of_leases = LeaseInstances(store, files, instances, edges.clock)
    leases = LeaseReconciler(api, store, files, binder, of_leases, denials, leased)
    service = LeaseService(kubelet, store, leases, reporter, wanted.set, edges.clock)
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
    converter = MigConverter(api, instances, inventory, allocations, closed, edges.clock)
    layouts = LayoutFollower(
        api, instances, inventory, allocations, closed, edges.clock, edges.layouts
    )
    overdue = [OverduePods(api, store, edges.kill, edges.clock).end] if edges.kill else []
    phases = (
        *overdue,
        *(leases.reconcile, resizer.reconcile, collector.collect, reporter.publish),
        *(converter.reconcile, layouts.reconcile),
    )
    agent = Agent(api, kubelet, mode, advertiser, phases, wanted)
    return Program(agent, inventory, instances, closed, plugins, wanted.set)
