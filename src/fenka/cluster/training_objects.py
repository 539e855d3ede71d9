"""Objects that make up training jobs, with the fields that fenka reads, and kubectl's words for pods.

Wire facts: batch/v1; jobset.x-k8s.io/v1alpha2; kubeflow.org/v1alpha1 to v2beta1 (MPIJob, TFJob, PyTorchJob);
trainer.kubeflow.org/v1alpha1 (TrainJob). The words are those of pods' printer in k8s.io/kubernetes,
pkg/printers/internalversion.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from fenka.cluster import objects

JOB = "fenka.io/job"
"""Label of all objects of a job: its name."""
KIND = "fenka.io/kind"
"""Label: mpi, tensorflow, pytorch, notebook or service."""
ROLE = "fenka.io/role"
"""Label of pods and of the Jobs of one role."""
SPEC = "fenka.io/spec"
"""Annotation of the root object: the spec as it was submitted."""
SUBMITTED = "fenka.io/submitted"
"""Annotation of the root object, written by the patch that resumes it: all its dependents exist."""

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
"""Kueue's label: a suspended job with it waits in that queue."""

CREATION_FAILED = "FailedCreate"
"""Reason of a Job's event whose pod the API server has refused, such as for a ResourceQuota."""

JOBSETS_API = "/apis/jobset.x-k8s.io/v1alpha2"
JOBS_API = "/apis/batch/v1"
DEPLOYMENTS_API = "/apis/apps/v1"

_FINAL = ("Failed", "Complete", "Completed", "Succeeded")

ForeignKind = Literal["MPIJob", "TFJob", "PyTorchJob", "TrainJob"]


CRASHING = "CrashLoopBackOff"
"""Reason of a waiting container that has failed several times: the kubelet restarts it later."""


class ContainerTerminated(objects.Object):
    """How a container ended."""

    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    finished_at: str | None = None


class ContainerRunning(objects.Object):
    """A container that runs."""


class TrainingContainerState(objects.ContainerState):
    """The state of a container."""

    running: ContainerRunning | None = None
    terminated: ContainerTerminated | None = None


class TrainingContainerStatus(objects.ContainerStatus):
    """A container as the kubelet reports it. started: null until it is known."""

    started: bool | None = None
    state: TrainingContainerState = msgspec.field(default_factory=TrainingContainerState)


class TrainingPodStatus(objects.PodStatus):
    """The status of a pod, with how its containers ended and its addresses."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    host_ip: str = msgspec.field(default="", name="hostIP")
    container_statuses: tuple[TrainingContainerStatus, ...] = ()
    init_container_statuses: tuple[TrainingContainerStatus, ...] = ()


class TrainingPod(objects.Pod):
    """A pod of a training job."""

    status: TrainingPodStatus = msgspec.field(default_factory=TrainingPodStatus)

    @property
    def gone(self) -> bool:
        """Return whether the pod is being deleted."""
        return self.metadata.deletion_timestamp is not None

    def container(self, name: str) -> TrainingContainerStatus | None:
        """Return what the kubelet reports of a container or init container."""
        statuses = (*self.status.container_statuses, *self.status.init_container_statuses)
        return next((status for status in statuses if status.name == name), None)

    @property
    def ready(self) -> bool:
        """Return whether its containers accept requests."""
        ready = self.condition("Ready")
        return ready is not None and ready.status == "True"

    @property
    def crashing(self) -> str:
        """Return a sentence about a container that fails again and again; empty if none does."""
        for status in self.status.container_statuses:
            waiting = status.state.waiting
            if waiting is not None and waiting.reason == CRASHING:
                return (
                    f"container {status.name} fails again and again ({CRASHING}, {status.restart_count} "
                    "restarts): `fenka logs` shows its output"
                )
        return ""

    @property
    def main_container(self) -> str:
        """Return the name of the container that runs the program: the first one."""
        return self.spec.containers[0].name if self.spec.containers else ""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the program; None before its end."""
        main = self.container(self.main_container)
        return main.state.terminated.exit_code if main and main.state.terminated else None

    @property
    def ended_at(self) -> str:
        """Return the time at which its last container ended; empty before, and if that is not known."""
        ends = (status.state.terminated for status in self.status.container_statuses)
        return max((end.finished_at or "" for end in ends if end), default="")

    @property
    def evicted(self) -> bool:
        """Return whether it was ended to make room, or by its node, and not by its program."""
        target = self.condition("DisruptionTarget")
        disrupted = target is not None and target.status == "True"
        return self.status.phase == "Failed" and (disrupted or self.status.reason == "Evicted")


