"""Compute feedback of all leases, whose processes are found by their cgroups."""

import asyncio
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fenka.core.request import Slice
from fenka.hardware.nvml import DriverLost
from fenka.isolation import account, pid_namespaces
from fenka.isolation.compute_feedback import ComputeFeedback, Samples
from fenka.isolation.lease_control import layout
from fenka.node.lease.store import Lease
from fenka.node.monitor.monitor import FeedbackLoop
from tests.node.harness import card, lease_files, node_harness
from tests.node.pod_kit import granted, request, running
from tests.waiting import WAIT_S, until

PODS = ("0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b1", "0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b2")
MS = 1_000_000


class Machine:
    """A card, its clock, the processes on it, and the leases of the node program."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_us, self.lost = root, 10_000_000, False
        self.busy: dict[int, int] | None = {}
        self.leases: dict[str, Lease] = {}
        self.names: dict[str, str] = {}
        self.asked = 0
        self.start()

    def start(self) -> None:
        """Start the loop, as after a crash."""
        self.files = lease_files(self.root)
        self.files.prepare()
        self.loop = FeedbackLoop(self.samples, self.files, self.root / "proc", self.make)

    def make(self, samples: Samples, lease_of: Callable[[int], str | None]) -> ComputeFeedback:
        """Return feedback with this machine's clock."""
        return ComputeFeedback(samples, lease_of, lambda: self.now_us * 1000, lambda: self.now_us)

    def samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        """Stand in for `Hardware.busy_samples`."""
        assert uuid == card(0).uuid
        self.asked += 1
        if self.lost:
            raise DriverLost("gone")
        return None if self.busy is None else (self.now_us if self.busy else since_us, self.busy)

    def lease(self, name: str, compute: int, ceiling: int = 0, pod: int = 0) -> None:
        """Make a lease of a container, with files."""
        slices = [Slice(0, card(0).uuid, 100, compute)]
        self.leases[name] = Lease(
            PODS[pod], "default", f"p{pod}", name, slices, slices, {}, burst_percent=ceiling
        )
        self.files.make(name, self.leases[name])

    def process(self, pid: int, container: str, pod: int = 0) -> None:
        """Add a process in a container of a pod."""
        (self.root / "proc" / str(pid)).mkdir(parents=True)
        text = f"4:memory:/kubepods/besteffort/pod{PODS[pod]}/{container * 32}\n"
        (self.root / "proc" / str(pid) / "cgroup").write_text(text)

    def round(self, **busy: int) -> None:
        """Run a round after 100 ms in which processes used these percentages."""
        self.now_us += 100_000
        if self.busy is not None:
            self.busy = {int(pid[1:]): percent for pid, percent in busy.items()}
        self.loop.round(self.leases, self.names)

    def feedback(self, name: str) -> tuple[int, int]:
        """Return the used milliseconds and the allowed percentage on the lease's page."""
        data = (self.root / "leases" / name / "lease" / "control").read_bytes()
        at = layout().from_buffer("struct fenka_control *", data).cards[0]
        return at.busy_ns // MS, at.allowed // 100


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine without leases."""
    return Machine(tmp_path)


def test_feedback_has_what_each_leases_processes_used(machine: Machine) -> None:
    """One of two pods may use idle time, up to its burst limit."""
    machine.lease("a", 30)
    machine.lease("b", 20, 60, pod=1)
    machine.process(1, "aa")
    machine.process(2, "bb", pod=1)
    machine.round()
    machine.round(p1=30, p2=20)
    machine.round(p1=30, p2=20)
    assert machine.feedback("a")[0] > machine.feedback("b")[0] > 0
    assert (machine.feedback("a")[1], machine.feedback("b")[1]) == (30, 60)


def test_containers_of_one_pod_are_distinguished_when_the_api_server_names_them(
    machine: Machine,
) -> None:
    """Before that, no container is charged with another's time."""
    machine.lease("x", 30)
    machine.lease("y", 30)
    machine.process(1, "aa")
    machine.round(p1=50)
    assert (machine.feedback("x")[0], machine.feedback("y")[0]) == (0, 0)
    machine.names = {"aa" * 32: "y", "bb" * 32: "x"}
    machine.round(p1=50)
    assert (machine.feedback("x")[0], machine.feedback("y")[0]) == (0, 50)


def test_container_without_compute_has_what_shares_leave(machine: Machine) -> None:
    """The share of another pod comes first, unless containers on the node are not limited."""
    machine.lease("training", 0)
    machine.lease("service", 80, pod=1)
    machine.process(1, "aa")
    machine.process(2, "bb", pod=1)
    machine.round(p1=50, p2=80)
    assert (machine.feedback("training")[1], machine.feedback("service")[1]) == (20, 80)
    lease = machine.leases["training"]
    exempt = msgspec.structs.replace(lease, limits_mib={card(0).uuid: 100})
    machine.leases["training"] = exempt
    machine.round(p1=50, p2=80)
    assert machine.feedback("training")[1] == 100


