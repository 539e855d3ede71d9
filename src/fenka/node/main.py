"""Wires the node's program: the only place that names its concrete parts."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.core.units import card_units
from fenka.dialects.sizes import parse_unit
from fenka.hardware import card_lock
from fenka.hardware.card_lock import CardLocked
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import Driver, DriverLost, GpuProcess, NoDriver, XidListener
from fenka.hardware.simulated import SimulatedNode
from fenka.isolation.files import install_native
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.node.agent import Agent, Parts, Settings
from fenka.node.kubelet import client
from fenka.node.kubelet.client import Kubelet
from fenka.node.lease import cdi
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore
from fenka.node.monitor.compute_feedback import Telling
from fenka.node.monitor.health import CardHealth
from fenka.node.monitor.metrics import Exporter, serve
from fenka.node.monitor.monitor import Monitor
from fenka.node.monitor.usage import BusyNs, Usage
from fenka.node.node_api import NodeApi
from fenka.node.preflight import nvidia_by_default, unseen_mounts

_LOG = logging.getLogger(__name__)

WAIT_S = 1.0
"""Between two looks for a driver, or for the API server, that is not there yet."""
_WARN_AGAIN_S = 3600.0
LOOK_S = 0.1
"""The same where a look costs nothing."""

_Made = TypeVar("_Made")

_RUNTIME = re.compile(r"([\w-]+)://v?(\d+)\.(\d+)")


class PreflightError(FenkaError):
    """This node cannot share cards as it is; one sentence that says why and what to do."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class Config:
    """The program's options. Directories are the node's own, at the same paths in this process."""

    node: str
    unit: str = "GiB"
    simulated: Path | None = None
    host: Path = Path("/")
    kubeconfig: Path | None = None
    plugins: Path = Path("/var/lib/kubelet/device-plugins")
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    cdi: Path = Path("/var/run/cdi")
    leases: Path = Path("/run/fenka/leases")
    state: Path = Path("/var/lib/fenka")
    exclusive: bool = True
    labelled_only: bool = False
    hami: bool = False
    assume_cdi: bool = False
    over_limit: str = "report"
    unmanaged_process: str = "kill"
    metrics_port: int | None = None


def run(config: Config) -> None:
    """Serve until told to stop.

    Raises PreflightError, InvalidSize, ApiUnreachable, FileNotFoundError; their messages are to be shown.
    """
    unit_mib = parse_unit(config.unit)
    for option, value, known in (
        ("--over-limit", config.over_limit, ("report", "evict")),
        ("--unmanaged-process", config.unmanaged_process, ("report", "kill")),
    ):
        if value not in known:
            raise PreflightError(f"{option} is {' or '.join(known)}, not {value}")
    if complaint := unseen_mounts(config.leases):
        raise PreflightError(complaint)
    library = install_native(config.state / "lib", cdi.prepare_library)
    with hardware(config, library) as machine, contextlib.ExitStack() as held:
        cards = CardHealth(
            machine,
            config.leases.parent / "health.json",
            lambda cards: machine.measure(cards, _libraries(config, library)),
        )
        held.enter_context(_owned(cards.known))
        machine.measure(cards.known, _libraries(config, library))
        settings = Settings(
            unit_mib,
            library,
            machine.context_mib,
            _driver(config, machine, library),
            config.exclusive,
            config.labelled_only,
            config.hami,
        )
        asyncio.run(_serve(config, settings, cards, machine, held))


def check_unit(cards: CardHealth, unit_mib: int) -> None:
    """Raises PreflightError if the kubelet cannot be told of so many units, or if there are none."""

    def units(mib: int) -> int:
        return sum(card_units(card.memory_mib, mib) for card in cards.known)

    fitting = client.fitting_unit(unit_mib, units)
    if fitting != unit_mib:
        raise PreflightError(
            f"units of {unit_mib} MiB are {units(unit_mib)} on this node, which the kubelet cannot be told: "
            f"the list would be {client.largest_bytes(units(unit_mib))} bytes, and it reads "
            f"{client.MESSAGE_BYTES}; use --unit {fitting}MiB or larger"
        )
    if not units(unit_mib):
        raise PreflightError(f"no card of this node has {unit_mib} MiB: use a smaller --unit")


def check_runtime(version: str, *, assume_cdi: bool) -> None:
    """Raises PreflightError for a container runtime that would leave out a lease without a word."""
    match = _RUNTIME.match(version)
    if match is None:
        _LOG.warning("container runtime %s is not known: it must serve CDI devices", version)
        return
    name, release = match[1], (int(match[2]), int(match[3]))
    if name == "containerd" and (release < (1, 7) or (release < (2, 0) and not assume_cdi)):
        raise PreflightError(
            f"{version} starts containers without the CDI devices that a lease is made of, and says "
            f"nothing: use containerd 2.0 or newer"
            + ("" if release < (1, 7) else ", or set enable_cdi and start with --assume-cdi")
        )
    if name == "docker":
        raise PreflightError(f"{version} serves no CDI devices to the kubelet: use containerd 2.0")


def _driver(
    config: Config, machine: Hardware, library: Path
) -> Callable[[Sequence[Slice]], cdi.ContainerEdits]:
    if config.simulated is not None:
        simulated = cdi.simulated(library, config.simulated)
        return lambda _: simulated

    def real(slices: Sequence[Slice]) -> cdi.ContainerEdits:
        minors = [machine.driver.minor(piece.uuid) for piece in slices]
        return cdi.real(minors, machine.driver.version, config.host)

    return real


