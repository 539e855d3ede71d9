"""`fenka notebook` with a real Jupyter server and a real kernel."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.cli.demo import Kernel, KernelFailed
from fenka.jobs.in_pod import notebook_server
from fenka.jobs.in_pod.notebook_server import read_usage
from fenka.jobs.notebook import Reach, hash_password, unnamed_sentence
from fenka.jobs.notebook import url as notebook_url
from tests.jupyter_login import logged_in, login
from tests.workstation.conftest import Workstation, eventually, refused

LOOK = (
    "from cuda.bindings import driver as cuda\n"
    "cuda.cuInit(0)\n"
    "cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])\n"
    "print(cuda.cuMemGetInfo()[2] >> 20, cuda.cuMemAlloc(4400 << 20)[0].name)\n"
)


@pytest.fixture
def t4(t4: Workstation) -> Workstation:
    """A T4, and the Jupyter that came with fenka on the PATH."""
    t4.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return t4


@contextlib.contextmanager
def logs_on_failure(station: Workstation) -> Iterator[None]:
    """Add the logs of all jobs to an error of the block."""
    try:
        yield
    except BaseException as error:
        for log in sorted((station.root / "jobs").rglob("log")):
            error.add_note(f"{log}:\n{log.read_text(errors='replace')}")
        raise


def test_kernel_is_limited_when_a_notebook_runs(t4: Workstation) -> None:
    """The kernel, a grandchild of `fenka notebook`, sees the limit and cannot exceed it."""
    printed = t4.ok("notebook", "--gpu-mem", "4", "--name", "nb", "--detach")
    url = printed.removeprefix("nb: ").strip()
    assert url in t4.ok("ps")
    kernel = Kernel(url)
    assert kernel.run(LOOK) == "4308 CUDA_ERROR_OUT_OF_MEMORY\n"
    with pytest.raises(KernelFailed, match="ZeroDivisionError"):
        kernel.run("1 / 0")
    kernel.close()
    assert t4.ok("stop", "nb") == "nb: stopped\n"
    assert t4.jobs() == {}


def test_login_is_required_when_a_password_is_set(t4: Workstation) -> None:
    """With PASSWORD set the URL has no token, and only the password logs in."""
    t4.environment["PASSWORD"] = "mypassw0rd"
    printed = t4.ok("notebook", "--gpu-mem", "4", "--name", "nb", "--detach")
    url = printed.removeprefix("nb: ").strip()
    assert "token" not in url
    assert login(url, "wrong") == 401
    assert login(url, "mypassw0rd") == []


def test_notebook_ends_when_its_server_ends(t4: Workstation) -> None:
    """SIGTERM to the command ends the server and releases the slice."""
    words = [sys.executable, "-m", "fenka", "notebook", "--gpu-mem", "4"]
    with subprocess.Popen(
        words, env=t4.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        assert re.fullmatch(
            r"notebook: http://[0-9a-f]{32}\.localhost:\d+/lab\?token=\w+\n",
            process.stdout.readline(),
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    eventually(lambda: not t4.jobs())


def test_ports_differ_when_notebooks_start_together(t4: Workstation) -> None:
    """Each notebook has its own port and URL."""
    fenka = [sys.executable, "-m", "fenka", "notebook", "--gpu-mem", "2", "--detach", "--name"]
    starting = [
        subprocess.Popen(
            [*fenka, name],
            env=t4.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    printed = [process.communicate() for process in starting]
    with logs_on_failure(t4):
        for _, error in printed:
            assert re.fullmatch(r"from another machine: `ssh -L .*\n", error)
        ports = {urllib.parse.urlsplit(line.split(": ")[1]).port or 0 for line, _ in printed}
        assert len(ports) == 3
        for line, _ in printed:
            Kernel(line.split(": ")[1].strip()).close()


def test_notebook_answers_to_its_own_name_alone(t4: Workstation) -> None:
    """The name is new at each start, and cookies of an earlier one log in to nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    t4.environment["PASSWORD"] = "mypassw0rd"
    given = ("--gpu-mem", "2", "--name", "nb", "--port", str(port), "--detach")
    names, cookies = [], ""
    for words in (("notebook", *given), ("start", "nb", "--detach")):
        place = urllib.parse.urlsplit(t4.ok(*words).removeprefix("nb: ").strip()).netloc
        names.append(place)
        for name in ("127.0.0.1", "localhost", f"{'0' * 32}.localhost"):
            assert _status(port, f"{name}:{port}") == 421
        assert _status(port, place, Cookie=cookies) == 403
        cookies = logged_in(f"http://{place}", "mypassw0rd")
        assert _status(port, place, Cookie=cookies) == 200
        reached = socket.socket(socket.AF_UNIX)
        reached.connect(str(t4.root / "jobs" / "nb" / "jupyter.sock"))
        assert _status(port, place, reached, Cookie=cookies) == 200
        t4.ok("stop", "nb")
    assert len(set(names)) == 2


