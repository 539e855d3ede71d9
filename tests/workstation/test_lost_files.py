"""The daemon's files are removed under running programs: it says what it lost, and serves on."""

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.workstation.conftest import HOLD, Program, Workstation, eventually


@pytest.fixture
def holder(t4: Workstation) -> Program:
    """A program that holds 4 units."""
    program = t4.run("--gpu-mem", "4", "--name", "holder", "--", *HOLD, "100")
    program.report()
    return program


def gut(root: Path) -> Path:
    """Remove everything as `rm -rf` does, and return what it cannot: a lease's account is mounted there."""
    (lease,) = (root / "leases").iterdir()
    for path in root.iterdir():
        with contextlib.suppress(NotADirectoryError):
            shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True) if path.is_file() or path.is_socket() else None
    (lease / "account").mkdir(parents=True)
    return lease


def test_daemon_starts_and_says_what_it_lost_when_its_files_were_removed(
    t4: Workstation, holder: Program
) -> None:
    """The rest of the lease is removed; its program goes on."""
    t4.kill_daemon()
    lease = gut(t4.root)
    started = t4.fenka("daemon", "--background", "--simulate", "T4")
    lost = f"lease {lease.name} has lost its files and its record: processes [{holder.pid}] go on"
    assert lost in started.stderr
    assert lost in (t4.root / "daemon.log").read_text()
    assert not lease.exists()
    assert t4.jobs() == {}
    assert t4.ok("run", "--gpu-mem", "4", "--no-wait", "--", "echo", "served") == "served\n"
    assert holder.end() == 0


def test_job_is_kept_when_only_its_lease_s_files_were_removed(
    t4: Workstation, holder: Program
) -> None:
    """What the state records is held until the program ends."""
    t4.kill_daemon()
    (lease,) = (t4.root / "leases").iterdir()
    shutil.rmtree(lease)
    t4.start("--simulate", "T4")
    assert t4.jobs()["holder"]["pids"] == [holder.pid]
    assert "holder has lost its lease's files" in (t4.root / "daemon.log").read_text()
    assert holder.end() == 0
    eventually(lambda: not t4.jobs())
