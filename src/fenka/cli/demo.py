"""`fenka demo`, which is `make run`: three notebooks share one card, and a fourth waits.

It runs the commands that a user would type. By Jupyter's messaging protocol 5.3 it asks each notebook's own
kernel for the size of its card and for its limit. Where the extra `notebook` is not installed, four programs
of `fenka run` take the notebooks' place: they need nothing but fenka.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from fenka.cli.error_report import UserError
from fenka.core.errors import FenkaError
from fenka.core.units import card_units, units_to_mib
from fenka.formats.quantities import UNITS_MIB
from fenka.hardware.nvml import Driver, NoDriver
from fenka.installation import how_to_add_extra
from fenka.server.loopback_name import DOMAIN
from fenka.workstation import paths, protocol
from fenka.workstation.client import get_snapshot, start_daemon

REPLY_TIMEOUT_S = 60.0

PAGE_TIMEOUT_S = 120.0
"""For a browser to load the page."""

BROWSERS = "chromium", "chromium-browser", "google-chrome"


class KernelFailed(FenkaError):
    """The code raised an exception; the message is that of the kernel."""


class Session(Protocol):
    """A program in a slice that runs code and returns its output."""

    def run(self, code: str) -> str:
        """Return what the code prints. Raises KernelFailed with the last line of its traceback."""

    def close(self) -> None:
        """Close the connection; the program keeps running."""


class Kernel:
    """A kernel of the server at `url` (with its token, as `fenka notebook` prints it)."""

    def __init__(self, url: str) -> None:
        import websocket

        parts = urllib.parse.urlsplit(url)
        token = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
        # Browsers resolve names below `localhost` themselves; Python asks the system, which may not.
        own_name = (parts.hostname or "").endswith(f".{DOMAIN}")
        place = f"127.0.0.1:{parts.port}" if own_name else parts.netloc
        header = {"Authorization": f"token {token}"}
        request = urllib.request.Request(
            f"http://{place}/api/kernels",
            data=b"{}",
            headers={"Host": parts.netloc, **header},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as answer:
            self.id: str = json.load(answer)["id"]
        self._channel = websocket.create_connection(
            f"ws://{place}/api/kernels/{self.id}/channels",
            host=parts.netloc,
            origin=f"http://{parts.netloc}",
            header=header,
            timeout=REPLY_TIMEOUT_S,
        )

    def run(self, code: str) -> str:
        """See Session."""
        message_id = uuid.uuid4().hex
        self._channel.send(json.dumps(_execute_request(message_id, code)))
        printed: list[str] = []
        while True:
            message: dict[str, Any] = json.loads(self._channel.recv())
            if message.get("parent_header", {}).get("msg_id") != message_id:
                continue
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    printed.append(content["text"])
                case "error":
                    raise KernelFailed(f"{content['ename']}: {content['evalue']}")
                case "status" if content["execution_state"] == "idle":
                    return "".join(printed)

    def close(self) -> None:
        """See Session."""
        self._channel.close()


class Console:
    """A connection to a program of `fenka run` that serves CONSOLE at this socket."""

    def __init__(self, path: Path) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(REPLY_TIMEOUT_S)
        connection.connect(str(path))
        self._stream = connection.makefile("rw")
        connection.close()

    def run(self, code: str) -> str:
        """See Session."""
        self._stream.write(json.dumps(code) + "\n")
        self._stream.flush()
        answer = json.loads(self._stream.readline())
        if answer["error"]:
            raise KernelFailed(answer["error"])
        return str(answer["output"])

    def close(self) -> None:
        """See Session."""
        self._stream.close()


CONSOLE = """
import contextlib, io, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1] + ".new")
server.listen()
os.rename(sys.argv[1] + ".new", sys.argv[1])
names = {}
while True:
    connection, _ = server.accept()
    stream = connection.makefile("rw")
    for line in stream:
        output, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(output):
                exec(json.loads(line), names)
        except Exception as why:
            error = f"{type(why).__name__}: {why}"
        stream.write(json.dumps({"output": output.getvalue(), "error": error}) + "\\n")
        stream.flush()
