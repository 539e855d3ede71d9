"""What follows from the driver's figures: violations, and memory that no lease uses."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.core.inventory import Card, DeviceId
from fenka.hardware.nvml import GpuProcess
from fenka.jobs.job_spec import GpuResources
from fenka.workstation import protocol
from fenka.workstation.cards import GpuProcesses, UnleasedProcess, ViolationDetector, group_by_lease
from fenka.workstation.client import DaemonConnection, DaemonUnavailable
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime
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
    compute: int = 0,
) -> Job:
    """A job with a slice."""
    return job(
        name,
        state="running",
        placement=placement(CARD, mib),
        gpu=GpuResources(core=compute),
    )


def leased(**mib: int) -> dict[str, list[GpuProcess]]:
    """Return one process in each of these leases."""
    return {
        lease: [GpuProcess(CARD, number, held)] for number, (lease, held) in enumerate(mib.items())
    }


def test_processes_are_grouped_by_lease_when_some_have_ended() -> None:
    """PIDs of ended processes that the driver still reports are left out."""
    own, gone, in_lease = (GpuProcess(CARD, pid, 10) for pid in (os.getpid(), 2**22 + 1, 8))
    seen = group_by_lease((own, gone, in_lease), lambda pid: "a" if pid == 8 else None)
    assert seen.by_lease == {"a": [in_lease]}
    assert seen.unleased == [UnleasedProcess(own, os.getuid())]


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
    with DaemonConnection(Runtime(t4.root)) as connection:
        answer = connection.call(protocol.GetSnapshot())
    assert isinstance(answer, protocol.MachineSnapshot)
    return {job.name: job for job in answer.jobs}


def state(t4: Workstation, name: str) -> str:
    """Return the state of a job; empty if there is no such job or no daemon."""
    with contextlib.suppress(DaemonUnavailable, ConnectionError):
        return next((job.state for job in jobs(t4).values() if job.name == name), "")
    return ""


def unleased_mib(t4: Workstation) -> int:
    """Return the memory of the first card that no lease uses."""
    with DaemonConnection(Runtime(t4.root)) as connection:
        answer = connection.call(protocol.GetSnapshot())
    assert isinstance(answer, protocol.MachineSnapshot)
    return answer.cards[0].unleased_mib


@pytest.mark.timeout(300)
def test_memory_counts_as_taken_when_a_process_without_a_lease_uses_it(t4: Workstation) -> None:
    """Pending jobs, `ps` and doctor name it. When it ends a job is granted, also by another daemon."""
    program = plain(t4, 3000)
    waiting = t4.run("--gpu-mem", "14", "--name", "next", "--", *HOLD, "100")
    reason = waiting.says().rpartition("; ")[2]
    assert re.fullmatch(r"card 0: \d\.\d GiB used by python\S*, no lease", reason)
    small = t4.run("--gpu-mem", "7", "--name", "small", "--", *HOLD, "100")
    small.report()
    assert small.end() == 0
    assert reason in t4.ok("ps").splitlines()
    assert f"process {program.pid} of " in t4.fenka("doctor").stdout
    t4.kill_daemon()
    eventually(lambda: state(t4, "next") == "waiting")
    end(program)
    assert waiting.report()["cards"][0]["result"] == 0


@pytest.mark.timeout(300)
def test_slice_is_free_when_a_process_of_its_job_is_left_over(t4: Workstation) -> None:
    """The job is gone; what its process still uses is taken, and the rest is granted."""
    first = t4.run("--gpu-mem", "14", "--name", "first", "--", *HOLD, "100")
    first.report()
    program = plain(t4, 3000)
    assert first.end() == 0
    eventually(lambda: not jobs(t4))
    assert unleased_mib(t4) >= 3000
    second = t4.run("--gpu-mem", "10", "--name", "second", "--", *HOLD, "100")
    second.report()
    end(program)
    assert t4.ok("stop", "second") == "second: stopped\n"
    eventually(lambda: unleased_mib(t4) == 0)


@pytest.mark.timeout(300)
def test_job_is_marked_when_its_environment_leads_to_the_driver(t4: Workstation) -> None:
    """The directory of the driver's own files can be named, as an image's ENV does; the memory shows."""
    past = ("env", "LD_PRELOAD=libc.so.6", "LD_LIBRARY_PATH=/run/fenka/driver")
    cheat = t4.run("--gpu-mem", "4", "--name", "cheat", "--", *past, *HOLD, "9000")
    assert cheat.report()["cards"][0]["result"] == 0
    eventually(lambda: any("holds " in text for text in jobs(t4)["cheat"].violations))


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