def final_condition(conditions: Iterable[objects.Condition] | None) -> objects.Condition | None:
    """Return the condition that ends a job; None while it has not ended.

    A Job may have failed and completed; its failure counts.
    """
    final = [
        condition
        for condition in conditions or ()
        if condition.status == "True" and condition.type in _FINAL
    ]
    return min(final, key=lambda condition: _FINAL.index(condition.type), default=None)


class TemplateMeta(objects.Object):
    """The metadata of a template. Clients in Go write null for its times."""

    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


class JobPodTemplate(objects.Object):
    """The template of a Job's pods."""

    metadata: TemplateMeta = msgspec.field(default_factory=TemplateMeta)
    spec: objects.PodSpec = msgspec.field(default_factory=objects.PodSpec)

    @property
    def pod(self) -> objects.Pod:
        """Return a pod as the template makes it, which has no name and no node."""
        meta = self.metadata
        return objects.Pod(
            metadata=objects.ObjectMeta(labels=meta.labels, annotations=meta.annotations),
            spec=self.spec,
        )


class RoleTemplate(NamedTuple):
    """The pods of a role: their number at a time, and what they are made of."""

    role: str
    replicas: int
    template: JobPodTemplate


class BatchJobSpec(objects.Object):
    """The spec of a Job."""

    suspend: bool = False
    parallelism: int = 1
    template: JobPodTemplate = msgspec.field(default_factory=JobPodTemplate)


class RootStatus(objects.Object):
    """The status of a Job, JobSet or Deployment. completion_time: a Job's. Lists may be null."""

    conditions: tuple[objects.Condition, ...] | None = None
    completion_time: str | None = None

    @property
    def ended(self) -> bool:
        """Return whether it has completed or failed."""
        return final_condition(self.conditions) is not None

    @property
    def problem(self) -> str:
        """Return why a Deployment's pods cannot be created, such as a quota; empty if they can."""
        failures = (
            condition for condition in self.conditions or () if condition.type == "ReplicaFailure"
        )
        return next((failure.message for failure in failures if failure.status == "True"), "")


class _RootObject(objects.Object):
    """An object that owns all others of a job."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)

    @property
    def templates(self) -> tuple[RoleTemplate, ...]:
        """Return its pods by their roles."""
        raise NotImplementedError

    @property
    def roles(self) -> dict[str, int]:
        """Return the number of pods that run at a time, by role."""
        return {part.role: part.replicas for part in self.templates}

    @property
    def priority_class(self) -> str:
        """Return the priority class of its pods."""
        names = (part.template.spec.priority_class_name for part in self.templates)
        return next(filter(None, names), "")

    def _single(self, replicas: int, template: JobPodTemplate) -> tuple[RoleTemplate]:
        return (RoleTemplate(self.metadata.labels.get(ROLE, "main"), replicas, template),)


class BatchJob(_RootObject):
    """A Job."""

    spec: BatchJobSpec = msgspec.field(default_factory=BatchJobSpec)
    status: RootStatus = msgspec.field(default_factory=RootStatus)

    @property
    def path(self) -> str:
        """Return its path at the API server."""
        return f"{JOBS_API}/namespaces/{self.metadata.namespace}/jobs/{self.metadata.name}"

    @property
    def templates(self) -> tuple[RoleTemplate, ...]:
        """Return its pods."""
        return self._single(self.spec.parallelism, self.spec.template)

    @property
    def suspended(self) -> bool:
        """Return whether it has no pods because somebody wants it so."""
        return self.spec.suspend


class JobTemplate(objects.Object):
    """The template of a JobSet's Jobs. Clients in Go write null for the times in its metadata."""

    spec: BatchJobSpec = msgspec.field(default_factory=BatchJobSpec)


