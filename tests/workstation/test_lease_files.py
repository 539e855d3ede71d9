"""What other users can do to a lease's files, and what its own user can do to the daemon."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fenka import native
from fenka.core.inventory import WHOLE_COMPUTE
from fenka.hardware.nvml import Hardware
from fenka.isolation import account
from fenka.isolation.compute_feedback import ComputeFeedback
from fenka.isolation.lease_files import account_file, control_page
from fenka.workstation.job import Job
from fenka.workstation.leases import Leases
from fenka.workstation.paths import Runtime
from tests.builders import job, placement
from tests.workstation.conftest import HOLD, Workstation, open_to_all
from tests.workstation.users import as_root

OWNER, STRANGER = 64001, 64002
CARD = "GPU-00000000-0000-0000-0000-000000000001"


def placed_job(uid: int) -> Job:
    """A job of this user that holds a GiB of a card."""
    return job(f"job{uid}", uid=uid, placement=placement(CARD))


def leases(runtime: Runtime) -> Leases:
    """The leases of a daemon in this directory, with a driver that measures nothing."""
    hardware = SimpleNamespace(
        driver=SimpleNamespace(simulated=False), context_mib={}, near_cpus={CARD: {0, 1}}
    )
    feedback = ComputeFeedback(lambda *_: None, lambda _: None)
    return Leases(
        runtime, cast("Hardware", hardware), native.DIRECTORY, feedback, lambda _: WHOLE_COMPUTE
    )


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """A runtime directory that every user may enter."""
    open_to_all(tmp_path)
    directory = Runtime(tmp_path / "run")
    directory.create()
    directory.root.chmod(0o755)
    yield directory
    for lease in directory.leases.iterdir():
        leases(directory).remove(lease.name)


def create_lease(runtime: Runtime, uid: int) -> Path:
    """The directory of a lease of this user."""
    leases(runtime).create(placed_job(uid))
    return runtime.lease(f"job{uid}")


def does(uid: int, script: str, *words: Path) -> bool:
    """Return whether a user succeeds with a shell script; $1 is the first word."""
    command = ["sh", "-c", script, "sh", *map(str, words)]
    options = {"user": uid, "group": uid, "extra_groups": []}
    ran = subprocess.run(command, check=False, capture_output=True, **options)  # type: ignore[call-overload]
    return bool(ran.returncode == 0)


@as_root
@pytest.mark.parametrize("uid", [OWNER, 0])
def test_lease_is_closed_when_the_user_is_another(runtime: Runtime, uid: int) -> None:
    """Another user can neither read nor write the account or the limits, nor list leases."""
    lease = create_lease(runtime, uid)
    for script in (
        'cat "$1/account/slots"',
        'printf x >> "$1/account/slots"',
        'truncate -s 0 "$1/account/slots"',
        'cat "$1/lease/control"',
        'ls "$1"',
        'ls "$1/.."',
    ):
        assert not does(STRANGER, script, lease), script
    assert account.read(account_file(lease)).processes == ()


@as_root
def test_only_the_account_is_writable_when_the_user_is_the_lease_s(runtime: Runtime) -> None:
    """The limits and the list of preloaded libraries can be neither written nor replaced."""
    lease = create_lease(runtime, OWNER)
    assert (lease / "lease" / "cpus").read_text() == "0-1"
    assert does(OWNER, 'cat "$1/lease/control" "$1/etc/ld.so.preload" && ls "$1/run"', lease)
    assert does(OWNER, 'printf x | dd of="$1/account/slots" bs=1 seek=4096 conv=notrunc', lease)
    for script in (
        'printf x >> "$1/lease/control"',
        'mv "$1/lease" "$1/away"',
        'mkdir "$1/new"',
        'rm -f "$1/lease/control"',
        'rm -f "$1/account/slots"',
        'mkfifo "$1/account/pipe"',
        'chmod 777 "$1"',
        'printf x > "$1/etc/ld.so.preload"',
    ):
        assert not does(OWNER, script, lease), script


@as_root
def test_account_is_reachable_when_root_s_program_changes_its_user(runtime: Runtime) -> None:
    """Programs reach the account by a mount of its directory; outside, only root can enter it."""
    lease = create_lease(runtime, 0)
    script = (
        'mount --bind "$1/account" /mnt && exec setpriv --reuid 64001 --clear-groups sh -c "$2"'
    )
    words = ["unshare", "--mount", "sh", "-c", script, "sh", str(lease), "printf x >> /mnt/slots"]
    subprocess.run(words, check=True)
    assert not does(OWNER, 'printf x >> "$1/account/slots"', lease)


SYSTEM = """
import os, subprocess, sys
from pathlib import Path
from fenka.workstation.paths import SYSTEM, Runtime
from tests.workstation.test_lease_files import OWNER, does, leases, placed_job
runtime = Runtime(SYSTEM)
runtime.create()
leases(runtime).create(placed_job(OWNER))
lease = runtime.lease(f"job{OWNER}")
before = os.statvfs("/run").f_bavail
print(does(OWNER, 'head -c 5000000 /dev/zero >> "$1/account/slots"', lease))
print(does(OWNER, 'truncate -s 0 "$1/account/slots" && truncate -s 8T "$1/account/slots"', lease))
print(os.statvfs("/run").f_bavail == before)
leases(runtime).remove(lease.name)
# Also those of a daemon of root's that runs outside are listed.
print(list(runtime.leases.iterdir()), f"{lease}/account" in Path("/proc/self/mountinfo").read_text())
"""


@as_root
def test_run_is_not_filled_when_a_program_extends_its_account() -> None:
    """With a daemon for all users, each account is on its own small file system until its lease ends."""
    script = 'mount -t tmpfs fenka /run && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", SYSTEM]
    ran = subprocess.run(words, check=True, capture_output=True, text=True)
    assert ran.stdout.split("\n")[0] == "False"
    assert ran.stdout.split("\n")[2:4] == ["True", "[] False"]


def test_lease_is_recreated_when_a_killed_daemon_left_files(runtime: Runtime) -> None:
    """The account of a new lease is empty."""
    lease = create_lease(runtime, os.geteuid())
    (lease / "account" / "slots").write_bytes(b"")
    control_page(lease).unlink()
    create_lease(runtime, os.geteuid())
    assert account.read(account_file(lease)).processes == ()


def test_snapshot_is_complete_when_an_account_is_damaged(t4: Workstation) -> None:
    """A program that truncates, extends and locks its account is shown, and another one is served."""
    ruin = (
        "import fcntl, os, signal, sys\\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\\n"
        "path = '/run/fenka/account/slots'\\n"
        "os.truncate(path, 8)\\n"
        "os.truncate(path, 1 << 40)\\n"
        "file = open(path)\\n"
        "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)\\n"
        "print(1, flush=True)\\n"
        "sys.stdin.read()\\n"
    ).replace("\\n", "\n")
    program = t4.run("--gpu-mem", "4", "--name", "odd", "--", sys.executable, "-c", ruin)
    assert program.report() == 1
    neighbour = t4.run("--gpu-mem", "4", "--name", "even", "--", *HOLD, "100")
    assert neighbour.report()["cards"][0]["result"] == 0
    assert set(t4.jobs()) == {"odd", "even"}
    assert program.end() == 0
    assert neighbour.end() == 0
