"""A runtime as small as it can be: a process in its own namespaces, and the hook as runtimes call it."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fenka import native, procfs
from fenka.isolation.sandbox import DRIVER, SHIM
from tests.workstation.conftest import HOLD, Program, Workstation, eventually

HOOK = native.DIRECTORY / "fenka-hook"

_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
_INIT = f"""
mount -t tmpfs none /run && mkdir /run/fenka && mount -t proc proc /proc || exit 9
$PLACE
echo made
read go
$EXEC env LD_PRELOAD={SHIM} LD_LIBRARY_PATH={DRIVER} "$@"
"""
PLACE = "mount -t tmpfs -o mode=0755 fenka-lease /run/fenka"


class MiniContainer:
    """A container that waits for its start. Its first process becomes tests/programs/hold.py."""

    def __init__(
        self,
        station: Workstation,
        mib: int = 1000,
        *environment: str,
        id: str = "",
        place: str = PLACE,
        child: bool = False,
        command: Sequence[str] = (),
    ) -> None:
        """Args:
        station: Whose daemon serves it.
        mib: What its program allocates.
        environment: Its variables.
        id: The engine's id of it; empty for a new one.
        place: The shell command that makes the place of the lease.
        child: Whether its first process stays a shell without the shim, as a static one would.
        command: Its program, in place of tests/programs/hold.py.
        """
        self.station, self.id = station, id or secrets.token_hex(32)
        self.bundle = Path(tempfile.mkdtemp(prefix="fenka-bundle-"))
        weakref.finalize(self, shutil.rmtree, self.bundle, ignore_errors=True)
        self.config: dict[str, Any] = {"process": {"args": ["hold"], "env": [*environment]}}
        script = _INIT.replace("$PLACE", place).replace("$EXEC", "" if child else "exec")
        process = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", script, "sh", *(command or [*HOLD, str(mib)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.program = Program(process, station.root)
        station.programs.append(self.program)
        assert process.stdout
        assert process.stdout.readline() == "made\n"
        (self.init,) = procfs.children(process.pid)

    @property
    def name(self) -> str:
        """The job's."""
        return f"c-{self.id[:12]}"

    def state(self, **fields: Any) -> dict[str, Any]:
        """Return the OCI state."""
        return {
            # Keys that are not the state's own come first, as a user may choose them.
            "annotations": {"pid": "1", "bundle": "/etc", "a": '"pid":1,"bundle":"/etc"'},
            "ociVersion": "1.0.2",
            "id": self.id,
            "status": "creating",
            "pid": self.init,
            "bundle": str(self.bundle),
            **fields,
        }

    def start_hook(self, device: str = "slice=4", **fields: Any) -> subprocess.Popen[str]:
        """Start the hook. fields: of the state, instead of its own."""
        (self.bundle / "config.json").write_text(json.dumps(self.config))
        hook = subprocess.Popen(
            [HOOK, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"FENKA_RUNTIME": str(self.station.root)},
        )
        assert hook.stdin
        hook.stdin.write(json.dumps(self.state(**fields)))
        hook.stdin.close()
        hook.stdin = None
        return hook

    def hook(self, device: str = "slice=4", **fields: Any) -> str:
        """Run the hook. Return its sentence; empty if the container may start."""
        hook = self.start_hook(device, **fields)
        out, error = hook.communicate()
        assert out == ""
        assert bool(hook.returncode) == bool(error), (hook.returncode, error)
        return error.removeprefix("fenka: ").strip()

    def start(self, device: str = "slice=4") -> None:
        """Start it, as the runtime does after a hook without an error."""
        refusal = self.hook(device)
        assert not refusal, refusal
        self.go()

    def go(self) -> None:
        """Let the program run."""
        assert self.program.process.stdin
        self.program.process.stdin.write("go\n")
        self.program.process.stdin.flush()

    def results(self) -> list[int]:
        """Return the results of its program's allocations."""
        return [card["result"] for card in self.program.report()["cards"]]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the first process, and return the exit code of the whole."""
        os.kill(self.init, number)
        return self.program.process.wait()

    def await_state(self, state: str) -> dict[str, Any]:
        """Return the job when it is in a state."""
        job: dict[str, Any] = eventually(
            lambda: (job := self.station.jobs().get(self.name)) and job["state"] == state and job
        )
        return job

    def await_end(self) -> None:
        """Wait until the job has gone with all its files."""
        eventually(lambda: self.name not in self.station.jobs())
        shutil.rmtree(self.bundle)


def send_request(
    station: Workstation, device: bytes, *descriptors: int
) -> tuple[socket.socket, bytes]:
    """Send what a hook sends, or something like it. Return the connection and the answer."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(station.root / "containers.sock"))
    socket.send_fds(connection, [device], descriptors)
    answer, received, _, _ = socket.recv_fds(connection, 8192, 64)
    for descriptor in received:
        os.close(descriptor)
    return connection, answer


def sealed(content: object) -> int:
    """Return sealed memory with a JSON document, as the hook makes it."""
    import fcntl

    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, json.dumps(content).encode())
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
