"""Create the cgroups and namespaces of one machine, and remove them when it ends.

``python -m e2e.supervisor STATE NAME [OWNER]`` runs beside each machine. It ends the machine on SIGTERM, when
the machine's first process ends, and when OWNER (a process ID, usually pytest's) ends for any reason. If the
supervisor itself is killed, the kernel ends the machine, and `down` removes the rest.
"""

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.programs import cache, exclusive_lock

REPOSITORY = Path(__file__).parent.parent
CGROUPS = Path("/sys/fs/cgroup")
# Settings that a kubelet changes for the whole kernel, regardless of its namespaces.
KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
# All clusters share one kernel. So one folder, independent of their state directories, records the kernel's
# original settings and the machines that need them changed.
SHARED = Path("/run/fenka-e2e")
LOCK = Path("/run/fenka-e2e.lock")
NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup")


@dataclass(frozen=True)
class Process:
    """A process, identified by PID and start time, so that a reused PID is not mistaken for it."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the process with this PID. Raise ProcessLookupError if there is none."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError as error:
            raise ProcessLookupError(pid) from error
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Return whether it still runs."""
        with contextlib.suppress(ProcessLookupError):
            return Process.of(self.pid) == self and state_of(self.pid) != "Z"
        return False


@dataclass(frozen=True)
class MachineFiles:
    """The paths of one machine's files."""

    state: Path
    name: str

    @property
    def folder(self) -> Path:
        """The folder of all files."""
        return self.state / "machines" / self.name

    @property
    def record(self) -> Path:
        """The file that names supervisor and first process; it exists while the machine does."""
        return self.folder / "machine.json"

    @property
    def ready(self) -> Path:
        """A file that exists once the machine's file system is complete."""
        return self.folder / "ready"

    @property
    def cgroup(self) -> str:
        """The cgroup's name in every hierarchy, unique among the clusters on this machine."""
        return f"fenka-e2e-{hashlib.sha256(str(self.state).encode()).hexdigest()[:6]}-{self.name}"

    @property
    def marker(self) -> Path:
        """A file that exists while this machine needs the changed kernel settings."""
        return SHARED / "machines" / self.cgroup

    def processes(self) -> tuple[Process, Process] | None:
        """Return supervisor and first process, or None if the machine is off."""
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            return None
        return Process(**record["supervisor"]), Process(**record["first"])


def state_of(pid: int) -> str:
    """Return the state of a process as one letter, as in ps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error


def hierarchies() -> dict[str, str]:
    """Return the mount options of this machine's cgroup v1 hierarchies by folder name."""
    options_by_name = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split()
        if kind == "cgroup" and Path(target).parent == CGROUPS:
            chosen = [each for each in options.split(",") if each not in {"rw", "relatime"}]
            options_by_name[Path(target).name] = ",".join(
                each for each in chosen if not each.startswith(("no", "release_agent"))
            )
            if options_by_name[Path(target).name].startswith("name="):
                options_by_name[Path(target).name] = "none," + options_by_name[Path(target).name]
    return options_by_name


def make_cgroups(files: MachineFiles) -> None:
    """Create one cgroup in every hierarchy; the machine sees it as the root."""
    for hierarchy in hierarchies():
        group = CGROUPS / hierarchy / files.cgroup
        group.mkdir(exist_ok=True)
        if hierarchy == "cpuset":
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (group / setting).write_text((CGROUPS / hierarchy / setting).read_text())


def enter_cgroups(files: MachineFiles) -> None:
    """Move this process into the machine's cgroups."""
    for hierarchy in hierarchies():
        (CGROUPS / hierarchy / files.cgroup / "cgroup.procs").write_text("0")


def remove_cgroups(files: MachineFiles, seconds: float = 10) -> None:
    """Remove the machine's cgroups; retry, since a cgroup stays busy briefly after its last process."""
    until = time.monotonic() + seconds
    while True:
        left = [CGROUPS / each / files.cgroup for each in hierarchies()]
        left = [group for group in left if group.exists()]
        for group in left:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        if not any(group.exists() for group in left):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"these cgroups are still in use: {', '.join(map(str, left))}")
        time.sleep(0.05)