"""


def _execute_request(message_id: str, code: str) -> dict[str, Any]:
    return {
        "header": {
            "msg_id": message_id,
            "msg_type": "execute_request",
            "username": "fenka",
            "session": uuid.uuid4().hex,
            "version": "5.3",
        },
        "parent_header": {},
        "metadata": {},
        "content": {"code": code, "silent": False, "store_history": False, "allow_stdin": False},
        "channel": "shell",
        "buffers": [],
    }


GIB_MIB = UNITS_MIB["GiB"]
CHUNK_MIB = 256
NAMES = ("tf-notebook", "tf-notebook-2", "tf-notebook-3", "tf-notebook-4")
PROGRAM_NAMES = ("training", "training-2", "training-3", "training-4")
APPEARANCE_TIMEOUT_S = 60.0

DRIVER = """
import ctypes
class Success:
    def __eq__(self, code):
        return code.value == 0
class Code:
    def __init__(self, value):
        self.value = value
    @property
    def name(self):
        text = ctypes.c_char_p()
        library.cuGetErrorName(self.value, ctypes.byref(text))
        return text.value.decode()
class cuda:
    class CUresult:
        CUDA_SUCCESS = Success()
library = ctypes.CDLL("libcuda.so.1")
def function(symbol, *outputs):
    # The driver's own functions return their results through pointers, which come first.
    def call(*words):
        made = [kind() for kind in outputs]
        given = [ctypes.c_size_t(word) if isinstance(word, int) else word for word in words]
        code = getattr(library, symbol)(*map(ctypes.byref, made), *given)
        return Code(code), *(value.value for value in made)
    return staticmethod(call)
size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
cuda.cuInit = function("cuInit")
cuda.cuDeviceGet = function("cuDeviceGet", number)
cuda.cuDevicePrimaryCtxRetain = function("cuDevicePrimaryCtxRetain", pointer)
cuda.cuCtxSetCurrent = function("cuCtxSetCurrent")
cuda.cuMemAlloc = function("cuMemAlloc_v2", size)
cuda.cuMemFree = function("cuMemFree_v2")
cuda.cuMemGetInfo = function("cuMemGetInfo_v2", size, size)
cuda.cuMemsetD8 = function("cuMemsetD8_v2")
def cuMemcpyDtoH(target, source, count):
    copied = (ctypes.c_char * count).from_buffer(target)
    return (Code(library.cuMemcpyDtoH_v2(copied, size(source), size(count))),)
cuda.cuMemcpyDtoH = staticmethod(cuMemcpyDtoH)
"""
"""The few functions of cuda-bindings that the demonstration calls, for programs without that package."""

PRELUDE = """
import json
import pynvml
try:
    from cuda.bindings import driver as cuda
except ImportError:
    exec(DRIVER, globals())
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

SETUP = f"DRIVER = {DRIVER!r}\n{PRELUDE}"

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