def test_stranger_cannot_answer_under_the_name_when_a_notebook_runs(t4: Workstation) -> None:
    """Browsers look for it at ::1 first; a port that a stranger has there ends the start."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as stranger:
        port = stranger.getsockname()[1]
        given = ("--gpu-mem", "2", "--name", "nb", "--detach")
        refused(t4.fenka("notebook", *given, "--port", str(port)), 1, ".*`fenka logs nb`")
        assert "at another loopback address" in t4.fenka("logs", "nb").stdout
    url = t4.ok("notebook", *given).removeprefix("nb: ").strip()
    own = urllib.parse.urlsplit(url).port or 0
    with pytest.raises(OSError, match="already in use"):
        socket.create_server(("::1", own), family=socket.AF_INET6)


def _status(port: int, host: str, reached: socket.socket | None = None, **fields: str) -> int:
    """Return the status of an answer that only who is logged in gets, by port or by a Unix socket."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as server:
        server.sock = reached
        server.request("GET", "/api/contents", headers={"Host": host, **fields})
        return server.getresponse().status


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ip": "127.0.0.2"}, "as your Jupyter settings have ServerApp.ip"),
        (
            {"allow_remote_access": True},
            "as your Jupyter settings have ServerApp.allow_remote_access",
        ),
    ],
)
def test_notebook_says_why_it_has_no_name_of_its_own(
    t4: Workstation, tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    """A setting of the user forbids it one, and then nobody is promised what only a name gives."""
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps({"ServerApp": settings}))
    t4.environment["JUPYTER_CONFIG_DIR"] = str(tmp_path)
    started = t4.fenka("notebook", "--gpu-mem", "2", "--name", "nb", "--detach")
    assert started.returncode == 0
    assert ".localhost" not in started.stdout
    assert reason in started.stderr
    assert "ssh -L" not in started.stderr


