"""A machine of its own, in namespaces, with root's daemon and several users."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fire.machine import HERE, NAMESPACES, REPOSITORY

ALICE, BOB = 61001, 61002
STAFF = 61100

ISOLATE = """
import sys
from pathlib import Path
from fire.machine import isolate_files
isolate_files()
with open("/etc/passwd", "a") as users, open("/etc/group", "a") as groups:
    users.write("alice:x:61001:61001::/:/bin/sh\\nbob:x:61002:61002::/:/bin/sh\\n")
    groups.write("alice:x:61001:\\nbob:x:61002:\\nstaff-of-fenka:x:61100:bob\\n")
Path("/etc/fenka").mkdir(exist_ok=True)
print("ready", flush=True)
sys.stdin.read()
"""
"""The machine around it is not changed. bob is a member of group staff-of-fenka."""

PYTHON = str(HERE / Path(sys.executable).relative_to(REPOSITORY))
HOLD = [PYTHON, str(HERE / "tests/programs/hold.py")]


@dataclass
class SharedMachine:
    """Runs commands of root and of users."""

    pid: int
    programs: list[subprocess.Popen[str]] = field(default_factory=list)

    def words(self, uid: int, *words: str) -> list[str]:
        """Return a command of a user inside."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--wd=/"]
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups"] if uid else []
        return [*enter, *become, *words]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that matter to commands."""
        kept = ("PATH", "LANG")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        return environment | {
            "HOME": "/tmp",
            "TZ": "Europe/Berlin",
            "PYTHONPATH": f"{HERE}/src:{HERE}",
        }

    def fenka(self, uid: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a user's command to its end."""
        return subprocess.run(
            self.words(uid, PYTHON, "-m", "fenka", *words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def ok(self, uid: int, *words: str) -> str:
        """Run a command that must succeed."""
        result = self.fenka(uid, *words)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def hold(self, uid: int, *options: str) -> subprocess.Popen[str]:
        """Start a user's program, which holds its slice until it is ended."""
        words = [PYTHON, "-m", "fenka", "run", *options, "--", *HOLD, "1"]
        program = subprocess.Popen(
            self.words(uid, *words),
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.programs.append(program)
        return program

    def jobs(self) -> dict[str, Any]:
        """Return all jobs by name."""
        return {job["name"]: job for job in json.loads(self.ok(0, "ps", "-o", "json"))}

    def write(self, path: str, content: str) -> None:
        """Write a file of root's."""
        words = self.words(0, "sh", "-c", 'cat > "$1"', "sh", path)
        subprocess.run(words, input=content, text=True, check=True)

    def read(self, path: str) -> str:
        """Return a file's content."""
        return subprocess.run(
            self.words(0, "cat", path), capture_output=True, text=True, check=True
        ).stdout

    def run(self, script: str) -> None:
        """Run a shell's script as root."""
        subprocess.run(self.words(0, "sh", "-c", script), check=True)

    def lives(self, pid: int) -> bool:
        """Return whether a process runs; a zombie does not."""
        script = f"grep -qs '^State:.[^ZX]' /proc/{pid}/status"
        return not subprocess.run(self.words(0, "sh", "-c", script), check=False).returncode

    def signal_daemon(self, name: str) -> None:
        """Send root's daemon a signal."""
        self.run(f'kill -{name} "$(cat /run/fenka/daemon.lock)"')


@contextlib.contextmanager
def shared_machine() -> Iterator[SharedMachine]:
    """Provide a machine without a daemon. Skip the test where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("a machine of several users takes root")
    words = ["unshare", *NAMESPACES, sys.executable, "-c", ISOLATE]
    with subprocess.Popen(
        words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        machine: SharedMachine | None = None
        try:
            if holder.stdout.readline() != "ready\n":
                pytest.skip("no namespaces here")
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
            machine = SharedMachine(int(children))
            yield machine
        finally:
            holder.stdin.close()
            holder.wait()
            for program in machine.programs if machine else ():
                program.communicate()