def _libraries(config: Config, library: Path) -> Path | None:
    return library / "simulated" if config.simulated else cdi.nvml_directory(config.host)


def _owned(cards: Sequence[Card]) -> contextlib.ExitStack:
    """Lock the cards; waits while another program owns one."""
    return _once_there(lambda: card_lock.acquire(cards, network=Path("/proc/1/ns/net")), CardLocked)


@contextlib.contextmanager
def hardware(config: Config, library: Path) -> Iterator[Hardware]:
    """The driver, real or simulated; waits for it: it may be installed later, as a pod of its own."""
    if config.simulated is not None:
        # By this program's own copy of the driver: the keeper's is in another container.
        os.environ["FENKA_SIMULATED_NODE"] = str(config.simulated)
        _wait_for(SimulatedNode(config.simulated))

    def opened() -> Driver:
        return Driver.open(_libraries(config, library))

    with contextlib.closing(_once_there(lambda: Hardware(opened), NoDriver)) as machine:
        yield machine


def _wait_for(node: SimulatedNode) -> None:
    if not node.running:
        _LOG.info("waiting for `fenka sim node` in %s", node.directory)
    while not node.running:
        time.sleep(LOOK_S)


def _once_there(make: Callable[[], _Made], absent: type[Exception]) -> _Made:
    """What it makes, as soon as it can be made; every reason why not is said once."""
    said = ""
    while True:
        try:
            return make()
        except absent as why:
            if said != str(why):
                said = str(why)
                _LOG.warning("waiting: %s", said)
            time.sleep(WAIT_S)


async def _serve(
    config: Config,
    settings: Settings,
    cards: CardHealth,
    machine: Hardware,
    held: contextlib.ExitStack,
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with await Api.connect(config.kubeconfig) as api:
        cluster = NodeApi(api, config.node)
        runtime, described = await _patiently(cluster.first_look)
        check_runtime(runtime, assume_cdi=config.assume_cdi)
        shown = {card.uuid for card in cards.known}
        cards.remember(described)
        held.enter_context(_owned([it for it in cards.known if it.uuid not in shown]))
        check_unit(cards, settings.unit_mib)
        store = LeaseStore(config.state / "node")
        for complaint in store.load():
            _LOG.error("%s", complaint)
        leases = LeaseFiles(config.leases, config.cdi)
        leases.prepare()
        kubelet_ = Kubelet(config.plugins, config.pod_resources)
        agent = Agent(settings, Parts(cluster, kubelet_, cards, store, leases))

        def running() -> Sequence[GpuProcess]:
            # Not bound once: the driver may have been opened again.
            return machine.driver.processes()

        usage = Usage(
            running,
            leases,
            machine.context_mib,
            _busy(config, machine, cards),
        )
        exporter = Exporter(config.node)
        watcher = Monitor(
            agent,
            usage,
            exporter,
            evict=config.over_limit == "evict",
            kill=config.unmanaged_process == "kill",
        )
        telling = Telling(machine.busy_samples, leases)
        work = (
            telling.run(agent),
            cluster.run(),
            *(plugin.run() for plugin in agent.plugins.values()),
            agent.run(),
            watcher.run(),
            watcher.listen(XidListener),
            _warn_of_runtime(config, cluster),
        )
        async with _listening(exporter, config.metrics_port, agent), _tasks(*work) as tasks:
            ending = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait({ending, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                await agent.drain()
            for task in done:
                task.result()


def _busy(config: Config, machine: Hardware, cards: CardHealth) -> BusyNs:
    """Simulated cards count exactly; real ones say percents of a moment, which are added up."""
    if config.simulated is not None:
        node = SimulatedNode(config.simulated)
        return lambda: {
            (card.uuid, pid): ns
            for card in cards.known
            for pid, ns in node.busy_ns(card.index).items()
        }
    total: dict[tuple[str, int], int] = {}
    last = time.time_ns()

    def added() -> dict[tuple[str, int], int]:
        nonlocal total, last
        try:
            percents = machine.driver.busy_percent(last // 1000)
        except DriverLost:
            percents = {}
        now = time.time_ns()
        total = {
            key: total.get(key, 0) + percent * (now - last) // 100
            for key, percent in percents.items()
        }
        last = now
        return total

    return added


async def _warn_of_runtime(config: Config, cluster: NodeApi) -> None:
    """Every hour, for as long as it is so."""
    while True:
        while not cluster.synced:
            await asyncio.sleep(WAIT_S)
        if config.simulated is None and (complaint := nvidia_by_default(config.host)):
            cluster.node_event("FenkaRuntime", complaint)
        await asyncio.sleep(_WARN_AGAIN_S)


@contextlib.asynccontextmanager
async def _listening(exporter: Exporter, port: int | None, agent: Agent) -> AsyncIterator[None]:
    if port is None:
        yield
        return
    async with serve(exporter, port, lambda: agent.ready):
        yield


@contextlib.asynccontextmanager
async def _tasks(*work: Coroutine[Any, Any, None]) -> AsyncIterator[set["asyncio.Task[None]"]]:
    tasks = {asyncio.create_task(it) for it in work}
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _patiently(ask: Callable[[], Awaitable[_Made]]) -> _Made:
    while True:
        try:
            return await ask()
        except (ApiError, ApiUnreachable) as why:
            _LOG.warning("waiting for the API server: %s", why)
            await asyncio.sleep(WAIT_S)
