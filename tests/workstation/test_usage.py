"""What follows from the driver's figures: violations, unleased processes, and retained slices."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.core.inventory import Card, DeviceId
from fenka.hardware.nvml import GpuProcess, Reading
from fenka.jobs.spec import GpuResources
from fenka.procfs import start_ticks
from fenka.workstation import protocol
from fenka.workstation.client import Connection, DaemonUnavailable
from fenka.workstation.gpu_processes import (
    GpuProcesses,
    UnleasedProcess,
    group_by_lease,
    unattributed_mib,
)
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime
from fenka.workstation.retention import retention_reason
from fenka.workstation.violations import ViolationDetector
from tests.builders import job, placement
from tests.workstation.conftest import HOLD, Workstation, eventually

CARD = "GPU-00000000-0000-0000-0000-000000000001"
T4 = Card(0, DeviceId(CARD), "Tesla T4", 15000)
CARDS = {CARD: T4}
CAP = 4308


def placed_job(
    name: str = "a",
    mib: int = 4000,
    *,
    uid: int = 1000,
    since: int = 100,
    retained: str = "",
    compute: int = 0,
) -> Job:
    """A job with a slice, started `since` ticks after boot."""
    return job(
        name,
        uid=uid,
        start_ticks=since,
        state="completing" if retained else "running",
        placement=placement(CARD, mib),
        retained=retained,
        gpu=GpuResources(core=compute),
        unattributed_mib={CARD: 300},
    )


def outside(
    pid: int, mib: int | None = 1000, *, uid: int = 1000, start: int = 200, graphics: bool = False
) -> UnleasedProcess:
    """A process in no lease."""
    return UnleasedProcess(GpuProcess(CARD, pid, mib, graphics), uid, start)


def reading(mib: int) -> dict[str, Reading]:
    """Return a reading of the card's used memory."""
    return {CARD: Reading(CARD, mib, None, None, None)}


def leased(**mib: int) -> dict[str, list[GpuProcess]]:
    """Return one process in each of these leases."""
    return {
        lease: [GpuProcess(CARD, number, held)] for number, (lease, held) in enumerate(mib.items())
    }


def kept(
    ended: Job,
    *others: Job,
    used: int = 300,
    by: dict[str, list[GpuProcess]] | None = None,
    out: tuple[UnleasedProcess, ...] = (),
) -> str:
    """Return why the slice of the first job is retained."""
    return retention_reason(ended, others, CARDS, reading(used), GpuProcesses(by or {}, out))


# ---- which slices are kept ----


def test_slice_is_free_when_nothing_of_it_is_used() -> None:
    """Other jobs may use the card."""
    assert kept(placed_job(), placed_job("b"), used=4300, by=leased(b=4000)) == ""


def test_slice_is_retained_when_a_younger_process_of_its_user_computes() -> None:
    """A process in no lease that uses the same card may be left over from the job."""
    assert (
        kept(placed_job(), used=1300, out=(outside(7),))
        == "process 7 uses card 0 outside of its lease"
    )
    assert (
        kept(placed_job(), used=300, out=(outside(7, None),))
        == "process 7 uses card 0 outside of its lease"
    )


@pytest.mark.parametrize(
    "other",
    [outside(7, uid=1001), outside(7, start=99), outside(7, graphics=True)],
    ids=["another user's", "there before", "a desktop's"],
)
def test_slice_is_free_when_the_processes_cannot_come_from_its_job(other: UnleasedProcess) -> None:
    """Other users' processes, older ones and graphics do not count."""
    assert kept(placed_job(), used=300 + 1000, out=(other,)) == ""


def test_slice_is_free_when_another_retained_slice_covers_the_process() -> None:
    """If two jobs may have started the process, one retained slice is enough."""
    first = placed_job("b", retained="process 7 uses card 0 outside of its lease")
    assert kept(placed_job(), first, used=1300, out=(outside(7),)) == ""
    assert kept(placed_job(), first, used=5300, out=(outside(7, 5000),)) != ""
    theirs = placed_job("b", uid=1001, retained="it is in use")
    assert kept(placed_job(), theirs, used=1300, out=(outside(7),)) != ""


