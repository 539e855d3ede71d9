"""Machines for engines of containers: namespaces with their own /run, /etc/cdi and storage, without network.

Each has root's daemon with a simulated card, and one image. Nothing of it reaches the machine's own engines.
"""

import abc
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from e2e.image_files import image_of
from e2e.machine import ClusterError

ROOT = Path(__file__).parent.parent
IMAGE = "localhost/slice:1"
ARCHIVE = "/run/image.tar"
"""The image on the machine, where every user can read it."""
CARDS = "T4"
TREE = "/run/fenka/simulated/host-tree/dev"
"""The device nodes of simulated cards, which no driver serves."""

NODES = ("--device", "example.com/nodes=all")
"""The option by which a container has them."""

ALICE = 61001
UNSHARE = ("unshare", "--mount", "--net", "--propagation", "private")

_SETUP = """
set -e
mount -t tmpfs none /run
mkdir -p /etc/cdi /etc/fenka /var/lib/fenka /var/lib/containers /run/lock /run/alice /run/user/61001
for directory in /etc/cdi /etc/fenka /var/lib/fenka /var/lib/containers; do
    mount -t tmpfs -o mode=755 none $directory
done
if [ "$2" = 2 ]; then
    umount -l /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup
else
    # crun knows no hybrid of both versions of control groups.
    umount /sys/fs/cgroup/unified 2>/dev/null || true
fi
ip link set lo up
cp /etc/passwd /run/passwd && echo "alice:x:61001:61001::/run/alice:/bin/sh" >> /run/passwd
echo "alice:300000:65536" > /run/subuid
cp /etc/group /run/group && echo "alice:x:61001:" >> /run/group
touch /etc/subuid /etc/subgid
mount --bind /run/passwd /etc/passwd
mount --bind /run/group /etc/group
mount --bind /run/subuid /etc/subuid
mount --bind /run/subuid /etc/subgid
chown 61001:61001 /run/alice /run/user/61001
# Where root lacks CAP_SYS_RESOURCE, Podman's own limits cannot be set.
cat > /run/containers.conf <<END
[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
runtime = "$1"
cgroup_manager = "cgroupfs"
END
echo ready
exec sleep infinity
"""


def client(target: Path) -> Path:
    """Compile tests/programs/slice_client.c, which containers run."""
    program = target / "slice_client"
    compiler = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        f"{os.uname().machine}-linux-gnu.2.17",
    ]
    source = ROOT / "tests" / "programs" / "slice_client.c"
    subprocess.run([*compiler, "-O1", "-o", program, source, "-ldl"], check=True)
    return program


def image_archive(target: Path) -> Path:
    """Write an archive of an image with busybox, a shell of glibc and the client."""
    machine = os.uname().machine
    libraries = Path(f"/lib/{machine}-linux-gnu")
    linker = Path(
        "/lib64/ld-linux-x86-64.so.2" if machine == "x86_64" else "/lib/ld-linux-aarch64.so.1"
    )
    busybox = shutil.which("busybox")
    if busybox is None:
        raise ClusterError("there is no busybox: apt-get install busybox-static")
    files = {
        "bin/busybox": Path(busybox),
        "bin/dash": Path("/bin/dash"),
        "bin/slice_client": client(target),
        str(linker)[1:]: linker,
        **{
            f"{str(libraries)[1:]}/{name}": libraries / name
            for name in ("libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6")
        },
    }
    content = {path: file.read_bytes() for path, file in files.items()}
    config = {"Env": ["PATH=/bin:/usr/bin"]}
    archive = target / "image.tar"
    archive.write_bytes(image_of(IMAGE, config, content, ["sh", "sleep", "cat", "id", "ln", "rm"]))
    return archive


