"""Which lease a process is in, when other users imitate membership or programs try to hide it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fenka import procfs
from fenka.isolation import pid_namespaces
from fenka.workstation import lease_processes
from fenka.workstation.job import Job
from tests.builders import job, placement
from tests.waiting import WAIT_S
from tests.workstation.conftest import HOLD, Workstation, eventually, kill, open_to_all
from tests.workstation.users import as_root

STRANGER = 64002
SLEEP = "import signal; signal.pause()"


# Only the first thread ends; the process lives on in another.
FIRST_THREAD_ENDS = """
import ctypes, signal, threading
def rest():
    print(threading.get_native_id(), flush=True)
    while True:
        signal.sigwait([signal.SIGUSR1])
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall({exit}, 0)
"""

# Asks for a lease and says that it is inside, without having gone anywhere.
FORGED = """
import os, sys
from pathlib import Path
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.workstation import protocol
from fenka.workstation.client import DaemonConnection
from fenka.workstation.paths import Runtime
daemon = DaemonConnection(Runtime(Path(os.environ["FENKA_RUNTIME"])))
granted = daemon.call(protocol.SubmitJob(JobSpec(["x"], GpuResources("4"), "forged")))
print(type(granted).__name__, daemon.call(protocol.ConfirmLease()).reason)
"""

# At the end whoever waits for the pipe's other end is let go.
PIPE_WHERE_A_LEASE_BELONGS = """
mount -t tmpfs none /run && mkdir -p /run/fenka/lease && mkfifo /run/fenka/lease/control &&
echo ready; read end; exec 3<>/run/fenka/lease/control
"""

BIND = """
mount -t tmpfs none /run && mkdir -p /run/fenka/lease && mount --bind "$1" /run/fenka/lease &&
echo ready; read end
"""


@contextlib.contextmanager
def stranger(*words: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    """Start another user's process, which runs until its stdin ends; yield its PID once it is ready."""
    with subprocess.Popen(
        ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            if process.stdout.readline() != "ready\n":
                pytest.skip("an ordinary user can make no user namespace here")
            yield process.pid
        finally:
            process.stdin.close()


def in_own_namespaces(script: str, *words: str) -> list[str]:
    """Return the command for a script in a user and mount namespace of its own."""
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *words]


# --- neighbours -------------------------------------------------------------------------------------


@as_root
def test_no_file_is_opened_when_the_process_is_another_user_s(t4: Workstation) -> None:
    """A pipe at the place of a lease's control page does not block the daemon."""
    with stranger(*in_own_namespaces(PIPE_WHERE_A_LEASE_BELONGS)):
        program = t4.run("--gpu-mem", "14", "--name", "all", "--", *HOLD, "1")
        program.report()
        assert t4.jobs()["all"]["pids"] == [program.pid]
        assert program.end() == 0
        eventually(lambda: not t4.jobs())


@as_root
@pytest.mark.parametrize("isolation", ["namespace", "cooperative"])
def test_lease_is_not_held_when_another_user_s_environment_names_it(
    t4: Workstation, isolation: str
) -> None:
    """Only the job's own user counts, and only with cooperative isolation."""
    program = t4.run("--gpu-mem", "4", "--name", "it", "--isolation", isolation, "--", *HOLD, "1")
    program.report()
    lease = t4.jobs()["it"]["id"]
    with stranger("sh", "-c", "echo ready; read end", environment={"FENKA_LEASE": f"/x/{lease}"}):
        assert t4.jobs()["it"]["pids"] == [program.pid]
        assert program.end() == 0
        eventually(lambda: not t4.jobs())


def test_lease_with_a_namespace_is_not_held_when_an_environment_names_it(t4: Workstation) -> None:
    """Namespaces decide, not the environment."""
    program = t4.run("--gpu-mem", "4", "--name", "it", "--", *HOLD, "1")
    program.report()
    lease = t4.jobs()["it"]["id"]
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP], env=os.environ | {"FENKA_LEASE": f"/x/{lease}"}
    ) as ghost:
        assert t4.jobs()["it"]["pids"] == [program.pid]
        assert program.end() == 0
        eventually(lambda: not t4.jobs())
        ghost.kill()