class ReplicatedJob(objects.Object):
    """The Jobs of one role."""

    name: str = ""
    replicas: int = 1
    template: JobTemplate = msgspec.field(default_factory=JobTemplate)


class JobSetSpec(objects.Object):
    """The spec of a JobSet."""

    suspend: bool = False
    replicated_jobs: tuple[ReplicatedJob, ...] = ()


class JobSet(_RootObject):
    """A JobSet."""

    spec: JobSetSpec = msgspec.field(default_factory=JobSetSpec)
    status: RootStatus = msgspec.field(default_factory=RootStatus)

    @property
    def path(self) -> str:
        """Return its path at the API server."""
        return f"{JOBSETS_API}/namespaces/{self.metadata.namespace}/jobsets/{self.metadata.name}"

    @property
    def templates(self) -> tuple[RoleTemplate, ...]:
        """Return the pods of its Jobs."""
        return tuple(
            RoleTemplate(
                job.name, job.replicas * job.template.spec.parallelism, job.template.spec.template
            )
            for job in self.spec.replicated_jobs
        )

    @property
    def suspended(self) -> bool:
        """Return whether it has no pods because somebody wants it so."""
        return self.spec.suspend


class DeploymentSpec(objects.Object):
    """The spec of a Deployment."""

    replicas: int = 1
    template: JobPodTemplate = msgspec.field(default_factory=JobPodTemplate)


class Deployment(_RootObject):
    """The Deployment of a notebook that never ends by itself."""

    spec: DeploymentSpec = msgspec.field(default_factory=DeploymentSpec)
    status: RootStatus = msgspec.field(default_factory=RootStatus)

    @property
    def path(self) -> str:
        """Return its path at the API server."""
        meta = self.metadata
        return f"{DEPLOYMENTS_API}/namespaces/{meta.namespace}/deployments/{meta.name}"

    @property
    def templates(self) -> tuple[RoleTemplate, ...]:
        """Return its pod, which it has while it is not stopped."""
        return self._single(1, self.spec.template)

    @property
    def suspended(self) -> bool:
        """Return whether it has no pods because somebody wants it so."""
        return self.spec.replicas == 0


class InvolvedObject(objects.Object):
    """The object that an event is about."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class TrainingEvent(objects.Event):
    """An event, with the object that it is about."""

    involved_object: InvolvedObject = msgspec.field(default_factory=InvolvedObject)

    def concerns_jobs_of(self, root: "Root") -> bool:
        """Return whether it is about a Job of this JobSet, or about the root itself, and no earlier one."""
        about = self.involved_object
        if about.uid == root.metadata.uid:
            return True
        before, _, number = about.name.rpartition("-")
        names = {f"{root.metadata.name}-{role}" for role in root.roles}
        since = objects.seconds(root.metadata.creation_timestamp) or 0
        child = about.kind == "Job" and before in names and number.isdecimal()
        return child and (objects.seconds(self.at) or 0) >= since


Root = BatchJob | JobSet | Deployment
"""The object that owns all others of a job."""


class ForeignJobStatus(RootStatus):
    """The status of a job of another operator. launcher_status: MPIJob v1alpha1's."""

    launcher_status: str = ""


class _ReplicaSpec(objects.Object):
    """The pods of a role in the spec of a job of another operator."""

    replicas: int | None = 1
    template: JobPodTemplate = msgspec.field(default_factory=JobPodTemplate)


class _ForeignSpec(objects.Object):
    """The pods that a job of another operator declares. replicas, template: MPIJob v1alpha1's workers."""

    mpi_replica_specs: Mapping[str, _ReplicaSpec] = {}
    tf_replica_specs: Mapping[str, _ReplicaSpec] = {}
    pytorch_replica_specs: Mapping[str, _ReplicaSpec] = {}
    replicas: int = 0
    template: JobPodTemplate = msgspec.field(default_factory=JobPodTemplate)


