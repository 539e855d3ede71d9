"""Wires the workstation's daemon to its hardware and files.

Reads the file with the daemon's options, which outlives `fenka daemon --stop` and the machine's boot.

/etc/fenka/daemon.toml is the system daemon's, ~/.config/fenka/daemon.toml every other one's. Its keys are the
options of `fenka daemon` without the dashes. An option of the command line replaces the file's.
"""

import asyncio
import contextlib
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card, Node
from fenka.core.policies.scores import SCORES
from fenka.core.units import MIB
from fenka.formats.quantities import (
    UNITS_MIB,
    InvalidSize,
    check_currency,
    parse_memory,
    parse_price,
    parse_unit,
)
from fenka.hardware import card_lock
from fenka.hardware.card_spec import MODELS, parse_spec
from fenka.hardware.nvml import Driver, DriverNotFound, Hardware
from fenka.hardware.peer_credentials import Peer, user_name
from fenka.hardware.simulated_node import OtherBuild, OtherCards, SimulatedNode
from fenka.isolation import sandbox
from fenka.isolation.lease_files import read_regular_file, require_native
from fenka.mig.keeper import InstanceKeeper
from fenka.mig.manager import InstanceManager, geometries
from fenka.procfs import boot_id
from fenka.workstation import files, layouts, lifetime, presence
from fenka.workstation.broker import Broker
from fenka.workstation.containers import cdi_devices
from fenka.workstation.containers.hook_server import CHARGES, user_id
from fenka.workstation.daemon import Daemon
from fenka.workstation.files import DaemonConfig
from fenka.workstation.lifetime import ShutdownSignals, log
from fenka.workstation.paths import Runtime

MAX_BYTES = MIB


class InvalidOption(FenkaError):
    """An option of the daemon is invalid."""

    exit_code = INVALID_INPUT


def check_policy(policy: str) -> None:
    """Raise InvalidOption if no policy has this name."""
    if policy not in SCORES:
        raise InvalidOption(f"no policy is called {policy}: choose one of {', '.join(SCORES)}")


def check_size(size: str) -> None:
    """Raise InvalidOption if this is no size of a file."""
    try:
        parse_memory(size, 1)
    except InvalidSize:
        raise InvalidOption(f"--history-size {size} is no size: write it as 200MiB") from None


def check_card_memory(size: str) -> None:
    """Raise InvalidOption if this is no size of cards."""
    try:
        card_memory_mib(size)
    except InvalidSize:
        raise InvalidOption(f"--card-memory {size} is no size: write it as 96GiB") from None


def card_memory_mib(size: str) -> int:
    """Return the size in MiB; 0 if none is stated. Raises InvalidSize."""
    return parse_memory(size, UNITS_MIB["GiB"]).nominal_mib(1) if size else 0


def check_charge(name: str) -> None:
    """Raise InvalidOption unless this is a user, or a rule about who pays for containers."""
    try:
        if name not in CHARGES:
            user_id(name)
    except FenkaError as why:
        raise InvalidOption(f"--charge {name}: {why}; or choose {', '.join(CHARGES)}") from None


_CHECKS: dict[str, Callable[[Any], object]] = {
    "simulate": lambda spec: spec and parse_spec(spec),
    "policy": check_policy,
    "unit": parse_unit,
    "price": lambda prices: [*map(parse_price, prices)],
    "currency": check_currency,
    "history_size": check_size,
    "card_memory": check_card_memory,
    "charge": check_charge,
}


def load(runtime: Runtime) -> dict[str, Any]:
    """Return the options that the file of this directory's daemon has; none without a file.

    Raises InvalidOption, with one sentence for each mistake; OSError.
    """
    path = runtime.options
    try:
        text = read_regular_file(path, MAX_BYTES, follow_link=True).decode()
        content = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise InvalidOption(f"{path} is no TOML: {why}") from None
    options: dict[str, Any] = {}
    mistakes = list(_read(content, options))
    if mistakes:
        raise InvalidOption("; ".join(f"{path}: {mistake}" for mistake in mistakes))
    return options


def _read(content: dict[str, Any], options: dict[str, Any]) -> Iterator[str]:
    """Add the valid options, and yield a sentence for each other one."""
    fields = {option_name(field.name): field for field in msgspec.structs.fields(DaemonConfig)}
    for name, value in content.items():
        if name not in fields:
            similar = get_close_matches(name, fields)
            hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(fields)}"
            yield f"there is no option {name}: {hint}"
            continue
        try:
            field = fields[name]
            option = msgspec.convert(_words(value), get_args(field.type)[0])
            _CHECKS.get(field.name, lambda _: None)(option)
        except msgspec.ValidationError:
            kind = {bool: "true or false", str: "a word", type(None): "a number"}.get(
                type(field.default), "a list of words"
            )
            yield f"{name} must be {kind}, not {value!r}"
        except FenkaError as why:
            yield str(why)
        else:
            options[field.name] = option


