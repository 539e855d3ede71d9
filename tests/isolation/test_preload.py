"""The empty /etc/ld.so.preload is removed when no lease needs it, whatever was killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fenka import native
from fenka.isolation import proxy_install, sandbox
from tests.workstation.conftest import workstation_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="/etc/ld.so.preload is made by root")

APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A PID namespace of its own: a sibling sees none of its processes."""

# A machine of its own as far as /run, /etc and processes go; it stays until stdin ends.
MACHINE = """
set -e
mount -t tmpfs run /run
mkdir /run/fenka /run/upper /run/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
rm -f /etc/ld.so.preload
echo ready; read end
"""

ENTER = """
import sys
from pathlib import Path
from fenka.isolation import sandbox
sandbox.enter(sandbox.LeaseMounts(Path(sys.argv[1]), Path(sys.argv[2])))
import os
os.execvp("sh", ["sh", "-c", "echo inside; read line; cat /etc/ld.so.preload"])
"""

CLEAN = """
from fenka.isolation import sandbox as preload
preload.remove()
"""

# An ordinary user holds every lock that the kernel gives to one who may only read.
SQUAT = """
import fcntl, os, struct
file = open("/etc/ld.so.preload", "rb")
directory = os.open("/run/fenka", os.O_RDONLY)
for descriptor in (file, directory):
    fcntl.flock(descriptor, fcntl.LOCK_EX)
fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
print("held", flush=True)
input()
"""


