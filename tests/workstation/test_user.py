"""An ordinary user: no capabilities, read-only /run and /etc, and user namespaces."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workstation.conftest import HOLD, Workstation, eventually, refused, workstation_at

# /run and /etc read-only, then an ordinary user's identity; the namespaces stay until stdin ends.
ORDINARY = """
mount --bind /run /run && mount -o remount,bind,ro /run &&
mount --bind /etc /etc && mount -o remount,bind,ro /etc &&
exec unshare --user --map-user=1000 --map-group=1000 sh -c 'echo ready; read end'
"""

# The kernel lets nobody make a user namespace from within a chroot.
CONFINED = """
mount --rbind / "$1" &&
exec unshare --user --map-user=1000 --map-group=1000 --keep-caps \\
    chroot "$1" sh -c 'echo ready; read end'
"""


@contextlib.contextmanager
def workstation_of_user(script: str, root: Path, *enter: str) -> Iterator[Workstation]:
    """A simulated T4 and a daemon that runs as an ordinary user."""
    words = ["unshare", "--mount", "sh", "-c", script, "sh", str(root)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stderr
        try:
            if holder.stdout.readline() != "ready\n":
                pytest.skip(f"no user namespaces here: {holder.stderr.read().strip()}")
            inside = ["nsenter", "--target", str(holder.pid), "--mount", "--user", *enter]
            with workstation_at([*inside, "--preserve-credentials"]) as station:
                station.start("--simulate", "T4")
                yield station
        finally:
            holder.stdin.close()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Workstation]:
    """A workstation without root, but with user namespaces."""
    if os.geteuid() == 0:
        with workstation_of_user(ORDINARY, tmp_path) as station:
            yield station
        return
    with workstation_at([]) as station:
        station.start("--simulate", "T4")
        yield station


def test_run_fails_when_isolation_is_impossible(tmp_path: Path) -> None:
    """Without mount namespaces nothing starts, and the error names the alternative."""
    if os.geteuid() != 0:
        pytest.skip("confining a user takes root")
    with workstation_of_user(CONFINED, tmp_path, "--root") as confined:
        refused(
            confined.fenka("run", "--gpu-mem", "1", "--", "echo", "started"),
            1,
            r"no private mount namespace can be made here \(Operation not permitted\): start the "
            r"daemon and the program as root, .* --isolation=cooperative, .*",
        )
        eventually(lambda: not confined.jobs())
        words = ("run", "--gang", "2", "--gpu-mem", "1", "--name", "g", "--", "echo", "started")
        gang = confined.fenka(*words)
        assert (gang.returncode, gang.stdout) == (1, "")
        assert "] fenka: no private mount namespace can be made here" in gang.stderr
        last = gang.stderr.splitlines()[-1]
        assert re.fullmatch("fenka: g was not started: member [01] could not be", last)
        eventually(lambda: not confined.jobs())
        doctor = confined.fenka("doctor")
        assert doctor.returncode == 1
        assert "wrong  memory limit   no private mount namespace" in doctor.stdout
        asked_for = ("run", "--gpu-mem", "4", "--isolation", "cooperative", "--")
        limited = confined.fenka(*asked_for, *HOLD, "4400", input="")
        assert json.loads(limited.stdout)["cards"][0]["result"] == 2


def test_slice_is_enforced_when_the_user_is_not_root(user: Workstation) -> None:
    """The limit holds as for root, also in an empty environment."""
    for command in (HOLD, ["env", "-i", *HOLD]):
        program = user.run("--gpu-mem", "4", "--", *command, "4400")
        assert program.report() == {"cards": [{"result": 2, "free": 4308, "total": 4308}]}
        assert program.end() == 0


def test_limits_are_read_only_when_the_user_is_not_root(user: Workstation) -> None:
    """The program can write the limits neither in the lease nor in the daemon's directory."""
    script = (
        "echo > /run/fenka/lease/control; "
        f"ls -A {user.root}/leases; echo > /etc/ld.so.preload; umount /run/fenka/lease; true"
    )
    result = user.fenka("run", "--gpu-mem", "4", "--", "sh", "-c", script)
    assert result.stdout == "", "the daemon's own directory of leases looks empty"
    assert result.stderr.count("cannot create") == 2, result.stderr
    assert "umount" in result.stderr


def test_slice_is_free_when_an_ordinary_user_s_program_ends(user: Workstation) -> None:
    """This holds for a daemonised grandchild, and after a restart of the daemon."""
    script = "setsid sleep 1000 >/dev/null 2>&1 < /dev/null &"
    assert user.fenka("run", "--gpu-mem", "14", "--name", "tree", "--", "sh", "-c", script)
    (child,) = eventually(lambda: user.jobs()["tree"]["pids"])
    user.kill_daemon()
    user.start("--simulate", "T4")
    assert user.jobs()["tree"]["pids"] == [child]
    os.kill(child, 9)
    eventually(lambda: not user.jobs())


def test_run_and_etc_are_complete_in_a_lease(user: Workstation) -> None:
    """A lease leaves /run and /etc complete."""
    look = "ls /run; cat /etc/hostname /etc/passwd"
    inside = user.fenka("run", "--gpu-mem", "1", "--", "sh", "-c", look)
    outside = subprocess.run(["sh", "-c", look], capture_output=True, text=True, check=True)
    kept = [line for line in inside.stdout.splitlines() if line != "fenka"]
    assert kept == [line for line in outside.stdout.splitlines() if line != "fenka"]


def test_gang_runs_when_the_user_is_not_root(user: Workstation) -> None:
    """Each member has its own user namespace. Priorities are allowed on the user's own daemon."""
    words = ("run", "--gang", "2", "--gpu-mem", "4", "--priority", "1")
    held = user.ok(*words, "--", *HOLD, "4400")
    cards = [{"result": 2, "free": 4308, "total": 4308}]
    assert [json.loads(line[4:])["cards"] for line in held.splitlines()] == [cards] * 2
    eventually(lambda: not user.jobs())


def test_training_has_leases_and_mounts_when_its_user_is_ordinary(
    user: Workstation, tmp_path: Path
) -> None:
    """Programs have no rights in their namespaces, nor has what is attached to them."""
    for name in ("data", "place"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "x").write_text("here\n")
    script = f"grep CapEff /proc/self/status; cat {tmp_path}/place/x; exec sleep 1000"
    words = ("--workers", "1", "--ps", "1", "--gpu-mem", "4")
    mount = ("--data-dir", f"{tmp_path}/data:{tmp_path}/place", "--", "sh", "-c", script)
    user.ok("submit", "tf", "--local", "--name", "u", *words, *mount)
    nothing = ["CapEff:\t0000000000000000", "here"]
    for instance in ("u-worker-0", "u-ps-0"):
        log = user.root / "jobs" / "u" / ".fenka" / instance / "log"
        eventually(lambda log=log: log.exists() and log.read_text().count("\n") == 2)  # type: ignore[misc]
        assert log.read_text().splitlines() == nothing
        attached = ("attach", "--local", "u", "-i", instance, "--", "sh", "-c")
        shown = f"grep CapEff /proc/self/status; cat {tmp_path}/place/x; unshare -U true || exit 3"
        result = user.fenka(*attached, shown)
        assert result.stdout.splitlines() == nothing, result.stderr
        # Whoever could make a user namespace in a lease could undo its limits.
        assert result.returncode == (3 if instance == "u-worker-0" else 0)
    assert user.ok("delete", "--local", "u").startswith("The training job u has been deleted")
    assert user.jobs() == {}