@as_root
def test_scan_succeeds_when_a_process_has_any_name(t4: Workstation) -> None:
    """Names of processes need not be text."""
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) Z 1', 0, 0, 0); "
    with stranger(sys.executable, "-ISc", f"{name}print('ready', flush=True); input()"):
        assert t4.ok("run", "--gpu-mem", "4", "--", "echo", "started") == "started\n"
        eventually(lambda: not t4.jobs())


def test_confirmation_is_rejected_when_the_process_is_outside(t4: Workstation) -> None:
    """The daemon checks the namespace of the process that confirms."""
    answer = subprocess.run(
        [sys.executable, "-c", FORGED],
        env=t4.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert answer.startswith("LeaseGranted the program is not in its lease: ")
    eventually(lambda: not t4.jobs())


# --- programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["--user", "--time"])
def test_program_cannot_create_user_namespaces_in_a_lease(t4: Workstation, kind: str) -> None:
    """This holds also after root has raised its own namespace's limit, and for another user."""
    attempt = f"unshare {kind} echo out"
    script = f"echo 9 > /proc/sys/user/max_{kind[2:]}_namespaces; {attempt}"
    if os.geteuid() == 0 and kind == "--user":
        script += f"; setpriv --reuid={STRANGER} --clear-groups {attempt}"
    result = t4.fenka("run", "--gpu-mem", "4", "--", "sh", "-c", script)
    assert result.stdout == ""
    assert "unshare failed" in result.stderr


@as_root
def test_mounts_stay_when_root_tries_to_remove_them_inside(t4: Workstation) -> None:
    """The mounts are inherited from a namespace above."""
    script = "umount -l /etc/ld.so.preload; umount -l /run/fenka/lease; cat /etc/ld.so.preload"
    result = t4.fenka("run", "--gpu-mem", "4", "--", "sh", "-c", script)
    assert result.stdout == "/run/fenka/lease/libfenka.so\n"


@pytest.mark.parametrize("words", [["chroot", "/"], ["unshare", "-Ur", "chroot", "/"]])
def test_lease_is_held_when_a_process_changes_its_root(t4: Workstation, words: list[str]) -> None:
    """The mounts are not visible then. A new daemon finds the process, too, and doctor names the job."""
    if os.geteuid() != 0 and words[0] == "chroot":
        pytest.skip("only root may change the root directory")
    script = 'setsid "$@" sleep 1000 > /dev/null 2>&1 < /dev/null & echo $!'
    t4.ok(
        *("run", "--gpu-mem", "14", "--name", "hidden", "--allow-user-namespaces", "--"),
        *("sh", "-c", script, "sh", *words),
    )
    (left,) = eventually(lambda: t4.jobs()["hidden"]["pids"])
    eventually(lambda: os.readlink(f"/proc/{left}/exe").endswith("/sleep"))
    assert t4.fenka("run", "--gpu-mem", "1", "--no-wait", "--", "true").returncode == 75
    t4.kill_daemon()
    t4.start("--simulate", "T4")
    assert t4.jobs()["hidden"]["pids"] == [left]
    assert "could undo their limits: hidden" in t4.fenka("doctor").stdout
    kill(left)
    eventually(lambda: not t4.jobs())


def test_lease_is_held_when_only_the_first_thread_has_ended(t4: Workstation) -> None:
    """The kernel reports such a process as a zombie."""
    code = FIRST_THREAD_ENDS.format(exit={"x86_64": 60, "aarch64": 93}[os.uname().machine])
    script = 'setsid "$@" &'
    program = t4.run(
        *("--gpu-mem", "14", "--name", "rest", "--", "sh", "-c", script, "sh"),
        *(sys.executable, "-ISc", code),
    )
    program.report()
    (left,) = eventually(lambda: t4.jobs()["rest"]["pids"])
    assert left != program.pid
    eventually(lambda: " Z " in Path(f"/proc/{left}/stat").read_text())
    assert t4.jobs()["rest"]["pids"] == [left]
    kill(left)
    eventually(lambda: not t4.jobs())


# --- without a daemon -------------------------------------------------------------------------------


def a_job(namespace: int, **fields: object) -> Job:
    """A running job whose requesting process has ended."""
    running: dict[str, object] = {
        "uid": os.geteuid(),
        "pid": os.getpid(),
        "start_ticks": 0,
        "placement": placement("GPU-0"),
        "user_namespace": namespace,
    }
    return job("0123abcd", **(running | fields))


async def seen(job: Job, leases: Path) -> list[int]:
    """Return the lease's processes by one scan."""
    look = await lease_processes.LeaseProcesses(lambda: [job], leases).scan()
    assert look.complete
    return look.pids(job.id)


@pytest.fixture
def leases(tmp_path: Path) -> Path:
    """A directory of leases that other users can enter."""
    lease = tmp_path / "0123abcd" / "lease"
    lease.mkdir(parents=True)
    open_to_all(lease)
    return tmp_path


@as_root
async def test_lease_is_not_held_when_another_user_mounts_it(leases: Path) -> None:
    """Root's lease without a user namespace is recognised by its mount, except in other users' namespaces."""
    lease = str(leases / "0123abcd" / "lease")
    job = a_job(procfs.namespace_inode("self", "user"))
    with stranger(*in_own_namespaces(BIND, lease)):
        assert await seen(job, leases) == []
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", BIND, "sh", lease],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == b"ready\n"
        assert holder.pid in await seen(job, leases)
        assert holder.pid in lease_processes.LeaseProcesses(list, leases).unrecorded_holders(job.id)
        holder.stdin.close()


def test_scan_finds_a_process_when_it_was_forked_meanwhile(
    leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are listed until no new one appears."""
    listings: Iterator[Sequence[int]] = iter([[], [4_000_001], [4_000_001, os.getpid()]])
    last = [4_000_001, os.getpid()]
    monkeypatch.setattr(procfs, "pids", lambda: next(listings, last))
    scanner = lease_processes.Scanner([], leases)
    monkeypatch.setattr(scanner, "lease", lambda pid: "it" if pid == os.getpid() else None)
    monkeypatch.setattr(lease_processes, "Scanner", lambda *_: scanner)
    scan = lease_processes.LeaseProcesses(list, leases)._scan_all([])
    assert scan.pids("it") in ([], [os.getpid()])


async def test_lease_is_kept_when_a_candidate_cannot_be_inspected(
    leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in our user namespace, or older than the job, do not count."""

    def hidden(pid: int | str, kind: str) -> int:
        if pid == os.getpid():
            raise PermissionError
        return namespace(pid, kind)

    namespace = procfs.namespace_inode
    monkeypatch.setattr(procfs, "namespace_inode", hidden)
    assert await seen(a_job(1), leases) == []
    monkeypatch.setattr(procfs, "in_other_user_namespace", lambda pid: pid == os.getpid())
    assert await seen(a_job(1), leases) == [os.getpid()]
    assert await seen(a_job(1, start_ticks=1 << 60), leases) == []


async def test_scan_is_incomplete_when_no_descriptor_is_left(
    leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lease is released by such a scan."""

    def no_descriptor_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(procfs, "open_namespace", no_descriptor_left)
    monkeypatch.setattr(procfs, "pids", lambda: [os.getpid()])
    monkeypatch.setattr(procfs, "namespace_inode", lambda pid, _: 1 if pid == "self" else 2)
    assert not (await lease_processes.LeaseProcesses(list, leases).scan()).complete


def test_reading_is_abandoned_when_a_file_blocks(tmp_path: Path) -> None:
    """Contents that were read before are returned; unreadable files are None."""
    pipe, whole, missing = tmp_path / "pipe", tmp_path / "whole", tmp_path / "missing"
    os.mkfifo(pipe)
    whole.write_bytes(b"1\n2")
    answers = pid_namespaces.read_files([whole, missing, pipe, whole], 100, 5)
    assert answers == {whole: b"1\n2", missing: None}
    os.close(os.open(pipe, os.O_RDWR))


def test_files_are_read_when_they_are_more_than_a_command_line_holds(tmp_path: Path) -> None:
    """One user's processes must not make a scan of all users' fail."""
    there = tmp_path / "there"
    there.write_text("x")
    missing = [
        Path(f"/proc/{number}/task/{number}/environ") for number in range(10**7, 10**7 + 60_000)
    ]
    contents = pid_namespaces.read_files([*missing, there], 10, WAIT_S)
    assert (len(contents), contents[there]) == (60_001, b"x")