class Machine:
    """Runs Python in mount namespaces that share one /etc."""

    def __init__(self, pid: int, lease: Path) -> None:
        self.prefix = ["nsenter", "--target", str(pid), "--mount", "--pid"]
        self._lease = lease

    def start(self, code: str, *before: str) -> subprocess.Popen[str]:
        """Start Python that communicates by stdin and stdout."""
        words = [*self.prefix, *before, sys.executable, "-c", code]
        shim = native.DIRECTORY / "libfenka.so"
        return subprocess.Popen(
            [*words, str(self._lease), str(shim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def clean(self, *before: str) -> None:
        """Remove the file as root's daemon does when it has no lease."""
        with self.start(CLEAN, *before) as process:
            assert process.wait(60) == 0

    def preload(self) -> str | None:
        """Return the file's content outside of every lease; None if there is no file."""
        words = [*self.prefix, "sh", "-c", "test -e /etc/ld.so.preload && cat /etc/ld.so.preload"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return None if done.returncode else done.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Return a machine without leases."""
    for name in ("lease", "account"):
        (tmp_path / name).mkdir()
    for name in ("control", sandbox.SHIM.name, *proxy_install.NEXT_LIBRARIES):
        (tmp_path / "lease" / name).touch()
    sandbox.prepare(tmp_path, None)
    with subprocess.Popen(
        [*APART, "sh", "-c", MACHINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        try:
            assert holder.stdout.readline() == "ready\n"
            (first,) = psutil.Process(holder.pid).children()
            yield Machine(first.pid, tmp_path)
        finally:
            holder.stdin.close()


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line."""
    assert process.stdout
    return process.stdout.readline()


def test_preload_is_kept_when_a_lease_is_in_another_pid_namespace(
    machine: Machine,
) -> None:
    """Removing the file would drop the mounts over it, in every namespace that shares /etc."""
    with machine.start(ENTER, *APART) as inside:
        assert line(inside) == "inside\n"
        machine.clean(*APART)
        assert inside.communicate("\n")[0].split() == [str(sandbox.SHIM)]
    machine.clean(*APART)
    assert machine.preload() is None


def test_preload_is_removed_when_the_last_lease_has_ended(machine: Machine) -> None:
    """However it ended."""
    with machine.start(ENTER) as inside:
        assert line(inside) == "inside\n"
        assert machine.preload() == ""
        inside.kill()
    machine.clean()
    assert machine.preload() is None


def test_lease_starts_when_an_ordinary_user_has_locked_the_preload(machine: Machine) -> None:
    """They can keep an empty file where it is, no more: leases are entered, and a cleaner does not wait."""
    with machine.start(ENTER) as first:
        assert line(first) == "inside\n"
        ordinary = ("setpriv", "--reuid=64001", "--regid=64001", "--clear-groups")
        with machine.start(SQUAT, *ordinary) as squatter:
            assert line(squatter) == "held\n"
            with machine.start(ENTER) as second:
                assert line(second) == "inside\n"
                second.kill()
            first.kill()
            machine.clean()
            squatter.kill()
    machine.clean()
    assert machine.preload() is None


def test_preload_is_removed_when_a_daemon_starts_after_kills(machine: Machine) -> None:
    """Whoever made it could not remove it; the next daemon of root's does, and has no need of it."""
    with machine.start(ENTER) as inside:
        assert line(inside) == "inside\n"
        inside.kill()
    with workstation_at(machine.prefix) as station:
        assert machine.preload() == ""
        station.start("--simulate", "T4")
        assert machine.preload() is None
        assert station.ok("run", "--gpu-mem", "1", "--", "cat", "/etc/ld.so.preload")
        assert machine.preload() == ""
        station.ok("daemon", "--stop")
        assert machine.preload() is None


ENTER_WITH_INSTANCE = """
import os, stat, sys
from pathlib import Path
from fenka.isolation import sandbox
lease = Path(sys.argv[1])
devices = lease / "caps"
devices.mkdir()
for minor in (1, 2, 30, 31, 39):
    os.mknod(devices / f"nvidia-cap{minor}", stat.S_IFCHR | 0o444, os.makedev(1, 3))
own = devices / "nvidia-cap30", devices / "nvidia-cap31"
sandbox.enter(sandbox.LeaseMounts(lease, Path(sys.argv[2]), capabilities=own))
left = sorted(os.listdir(devices))
with open(own[0], "rb") as file:
    print("inside", *left, file.read(1) == b"", flush=True)
input()
"""


def test_lease_sees_only_the_device_files_of_its_own_instances(machine: Machine) -> None:
    """It can open them; outside all are there as before."""
    with machine.start(ENTER_WITH_INSTANCE) as inside:
        assert line(inside) == "inside nvidia-cap30 nvidia-cap31 True\n"
        assert len(list((machine._lease / "caps").iterdir())) == 5
        inside.kill()


ENTER_WITHOUT_VENDOR = """
import os, sys
from pathlib import Path
from fenka.isolation import sandbox
lease = Path(sys.argv[1])
vendors = Path("/etc/OpenCL/vendors")
vendors.mkdir(parents=True)
(vendors / "nvidia.icd").write_text("libnvidia-opencl.so.1")
(vendors / "pocl.icd").write_text("libpocl.so.2")
(vendors / "intel.icd").symlink_to("../elsewhere")
(vendors / "more").mkdir()
library = lease / "libnvidia-opencl.so.550.54.14"
library.write_text("ELF")
gone = lease / "gone"
sandbox.enter(sandbox.LeaseMounts(lease, Path(sys.argv[2]), blocked=(library, gone),
    unlisted=(vendors / "nvidia.icd",)))
print("inside", *sorted(os.listdir(vendors)), (vendors / "pocl.icd").read_text(), len(library.read_bytes()),
    os.readlink(vendors / "intel.icd"), os.access(vendors, os.W_OK), flush=True)
input()
"""


def test_lease_lacks_the_files_of_drivers_that_are_not_limited(machine: Machine) -> None:
    """Other vendors' files stay, also links and directories; outside all are there as before."""
    with machine.start(ENTER_WITHOUT_VENDOR) as inside:
        assert line(inside) == "inside intel.icd more pocl.icd libpocl.so.2 0 ../elsewhere False\n"
        assert (machine._lease / "libnvidia-opencl.so.550.54.14").read_text() == "ELF"
        inside.kill()
