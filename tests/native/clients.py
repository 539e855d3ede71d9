"""What the shim's tests need: a lease in a folder, and clients that do what they are told."""

import functools
import importlib.util
import os
import shlex
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fenka.isolation import account, lease_control
from fenka.isolation.lease_control import HEADER

HERE = Path(__file__).parent
NULL_DRIVER = HERE.parent.parent / "bench" / "shim" / "null_driver.c"
SHIM = HEADER.parent / "libfenka.so"


def wheel_folder(wheel: str) -> Path:
    """Where one of NVIDIA's wheels is; a folder that does not exist where it is not installed."""
    spec = importlib.util.find_spec(f"nvidia.{wheel}")
    return Path(((spec and spec.submodule_search_locations) or ["/nowhere"])[0])


HEADERS = wheel_folder("cu13") / "include"
"""NVIDIA's headers, of the CUDA version that the libraries are built with."""


GIB = 1 << 30
MIB = 1 << 20
CARDS = tuple(f"GPU-00000000-0000-0000-0000-00000000000{i}" for i in range(1, 5))
OUT_OF_MEMORY = 2
NO_DEVICE = 100
INVALID_DEVICE = 101
SYSTEM_NOT_READY = 802

STYLES = {
    "linked": 0,
    "dlopen and dlsym": 1,
    "dlvsym": 2,
    "cuGetProcAddress": 3,
    "cuGetProcAddress_v2": 4,
    "cuGetProcAddress_v2, per-thread streams": 5,
}


@functools.cache
def built() -> Path:
    """A folder, kept while the tests run, for what they compile; dlvsym needs symbols with versions."""
    folder = Path(built_in.name)
    script = folder / "versions"
    script.write_text("DRIVER_1 { global: cu*; local: *; };")
    shared = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1"]
    compile_c(NULL_DRIVER, folder / "libcuda.so.1", *shared, f"-Wl,--version-script={script}")
    compile_c(
        HERE / "null_nvml.c", folder / "libnvidia-ml.so.1", "-shared", "-fPIC", "-Wl,-Bsymbolic"
    )
    return folder


built_in = tempfile.TemporaryDirectory(prefix="fenka-shim-tests-")


def compile_c(source: Path, output: Path, *flags: str, compiler: str = "gcc") -> Path:
    """Compiles one file of C with the system's compiler."""
    command = [
        *shlex.split(compiler),
        "-O2",
        "-w",
        f"-isystem{HEADERS}",
        "-o",
        str(output),
        str(source),
        *flags,
    ]
    subprocess.run(command, check=True, capture_output=True)
    return output


@functools.cache
def client(style: int) -> Path:
    """The client that comes by the driver's functions in this way."""
    folder = built()
    library = [str(folder / "libcuda.so.1")] if style == 0 else []
    return compile_c(
        HERE / "shim_client.c",
        folder / f"client{style}",
        f"-DSTYLE={style}",
        *library,
        "-ldl",
        "-pthread",
    )


@functools.cache
def rows_client() -> Path:
    """The client with one function for each row of the shim's table."""
    library = str(built() / "libcuda.so.1")
    return compile_c(HERE / "shim_rows.c", built() / "rows", library)


class Answer(NamedTuple):
    """The driver's result code, and up to two numbers."""

    code: int
    value: int
    second: int


@dataclass(eq=False)
class Lease:
    """A lease's two files in a folder of the test."""

    folder: Path
    limits: tuple[lease_control.Limit, ...]
    clients: list["Client"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control.parent.mkdir(parents=True)
        self.account.parent.mkdir(parents=True)
        lease_control.write(self.control, lease_control.Control("test", self.limits))
        account.create(self.account)

    @property
    def control(self) -> Path:
        """The control page."""
        return self.folder / "lease" / "control"

    @property
    def account(self) -> Path:
        """The account."""
        return self.folder / "account" / "slots"

    def held(self, card: int = 0) -> int:
        """Bytes that the account says are held on a card."""
        return account.read(self.account).memory_bytes[card]

    def environment(self, **more: str) -> dict[str, str]:
        """What a program must be started with to be in the lease, on the null driver."""
        return {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": str(SHIM),
            "LD_LIBRARY_PATH": str(built()),
            "FENKA_LEASE": str(self.folder),
            "FENKA_NULL_CARDS": ",".join(CARDS),
            **more,
        }

    def start(self, style: int = 0, /, *before: str, **environment: str) -> "Client":
        """A client in the lease, by a command that starts it; it ends with the test."""
        started = Client(client(style), self.environment(**environment), *before)
        self.clients.append(started)
        return started

    def start_rows(self, **environment: str) -> "Client":
        """A client that has every row of the table, and has initialised the driver."""
        started = Client(rows_client(), self.environment(**environment))
        self.clients.append(started)
        assert started.ask("init -").code == 0
        return started

    def close(self) -> None:
        """Ends the clients."""
        for started in self.clients:
            started.kill()


class Client:
    """A process that does what it is told."""

    def __init__(self, program: Path, environment: dict[str, str], *before: str) -> None:
        self.process = subprocess.Popen(
            [*before, str(program)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, what: str, a: int = 0, b: int = 0) -> None:
        """Sends a command without waiting."""
        assert self.process.stdin
        self.process.stdin.write(f"{what} {a} {b}\n")
        self.process.stdin.flush()

    def ask(self, what: str, a: int = 0, b: int = 0) -> Answer:
        """Sends a command and waits for its answer."""
        self.send(what, a, b)
        return self.answer()

    def answer(self) -> Answer:
        """Waits for the answer to the last command."""
        assert self.process.stdout
        code, value, second = self.process.stdout.readline().split()
        return Answer(int(code), int(value), int(second))

    def enter(self, device: int = 0) -> "Client":
        """Initialises the driver and makes a context."""
        assert self.ask("init").code == 0
        assert self.ask("context", device).code == 0
        return self

    def kill(self) -> None:
        """SIGKILL; the process stays a zombie until `finish`."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def finish(self) -> str:
        """Lets it end; what it wrote to standard error."""
        return self.process.communicate()[1]
