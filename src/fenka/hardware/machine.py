"""The driver of this machine, which may be lost and return."""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fenka.core.inventory import Card
from fenka.hardware.context_overhead import context_mib
from fenka.hardware.nvml import Driver, DriverLost, Reading


class Hardware:
    """The open driver. It is opened again when it was lost.

    first, again: open the driver, at the start and later; by default in the same way.
    """

    def __init__(
        self, first: Callable[[], Driver], again: Callable[[], Driver] | None = None
    ) -> None:
        self._again = again or first
        self.driver = first()
        self.context_mib: dict[str, int] = {}
        """Context overhead by card UUID, of the cards where it could be measured."""
        self._opening = threading.Lock()

    def measure(self, cards: Iterable[Card], library_dir: Path | None) -> None:
        """Measure the context overhead, once per model. Raises NoDriver."""
        by_model: dict[str, int | None] = {}
        for card in cards:
            if card.model not in by_model:
                by_model[card.model] = context_mib(self.driver, card, library_dir)
            overhead = by_model[card.model]
            if overhead is not None:
                self.context_mib[card.uuid] = overhead

    def readings(self) -> dict[str, Reading]:
        """Return the cards' readings by UUID. Raises NoDriver."""
        try:
            readings = self.driver.readings()
        except DriverLost:
            with self._opening:
                self.driver.close()
                self.driver = self._again()
            readings = self.driver.readings()
        return {reading.uuid: reading for reading in readings}

    def busy_samples(self, uuid: str, since_us: int) -> tuple[int, Mapping[int, int]] | None:
        """Call `Driver.busy_samples`. The driver is not closed meanwhile, so that any thread may call this.

        Raises DriverLost; only `readings` opens the driver again.
        """
        with self._opening:
            return self.driver.busy_samples(uuid, since_us)

    def close(self) -> None:
        """Close the driver."""
        self.driver.close()