def test_container_that_requested_all_of_a_card_is_not_delayed(machine: Machine) -> None:
    """Beside one without compute, which has the smallest part then."""
    machine.lease("all", 100)
    machine.lease("training", 0, pod=1)
    machine.process(1, "aa")
    machine.process(2, "bb", pod=1)
    machine.round(p1=100, p2=1)
    assert (machine.feedback("all")[1], machine.feedback("training")[1]) == (100, 1)


@pytest.mark.skipif(
    not pid_namespaces.in_initial_namespace(), reason="needs the machine's first PID namespace"
)
def test_memory_of_a_restarted_container_is_released(machine: Machine) -> None:
    """Its PID namespace is reported as ended."""
    machine.lease("a", 30)
    slots = machine.root / "leases" / "a" / "account" / "slots"
    with slots.open("r+b") as file:
        for field, word in (
            ("slots_used", 8),
            ("pid_namespaces", 77),
            ("identity", 100 | 5 << 32),
            ("memory", 1 << 20),
        ):
            file.seek(account.offset(field))
            file.write(struct.pack("<Q", word))
    assert account.read(slots).memory_bytes[0] == 1 << 20
    machine.round()
    assert account.read(slots).memory_bytes[0] == 0


def test_feedback_continues_when_the_program_restarts(machine: Machine) -> None:
    """The leases are found in the store."""
    machine.lease("a", 30)
    machine.process(1, "aa")
    machine.round(p1=30)
    machine.start()
    machine.round(p1=30)
    before = machine.feedback("a")[0]
    machine.round(p1=30)
    assert machine.feedback("a")[0] - before == 30


def test_former_page_is_released_when_a_lease_is_made_again(machine: Machine) -> None:
    """The new page gets the feedback."""
    machine.lease("a", 30)
    machine.process(1, "aa")
    machine.round(p1=30)
    control = machine.root / "leases" / "a" / "lease" / "control"
    kept = control.rename(machine.root / "kept")
    machine.round(p1=30)
    assert machine.asked == 2  # programs may still have it mapped
    control.write_bytes(kept.read_bytes())
    former = kept.read_bytes()
    machine.round(p1=30)
    assert kept.read_bytes() == former
    assert control.read_bytes() != former
    del machine.leases["a"]
    machine.round(p1=30)
    assert machine.asked == 3


def test_rounds_continue_when_the_driver_is_lost(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is logged once."""
    machine.lease("a", 30)
    machine.process(1, "aa")
    machine.lost = True
    machine.round(p1=30)
    machine.round(p1=30)
    assert len(caplog.records) == 1
    machine.lost = False
    machine.round(p1=30)
    assert machine.feedback("a")[0] > 0


def test_no_feedback_is_written_when_the_driver_measures_nothing(machine: Machine) -> None:
    """Programs rely on their own measurements."""
    machine.lease("a", 30)
    machine.busy = None
    machine.round()
    assert machine.feedback("a") == (0, 0)


def test_feedback_uses_a_changed_burst_limit(machine: Machine) -> None:
    """The next round reads it from the store."""
    machine.lease("a", 30, 50)
    machine.process(1, "aa")
    machine.round(p1=30)
    assert machine.feedback("a")[1] == 50
    machine.leases["a"] = msgspec.structs.replace(machine.leases["a"], burst_percent=70)
    machine.round(p1=30)
    assert machine.feedback("a")[1] == 70


async def test_agent_reconciles_while_a_round_waits_for_the_driver(
    library: Path, tmp_path: Path
) -> None:
    """The lease gets its feedback afterwards."""
    answers, asked = threading.Event(), threading.Event()

    def samples(_: str, since_us: int) -> tuple[int, dict[int, int]]:
        asked.set()
        answers.wait(WAIT_S)
        return since_us + 100_000, {7: 50}

    async with node_harness(card(0), library=library) as node:
        await node.ready()
        pod = await running(node, "a")
        request(node, "a", "gpu-core=40")
        await granted(node, "a", "gpu-core=40")
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "cgroup").write_text(
            f"4:memory:/kubepods/pod{pod['metadata']['uid']}/{'aa' * 32}\n"
        )
        loop = FeedbackLoop(samples, node.lease_files, tmp_path)
        task = asyncio.create_task(loop.run(node.store, node.node_api))
        await until(asked.is_set)
        request(node, "a", "gpu-core=30")
        await granted(node, "a", "gpu-core=30")
        answers.set()
        (name,) = node.store.tokens

        def busy_ns() -> int:
            data = node.lease_files.control(name).read_bytes()
            ns: int = layout().from_buffer("struct fenka_control *", data).cards[0].busy_ns
            return ns

        await until(busy_ns)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
