"""Trainings, notebooks, programs, services and the queue as values of the screens. Times are Unix seconds.

`cluster_workloads.py` makes them from a cluster's objects, and `fenka.local` from a workstation's records.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

JobStatus = Literal["QUEUING", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
"""STOPPED: a notebook that `fenka start` starts again."""
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Trainer = Literal["mpijob", "tfjob", "pytorchjob", "trainjob", "notebook", "run"]

TRAINERS: dict[str, Trainer] = {
    "mpi": "mpijob",
    "tensorflow": "tfjob",
    "pytorch": "pytorchjob",
    "notebook": "notebook",
}
"""The trainer of each kind of job, as arena calls it. A notebook is a job that trains nothing."""

_CHIEFS = ("launcher", "master", "chief", "worker", "main", "notebook")


@dataclass(frozen=True, slots=True)
class CardUse:
    """A card that an instance holds a part of, or all of.

    Attributes:
        index: the card's index on its node.
        duty_percent: percent of the time in which the card was busy; None if unknown.
        used_mib: used memory of what the instance holds; None if unknown.
        total_mib: memory that the instance holds.
    """

    index: int
    duty_percent: float | None = None
    used_mib: float | None = None
    total_mib: float = 0


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process of a job, stable over restarts, or a replica of a service; on a cluster it is a pod.

    Attributes:
        name: JOB-ROLE-INDEX; of a replica that of the pod or the lease.
        pod: the pod's name; on a workstation that of the process's lease, if it has one.
        role: launcher, worker, master, ps, chief, evaluator, main, notebook or replica.
        index: its number within the role.
        chief: whether its logs and its node are the job's.
        status: its state in kubectl's words, such as `Init:0/1`, `Completed` or `OOMKilled`.
        phase: its state as Kubernetes' phase of a pod.
        created: when it was created, or started on a workstation.
        node: the node's name; empty before it has one.
        node_address: the node's address; empty before there is a node, and when the node is gone.
        address: the address of the instance itself.
        requested: cards, slices as shares of one, rounded to 0.1; None if no card's size is known.
        allocated: cards that it holds now; None if no card's size is known.
        cards: those of its cards that are known.
        exit_code: of its program, if that has ended.
        ready: Number of its containers that accept requests.
        containers: Number of its containers.
        why: Why it waits for a card; empty if it does not.
        sockets: The Unix sockets where it listens; none if it listens on ports.
        memory_units: Units of card memory that it requests.
        compute: Percent of a card's time that it requests.
        cpus: Processors that it requests.
    """

    name: str
    pod: str
    role: str
    index: int
    chief: bool
    status: str
    phase: Phase
    created: float
    node: str = ""
    node_address: str = ""
    address: str = ""
    requested: float | None = 0
    allocated: float | None = 0
    cards: tuple[CardUse, ...] = ()
    exit_code: int | None = None
    ready: int = 0
    containers: int = 1
    restarts: int = 0
    why: str = ""
    sockets: tuple[str, ...] = ()
    memory_units: float = 0
    compute: int = 0
    cpus: float = 0


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job or an instance. source: `pod/NAME`. kind: Normal or Warning."""

    source: str
    kind: str
    at: float
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training job.

    Attributes:
        namespace: on a workstation the user.
        uid: its identity: a job of the same name that is submitted later has another.
        created: when it was submitted.
        ended: when it succeeded, failed or stopped; None before, and if that is not known.
        instances: in the order of their roles and indexes.
        priority: the name of its priority class, or the number on a workstation; empty for none.
        position: its place in the queue; None if it is not queued, or that is not known.
        why: why it waits; empty if it does not, or that is not known.
        tensorboard: the URL of its TensorBoard; empty for none.
        address: where its notebook answers, a URL or how to get one; empty for none.
        note: what the user should know or do, such as that the submission was interrupted.
        foreign: it was created by another program: fenka shows it and never changes it.
        blocked: why its pods cannot be created, such as an exceeded quota; empty if they can.
        absent: cards that those of its processes request which are no instance now; None if unknown.
    """

    name: str
    namespace: str
    uid: str
    status: JobStatus
    trainer: Trainer
    created: float
    ended: float | None = None
    instances: tuple[JobProcess, ...] = ()
    priority: str = ""
    position: int | None = None
    why: str = ""
    tensorboard: str = ""
    address: str = ""
    note: str = ""
    foreign: bool = False
    absent: tuple[float | None, ...] = ()
    blocked: str = ""

    @property
    def title(self) -> str:
        """Return what sentences call it."""
        return f"job {self.name}"

    @property
    def chief(self) -> JobProcess | None:
        """Return the instance whose logs and node are the job's; None if it does not exist now."""
        return next((instance for instance in self.instances if instance.chief), None)

    @property
    def finished(self) -> bool:
        """Return whether it has ended; a notebook may be started again."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def requested(self) -> float | None:
        """Return the cards that its processes request; None if that is not known of all of them."""
        return total_cards((*(instance.requested for instance in self.instances), *self.absent))

    @property
    def allocated(self) -> float | None:
        """Return the cards that its instances hold; None if that is not known of all of them."""
        return total_cards(instance.allocated for instance in self.instances)

    def age(self, now: float) -> float:
        """Return the seconds since it was submitted."""
        return now - self.created

    def duration(self, now: float) -> float | None:
        """Return the seconds from its submission to its end, or until now.

        None if it has ended and nothing tells when.
        """
        if self.ended is None and self.status in ("SUCCEEDED", "FAILED"):
            return None
        return (now if self.ended is None else self.ended) - self.created

    def instance(self, name: str) -> JobProcess | None:
        """Return the instance or pod of this name."""
        return next(
            (instance for instance in self.instances if name in (instance.name, instance.pod)), None
        )


def shown_place(trainer: Trainer, role: str, index: int) -> tuple[str, int]:
    """Return the role and the index by which screens call a process.

    PyTorch's workers are equal, but its users call the first one the master, and count the others from 0.
    """
    if trainer == "pytorchjob" and role == "worker":
        return ("worker", index - 1) if index else ("master", 0)
    return role, index


def instance_name(job: str, trainer: Trainer, role: str, index: int) -> str:
    """Return JOB-ROLE-INDEX, as screens show it; it is stable over restarts."""
    shown_role, shown_index = shown_place(trainer, role, index)
    return f"{job}-{shown_role}-{shown_index}"


def chief_role(roles: Collection[str]) -> str:
    """Return the role whose first instance is the chief of a job with these roles."""
    return next((role for role in _CHIEFS if role in roles), "")


def total_cards(amounts: Iterable[float | None]) -> float | None:
    """Return the sum of numbers of cards, rounded to a tenth; None if one of them is unknown."""
    total = 0.0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return round(total, 1)


@dataclass(frozen=True, slots=True)
class ServingPort:
    """A port that clients connect to.

    Attributes:
        name: GRPC or RESTFUL, as arena calls them.
        port: Its number at the service's address.
        node_port: The port that is open on all nodes; 0 for none.
    """

    name: str
    port: int
    node_port: int = 0

    def __str__(self) -> str:
        if self.node_port:
            return f"{self.name}:{self.node_port}->{self.port}"
        return f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServiceVersion:
    """A version of a service.

    Attributes:
        namespace: On a workstation the user.
        uid: Its identity: a version of the same name that is deployed later has another.
        kind: custom, tensorflow or triton.
        desired: Number of replicas that it is to have now.
        available: Number of replicas that accept requests.
        rolled_out: Whether all replicas are as they were deployed or changed last, and accept requests.
        address: Where clients connect; empty for nowhere.
        page_host: A name for browsers, which keep nothing by it for other servers; empty for none.
        share: Percent of the requests; None if they are not divided.
        note: What the user should know or do, such as that the deployment was interrupted.
        requests_per_s: Answered requests a second; None if that is not known.
        waiting_requests: Requests that wait for a replica of any version; None if that is not known.
    """

    name: str
    namespace: str
    uid: str
    kind: str
    version: str
    desired: int
    available: int
    created: float
    address: str = ""
    ports: tuple[ServingPort, ...] = ()
    share: int | None = None
    instances: tuple[JobProcess, ...] = ()
    note: str = ""
    rolled_out: bool = True
    requests_per_s: float | None = None
    waiting_requests: int | None = None
    page_host: str = ""

    @property
    def title(self) -> str:
        """Return what sentences call it."""
        return f"version {self.version} of service {self.name}"

    @property
    def requested(self) -> float | None:
        """Return the cards that its replicas request; None if that is not known of all of them."""
        return total_cards(replica.requested for replica in self.instances)

    @property
    def why(self) -> str:
        """Return why a replica waits for a card; empty if none does."""
        return next((replica.why for replica in self.instances if replica.why), "")

    @property
    def chief(self) -> JobProcess | None:
        """Return the oldest replica; None if there is none now."""
        return next(iter(self.instances), None)

    def instance(self, name: str) -> JobProcess | None:
        """Return the replica of this name."""
        return next((replica for replica in self.instances if replica.name == name), None)


Workload = TrainingJob | ServiceVersion


def is_program(workload: Workload) -> bool:
    """Return whether a workload is one program: of `fenka run`, or a notebook's server."""
    return isinstance(workload, TrainingJob) and workload.trainer in ("run", "notebook")


