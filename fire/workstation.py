"""Inject faults on a workstation with root's daemon, two ordinary users, a hostile one and two cards.

Each action is drawn by a seeded generator. Programs start and end. Daemon, card server, clients and programs
are killed. The hostile user attacks. After each action the audit compares driver and ledger.
Only violations that persist over several checks count, since ledger and driver cannot be read simultaneously.
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from fire import audit
from fire.containers import MISSING, Containers
from fire.experiment import Action, InvariantViolation, inject
from fire.machine import FENKA, HERE, PYTHON, environment

ALICE, BOB, MALLORY = 64001, 64002, 64003
ROOT = 0
SPEC = "T4*2"
CARDS = 2
RUNTIME = Path("/run/fenka")
LIBRARIES = RUNTIME / "simulated" / "lib"
CHECKS, RETRY_EVERY_S = 20, 0.25
ANSWERS_WITHIN_S = 60.0
MOST_PROGRAMS = 7
SERVICE, SERVICE_PORT = "service", 5000
TRAPS = ("fenka/__main__.py", "jupyter_server/auth.py", "logging.py", "json.py", "typing.py")
TRAP_CODE = "open('/tmp/trapped', 'w').close()\n"
"""In place of a module: it leaves a trace and nothing else."""
BYPASSES: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("env", "LD_PRELOAD=libc.so.6"),
    ("env", "LD_PRELOAD=libcuda.so.1"),
    ("env", "-i", "PATH=/usr/bin:/bin"),
    ("setsid", "--wait"),
)


@dataclass
class Program:
    """One `fenka run` of the experiment."""

    name: str
    uid: int
    units: int
    process: subprocess.Popen[str]
    report: dict[str, Any] | None = None
    heir: int = 0
    """PID of a child that outlives it, 0 without one."""
    exempt: bool = False
    """Whether it may end or lose memory, because it, its daemon or its card was killed."""
    output: str = ""

    def read_output(self) -> None:
        """Read what it has printed so far, without waiting."""
        assert self.process.stdout
        while select.select([self.process.stdout], [], [], 0)[0]:
            piece = os.read(self.process.stdout.fileno(), 65536).decode()
            if not piece:
                return
            self.output += piece

    def has_ended(self) -> bool:
        """Return whether it and its child have ended."""
        return self.process.poll() is not None and not is_alive(self.heir)

    def lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines that it has printed."""
        self.read_output()
        whole = self.output.rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; 0 is none."""
    try:
        return (
            pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@dataclass
class WorkstationExperiment:
    """The state of one run.

    Args:
        seed: selects the actions.
        progress: called with lines that describe the progress.
        hostile: whether the third user attacks.
        image: the archive of the containers' image; None where Podman is not there.
    """

    seed: int
    progress: Callable[[str], None]
    hostile: bool = True
    image: bytes | None = None
    rng: random.Random = field(init=False)
    containers: Containers | None = None
    programs: list[Program] = field(default_factory=list)
    attacks: list[subprocess.Popen[str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    number: int = 0
    errors: IO[str] = field(init=False)
    """What users' programs have printed on stderr. Its end explains a violation."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is open as long as programs write)

    def explanation(self) -> str:
        """Return the last lines of programs and of the daemon."""
        self.errors.seek(0)
        log = RUNTIME / "daemon.log"
        lines = self.errors.read().splitlines()[-5:]
        return "\n".join([*lines, *(log.read_text().splitlines()[-12:] if log.exists() else ())])

    # ---- commands ----

    def fenka(self, uid: int, *words: str, cwd: str = "/") -> subprocess.CompletedProcess[str]:
        """Run a user's command to its end."""
        try:
            return subprocess.run(
                [*FENKA, *words],
                env=environment(),
                cwd=cwd,
                user=uid,
                group=uid,
                extra_groups=[],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWERS_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InvariantViolation(
                f"no answer within {ANSWERS_WITHIN_S:.0f} s: fenka {' '.join(words)}"
            ) from None

    def daemon(self) -> None:
        """Start root's daemon unless it runs."""
        done = self.fenka(ROOT, "daemon", "--background", "--simulate", SPEC)
        if done.returncode and "already" not in done.stderr:
            raise InvariantViolation(f"cannot start root's daemon: {done.stderr.strip()}")

    def spawn(self, uid: int, *words: str) -> subprocess.Popen[str]:
        """Start a user's process that runs until its stdin ends."""
        return subprocess.Popen(
            words,
            env=environment(),
            cwd="/",
            user=uid,
            group=uid,
            extra_groups=[],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    # ---- actions ----

    def start(self) -> None:
        """Start a program of a random size, sometimes one that tries to bypass its limit."""
        if len(self.alive()) >= MOST_PROGRAMS:
            self.end()
            return
        self.number += 1
        uid = self.rng.choice([ROOT, ALICE, ALICE, BOB])
        units, cards = (
            self.rng.choice([1, 2, 3, 4, 7, 14]),
            self.rng.choice([1, 1, 1, 2]),
        )
        name = f"p{self.number}"
        options = ["--gpu-mem", str(units), "--cards", str(cards), "--name", name]
        if self.rng.random() < 0.1:
            options += ["--time-limit", "3"]
        bypass = self.rng.choice(BYPASSES)
        program_command = [*bypass, PYTHON, str(HERE / "fire" / "memory_filler.py")]
        if self.rng.random() < 0.2:
            program_command.append("heir")
        process = self.spawn(uid, *FENKA, "run", *options, "--", *program_command)
        program = Program(name, uid, units, process, exempt="--time-limit" in options)
        self.programs.append(program)

    def end(self) -> None:
        """End a program by closing its stdin, by SIGKILL, by SIGTERM, or by its owner's `fenka stop`."""
        alive = self.alive()
        if not alive:
            return
        program = self.rng.choice(alive)
        program.exempt = True
        match self.rng.choice(["close", "kill", "kill", "term", "stop"]):
            case "close":
                assert program.process.stdin
                with contextlib.suppress(BrokenPipeError):
                    program.process.stdin.close()
            case "kill":
                program.process.kill()
            case "term":
                program.process.terminate()
            case "stop":
                self.fenka(program.uid, "stop", "--grace", "1", program.name)

    def serve(self) -> None:
        """Start a service whose replica leaves its port again and again, or send requests with a token."""
        if SERVICE not in self.counts:
            self.counts[SERVICE] = 0
            options = ["--name", SERVICE, "--version", "v1", "--gpu-mem", "1"]
            options += ["--restful-port", str(SERVICE_PORT)]
            program = [PYTHON, str(HERE / "fire" / "leaving_server.py")]
            done = self.fenka(ALICE, "serve", "custom", "--local", *options, "--", *program)
            if done.returncode:
                raise InvariantViolation(f"serve: {done.stderr.strip()}")
        for _ in range(10):
            with contextlib.suppress(OSError), socket.socket() as client:
                client.settimeout(0.5)
                client.connect(("127.0.0.1", SERVICE_PORT))
                client.sendall(b"GET / HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer t\r\n\r\n")
                self.counts[SERVICE] += b"mine" in client.recv(65536)

    def work_in_foreign_directory(self) -> None:
        """Run commands in the hostile user's directory, whose modules have the names of real ones."""
        trap = Path("/tmp/trap")
        if not trap.exists():
            trap.mkdir()
            for name in TRAPS:
                path = trap / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(TRAP_CODE)
                (path.parent / "__init__.py").touch()
            (trap / "__init__.py").unlink()
        words = self.rng.choice(
            [["ps"], ["doctor"], ["run", "--gpu-mem", "1", "--timeout", "0s", "--", "true"]]
        )
        self.fenka(self.rng.choice([ALICE, BOB, ROOT]), *words, cwd=str(trap))
        if Path("/tmp/trapped").exists():
            raise InvariantViolation(f"{words} ran a module of the current directory")

    def resize(self) -> None:
        """Resize a program, as its owner, to its present size."""
        running = [program for program in self.alive() if program.report]
        if running:
            program = self.rng.choice(running)
            done = self.fenka(program.uid, "resize", program.name, "--gpu-mem", str(program.units))
            if done.returncode not in (0, 1):
                raise InvariantViolation(f"resize: {done.stderr.strip()}")

    def kill_daemon(self) -> None:
        """Kill root's daemon; root or another user's command starts the next one."""
        for pid in self.processes("daemon", "--simulate"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.alive():
            if program.report is None:
                program.exempt = True
        if self.rng.random() < 0.7:
            self.daemon()

    def kill_cards(self) -> None:
        """Kill the card server, so that its programs lose their card."""
        for pid in self.processes("fenka-cardserver"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.alive():
            program.exempt = True
        if self.containers:
            self.containers.lose_cards()

    def attack(self) -> None:
        """Start one attack of the hostile user; some attacks last until the end."""
        leases = [job["id"] for job in self.ledger() or []]
        name = self.rng.choice(
            ["fifo", "connections", "garbage", "squat", "impostor", "names", "impersonate"]
            + ["knock", "stop_names", "departed", "lingering"]
            + (["claim_by_mount", "claim_by_environment", "account"] if leases else [])
        )
        words = [name]
        if name in ("claim_by_mount", "claim_by_environment", "account"):
            words.append(self.rng.choice(leases))
        if name == "impostor":
            words.append(str(self.rng.choice([ALICE, BOB])))
        self.counts[name] = self.counts.get(name, 0) + 1
        process = self.spawn(MALLORY, PYTHON, str(HERE / "fire" / "hostile.py"), *words)
        self.attacks.append(process)
        assert process.stdout
        first = process.stdout.readline()
        if not first.startswith(("ready", "done:")):
            raise InvariantViolation(f"attack {name}: {first.strip() or 'it did not start'}")

    def run_unauthorized_commands(self) -> None:
        """Try to stop and to resize other users' programs as the hostile user."""
        others = [
            program for program in self.alive() if program.report and program.process.poll() is None
        ]
        if others:
            name = self.rng.choice(others).name
            for words in (("stop", "--grace", "0", name), ("resize", name, "--gpu-mem", "1")):
                if self.fenka(MALLORY, *words).returncode == 0:
                    raise InvariantViolation(f"user {MALLORY} could: fenka {' '.join(words)}")

    # ---- reference data ----

    def processes(self, *words: str) -> list[int]:
        """Return the PIDs in this namespace whose command line contains all these words."""
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                    if all(word in line for word in words):
                        pids.append(int(entry.name))
        return pids

    def alive(self) -> list[Program]:
        """Return the programs that have not ended."""
        return [program for program in self.programs if program.process.poll() is None]

    def driver_usage(self) -> dict[str, dict[int, int]] | None:
        """Return the driver's MiB by card and process, or None while no card server runs."""
        done = subprocess.run(
            [PYTHON, str(HERE / "fire" / "driver_usage.py")],
            env=environment() | {"LD_LIBRARY_PATH": str(LIBRARIES)},
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWERS_WITHIN_S,
        )
        if done.returncode:
            return None
        cards = json.loads(done.stdout)
        return {
            uuid: {int(pid): mib for pid, mib in card["processes"].items()}
            for uuid, card in cards.items()
        }

    def ledger(self) -> list[dict[str, Any]] | None:
        """Return the leases and requests of `fenka ps`, or None while no daemon answers."""
        done = self.fenka(BOB, "ps", "-o", "json")
        rows = [] if done.returncode else json.loads(done.stdout)
        return None if done.returncode else [row for row in rows if "slices" in row]

    def tree(self, root: int) -> frozenset[int]:
        """Return a process and its present descendants."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
        pids, stack = {root}, [root]
        while stack:
            for child in children.get(stack.pop(), []):
                if child not in pids:
                    pids.add(child)
                    stack.append(child)
        return frozenset(pids)

    # ---- the audit ----

    def find_violations(self) -> list[str]:
        """Return one sentence for each violation at this moment."""
        jobs, used = self.ledger(), self.driver_usage()
        if jobs is None:
            self.daemon()
            return ["no daemon answers"]
        named = {program.name: program for program in self.programs}
        violations, allocations = list[str](), list[audit.Allocation]()
        known = self.containers.known if self.containers else {}
        for found in self.containers.allocations(jobs, self.tree) if self.containers else ():
            if isinstance(found, str):
                violations.append(found)
            else:
                allocations.append(found)
        for job in jobs:
            if job["name"] in known:
                continue
            if job["name"].startswith(SERVICE):
                allocations += [
                    audit.Allocation(SERVICE, piece["uuid"], piece["memory_mib"], frozenset())
                    for piece in job["slices"]
                ]
                continue
            program = named.get(job["name"])
            if program is None:
                violations.append(f"{job['name']!r} was not requested")
                continue
            if job["state"] == "waiting":
                continue
            pids = self.tree(program.process.pid) | {program.heir}
            for piece in job["slices"]:
                if piece["memory_mib"] != audit.units_to_mib(program.units):
                    violations.append(f"{program.name} of {program.units} units has {piece}")
                allocations.append(
                    audit.Allocation(program.name, piece["uuid"], piece["memory_mib"], pids)
                )
        violations += audit.overcommitted(allocations)
        violations += audit.over_limit(allocations, used or {})
        violations += audit.unleased_processes(allocations, used or {})
        violations += self.reports({job["name"]: job for job in jobs})
        violations += self.written_escapes()
        return violations

    @staticmethod
    def written_escapes() -> Iterator[str]:
        """Check that the daemon's log has no sequence that a terminal would execute."""
        log = RUNTIME / "daemon.log"
        if log.exists() and b"\x1b" in log.read_bytes():
            yield f"{log} has an escape sequence"

    def reports(self, jobs: dict[str, dict[str, Any]]) -> Iterator[str]:
        """Check what programs report, and whether the ledger has exactly the running programs."""
        for program in self.programs:
            lines = program.lines()
            ended = program.has_ended()
            if lines and "got" in lines[0]:
                program.report = lines[0]
                program.heir = lines[0].get("heir", 0)
                want = audit.units_to_mib(program.units)
                if any(total != want for total in lines[0]["total"]):
                    yield f"{program.name} of {program.units} units sees {lines[0]['total']} MiB, not {want}"
                if not program.exempt and any(got != want for got in lines[0]["got"]):
                    yield f"{program.name} has {want} MiB and could allocate {lines[0]['got']}"
            elif lines and not program.exempt:
                yield f"{program.name}: {lines[0]}"
            if len(lines) > 1 and not program.exempt:
                yield f"{program.name} could not allocate its freed memory again"
            if ended and program.name in jobs and jobs[program.name]["state"] != "waiting":
                yield f"{program.name} has ended, but is {jobs[program.name]['state']} in the ledger"
            if not ended and program.report and program.name not in jobs:
                yield f"{program.name} runs, but is not in the ledger"
            if ended and not program.exempt:
                yield f"{program.name} ended unexpectedly with {program.process.returncode}"

    def check(self, moment: str) -> None:
        """Check until there is no violation. Raises InvariantViolation for those that persist."""
        for _ in range(CHECKS):
            violations = list(self.find_violations())
            if not violations:
                return
            time.sleep(RETRY_EVERY_S)
        raise InvariantViolation(f"after {moment}: " + "; ".join(violations))

    # ---- the run ----

    def run(self, moves: int, seconds: float) -> int:
        """Run up to `moves` actions within this time; return their number. Raises InvariantViolation."""
        self.daemon()
        if self.image is None:
            self.progress(MISSING)
        else:
            self.containers = Containers(self.rng, partial(self.fenka, ROOT))
            self.containers.prepare(self.image)
        table: list[tuple[Action, float]] = [
            (self.start, 10),
            (self.end, 5),
            (self.kill_daemon, 2),
            (self.kill_cards, 0.4),
            (self.attack, 3 * self.hostile),
            (self.run_unauthorized_commands, 1),
            (self.resize, 1),
            (self.serve, 1),
            (self.work_in_foreign_directory, 1),
        ]
        if self.containers:
            table += [(self.containers.start_container, 4), (self.containers.end_container, 3)]
            table += [(self.containers.name_badly, self.hostile)]

        def progress(done: int) -> None:
            if done % 25 == 0:
                self.progress(f"{done} actions, {len(self.alive())} programs, {self.counts}")

        try:
            done = inject(self, table, moves, seconds, progress)
            self.finish()
        except InvariantViolation as violation:
            raise InvariantViolation(f"{violation}\n{self.explanation()}") from None
        return done

    def finish(self) -> None:
        """End all programs, check that nothing is left, and that a user can allocate whole cards."""
        for program in self.programs:
            program.exempt = True
            if program.process.poll() is None:
                program.process.kill()
            # Its child ends now.
            assert program.process.stdin
            program.process.stdin.close()
        self.daemon()
        if self.containers:
            self.containers.remove()
        if SERVICE in self.counts:
            done = self.fenka(ALICE, "serve", "delete", "--local", SERVICE)
            if done.returncode:
                raise InvariantViolation(f"serve delete: {done.stderr.strip()}")
        self.check("the end of all programs")
        self.wait_until_empty()
        for attack in self.attacks:
            assert attack.stdin
            with contextlib.suppress(BrokenPipeError):
                attack.stdin.close()
            output = attack.stdout.read() if attack.stdout else ""
            attack.wait(ANSWERS_WITHIN_S)
            if "succeeded:" in output:
                raise InvariantViolation(output.strip())
        self.programs.clear()
        self.number = 10_000
        whole = ["run", "--gpu-mem", "14", "--cards", "2", "--timeout", "30"]
        after = self.fenka(ALICE, *whole, "--", PYTHON, str(HERE / "fire" / "memory_filler.py"))
        if f'"got": [{audit.CARD_MIB}, {audit.CARD_MIB}]' not in after.stdout:
            raise InvariantViolation(
                f"whole cards cannot be allocated again: {after.stdout} {after.stderr}"
            )
        self.wait_until_empty()
        done = self.fenka(ROOT, "daemon", "--stop")
        if done.returncode:
            raise InvariantViolation(f"cannot stop the daemon: {done.stderr.strip()}")
        left = [str(path) for path in (RUNTIME / "leases").iterdir()]
        preload = Path("/etc/ld.so.preload")
        left += [str(preload)] if preload.exists() else []
        left += [f"process {pid}" for pid in self.processes("fenka-cardserver")]
        left += self.containers.left() if self.containers else []
        if left:
            raise InvariantViolation(f"left behind: {', '.join(left)}")

    def wait_until_empty(self) -> None:
        """Wait until ledger and cards are empty. Raises InvariantViolation."""
        for _ in range(CHECKS * 4):
            jobs, used = self.ledger(), self.driver_usage()
            if jobs == [] and not any((used or {}).values()):
                return
            time.sleep(RETRY_EVERY_S)
        raise InvariantViolation(f"not empty after the end: {jobs}, {used}")
