"""The node's GPU driver, real or simulated: opened when it is there, and what containers are given of it."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from fenka.core.inventory import Card
from fenka.hardware import card_lock, driver_edits
from fenka.hardware.card_lock import MACHINE, CardLocked
from fenka.hardware.driver_edits import ContainerEdits
from fenka.hardware.nvml import Driver, DriverLost, Hardware, NoDriver
from fenka.hardware.nvml_mig import NoCapability, administration_files
from fenka.hardware.simulated_node import SimulatedNode
from fenka.node.inventory import CardHealth
from fenka.node.lease import files as lease_files
from fenka.node.lease.store import Lease
from fenka.node.monitor.usage import BusyNs

_LOG = logging.getLogger(__name__)

RETRY_S = 1.0
_POLL_S = 0.1

_Value = TypeVar("_Value")


class NodeDriver:
    """Where the driver is, and how its parts are made."""

    def __init__(
        self,
        library: Path,
        host: Path,
        simulated: Path | None,
        driver_root: str = "",
        on_missing: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Args:
        library: the native libraries, prepared for leases.
        host: the node's root.
        simulated: the simulated node's directory; None for real cards.
        driver_root: where the options say that the driver is.
        on_missing: receives the reason each time that the driver cannot be opened.
        """
        self._library, self._host, self._simulated = library, host, simulated
        self._driver_root, self._on_missing = driver_root, on_missing

    @property
    def libraries(self) -> Path | None:
        """Directory or file of NVML; None for the system's own. Raises NoDriver, InvalidDriverRoot."""
        if self._simulated is not None:
            return self._library / "simulated"
        return lease_files.nvml_file(self._host, self._driver_root)

    @contextlib.contextmanager
    def open(self) -> Iterator[Hardware]:
        """Open the driver; waits for it, since it may be installed later, by a pod of its own."""
        if self._simulated is not None:
            # Through this program's own copy of the driver: the original is in another container.
            os.environ["FENKA_SIMULATED_NODE"] = str(self._simulated)
            _wait_for(SimulatedNode(self._simulated))
        hardware = _retry(
            lambda: Hardware(lambda: Driver.open(self.libraries)), NoDriver, self._on_missing
        )
        if self._simulated is None:
            _make_mig_files()
        with contextlib.closing(hardware):
            yield hardware

    def edits(self, hardware: Hardware) -> Callable[[Lease], ContainerEdits]:
        """Return a function that gives the driver's part of a lease's container edits.

        A lease of instances gets the device files of those and no others, beside their cards'.
        """
        if self._simulated is not None:
            simulated = lease_files.simulated_edits(self._library, self._simulated)
            return lambda _: simulated

        def real(lease: Lease) -> ContainerEdits:
            minors = [hardware.driver.minor(piece.card_uuid) for piece in lease.slices]
            files = [Path(file) for instance in lease.instances.values() for file in instance.files]
            version = hardware.driver.version
            return driver_edits.driver_edits(
                minors,
                version,
                self._host,
                files,
                self._driver_root,
                unlimited=lease.unlimited_drivers,
            )

        return real

    def busy_ns(self, hardware: Hardware, health: CardHealth) -> BusyNs:
        """Return a function that gives each process's time on each card.

        Simulated cards count exactly. Real ones report percentages, which are added up.
        """
        if self._simulated is not None:
            node = SimulatedNode(self._simulated)
            return lambda: {
                (card.uuid, pid): ns
                for card in health.known
                for pid, ns in node.busy_ns(card.index).items()
            }
        return _accumulated(hardware, health)


def _make_mig_files() -> None:
    """Make the device files by which this program may divide cards, if the driver has them."""
    try:
        administration_files()
    except NoCapability:
        _LOG.info("the driver has no files for dividing cards")
    except OSError as error:
        _LOG.warning("the driver's files for dividing cards cannot be made: %s", error.strerror)


def _accumulated(hardware: Hardware, health: CardHealth) -> BusyNs:
    total: dict[tuple[str, int], int] = {}
    last = time.time_ns()

    def busy_ns() -> dict[tuple[str, int], int]:
        nonlocal total, last
        samples = {}
        with contextlib.suppress(DriverLost):
            for card in health.known:
                samples[card.uuid] = hardware.busy_samples(card.uuid, last // 1000)
        now = time.time_ns()
        total = {
            (uuid, pid): total.get((uuid, pid), 0) + percent * (now - last) // 100
            for uuid, sample in samples.items()
            for pid, percent in (sample[1] if sample else {}).items()
        }
        last = now
        return total

    return busy_ns


def lock_cards(cards: Sequence[Card]) -> contextlib.ExitStack:
    """Lock the cards; waits while another program of the machine owns one."""
    return _retry(lambda: card_lock.acquire(cards, network=MACHINE), CardLocked)


def _wait_for(node: SimulatedNode) -> None:
    if not node.running:
        _LOG.info("waiting for `fenka sim node` in %s", node.directory)
    while not node.running:
        time.sleep(_POLL_S)


def _retry(
    make: Callable[[], _Value],
    error: type[Exception],
    on_failure: Callable[[str], None] = lambda _: None,
) -> _Value:
    """Call a function until it succeeds. Each reason for a failure is logged once."""
    logged = ""
    while True:
        try:
            return make()
        except error as reason:
            if logged != str(reason):
                logged = str(reason)
                _LOG.warning("waiting: %s", logged)
            on_failure(logged)
            time.sleep(RETRY_S)
