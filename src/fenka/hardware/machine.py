"""The cards of this machine, by a driver that may go away and come back."""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fenka.core.inventory import Card
from fenka.hardware.context_overhead import context_mib
from fenka.hardware.nvml import Driver, DriverLost, Reading


class Hardware:
    """The driver of this machine, opened again when it was lost."""

    def __init__(
        self, first: Callable[[], Driver], again: Callable[[], Driver] | None = None
    ) -> None:
        self._again = again or first
        self.driver = first()
        self.context_mib: dict[str, int] = {}
        """What a process's context takes, by card UUID; a card whose driver does not tell is not in it."""
        self._opening = threading.Lock()

    def measure(self, cards: Iterable[Card], library_dir: Path | None) -> None:
        """Find out what contexts take, once a model. Raises NoDriver."""
        by_model: dict[str, int | None] = {}
        for card in cards:
            if card.model not in by_model:
                by_model[card.model] = context_mib(self.driver, card, library_dir)
            taken = by_model[card.model]
            if taken is not None:
                self.context_mib[card.uuid] = taken

    def readings(self) -> dict[str, Reading]:
        """What each card does now, by UUID. Raises NoDriver."""
        try:
            readings = self.driver.readings()
        except DriverLost:
            with self._opening:
                self.driver.close()
                self.driver = self._again()
            readings = self.driver.readings()
        return {reading.uuid: reading for reading in readings}

    def busy_samples(self, uuid: str, since_us: int) -> tuple[int, Mapping[int, int]] | None:
        """Of the driver that is open now, which is not closed meanwhile: for a thread that does nothing else.

        Raises DriverLost, and does not open it again: `readings` does.
        """
        with self._opening:
            return self.driver.busy_samples(uuid, since_us)

    def close(self) -> None:
        """Give the driver back."""
        self.driver.close()
