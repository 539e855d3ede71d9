"""Wires the node program, and checks at the start whether this node can share its cards."""

import asyncio
import contextlib
import logging
import os
import re
import time
import tomllib
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card
from fenka.core.units import card_units
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from fenka.formats.quantities import parse_unit
from fenka.hardware.card_lock import MACHINE
from fenka.hardware.nvml import XidListener
from fenka.isolation.driver_usage import ActivityTracker
from fenka.isolation.lease_files import admit_containers, install_native
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.mig.keeper import InstanceKeeper
from fenka.mig.manager import InstanceManager, geometries
from fenka.node.advertiser import Advertised
from fenka.node.config import STORE, NodeConfig
from fenka.node.driver import RETRY_S, NodeDriver, lock_cards
from fenka.node.inventory import CardHealth
from fenka.node.kubelet import client
from fenka.node.kubelet.client import Kubelet
from fenka.node.lease import files as lease_files
from fenka.node.lease import pod_processes
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from fenka.node.mig_instances import NodeInstances
from fenka.node.monitor.dashboard_answer import encode_figures
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.monitor import FeedbackLoop, HealthMonitor, Monitor, ViolationPolicy
from fenka.node.monitor.usage import Usage
from fenka.node.node_api import NodeApi
from fenka.node.program import Edges, Program, assemble
from fenka.node.spot import ALIBABA, AWS, MetadataClient, SpotFollower
from fenka.node.start_report import NOT_SERVING, Patience, report
from fenka.procfs import boot_id, mounts
from fenka.server.listener import listening_socket
from fenka.server.pod_spans import sent_to
from fenka.server.probes import serve_probes
from fenka.server.program import stop_requests, working_until

_CONTAINERD = Path("etc/containerd/config.toml")
_CRIO = Path("etc/crio")
_NVIDIA = Path("etc/nvidia-container-runtime/config.toml")
_ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"


_RUNTIME = re.compile(r"([\w-]+)://v?(\d+)\.(\d+)")
_KUBELET = re.compile(r"v(\d+)\.(\d+)\.")
_CDI_SINCE = (1, 29)
"""The kubelet whose feature gate DevicePluginCDIDevices is on by default."""


class PreflightError(FenkaError):
    """This node cannot share cards as it is. The message says why and what to do."""

    exit_code = INVALID_INPUT


def check_unit(cards: Sequence[Card], unit_mib: int) -> None:
    """Check that the cards have units of this size, and not more than the kubelet can be sent.

    Raises PreflightError.
    """

    def units(mib: int) -> int:
        return sum(card_units(card.memory_mib, mib) for card in cards)

    fitting = client.fitting_unit(unit_mib, units)
    if fitting != unit_mib:
        raise PreflightError(
            f"units of {unit_mib} MiB are {units(unit_mib)} on this node, more than the kubelet can be sent: "
            f"the list would have {client.largest_bytes(units(unit_mib))} bytes, and it reads "
            f"{client.MESSAGE_BYTES}; use --unit {fitting}MiB or larger"
        )
    if not units(unit_mib):
        raise PreflightError(f"no card of this node has {unit_mib} MiB: use a smaller --unit")


def check_kubelet(version: str) -> None:
    """Check that the kubelet passes a device plugin's CDI devices on; older ones drop them silently.

    Raises PreflightError.
    """
    match = _KUBELET.match(version)
    if match and (int(match[1]), int(match[2])) < _CDI_SINCE:
        raise PreflightError(
            f"kubelet {version} silently ignores the CDI devices that a lease is made of: use Kubernetes "
            "1.29 or newer on this node"
        )


def check_runtime(version: str, *, assume_cdi: bool) -> None:
    """Check that the container runtime serves CDI devices; others would ignore a lease silently.

    Raises PreflightError.
    """
    match = _RUNTIME.match(version)
    if match is None:
        _LOG.warning("container runtime %s is not known: it must serve CDI devices", version)
        return
    name, release = match[1], (int(match[2]), int(match[3]))
    if name == "containerd" and (release < (1, 7) or (release < (2, 0) and not assume_cdi)):
        raise PreflightError(
            f"{version} silently ignores the CDI devices that a lease is made of: use containerd 2.0 or newer"
            + ("" if release < (1, 7) else ", or set enable_cdi and start with --assume-cdi")
        )
    if name == "docker":
        raise PreflightError(f"{version} serves no CDI devices to the kubelet: use containerd 2.0")


def nvidia_by_default(host: Path) -> str | None:
    """Return a warning if an image can get all cards by its environment.

    host: where this process sees the node's root.
    """
    file = _default_runtime(host)
    if file is None or _read(host / _NVIDIA).get(_ACCEPT, True) is False:
        return None
    return (
        f"NVIDIA's runtime is the default ({file}), so a container whose image or pod sets "
        f"NVIDIA_VISIBLE_DEVICES=all gets every card without a request: set {_ACCEPT} = false in /{_NVIDIA}"
    )


