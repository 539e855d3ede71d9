"""Control a machine of the cluster from outside: switch it on and off, run programs in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2e.programs import directories
from e2e.supervisor import REPOSITORY, MachineFiles, clean_up

# Entering the namespaces does not enter the cgroups, so each program first joins the machine's cgroups.
ENTER = 'for each in /sys/fs/cgroup/*/cgroup.procs; do echo 0 > "$each"; done; '


class ClusterError(Exception):
    """A component did not start or did not answer; the text names its log."""


VIRTUAL = os.environ.get("FENKA_E2E_VIRTUAL", "")
"""The kind of the node that is a virtual machine (virtual_node.py); empty: none is."""

SLOWER = 10.0 if VIRTUAL else 1.0
"""All time limits are this many times longer, since a virtual machine is emulated."""

HANGS_AFTER_S = 240.0
"""The longest run of a program that is not stuck, on a machine that is busy with other work."""


def wait_until(
    description: str, check: Callable[[], object], seconds: float = 90, log: Path | None = None
) -> float:
    """Call `check` until it returns a true value, and return the seconds that it took.

    Args:
        description: the condition, for the error message.
        check: may raise ClusterError or AssertionError, which counts as false.
        seconds: the time limit, before SLOWER.
        log: a file whose last lines are added to the error message.

    Raises:
        ClusterError: the time limit has passed.
    """
    began = time.monotonic()
    seconds *= SLOWER
    error = ""
    while True:
        try:
            if check():
                return time.monotonic() - began
        except (ClusterError, AssertionError) as raised:
            error = f" ({raised})"
        if time.monotonic() - began > seconds:
            raise ClusterError(f"{description}: not within {seconds:g} s{error}{tail(log)}")
        time.sleep(0.1)


def tail(log: Path | None, lines: int = 8) -> str:
    """Return the path of the log and its last lines, or "" if there is no log."""
    if log is None or not log.exists():
        return ""
    last = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"; {log} ends with:", *last])


class Machine:
    """A set of namespaces with a first process, an address and daemons."""

    def __init__(self, state: Path, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.files = MachineFiles(state, name)
        self.logs = state / "logs" / name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}>"

    # Power.

    def power_on(self, owner: int | None = None) -> None:
        """Create its namespaces and file system. The machine ends with the process `owner`, if given."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / "machine.log"
        command = [sys.executable, "-m", "e2e.supervisor", str(self.files.state), self.name]
        with log.open("ab") as output:
            supervisor = subprocess.Popen(
                command + ([str(owner)] if owner else []),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def is_ready() -> bool:
            if supervisor.poll() is not None:
                raise ChildProcessError
            return self.files.ready.exists() and self.is_on()

        try:
            wait_until(f"{self.name}: its file system", is_ready, log=log)
        except ChildProcessError as error:
            raise ClusterError(f"{self.name} could not be started{tail(log)}") from error

    def power_off(self) -> None:
        """End all its processes at once, as in a power failure. Its disk is kept."""
        processes = self.files.processes()
        if not processes:
            return
        supervisor, first = processes
        if supervisor.alive():
            os.kill(supervisor.pid, signal.SIGTERM)
            wait_until(f"{self.name}: its end", lambda: not supervisor.alive())
        elif first.alive():  # the supervisor was killed just now
            os.kill(first.pid, signal.SIGKILL)
            wait_until(f"{self.name}: its end", lambda: not first.alive())
        if self.files.record.exists():
            clean_up(self.files)

    def is_on(self) -> bool:
        """Return whether its first process runs."""
        processes = self.files.processes()
        return bool(processes and processes[1].alive())

    @property
    def first_process(self) -> int:
        """The PID of its first process in this machine's PID namespace."""
        processes = self.files.processes()
        if not processes or not processes[1].alive():
            raise ClusterError(f"{self.name} is switched off")
        return processes[1].pid

    # Running programs.

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the cluster's programs on PATH."""
        path = [*map(str, directories()), "/usr/local/sbin", "/usr/sbin", "/sbin"]
        kubeconfig = str(self.files.state / "pki" / "admin.kubeconfig")
        return os.environ | {
            "PATH": ":".join([*path, os.environ.get("PATH", "/usr/bin:/bin")]),
            "KUBECONFIG": kubeconfig,
            # Not the daemon of the machine below, whose socket is seen here, too.
            "FENKA_WORLD": "cluster",
        }

    def command(self, *argv: str) -> list[str]:
        """Return a command that runs argv in all the machine's namespaces; run it with environment()."""
        inside = ["sh", "-c", ENTER + 'exec "$@"', "sh", *argv]
        spaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup")
        return ["nsenter", "--target", str(self.first_process), *spaces, "--", *inside]

    def network_command(self, *argv: str) -> list[str]:
        """Return a command that runs argv in the machine's network, but with this machine's files."""
        return ["nsenter", "--target", str(self.first_process), "--net", "--", *argv]

    def run(self, *argv: str, stdin: str | None = None, timeout: float = HANGS_AFTER_S) -> str:
        """Run a program in the machine, in `/`, and return its output. Raise ClusterError if it fails."""
        return run(self.command(*argv), self.environment(), stdin, timeout)

    def read(self, path: str) -> str:
        """Return the text of a file of the machine, including its /proc and /sys."""
        return Path(f"/proc/{self.first_process}/root", path.lstrip("/")).read_text()

    # Daemons.

    def log(self, daemon: str) -> Path:
        """Return the file with the daemon's output since its first start."""
        return self.logs / f"{daemon}.log"

    def start(
        self, daemon: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a daemon as a child of the machine's first process."""
        record = self.files.folder / f"{daemon}.json"
        record.write_text(json.dumps({"argv": list(argv), "environment": dict(environment or {})}))
        # setsid forks, and the orphaned child is adopted by the machine's first process.
        script = ENTER + 'echo $$ > "$1"; exec >> "$2" 2>&1 < /dev/null; shift 2; exec "$@"'
        detached = ["setsid", "--fork", "sh", "-c", script, "sh"]
        pid_file = self.pid_file(daemon)
        pid_file.unlink(missing_ok=True)
        run(
            self.command(*detached, str(pid_file), str(self.log(daemon)), *argv),
            self.environment() | dict(environment or {}),
        )
        wait_until(f"{self.name}: {daemon}", lambda: pid_file.exists() and pid_file.read_text())

    def pid_file(self, daemon: str) -> Path:
        """Return the file with the daemon's PID inside the machine."""
        return self.files.folder / f"{daemon}.pid"

    def pid(self, daemon: str) -> int:
        """Return the daemon's PID inside the machine. Raise ClusterError if it was never started."""
        try:
            return int(self.pid_file(daemon).read_text())
        except FileNotFoundError as error:
            raise ClusterError(f"{self.name} has no {daemon}") from error

    def runs(self, daemon: str) -> bool:
        """Return whether the daemon is alive."""
        try:
            self.read(f"/proc/{self.pid(daemon)}/cmdline")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return True

    def kill(self, daemon: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a daemon; after SIGKILL or SIGTERM wait until it has ended."""
        if not self.runs(daemon):
            return
        self.run("kill", f"-{int(number)}", str(self.pid(daemon)))
        if number in {signal.SIGKILL, signal.SIGTERM}:
            wait_until(f"{self.name}: the end of {daemon}", lambda: not self.runs(daemon))

    def start_again(self, daemon: str) -> None:
        """Start a daemon with the command and environment of its last start."""
        record = json.loads((self.files.folder / f"{daemon}.json").read_text())
        self.start(daemon, record["argv"], record["environment"])

    def restart(self, daemon: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a daemon, by default with SIGKILL, and start it again."""
        self.kill(daemon, number)
        self.start_again(daemon)

    def daemons(self) -> list[str]:
        """Return the daemons that were started since the machine was switched on."""
        return sorted(each.stem for each in self.files.folder.glob("*.pid"))


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout: float = HANGS_AFTER_S,
) -> str:
    """Run a program and return its output. Raise ClusterError with its error output if it fails."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout * SLOWER,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"not finished after {timeout:g} s: {' '.join(command)}") from error
    if done.returncode:
        complaint = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ClusterError(complaint)
    return done.stdout


PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
    "ip": "iproute2",
    "iptables": "iptables",
    "openssl": "openssl",
    "runc": "runc",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "busybox": "busybox-static",
    "gcc": "gcc",
}
"""Debian's packages of the programs that a cluster and its images need."""


def require_programs() -> None:
    """Raise ClusterError if programs are not installed, with what installs them."""
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    missing = [name for name in PACKAGES if not shutil.which(name, path=path)]
    if missing:
        packages = dict.fromkeys(PACKAGES[name] for name in missing)
        raise ClusterError(
            f"not installed: {', '.join(missing)}: apt install --no-install-recommends {' '.join(packages)}"
        )