def option_name(field: str) -> str:
    """Return an option, without dashes before it, by the field of DaemonConfig."""
    return field.replace("_", "-")


def _words(value: Any) -> Any:
    """Return a list with cards' indices as words: people write 0 and "0". A table of prices is a list."""
    if isinstance(value, dict):
        return [f"{name}={price}" for name, price in value.items()]
    if not isinstance(value, list):
        return value
    return [str(item) if type(item) is int else item for item in value]


@dataclass(frozen=True, slots=True)
class DaemonEnd:
    """How a daemon has ended.

    Attributes:
        jobs: Names of the jobs that still run.
        moved: What its environment needs to start again at once in a directory made again; else None.
    """

    jobs: list[str]
    moved: Mapping[str, str] | None = None


def run(
    runtime: Runtime,
    config: DaemonConfig,
    ready: Callable[[Daemon], None],
    ending: ShutdownSignals,
    keep_waiting: Callable[[], bool] = lambda: False,
) -> DaemonEnd:
    """Serve until the end.

    Args:
        runtime: The daemon's directory.
        config: Its options.
        ready: Called once clients can connect, unless the daemon is ended before.
        ending: What ends the daemon.
        keep_waiting: Whether to wait longer for the end of another daemon there.

    Raises AlreadyRunning, UnsafeDirectory, InvalidOption, InvalidSize, InvalidPrice, BadSpec, NoDriver,
    CardLocked, InvalidState, IsolationError, OSError.
    """
    # Programs of other users must be able to read some files, whatever umask the daemon was started with.
    os.umask(0o022)
    # Before anything is made.
    for option, check in _CHECKS.items():
        if option != "simulate":
            check(getattr(config, option))
    _check_closed(config)
    require_native()
    with files.lock_runtime(runtime, keep_waiting):
        # An earlier daemon may have been killed before it did this.
        sandbox.remove()
        ended = _serve(runtime, config, ready, ending)
        if not ended.jobs and ended.moved is None:
            remove_files(runtime)
            if config.simulate:
                # The next simulated cards are as after a reset.
                runtime.card_errors.unlink(missing_ok=True)
        return ended


def _serve(
    runtime: Runtime,
    config: DaemonConfig,
    ready: Callable[[Daemon], None],
    ending: ShutdownSignals,
) -> DaemonEnd:
    native = files.install_native(runtime)
    with _hardware(runtime, config, native) as hardware:
        cards = _select_cards(hardware.driver.cards(), config.only)
        cards = _sized(cards, card_memory_mib(config.card_memory), _machine_mib(hardware.driver))
        _check_mig(config, cards)
        _check_prices(config, cards)
        links = hardware.driver.links()
        node = Node("localhost", cards, unit_mib=parse_unit(config.unit), links=links)
        with card_lock.acquire(node.cards, _report_displaced):
            library_dir = runtime.simulated / "lib" if config.simulate else None
            hardware.measure(node.cards, library_dir)
            capable = geometries(hardware, cards)
            layouts.switch(cards, config.mig, capable)
            manager = InstanceManager(
                hardware,
                InstanceKeeper(runtime.instances, boot_id(), capable),
                on_demand=layouts.OFF not in config.mig,
                library_dir=library_dir,
                pci_ids={card.uuid: hardware.driver.pci_device(card.uuid) for card in cards},
            )
            files.save_config(runtime, config)
            daemon = Daemon(runtime, hardware, Broker(node, config.policy), manager, native, config)
            asyncio.run(daemon.serve(lambda: ready(daemon), ending))
            if not manager.keeper.records:
                runtime.instances.unlink(missing_ok=True)
        jobs = [job.name for job in daemon.broker.jobs.values()]
        if not jobs and not daemon.moved:
            daemon.nodes.reopen()
        return DaemonEnd(jobs, presence.pass_on(daemon.name) if daemon.moved else None)


def _report_displaced(card: Card, owner: Peer) -> None:
    log(
        f"card {card.index} is now root's. Process {owner.pid} of {user_name(owner.uid)} had "
        "locked it: what that user's daemon has leased of it stays in use until those programs end"
    )


def remove_files(runtime: Runtime) -> None:
    """Remove the files of a daemon that has no leases."""
    linker_files = runtime.linker_configuration, runtime.linker_cache
    for path in (runtime.state, runtime.config, *linker_files):
        path.unlink(missing_ok=True)
    for node in (runtime.simulated, *runtime.former_nodes()):
        shutil.rmtree(node, ignore_errors=True)
    # Containers' devices name these libraries over boots.
    if runtime.system and not cdi_devices.exist():
        shutil.rmtree(files.SYSTEM_NATIVE, ignore_errors=True)
    sandbox.remove()


