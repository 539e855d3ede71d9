"""Workstations: a runtime directory, a daemon, and the real commands."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from fenka.core.errors import FenkaError
from fenka.workstation import protocol
from fenka.workstation.client import DaemonConnection
from fenka.workstation.paths import Runtime

PROGRAMS = Path(__file__).parent.parent / "programs"
HOLD = [sys.executable, str(PROGRAMS / "hold.py")]


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true answer. A test that waits in vain is ended by pytest's time limit."""
    while not (answer := condition()):
        time.sleep(0.01)
    return answer


def open_to_all(directory: Path) -> None:
    """Let all users enter a directory below pytest's, at any depth."""
    temporary = Path(tempfile.gettempdir())
    for part in (directory, *directory.parents):
        if temporary in part.parents:
            part.chmod(0o755)


def kill(pid: int) -> None:
    """Kill a process, and wait until it has ended."""
    ending = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([ending], [], [])
    os.close(ending)


def refused(result: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    """Assert that a command failed with this exit code and this one sentence."""
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert re.fullmatch(f"fenka: {sentence}", lines[0]), lines[0]


SILENCE_S = 100.0
"""Seconds after which a client that says nothing is taken for broken; less than the limit of a test."""


def waits_for(pid: int) -> str:
    """Return where in the kernel each thread of a process and of its children is."""
    return subprocess.run(
        [
            "ps",
            "-L",
            "-o",
            "pid,tid,stat,wchan:32,etimes,args",
            "--pid",
            str(pid),
            "--ppid",
            str(pid),
        ],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


class Program:
    """A running `fenka run`."""

    def __init__(self, process: subprocess.Popen[str], root: Path) -> None:
        self.process, self.root = process, root
        self._gave_up: list[str] = []

    @property
    def pid(self) -> int:
        """The process of the client and then of the program."""
        return self.process.pid

    def report(self) -> Any:
        """Return the JSON line that the program prints first. A hold.py that saw no card fails the test."""
        line = self._line(self.process.stdout)
        if not line:
            assert self.process.stderr
            # Its output has ended, so it has ended or is about to.
            said = self.process.stderr.read()
            pytest.fail(f"nothing was printed; exit code {self.process.wait()}, stderr: {said}")
        said = json.loads(line)
        if isinstance(said, dict) and not said.keys().isdisjoint({"init", "error"}):
            pytest.fail(f"the program holds nothing: {said}")
        return said

    def says(self) -> str:
        """Return the next line of the client's progress."""
        return self._line(self.process.stderr).strip()

    def _line(self, stream: IO[str] | None) -> str:
        """Return the next line. If none comes, fail with what the client and the daemon wait for."""
        assert stream
        timer = threading.Timer(SILENCE_S, self._give_up)
        timer.start()
        try:
            line = stream.readline()
        finally:
            timer.cancel()
        if self._gave_up:
            pytest.fail(f"nothing is said for {SILENCE_S:.0f} s\n" + "\n".join(self._gave_up))
        return line

    def _give_up(self) -> None:
        doing = [f"the client: {waits_for(self.pid)}"]
        with contextlib.suppress(OSError, ValueError):
            daemon = int((self.root / "daemon.lock").read_text())
            doing.append(f"the daemon: {waits_for(daemon)}")
            doing += [(self.root / name).read_text() for name in ("state.json", "daemon.log")]
        self._gave_up = doing
        self.process.kill()

    def end(self) -> int:
        """Close its standard input, and return the exit code."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait()


class Workstation:
    """Runs the real commands in a separate runtime directory."""

    def __init__(self, root: Path, prefix: list[str]) -> None:
        self.root, self.prefix = root, prefix
        self.programs: list[Program] = []
        self.interpreter = sys.executable
        self._changed, self._fresh = False, object()
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PASSWORD", "FENKA_LEASE", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
        } | {
            "FENKA_RUNTIME": str(root),
            # The user's own options must not matter.
            "XDG_CONFIG_HOME": str(root / "config"),
        }

    def fenka(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        self._changed = self._changed or words[0] in ("admin", "daemon", "sim")
        return subprocess.run(
            [*self.prefix, self.interpreter, "-m", "fenka", *words],
            env=self.environment,
            check=False,
            **{"capture_output": True, "text": True} | options,
        )

    def ok(self, *words: str) -> str:
        """Run a command that must succeed, and return its output."""
        result = self.fenka(*words)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def start(self, *options: str) -> None:
        """Start the daemon."""
        self.ok("daemon", "--background", *options)

    def run(self, *words: str, pass_fds: Collection[int] = ()) -> Program:
        """Start `fenka run WORDS`."""
        process = subprocess.Popen(
            [*self.prefix, self.interpreter, "-m", "fenka", "run", *words],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        self.programs.append(Program(process, self.root))
        return self.programs[-1]

    def jobs(self) -> dict[str, Any]:
        """Return the leases and pending requests of `fenka ps -o json` by name."""
        rows = json.loads(self.ok("ps", "-o", "json"))
        return {row["name"]: row for row in rows if "slices" in row}

    def daemon_pid(self) -> int:
        """Return the running daemon's process."""
        return int((self.root / "daemon.lock").read_text())

    def kill_daemon(self) -> None:
        """Kill the daemon, and wait until it has ended."""
        kill(self.daemon_pid())

    def start_fresh(self, *options: str) -> None:
        """Start the daemon, and remember how it is without jobs."""
        self.start(*options)
        self._changed = False
        self._fresh = self._state()

    def cleared(self) -> bool:
        """End and forget all jobs. Return whether the daemon is the one that was started, and as fresh."""
        self._end_programs()
        if self._changed:
            return False
        try:
            with contextlib.closing(DaemonConnection(Runtime(self.root))) as daemon:
                jobs = daemon.request(protocol.GetSnapshot(), protocol.MachineSnapshot).jobs
                if jobs:
                    stop = protocol.StopJob([job.name for job in jobs], 1)
                    daemon.request(stop, protocol.JobsStopped)
                daemon.request(protocol.RemoveEnded(), protocol.Done)
                left = daemon.request(protocol.GetSnapshot(), protocol.MachineSnapshot).jobs
            shutil.rmtree(self.root / "jobs", ignore_errors=True)  # their logs
        except (OSError, FenkaError):
            return False
        return not left and self._state() == self._fresh

    def _state(self) -> object:
        # The files of ended jobs, of the history and of today's use stay.
        files = {
            path
            for path in self.root.rglob("*")
            if path.name not in ("ended.jsonl", "use-today.json", ".use-today.json.new")
            and not path.name.startswith("history-")
        }
        return self.daemon_pid(), files, dict(self.environment), list(self.prefix)

    def _end_programs(self) -> None:
        for program in self.programs:
            program.process.kill()
            program.process.wait()
            for pipe in (program.process.stdin, program.process.stdout, program.process.stderr):
                assert pipe
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.programs.clear()

    def close(self) -> None:
        """End everything that this workstation started."""
        self._end_programs()
        with contextlib.suppress(Exception):
            for name in self.jobs():
                self.fenka("stop", "--grace", "1", name)
        self.fenka("daemon", "--stop", "--force")
        shutil.rmtree(self.root, ignore_errors=True)


def new_workstation(prefix: list[str]) -> Workstation:
    """Return a workstation without a daemon."""
    # Not pytest's tmp_path: a socket's path has at most 107 bytes.
    return Workstation(Path(tempfile.mkdtemp(prefix="fenka-")), prefix)


@contextlib.contextmanager
def workstation_at(prefix: list[str]) -> Iterator[Workstation]:
    """A workstation whose commands are prefixed with `prefix`."""
    with contextlib.closing(new_workstation(prefix)) as station:
        yield station


@pytest.fixture
def station() -> Iterator[Workstation]:
    """A workstation without a daemon."""
    with workstation_at([]) as station:
        yield station


@pytest.fixture(scope="session")
def idle_t4s() -> Iterator[list[Workstation]]:
    """At most one workstation, which an earlier test of this worker has left as it was."""
    idle: list[Workstation] = []
    yield idle
    for station in idle:
        station.close()


@pytest.fixture
def t4(idle_t4s: list[Workstation]) -> Iterator[Workstation]:
    """A workstation with one simulated T4: 15079 MiB, 14 units.

    Tests that only run commands share its daemon.
    """
    shared = bool(idle_t4s)
    station = idle_t4s.pop() if shared else new_workstation([])
    try:
        if not shared:
            station.start_fresh("--simulate", "T4")
        yield station
    finally:
        if station.cleared():
            idle_t4s.append(station)
        else:
            station.close()
