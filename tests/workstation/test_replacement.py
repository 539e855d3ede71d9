"""Ending and replacing a daemon of any version, under running programs."""

import ctypes.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.build import build_id
from fenka.cli.admin.daemon_command import stop_daemon, unit_of
from fenka.workstation import protocol
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import HOLD, Program, Workstation, eventually, refused
from tests.workstation.users import place

__all__ = ["place"]

OLD = """
import socket, sys
server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()
print("listening", flush=True)
while True:
    client, _ = server.accept()
    client.sendall(b'{"type":"hello","protocol":10,"version":"0.1.0"}\\n')
    client.close()
"""
"""A daemon that is older than the message by which each version ends every other one."""


@pytest.fixture
def holder(t4: Workstation) -> Program:
    """A program that holds 4 units."""
    program = t4.run("--gpu-mem", "4", "--name", "holder", "--", *HOLD, "100")
    program.report()
    return program


@pytest.fixture
def old(station: Workstation) -> Iterator[subprocess.Popen[str]]:
    """An older daemon."""
    words = [sys.executable, "-c", OLD, str(station.root / "daemon.sock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout
        daemon.stdout.readline()
        yield daemon
        daemon.kill()


def test_message_that_ends_a_daemon_never_changes() -> None:
    """Daemons and commands of every version send and understand these bytes."""
    assert protocol.encode(protocol.StopDaemon(True)) == b'{"type":"stop-daemon","force":true}'
    assert protocol.encode(protocol.Done()) == b'{"type":"done","text":""}'
    assert protocol.encode(protocol.Failure("x")) == b'{"type":"failure","reason":"x"}'
    assert protocol.decode_stop_answer(b'{"type":"done","new":1}') == protocol.StopAnswer("done")
    assert protocol.decode_stop_answer(b"") is None


def test_command_of_another_build_names_both_builds_and_the_process(
    station: Workstation, old: subprocess.Popen[str]
) -> None:
    """It says what goes over to the command's own build."""
    refused(
        station.fenka("ps"),
        1,
        rf"the daemon at \S+ \(process {old.pid}\) is fenka 0.1.0, build unknown, this command is fenka "
        rf"\S+, build {build_id()}: `fenka daemon --restart` goes over to this build, and programs go on; .*",
    )


def test_older_daemon_is_ended_when_that_is_forced(
    station: Workstation, old: subprocess.Popen[str]
) -> None:
    """It cannot say whether programs run."""
    refused(
        station.fenka("daemon", "--stop"),
        1,
        rf"the daemon, process {old.pid}, is of an older version that cannot say whether .*",
    )
    assert station.ok("daemon", "--stop", "--force") == "the fenka daemon has ended\n"
    assert old.wait() == -signal.SIGTERM


def test_newer_daemon_is_ended_by_the_same_message(place: Path) -> None:
    """A daemon of a later protocol understands it, whatever its Hello says."""
    runtime = Runtime(place / "run")
    runtime.create()
    received = list[bytes]()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(runtime.socket))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(b'{"type":"hello","protocol":99,"version":"9","new":[]}\n')
                received.append(lines.readline())
                connection.sendall(b'{"type":"failure","reason":"2 jobs are still here","new":1}\n')

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Exception, match="2 jobs are still here"):
            stop_daemon(runtime, force=False)
        thread.join()
    assert received == [b'{"type":"stop-daemon","force":false}\n']


def test_programs_and_requests_go_on_when_the_daemon_is_replaced(
    t4: Workstation, holder: Program
) -> None:
    """The next daemon has the options and jobs of the other."""
    waiting = t4.run("--gpu-mem", "12", "--name", "waits", "--", *HOLD, "1")
    assert "position 1" in waiting.says()
    before = t4.daemon_pid()
    restarted = t4.ok("daemon", "--restart")
    assert t4.daemon_pid() != before
    assert restarted == (
        f"the fenka daemon is now process {t4.daemon_pid()}, build {build_id()}; programs went on\n"
    )
    assert t4.jobs()["holder"]["pids"] == [holder.pid]
    assert holder.end() == 0
    waiting.report()


def test_daemon_is_kept_when_the_next_one_would_not_understand_its_records(
    t4: Workstation, holder: Program
) -> None:
    """Nothing is ended before that is known."""
    before = t4.daemon_pid()
    os.kill(before, signal.SIGSTOP)  # It would record its jobs again.
    (t4.root / "state.json").write_text('{"boot": "x", "jobs": [], "version": 99}')
    refused(t4.fenka("daemon", "--restart"), 1, r"\S+/state.json is not understood .*")
    os.kill(before, signal.SIGCONT)
    assert t4.daemon_pid() == before
    shown = t4.fenka("ps", "--local", "-o", "json")  # which says so if no daemon answers
    assert [job["name"] for job in json.loads(shown.stdout)] == ["holder"], shown.stderr


