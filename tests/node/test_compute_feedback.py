"""Programs are told of their cards' time: those of all leases that there are, by their cgroups."""

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
from fenka.isolation.files import create_lease
from fenka.isolation.layout import layout
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import Lease, Token
from fenka.node.monitor.compute_feedback import FeedbackLoop
from tests.node.harness import card, node_harness, play, until
from tests.node.test_resize import granted, running, wish

PODS = ("0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b1", "0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b2")
MS = 1_000_000


class Machine:
    """A card, its clock, who computes on it, and the agent's leases."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_us, self.lost = root, 10_000_000, False
        self.busy: dict[int, int] | None = {}
        self.tokens: dict[str, Token] = {}
        self.names: dict[str, str] = {}
        self.asked = 0
        self.start()

    def start(self) -> None:
        """The agent, as after a crash: it knows what is on the disk."""
        leases = LeaseFiles(self.root / "leases", self.root / "cdi")
        self.loop = FeedbackLoop(self.samples, leases, self.root / "proc", self.make)

    def make(self, samples: Samples, lease_of: Callable[[int], str | None]) -> ComputeFeedback:
        """With this machine's clock."""
        return ComputeFeedback(samples, lease_of, lambda: self.now_us * 1000, lambda: self.now_us)

    def samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        """As the driver's."""
        assert uuid == card(0).uuid
        self.asked += 1
        if self.lost:
            raise DriverLost("gone")
        return None if self.busy is None else (self.now_us if self.busy else since_us, self.busy)

    def lease(self, name: str, compute: int, ceiling: int = 0, pod: int = 0) -> None:
        """Of a container of that name, with files."""
        slices = [Slice(0, card(0).uuid, 100, compute)]
        lease = Lease(
            PODS[pod], "default", f"p{pod}", name, slices, slices, {}, burst_percent=ceiling
        )
        for part in ("lease", "account"):
            (self.root / "leases" / name / part).mkdir(parents=True)
        create_lease(self.root / "leases" / name, name, slices, {}, lease.compute)
        self.tokens[name] = Token(name, "aliyun.com/gpu-mem", ["u0"], 0.0, lease)

    def process(self, pid: int, container: str, pod: int = 0) -> None:
        """In a container of a pod."""
        (self.root / "proc" / str(pid)).mkdir(parents=True)
        text = f"4:memory:/kubepods/besteffort/pod{PODS[pod]}/{container * 32}\n"
        (self.root / "proc" / str(pid) / "cgroup").write_text(text)

    def round(self, **busy: int) -> None:
        """100 ms in which these processes had so many percent."""
        self.now_us += 100_000
        if self.busy is not None:
            self.busy = {int(pid[1:]): percent for pid, percent in busy.items()}
        self.loop.round(list(self.tokens.values()), self.names)

    def told(self, name: str) -> tuple[int, int]:
        """Milliseconds had, and percent allowed."""
        data = (self.root / "leases" / name / "lease" / "control").read_bytes()
        at = layout().from_buffer("struct fenka_control *", data).cards[0]
        return at.busy_ns // MS, at.allowed // 100


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A new one."""
    return Machine(tmp_path)


def test_leases_are_told_what_their_processes_had(machine: Machine) -> None:
    """Two pods; one may have what is idle, but for a ceiling."""
    machine.lease("a", 30)
    machine.lease("b", 20, 60, pod=1)
    machine.process(1, "aa")
    machine.process(2, "bb", pod=1)
    machine.round()
    machine.round(p1=30, p2=20)
    machine.round(p1=30, p2=20)
    assert machine.told("a")[0] > machine.told("b")[0] > 0
    assert (machine.told("a")[1], machine.told("b")[1]) == (30, 60)


def test_containers_of_one_pod_are_told_apart(machine: Machine) -> None:
    """Once the API server names them; until then nobody is charged with another's time."""
    machine.lease("x", 30)
    machine.lease("y", 30)
    machine.process(1, "aa")
    machine.round(p1=50)
    assert (machine.told("x")[0], machine.told("y")[0]) == (0, 0)
    machine.names = {"aa" * 32: "y", "bb" * 32: "x"}
    machine.round(p1=50)
    assert (machine.told("x")[0], machine.told("y")[0]) == (0, 50)


@pytest.mark.skipif(
    not pid_namespaces.in_initial_namespace(), reason="needs the machine's first PID namespace"
)
def test_what_a_restarted_container_left_counts_no_more(machine: Machine) -> None:
    """Nobody of its PID namespace lives: it is named as ended, and its memory is free for the others."""
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


def test_the_next_agent_goes_on(machine: Machine) -> None:
    """It is told of nobody: the leases are there."""
    machine.lease("a", 30)
    machine.process(1, "aa")
    machine.round(p1=30)
    machine.start()
    machine.round(p1=30)
    before = machine.told("a")[0]
    machine.round(p1=30)
    assert machine.told("a")[0] - before == 30


def test_a_lease_that_ends_or_is_made_anew(machine: Machine) -> None:
    """Its former page is written no more, and the new one is."""
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
    del machine.tokens["a"]
    machine.round(p1=30)
    assert machine.asked == 3


def test_a_driver_that_is_lost_comes_back(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds go on; it is said once."""
    machine.lease("a", 30)
    machine.process(1, "aa")
    machine.lost = True
    machine.round(p1=30)
    machine.round(p1=30)
    assert len(caplog.records) == 1
    machine.lost = False
    machine.round(p1=30)
    assert machine.told("a")[0] > 0


def test_a_driver_that_measures_nothing(machine: Machine) -> None:
    """Nothing is told then: programs rely on what they measure."""
    machine.lease("a", 30)
    machine.busy = None
    machine.round()
    assert machine.told("a") == (0, 0)


def test_a_ceiling_that_is_raised_is_told(machine: Machine) -> None:
    """By the store, as the next round finds it."""
    machine.lease("a", 30, 50)
    machine.process(1, "aa")
    machine.round(p1=30)
    assert machine.told("a")[1] == 50
    token = machine.tokens["a"]
    assert token.lease is not None
    lease = msgspec.structs.replace(token.lease, burst_percent=70)
    machine.tokens["a"] = msgspec.structs.replace(token, lease=lease)
    machine.round(p1=30)
    assert machine.told("a")[1] == 70


def test_a_slow_driver_holds_up_nobody_else(library: Path, tmp_path: Path) -> None:
    """While one round waits for it, the agent reconciles; then the lease is told."""
    answers, asked = threading.Event(), threading.Event()

    def samples(_: str, since_us: int) -> tuple[int, dict[int, int]]:
        asked.set()
        answers.wait(10)
        return since_us + 100_000, {7: 50}

    async def story() -> None:
        async with node_harness(card(0), library=library) as node:
            await node.ready()
            pod = await running(node, "a")
            wish(node, "a", "gpu-core=40")
            await granted(node, "a", "gpu-core=40")
            (tmp_path / "7").mkdir()
            (tmp_path / "7" / "cgroup").write_text(
                f"4:memory:/kubepods/pod{pod['metadata']['uid']}/{'aa' * 32}\n"
            )
            loop = FeedbackLoop(samples, node.lease_files, tmp_path)
            task = asyncio.create_task(loop.run(node.store, node.node_api))
            await until(asked.is_set)
            wish(node, "a", "gpu-core=30")
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

    play(story())
