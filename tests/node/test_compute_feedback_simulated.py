"""Real programs in leases on a simulated card, measured by the simulator's own accounting."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fenka.core.request import Slice
from fenka.hardware.nvml import Driver
from fenka.isolation.compute_feedback import PERIOD_S
from fenka.node.lease.store import Lease
from fenka.node.monitor.monitor import FeedbackLoop
from tests.native.test_limit_simulated import TRIES, bench
from tests.node.harness import lease_files

UID = "0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b{}"


class LeasedCard:
    """A card whose programs are in leases of the node program, which feeds back what they use."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._testbed = stack.enter_context(bench.Testbed(folder, 1, measured=False).running())
        driver = stack.enter_context(Driver.open(self._testbed.node.library_dir))
        self._leases: dict[str, Lease] = {}
        self._pids: list[int] = []
        self.files = replace(lease_files(folder), root=folder / "leases")
        self.files.prepare()
        self._loop = FeedbackLoop(driver.busy_samples, self.files, folder / "proc")
        stop = threading.Event()
        thread = threading.Thread(target=self._feed_back, args=(stop,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)

    def _feed_back(self, stop: threading.Event) -> None:
        while not stop.wait(PERIOD_S):
            self._loop.round(dict(self._leases), {})

    def start(self, percent: int, *, ceiling: int = 0, weighted: bool = False) -> Any:
        """Start a program in a lease of its own, which launches kernels of 2 ms."""
        name, uid = f"t{len(self._leases)}", UID.format(len(self._leases))
        slices = [Slice(0, self._testbed.uuids[0], 1024, percent)]
        lease = Lease(uid, "default", "p", "c", slices, slices, {}, burst_percent=ceiling)
        lease = msgspec.structs.replace(lease, weighted=weighted)
        self.files.make(name, lease)
        load = self._stack.enter_context(self._testbed.load(self.files.root / name, "2000"))
        proc = self._folder / "proc" / str(load.process.pid)
        proc.mkdir(parents=True)
        (proc / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'ab' * 32}\n")
        self._leases[name] = lease
        self._pids.append(load.process.pid)
        return load

    def resize(self, number: int, percent: int) -> None:
        """Put another percentage in force for the lease of this number."""
        name = f"t{number}"
        lease = self._leases[name]
        slices = [replace(piece, compute=percent) for piece in lease.slices]
        self.files.enforce(name, lease, slices)
        self._leases[name] = msgspec.structs.replace(lease, slices=slices)

    def expect(self, condition: Callable[[list[float]], bool]) -> None:
        """Wait for a condition on the programs' percentages of the card, in one of a few measurements."""
        seen = []
        for _ in range(TRIES):
            time.sleep(bench.SETTLE_S)
            before, began = self._testbed.busy(0), time.monotonic()
            time.sleep(3)
            after, took = self._testbed.busy(0), time.monotonic() - began
            got = [(after[pid] - before[pid]) / took / 1e7 for pid in self._pids]
            if condition(got):
                return
            seen.append(got)
        pytest.fail(f"measured {seen}")


def are(*wanted: float) -> Callable[[list[float]], bool]:
    """Return whether the programs have these percentages of the card."""
    return lambda got: got == pytest.approx(wanted, abs=5)


def divide(*wanted: float) -> Callable[[list[float]], bool]:
    """Return whether the programs divide the used time in this way, and most of the card's time is used.

    A busy machine takes time from the programs, and more from those that have more of the card.
    """
    return lambda got: (
        sum(got) > 60 and [100 * each / sum(got) for each in got] == pytest.approx(wanted, abs=6)
    )


@pytest.fixture
def card(tmp_path: Path) -> Iterator[LeasedCard]:
    """Return a simulated T4."""
    with ExitStack() as stack:
        yield LeasedCard(tmp_path, stack)


@pytest.mark.timeout(300)  # measures twice, in TRIES measurements each
def test_burst_ends_at_its_limit_and_yields_to_others(card: LeasedCard) -> None:
    """20 %, up to 50: half of the card alone, and what is left beside a lease of 60."""
    card.start(20, ceiling=50)
    card.expect(are(50))
    card.start(60)
    card.expect(are(40, 60))


@pytest.mark.timeout(300)  # measures four times, in TRIES measurements each
def test_training_has_what_its_service_leaves_idle_when_both_have_weights(
    card: LeasedCard,
) -> None:
    """80 to 20 while both are busy, all of the card while the service is idle, 50 to 50 when resized."""
    service = card.start(80, weighted=True)
    card.start(20, weighted=True)
    card.expect(divide(80, 20))
    service.switch()
    card.expect(divide(0, 100))
    service.switch()
    card.expect(divide(80, 20))
    card.resize(1, 80)
    card.expect(divide(50, 50))


@pytest.mark.timeout(300)
def test_guaranteed_share_is_kept_beside_weights(card: LeasedCard) -> None:
    """A service of 60 % keeps it; the training has the rest, whatever its weight."""
    card.start(60)
    card.start(100, weighted=True)
    card.expect(divide(60, 40))


@pytest.mark.timeout(300)
def test_guaranteed_share_is_kept_beside_a_training_without_compute(card: LeasedCard) -> None:
    """The training has the rest of the time, and all of it while the service is idle."""
    service = card.start(80)
    card.start(0)
    card.expect(divide(80, 20))
    service.switch()
    card.expect(divide(0, 100))