def test_slice_is_retained_when_memory_belongs_to_no_process() -> None:
    """Memory held by a descriptor, or not yet freed by the driver, is not available."""
    assert kept(placed_job(), used=3300) == (
        "3000 MiB of card 0 are still in use by no process that the driver names"
    )
    assert kept(placed_job(), used=300 + 700) == "", "drivers' own account varies by some percent"


def test_slice_is_free_when_other_slices_explain_the_memory() -> None:
    """Memory that other leases may still use does not reduce what is free."""
    assert kept(placed_job(), placed_job("b"), used=300 + 1000 + 3000, by=leased(b=1000)) == ""
    assert kept(placed_job(), placed_job("b"), used=300 + 1000 + 5000, by=leased(b=1000)) != ""


def test_slice_is_free_when_the_driver_does_not_report_memory() -> None:
    """Some drivers report no process's memory, and a killed daemon has no baseline."""
    assert kept(placed_job(), used=9000, out=(outside(7, None, uid=1001),)) == ""
    unknown = placed_job()
    unknown.unattributed_mib = {}
    assert kept(unknown, used=9000) == ""
    assert unattributed_mib(CARD, {}, GpuProcesses()) is None


def test_processes_are_grouped_by_lease_when_some_have_ended() -> None:
    """PIDs of ended processes that the driver still reports are left out."""
    own, gone, in_lease = (GpuProcess(CARD, pid, 10) for pid in (os.getpid(), 2**22 + 1, 8))
    seen = group_by_lease((own, gone, in_lease), lambda pid: "a" if pid == 8 else None)
    assert seen.by_lease == {"a": [in_lease]}
    start = start_ticks(os.getpid())
    assert start is not None
    assert seen.unleased == [UnleasedProcess(own, os.getuid(), start)]


# ---- who is accused ----


def test_memory_violation_is_reported_when_three_samples_exceed() -> None:
    """A single sample may catch an allocation that is about to fail."""
    detector = ViolationDetector(itertools.count(0, 5).__next__)
    seen = GpuProcesses(leased(a=14848))
    sentences = [detector.sample([placed_job()], seen, {}, lambda *_: 0) for _ in range(3)]
    sentence = "holds 14848 MiB of card 0 by the driver's account, more than its 4000 MiB"
    assert sentences == [{}, {}, {"a": [sentence]}]
    assert detector.sample([placed_job()], GpuProcesses(leased(a=4000)), {}, lambda *_: 0) == {}


def test_compute_violation_is_reported_when_the_excess_is_sustained() -> None:
    """A job with 10 % uses a quarter of the card for fifteen seconds."""
    had = itertools.count(0, 1_250_000_000)
    detector = ViolationDetector(itertools.count(0, 5).__next__)
    sentences = [
        detector.sample([placed_job(compute=10)], GpuProcesses(), {}, lambda *_: next(had))
        for _ in range(4)
    ]
    sentence = "has had more than its 10 % of the time of card 0 by the driver's account"
    assert sentences == [{}, {}, {}, {"a": [sentence]}]


