"""What commands about training jobs need of a cluster or of this machine, and the options they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, get_args

import typer

from fenka.cli.options import NamespaceOption, Target
from fenka.views.jobs import JobEvent, Trainer, TrainingJob

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
