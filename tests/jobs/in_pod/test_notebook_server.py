"""The program in notebooks' containers, with a real Jupyter, with imitations of old ones, and without."""

import ast
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fenka.isolation import lease_control
from fenka.isolation.lease_control import Control, Limit, layout
from fenka.jobs.in_pod import notebook_server
from fenka.jobs.in_pod.notebook_server import STALE_NS, IdleClock, LeaseUsage, read_usage
from tests.jupyter_login import login
from tests.ports import free_port
from tests.waiting import WAIT_S, wait_until

PROGRAM = Path(notebook_server.__file__)
CARDS = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(2)]
PASSWORD = "a secret pass#word"
S = 10**9


def page(folder: Path, *feedback: tuple[int, int, int]) -> Path:
    """Write a control page with the sequence, time and use of each card. Return its path."""
    path = folder / "lease" / "control"
    path.parent.mkdir(parents=True, exist_ok=True)
    lease_control.write(path, Control("nb", tuple(Limit(uuid, 1 << 32) for uuid in CARDS)))
    data = bytearray(path.read_bytes())
    view = layout().from_buffer("struct fenka_control *", data)
    for card, (sequence, at, busy) in zip(view.cards, feedback, strict=False):
        card.feedback_seq, card.feedback_at, card.busy_ns = sequence, at, busy
    layout().release(view)
    path.write_bytes(data)
    return path


def now_ns() -> int:
    """Return the time of the control page."""
    return notebook_server.monotonic_ns()


# ---- the use of cards ----


def test_use_is_read_as_fenka_writes_it(tmp_path: Path) -> None:
    """The program knows the page's layout without fenka."""
    usage = read_usage(page(tmp_path, (2, 70 * S, 5 * S), (4, 90 * S, 7 * S)))
    assert usage is not None
    assert (usage.busy_ns, usage.at_ns) == (12 * S, 70 * S)


@pytest.mark.parametrize("feedback", [[], [(2, S, S)], [(2, S, S), (0, 0, 0)]])
def test_use_is_unknown_when_a_card_is_not_measured(
    tmp_path: Path, feedback: list[tuple[int, int, int]]
) -> None:
    """Drivers may measure no processes."""
    assert read_usage(page(tmp_path, *feedback)) is None


@pytest.mark.parametrize("content", [b"", b"x" * 4096, struct.pack("<QII", 1, 2, 3)])
def test_use_is_unknown_when_the_page_is_not_understood(tmp_path: Path, content: bytes) -> None:
    """As with a later fenka on the node."""
    path = tmp_path / "control"
    path.write_bytes(content)
    assert read_usage(path) is None
    assert read_usage(tmp_path / "missing") is None


def test_slice_is_idle_since_its_last_use() -> None:
    """Any use starts the time again; so does what is unknown."""
    clock = IdleClock(LeaseUsage(5, 0), 0)
    assert clock.idle_ns(LeaseUsage(5, 10 * S), 10 * S) == 10 * S
    assert clock.idle_ns(LeaseUsage(6, 11 * S), 11 * S) == 0
    assert clock.idle_ns(LeaseUsage(6, 20 * S), 20 * S) == 9 * S
    assert clock.idle_ns(None, 21 * S) == 0
    assert clock.idle_ns(LeaseUsage(6, 30 * S), 30 * S) == 9 * S
    assert clock.idle_ns(LeaseUsage(6, 30 * S), 31 * S) == 9 * S
    assert clock.idle_ns(LeaseUsage(6, 30 * S), 31 * S + STALE_NS) == 0


def test_slice_stays_idle_when_fenka_counts_from_zero_again() -> None:
    """The node's program was restarted; the slice was not used by that."""
    clock = IdleClock(LeaseUsage(500, 0), 0)
    assert clock.idle_ns(LeaseUsage(0, 10 * S), 10 * S) == 10 * S
    assert clock.idle_ns(LeaseUsage(3, 12 * S), 12 * S) == 0


# ---- any server ----