def test_missing_shim_is_reported_at_once(tmp_path: Path) -> None:
    """The process's mappings show whether it has the shim."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        seen = GpuProcesses({"a": [GpuProcess(CARD, program.pid, 10)]})
        bare = placed_job()
        bare.shim_inode = 1
        sentence = "uses a card without fenka's library, so without its limit: process "
        sentences = ViolationDetector().sample([bare], seen, {}, lambda *_: 0)
        assert sentences == {"a": [f"{sentence}{program.pid}"]}
        bare.shim_inode = 0
        assert ViolationDetector().sample([bare], seen, {}, lambda *_: 0) == {}
        program.communicate(b"\n")


# ---- on a machine ----


def plain(t4: Workstation, mib: int) -> subprocess.Popen[str]:
    """Start a program that uses the card without fenka, as the daemon's user."""
    library = str(t4.root / "simulated" / "lib")
    environment = {**t4.environment, "LD_LIBRARY_PATH": library}
    program = subprocess.Popen(
        [*HOLD, str(mib)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout
    assert '"result": 0' in program.stdout.readline()
    return program


def end(program: subprocess.Popen[str]) -> None:
    """Kill a program and read its output."""
    program.send_signal(signal.SIGKILL)
    program.communicate()


def jobs(t4: Workstation) -> dict[str, protocol.JobView]:
    """Return the daemon's jobs by name, without starting a command."""
    with Connection(Runtime(t4.root)) as connection:
        answer = connection.call(protocol.GetSnapshot())
    assert isinstance(answer, protocol.Snapshot)
    return {job.name: job for job in answer.jobs}


def state(t4: Workstation, name: str) -> str:
    """Return the state of a job; empty if there is no such job or no daemon."""
    with contextlib.suppress(DaemonUnavailable, ConnectionError):
        return next((job.state for job in jobs(t4).values() if job.name == name), "")
    return ""


@pytest.mark.timeout(300)
def test_slice_is_retained_when_a_process_runs_outside_of_it(t4: Workstation) -> None:
    """The retained job and the pending one show the reason. The slice is released when the process ends."""
    first = t4.run("--gpu-mem", "7", "--name", "first", "--", *HOLD, "100")
    first.report()
    program = plain(t4, 3000)
    assert first.end() == 0
    eventually(lambda: state(t4, "first") == "completing")
    reason = f"process {program.pid} uses card 0 outside of its lease"
    assert jobs(t4)["first"].reason == reason
    waiting = t4.run("--gpu-mem", "14", "--name", "next", "--", *HOLD, "100")
    assert waiting.says().endswith(f"first has ended, but {reason}")
    doctor = t4.fenka("doctor").stdout
    assert f"process {program.pid} of " in doctor
    assert f"has ended, but {reason}" in doctor
    t4.kill_daemon()
    eventually(lambda: state(t4, "first") == "completing")
    end(program)
    assert waiting.report()["cards"][0]["result"] == 0


@pytest.mark.timeout(300)
def test_slice_is_released_when_the_owner_stops_its_job(t4: Workstation) -> None:
    """Older processes do not count, and the daemon's owner may release a retained slice."""
    before = plain(t4, 1000)
    first = t4.run("--gpu-mem", "7", "--name", "first", "--", *HOLD, "100")
    first.report()
    assert first.end() == 0
    eventually(lambda: not jobs(t4))
    second = t4.run("--gpu-mem", "7", "--name", "second", "--", *HOLD, "100")
    second.report()
    after = plain(t4, 1000)
    assert second.end() == 0
    eventually(lambda: state(t4, "second") == "completing")
    assert t4.ok("stop", "second") == "second: stopped\n"
    assert jobs(t4) == {}
    end(before)
    end(after)


@pytest.mark.timeout(300)
def test_job_is_marked_when_it_exceeds_its_limit(t4: Workstation) -> None:
    """A job that has undone its cooperative limit is marked, with its use and what to do."""
    words = ("--gpu-mem", "4", "--isolation", "cooperative", "--name", "cheat", "--")
    cheat = t4.run(*words, "env", "-u", "LD_PRELOAD", *HOLD, "9000")
    assert cheat.report()["cards"][0]["result"] == 0
    eventually(lambda: len(jobs(t4)["cheat"].violations) > 1)
    holds, bare = jobs(t4)["cheat"].violations
    assert holds.startswith("holds ")
    assert "without fenka's library" in bare
    lines = t4.ok("ps").splitlines()
    assert "MiB!  " in lines[1]
    assert lines[2] == f"! cheat {holds}; `fenka stop cheat` ends it"
    doctor = t4.fenka("doctor")
    assert doctor.returncode == 1
    assert f"{holds}: end it with `fenka stop cheat`" in doctor.stdout