def save_kernel_settings(files: MachineFiles) -> None:
    """Record the settings that kubelets change, unless they are recorded already."""
    with exclusive_lock(LOCK):
        files.marker.parent.mkdir(parents=True, exist_ok=True)
        files.marker.touch()
        saved = SHARED / "kernel-settings.json"
        if not saved.exists():
            present = [each for each in KERNEL_SETTINGS if Path("/proc/sys", each).exists()]
            values = {each: Path("/proc/sys", each).read_text().strip() for each in present}
            saved.write_text(json.dumps(values))


def clean_up(files: MachineFiles) -> None:
    """Remove the machine's cgroups; after the last machine, also restore the kernel settings."""
    remove_cgroups(files)
    files.record.unlink(missing_ok=True)
    files.ready.unlink(missing_ok=True)
    with exclusive_lock(LOCK):
        files.marker.unlink(missing_ok=True)
        if any((SHARED / "machines").iterdir()):
            return
        saved = SHARED / "kernel-settings.json"
        for name, value in json.loads(saved.read_text()).items():
            Path("/proc/sys", name).write_text(value)
        shutil.rmtree(SHARED)


def unshare(files: MachineFiles) -> tuple[subprocess.Popen[bytes], Process]:
    """Start the machine's first process in new namespaces."""
    memory = files.folder / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    config = {
        "name": files.name,
        "memory": str(memory),
        "disk": str(files.folder / "disk"),
        "ready": str(files.ready),
        "cgroups": hierarchies(),
        # These are shared, since a copy-on-write view would not show changes made while the machine runs.
        "shared": [str(each) for each in (Path("/tmp"), files.state, cache(), REPOSITORY)],
    }
    (files.folder / "init.json").write_text(json.dumps(config))
    files.ready.unlink(missing_ok=True)
    first = [sys.executable, "-I", "-S", str(REPOSITORY / "e2e" / "init.py")]
    # Each process ends with its parent: the supervisor, setpriv (which becomes unshare), the first process.
    command = ["setpriv", "--pdeathsig", "KILL", "--"]
    command += ["unshare", *NAMESPACES, "--fork", "--kill-child", "--"]
    child = subprocess.Popen(
        [*command, *first, str(files.folder / "init.json")],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: enter_cgroups(files),  # noqa: PLW1509 - the supervisor has one thread
    )
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    while not children.read_text().split():
        if child.poll() is not None:
            raise ChildProcessError(f"unshare ended with {child.returncode}")
        time.sleep(0.005)
    return child, Process.of(int(children.read_text().split()[0]))


def wait_for_end(*processes: Process) -> None:
    """Wait until one of the processes has ended."""
    waiting = select.poll()
    for process in processes:
        try:
            waiting.register(os.pidfd_open(process.pid), select.POLLIN)
        except ProcessLookupError:
            return
        if not process.alive():
            return
    waiting.poll()


def stop(_number: int, _frame: object) -> None:
    """Handle SIGTERM: raise SystemExit, so that `finally` blocks clean up."""
    raise SystemExit(0)


def main() -> None:
    """Run one machine until it is stopped."""
    files = MachineFiles(Path(sys.argv[1]), sys.argv[2])
    owners = [Process.of(int(pid)) for pid in sys.argv[3:]]
    signal.signal(signal.SIGTERM, stop)
    save_kernel_settings(files)
    make_cgroups(files)
    child, first = unshare(files)
    try:
        record = {"supervisor": asdict(Process.of(os.getpid())), "first": asdict(first)}
        temporary = files.record.with_suffix(".new")
        temporary.write_text(json.dumps(record))
        temporary.rename(files.record)
        wait_for_end(first, *owners)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(child, first)
        clean_up(files)


def end(child: subprocess.Popen[bytes], first: Process) -> None:
    """End the first process and, by it, all processes of its PID namespace.

    The kernel ends the other processes before the first one is gone.
    """
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(first.pid)
        if first.alive():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [])
    child.kill()
    child.wait()


if __name__ == "__main__":
    main()