WorkloadKind = Literal["run", "training", "notebook", "service"]


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """A training, a notebook or a version of a service in one line, wherever it runs.

    Attributes:
        user: On a cluster the namespace.
        version: Of a service.
        state: The job's status in lower case; of a service how many of its replicas accept requests.
        requested: Cards, slices as shares of one; None if that is not known.
        created: Unix seconds.
        node: The address of the node of a job's chief.
        why: Why it waits.
    """

    name: str
    user: str
    kind: WorkloadKind
    state: str
    created: float
    version: str = ""
    requested: float | None = None
    node: str = ""
    address: str = ""
    why: str = ""


def workload_row(workload: Workload) -> WorkloadRow:
    """Return a workload in one line."""
    if isinstance(workload, ServiceVersion):
        kind: WorkloadKind = "service"
        state = f"{workload.available}/{workload.desired} ready"
        version, node, why = workload.version, "", workload.note or workload.why
    else:
        trainer = workload.trainer
        kind = trainer if trainer in ("run", "notebook") else "training"
        state, version, chief = workload.status.lower(), "", workload.chief
        node, why = chief.node_address if chief else "", workload.blocked or workload.why
    return WorkloadRow(
        workload.name,
        workload.namespace,
        kind,
        state,
        workload.created,
        version,
        workload.requested,
        node,
        workload.address,
        why,
    )


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A pending request; a gang is one.

    Attributes:
        position: 1 is scheduled next; 0 for a request that waits for something else than the queue.
        asks: the request as its user wrote it.
        since: Unix seconds.
        reserved: the cards that are reserved for it: indexes, on a cluster NODE/INDEX.
        starts_by: when they are free at the latest, in Unix seconds; None if unknown.
        used_s: card-seconds that its namespace has used; they decay.
    """

    position: int
    name: str
    namespace: str
    priority: int
    asks: str
    since: float
    reserved: list[str] = field(default_factory=list)
    starts_by: float | None = None
    why: str = ""
    used_s: float = 0.0