class ContainerMachine(abc.ABC):
    """Runs commands in the namespaces."""

    engine: str
    """The engine's command."""

    compose: str | Path
    """The command of Compose. compose_separator: between a container's project, service and number."""

    compose_separator: str

    def __init__(self, runtime: str, *, only_cgroup2: bool = False) -> None:
        """runtime: runc or crun. only_cgroup2: hide control groups of version 1."""
        self.runtime, self.only_cgroup2 = runtime, only_cgroup2
        self.environment = {**os.environ, "XDG_STATE_HOME": "/run/state"}
        self._holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", _SETUP, "sh", runtime, "2" if only_cgroup2 else ""],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout
        if self._holder.stdout.readline() != "ready\n":
            raise ClusterError("namespaces for containers cannot be made here")
        self.pid = self._holder.pid
        self.entry = ("nsenter", "-t", str(self.pid), "-m", "-n")

    def begin(self) -> None:  # noqa: B027
        """Start the engine, if it is a program of its own."""

    def run(
        self, *words: str | Path, user: int = 0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as root or another user."""
        entry, environment = [*self.entry], self.environment
        if user:
            entry += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            environment = environment | {
                "HOME": "/run/alice",
                "XDG_RUNTIME_DIR": f"/run/user/{user}",
                "USER": "alice",
            }
        defaults: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "text": True,
        }
        return subprocess.run(
            [*entry, *words], env=environment, check=False, cwd="/", **(defaults | options)
        )

    def command(self, *words: str | Path, user: int = 0) -> str:
        """Run a command of the engine that must succeed, and return its output."""
        done = self.run(*self._words(user), *words, user=user)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def container(self, *words: str, user: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a container to its end."""
        return self.run(*self._words(user), "run", "--rm", "-i", *words, user=user)

    def logs(self, name: str) -> str:
        """Return what a container has printed on both streams."""
        done = self.run(*self._words(0), "logs", name)
        return done.stdout + done.stderr

    def load(self, user: int = 0) -> None:
        """Give the engine the image."""
        self.command("load", "-q", "-i", ARCHIVE, user=user)

    @abc.abstractmethod
    def remove(self, *names: str, user: int = 0) -> None:
        """Remove containers at once."""

    def remove_containers(self) -> None:
        """Remove root's containers, and wait until no lease is left."""
        self._remove_all()
        eventually(lambda: not self.run("ls", "/run/fenka/leases").stdout)

    def _words(self, user: int) -> tuple[str, ...]:  # noqa: ARG002
        """Return the first words of a command of the engine. user: whose command it is."""
        return (self.engine,)

    def _remove_all(self) -> None:
        containers = self.command("ps", "-aq").split()
        if containers:
            self.remove(*containers)

    def processes(self, name: str = "") -> list[int]:
        """Return the processes of this machine, outside of containers; of one program if it is named."""
        found = list[int]()
        space = os.stat(f"/proc/{self.pid}/ns/mnt").st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                its_name = (process / "comm").read_text().rstrip("\n")
                if (process / "ns/mnt").stat().st_ino == space and name[:15] in ("", its_name):
                    found.append(int(process.name))
        return [pid for pid in found if pid != self.pid]

    def kill(self, name: str = "") -> None:
        """Kill all processes of a program on this machine, outside of containers; without a name all."""
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self.processes(name))

    def fenka(self, *words: str) -> str:
        """Run a command of fenka's as root that must succeed, and return its output."""
        done = self.run(sys.executable, "-m", "fenka", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def make_nodes(self, major: int) -> None:
        """Make device nodes of two cards, which all users may open."""
        self.run("mkdir", "-p", TREE)
        for minor in ("0", "1"):
            self.run("mknod", "-m", "666", f"{TREE}/nvidia{minor}", "c", str(major), minor)

    def give_nodes(self) -> None:
        """Let CDI give containers the machine's nodes as a driver's, as NODES."""
        names = [f"nvidia{minor}" for minor in range(2)]
        nodes = [{"path": f"/dev/{name}", "hostPath": f"{TREE}/{name}"} for name in names]
        device = {"name": "all", "containerEdits": {"deviceNodes": nodes}}
        content = {"cdiVersion": "0.5.0", "kind": "example.com/nodes", "devices": [device]}
        self.run("tee", "/etc/cdi/nodes.json", input=json.dumps(content), stdin=None)

    def start_daemon(self, *options: str) -> None:
        """Start root's daemon."""
        self.fenka("daemon", "--background", "--simulate", CARDS, *options)

    def kill_daemon(self) -> None:
        """Kill it."""
        pid = int(self.run("cat", "/run/fenka/daemon.lock").stdout)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists())

    def jobs(self) -> dict[str, Any]:
        """Return the jobs by name."""
        return {job["name"]: job for job in json.loads(self.fenka("ps", "-o", "json"))}

    def close(self) -> None:
        """End all."""
        for end in (self._remove_all, lambda: self.fenka("daemon", "--stop", "--force")):
            with contextlib.suppress(AssertionError):
                end()
        self._holder.kill()
        self._holder.wait()


class PodmanMachine(ContainerMachine):
    """A machine with Debian's Podman."""

    engine = "podman"
    compose, compose_separator = Path(sys.prefix) / "bin" / "podman-compose", "_"

    def __init__(self, runtime: str, *, only_cgroup2: bool = False) -> None:
        super().__init__(runtime, only_cgroup2=only_cgroup2)
        self.environment["CONTAINERS_CONF"] = "/run/containers.conf"

    def _words(self, user: int) -> tuple[str, ...]:
        # Users may not mount overlays everywhere.
        storage = ("--storage-driver", "vfs") if user else ()
        return "podman", *storage

    def remove(self, *names: str, user: int = 0) -> None:
        """Remove containers at once."""
        self.command("rm", "-f", "-t", "0", *names, user=user)

    def close(self) -> None:
        """End all."""
        # Rootless Podman keeps a process in its namespaces.
        pid = self.run("cat", f"/run/user/{ALICE}/libpod/tmp/pause.pid").stdout
        if pid.isdecimal():
            os.kill(int(pid), signal.SIGKILL)
        super().close()


@contextlib.contextmanager
def serving(machine: ContainerMachine, archive: Path, *options: str) -> Iterator[ContainerMachine]:
    """Let containers of a machine have slices, until it is closed. options: its daemon's."""
    try:
        machine.begin()
        machine.run("cp", archive, ARCHIVE)
        machine.load()
        machine.start_daemon(*options)
        machine.fenka("containers", "on")
        yield machine
    finally:
        machine.close()


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true answer. A test that waits in vain is ended by pytest's time limit."""
    while not (answer := condition()):
        time.sleep(0.05)
    return answer
