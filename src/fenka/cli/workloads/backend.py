"""What commands about training jobs need of a cluster or of this machine, and the options they share.

What commands about services need of a cluster or of this machine, and the options they share.

Connects this terminal with a command in a container.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, get_args

import typer

from fenka.cli import tables
from fenka.cli.errors import UserError
from fenka.cli.options import NamespaceOption, Target
from fenka.jobs.service import ServiceSpec
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.pod_exec import STDERR, PodExec
from fenka.views.workloads import JobEvent, ServiceVersion, Trainer, TrainingJob

AllNamespacesOption = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")
]
JobArgument = Annotated[str, typer.Argument(metavar="NAME", help="the job")]
InstanceOption = Annotated[
    str, typer.Option("-i", "--instance", metavar="NAME", help="an instance or its pod")
]
ContainerOption = Annotated[
    str, typer.Option("-c", "--container", metavar="NAME", help="a container of the pod")
]
TailOption = Annotated[
    int | None, typer.Option("-t", "--tail", metavar="N", min=0, help="only the last lines")
]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="TIME", help="only lines of the last TIME, such as 5m")
]
TimestampsOption = Annotated[
    bool, typer.Option("--timestamps", help="print its time before each line")
]
CommandArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[-- COMMAND]...", help="default: sh")
]
_MpiName = Literal["mpijob", "mpi", "mj"]
_TensorFlowName = Literal["tfjob", "tf", "tensorflow"]
_PyTorchName = Literal["pytorchjob", "pytorch", "py"]
_TrainName = Literal["trainjob", "train"]
_NotebookName = Literal["notebook", "nb"]
_RunName = Literal["run"]
TypeName = Literal[_MpiName, _TensorFlowName, _PyTorchName, _TrainName, _NotebookName, _RunName]
TypeOption = Annotated[
    TypeName | None,
    typer.Option(
        "-T", "--type", metavar="mpi|tf|pytorch|train|notebook|run", help="only jobs of this kind"
    ),
]

TYPE_NAMES: dict[Trainer, tuple[str, ...]] = {
    "mpijob": get_args(_MpiName),
    "tfjob": get_args(_TensorFlowName),
    "pytorchjob": get_args(_PyTorchName),
    "trainjob": get_args(_TrainName),
    "notebook": get_args(_NotebookName),
    "run": get_args(_RunName),
}
"""The names of each trainer in commands: the first is shown, the others are short forms."""


@dataclass(frozen=True, slots=True)
class JobTarget(Target):
    """The machine or cluster, and the namespace, that a command is about."""

    namespace: NamespaceOption = ""


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which log to print.

    Attributes:
        follow: go on until the job ends, over restarts.
        instance: empty for the chief.
        container: empty for the program's; while the code is cloned, that of the clone.
        tail: the last lines only; None for all.
        since_s: lines of the last seconds only; None for all.
        timestamps: put its time before each line.
    """

    follow: bool = False
    instance: str = ""
    container: str = ""
    tail: int | None = None
    since_s: int | None = None
    timestamps: bool = False


class JobBackend(Protocol):
    """Training jobs of a cluster or of this machine. All methods raise FenkaError."""

    @property
    def namespace(self) -> str:
        """Return the namespace of the jobs, for messages; on this machine the user."""

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or those with this name, the newest first.

        positions: find out the positions in the queue even if that takes longer.
        """

    def events(self, job: TrainingJob) -> list[JobEvent]:
        """Return the events of a job and its instances, the oldest first."""

    def logs(self, name: str, request: LogRequest) -> TrainingJob:
        """Print a log. Return the job as it is at the end of it."""

    def attach(self, job: TrainingJob, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in an instance, connected to this terminal. Return its exit code."""

    def delete(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that belongs to them."""


def report_submission(name: str) -> None:
    """Print that a job was submitted, in arena's words."""
    print(f"The Job {name} has been submitted successfully")
    print(f"You can run `fenka get {name}` to check the job status", flush=True)


NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="the service")]
SurgeOption = Annotated[
    bool | None,
    typer.Option(
        "--surge/--no-surge",
        help="end an old replica when its successor is ready, or before it starts; default: before, if there "
        "is no room for both",
    ),
]
VersionOption = Annotated[
    str, typer.Option("-v", "--version", metavar="VERSION", help="a version of the service")
]


