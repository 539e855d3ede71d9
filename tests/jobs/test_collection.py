"""Test what is collected for a submission, with real repositories of git."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents, collect
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.repository import split_credentials
from fenka.jobs.training import TrainingSpec


def git(directory: Path, *words: str) -> str:
    """Run git in a directory; return what it prints."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", *identity, "-C", directory, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with branches main and next, and tag v1 with a message."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "project.git"
    subprocess.run(["git", "init", "-q", "-b", "main", root], check=True)
    for number, branch in enumerate(("main", "next")):
        if number:
            git(root, "checkout", "-q", "-b", branch)
        (root / "train.py").write_text(branch)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", branch)
    git(root, "tag", "-a", "v1", "-m", "x", "main")
    git(root, "checkout", "-q", "main")
    return root


def training(**fields: Any) -> TrainingSpec:
    """Return a training."""
    return TrainingSpec(kind="pytorch", name="a", image="i", command=["a"], **fields)


def with_source(url: str, **env: str) -> TrainingSpec:
    """Return a training whose code is in a repository."""
    return training(sync_mode="git", sync_source=url, env=env)


@pytest.mark.parametrize(
    ("env", "branch"),
    [
        ({}, "main"),
        ({"GIT_SYNC_BRANCH": "next"}, "next"),
        ({"GIT_SYNC_BRANCH": "v1"}, "main"),
    ],
)
def test_commit_is_pinned_when_the_repository_can_be_reached(
    repository: Path, env: dict[str, str], branch: str
) -> None:
    """Test that commit is pinned when the repository can be reached."""
    _, contents = collect(with_source(str(repository), **env))
    assert contents.revision == git(repository, "rev-parse", branch)


def test_nothing_is_pinned_when_the_repository_cannot_be_reached(tmp_path: Path) -> None:
    """The cluster may reach it all the same."""
    _, contents = collect(with_source(str(tmp_path / "nothing.git")))
    assert not contents.revision


def test_nothing_is_pinned_when_the_user_names_a_revision(repository: Path) -> None:
    """Test that nothing is pinned when the user names a revision."""
    _, contents = collect(with_source(str(repository), GIT_SYNC_REV="v1"))
    assert not contents.revision


def test_branch_that_does_not_exist_is_rejected(repository: Path) -> None:
    """Test that branch that does not exist is rejected."""
    with pytest.raises(InvalidRequest) as raised:
        collect(with_source(str(repository), GIT_SYNC_BRANCH="nope"))
    assert str(raised.value) == f"branch nope not found in {repository}: check GIT_SYNC_BRANCH"


@pytest.mark.parametrize(
    ("url", "bare", "user", "password"),
    [
        ("https://alice:a%2Fb@host:8443/x.git", "https://host:8443/x.git", "alice", "a/b"),
        ("https://ghp%5F1@host/x.git", "https://host/x.git", "ghp_1", ""),
        ("https://host/x.git", "https://host/x.git", "", ""),
        ("git@host:x.git", "git@host:x.git", "", ""),
        ("ssh://git@host/x.git", "ssh://git@host/x.git", "", ""),
    ],
)
def test_password_is_taken_out_of_the_url(url: str, bare: str, user: str, password: str) -> None:
    """Test that password is taken out of the url."""
    assert split_credentials(url) == (bare, user, password)


def test_password_is_in_no_annotation_and_no_variable_of_pods() -> None:
    """Test that password is in no annotation and no variable of pods."""
    spec, contents = collect(with_source("https://alice:hunter2@127.0.0.1:1/x.git", A="b"))
    assert contents.credentials == {"GIT_SYNC_USERNAME": "alice", "GIT_SYNC_PASSWORD": "hunter2"}
    rendered = render(spec, contents)
    assert "hunter2" not in str(rendered.root)
    assert "hunter2" not in str(spec)


@pytest.mark.parametrize(("env", "password"), [({}, ""), ({"GIT_SYNC_PASSWORD": "x"}, "x")])
def test_token_as_user_name_is_in_no_annotation_and_no_variable_of_pods(
    env: dict[str, str], password: str
) -> None:
    """A variable may name the password of a user that the URL names."""
    spec, contents = collect(with_source("https://ghp_1@127.0.0.1:1/x.git", **env))
    assert contents.credentials == {"GIT_SYNC_USERNAME": "ghp_1", "GIT_SYNC_PASSWORD": password}
    assert "ghp_1" not in str(render(spec, contents).root)
    assert "ghp_1" not in str(spec)


def test_config_files_are_read_when_they_are_submitted(tmp_path: Path) -> None:
    """Test that config files are read when they are submitted."""
    file = tmp_path / "a:b.ini"
    file.write_bytes(b"\xff[x]\n")
    _, contents = collect(training(config_file=[f"{file}:/etc/x.ini"]))
    assert contents.config_files == {"/etc/x.ini": b"\xff[x]\n"}


def test_config_files_are_rejected_when_they_are_too_large(tmp_path: Path) -> None:
    """Test that config files are rejected when they are too large."""
    file = tmp_path / "a.ini"
    file.write_bytes(bytes(500 * 1024))
    with pytest.raises(InvalidRequest, match=r"more than 0\.9 MiB: use --data"):
        collect(training(config_file=[f"{file}:/a", f"{file}:/b"]))


def run_init_container(spec: TrainingSpec, contents: Contents, directory: Path) -> str:
    """Run the script of the init container as the kubelet does; return what it prints."""
    (job,) = render(spec, contents).role_jobs
    (container,) = job["spec"]["template"]["spec"]["initContainers"]
    variables = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    variables |= contents.credentials
    # The working directory is this one instead of the container's.
    variables["DIRECTORY"] = variables["DIRECTORY"].replace("/root/code", str(directory))
    return subprocess.run(
        container["command"],
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_pods_run_the_pinned_commit_when_the_branch_has_moved(
    repository: Path, tmp_path: Path, scheme: str
) -> None:
    """Test that pods run the pinned commit when the branch has moved."""
    spec, contents = collect(with_source(f"{scheme}{repository}"))
    (repository / "train.py").write_text("later")
    git(repository, "commit", "-q", "-a", "-m", "later")
    directory = tmp_path / "code"
    assert run_init_container(spec, contents, directory) == contents.revision
    assert (directory / "project" / "train.py").read_text() == "main"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "main"),
        ({"GIT_SYNC_BRANCH": "next"}, "next"),
        ({"GIT_SYNC_REV": "v1"}, "main"),
    ],
)
def test_pods_run_the_branch_when_nothing_is_pinned(
    repository: Path, tmp_path: Path, env: dict[str, str], text: str
) -> None:
    """Test that pods run the branch when nothing is pinned."""
    spec = with_source(str(repository), **env)
    run_init_container(spec, Contents(), tmp_path / "code")
    assert (tmp_path / "code" / "project" / "train.py").read_text() == text


def test_pods_fail_when_the_commit_does_not_exist(repository: Path, tmp_path: Path) -> None:
    """Test that pods fail when the commit does not exist."""
    spec = with_source(str(repository))
    with pytest.raises(subprocess.CalledProcessError):
        run_init_container(spec, Contents(revision="5" * 40), tmp_path / "code")