def _default_runtime(host: Path) -> str | None:
    """Return the file, by its path on the node, that makes NVIDIA's runtime the default."""
    for path in _containerd_files(host):
        plugins = _tables(_read(path).get("plugins"))
        if any(
            _table(plugin.get("containerd")).get("default_runtime_name") == "nvidia"
            for plugin in plugins
        ):
            return f"/{path.relative_to(host)}"
    for path in (host / _CRIO / "crio.conf", *sorted((host / _CRIO).glob("crio.conf.d/*.conf"))):
        runtime = _table(_table(_read(path).get("crio")).get("runtime"))
        if runtime.get("default_runtime") == "nvidia":
            return f"/{path.relative_to(host)}"
    return None


def _containerd_files(host: Path) -> Iterator[Path]:
    config = host / _CONTAINERD
    yield config
    imports = _read(config).get("imports", [])
    for pattern in imports if isinstance(imports, list) else []:
        yield from sorted(host.glob(str(pattern).lstrip("/")))


def _read(path: Path) -> Mapping[str, Any]:
    """Read a TOML file; empty where it is missing or invalid."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    for table in _table(value).values():
        yield _table(table)


def check_mounts(directory: Path, proc: Path = Path("/proc")) -> None:
    """Check that the node sees what this process mounts below a directory.

    The container runtime must see the mounts of a lease. Raises PreflightError.
    """
    if _same(proc / "self/ns/mnt", proc / "1/ns/mnt"):
        return  # Not in a container.
    # Later mounts lie over earlier ones.
    mount = max(
        (
            mount
            for mount in reversed([*mounts("self", proc)])
            if directory.is_relative_to(mount.point)
        ),
        key=lambda mount: len(mount.point.parts),
    )
    if any(tag.startswith("shared:") for tag in mount.optional):
        return
    raise PreflightError(
        f"mounts below {mount.point} are not seen by the node, so no container could have a lease: mount "
        f"{directory.parent} with mountPropagation Bidirectional, and have it shared on the node "
        f"(mount --make-rshared /)"
    )


def check_executable(directory: Path) -> None:
    """Check that programs may map libraries of this directory. Raises PreflightError."""
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        raise PreflightError(
            f"{directory} is on a file system that is mounted noexec, so no container could load fenka's "
            "library from it: name another directory of the node in the chart's node.stateDir (--state)"
        )


def _same(link: Path, other: Path) -> bool:
    try:
        return os.readlink(link) == os.readlink(other)
    except OSError:
        return False


_LOG = logging.getLogger(__name__)

_WARN_EVERY_S = 3600.0

# The node's own directories, at the same paths in this process.
_POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
_CDI = Path("/var/run/cdi")
_LEASES = Path("/run/fenka/leases")

_Value = TypeVar("_Value")


def run(config: NodeConfig) -> None:
    """Serve until told to stop. An error that keeps the node from sharing cards is also an event there.

    Raises FenkaError, FileNotFoundError.
    """
    try:
        _run(config)
    except PreflightError as why:
        report(config.kubeconfig, config.name, str(why))
        raise


def _run(config: NodeConfig) -> None:
    # Both raise before anything is changed.
    parse_unit(config.unit)
    _metadata_clients(config)
    check_mounts(_LEASES)
    config.state.mkdir(parents=True, exist_ok=True)
    check_executable(config.state)
    library = install_native(config.state / "lib", lease_files.prepare_library)
    # Also a copy that was made before SELinux was switched on.
    admit_containers(library)
    patience = Patience(partial(report, config.kubeconfig, config.name))
    driver = NodeDriver(
        *(library, config.host_root, config.simulated, config.driver_root), patience.failed
    )
    with driver.open() as hardware, contextlib.ExitStack() as locks:
        health = CardHealth(
            hardware,
            _LEASES.parent / "health.json",
            lambda cards: hardware.measure(cards, driver.libraries),
        )
        locks.enter_context(lock_cards(health.known))
        hardware.measure(health.known, driver.libraries)
        keeper = InstanceKeeper(
            config.state / "instances.json", boot_id(), geometries(hardware, health.known)
        )
        manager = InstanceManager(
            hardware,
            keeper,
            library_dir=driver.libraries,
            pci_ids={card.uuid: hardware.driver.pci_device(card.uuid) for card in health.known},
        )
        instances = NodeInstances(manager, lambda: health.known)
        files = LeaseFiles(
            *(_LEASES, _CDI, library, hardware.context_mib, driver.edits(hardware)),
            near_cpus=hardware.near_cpus,
        )
        asyncio.run(_serve(config, driver, health, instances, files, locks))


async def _serve(
    config: NodeConfig,
    driver: NodeDriver,
    health: CardHealth,
    instances: NodeInstances,
    files: LeaseFiles,
    locks: contextlib.ExitStack,
) -> None:
    unit_mib, hardware = parse_unit(config.unit), instances.manager.hardware
    stop = stop_requests()
    async with (
        await Api.connect(config.kubeconfig) as connection,
        sent_to(config.traces, "fenka-node") as spans,
    ):
        api = NodeApi(connection, config.name)
        info, published = await _retry(api.read_node)
        check_kubelet(info.kubelet_version)
        check_runtime(info.container_runtime_version, assume_cdi=config.assume_cdi)
        locked = {card.uuid for card in health.known}
        health.restore(published)
        locks.enter_context(lock_cards([card for card in health.known if card.uuid not in locked]))
        check_unit(health.known, unit_mib)
        store = LeaseStore(config.state / STORE)
        for complaint in store.load():
            _LOG.error("%s", complaint)
        files.prepare()
        kubelet = Kubelet(config.relay or client.PLUGINS, _POD_RESOURCES, client.PLUGINS)
        dialects = WITH_HAMI if config.hami_names else DIALECTS
        advertised = Advertised(
            config.exclusive, config.labelled_only, dialects, taint=config.free_cards_taint
        )
        program = assemble(
            Edges(
                *(api, kubelet, health, store, files, instances, unit_mib, advertised),
                layouts=config.mig_config,
                kill=pod_processes.kill_pods if config.end_overdue else None,
                spans=spans,
            )
        )
        exporter = Exporter(config.name, lambda: hardware.versions)
        cards = HealthMonitor(api, health, program.inventory, instances, program.trigger)
        usage = Usage(hardware.processes, files, driver.busy_ns(hardware, health))
        evict, kill = config.over_limit == "evict", config.unmanaged_process == "kill"
        policy = ViolationPolicy(evict=evict, kill=kill)
        feedback = FeedbackLoop(hardware.busy_samples, files)
        activity = ActivityTracker(feedback.busy_s)
        monitor = Monitor(api, store, cards, usage, exporter, policy, activity)
        work = (
            feedback.run(store, api),
            api.run(),
            *(plugin.run() for plugin in program.plugins.values()),
            program.agent.run(),
            instances.run(),
            monitor.run(),
            cards.listen(lambda: XidListener(hardware)),
            SpotFollower(api, _metadata_clients(config), config.spot_notices).run(),
            _warn_of_runtime(config, api),
            report_unregistered(api, lambda: program.agent.problem),
        )
        async with _serve_probes(config, program, exporter), working_until(stop, *work):
            await program.agent.drain()


def _serve_probes(
    config: NodeConfig, program: Program, exporter: Exporter
) -> contextlib.AbstractAsyncContextManager[None]:
    """Return what serves metrics and figures at the configured port. Raises OSError if it is in use."""
    if config.metrics_port is None:
        return contextlib.nullcontext()
    return serve_probes(
        listening_socket(None, config.metrics_port),
        lambda: program.agent.problem,
        exporter.text,
        usage=lambda: encode_figures(exporter, time.time()),
    )


def _metadata_clients(config: NodeConfig) -> Sequence[MetadataClient]:
    """Return the clients of all clouds' metadata services. Raises InvalidAddress."""
    return (
        MetadataClient(AWS, config.aws_metadata, MACHINE),
        MetadataClient(ALIBABA, config.alibaba_metadata, MACHINE),
    )


async def _warn_of_runtime(config: NodeConfig, api: NodeApi) -> None:
    """Warn every hour while NVIDIA's runtime is the default."""
    while True:
        while not api.synced:
            await asyncio.sleep(RETRY_S)
        if config.simulated is None and (warning := nvidia_by_default(config.host_root)):
            api.node_event("FenkaRuntime", warning)
        await asyncio.sleep(_WARN_EVERY_S)


async def report_unregistered(
    api: NodeApi,
    problem: Callable[[], str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Write an event on the Node if the kubelet does not know the node's devices for a while.

    Args:
        api: this node's objects.
        problem: returns why the program is not ready; empty if it is.
        clock: seconds, monotonic.
        sleep: waits for a number of seconds.
    """
    patience = Patience(
        lambda reason: api.node_event(NOT_SERVING, f"fenka: no cards are offered: {reason}"), clock
    )
    while True:
        await sleep(RETRY_S)
        patience.failed(problem() if api.synced else "")


async def _retry(request: Callable[[], Awaitable[_Value]]) -> _Value:
    while True:
        try:
            return await request()
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("waiting for the API server: %s", error)
            await asyncio.sleep(RETRY_S)
