"""The driver of this machine, which may be lost and return."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from fenka.core.inventory import Card
from fenka.hardware.nvml import Driver, DriverLost, GpuProcess, Reading

PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
sys.exit(
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    or print("ready", flush=True)
    or bool(sys.stdin.read())
)
"""
"""Uses only the standard library, and ends when its standard input is closed."""


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
        self._uses = 0
        self._changed = threading.Condition()

    def measure(self, cards: Iterable[Card], library_dir: Path | None) -> None:
        """Measure the device memory that a process's context takes, once per model. Raises NoDriver.

        It is hundreds of MiB on large cards, appears in no driver call, and differs by model and driver.
        """
        by_model: dict[str, int | None] = {}
        for card in cards:
            if card.model not in by_model:
                by_model[card.model] = _context_mib(self.driver, card, library_dir)
            overhead = by_model[card.model]
            if overhead is not None:
                self.context_mib[card.uuid] = overhead

    def readings(self) -> dict[str, Reading]:
        """Return the cards' readings by UUID. Raises NoDriver."""
        try:
            readings = self.driver.readings()
        except DriverLost:
            with self._changed:
                self._changed.wait_for(lambda: self._uses == 0)
                self.driver.close()
                self.driver = self._again()
            readings = self.driver.readings()
        return {reading.uuid: reading for reading in readings}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Driver]:
        """Keep the driver open meanwhile, so that any thread may call it."""
        with self._changed:
            self._uses += 1
        try:
            yield self.driver
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def processes(self) -> tuple[GpuProcess, ...]:
        """Call `Driver.processes`, in any thread.

        Raises DriverLost; only `readings` opens the driver again.
        """
        with self.in_use() as driver:
            return driver.processes()

    def busy_samples(self, uuid: str, since_us: int) -> tuple[int, Mapping[int, int]] | None:
        """Call `Driver.busy_samples`, as `processes` does with its call. Raises DriverLost."""
        with self.in_use() as driver:
            return driver.busy_samples(uuid, since_us)

    def close(self) -> None:
        """Close the driver, after the calls that other threads have begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._uses == 0)
            self.driver.close()


def _context_mib(driver: Driver, card: Card, library_dir: Path | None) -> int | None:
    """Return the MiB that a process with only a context holds on a card, as the driver reports.

    Return None if the driver reports no process's memory, or makes no context.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
    if library_dir is not None:
        environment["LD_LIBRARY_PATH"] = str(library_dir)
    with subprocess.Popen(
        [sys.executable, "-SIc", PROBE],
        cwd="/",
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        ready = probe.stdout.readline() == b"ready\n"
        held = [
            process.used_mib
            for process in (driver.processes() if ready else ())
            if (process.pid, process.uuid) == (probe.pid, card.uuid)
        ]
        probe.stdin.close()
    return held[0] if held else None