class Demonstration:
    """The commands and checks of the demonstration, with a daemon of its own.

    Attributes:
        sockets: Directory of the programs' sockets; None if Jupyter servers run instead.
        names: Names of the jobs.
    """

    def __init__(self, runtime: paths.Runtime, sockets: Path | None = None) -> None:
        self.runtime, self.sockets = runtime, sockets
        self.names = NAMES if sockets is None else PROGRAM_NAMES
        self.failed: list[str] = []
        self.environment = {
            **os.environ,
            # The kernels need cuda-bindings, which came with this fenka.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "COLUMNS": "200",
        }
        # A command that still runs when this ends must not start another daemon.
        self.environment["FENKA_START_DAEMON"] = "never"
        if runtime != paths.own() or os.environ.get("FENKA_RUNTIME"):
            self.environment["FENKA_RUNTIME"] = str(runtime.root)
            os.environ["FENKA_RUNTIME"] = str(runtime.root)
        self.environment.pop("PASSWORD", None)

    def fenka(self, *words: str) -> str:
        """Run one command, and print it with its output."""
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

    def expect(self, text: str, actual: object, expected: object) -> None:
        """Print the result of a check, and record a difference."""
        if actual == expected:
            print(f"  ok     {text}")
        else:
            print(f"  WRONG  {text}: expected {expected!r}, got {actual!r}")
            self.failed.append(text)

    def snapshot(self) -> protocol.MachineSnapshot:
        """Return the daemon's current state."""
        return get_snapshot(self.runtime)

    def job(self, name: str) -> protocol.JobView:
        """Return a job. Raises KeyError."""
        return {job.name: job for job in self.snapshot().jobs}[name]

    def start(self, name: str, units: int) -> None:
        """Start a notebook or a program with a slice of this size."""
        options = ("--gpu-mem", str(units), "--name", name, "--detach")
        if self.sockets is None:
            self.fenka("notebook", "--local", *options)
            return
        script = self.sockets / "train.py"
        script.write_text(CONSOLE)
        self.fenka(
            "run", *options, "--", sys.executable, "-P", str(script), str(self._socket(name))
        )

    def answers(self, name: str) -> bool:
        """Return whether the notebook or program has started."""
        return bool(url_of(name)) if self.sockets is None else self._socket(name).exists()

    def session(self, name: str) -> Session:
        """Connect to a notebook or program, once it has started."""
        deadline = time.monotonic() + APPEARANCE_TIMEOUT_S
        while not self.answers(name) and time.monotonic() < deadline:
            time.sleep(0.1)
        return Kernel(url_of(name)) if self.sockets is None else Console(self._socket(name))

    def _socket(self, name: str) -> Path:
        assert self.sockets is not None
        return self.sockets / name


def demo(
    check: Annotated[bool, typer.Option("--check", help="end after the checks")] = False,
) -> None:
    """Run the demonstration on this machine. Raises UserError if a check failed."""
    signal.signal(signal.SIGTERM, _interrupt)
    with _demonstration(private=check) as demonstration:
        size = _start(demonstration)
        _check_screens(demonstration)
        _check_limits(demonstration, size)
        _check_handover(demonstration)
        if check:
            _check_page(demonstration)
        if failed := demonstration.failed:
            raise UserError(f"{len(failed)} checks failed: {'; '.join(failed)}")
        print("\nAll checks passed.")
        if not check:
            _wait_for_interrupt(demonstration)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _demonstration(*, private: bool) -> Iterator[Demonstration]:
    """Start a daemon; end it with all its jobs, however the demonstration ends."""
    with contextlib.ExitStack() as stack:
        runtime = paths.own()
        if private or runtime.answers():
            # A daemon that is not ours runs there.
            runtime = paths.Runtime(_temporary_directory(stack))
        sockets = None
        if not has_jupyter():
            print(
                f"Jupyter is not installed here ({how_to_add_extra('notebook')}): programs share the card."
            )
            sockets = _temporary_directory(stack)
        demonstration = Demonstration(runtime, sockets)
        with _daemon(runtime):
            try:
                yield demonstration
            finally:
                # From here to the end of this process.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                _clean_up(demonstration)


def has_jupyter() -> bool:
    """Return whether the packages of the extra `notebook` that the demonstration uses are installed."""
    return all(importlib.util.find_spec(name) for name in ("jupyterlab", "websocket"))


