"""`fenka demo`, which is `make run`: three notebooks on one card, a fourth that waits its turn.

It does what a user would do, with the commands a user would type, and looks with a user's eyes: each
notebook's own kernel says what it sees and where it is refused.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fenka.cli.errors import UserError
from fenka.core.units import card_units, units_to_mib
from fenka.dialects.sizes import UNITS_MIB
from fenka.hardware.nvml import Driver, NoDriver
from fenka.jobs.kernel import Kernel
from fenka.workstation import paths, protocol
from fenka.workstation.client import get_snapshot, start_daemon

GIB_MIB = UNITS_MIB["GiB"]
CHUNK_MIB = 256
NAMES = ("tf-notebook", "tf-notebook-2", "tf-notebook-3", "tf-notebook-4")
APPEARS_WITHIN_S = 60.0

PRELUDE = """
import json
import pynvml
from cuda.bindings import driver as cuda
MIB = 1 << 20
def ok(result):
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]
ok(cuda.cuInit(0))
context = ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(0))))
ok(cuda.cuCtxSetCurrent(context))
held = []
def allocate(mib):
    result = cuda.cuMemAlloc(mib * MIB)
    if result[0] == cuda.CUresult.CUDA_SUCCESS:
        held.append((result[1], mib))
    return result[0].name
def fill(chunk):
    # In chunks, then MiB by MiB, up to the refusal.
    for step in (chunk, 16, 1):
        while (answer := allocate(step)) == "CUDA_SUCCESS":
            pass
    return answer
