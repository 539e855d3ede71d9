"""Special files in the daemon's directory, and disks that cannot be written: one sentence, and no loss."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fenka.hardware.peer_credentials import PeerProcess
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.procfs import boot_id
from fenka.workstation import files
from fenka.workstation.connections import create_jobs
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import HOLD, Workstation, refused, workstation_at
from tests.workstation.users import as_root


def binary(path: Path) -> None:
    """Write bytes that are no text in any encoding."""
    path.write_bytes(b"\xff\xfe\x00{")


def empty(path: Path) -> None:
    """Make an empty file, as after a crash of a file system."""
    path.touch()


def nested(path: Path) -> None:
    """Write JSON that is nested too deeply for a decoder."""
    path.write_text("[" * 100_000)


def link(path: Path) -> None:
    """Make a link to an endless file."""
    path.symlink_to("/dev/zero")


KINDS = (binary, empty, nested, link, Path.mkdir, os.mkfifo)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["state", "config"])
def test_error_names_the_file_when_it_is_not_a_regular_file(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """Opening the file does not block."""
    runtime = Runtime(tmp_path)
    path: Path = getattr(runtime, name)
    make(path)
    read = files.load_jobs if name == "state" else files.load_config
    with pytest.raises(files.InvalidState, match=re.escape(str(path))) as error:
        read(runtime)
    assert "\n" not in str(error.value)
    assert "Errno" not in str(error.value)


def test_state_is_refused_when_another_version_wrote_it(tmp_path: Path) -> None:
    """Also a state without jobs, whose fields would be valid."""
    runtime = Runtime(tmp_path)
    runtime.state.write_text('{"boot":"","jobs":[],"version":2}')
    with pytest.raises(files.InvalidState, match=r"state\.json .* written by another version"):
        files.load_jobs(runtime)


def test_jobs_are_read_when_version_3_wrote_them(tmp_path: Path) -> None:
    """Its gangs had equal members."""
    runtime = Runtime(tmp_path)
    spec = JobSpec(["x"], GpuResources("4"), name="g", gang=2)
    process = PeerProcess(os.getpid(), os.geteuid(), descriptor=-1, start_ticks=1)
    jobs = create_jobs(spec, process, 1024, [], 5.0)
    state = json.loads(msgspec.json.encode(files.StateFile(boot_id(), jobs)))
    for job in state["jobs"]:
        assert job["spec"].pop("members", []) == []
    runtime.state.write_text(json.dumps(state | {"version": 3}))
    assert files.load_jobs(runtime) == jobs


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("daemon.lock", link),
        ("daemon.log", os.mkfifo),
        ("daemon.sock", Path.mkdir),
        ("leases", empty),
        ("ld.so.conf", Path.mkdir),
        ("simulated", empty),
    ],
)
def test_daemon_names_the_file_when_it_cannot_start(
    station: Workstation, name: str, make: Callable[[Path], None]
) -> None:
    """The error names the file that must be removed."""
    make(station.root / name)
    refused(
        station.fenka("daemon", "--background", "--simulate", "T4"),
        1,
        rf".*{re.escape(str(station.root / name))}.*",
    )
    assert not (station.root / "daemon.sock").is_socket()


def test_daemon_does_not_start_when_its_state_is_unreadable(t4: Workstation) -> None:
    """Running programs hold slices, so no daemon may start without their records."""
    program = t4.run("--gpu-mem", "14", "--", *HOLD, "14000")
    program.report()
    t4.kill_daemon()
    state = t4.root / "state.json"
    kept = state.rename(t4.root / "kept")
    state.mkdir()
    result = t4.fenka("run", "--gpu-mem", "14", "--", "true")
    assert result.returncode == 1
    assert str(state) in result.stderr.splitlines()[-1]
    state.rmdir()
    kept.rename(state)
    assert t4.fenka("run", "--gpu-mem", "14", "--no-wait", "--", "true").returncode == 75
    assert program.end() == 0


DISKS = ("size=4k", "nr_inodes=3", "ro")


@as_root
@pytest.mark.parametrize("disk", DISKS)
def test_daemon_reports_it_when_the_disk_is_full(tmp_path: Path, disk: str) -> None:
    """The log is on the full disk, so the reason is reported by the pipe. Nothing is left running."""
    script = 'mount -t tmpfs -o "$0" small "$FENKA_RUNTIME" && exec "$@"'
    with workstation_at(["unshare", "--mount", "sh", "-c", script, f"mode=700,{disk}"]) as small:
        result = small.fenka("daemon", "--background", "--simulate", "T4")
        assert result.returncode == 1, result.stdout
        (line,) = result.stderr.splitlines()
        assert re.fullmatch(rf"fenka: .*{re.escape(str(small.root))}.*", line), line
        assert "Errno" not in line


@as_root
def test_error_names_the_package_when_ldconfig_is_missing(tmp_path: Path) -> None:
    """Simulated cards need it inside leases."""
    script = 'mount --bind /dev/null "$(readlink -f /sbin/ldconfig)" && exec "$@"'
    with workstation_at(["unshare", "--mount", "sh", "-c", script, "sh"]) as station:
        refused(
            station.fenka("daemon", "--background", "--simulate", "T4"),
            1,
            r"/sbin/ldconfig cannot be run \(Permission denied\), .*: install it .*",
        )


def test_effects_are_applied_when_the_disk_has_room_again(t4: Workstation) -> None:
    """A slice that is released while the disk is full is granted once it has room."""
    holder = t4.run("--gpu-mem", "14", "--", *HOLD, "14000")
    holder.report()
    waiter = t4.run("--gpu-mem", "14", "--", *HOLD, "14000")
    assert "waiting, position 1 of 1" in waiter.says()
    in_the_way = t4.root / ".state.json.new"
    in_the_way.mkdir()
    assert holder.end() == 0
    refusal = t4.fenka("run", "--gpu-mem", "1", "--no-wait", "--", "true").stderr
    assert re.fullmatch(rf"fenka: cannot use {re.escape(str(in_the_way))}: .*\n", refusal), refusal
    assert waiter.process.poll() is None
    in_the_way.rmdir()
    assert waiter.report()["cards"][0]["result"] == 0
    assert waiter.end() == 0