def _temporary_directory(stack: contextlib.ExitStack) -> Path:
    """Make a directory that the stack removes, also if a signal comes at this moment."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        made = tempfile.TemporaryDirectory(prefix="fenka-", ignore_cleanup_errors=True)
        return Path(stack.enter_context(made))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _daemon(runtime: paths.Runtime) -> Iterator[None]:
    """Start a daemon that ends with its jobs when this process ends, even by SIGKILL."""
    options = _hardware()
    print(f"\n$ fenka daemon --background {' '.join(options)}", flush=True)
    theirs, ours = os.pipe()
    process = None
    try:
        with open(theirs) as lifeline:
            process = start_daemon(runtime, [*options, "--no-file"], lifeline.fileno())
        print("the fenka daemon is running; `fenka daemon --stop` ends it", flush=True)
        yield
    finally:
        os.close(ours)
        if process:
            process.wait()


def _hardware() -> list[str]:
    """Return options for the first real card, else for a simulated T4."""
    try:
        with Driver.open() as driver:
            if driver.cards():
                return ["--only", str(driver.cards()[0].index)]
    except NoDriver as why:
        print(f"No GPU here ({why}); a simulated Tesla T4 stands in.")
    return ["--simulate", "T4"]


def _clean_up(demonstration: Demonstration) -> None:
    with contextlib.suppress(Exception):
        jobs = [job.name for job in demonstration.snapshot().jobs]
        if jobs:
            demonstration.fenka("stop", "--grace", "3", *reversed(jobs))
        demonstration.fenka("daemon", "--stop")
    for name in demonstration.names:
        shutil.rmtree(paths.jobs_directory() / name, ignore_errors=True)


def _start(demonstration: Demonstration) -> int:
    """Start four notebooks or programs of which three fit; return their size in MiB."""
    card = demonstration.snapshot().cards[0]
    units = card_units(card.memory_mib, GIB_MIB)
    notebook = notebook_units(units)
    for name in demonstration.names:
        demonstration.start(name, notebook)
    return units_to_mib(notebook, card.memory_mib, GIB_MIB)


def notebook_units(units: int) -> int:
    """Return the smallest size of which three fit on a card and four do not: 4 of a T4's 14."""
    return units // 4 + 1


def _check_screens(demonstration: Demonstration) -> None:
    """Show the tables of the articles, and check that the fourth notebook waits."""
    units = card_units(demonstration.snapshot().cards[0].memory_mib, GIB_MIB)
    allocated = f"{3 * notebook_units(units)}/{units}"
    demonstration.fenka("top", "node")
    share = demonstration.fenka("top", "node", "-s")
    demonstration.fenka("top", "node", "-s", "-d")
    print("\nOn the card:")
    demonstration.expect(f"{allocated} allocated", f"{allocated} (GiB)" in share, True)
    waiting = demonstration.job(demonstration.names[3])
    demonstration.expect(f"the fourth waits: {waiting.reason}", waiting.state, "waiting")


def _check_limits(demonstration: Demonstration, size: int) -> None:
    """Check each notebook's view of the card and its limit, while the others compute."""
    print("\nIn the notebooks:" if demonstration.sockets is None else "\nIn the programs:")
    kernels = {name: demonstration.session(name) for name in demonstration.names[:3]}
    for name, kernel in kernels.items():
        seen = json.loads(kernel.run(SETUP + LOOK))
        demonstration.expect(f"{name} sees a card of {size} MiB (CUDA)", seen["cuda"], size)
        demonstration.expect(f"{name} sees a card of {size} MiB (NVML)", seen["nvml"], size)
    for name, kernel in kernels.items():
        filled = json.loads(kernel.run(FILL % CHUNK_MIB))
        demonstration.expect(
            f"{name} is refused beyond it", filled["refusal"], "CUDA_ERROR_OUT_OF_MEMORY"
        )
        text = f"{name} got {filled['held']} MiB of {size} before that"
        demonstration.expect(text, size - CHUNK_MIB <= filled["held"] <= size, True)
        # Room for its computation while another notebook is checked.
        kernel.run("ok(cuda.cuMemFree(held.pop()[0]))")
        for value, (other, neighbour) in enumerate(kernels.items(), start=1):
            if other != name:
                done = json.loads(neighbour.run(COMPUTE % (value, value)))
                demonstration.expect(f"meanwhile {other} goes on computing", done, True)
    for kernel in kernels.values():
        kernel.close()
    _print_host_view(demonstration)
    demonstration.fenka("ps")


