"""A machine of the cluster, seen from outside: switch it on and off, run programs in it."""

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

# First of all into the machine's cgroup: entering its namespaces does not do that.
ENTER = 'for each in /sys/fs/cgroup/*/cgroup.procs; do echo 0 > "$each"; done; '


class ClusterError(Exception):
    """Something did not come up or did not answer; the text says where to look."""


def wait_until(
    description: str, check: Callable[[], object], seconds: float = 30, log: Path | None = None
) -> float:
    """Ask until the answer is true; the seconds it took. ClusterError says what was waited for."""
    began = time.monotonic()
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
    """Where the log is, and its last lines."""
    if log is None or not log.exists():
        return ""
    last = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"; {log} ends with:", *last])


class Machine:
    """One machine: a set of namespaces with a first process, an address, and daemons."""

    def __init__(self, state: Path, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.files = MachineFiles(state, name)
        self.logs = state / "logs" / name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}>"

    # Power.

    def power_on(self, owner: int | None = None) -> None:
        """Make its namespaces and its file system. It ends with the process `owner`, if given."""
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
            wait_until(f"{self.name}: its file system", is_ready, 20, log)
        except ChildProcessError as error:
            raise ClusterError(f"{self.name} could not be started{tail(log)}") from error

    def power_off(self) -> None:
        """End all its processes at once, as when the mains fail. Its disk stays."""
        processes = self.files.processes()
        if not processes:
            return
        supervisor, first = processes
        if supervisor.alive():
            os.kill(supervisor.pid, signal.SIGTERM)
            wait_until(f"{self.name}: its end", lambda: not supervisor.alive())
        elif first.alive():  # somebody killed the supervisor, this instant
            os.kill(first.pid, signal.SIGKILL)
            wait_until(f"{self.name}: its end", lambda: not first.alive())
        if self.files.record.exists():
            clean_up(self.files)

    def is_on(self) -> bool:
        """Whether its first process runs."""
        processes = self.files.processes()
        return bool(processes and processes[1].alive())

    @property
    def first_process(self) -> int:
        """The process id, on this machine, of the first process there."""
        processes = self.files.processes()
        if not processes or not processes[1].alive():
            raise ClusterError(f"{self.name} is switched off")
        return processes[1].pid

    # Running programs.

    def environment(self) -> dict[str, str]:
        """The environment of programs in the cluster: this process's with the programs' PATH."""
        path = [*map(str, directories()), "/usr/local/sbin", "/usr/sbin", "/sbin"]
        kubeconfig = str(self.files.state / "pki" / "admin.kubeconfig")
        return os.environ | {
            "PATH": ":".join([*path, os.environ.get("PATH", "/usr/bin:/bin")]),
            "KUBECONFIG": kubeconfig,
        }

    def command(self, *argv: str) -> list[str]:
        """The command that runs argv in all the machine's namespaces; give it environment()."""
        inside = ["sh", "-c", ENTER + 'exec "$@"', "sh", *argv]
        spaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup")
        return ["nsenter", "--target", str(self.first_process), *spaces, "--", *inside]

    def network_command(self, *argv: str) -> list[str]:
        """The command that runs argv with the machine's network only: files are this machine's."""
        return ["nsenter", "--target", str(self.first_process), "--net", "--", *argv]

    def run(self, *argv: str, stdin: str | None = None, timeout: float = 60) -> str:
        """Run a program in the machine, in `/`; what it printed. ClusterError when it fails."""
        return run(self.command(*argv), self.environment(), stdin, timeout)

    def read(self, path: str) -> str:
        """A file of the machine's file system, its /proc and /sys included."""
        return Path(f"/proc/{self.first_process}/root", path.lstrip("/")).read_text()

    # Daemons.

    def log(self, daemon: str) -> Path:
        """The daemon's output, of all its lives."""
        return self.logs / f"{daemon}.log"

    def start(
        self, daemon: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a program that stays; its parent is the machine's first process."""
        record = self.files.folder / f"{daemon}.json"
        record.write_text(json.dumps({"argv": list(argv), "environment": dict(environment or {})}))
        # setsid forks, and whoever it leaves behind belongs to the machine's first process.
        script = ENTER + 'echo $$ > "$1"; exec >> "$2" 2>&1 < /dev/null; shift 2; exec "$@"'
        detached = ["setsid", "--fork", "sh", "-c", script, "sh"]
        pid_file = self.pid_file(daemon)
        pid_file.unlink(missing_ok=True)
        run(
            self.command(*detached, str(pid_file), str(self.log(daemon)), *argv),
            self.environment() | dict(environment or {}),
        )
        wait_until(f"{self.name}: {daemon}", lambda: pid_file.exists() and pid_file.read_text(), 5)

    def pid_file(self, daemon: str) -> Path:
        """Holds the daemon's process id inside the machine."""
        return self.files.folder / f"{daemon}.pid"

    def pid(self, daemon: str) -> int:
        """The daemon's process id inside the machine; ClusterError if it was never started."""
        try:
            return int(self.pid_file(daemon).read_text())
        except FileNotFoundError as error:
            raise ClusterError(f"{self.name} has no {daemon}") from error

    def runs(self, daemon: str) -> bool:
        """Whether the daemon is alive."""
        try:
            self.read(f"/proc/{self.pid(daemon)}/cmdline")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return True

    def kill(self, daemon: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a daemon; after SIGKILL or SIGTERM wait until it is gone."""
        if not self.runs(daemon):
            return
        self.run("kill", f"-{int(number)}", str(self.pid(daemon)))
        if number in {signal.SIGKILL, signal.SIGTERM}:
            wait_until(f"{self.name}: the end of {daemon}", lambda: not self.runs(daemon))

    def start_again(self, daemon: str) -> None:
        """Start a daemon as it was started last time."""
        record = json.loads((self.files.folder / f"{daemon}.json").read_text())
        self.start(daemon, record["argv"], record["environment"])

    def restart(self, daemon: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a daemon, by default the hard way, and start it again."""
        self.kill(daemon, number)
        self.start_again(daemon)

    def daemons(self) -> list[str]:
        """Those that were started since the machine exists."""
        return sorted(each.stem for each in self.files.folder.glob("*.pid"))


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout: float = 60,
) -> str:
    """Run a program to its end; what it printed. ClusterError carries what it complained about."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"no end after {timeout:g} s: {' '.join(command)}") from error
    if done.returncode:
        complaint = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ClusterError(complaint)
    return done.stdout


def missing_programs(*names: str) -> list[str]:
    """Those that are not installed."""
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    return [name for name in names if not shutil.which(name, path=path)]