@pytest.mark.parametrize(
    "written",
    [
        b"evil.example.com",
        b"0" * 32 + b".localhost\n",
        b"0" * 32 + b".localhost@evil.example.com",
        b"\x1b[2J",
        b"\xff",
        b"0" * (1 << 20),
        "link",
        "pipe",
        None,
    ],
)
def test_address_is_jupyters_own_when_a_program_wrote_the_name(
    tmp_path: Path, written: bytes | str | None
) -> None:
    """Programs of a notebook may write where its server does. What is no name of ours is not shown."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    named = runtime / "fenka-name-1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"http://127.0.0.1:{port}/"
        (runtime / "jpserver-1.json").write_text(
            json.dumps({"url": url, "hostname": "127.0.0.1", "port": port, "pid": 1})
        )
        if written == "link":
            (tmp_path / "name").write_text(f"{'0' * 32}.localhost")
            named.symlink_to(tmp_path / "name")
        elif written == "pipe":
            os.mkfifo(named)
        elif isinstance(written, bytes):
            named.write_bytes(written)
        assert notebook_url(tmp_path) == f"{url}lab"
        sentence = unnamed_sentence(tmp_path, "nb", Reach())
        assert "its Jupyter does not load fenka's guard" in sentence
        assert unnamed_sentence(tmp_path, "nb", Reach(host="127.0.0.1")) == ""
        named.unlink(missing_ok=True)
        named.write_text(f"{'0' * 32}.localhost")
        assert notebook_url(tmp_path) == f"http://{'0' * 32}.localhost:{port}/lab"


def test_file_about_a_server_is_ignored_when_it_is_none(tmp_path: Path) -> None:
    """A pipe, a link, a huge file and a URL that is none: nothing waits, and nothing fails."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    os.mkfifo(runtime / "jpserver-1.json")
    (runtime / "jpserver-2.json").symlink_to("/dev/zero")
    with (runtime / "jpserver-3.json").open("wb") as file:
        file.truncate(1 << 40)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (runtime / "jpserver-4.json").write_text(
            json.dumps({"url": "http://[", "hostname": "127.0.0.1", "port": port})
        )
        assert notebook_url(tmp_path) is None


def test_notebook_fails_when_its_directory_is_missing(t4: Workstation) -> None:
    """A missing directory is reported before anything starts."""
    result = t4.fenka("notebook", "--gpu-mem", "1", "--directory", "/no/such")
    assert (result.returncode, result.stderr) == (2, "fenka: /no/such is not a directory\n")