def _print_host_view(demonstration: Demonstration) -> None:
    """Print the whole card as the driver shows it to the host."""
    seen = demonstration.snapshot()
    card = seen.cards[0]
    names = {pid: job.name for job in seen.jobs for pid in job.pids}
    print(f"\nFrom outside: {card.model}, {card.used_mib} MiB of {card.memory_mib} MiB in use")
    with Driver.open(Path(seen.library_dir) if seen.library_dir else None) as driver:
        for process in driver.processes():
            if process.uuid == card.uuid:
                owner = names.get(process.pid, "not in a lease")
                print(f"  process {process.pid} ({owner}): {process.used_mib} MiB")


def _check_handover(demonstration: Demonstration) -> None:
    """Stop one notebook; check that the fourth starts by itself."""
    first, fourth = demonstration.names[0], demonstration.names[3]
    demonstration.fenka("stop", first)
    kernel = demonstration.session(fourth)
    demonstration.fenka("ps")
    print("\nThe fourth:")
    demonstration.expect("started by itself", demonstration.job(fourth).state, "running")
    size = demonstration.job(fourth).slices[0].memory_mib
    demonstration.expect(f"sees {size} MiB", json.loads(kernel.run(SETUP + LOOK))["cuda"], size)
    kernel.close()


def url_of(name: str) -> str:
    """Return a notebook's URL; empty until it accepts connections."""
    from fenka.jobs import notebook

    return notebook.url(paths.jobs_directory() / name) or ""


def _wait_for_interrupt(demonstration: Demonstration) -> None:
    kind = "notebooks" if demonstration.sockets is None else "programs"
    print(f"\nThe {kind} are yours until Ctrl-C:")
    for job in demonstration.snapshot().jobs:
        print(f"  {job.name}  {url_of(job.name)}".rstrip())
    hint = (
        f"FENKA_RUNTIME={demonstration.runtime.root} "
        if "FENKA_RUNTIME" in demonstration.environment
        else ""
    )
    print(f"In another terminal: {hint}fenka ps, {hint}fenka top node -s -d, {hint}fenka doctor")
    with _dashboard(demonstration) as address, contextlib.suppress(KeyboardInterrupt):
        if address:
            print(f"In the browser: {address}")
        sys.stdout.flush()
        signal.pause()
    print("\nEnding …")


def _check_page(demonstration: Demonstration) -> None:
    """Look at the page with a browser that is installed; check that the programs are on it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("\nNo Chromium is installed here: the page is not looked at.")
        return
    with _dashboard(demonstration) as address, contextlib.ExitStack() as stack:
        if not address:
            print("\nThis installation has no page.")
            return
        print("\nIn the browser:")
        folder = _temporary_directory(stack)
        # The address has a token, and all users see the arguments of programs.
        launcher = folder / "page.html"
        launcher.write_text(f'<meta http-equiv="refresh" content="0; url={address}">')
        command = [
            *(browser, "--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
            *("--virtual-time-budget=10000", "--dump-dom", launcher.as_uri()),
            # Chromium refuses to run as root with its sandbox.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        seen = subprocess.run(
            command, capture_output=True, text=True, timeout=PAGE_TIMEOUT_S, check=False
        ).stdout
        for job in demonstration.snapshot().jobs:
            if job.slices:
                demonstration.expect(
                    f"{job.name} has its slice on the page", job.name in seen, True
                )


def _wait_for_page() -> None:
    """Wait for the page if `make run` is still building it."""
    build = os.environ.pop("FENKA_PAGE_BUILD", "")
    if build.isdecimal():
        print("\nMaking the page …", flush=True)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(build), 0)


@contextlib.contextmanager
def _dashboard(demonstration: Demonstration) -> Iterator[str]:
    """Serve the page while the block runs. Yield its address; nothing if this installation has no page."""
    _wait_for_page()
    if not (resources.files("fenka") / "_web").is_dir():
        yield ""
        return
    process = subprocess.Popen(
        [sys.executable, "-Pm", "fenka", "dashboard", "--no-open"],
        env=demonstration.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