"""

LOOK = """
free, total = ok(cuda.cuMemGetInfo())
pynvml.nvmlInit()
memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
print(json.dumps({"cuda": total // MIB, "nvml": memory.total // MIB, "free": free // MIB}))
"""

FILL = """
refusal = fill(%d)
print(json.dumps({"held": sum(mib for _, mib in held), "refusal": refusal}))
"""

COMPUTE = """
block = ok(cuda.cuMemAlloc(MIB))
ok(cuda.cuMemsetD8(block, %d, MIB))
back = bytearray(MIB)
ok(cuda.cuMemcpyDtoH(back, block, MIB))
ok(cuda.cuMemFree(block))
print(json.dumps(set(back) == {%d}))
"""


class Checks:
    """What was to be seen, and whether it was."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def expect(self, what: str, seen: object, wanted: object) -> None:
        """Print one line; remember a difference."""
        if seen == wanted:
            print(f"  ok     {what}")
        else:
            print(f"  WRONG  {what}: saw {seen!r}, wanted {wanted!r}")
            self.failed.append(what)


class World:
    """The commands of this demonstration, in a daemon of its own."""

    def __init__(self, runtime: paths.Runtime) -> None:
        self.runtime = runtime
        self.environment = {
            **os.environ,
            # The kernels need cuda-bindings, which came with this fenka.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "COLUMNS": "200",
        }
        # A command that is still on its way when this ends must not start a daemon of its own.
        self.environment["FENKA_START_DAEMON"] = "never"
        if runtime != paths.own() or os.environ.get("FENKA_RUNTIME"):
            self.environment["FENKA_RUNTIME"] = str(runtime.root)
            os.environ["FENKA_RUNTIME"] = str(runtime.root)
        self.environment.pop("PASSWORD", None)

    def fenka(self, *words: str) -> str:
        """Run one command as a user would, and show it with what it printed."""
        print(f"\n$ fenka {' '.join(words)}")
        result = subprocess.run(
            [sys.executable, "-Pm", "fenka", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        text = (result.stdout + result.stderr).rstrip()
        print(text)
        if result.returncode != 0:
            raise UserError(f"`fenka {' '.join(words)}` failed: {text}")
        return text

    def snapshot(self) -> protocol.Snapshot:
        """What the daemon knows now."""
        return get_snapshot(self.runtime)

    def job(self, name: str) -> protocol.JobView:
        """One job. Raises KeyError."""
        return {job.name: job for job in self.snapshot().jobs}[name]


def demo(
    check: Annotated[bool, typer.Option("--check", help="end after the checks")] = False,
) -> None:
    """Scenario S1 on this machine; with `check` it ends after the checks, non-zero if one failed."""
    checks = Checks()
    signal.signal(signal.SIGTERM, _interrupt)
    with _world(private=check) as world:
        size = _start(world)
        _look(world, checks)
        _compute(world, checks, size)
        _hand_over(world, checks)
        if checks.failed:
            raise UserError(f"{len(checks.failed)} checks failed: {'; '.join(checks.failed)}")
        print("\nAll as it should be.")
        if not check:
            _stay(world)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _world(*, private: bool) -> Iterator[World]:
    """A daemon of our own, ended with all that it holds, however the demonstration ends."""
    with contextlib.ExitStack() as stack:
        runtime = paths.own()
        if private or runtime.answers():
            # Somebody's daemon is at work there: leave it alone.
            runtime = paths.Runtime(stack.enter_context(_scratch()))
        world = World(runtime)
        with _daemon(runtime):
            try:
                yield world
            finally:
                # From here to the end of this process.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                _clean(world)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory that goes however this ends, if there is time to remove it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    directory = Path(tempfile.mkdtemp(prefix="fenka-"))
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _daemon(runtime: paths.Runtime) -> Iterator[None]:
    """A daemon that ends, with its jobs, when this process does, even by SIGKILL."""
    options = _hardware()
    print(f"\n$ fenka daemon --background {' '.join(options)}", flush=True)
    theirs, ours = os.pipe()
    process = None
    try:
        with open(theirs) as lifeline:
            process = start_daemon(runtime, options, lifeline.fileno())
        print("the fenka daemon is running; `fenka daemon --stop` ends it", flush=True)
        yield
    finally:
        os.close(ours)
        if process:
            process.wait()


def _hardware() -> list[str]:
    """The first real card where there is one, else a simulated T4."""
    try:
        with Driver.open() as driver:
            if driver.cards():
                return ["--only", str(driver.cards()[0].index)]
    except NoDriver as why:
        print(f"No GPU here ({why}); a simulated Tesla T4 stands in.")
    return ["--simulate", "T4"]


def _clean(world: World) -> None:
    with contextlib.suppress(Exception):
        jobs = [job.name for job in world.snapshot().jobs]
        if jobs:
            world.fenka("stop", "--grace", "3", *reversed(jobs))
        world.fenka("daemon", "--stop")
    for name in NAMES:
        shutil.rmtree(paths.jobs_directory() / name, ignore_errors=True)


def _start(world: World) -> int:
    """Four notebooks of which three fit; their size in MiB."""
    card = world.snapshot().cards[0]
    units = card_units(card.memory_mib, GIB_MIB)
    each = notebook_units(units)
    for name in NAMES:
        world.fenka("notebook", "--gpu-mem", str(each), "--name", name, "--detach")
    return units_to_mib(each, card.memory_mib, GIB_MIB)


def notebook_units(units: int) -> int:
    """The smallest size of which a card holds three and not four: 4 of a T4's 14."""
    return units // 4 + 1


def _look(world: World, checks: Checks) -> None:
    """The three tables of the article, and the one that waits."""
    units = card_units(world.snapshot().cards[0].memory_mib, GIB_MIB)
    allocated = f"{3 * notebook_units(units)}/{units}"
    world.fenka("top", "node")
    share = world.fenka("top", "node", "-s")
    world.fenka("top", "node", "-s", "-d")
    print("\nOn the card:")
    checks.expect(f"{allocated} allocated", f"{allocated} (GiB)" in share, True)
    waiting = world.job(NAMES[3])
    checks.expect(f"the fourth waits: {waiting.reason}", waiting.state, "waiting")


def _compute(world: World, checks: Checks, size: int) -> None:
    """What each notebook's own program sees, and where it is refused while its neighbours go on."""
    print("\nIn the notebooks:")
    kernels = {name: Kernel(url_of(name)) for name in NAMES[:3]}
    for name, kernel in kernels.items():
        seen = json.loads(kernel.run(PRELUDE + LOOK))
        checks.expect(f"{name} sees a card of {size} MiB (CUDA)", seen["cuda"], size)
        checks.expect(f"{name} sees a card of {size} MiB (NVML)", seen["nvml"], size)
    for name, kernel in kernels.items():
        filled = json.loads(kernel.run(FILL % CHUNK_MIB))
        checks.expect(f"{name} is refused beyond it", filled["refusal"], "CUDA_ERROR_OUT_OF_MEMORY")
        text = f"{name} got {filled['held']} MiB of {size} before that"
        checks.expect(text, size - CHUNK_MIB <= filled["held"] <= size, True)
        # Room for its own computation, when it is a neighbour.
        kernel.run("ok(cuda.cuMemFree(held.pop()[0]))")
        for value, (other, neighbour) in enumerate(kernels.items(), start=1):
            if other != name:
                done = json.loads(neighbour.run(COMPUTE % (value, value)))
                checks.expect(f"meanwhile {other} computes on", done, True)
    for kernel in kernels.values():
        kernel.close()
    _from_outside(world)
    world.fenka("ps")


def _from_outside(world: World) -> None:
    """The whole card, as the driver shows it to the host."""
    seen = world.snapshot()
    card = seen.cards[0]
    names = {pid: job.name for job in seen.jobs for pid in job.pids}
    print(f"\nFrom outside: {card.model}, {card.used_mib} MiB of {card.memory_mib} MiB in use")
    with Driver.open(Path(seen.library_dir) if seen.library_dir else None) as driver:
        for process in driver.processes():
            if process.uuid == card.uuid:
                owner = names.get(process.pid, "not in a lease")
                print(f"  process {process.pid} ({owner}): {process.used_mib} MiB")


def _hand_over(world: World, checks: Checks) -> None:
    """One goes; the fourth starts by itself."""
    world.fenka("stop", NAMES[0])
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while url_of(NAMES[3]) == "" and time.monotonic() < deadline:
        time.sleep(0.1)
    world.fenka("ps")
    print("\nThe fourth:")
    checks.expect("started by itself", world.job(NAMES[3]).state, "running")
    kernel = Kernel(url_of(NAMES[3]))
    size = world.job(NAMES[3]).slices[0].memory_mib
    checks.expect(f"sees {size} MiB", json.loads(kernel.run(PRELUDE + LOOK))["cuda"], size)
    kernel.close()


def url_of(name: str) -> str:
    """Where a notebook answers; empty while it does not."""
    from fenka.jobs import notebook

    return notebook.url(paths.jobs_directory() / name) or ""


def _stay(world: World) -> None:
    print("\nThe notebooks are yours until Ctrl-C:")
    for job in world.snapshot().jobs:
        print(f"  {job.name}  {url_of(job.name)}")
    hint = f"FENKA_RUNTIME={world.runtime.root} " if "FENKA_RUNTIME" in world.environment else ""
    print(f"In another terminal: {hint}fenka ps, {hint}fenka top node -s -d, {hint}fenka doctor")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    print("\nEnding …")
