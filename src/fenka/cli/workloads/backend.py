"""The workloads of a cluster or of this machine as commands use them, and the options of these commands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, get_args

import typer

from fenka.cli.errors import UserError
from fenka.cli.options import NamespaceOption, Target
from fenka.jobs.service import ServiceSpec
from fenka.views.workloads import (
    JobEvent,
    JobProcess,
    ReplicaView,
    ServiceVersion,
    Trainer,
    TrainingJob,
    Workload,
)

AllNamespacesOption = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="a training, notebook, service or program")
]
NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...")]
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
RunOption = Annotated[
    int | None,
    typer.Option(
        "--run", metavar="N", min=1, help="this run of a program of this machine; default: the last"
    ),
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
_ServiceName = Literal["service", "svc"]
TypeName = Literal[
    _MpiName, _TensorFlowName, _PyTorchName, _TrainName, _NotebookName, _RunName, _ServiceName
]
TypeOption = Annotated[
    TypeName | None,
    typer.Option(
        "-T",
        "--type",
        metavar="mpi|tf|pytorch|train|notebook|run|service",
        help="only workloads of this kind",
    ),
]
VersionOption = Annotated[
    str, typer.Option("-v", "--version", metavar="VERSION", help="a version of the service")
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
SERVICE_NAMES = get_args(_ServiceName)


@dataclass(frozen=True, slots=True)
class JobTarget(Target):
    """The machine or cluster, and the namespace, that a command is about."""

    namespace: NamespaceOption = ""


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """Which of the workloads that have a name. Raises UserError for a version of what has none."""

    type_: TypeOption = None
    version: VersionOption = ""

    def __post_init__(self) -> None:
        if self.version and self.type_ not in (None, *SERVICE_NAMES):
            raise UserError("only services have versions: leave out --version or --type")

    @property
    def only_services(self) -> bool:
        """Whether it can be a service only."""
        return bool(self.version) or self.type_ in SERVICE_NAMES


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which log to print.

    Attributes:
        follow: go on until the workload ends, over restarts.
        instance: empty for the chief.
        container: empty for the program's; while the code is cloned, that of the clone.
        tail: the last lines only; None for all.
        since_s: lines of the last seconds only; None for all.
        timestamps: put its time before each line.
        run: this run of a program; 0 for the last.
    """

    follow: bool = False
    instance: str = ""
    container: str = ""
    tail: int | None = None
    since_s: int | None = None
    timestamps: bool = False
    run: int = 0


@dataclass(frozen=True, slots=True)
class GatewayChoice:
    """Options about the gateway of a service on a cluster."""

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


class Backend(Protocol):
    """Workloads of a cluster or of this machine. All methods raise FenkaError."""

    def not_found(self, kind: str, name: str) -> str:
        """Return a sentence: there is none of this kind and name."""

    def workloads(
        self, name: str | None = None, *, positions: bool = False
    ) -> tuple[list[TrainingJob], list[ServiceVersion]]:
        """Return what `jobs` and `versions` do."""

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or those with this name, the newest first.

        positions: find out the positions in the queue even if that takes longer.
        """

    def versions(self, name: str | None = None) -> list[ServiceVersion]:
        """Return the versions of all services, or of those with this name, sorted."""

    def events(self, workload: Workload) -> list[JobEvent]:
        """Return the events of a workload and its instances, the oldest first."""

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

    def delete_service(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions. route: by this HTTPRoute of a cluster."""

    def delete_jobs(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that belongs to them."""

    def logs(self, workload: Workload, request: LogRequest) -> Workload:
        """Print the log of an instance of a workload. Return the workload as it is at its end."""

    def attach(self, workload: Workload, request: LogRequest, command: Sequence[str]) -> int:
        """Run a command in an instance, connected to this terminal. Return its exit code."""

    def exit_code(self, job: TrainingJob) -> int:
        """Return the exit code of a training that has ended."""


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


def require_instance(workload: Workload, name: str) -> JobProcess | ReplicaView:
    """Return an instance: the chief or the oldest replica if none is named. Raises UserError."""
    instance = workload.instance(name) if name else workload.chief
    if instance is not None:
        return instance
    names = ", ".join(instance.name for instance in workload.instances) or "none now"
    if name:
        raise UserError(f"{workload.title} has no instance {name}: its instances are {names}")
    if isinstance(workload, ServiceVersion):
        raise UserError(
            f"{workload.title} has no replica now: {workload.note or 'see fenka serve list'}"
        )
    raise UserError(
        f"{workload.title} is {workload.status}, and its chief does not exist now: its instances are "
        f"{names} (-i)"
    )
