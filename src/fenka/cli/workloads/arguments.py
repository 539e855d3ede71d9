"""Options of commands about workloads, and the requests that both backends understand."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import typer

from fenka.cli.common_options import NamespaceOption, Target, parse_duration
from fenka.cli.error_report import UserError
from fenka.views.workloads import JobProcess, ServiceVersion, Trainer, Workload

AllNamespacesOption = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="a training, notebook, service or program")
]
NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...")]
SomeNamesArgument = Annotated[list[str] | None, typer.Argument(metavar="NAME...")]
InstanceOption = Annotated[
    str, typer.Option("-i", "--instance", metavar="NAME", help="an instance or its pod")
]
ContainerOption = Annotated[
    str, typer.Option("-c", "--container", metavar="NAME", help="a container of the pod")
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
        follow: go on over restarts.
        instance: empty for the chief.
        container: empty for the program's; while the code is cloned, that of the clone.
        tail: None for all lines.
    """

    follow: Annotated[bool, typer.Option("-f", "--follow", help="print until it ends")] = False
    instance: InstanceOption = ""
    container: ContainerOption = ""
    tail: Annotated[
        int | None, typer.Option("-t", "--tail", metavar="N", min=0, help="only the last lines")
    ] = None
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="only lines of the last TIME, such as 5m")
    ] = ""
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="print its time before each line")
    ] = False
    run: RunOption = None

    @property
    def since_s(self) -> int | None:
        """The seconds of `since`; None for all lines. Raises UserError."""
        return parse_duration("--since", self.since) if self.since else None


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


def report_submission(name: str, command: str, noun: str = "Job") -> None:
    """Print that a workload was submitted; of a training in arena's words. command: shows it."""
    print(f"The {noun} {name} has been submitted successfully")
    print(f"You can run `{command}` to check the {noun.lower()} status", flush=True)


NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="the service")]
SurgeOption = Annotated[
    bool | None,
    typer.Option(
        "--surge/--no-surge",
        help="end an old replica when its successor is ready, or before it starts; default: before, if there "
        "is no room for both",
    ),
]


def require_instance(workload: Workload, name: str) -> JobProcess:
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
