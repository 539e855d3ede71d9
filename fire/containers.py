"""Containers of Podman's beside the programs of the workstation: started, stopped and killed at random.

Each fills its slice to the last MiB and tries one more. Podman and the containers' output are the reference.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.container_machine import IMAGE, image_archive
from fire import audit
from fire.experiment import InvariantViolation
from fire.machine import environment

MISSING = "no containers: Podman is not there (apt-get install podman crun)"
MOST_CONTAINERS = 4
PAGE_MIB = 2
"""A large block takes whole pages of the card."""
ESCAPES = "x\x1b]0;owned\x07\x1b[2J"
ANSWERS_WITHIN_S = 120.0
LOGS = Path("/run/container-logs")
SETTINGS = Path("/run/containers.conf")
STORAGE = Path("/var/lib/containers")
# Where root lacks CAP_SYS_RESOURCE, Podman's own limits cannot be set.
CONFIGURATION = """
[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
cgroup_manager = "cgroupfs"
"""


def build_image() -> bytes | None:
    """Return the archive of the image, or None without Podman. Called with the machine's own files."""
    if shutil.which("podman") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        return image_archive(Path(folder)).read_bytes()


def mounts() -> list[str]:
    """Return the mounts of this namespace that have to do with fenka, without their numbers."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(line.split(" ", 2)[2] for line in lines if "fenka" in line)


@dataclass
class Container:
    """A container of the experiment. ended: whether it may have ended, since something has ended it."""

    name: str
    units: int
    ended: bool = False
    lost_card: bool = False

    def reports(self) -> list[str]:
        """Return what its programs have printed, one line for each start."""
        path = LOGS / self.name
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [line.split(" ", 3)[3] for line in lines if " stdout F " in line]


@dataclass
class Containers:
    """The containers of one experiment.

    Args:
        rng: selects what happens.
        fenka: runs a command as root.
    """

    rng: random.Random
    fenka: Callable[..., subprocess.CompletedProcess[str]]
    known: dict[str, Container] = field(default_factory=dict)
    number: int = 0
    before: list[str] = field(default_factory=list)

    def prepare(self, image: bytes) -> None:
        """Make Podman's place, and let containers have slices. The daemon runs already."""
        for path in (LOGS, STORAGE, Path("/run/lock"), Path("/etc/cdi")):
            path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(STORAGE)], check=True)
        # crun knows no hybrid of both versions of control groups.
        subprocess.run(["umount", "/sys/fs/cgroup/unified"], capture_output=True, check=False)
        SETTINGS.write_text(CONFIGURATION)
        archive = Path("/run/image.tar")
        archive.write_bytes(image)
        for done in (self.podman("load", "-q", "-i", str(archive)), self.fenka("containers", "on")):
            if done.returncode:
                raise InvariantViolation(f"{done.args}: {done.stderr.strip()}")
        self.before = mounts()

    def podman(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Podman to its end."""
        command = ["podman", *words]
        try:
            return subprocess.run(
                command,
                env=environment() | {"CONTAINERS_CONF": str(SETTINGS)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWERS_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InvariantViolation(f"no answer: {' '.join(command)}") from None

    def states(self) -> dict[str, tuple[str, int]]:
        """Return Podman's state and the first process of each container."""
        rows = json.loads(self.podman("ps", "-a", "--format", "json").stdout)
        return {row["Names"][0]: (row["State"], row["Pid"]) for row in rows}

    # ---- actions ----

    def start_container(self) -> None:
        """Start a container of a random size, with or without a restart policy."""
        if len(self.known) >= MOST_CONTAINERS:
            self.end_container()
            return
        self.number += 1
        units = self.rng.choice([1, 2, 3, 4, 7, 14])
        name, mib = f"c{self.number}", audit.units_to_mib(units)
        options = [
            "--name",
            name,
            "-e",
            f"FENKA_NAME={name}",
            "--device",
            f"fenka.io/slice={units}",
        ]
        options += ["--log-driver", "k8s-file", "--log-opt", f"path={LOGS / name}"]
        options += self.rng.choice([[], ["--restart", "always"], ["--init"], ["--user", "1000"]])
        done = self.podman(
            "run",
            "-d",
            "-i",
            *options,
            IMAGE,
            "slice_client",
            str(mib // PAGE_MIB * PAGE_MIB),
            str(PAGE_MIB),
        )
        if done.returncode:
            raise InvariantViolation(f"{name} does not start: {done.stderr.strip()}")
        self.known[name] = Container(name, units)

    def end_container(self) -> None:
        """Stop, kill, restart or remove a container: by Podman, by its first process, or by fenka."""
        if not self.known:
            return
        container = self.rng.choice([*self.known.values()])
        container.ended = True
        name = container.name
        ways = ["stop", "kill", "init", "restart", "remove", "remove", "fenka", "pause"]
        match self.rng.choice(ways):
            case "stop":
                self.podman("stop", "-t", "1", name)
            case "kill":
                self.podman("kill", name)
            case "init":
                pid = self.states()[name][1]
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            case "restart":
                self.podman("restart", "-t", "1", name)
            case "remove":
                self.podman("rm", "-f", "-t", "0", name)
                del self.known[name]
            case "fenka":
                self.fenka("stop", "--grace", "1", name)
            case "pause":
                # A frozen process ends when it is thawed. The audit finds a slice that is kept.
                self.podman("pause", name)
                self.fenka("stop", "--grace", "1", name)

    def name_badly(self) -> None:
        """Start a container whose name or user has sequences that a terminal would execute."""
        bad = self.rng.choice(
            [
                ("--annotation", f"fenka.io/user={ESCAPES}"),
                ("-e", f"FENKA_NAME={ESCAPES}"),
                ("-e", f"FENKA_{ESCAPES}=1"),
            ]
        )
        options = ["--rm", *bad, "-e", "FENKA_WAIT=refuse", "--device", "fenka.io/slice=1"]
        done = self.podman("run", *options, IMAGE, "slice_client", "1", "1")
        # Podman's annotations may be the image's, and do not count unless the daemon is told so.
        if not done.returncode and "FENKA_NAME" in bad[1]:
            raise InvariantViolation(f"a container named {ESCAPES!r} has started")

    def lose_cards(self) -> None:
        """Note that the card server was killed: programs have lost their memory."""
        for container in self.known.values():
            container.ended = container.lost_card = True

    # ---- the audit ----

    def allocations(
        self, jobs: Collection[Mapping[str, Any]], tree: Callable[[int], frozenset[int]]
    ) -> Iterator[audit.Allocation | str]:
        """Yield what the containers hold, and one sentence for each violation.

        Args:
            jobs: the ledger's.
            tree: returns a process and its descendants.
        """
        states, ledger = self.states(), {job["name"]: job for job in jobs}
        for name, container in self.known.items():
            state, pid = states.get(name, ("gone", 0))
            job, want = ledger.get(name), audit.units_to_mib(container.units)
            if job is None and state == "running":
                yield f"container {name} runs, but is not in the ledger"
            if job is not None and state != "running":
                yield f"container {name} is {state}, but {job['state']} in the ledger"
            if state != "running" and not container.ended:
                yield f"container {name} ended unexpectedly: it is {state}"
            for report in container.reports():
                if report != f"1 {want} 0 2" and not container.lost_card:
                    yield f"container {name} has {want} MiB and one more page is too much, but says {report}"
            for piece in job["slices"] if job else ():
                if piece["memory_mib"] != want:
                    yield f"container {name} of {container.units} units has {piece}"
                pids = tree(pid) if pid else frozenset[int]()
                yield audit.Allocation(name, piece["uuid"], piece["memory_mib"], pids)

    def remove(self) -> None:
        """Remove all containers."""
        self.known.clear()
        done = self.podman("rm", "-fa", "-t", "0")
        if done.returncode:
            raise InvariantViolation(f"podman rm: {done.stderr.strip()}")

    def left(self) -> list[str]:
        """Return what is left of containers that have all been removed."""
        return [f"mount {line}" for line in mounts() if line not in self.before]
