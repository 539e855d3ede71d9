"""Keeps one machine: makes its cgroup and namespaces, and leaves nothing of them behind.

``python -m e2e.supervisor STATE NAME [OWNER]`` runs beside each machine. It ends the machine on SIGTERM, when
the machine's first process ends, and when OWNER (a process id, usually pytest's) is gone: however that
happened. Should the supervisor itself be killed, the kernel ends the machine, and `down` removes the rest.
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
# What a kubelet sets for the whole kernel, whichever namespaces it runs in.
KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
# One kernel, so one record of its settings and of the machines that need them changed, whatever
# state directories their clusters have.
SHARED = Path("/run/fenka-e2e")
LOCK = Path("/run/fenka-e2e.lock")
NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup")


@dataclass(frozen=True)
class Process:
    """A process, named so that a later one with the same number is not taken for it."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Read its start time; ProcessLookupError when there is none."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError as error:
            raise ProcessLookupError(pid) from error
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Whether it still runs."""
        with contextlib.suppress(ProcessLookupError):
            return Process.of(self.pid) == self and state_of(self.pid) != "Z"
        return False


@dataclass(frozen=True)
class MachineFiles:
    """Where the files of one machine are."""

    state: Path
    name: str

    @property
    def folder(self) -> Path:
        """All of them."""
        return self.state / "machines" / self.name

    @property
    def record(self) -> Path:
        """Exists while the machine does: its supervisor and its first process."""
        return self.folder / "machine.json"

    @property
    def ready(self) -> Path:
        """Exists when its file system is complete."""
        return self.folder / "ready"

    @property
    def cgroup(self) -> str:
        """Its name in every hierarchy: no other cluster on this machine has it."""
        return f"fenka-e2e-{hashlib.sha256(str(self.state).encode()).hexdigest()[:6]}-{self.name}"

    @property
    def marker(self) -> Path:
        """Exists while the kernel's settings are changed for this machine."""
        return SHARED / "machines" / self.cgroup

    def processes(self) -> tuple[Process, Process] | None:
        """Keeper and first process, or None when the machine is off."""
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            return None
        return Process(**record["supervisor"]), Process(**record["first"])


def state_of(pid: int) -> str:
    """One letter, as in ps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error


def hierarchies() -> dict[str, str]:
    """The cgroup v1 hierarchies of this machine: folder name to mount options."""
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
    """One cgroup in every hierarchy; the machine sees it as the root of all cgroups."""
    for hierarchy in hierarchies():
        group = CGROUPS / hierarchy / files.cgroup
        group.mkdir(exist_ok=True)
        if hierarchy == "cpuset":
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (group / setting).write_text((CGROUPS / hierarchy / setting).read_text())


def enter_cgroups(files: MachineFiles) -> None:
    """Move this process into them."""
    for hierarchy in hierarchies():
        (CGROUPS / hierarchy / files.cgroup / "cgroup.procs").write_text("0")


def remove_cgroups(files: MachineFiles, seconds: float = 10) -> None:
    """Empty ones only: a cgroup stays busy for a moment after its last process."""
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
    """Remember what the kubelets are going to change, unless that is remembered already."""
    with exclusive_lock(LOCK):
        files.marker.parent.mkdir(parents=True, exist_ok=True)
        files.marker.touch()
        saved = SHARED / "kernel-settings.json"
        if not saved.exists():
            present = [each for each in KERNEL_SETTINGS if Path("/proc/sys", each).exists()]
            values = {each: Path("/proc/sys", each).read_text().strip() for each in present}
            saved.write_text(json.dumps(values))


def clean_up(files: MachineFiles) -> None:
    """After the last process of a machine: its cgroups, and with the last machine the settings."""
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
    """Start the machine's first process in namespaces of its own."""
    memory = files.folder / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    config = {
        "name": files.name,
        "memory": str(memory),
        "disk": str(files.folder / "disk"),
        "ready": str(files.ready),
        "cgroups": hierarchies(),
        # These change while the machine runs, and a copy-on-write view would not show it.
        "shared": [str(each) for each in (Path("/tmp"), files.state, cache(), REPOSITORY)],
    }
    (files.folder / "init.json").write_text(json.dumps(config))
    files.ready.unlink(missing_ok=True)
    first = [sys.executable, "-I", "-S", str(REPOSITORY / "e2e" / "init.py")]
    # Each ends with its parent: the supervisor, setpriv that becomes unshare, the first process.
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
    """Until one of them is gone."""
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
    """SIGTERM: leave by the front door, so that everything is put away."""
    raise SystemExit(0)


def main() -> None:
    """Keep one machine until it is to end."""
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
    """The kernel ends every process of a pid namespace with its first, before that one is gone."""
    with contextlib.suppress(ProcessLookupError):
        gone = os.pidfd_open(first.pid)
        if first.alive():
            signal.pidfd_send_signal(gone, signal.SIGKILL)
            select.select([gone], [], [])
    child.kill()
    child.wait()


if __name__ == "__main__":
    main()