def run(tmp_path: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start the program."""
    variables = {**os.environ, "FENKA_LEASE": str(tmp_path), **environment}
    return subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), *words],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


SERVER = ("--", sys.executable, "-c")
FOREVER = "import signal; print('up', flush=True); signal.sigwait([signal.SIGTERM])"
"""A server that ends with 0 after SIGTERM, as Jupyter does."""


def test_server_ends_when_its_slice_is_not_used(tmp_path: Path) -> None:
    """It exits with 0, so that its Job has completed."""
    later = now_ns() + 3 * S
    page(tmp_path, (2, later, S), (2, later, S))
    program = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); " + FOREVER
    )
    process = run(tmp_path, "--idle", "0.2", *SERVER, program)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert errors.startswith("fenka: the slice has not been used for 0 s, so the notebook ends")


def test_server_ends_when_the_program_that_watches_its_slice_is_killed(tmp_path: Path) -> None:
    """A slice that nobody watches would never be free."""
    process = run(tmp_path, "--", "sh", "-c", "echo $$; exec sleep 1000")
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_server_has_not_ended_by_itself_when_it_is_terminated(tmp_path: Path) -> None:
    """A drained node, for example: the notebook must run again."""
    program = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); " + FOREVER
    )
    process = run(tmp_path, *SERVER, program)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 143


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_exit_code_is_the_servers_own_when_it_ends(tmp_path: Path, program: str, code: int) -> None:
    """Shut down by its user, for example."""
    process = run(tmp_path, *SERVER, program)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code


def test_jupyter_ends_idle_kernels_when_the_use_is_unknown(tmp_path: Path) -> None:
    """Whole cards, for example, have no lease."""
    program = "import sys; print(sys.argv[1:])"
    process = run(tmp_path, "--idle", "7200", *SERVER, program)
    output, _ = process.communicate(timeout=WAIT_S)
    assert ast.literal_eval(output.splitlines()[-1]) == [
        "--MappingKernelManager.cull_idle_timeout=7200",
        "--MappingKernelManager.cull_interval=300",
        "--MappingKernelManager.cull_connected=True",
        "--ServerApp.shutdown_no_activity_timeout=7200",
    ]


# ---- the image's Jupyter ----


def imitate(folder: Path, name: str, version: str) -> str:
    """Make a Jupyter that prints its configuration. Return the PATH on which it is."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    script = programs / name
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys\n"
        f"if '--version' in sys.argv: sys.exit(print({version!r}))\n"
        "folder = pathlib.Path(os.environ['JUPYTER_CONFIG_PATH'].split(':')[0])\n"
        "(file,) = folder.iterdir()\n"
        "modes = [oct(path.stat().st_mode & 0o77) for path in (folder,)]\n"
        "print(json.dumps([file.name, json.loads(file.read_text()), modes, 'PASSWORD' in os.environ]))\n"
    )
    script.chmod(0o755)
    return str(programs)


def configured(tmp_path: Path, name: str, version: str, *words: str) -> list[Any]:
    """Return what such a Jupyter is given."""
    path = imitate(tmp_path, name, version)
    process = run(tmp_path, *words, PASSWORD=PASSWORD, PATH=path, TMPDIR=str(tmp_path))
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return list(json.loads(output))


@pytest.mark.parametrize(
    ("name", "version", "classic"),
    [
        ("jupyter-notebook", "5.7.8", True),
        ("jupyter-notebook", "6.4.12", True),
        ("jupyter-lab", "2.3.2", True),
        ("jupyter-notebook", "7.2.1", False),
        ("jupyter-lab", "4.4.0", False),
    ],
)
def test_settings_are_those_of_the_version_that_the_image_has(
    tmp_path: Path, name: str, version: str, classic: bool
) -> None:
    """TensorFlow's images have the classic notebook, Jupyter's have JupyterLab."""
    root = str(tmp_path)
    file, settings, modes, has_password = configured(tmp_path, name, version, "--root", root)
    hashed = (
        settings["NotebookApp"]["password"]
        if classic
        else settings["PasswordIdentityProvider"]["hashed_password"]
    )
    server = settings["NotebookApp" if classic else "ServerApp"]
    assert file == f"jupyter_{'notebook' if classic else 'server'}_config.json"
    assert server["notebook_dir" if classic else "root_dir"] == root
    assert (server["ip"], server["port"], server["open_browser"]) == ("0.0.0.0", 8888, False)
    assert hashed.startswith("sha256:")
    assert PASSWORD not in json.dumps(settings)
    assert (modes, has_password) == (["0o0"], False)


def test_sentence_tells_what_is_missing_when_the_image_has_no_jupyter(tmp_path: Path) -> None:
    """The pod's log says it, and so does its state."""
    process = run(tmp_path, PATH=str(tmp_path), PASSWORD=PASSWORD)
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (
        127,
        "fenka: this image has no Jupyter: install jupyterlab in it\n",
    )


def listens(port: int) -> bool:
    """Return whether a server listens there."""
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def processes_of(pid: int) -> Iterator[Path]:
    """Yield the directories in /proc of a process and its descendants."""
    yield Path(f"/proc/{pid}")
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from processes_of(int(child))


def test_only_the_password_logs_in_when_a_real_jupyter_runs(tmp_path: Path) -> None:
    """And no process shows it on its command line, nor does the server have it in its environment."""
    root = tmp_path / "root"
    root.mkdir()
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = run(
        tmp_path,
        "--port",
        str(port),
        "--root",
        str(root),
        PASSWORD=PASSWORD,
        PATH=path,
        HOME=str(tmp_path),
        TMPDIR=str(tmp_path),
    )
    with process:
        try:
            url = f"http://127.0.0.1:{port}/"
            wait_until(lambda: listens(port))
            assert login(url, "wrong") == 401
            assert login(url, "") == 401
            assert login(url, PASSWORD) == []
            folders = list(processes_of(process.pid))
            assert len(folders) >= 2
            for folder in folders:
                assert PASSWORD.encode() not in (folder / "cmdline").read_bytes()
            for folder in folders[1:]:
                assert (folder / "cwd").readlink() == root
                assert PASSWORD.encode() not in (folder / "environ").read_bytes()
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)
    assert process.returncode == 143


def test_program_is_understood_by_old_images_python() -> None:
    """TensorFlow 1.4's image has Python 3.5."""
    ast.parse(PROGRAM.read_text(), feature_version=(3, 5))