@contextlib.contextmanager
def _hardware(runtime: Runtime, config: DaemonConfig, native: Path) -> Iterator[Hardware]:
    if not config.simulate:
        with contextlib.closing(_machine_hardware(runtime, config)) as hardware:
            yield hardware
        return
    node = _simulated_node(runtime, config.simulate, native / "simulated")

    def start() -> Driver:
        # Called again after the card server was killed, which is like a reset of a real card. One that lives
        # keeps its instances.
        node.restart()
        return Driver.open(node.library_dir)

    node.start()
    try:
        with contextlib.closing(Hardware(lambda: Driver.open(node.library_dir), start)) as hardware:
            yield hardware
    finally:
        # Programs in leases use its cards, so it runs until the last of them has ended.
        # Without its directory, a server is not found again, and ends after them by itself.
        if runtime.leases.exists() and not any(runtime.leases.iterdir()):
            node.stop()


def _machine_hardware(runtime: Runtime, config: DaemonConfig) -> Hardware:
    """Return this machine's cards. Raises NoDriver: to a service's administrator it names the file."""
    try:
        return Hardware(lambda: Driver.open(root=config.driver))
    except DriverNotFound as why:
        if not lifetime.environment():
            raise
        raise DriverNotFound(
            why.problem,
            f'or write driver = "DIRECTORY", or simulate = "T4" for a simulated card, to {runtime.options}; '
            "then start the service again",
        ) from None


def _simulated_node(runtime: Runtime, simulate: str, native: Path) -> SimulatedNode:
    """Return the node with these cards. One of another build is moved aside, where its programs go on."""
    for old in runtime.former_nodes():
        if not SimulatedNode(old).running:
            shutil.rmtree(old, ignore_errors=True)
    cards = parse_spec(simulate)
    try:
        return SimulatedNode.create(runtime.simulated, cards, native)
    except OtherCards:
        former = files.load_config(runtime)
        served = former.simulate if former and former.simulate else "the former cards"
        raise InvalidOption(
            f"programs still use the simulated cards of the daemon before ({served}), so simulate is not "
            f"{simulate} yet: start it with {served} again, in {runtime.options} or by --simulate, end the "
            "programs (`fenka stop`), and change it then"
        ) from None
    except OtherBuild:
        # Programs reach it by the directory itself, not by its name. A former node with this name has ended.
        runtime.simulated.rename(runtime.root / f"simulated-{len(runtime.former_nodes())}")
        log(
            "the card server of another build goes on for its programs; later ones get one of this build"
        )
        return SimulatedNode.create(runtime.simulated, cards, native)


def _check_closed(config: DaemonConfig) -> None:
    if config.closed and os.geteuid() != 0:
        raise InvalidOption(
            "--closed needs root's daemon, since the cards' device nodes are root's: `sudo fenka daemon "
            "--background --closed`"
        )
    if config.closed and config.shim_only:
        raise InvalidOption(
            "--closed keeps programs from cards and --shim-only lets containers open all: leave out one"
        )


def _check_mig(config: DaemonConfig, cards: tuple[Card, ...]) -> None:
    known = {
        layouts.OFF,
        layouts.ALL,
        *(name for card in cards for name in (str(card.index), card.uuid)),
    }
    unknown = [word for word in config.mig if word not in known]
    if unknown:
        raise InvalidOption(
            f"--mig {unknown[0]} is no card that the daemon leases: give an index, a UUID, all or off"
        )
    if layouts.OFF in config.mig and len(config.mig) > 1:
        raise InvalidOption("--mig off divides no card: leave out the other --mig")


def _check_prices(config: DaemonConfig, cards: tuple[Card, ...]) -> None:
    here = {card.model for card in cards}
    # Others may have been here.
    known = here | {model.name for model in MODELS.values()}
    for model, _ in map(parse_price, config.price):
        if model not in known:
            raise InvalidOption(
                f"--price {model} is of no card that fenka knows: here are {', '.join(sorted(here))}"
            )


def _machine_mib(driver: Driver) -> int | None:
    """Return the machine's memory; None with a simulated driver, whose cards are not of this machine."""
    if driver.simulated:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB


def _sized(cards: tuple[Card, ...], size_mib: int, machine_mib: int | None) -> tuple[Card, ...]:
    """Return the cards with this memory where the driver reports none. Raises InvalidOption."""
    if not size_mib:
        return cards
    if all(card.memory_mib for card in cards):
        raise InvalidOption(
            "--card-memory is for cards whose driver reports no memory, and here it reports that of all "
            "cards: leave it out"
        )
    if machine_mib is not None and size_mib >= machine_mib:
        raise InvalidOption(
            f"--card-memory must be less than the machine's memory of {machine_mib} MiB, which the card "
            f"shares, not {size_mib} MiB"
        )
    return tuple(card if card.memory_mib else replace(card, memory_mib=size_mib) for card in cards)


def _select_cards(cards: tuple[Card, ...], only: list[str]) -> tuple[Card, ...]:
    if not only:
        return cards
    by_name = {name: card for card in cards for name in (str(card.index), card.uuid)}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        here = ", ".join(f"{card.index} ({card.uuid})" for card in cards)
        raise InvalidOption(f"no card is called {unknown[0]}: here are {here}")
    chosen = {by_name[name].index for name in only}
    return tuple(card for card in cards if card.index in chosen)