class ForeignJob(objects.Object):
    """A job of another operator. spec: it is decoded when it is needed, because some versions accept any."""

    kind: ForeignKind
    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: ForeignJobStatus = msgspec.field(default_factory=ForeignJobStatus)

    @property
    def templates(self) -> tuple[RoleTemplate, ...]:
        """Return the pods that its spec declares; none if that cannot be read."""
        try:
            spec = msgspec.json.decode(self.spec, type=_ForeignSpec)
        except (msgspec.MsgspecError, RecursionError):
            return ()
        own = {
            "MPIJob": spec.mpi_replica_specs,
            "TFJob": spec.tf_replica_specs,
            "PyTorchJob": spec.pytorch_replica_specs,
        }.get(self.kind, {})
        if self.kind == "MPIJob" and not own:
            return (RoleTemplate("worker", spec.replicas, spec.template),)
        return tuple(
            RoleTemplate(role.lower(), 1 if part.replicas is None else part.replicas, part.template)
            for role, part in own.items()
        )


_OPERATORS_NAME = "training.kubeflow.org/job-name"
ARENAS_NAME = "release"
"""arena's label of all objects of a job: its name."""
FOREIGN_NAME_LABELS: Mapping[ForeignKind, tuple[str, ...]] = {
    "MPIJob": (_OPERATORS_NAME, "mpi_job_name", ARENAS_NAME),
    "TFJob": (_OPERATORS_NAME, ARENAS_NAME),
    "PyTorchJob": (_OPERATORS_NAME, ARENAS_NAME),
    "TrainJob": (JOBSET_NAME,),
}
"""Labels of pods with the name of their job, by its kind."""
FOREIGN_ROLE_LABELS = (
    "training.kubeflow.org/replica-type",
    "mpi_role_type",
    REPLICATED_JOB,
    "tf-replica-type",
    "pytorch-replica-type",
)
FOREIGN_INDEX_LABELS = (
    "training.kubeflow.org/replica-index",
    COMPLETION_INDEX,
    "tf-replica-index",
    "pytorch-replica-index",
)


class ServicePort(objects.Object):
    """A port of a Service."""

    name: str = ""
    port: int = 0
    node_port: int = 0


class ServiceObjectSpec(objects.Object):
    """The spec of a Service."""

    type: str = ""
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    ports: tuple[ServicePort, ...] = ()
    selector: Mapping[str, str] = {}


class Ingress(objects.Object):
    """An external address of a Service."""

    ip: str = ""
    hostname: str = ""


class LoadBalancer(objects.Object):
    """The state of a Service's load balancer."""

    ingress: tuple[Ingress, ...] = ()


class ServiceObjectStatus(objects.Object):
    """The status of a Service."""

    load_balancer: LoadBalancer = msgspec.field(default_factory=LoadBalancer)


