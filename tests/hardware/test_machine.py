"""The machine's driver, which several threads use and one opens again."""

import threading
from typing import Any

from fenka.hardware.nvml import DriverLost, Hardware


class FakeDriver:
    """A driver that is lost or not."""

    def __init__(self, *, lost: bool) -> None:
        self.lost, self.asked = lost, False

    def readings(self) -> tuple[()]:
        """Raise DriverLost if it is."""
        if self.lost:
            raise DriverLost("gone")
        return ()

    def processes(self) -> tuple[()]:
        """Note the call."""
        self.asked = True
        return ()

    def close(self) -> None:
        """Close nothing."""


def test_closed_driver_is_not_used_while_another_thread_opens_the_next() -> None:
    """Its library may be unloaded."""
    first, second = FakeDriver(lost=True), FakeDriver(lost=False)
    readers: list[threading.Thread] = []

    def again() -> Any:
        readers.append(threading.Thread(target=hardware.processes))
        readers[0].start()
        readers[0].join(0.1)  # It ends now, or waits for the next driver.
        return second

    opened: list[Any] = [lambda: first, again]
    hardware = Hardware(*opened)
    assert hardware.readings() == {}
    readers[0].join()
    assert (first.asked, second.asked) == (False, True)
