"""Real programs in leases on a simulated card, measured by the simulator's own accounting."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fenka.core.request import Slice
from fenka.hardware.nvml import Driver
from fenka.isolation.compute_feedback import PERIOD_S
from fenka.node.lease.store import Lease
from fenka.node.monitor.compute_feedback import FeedbackLoop
from tests.native.test_limit_simulated import TRIES, bench
from tests.node.harness import lease_files

UID = "0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b{}"


@pytest.mark.timeout(300)  # measures twice, in TRIES measurements each
def test_burst_ends_at_its_limit_and_yields_to_others(tmp_path: Path) -> None:
    """20 %, up to 50: half of the card alone, and what is left beside a lease of 60."""
    seen: list[list[float]] = []
    with ExitStack() as stack:
        testbed = stack.enter_context(bench.Testbed(tmp_path, 1, measured=False).running())
        driver = stack.enter_context(Driver.open(testbed.node.library_dir))
        leases: dict[str, Lease] = {}

        def start(percent: int, mode: str, ceiling: int) -> int:
            lease = testbed.lease(0, percent, mode)
            uid = UID.format(len(leases))
            slices = [Slice(0, testbed.uuids[0], 1024, percent)]
            made = Lease(uid, "default", "p", "c", slices, slices, {}, burst_percent=ceiling)
            load = stack.enter_context(testbed.load(lease, "2000"))
            proc = tmp_path / "proc" / str(load.process.pid)
            proc.mkdir(parents=True)
            (proc / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'ab' * 32}\n")
            leases[lease.name] = made
            return int(load.process.pid)

        files = replace(lease_files(tmp_path), root=tmp_path)
        loop = FeedbackLoop(driver.busy_samples, files, tmp_path / "proc")
        stop = threading.Event()

        def tell() -> None:
            while not stop.wait(PERIOD_S):
                loop.round(dict(leases), {})

        thread = threading.Thread(target=tell)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)

        def shares(*pids: int) -> list[float]:
            time.sleep(bench.SETTLE_S)
            before, began = testbed.busy(0), time.monotonic()
            time.sleep(3)
            after, took = testbed.busy(0), time.monotonic() - began
            return [(after[pid] - before[pid]) / took / 1e7 for pid in pids]

        def near(wanted: list[float], *pids: int) -> None:
            seen.clear()
            for _ in range(TRIES):
                got = shares(*pids)
                if all(abs(g - w) <= 5 for g, w in zip(got, wanted, strict=True)):
                    return
                seen.append(got)
            pytest.fail(f"wanted {wanted}, got {seen}")

        soft = start(20, "soft", 50)
        near([50], soft)
        hard = start(60, "hard", 0)
        near([40, 60], soft, hard)
