"""Test the launch agent by real processes on the loopback address."""

import ast
import contextlib
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fenka.jobs import in_pod
from fenka.jobs.in_pod.mpi_agent import MAX_FIRST_FRAME, MAX_UNKNOWN
from tests.waiting import wait_until

FILES = Path(next(iter(in_pod.__path__)))
PROGRAM = FILES / "mpi_agent.py"


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that serves on the loopback address.

    Attributes:
        process: The server.
        environment: What callers need.
        port: Its port.
    """

    process: subprocess.Popen[str]
    environment: dict[str, str]
    port: int

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a caller."""
        return subprocess.Popen(
            [sys.executable, "-IS", PROGRAM, "-x", "127.0.0.1", command],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, command: str, **environment: str) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error of a caller."""
        caller = self.start(command, **environment)
        stdout, stderr = caller.communicate()
        return caller.returncode, stdout, stderr

    def connect(self) -> socket.socket:
        """Return a bare connection to it."""
        return socket.create_connection(("127.0.0.1", self.port))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return a file with a key."""
    path = tmp_path / "key"
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture
def agent(key: Path) -> Iterator[Agent]:
    """Return an agent that serves."""
    with serving(key) as server:
        yield server


@contextlib.contextmanager
def serving(key: Path, *prefix: str) -> Iterator[Agent]:
    """Serve while the block runs. prefix: a command that starts the server."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    environment = {**os.environ, "FENKA_AGENT_PORT": str(port), "FENKA_AGENT_KEY": str(key)}
    process = subprocess.Popen(
        [*prefix, sys.executable, "-IS", PROGRAM, "serve"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "fenka: waiting for mpirun\n"
        yield Agent(process, environment, port)
    finally:
        process.kill()
        process.communicate()


def running(path: Path) -> Callable[[], psutil.Process | None]:
    """Return a function that returns the process whose ID a command wrote to a file."""

    def look() -> psutil.Process | None:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int(path.read_text()))
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        return None

    return look


def test_output_and_exit_code_are_those_of_the_command(agent: Agent) -> None:
    """Test that output and exit code are those of the command."""
    assert agent.call("echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")


def test_exit_code_is_that_of_shells_when_a_signal_ends_the_command(agent: Agent) -> None:
    """Test that exit code is that of shells when a signal ends the command."""
    assert agent.call("kill -9 $$")[0] == 137


def test_large_output_arrives_completely(agent: Agent) -> None:
    """Test that large output arrives completely."""
    code, stdout, _ = agent.call("head -c 3000000 /dev/zero | tr '\\0' x")
    assert (code, len(stdout)) == (0, 3_000_000)


def test_command_has_the_environment_of_the_server(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ssh loses it."""
    monkeypatch.setenv("ONLY_THERE", "yes")
    with serving(key) as agent:
        assert agent.call("echo $ONLY_THERE", ONLY_THERE="no")[1] == "yes\n"


def test_caller_ends_while_a_daemon_of_the_command_goes_on(agent: Agent, tmp_path: Path) -> None:
    """Open MPI's daemons leave the session; the command that starts them ends."""
    daemon = running(tmp_path / "pid")
    command = f"setsid sh -c 'echo $$ >{tmp_path}/pid; exec sleep 1000' & exit 3"
    assert agent.call(command)[0] == 3
    wait_until(daemon)
    process = daemon()
    assert process
    process.kill()


def test_command_is_not_run_when_the_key_is_wrong(agent: Agent, tmp_path: Path) -> None:
    """Test that command is not run when the key is wrong."""
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    code, _, stderr = agent.call(f"touch {tmp_path}/ran", FENKA_AGENT_KEY=str(wrong))
    assert code == 255
    assert stderr.startswith("fenka: agent 127.0.0.1: the connection was closed")
    assert not (tmp_path / "ran").exists()
    assert agent.call("exit 0")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_command_ends_with_its_caller(agent: Agent, tmp_path: Path, number: int) -> None:
    """Its children end, too."""
    first, second = running(tmp_path / "first"), running(tmp_path / "second")
    caller = agent.start(
        f"sh -c 'echo $$ >{tmp_path}/second; exec sleep 1000' & echo $$ >{tmp_path}/first; wait"
    )
    wait_until(first)
    wait_until(second)
    caller.send_signal(number)
    caller.communicate()
    wait_until(lambda: not first() and not second())