def test_daemon_is_started_when_none_is_there_to_be_replaced(station: Workstation) -> None:
    """`--restart` has the options of the command line then."""
    station.ok("daemon", "--restart", "--simulate", "T4")
    assert station.jobs() == {}


def test_unit_of_a_process_is_named_only_when_systemd_has_started_it() -> None:
    """Its children have the variable with its process ID, too."""
    assert unit_of(os.getpid()) == ""


def test_daemon_reports_to_systemd_once_clients_can_connect(station: Workstation) -> None:
    """A unit with Type=notify is started then, and not before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0fenka-test-{os.getpid()}")
        station.environment["NOTIFY_SOCKET"] = f"@fenka-test-{os.getpid()}"
        words = [sys.executable, "-m", "fenka", "daemon", "--simulate", "T4"]
        with subprocess.Popen(words, env=station.environment, stdout=subprocess.PIPE) as daemon:
            assert manager.recv(100) == b"READY=1"
            assert station.jobs() == {}
            daemon.terminate()
            eventually(lambda: daemon.poll() is not None)


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has a driver"
)
def test_unit_starts_and_says_what_is_missing_when_there_is_no_driver(station: Workstation) -> None:
    """Its status has the sentence, and its exit code is one that units take for a success."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0fenka-test-{os.getpid()}")
        station.environment["NOTIFY_SOCKET"] = f"@fenka-test-{os.getpid()}"
        ended = station.fenka("daemon")
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=this machine has no NVIDIA driver")
    options = re.escape(str(station.root / "config/fenka/daemon.toml"))
    refused(
        ended,
        69,
        'this machine has no NVIDIA driver: .*; install it, or write driver = .*, or simulate = "T4" for a '
        f"simulated card, to {options}; then start the service again",
    )


def test_former_cards_are_named_when_programs_still_use_them(station: Workstation) -> None:
    """Who follows the advice gets the new cards."""
    station.start("--simulate", "T4")
    station.ok("run", "--gpu-mem", "4", "--detach", "--name", "night", "--", "sleep", "1000")
    station.kill_daemon()
    refused(
        station.fenka("daemon", "--simulate", "T4*2"),
        2,
        r"programs still use the simulated cards of the daemon before \(T4\), so simulate is not T4\*2 yet: "
        r"start it with T4 again, .*",
    )
    station.start("--simulate", "T4")
    station.ok("stop", "night")
    station.ok("daemon", "--stop")
    station.start("--simulate", "T4*2")


@pytest.fixture
def other_build(t4: Workstation) -> Program:
    """A program on simulated cards whose state, as its server has it locked, is another build's."""
    program = t4.run("--gpu-mem", "4", "--name", "holder", "--", *HOLD, "100")
    program.report()
    t4.kill_daemon()
    with (t4.root / "simulated" / "state").open("r+b") as state:
        state.seek(8)  # the version, after the magic number
        state.write(b"\x01")
    return program


def test_programs_on_simulated_cards_go_on_when_another_build_s_daemon_starts(
    t4: Workstation, other_build: Program
) -> None:
    """They keep their card server; later programs get one of the new build."""
    t4.start("--simulate", "T4")
    assert t4.jobs()["holder"]["pids"] == [other_build.pid]
    later = t4.run("--gpu-mem", "4", "--no-wait", "--", *HOLD, "100")
    assert later.report()["cards"][0]["result"] == 0
    assert later.end() == other_build.end() == 0
    eventually(lambda: not t4.jobs())
    t4.ok("daemon", "--stop")
    assert not list(t4.root.glob("simulated*"))


def test_card_server_is_ended_by_a_command_when_no_daemon_uses_it(
    t4: Workstation, holder: Program
) -> None:
    """A daemon with other cards names the command."""
    refused(t4.fenka("sim", "stop"), 1, "the fenka daemon uses it: `fenka daemon --stop` ends both")
    t4.ok("daemon", "--stop", "--force")
    refused(
        t4.fenka("daemon", "--simulate", "T4*2"),
        2,
        r"programs still use the simulated cards of the daemon before \(T4\), so .* is not T4\*2 yet: .*",
    )
    assert t4.ok("sim", "stop") == "the card server has ended\n"
    holder.process.kill()
    holder.process.wait()
    t4.start("--simulate", "T4*2")
