"""What commands about workloads need of a cluster or of this machine, and the options that they share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, get_args

import typer

from fenka.cli.errors import UserError
from fenka.cli.options import NamespaceOption, Target
from fenka.jobs.service import ServiceSpec
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


class Backend(Protocol):
    """Workloads of a cluster or of this machine. All methods raise FenkaError."""

    @property
    def namespace(self) -> str:
        """Return the namespace of the workloads, for messages; on this machine the user."""

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return all jobs, or those with this name, the newest first.

        positions: find out the positions in the queue even if that takes longer.
        """

    def events(self, job: TrainingJob) -> list[JobEvent]:
        """Return the events of a job and its instances, the oldest first."""

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

    def delete_service(self, name: str, version: str) -> None:
        """Delete a version, or all of a service."""

    def split(self, name: str, weights: Mapping[str, int], route: str) -> None:
        """Divide a service's requests among its versions. route: by this HTTPRoute of a cluster."""

    def delete_jobs(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete jobs with all that belongs to them."""

    def logs(self, workload: str | ServiceVersion, request: LogRequest) -> TrainingJob | None:
        """Print the log of a replica, or of an instance of the job with this name.

        Return the job as it is at the end of its log.
        """

    def attach(
        self, workload: TrainingJob | ServiceVersion, request: LogRequest, command: Sequence[str]
    ) -> int:
        """Run a command in an instance or a replica, connected to this terminal. Return its exit code."""


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