class Service(objects.Object):
    """A Service."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: ServiceObjectSpec = msgspec.field(default_factory=ServiceObjectSpec)
    status: ServiceObjectStatus = msgspec.field(default_factory=ServiceObjectStatus)

    @property
    def node_port(self) -> int:
        """Return the port that is open on all nodes; 0 for none."""
        return next((port.node_port for port in self.spec.ports if port.node_port), 0)

    def url(self, node_address: str) -> str:
        """Return where it answers: at its load balancer, or at a port of all nodes. Empty for nowhere."""
        if self.external_address:
            return (
                f"http://{self.external_address}:{self.spec.ports[0].port}"
                if self.spec.ports
                else ""
            )
        return f"http://{node_address}:{self.node_port}" if self.node_port and node_address else ""

    @property
    def external_address(self) -> str:
        """Return the address of its load balancer; empty without one."""
        ingress = next(iter(self.status.load_balancer.ingress), Ingress())
        return ingress.ip or ingress.hostname


@dataclass(frozen=True, slots=True)
class TrainingObjects:
    """The objects of trainings, read at one time.

    Attributes:
        roots: of fenka's jobs.
        runs: Jobs of notebooks that were started again, which their root owns.
        foreign: jobs of other operators.
        pods: of all these jobs.
        services: of fenka's jobs.
        tensorboards: Services of the TensorBoards of other jobs.
        creation_failures: events about Jobs whose pods cannot be created, the oldest first.
        nodes: all nodes; None without the right to list them.
    """

    roots: list[Root] = field(default_factory=list)
    foreign: list[ForeignJob] = field(default_factory=list)
    pods: list[TrainingPod] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    nodes: list[objects.Node] | None = field(default_factory=list)
    runs: list[BatchJob] = field(default_factory=list)
    tensorboards: list[Service] = field(default_factory=list)
    creation_failures: list[TrainingEvent] = field(default_factory=list)

    @property
    def incomplete(self) -> bool:
        """Return whether a job that has started lacks pods."""
        present = Counter(
            (pod.metadata.namespace, pod.metadata.labels.get(JOB)) for pod in self.pods
        )
        runs = ((root, self.current(root)) for root in self.roots)
        return any(
            present[root.metadata.namespace, root.metadata.name] < sum(run.roles.values())
            for root, run in runs
            if not (run.suspended or run.status.ended)
        )

    def current(self, root: Root) -> Root:
        """Return the newest run of a job, which is the root itself unless it was started again."""
        return current_run(root, self.runs)


def current_run(root: Root, runs: Iterable[BatchJob]) -> Root:
    """Return the newest of a root's runs, or the root itself."""
    own: list[Root] = [
        run
        for run in runs
        if any(owner.uid == root.metadata.uid for owner in run.metadata.owner_references)
    ]
    return max(
        own, key=lambda run: (run.metadata.creation_timestamp, run.metadata.name), default=root
    )


EVICTED = "Evicted"


def status_word(pod: TrainingPod) -> str:
    """Return the state, such as `Running`, `Init:0/1`, `ContainerCreating` or `OOMKilled`."""
    if pod.evicted:
        # kubectl has this word only for the kubelet's evictions.
        return EVICTED
    if pod.gone and not pod.finished:
        return "Unknown" if pod.status.reason == "NodeLost" else "Terminating"
    init = _init_word(pod)
    initialized = pod.condition("Initialized")
    if init and not (initialized and initialized.status == "True"):
        return init
    return _containers_word(pod)


def _init_word(pod: TrainingPod) -> str:
    """Return how far the init containers are; empty if they have completed."""
    sidecars = {
        container.name
        for container in pod.spec.init_containers
        if container.restart_policy == "Always"
    }
    for number, container in enumerate(pod.status.init_container_statuses):
        state = container.state
        if container.name in sidecars and container.started:
            continue
        if state.terminated is not None:
            if state.terminated.exit_code == 0:
                continue
            return f"Init:{_end_word(state.terminated)}"
        if state.waiting is not None and state.waiting.reason not in ("", "PodInitializing"):
            return f"Init:{state.waiting.reason}"
        return f"Init:{number}/{len(pod.spec.init_containers)}"
    return ""


def _containers_word(pod: TrainingPod) -> str:
    status = pod.status
    scheduled = pod.condition("PodScheduled")
    gated = scheduled is not None and scheduled.reason == "SchedulingGated"
    word = "SchedulingGated" if gated else status.reason or status.phase or "Unknown"
    words = [word for word in map(_container_word, status.container_statuses) if word]
    word = words[0] if words else word
    if word == "Completed" and any(
        container.state.running for container in status.container_statuses
    ):
        return "Running" if pod.ready else "NotReady"
    return word


def _container_word(container: TrainingContainerStatus) -> str:
    state = container.state
    if state.waiting is not None:
        return state.waiting.reason
    return "" if state.terminated is None else _end_word(state.terminated)


def _end_word(end: ContainerTerminated) -> str:
    if end.reason:
        return end.reason
    return f"Signal:{end.signal}" if end.signal else f"ExitCode:{end.exit_code}"
