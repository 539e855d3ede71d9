"""Test how code is fetched, with git's own program and HTTP servers on loopback."""

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fenka.jobs.repository import CLONE, clone_variables, current_commit, failure_reason
from fenka.jobs.training import TrainingSpec

CREDENTIALS = {"GIT_SYNC_USERNAME": "alice", "GIT_SYNC_PASSWORD": "a\\nb=c"}
EXPECTED = "Basic " + base64.b64encode(b"alice:a\\nb=c").decode()


def git(directory: Path, *words: str) -> str:
    """Run git in a directory; return what it prints."""
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", *settings, "-C", str(directory), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass
class GitServer:
    """Serves files to clients that authenticate. It has no shallow fetch, since it serves files only.

    Attributes:
        url: The server's URL.
        received: The values of the header Authorization in the order of the requests.
    """

    url: str
    received: list[str] = field(default_factory=list)


@contextmanager
def serving(directory: Path) -> Iterator[GitServer]:
    """Serve the files of a directory on a port of loopback."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(directory))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization", "")
            server.received.append(authorization)
            if authorization == EXPECTED:
                super().do_GET()
                return
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = GitServer(f"http://127.0.0.1:{listener.server_port}")
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


@dataclass
class Servers:
    """A server of a repository whose submodule is on another server."""

    source: GitServer
    stranger: GitServer
    repository: Path


def make_repository(directory: Path, file: str) -> Path:
    """Make a repository with one commit on main."""
    subprocess.run(["git", "init", "-q", "-b", "main", str(directory)], check=True)
    (directory / file).write_text("main")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "main")
    git(directory, "update-server-info")
    return directory


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Start both servers. Branch next of the source has no submodule."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    module = make_repository(tmp_path / "strangers" / "module", "module.py")
    root = make_repository(tmp_path / "sources" / "project", "train.py")
    with ExitStack() as stack:
        source = stack.enter_context(serving(root.parent))
        stranger = stack.enter_context(serving(module.parent))
        git(root, "checkout", "-q", "-b", "next")
        (root / "train.py").write_text("next")
        git(root, "commit", "-q", "-a", "-m", "next")
        git(root, "checkout", "-q", "main")
        git(root, "submodule", "add", "-q", str(module), "module")
        git(
            root,
            "config",
            "-f",
            ".gitmodules",
            "submodule.module.url",
            f"{stranger.url}/module/.git",
        )
        git(root, "commit", "-q", "-a", "-m", "submodule")
        git(root, "update-server-info")
        yield Servers(source, stranger, root)


def clone(servers: Servers, directory: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Clone the source's repository as a job does, without a pinned commit."""
    spec = TrainingSpec(
        kind="pytorch",
        name="a",
        image="i",
        command=["a"],
        sync_mode="git",
        sync_source=f"{servers.source.url}/project/.git",
        env=env,
    )
    variables = clone_variables(spec, str(directory), "", credentials=True)
    return subprocess.run(
        ["sh", "-c", CLONE],
        env={**os.environ, **CREDENTIALS, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_credentials_are_sent_to_the_source_alone_when_a_submodule_asks_for_them(
    servers: Servers, tmp_path: Path
) -> None:
    """Whoever writes .gitmodules chooses the submodule's host."""
    result = clone(servers, tmp_path / "code")
    assert EXPECTED in servers.source.received
    assert servers.stranger.received, result.stderr
    assert not any(servers.stranger.received)
    assert result.returncode


def test_credentials_are_sent_when_the_branch_is_looked_up(servers: Servers) -> None:
    """Test that credentials are sent when the branch is looked up."""
    url = f"{servers.source.url}/project/.git"
    assert current_commit(url, "next", CREDENTIALS) == git(servers.repository, "rev-parse", "next")


def test_token_is_sent_as_user_name_when_there_is_no_password(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git takes an empty password of the helper for one."""
    expected = "Basic " + base64.b64encode(b"ghp_1:").decode()
    monkeypatch.setattr(f"{__name__}.EXPECTED", expected)
    token = {"GIT_SYNC_USERNAME": "ghp_1", "GIT_SYNC_PASSWORD": ""}
    url = f"{servers.source.url}/project/.git"
    assert current_commit(url, "next", token) == git(servers.repository, "rev-parse", "next")


@pytest.mark.parametrize("variable", ["GIT_SYNC_BRANCH", "GIT_SYNC_REV"])
def test_branch_is_checked_out_when_the_server_has_no_shallow_fetch(
    servers: Servers, tmp_path: Path, variable: str
) -> None:
    """Only origin/next exists after all branches were fetched."""
    result = clone(servers, tmp_path / "code", **{variable: "next"})
    assert not result.returncode, result.stderr
    assert (tmp_path / "code" / "train.py").read_text() == "next"


@pytest.mark.parametrize("revision", ["next~1", "{commit}", "{commit:.9}"])
def test_revision_is_checked_out_when_the_server_does_not_name_it(
    servers: Servers, tmp_path: Path, revision: str
) -> None:
    """Everything is fetched then."""
    commit = git(servers.repository, "rev-parse", "next~1")
    result = clone(servers, tmp_path / "code", GIT_SYNC_REV=revision.format(commit=commit))
    if "~" in revision:
        assert "next~1" in failure_reason(result.stderr)
        return
    assert not result.returncode, result.stderr
    assert (tmp_path / "code" / "train.py").read_text() == "main"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "fatal: '/x' does not appear to be a git repository\n"
            "fatal: Could not read from remote repository.\n\n"
            "Please make sure you have the correct access rights\nand the repository exists.\n",
            "fatal: '/x' does not appear to be a git repository",
        ),
        ("fatal: couldn't find remote ref nope\n", "fatal: couldn't find remote ref nope"),
        (
            "fatal: Could not read from remote repository.\n\nand the repository exists.\n",
            "and the repository exists.",
        ),
        ("\n", ""),
    ],
)
def test_reason_is_named_without_the_advice_that_follows_it(output: str, reason: str) -> None:
    """Test that the reason is named without the advice that follows it."""
    assert failure_reason(output) == reason