def test_command_that_ignores_sigterm_is_killed_when_its_caller_is_gone(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that command that ignores sigterm is killed when its caller is gone."""
    monkeypatch.setenv("FENKA_AGENT_GRACE", "0.2")
    process = running(tmp_path / "pid")
    with serving(key) as agent:
        caller = agent.start(f"trap '' TERM; echo $$ >{tmp_path}/pid; while :; do sleep 1; done")
        wait_until(process)
        caller.kill()
        caller.communicate()
        wait_until(lambda: not process())


def test_commands_end_when_the_server_is_terminated(agent: Agent, tmp_path: Path) -> None:
    """Test that commands end when the server is terminated."""
    process = running(tmp_path / "pid")
    caller = agent.start(f"echo $$ >{tmp_path}/pid; exec sleep 1000")
    wait_until(process)
    agent.process.terminate()
    assert agent.process.wait() == 143
    assert not process()
    assert caller.wait() in (143, 255)
    caller.communicate()


def test_many_callers_are_served_at_once(agent: Agent) -> None:
    """Test that many callers are served at once."""
    with ThreadPoolExecutor(30) as pool:
        codes = pool.map(lambda number: agent.call(f"sleep 0.1; exit {number}")[0], range(30))
    assert list(codes) == list(range(30))


def test_server_goes_on_when_connections_say_nothing(agent: Agent) -> None:
    """The oldest are closed, so that their number is bounded."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(agent.connect()) for _ in range(3 * MAX_UNKNOWN)]
        assert agent.call("exit 5")[0] == 5
        threads = psutil.Process(agent.process.pid).num_threads
        wait_until(lambda: threads() <= MAX_UNKNOWN + 3)
        del silent


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"x" * 10,
        b"GET / HTTP/1.1\r\n\r\n" + b"\r\n" * 50,
        bytes(32) + struct.pack(">I", 2**32 - 1),
        bytes(32) + struct.pack(">I", 20) + bytes(32) + b"{}",
        bytes(32) + struct.pack(">I", 2) + bytes(32) + b"{}",
        bytes(32) + struct.pack(">I", 22) + bytes(32) + b'{"command": "exit 0"}\n',
    ],
)
def test_server_goes_on_when_frames_are_hostile(agent: Agent, sent: bytes) -> None:
    """Test that server goes on when frames are hostile."""
    with agent.connect() as connection:
        received = b""
        # The server may have closed it before all is sent: then even shutdown is refused.
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(4096):
                received += data
    # Nothing but its own random number.
    assert len(received) <= 32
    assert agent.call("exit 5")[0] == 5


def test_recorded_request_is_refused_when_it_is_sent_again(agent: Agent, tmp_path: Path) -> None:
    """Test that recorded request is refused when it is sent again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        caller = agent.start(f"echo >>{tmp_path}/ran", FENKA_AGENT_PORT=port)
        inner, _ = listener.accept()
        with inner, agent.connect() as outer:
            recorded = inner.recv(32)
            outer.sendall(recorded)
            inner.sendall(outer.recv(32))
            request = inner.recv(4096)
            outer.sendall(request)
            wait_until((tmp_path / "ran").exists)
    caller.communicate()
    with agent.connect() as again:
        again.sendall(recorded + request)
        with contextlib.suppress(ConnectionError):
            while again.recv(4096):
                pass
    assert (tmp_path / "ran").read_text() == "\n"


def test_hosts_are_unix_sockets_when_a_directory_is_given(key: Path, tmp_path: Path) -> None:
    """Test that hosts are unix sockets when a directory is given."""
    environment = {
        **os.environ,
        "FENKA_AGENT_SOCKETS": str(tmp_path),
        "FENKA_AGENT_KEY": str(key),
    }
    program = [sys.executable, "-IS", str(PROGRAM)]
    with subprocess.Popen([*program, "serve", "host-1"], env=environment) as server:
        try:
            caller = subprocess.run([*program, "host-1", "exit 9"], env=environment, check=False)
            assert caller.returncode == 9
        finally:
            server.terminate()


def test_program_runs_with_python_3_5() -> None:
    """Images of 2018 have it."""
    tree = ast.parse(PROGRAM.read_text(), feature_version=(3, 5))
    forbidden = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr)
    assert not [node for node in ast.walk(tree) if isinstance(node, forbidden)]


@pytest.fixture
def directory(tmp_path: Path, key: Path) -> Path:
    """Return the files as pods see them."""
    files = tmp_path / "mpi"
    files.mkdir()
    shutil.copy(PROGRAM, files / "agent.py")
    shutil.copy(FILES / "mpi_agent.sh", files / "agent")
    shutil.copy(key, files / "key")
    return files


def bin_without(tmp_path: Path, *names: str) -> str:
    """Return a directory for PATH that has only these programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    return str(programs)


def test_script_starts_the_program_with_the_images_python(agent: Agent, directory: Path) -> None:
    """Test that script starts the program with the images python."""
    environment = {
        name: value for name, value in agent.environment.items() if name != "FENKA_AGENT_KEY"
    }
    result = subprocess.run(
        ["sh", str(directory / "agent"), "127.0.0.1", "exit", "4"], env=environment, check=False
    )
    assert result.returncode == 4


@pytest.mark.parametrize("words", [["serve"], ["host", "true"]])
def test_script_names_what_is_missing_when_the_image_has_neither(
    directory: Path, tmp_path: Path, words: list[str]
) -> None:
    """Test that script names what is missing when the image has neither."""
    shell = shutil.which("sh")
    assert shell
    result = subprocess.run(
        [shell, str(directory / "agent"), *words],
        env={"PATH": bin_without(tmp_path, "dirname", "id")},
        capture_output=True,
        text=True,
        check=False,
    )
    # /usr/sbin/sshd is found without PATH.
    assert result.returncode == 127
    assert "has neither Python (3.5 or newer) nor ssh and sshd" in result.stderr


