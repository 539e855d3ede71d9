"""Wires the node program: the only place that names its concrete parts."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.dialects.sizes import parse_unit
from fenka.hardware.network_namespace import MACHINE
from fenka.hardware.nvml import XidListener
from fenka.instances.keeper import InstanceKeeper
from fenka.instances.manager import InstanceManager, geometries
from fenka.isolation.files import install_native
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.program_lifetime import stop_requests
from fenka.node import preflight
from fenka.node.advertiser import Advertised
from fenka.node.config import Config
from fenka.node.driver import RETRY_S, NodeDriver, lock_cards
from fenka.node.health import CardHealth
from fenka.node.instances import NodeInstances
from fenka.node.kubelet.client import Kubelet
from fenka.node.lease import cdi, pod_processes
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from fenka.node.monitor.card_monitor import CardMonitor
from fenka.node.monitor.compute_feedback import FeedbackLoop
from fenka.node.monitor.metrics import Exporter, serve
from fenka.node.monitor.monitor import Monitor, ViolationPolicy
from fenka.node.monitor.usage import Usage
from fenka.node.node_api import NodeApi
from fenka.node.program import Edges, assemble
from fenka.node.spot import SpotFollower
from fenka.node.spot_metadata import ALIBABA, AWS, MetadataClient
from fenka.procfs import boot_id

_LOG = logging.getLogger(__name__)

_WARN_EVERY_S = 3600.0

# The node's own directories, at the same paths in this process.
_PLUGINS = Path("/var/lib/kubelet/device-plugins")
_POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
_CDI = Path("/var/run/cdi")
_LEASES = Path("/run/fenka/leases")
_STATE = Path("/var/lib/fenka")

_Value = TypeVar("_Value")


def run(config: Config) -> None:
    """Serve until told to stop.

    Raises FenkaError, FileNotFoundError.
    """
    # Both raise before anything is changed.
    parse_unit(config.unit)
    _metadata_clients(config)
    preflight.check_mounts(_LEASES)
    library = install_native(_STATE / "lib", cdi.prepare_library)
    driver = NodeDriver(library, config.host_root, config.simulated)
    with driver.open() as hardware, contextlib.ExitStack() as locks:
        health = CardHealth(
            hardware,
            _LEASES.parent / "health.json",
            lambda cards: hardware.measure(cards, driver.libraries),
        )
        locks.enter_context(lock_cards(health.known))
        hardware.measure(health.known, driver.libraries)
        keeper = InstanceKeeper(
            _STATE / "instances.json", boot_id(), geometries(hardware, health.known)
        )
        manager = InstanceManager(
            hardware,
            keeper,
            library_dir=driver.libraries,
            pci_ids={card.uuid: hardware.driver.pci_device(card.uuid) for card in health.known},
        )
        instances = NodeInstances(manager, lambda: health.known)
        files = LeaseFiles(_LEASES, _CDI, library, hardware.context_mib, driver.edits(hardware))
        asyncio.run(_serve(config, driver, health, instances, files, locks))


async def _serve(
    config: Config,
    driver: NodeDriver,
    health: CardHealth,
    instances: NodeInstances,
    files: LeaseFiles,
    locks: contextlib.ExitStack,
) -> None:
    unit_mib, hardware = parse_unit(config.unit), instances.manager.hardware
    stop = stop_requests()
    async with await Api.connect(config.kubeconfig) as connection:
        api = NodeApi(connection, config.name)
        runtime, published = await _retry(api.read_node)
        preflight.check_runtime(runtime, assume_cdi=config.assume_cdi)
        locked = {card.uuid for card in health.known}
        health.restore(published)
        locks.enter_context(lock_cards([card for card in health.known if card.uuid not in locked]))
        preflight.check_unit(health.known, unit_mib)
        store = LeaseStore(_STATE / "node")
        for complaint in store.load():
            _LOG.error("%s", complaint)
        files.prepare()
        kubelet = Kubelet(_PLUGINS, _POD_RESOURCES)
        dialects = WITH_HAMI if config.hami_names else DIALECTS
        advertised = Advertised(config.exclusive, config.labelled_only, dialects)
        program = assemble(
            Edges(
                *(api, kubelet, health, store, files, instances, unit_mib, advertised),
                layouts=config.mig_config,
                kill=pod_processes.kill_pods if config.end_overdue else None,
            )
        )
        exporter = Exporter(config.name)
        cards = CardMonitor(api, health, program.inventory, instances, program.trigger)
        usage = Usage(hardware.processes, files, driver.busy_ns(hardware, health))
        policy = ViolationPolicy(
            evict=config.over_limit == "evict", kill=config.unmanaged_process == "kill"
        )
        monitor = Monitor(api, store, cards, usage, exporter, policy)
        work = (
            FeedbackLoop(hardware.busy_samples, files).run(store, api),
            api.run(),
            *(plugin.run() for plugin in program.plugins.values()),
            program.agent.run(),
            instances.run(),
            monitor.run(),
            cards.listen(XidListener),
            SpotFollower(api, _metadata_clients(config), config.spot_notices).run(),
            _warn_of_runtime(config, api),
        )
        async with contextlib.AsyncExitStack() as stack:
            if config.metrics_port is not None:
                await stack.enter_async_context(
                    serve(exporter, config.metrics_port, lambda: program.agent.ready)
                )
            tasks = await stack.enter_async_context(_tasks(*work))
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                await program.agent.drain()
            for task in done:
                task.result()


def _metadata_clients(config: Config) -> Sequence[MetadataClient]:
    """Return the clients of all clouds' metadata services. Raises InvalidAddress."""
    return (
        MetadataClient(AWS, config.aws_metadata, MACHINE),
        MetadataClient(ALIBABA, config.alibaba_metadata, MACHINE),
    )


async def _warn_of_runtime(config: Config, api: NodeApi) -> None:
    """Warn every hour while NVIDIA's runtime is the default."""
    while True:
        while not api.synced:
            await asyncio.sleep(RETRY_S)
        if config.simulated is None and (warning := preflight.nvidia_by_default(config.host_root)):
            api.node_event("FenkaRuntime", warning)
        await asyncio.sleep(_WARN_EVERY_S)


@contextlib.asynccontextmanager
async def _tasks(*work: Coroutine[Any, Any, None]) -> AsyncIterator[set["asyncio.Task[None]"]]:
    tasks = {asyncio.create_task(coroutine) for coroutine in work}
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _retry(request: Callable[[], Awaitable[_Value]]) -> _Value:
    while True:
        try:
            return await request()
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("waiting for the API server: %s", error)
            await asyncio.sleep(RETRY_S)