@dataclass(frozen=True, slots=True)
class GatewayChoice:
    """What users say about the gateway of a service on a cluster."""

    gateway_image: Annotated[
        str,
        typer.Option(
            "--gateway-image",
            metavar="IMAGE",
            help="fenka's image; default: what the chart publishes",
        ),
    ] = ""
    gateway_replicas: Annotated[
        int, typer.Option("--gateway-replicas", metavar="N", min=1, help="number of gateways")
    ] = 1


class ServiceBackend(Protocol):
    """Services of a cluster or of this machine. All methods raise FenkaError."""

    @property
    def namespace(self) -> str:
        """Return the namespace of the services, for messages; on this machine the user."""

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""

    def deploy(self, spec: ServiceSpec, gateway: GatewayChoice) -> list[str]:
        """Deploy a valid version. Return the versions that the service had before."""

    def update(
        self,
        name: str,
        version: str,
        change: Callable[[ServiceSpec], ServiceSpec],
        gateway: GatewayChoice,
        surge: bool | None,
    ) -> ServiceSpec:
        """Change a version, or the only one if none is named. Return it as it is now.

        surge: whether replicas end when their successors are ready, or before; None: as there is room.
        """

    def undo(self, name: str, version: str, surge: bool | None) -> ServiceSpec:
        """Make a version what it was before its last update. Return it as it is now."""

    def delete(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions. route: by this HTTPRoute of a cluster."""

    def logs(self, version: ServiceVersion, request: LogRequest) -> None:
        """Print the log of a replica."""

    def attach(self, version: ServiceVersion, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in a replica, connected to this terminal. Return its exit code."""


def find_replica(version: ServiceVersion, name: str) -> str:
    """Return the name of a replica: the oldest one's if none is named. Raises UserError."""
    replica = version.replica(name) if name else next(iter(version.replicas), None)
    if replica is None:
        names = ", ".join(replica.name for replica in version.replicas) or "none now"
        raise UserError(
            f"version {version.version} of service {version.name} has no replica {name}".rstrip()
            + f": its replicas are {names}"
        )
    return replica.name


_BLOCK = 65536


async def run_attached(api: Api, pod_path: str, container: str, command: Sequence[str]) -> int:
    """Run a command with this terminal's input and output. Return its exit code.

    Raises ApiError, ApiUnreachable.
    """
    terminal = sys.stdin.isatty()
    running = await PodExec.start(api, pod_path, container, command, tty=terminal)
    async with running:
        with _raw_terminal() if terminal else contextlib.nullcontext():
            tasks = [asyncio.create_task(_send_input(running))]
            tasks += [asyncio.create_task(_send_sizes(running))] if terminal else []
            try:
                async for channel, data in running.output():
                    tables.write_bytes(data, sys.stderr if channel == STDERR else sys.stdout)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return running.exit_code


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Pass all keys on, those that send signals too, while the block runs."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # What was typed in advance is kept.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _send_input(running: PodExec) -> None:
    """Send what is typed. A thread reads it, since files and terminals are read in different ways."""
    loop, blocks = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def read() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while data := os.read(descriptor, _BLOCK):
                loop.call_soon_threadsafe(blocks.put_nowait, data)
            loop.call_soon_threadsafe(blocks.put_nowait, b"")

    descriptor = sys.stdin.fileno()
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while data := await blocks.get():
            await running.send(data)
        await running.close_input()


async def _send_sizes(running: PodExec) -> None:
    """Send the size of the terminal now and whenever it changes."""
    changed = asyncio.Event()
    changed.set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, changed.set)
    with contextlib.suppress(ConnectionError):
        while await changed.wait():
            changed.clear()
            size = os.get_terminal_size(sys.stdin.fileno())
            await running.resize(size.columns, size.lines)
