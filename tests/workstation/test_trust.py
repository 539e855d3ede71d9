"""Which daemon a command trusts, on a machine with several users."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fenka.cli import common_options, world
from fenka.cli.admin import doctor
from fenka.cli.error_report import report_errors
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.local import launch
from fenka.local.launch import Launcher, LeaseNotGranted
from fenka.local.runs import create_job_directory
from fenka.workstation import client, paths, protocol
from fenka.workstation.client import DaemonConnection, DaemonUnavailable
from fenka.workstation.files import lock_runtime
from fenka.workstation.paths import Runtime, UnsafeDirectory
from tests.workstation.users import User, place, stranger, victim, was_connected_to

__all__ = ["place", "stranger", "victim"]


@pytest.fixture
def nobody_named(monkeypatch: pytest.MonkeyPatch, place: Path) -> Path:
    """Unset both variables, and return the system's directory, `place`/system."""
    for name in ("FENKA_RUNTIME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "SYSTEM", place / "system")
    monkeypatch.setattr(paths, "SYSTEM_OPTIONS", place / "daemon.toml")
    return place / "system"


@contextlib.contextmanager
def default_directory_of(user: User, owner: User) -> Iterator[Path]:
    """Create the directory in /tmp that this user's commands use by default, owned by `owner`."""
    directory = owner.mkdir(Path(f"/tmp/fenka-{user.uid}"))
    try:
        yield directory
    finally:
        (directory / "daemon.sock").unlink(missing_ok=True)
        directory.rmdir()


def connect_to(runtime: Runtime) -> None:
    """Connect as every command does."""
    DaemonConnection(runtime).close()


@pytest.mark.usefixtures("nobody_named")
def test_default_directory_is_rejected_when_another_user_created_it(
    victim: User, stranger: User
) -> None:
    """The stranger's daemon could name any library to load, so it does not even get a Hello."""
    with (
        default_directory_of(victim, stranger) as directory,
        stranger.serve(directory / "daemon.sock") as server,
    ):
        with pytest.raises(UnsafeDirectory, match=f"belongs to user {stranger.uid}"):
            victim.do(lambda: connect_to(paths.current()))
        with pytest.raises(UnsafeDirectory):
            victim.do(lambda: client.start_daemon(paths.current(), []))
        assert victim.do(lambda: paths.current().answers()) is False
        assert not was_connected_to(server)


def test_system_daemon_is_used_when_another_user_created_the_default_directory(
    nobody_named: Path, victim: User, stranger: User
) -> None:
    """Another user's directory in /tmp does not hide root's daemon."""
    nobody_named.mkdir()
    with (
        default_directory_of(victim, stranger) as directory,
        stranger.serve(directory / "daemon.sock"),
        User(0).serve(nobody_named / "daemon.sock"),
    ):
        assert victim.do(paths.current) == Runtime(nobody_named)


def test_system_directory_is_rejected_when_it_is_not_root_s(
    nobody_named: Path, victim: User, stranger: User
) -> None:
    """A directory of another user, as in a container, is not the system's."""
    stranger.mkdir(nobody_named)
    with stranger.serve(nobody_named / "daemon.sock") as server:
        assert victim.do(paths.current) != Runtime(nobody_named)
        with pytest.raises(UnsafeDirectory):
            victim.do(lambda: connect_to(Runtime(nobody_named)))
        assert not was_connected_to(server)


def test_named_directory_is_rejected_when_others_can_change_it(
    place: Path, victim: User, stranger: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's directory, a writable one, one below a stranger's, and a link are not used."""
    stranger.mkdir(place / "theirs")
    victim.mkdir(place / "open").chmod(0o777)
    victim.mkdir(place / "grouped").chmod(0o770)
    stranger.mkdir(place / "above")
    victim.mkdir(place / "above" / "mine")
    victim.mkdir(place / "good")
    (place / "link").symlink_to("good")
    for name in ("theirs", "open", "grouped", "above/mine", "link"):
        monkeypatch.setenv("FENKA_RUNTIME", str(place / name))
        for act in (
            lambda: connect_to(paths.current()),
            lambda: paths.own().create(),
            lambda: client.connect(paths.current(), print),
        ):
            with pytest.raises(UnsafeDirectory):
                victim.do(act)
    monkeypatch.delenv("FENKA_RUNTIME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "above"))
    with pytest.raises(UnsafeDirectory, match=r"above belongs to user"):
        victim.do(lambda: connect_to(paths.own()))


def test_links_are_followed_when_they_are_above_the_directory(
    place: Path, stranger: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's link may lead to our directory; changing it later has no effect."""
    (place / "good" / "run").mkdir(parents=True, mode=0o700)
    (place / "link").symlink_to("good")
    os.chown(place / "link", stranger.uid, stranger.uid, follow_symlinks=False)
    monkeypatch.setenv("FENKA_RUNTIME", str(place / "link" / "run"))
    assert paths.own() == Runtime(place / "good" / "run")
    assert paths.jobs_directory() == place / "good" / "run" / "jobs"


def test_users_have_no_records_when_their_home_has_another_users(
    place: Path, victim: User, stranger: User
) -> None:
    """Commands that list all of a user's jobs go on with those that there are."""
    stranger.mkdir(place / "services", 0o700)
    assert victim.do(lambda: paths.directory_names(lambda: place / "services")) == []


def test_server_is_rejected_when_it_is_another_user_s(
    place: Path, victim: User, stranger: User
) -> None:
    """The kernel reports the listening user, whatever the directory's mode is."""
    victim.mkdir(place / "mine", 0o700)
    stranger.mkdir(place / "theirs")
    with stranger.serve(place / "theirs" / "socket") as server:
        (place / "theirs" / "socket").rename(place / "mine" / "daemon.sock")
        with pytest.raises(UnsafeDirectory, match=f"is served by user {stranger.uid}"):
            victim.do(lambda: connect_to(Runtime(place / "mine")))
        connection, _ = server.accept()
        assert connection.recv(1) == b""


def test_daemon_is_rejected_when_the_client_is_root(place: Path, stranger: User) -> None:
    """The daemon's answer would name a library that root loads."""
    stranger.mkdir(place / "theirs", 0o700)
    with stranger.serve(place / "theirs" / "daemon.sock") as server:
        with pytest.raises(UnsafeDirectory, match=f"belongs to user {stranger.uid}"):
            DaemonConnection(Runtime(place / "theirs"))
        assert not was_connected_to(server)


def test_system_daemon_is_not_started_when_the_user_is_not_root(
    nobody_named: Path, victim: User
) -> None:
    """While the system's daemon is down, its recorded configuration keeps users from starting their own."""
    nobody_named.mkdir()
    (nobody_named / "config.json").write_text("{}")
    assert victim.do(paths.current) == Runtime(nobody_named)
    with pytest.raises(DaemonUnavailable, match="only root can start this machine's"):
        victim.do(lambda: client.connect(paths.current(), print))
    assert sorted(path.name for path in nobody_named.iterdir()) == ["config.json"]
    (nobody_named / "config.json").unlink()
    assert victim.do(paths.current) == Runtime(Path(f"/tmp/fenka-{victim.uid}"))


def test_log_is_not_opened_when_it_is_a_link(place: Path) -> None:
    """A daemon must not append to a file that the link names."""
    (place / "target").touch()
    (place / "daemon.log").symlink_to(place / "target")
    with pytest.raises(OSError, match=r"daemon\.log"):
        open(place / "daemon.log", "ab", opener=client.open_log).close()


def test_system_lock_is_not_opened_when_the_user_is_not_root(
    nobody_named: Path, victim: User
) -> None:
    """A user who can open the file could lock it, and keep the next daemon from starting."""
    with lock_runtime(Runtime(nobody_named)), pytest.raises(PermissionError):
        victim.do(lambda: (nobody_named / "daemon.lock").open().close())
    with lock_runtime(Runtime(nobody_named)):
        # Where leases are mounted, made before an ordinary user's first.
        assert {path.name for path in nobody_named.iterdir()} >= {"account", "lease", "leases"}


def serve_once(runtime: Runtime, *answers: msgspec.Struct) -> None:
    """Be root's daemon for one connection, which gets one answer for each line."""
    runtime.socket.unlink(missing_ok=True)
    server = User(0).serve(runtime.socket)

    def answer() -> None:
        connection, _ = server.accept()
        with server, connection, connection.makefile("rb") as lines:
            for message in answers:
                lines.readline()
                connection.sendall(protocol.encode(message) + b"\n")

    threading.Thread(target=answer).start()


def test_request_waits_when_the_system_daemon_is_down(
    nobody_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user's request waits until root has started the daemon; with --no-wait it fails at once."""
    monkeypatch.setattr(Runtime, "foreign", property(lambda _: True))
    nobody_named.mkdir()
    runtime, announced = Runtime(nobody_named), list[str]()

    def start_daemon(text: str) -> None:
        announced.append(text)
        serve_once(runtime, protocol.Hello(), protocol.JobRejected("it was heard", final=False))

    def acquire(*, wait: bool) -> None:
        spec = JobSpec(["x"], GpuResources("1"))
        Launcher(runtime, spec, report_errors, wait=wait).acquire(start_daemon)

    with pytest.raises(DaemonUnavailable, match="only root can start this machine's"):
        acquire(wait=False)
    assert announced == []
    with pytest.raises(LeaseNotGranted, match="it was heard"):
        acquire(wait=True)
    assert len(announced) == 1
    assert announced[0].startswith("waiting for this machine's daemon: root has to start it")


def test_request_says_what_root_has_to_do_when_the_system_daemon_went_away(
    nobody_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place in the queue is kept meanwhile."""
    monkeypatch.setattr(Runtime, "foreign", property(lambda _: True))
    monkeypatch.setattr(launch, "PATIENCE_S", 0)
    nobody_named.mkdir()
    runtime, announced = Runtime(nobody_named), list[str]()

    def notify(text: str) -> None:
        announced.append(text)
        if text.startswith("waiting for this machine's daemon"):
            serve_once(runtime, protocol.Hello(), protocol.JobRejected("it was heard", final=False))

    serve_once(runtime, protocol.Hello())
    with pytest.raises(LeaseNotGranted, match="it was heard"):
        Launcher(runtime, JobSpec(["x"], GpuResources("1")), report_errors).acquire(notify)
    assert announced == [
        "the daemon went away; waiting for it with our place in the queue kept …",
        "waiting for this machine's daemon: root has to start it, with `fenka daemon --background`",
    ]


def test_job_log_is_not_written_when_another_user_can_change_its_directory(
    nobody_named: Path, place: Path, victim: User, stranger: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing directory is removed before a job starts, so it must not be a stranger's link."""
    stranger.mkdir(place / "theirs")
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "theirs"))
    victim.mkdir(place / "theirs" / "fenka" / "jobs")
    with pytest.raises(UnsafeDirectory, match="theirs belongs to user"):
        victim.do(lambda: create_job_directory(paths.current(), "night"))
    victim.mkdir(place / "mine")
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "mine"))
    directory, _ = victim.do(lambda: create_job_directory(paths.current(), "night"))
    assert directory == place / "mine" / "fenka" / "jobs" / "night"
    assert not nobody_named.exists()


@pytest.mark.usefixtures("nobody_named")
def test_cluster_is_shown_when_the_default_directory_is_another_user_s(
    victim: User, stranger: User
) -> None:
    """The cluster's screens need no daemon on this machine."""
    with default_directory_of(victim, stranger):
        assert victim.do(lambda: world.snapshot_here(common_options.Target())) is None
        (check,) = victim.do(doctor._daemon)
        assert check.status == "wrong"
        assert f"belongs to user {stranger.uid}" in check.detail
