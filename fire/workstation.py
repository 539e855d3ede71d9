"""The storm over a workstation: root's daemon, two ordinary users and a hostile one, on two simulated T4s.

Each move is drawn from a seeded generator: programs start and end, daemon, card server, clients and programs
are killed, the hostile user attacks. After each move the audit compares the driver's word with the ledger's.
What it finds must persist over several looks: a ledger and a driver cannot be read in the same instant.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fire import audit
from fire.experiment import InvariantViolation, Move, inject
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
CHEATS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("env", "LD_PRELOAD=libc.so.6"),
    ("env", "LD_PRELOAD=libcuda.so.1"),
    ("env", "-i", "PATH=/usr/bin:/bin"),
    ("setsid", "--wait"),
)


@dataclass
class Program:
    """One `fenka run` of the storm."""

    name: str
    uid: int
    units: int
    process: subprocess.Popen[str]
    report: dict[str, Any] | None = None
    exempt: bool = False
    """It may end or lose memory: it, its daemon or its card was struck."""
    output: str = ""

    def read_output(self) -> None:
        """Read what it has printed so far; never waits."""
        assert self.process.stdout
        while select.select([self.process.stdout], [], [], 0)[0]:
            piece = os.read(self.process.stdout.fileno(), 65536).decode()
            if not piece:
                return
            self.output += piece

    def lines(self) -> list[dict[str, Any]]:
        """What it reported."""
        self.read_output()
        whole = self.output.rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


@dataclass
class WorkstationExperiment:
    """The state of one run. say: where progress goes. hostile: whether the third user attacks."""

    seed: int
    say: Callable[[str], None]
    hostile: bool = True
    rng: random.Random = field(init=False)
    programs: list[Program] = field(default_factory=list)
    attacks: list[subprocess.Popen[str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    # ---- commands ----

    def fenka(self, uid: int, *words: str) -> subprocess.CompletedProcess[str]:
        """One command of a user, to its end."""
        try:
            return subprocess.run(
                [*FENKA, *words],
                env=environment(),
                cwd="/",
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
        """Have root's daemon run."""
        done = self.fenka(ROOT, "daemon", "--background", "--simulate", SPEC)
        if done.returncode and "already" not in done.stderr:
            raise InvariantViolation(f"root's daemon does not start: {done.stderr.strip()}")

    def spawn(self, uid: int, *words: str) -> subprocess.Popen[str]:
        """Something of a user that stays until its stdin ends."""
        return subprocess.Popen(
            words,
            env=environment(),
            cwd="/",
            user=uid,
            group=uid,
            extra_groups=[],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    # ---- moves ----

    def start(self) -> None:
        """A program of a random size, sometimes one that tries to get round its limit."""
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
        cheat = self.rng.choice(CHEATS)
        program_command = [*cheat, PYTHON, str(HERE / "fire" / "memory_filler.py")]
        process = self.spawn(uid, *FENKA, "run", *options, "--", *program_command)
        program = Program(name, uid, units, process, exempt="--time-limit" in options)
        self.programs.append(program)

    def end(self) -> None:
        """A program ends: in peace, by SIGKILL, by SIGTERM, or by its owner's `fenka stop`."""
        alive = self.alive()
        if not alive:
            return
        program = self.rng.choice(alive)
        program.exempt = True
        match self.rng.choice(["peace", "kill", "kill", "term", "stop"]):
            case "peace":
                assert program.process.stdin
                with contextlib.suppress(BrokenPipeError):
                    program.process.stdin.close()
            case "kill":
                program.process.kill()
            case "term":
                program.process.terminate()
            case "stop":
                self.fenka(program.uid, "stop", "--grace", "1", program.name)

    def resize(self) -> None:
        """A program is resized by its owner; what it may then hold is not what it was promised first."""
        running = [program for program in self.alive() if program.report]
        if running:
            program = self.rng.choice(running)
            done = self.fenka(program.uid, "resize", program.name, "--gpu-mem", str(program.units))
            if done.returncode not in (0, 1):
                raise InvariantViolation(f"resize: {done.stderr.strip()}")

    def kill_daemon(self) -> None:
        """SIGKILL to root's daemon; somebody else's command, or root, starts the next one."""
        for pid in self.processes("daemon", "--simulate"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.alive():
            if program.report is None:
                program.exempt = True
        if self.rng.random() < 0.7:
            self.daemon()

    def kill_cards(self) -> None:
        """SIGKILL to the card server: programs on it have lost their card."""
        for pid in self.processes("fenka-cardserver"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.alive():
            program.exempt = True

    def attack(self) -> None:
        """The hostile user tries one thing; some attacks stand until the end."""
        leases = [job["job"] for job in self.ledger() or []]
        name = self.rng.choice(
            ["fifo", "connections", "garbage", "squat", "impostor", "names"]
            + (["bind", "ghost", "account"] if leases else [])
        )
        words = [name]
        if name in ("bind", "ghost", "account"):
            words.append(self.rng.choice(leases))
        if name == "impostor":
            words.append(str(self.rng.choice([ALICE, BOB])))
        self.counts[name] = self.counts.get(name, 0) + 1
        process = self.spawn(MALLORY, PYTHON, str(HERE / "fire" / "hostile.py"), *words)
        self.attacks.append(process)
        assert process.stdout
        first = process.stdout.readline()
        if first.startswith("won"):
            raise InvariantViolation(first.strip())

    def run_unauthorized_commands(self) -> None:
        """The hostile user tries to stop and to resize what others run."""
        others = [
            program for program in self.alive() if program.report and program.process.poll() is None
        ]
        if others:
            name = self.rng.choice(others).name
            for words in (("stop", "--grace", "0", name), ("resize", name, "--gpu-mem", "1")):
                if self.fenka(MALLORY, *words).returncode == 0:
                    raise InvariantViolation(f"user {MALLORY} could: fenka {' '.join(words)}")

    # ---- truth ----

    def processes(self, *words: str) -> list[int]:
        """Processes whose command line has all these words, this machine's alone."""
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                    if all(word in line for word in words):
                        pids.append(int(entry.name))
        return pids

    def alive(self) -> list[Program]:
        """Programs that have not ended."""
        return [program for program in self.programs if program.process.poll() is None]

    def driver_usage(self) -> dict[str, dict[int, int]] | None:
        """MiB by card and process, as the driver says; None while no card server runs."""
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
        """The screen that everybody sees; None while no daemon answers."""
        done = self.fenka(BOB, "ps", "-o", "json")
        return None if done.returncode else json.loads(done.stdout)

    def tree(self, root: int) -> frozenset[int]:
        """A process and its descendants, as the kernel has them now."""
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
        """What is wrong at this moment."""
        jobs, used = self.ledger(), self.driver_usage()
        if jobs is None:
            self.daemon()
            return ["no daemon answered"]
        named = {program.name: program for program in self.programs}
        violations, allocations = [], []
        for job in jobs:
            program = named.get(job["name"])
            if program is None:
                violations.append(f"nobody asked for {job['name']!r}")
                continue
            if job["state"] == "waiting":
                continue
            pids = self.tree(program.process.pid)
            for piece in job["slices"]:
                if piece["memory_mib"] != audit.units_to_mib(program.units):
                    violations.append(f"{program.name} of {program.units} units is given {piece}")
                allocations.append(
                    audit.Allocation(program.name, piece["uuid"], piece["memory_mib"], pids)
                )
        violations += audit.overcommitted(allocations)
        violations += audit.over_limit(allocations, used or {})
        violations += audit.unleased_processes(allocations, used or {})
        violations += self.reports({job["name"]: job for job in jobs})
        return violations

    def reports(self, jobs: dict[str, dict[str, Any]]) -> Iterator[str]:
        """What programs saw, and programs and ledger that do not know each other."""
        for program in self.programs:
            lines = program.lines()
            ended = program.process.poll() is not None
            if lines and "got" in lines[0]:
                program.report = lines[0]
                want = audit.units_to_mib(program.units)
                if any(total != want for total in lines[0]["total"]):
                    yield f"{program.name} of {program.units} units sees {lines[0]['total']} MiB, not {want}"
                if not program.exempt and any(got != want for got in lines[0]["got"]):
                    yield f"{program.name} was promised {want} MiB and could allocate {lines[0]['got']}"
            elif lines and not program.exempt:
                yield f"{program.name}: {lines[0]}"
            if len(lines) > 1 and not program.exempt:
                yield f"{program.name} lost memory that was its own"
            if ended and program.name in jobs and jobs[program.name]["state"] != "waiting":
                yield f"{program.name} has ended, the ledger says {jobs[program.name]['state']}"
            if not ended and program.report and program.name not in jobs:
                yield f"{program.name} runs and is not in the ledger"
            if ended and not program.exempt:
                yield f"{program.name} ended by itself with {program.process.returncode}"

    def check(self, moment: str) -> None:
        """Look until all is well. Raises Breach with what persists."""
        for _ in range(CHECKS):
            violations = list(self.find_violations())
            if not violations:
                return
            time.sleep(RETRY_EVERY_S)
        raise InvariantViolation(f"after {moment}: " + "; ".join(violations))

    # ---- the run ----

    def run(self, moves: int, until: float) -> int:
        """So many moves, or until this moment; how many were made. Raises Breach."""
        self.daemon()
        table: list[tuple[Move, float]] = [
            (self.start, 10),
            (self.end, 5),
            (self.kill_daemon, 2),
            (self.kill_cards, 0.4),
            (self.attack, 3 * self.hostile),
            (self.run_unauthorized_commands, 1),
            (self.resize, 1),
        ]

        def progress(made: int) -> None:
            if made % 25 == 0:
                self.say(f"{made} moves, {len(self.alive())} programs, {self.counts}")

        made = inject(self, table, moves, until, progress)
        self.finish()
        return made

    def finish(self) -> None:
        """End everything; nothing may stay. Then an ordinary user gets whole cards at once."""
        for program in self.programs:
            program.exempt = True
            if program.process.poll() is None:
                program.process.kill()
        self.daemon()
        self.check("the end of all programs")
        self.wait_until_empty()
        for attack in self.attacks:
            assert attack.stdin
            with contextlib.suppress(BrokenPipeError):
                attack.stdin.close()
            output = attack.stdout.read() if attack.stdout else ""
            attack.wait(ANSWERS_WITHIN_S)
            if "won:" in output:
                raise InvariantViolation(output.strip())
        self.programs.clear()
        self.number = 10_000
        whole = ["run", "--gpu-mem", "14", "--cards", "2", "--timeout", "30"]
        after = self.fenka(ALICE, *whole, "--", PYTHON, str(HERE / "fire" / "memory_filler.py"))
        if f'"got": [{audit.CARD_MIB}, {audit.CARD_MIB}]' not in after.stdout:
            raise InvariantViolation(
                f"the cards are not whole again: {after.stdout} {after.stderr}"
            )
        self.wait_until_empty()
        done = self.fenka(ROOT, "daemon", "--stop")
        if done.returncode:
            raise InvariantViolation(f"the daemon does not end: {done.stderr.strip()}")
        left = [str(path) for path in (RUNTIME / "leases").iterdir()]
        preload = Path("/etc/ld.so.preload")
        left += [str(preload)] if preload.exists() else []
        left += [f"process {pid}" for pid in self.processes("fenka-cardserver")]
        if left:
            raise InvariantViolation(f"left behind: {', '.join(left)}")

    def wait_until_empty(self) -> None:
        """Until ledger and cards are empty. Raises Breach."""
        for _ in range(CHECKS * 4):
            jobs, used = self.ledger(), self.driver_usage()
            if jobs == [] and not any((used or {}).values()):
                return
            time.sleep(RETRY_EVERY_S)
        raise InvariantViolation(f"not empty after the end: {jobs}, {used}")