def test_script_names_ssh_keygen_when_the_job_has_no_keys_for_ssh(
    directory: Path, tmp_path: Path
) -> None:
    """The machine that submitted the job could not make them."""
    path = bin_without(tmp_path, "dirname", "id")
    (Path(path) / "ssh").touch(mode=0o755)
    result = subprocess.run(
        [str(shutil.which("sh")), str(directory / "agent"), "host", "true"],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 127
    assert "or ssh-keygen where the job is submitted" in result.stderr


def test_ssh_is_used_when_the_image_has_no_python(directory: Path, tmp_path: Path) -> None:
    """The job's own key is that of the host and of its user."""
    for program in ("ssh", "sshd", "ssh-keygen"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{program} is not installed: apt-get install openssh-server")
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "ssh-key")]
    subprocess.run(keygen, check=True)
    # Secrets are mounted so that everybody in the container may read them.
    (directory / "ssh-key").chmod(0o644)
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    tools = ("sh", "dirname", "id", "mkdir", "cp", "mv", "cat", "ssh")
    environment = {
        "PATH": bin_without(tmp_path, *tools),
        "TMPDIR": str(tmp_path),
        "FENKA_AGENT_PORT": str(port),
    }
    agent = [str(shutil.which("sh")), str(directory / "agent")]
    with subprocess.Popen(
        [*agent, "serve"], env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            wait_until(lambda: "listening" in server.stderr.readline())  # type: ignore[union-attr]
            done = subprocess.run(
                [*agent, "-x", "127.0.0.1", "echo out; exit 7"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stdout) == (7, "out\n"), done.stderr
        finally:
            server.terminate()


CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.fixture
def first_process(key: Path) -> Iterator[tuple[Agent, psutil.Process]]:
    """Return an agent that is the first process of its PID namespace, and that process."""
    trial = subprocess.run([*CONTAINER, "true"], capture_output=True, check=False)
    if trial.returncode:
        pytest.skip("this user may not create PID namespaces")
    with serving(key, *CONTAINER) as agent:
        (server,) = psutil.Process(agent.process.pid).children()
        yield agent, server


def test_orphans_are_reaped_when_the_server_is_the_first_process(
    first_process: tuple[Agent, psutil.Process], tmp_path: Path
) -> None:
    """Nobody else in a container would."""
    agent, server = first_process
    command = f"setsid sh -c ': >{tmp_path}/ran' & exit 3"
    assert agent.call(command)[0] == 3
    wait_until((tmp_path / "ran").exists)
    wait_until(lambda: not server.children())
    assert agent.call("exit 4")[0] == 4


def test_daemons_are_terminated_with_the_server_when_it_is_the_first_process(
    first_process: tuple[Agent, psutil.Process], tmp_path: Path
) -> None:
    """Those of Open MPI have left the session of the command. They get SIGTERM, not SIGKILL."""
    agent, server = first_process
    (tmp_path / "daemon").write_text(
        f"trap 'echo saved >{tmp_path}/state; exit 0' TERM\n"
        f": >{tmp_path}/ready; while :; do sleep 0.1; done\n"
    )
    agent.call(f"setsid sh {tmp_path}/daemon </dev/null >/dev/null 2>&1 &")
    wait_until((tmp_path / "ready").exists)
    server.terminate()
    agent.process.wait()
    assert (tmp_path / "state").read_text() == "saved\n"


def test_long_command_arrives_in_parts(agent: Agent) -> None:
    """It is longer than the first frame may be."""
    text = "é" * 50_000
    assert agent.call(f"printf %s {text} | wc -m", LC_ALL="C.UTF-8") == (0, "50000\n", "")


def test_strangers_frame_ends_the_connection_when_it_exceeds_the_first_frames_size(
    agent: Agent,
) -> None:
    """Nothing of it is received before its sender is known."""
    with agent.connect() as stranger:
        stranger.sendall(bytes(32) + struct.pack(">I", MAX_FIRST_FRAME + 1))
        received = b""
        while part := stranger.recv(1 << 16):
            received += part
    assert len(received) == 32


def test_strangers_frames_take_little_memory(agent: Agent) -> None:
    """As many strangers as there may be, each with all but the last byte of a first frame."""
    process = psutil.Process(agent.process.pid)
    frame = bytes(32) + struct.pack(">I", MAX_FIRST_FRAME) + bytes(32 + MAX_FIRST_FRAME - 1)
    before = process.memory_info().rss
    with contextlib.ExitStack() as strangers:
        for _ in range(MAX_UNKNOWN):
            strangers.enter_context(agent.connect()).sendall(frame)
        assert agent.call("exit 3")[0] == 3
        assert process.memory_info().rss - before < 64 << 20
