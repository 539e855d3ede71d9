"""A start that is interrupted at any point leaves nothing behind and prints no traceback."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.workstation.conftest import Workstation, eventually

MARK = "FENKA_TEST_MARK"


class Start:
    """A command in its own process group, as from a terminal, and its descendants."""

    def __init__(self, root: Path, *words: str, **environment: str) -> None:
        self.root, self.mark = root, uuid.uuid4().hex
        self.output = root.with_name(f"{root.name}.output")
        kept = {name: value for name, value in os.environ.items() if name != "FENKA_RUNTIME"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fenka", *words],
                env=kept | environment | {MARK: self.mark, "TMPDIR": str(root)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def until(self, sign: Callable[[], object]) -> None:
        """Wait for the condition, or the command's end."""
        while not sign() and self.process.poll() is None:
            time.sleep(0.001)

    def until_there(self, pattern: str) -> None:
        """Wait until a file of such a name exists, or for the command's end."""
        self.until(lambda: list(self.root.glob(pattern)))

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait()

    def printed(self) -> str:
        """Return the command's output."""
        return self.output.read_text(errors="replace")

    def left(self) -> list[str]:
        """Return the descendants that still run, in whatever session."""
        descendants = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    descendants.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return descendants

    def close(self) -> None:
        """End the command's descendants."""
        for line in self.left():
            os.kill(int(line.split()[0]), signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def started(station: Workstation) -> Iterator[Callable[..., Start]]:
    """Return a function that starts commands. Their descendants are ended after the test."""
    commands: list[Start] = []

    def start(*words: str, **environment: str) -> Start:
        commands.append(Start(station.root, *words, **environment))
        return commands[-1]

    yield start
    for command in commands:
        command.close()
        command.output.unlink()


POINTS = ("daemon.lock", "simulated/server.sock", "config.json")
"""Files of the runtime directory, in the order in which a start makes them."""


def test_no_traceback_is_printed_when_imports_are_interrupted(
    started: Callable[..., Start], station: Workstation
) -> None:
    """Ctrl-C may come during the imports."""
    (station.root / "typer.py").write_text("import os; os.kill(os.getpid(), 2); input()")
    start = started("ps", PYTHONPATH=str(station.root))
    assert start.process.wait() == 130
    assert start.printed() == ""


FINALIZED = """
import os
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), 2)
        for _ in range(1000): pass
Finalized()
while True: pass
"""


def test_command_ends_when_the_interrupt_comes_in_a_finalizer(
    started: Callable[..., Start], station: Workstation
) -> None:
    """Python drops what is raised there. A command imports the module late, when Ctrl-C is an exception."""
    (station.root / "msgspec.py").write_text(FINALIZED)
    start = started("ps", PYTHONPATH=str(station.root))
    assert start.process.wait() == 130
    assert start.printed() == ""


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_when_a_daemon_is_interrupted_while_it_starts(
    started: Callable[..., Start], station: Workstation, point: str
) -> None:
    """The daemon runs in the foreground; its card server ends, too."""
    start = started("daemon", "--simulate", "T4", FENKA_RUNTIME=str(station.root))
    start.until_there(point)
    assert start.interrupt() == 130, start.printed()
    assert "Traceback" not in start.printed()
    eventually(lambda: not start.left())
    assert not (station.root / "daemon.sock").exists()


@pytest.mark.parametrize("point", ["daemon.lock", "config.json"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_daemon_ends_when_its_starter_has_ended_before(
    started: Callable[..., Start], station: Workstation, point: str, number: int
) -> None:
    """A daemon that was ready before stays."""
    start = started("daemon", "--background", "--simulate", "T4", FENKA_RUNTIME=str(station.root))
    start.until_there(point)
    start.process.send_signal(number)
    code = start.process.wait()
    assert "Traceback" not in start.printed()
    if number == signal.SIGINT:
        assert code in (130, 0)
    eventually(lambda: not start.left() or station.fenka("ps").returncode == 0)
    station.fenka("daemon", "--stop")
    # The card server of a daemon that was killed stays for half a minute, for its programs' sake.
    eventually(lambda: not start.left())


DEMO = ("fenka-*", "fenka-*/simulated/server.sock", "fenka-*/daemon.sock", "fenka-*/leases/*")


@pytest.mark.parametrize("point", DEMO)
def test_nothing_is_left_when_the_demo_is_interrupted(
    started: Callable[..., Start], station: Workstation, point: str
) -> None:
    """No daemon, notebook or directory of the demo is left. A cluster that is configured plays no part."""
    configured = station.root / "kubeconfig"
    configured.touch()
    start = started("demo", "--check", KUBECONFIG=str(configured))
    start.until_there(point)
    assert start.interrupt() == 130, start.printed()
    assert "Traceback" not in start.printed()
    eventually(lambda: not start.left())
    assert not list(station.root.glob("fenka-*"))


@pytest.mark.parametrize("point", DEMO[2:])
def test_daemon_ends_when_the_demo_is_killed(
    started: Callable[..., Start], station: Workstation, point: str
) -> None:
    """The daemon notices the end of the demo by its lifeline."""
    start = started("demo", "--check")
    start.until_there(point)
    start.process.kill()
    eventually(lambda: not start.left())
    assert not list(station.root.glob("fenka-*/daemon.sock"))


# The card server outlives a killed daemon, so its socket says nothing, either.
@pytest.mark.parametrize("point", ["daemon.sock", "leases/*"])
def test_daemon_serves_or_ends_when_run_is_interrupted(
    started: Callable[..., Start], station: Workstation, point: str
) -> None:
    """The slice is released, or the daemon has ended."""
    station.start("--simulate", "T4")
    station.kill_daemon()
    # The killed daemon's socket says nothing about the start: the interpreter may not even have begun.
    (station.root / "daemon.sock").unlink()
    start = started(
        "run", "--gpu-mem", "14", "--", "sleep", "1000", FENKA_RUNTIME=str(station.root)
    )
    start.until_there(point)
    code = start.interrupt()
    # SIGINT itself ends the program, or an interpreter that has no handler yet.
    assert code in (130, -signal.SIGINT), start.printed()
    assert "Traceback" not in start.printed()
    # A daemon that ended has removed its configuration. This fails if it still serves.
    station.fenka("daemon", "--background", "--simulate", "T4")
    assert station.ok("run", "--gpu-mem", "14", "--", "echo", "free") == "free\n"


@pytest.mark.parametrize("detach", [[], ["--detach"]])
@pytest.mark.parametrize("point", ["jobs/n", "leases/*"])
def test_notebook_ends_when_it_is_interrupted_before_its_url(
    started: Callable[..., Start], station: Workstation, point: str, detach: list[str]
) -> None:
    """Its URL has not been printed yet, so the notebook ends, also if detached."""
    station.start("--simulate", "T4")
    words = ("notebook", "--gpu-mem", "14", "--name", "n", *detach)
    start = started(*words, FENKA_RUNTIME=str(station.root))
    start.until_there(point)
    assert start.interrupt() == 130, start.printed()
    assert "Traceback" not in start.printed()
    eventually(lambda: not start.left())
    eventually(lambda: not station.jobs())