def test_notebook_has_its_password_and_files_when_it_is_started_again(
    t4: Workstation, tmp_path: Path
) -> None:
    """After `fenka stop` as after an idle end; what it gets of the card is the same, too.

    A cluster that is configured plays no part: the notebook is known here.
    """
    (tmp_path / "kubeconfig").touch()
    t4.environment["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    work = tmp_path / "work"
    work.mkdir()
    (work / "work.ipynb").touch()
    t4.environment["PASSWORD"] = "mypassw0rd"
    given = ("--local", "--gpu-mem", "4", "--directory", str(work), "--idle", "2h")
    t4.ok("notebook", *given, "--name", "nb", "--detach")
    running = t4.fenka("start", "nb")
    assert (running.returncode, running.stderr) == (
        2,
        "fenka: notebook nb runs or waits already: see fenka ps\n",
    )
    t4.ok("stop", "nb")
    del t4.environment["PASSWORD"]
    url = t4.ok("start", "nb").removeprefix("nb: ").strip()
    assert login(url, "wrong") == 401
    (file,) = login(url, "mypassw0rd", "/api/contents")["content"]  # type: ignore[index]
    assert file["name"] == "work.ipynb"
    (piece,) = t4.jobs()["nb"]["slices"]
    assert piece["memory_mib"] == 4308
    page = t4.root / "leases" / t4.jobs()["nb"]["id"] / "lease" / "control"
    assert read_usage(page) is not None
    assert "--idle" in " ".join(t4.jobs()["nb"]["command"])


def test_start_is_refused_when_there_is_no_such_notebook(t4: Workstation) -> None:
    """Nothing is started."""
    missing = t4.fenka("start", "nothing")
    assert (missing.returncode, missing.stderr) == (
        1,
        "fenka: notebook nothing not found on this machine: it was never started\n",
    )


def test_program_ends_when_its_slice_is_not_used(t4: Workstation) -> None:
    """Not while it uses the card, for longer than the time after which it would be idle."""
    watched = (sys.executable, "-P", notebook_server.__file__, "--idle", "2", "--")
    uses = (sys.executable, str(Path(__file__).parents[1] / "programs" / "use_card.py"), "5")
    result = t4.fenka("run", "--gpu-mem", "4", "--", *watched, *uses)
    assert (result.returncode, result.stdout) == (0, "used\n")
    assert "the slice has not been used for 2 s, so the notebook ends" in result.stderr


def test_notebook_is_listed_and_deleted_like_a_job(t4: Workstation, tmp_path: Path) -> None:
    """Its files stay. One whose record is damaged can be deleted, too."""
    (tmp_path / "work.ipynb").touch()
    given = ("--local", "--gpu-mem", "4", "--directory", str(tmp_path), "--name", "nb", "--detach")
    url = t4.ok("notebook", *given).removeprefix("nb: ").strip()
    shown = json.loads(t4.ok("get", "--local", "nb", "-o", "json"))
    assert (shown["status"], shown["trainer"], shown["requestGPUs"]) == (
        "RUNNING",
        "notebook",
        0.3,
    )
    assert f"Notebook:\n  {url}" in t4.ok("get", "--local", "nb")
    assert url.partition("?")[0] in t4.ok("logs", "nb")
    directory = t4.ok("attach", "--local", "nb", "--", "sh", "-c", "cd /run/fenka/lease && pwd")
    assert directory == "/run/fenka/lease\n"
    t4.ok("stop", "nb")
    assert t4.ok("list", "--local").splitlines()[1].split()[:3] == ["nb", "STOPPED", "NOTEBOOK"]
    record = t4.root / "jobs" / "nb" / "notebook.json"
    for damaged in (b"{" * 100_000, b'{"\xff":1}'):
        record.write_bytes(damaged)
        assert t4.ok("list", "--local").splitlines()[1].split()[1] == "FAILED"
    t4.ok("delete", "--local", "nb")
    assert not record.parent.exists()
    assert (tmp_path / "work.ipynb").exists()


def test_notebook_listens_where_it_is_told(t4: Workstation, tmp_path: Path) -> None:
    """Host, port and path of the URLs; another one on the same port is refused by a sentence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["notebook", "--gpu-mem", "2", "--detach", "--host", "127.0.0.2", "--port", str(port)]
    printed = t4.ok(*words, "--name", "nb", "--base-url", "/lab/nb/")
    address = f"http://127.0.0.2:{port}/lab/nb/"
    assert printed.startswith(f"nb: {address}lab?token=")
    assert t4.ok("ps").count(address) == 1
    refused(
        t4.fenka(*words, "--name", "other"),
        1,
        f"port {port} of 127.0.0.2 is used or not allowed: choose another",
    )
    t4.ok("stop", "nb")
    restarted = t4.ok("start", "nb")
    assert address in restarted


def test_own_settings_of_jupyter_stay(t4: Workstation, tmp_path: Path) -> None:
    """The user's port and password precede fenka's defaults; options precede the user's settings."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = {
        "ServerApp": {"port": port, "root_dir": "/", "base_url": "/own/"},
        "PasswordIdentityProvider": {"hashed_password": hash_password("mine")},
    }
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps(own))
    t4.environment["JUPYTER_CONFIG_DIR"] = str(tmp_path)
    printed = t4.ok(
        *("notebook", "--gpu-mem", "2", "--name", "nb", "--base-url", "/nb/", "--detach"),
        *("--directory", str(tmp_path)),
    )
    assert re.fullmatch(rf"nb: http://[0-9a-f]{{32}}\.localhost:{port}/nb/lab\n", printed)
    (server_file,) = (t4.root / "jobs" / "nb" / "runtime").glob("jpserver-*.json")
    assert json.loads(server_file.read_text())["root_dir"] == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--host", "gpubox"],
            "invalid --host 'gpubox': expected an IP address of this machine, as 0.0.0.0",
        ),
        (["--port", "70000"], "invalid --port 70000: expected a number from 1 to 65535"),
        (["--base-url", "nb"], "invalid --base-url 'nb': expected a path, as /notebooks/nb/"),
    ],
)
def test_place_to_listen_is_refused_when_it_is_none(
    t4: Workstation, words: list[str], sentence: str
) -> None:
    """Each mistake is one sentence, and nothing is started."""
    refused(t4.fenka("notebook", "--gpu-mem", "2", *words), 2, re.escape(sentence))
    assert t4.jobs() == {}
