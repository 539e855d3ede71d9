"""Jobs and services of a cluster: values of the screens from one reading of its objects.

A pod's owner writes its labels, so pods count only for roles and indexes that the root object declares.
Requests are counted in cards: a slice is a share of its card.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from fenka.cluster import service_objects, training_objects
from fenka.cluster.objects import Condition, Node, Pod, seconds
from fenka.cluster.pod_groups import group_name
from fenka.cluster.queue_snapshot import read_position
from fenka.cluster.state import ClusterState
from fenka.cluster.training_objects import (
    ForeignJob,
    Root,
    TrainingObjects,
    TrainingPod,
    final_condition,
)
from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.scaling import shares
from fenka.core.units import card_units, mib_to_units
from fenka.dialects import ack, gpushare
from fenka.dialects.base import InvalidRecord, SharedNode, SliceRequest, parse_milli
from fenka.dialects.card_records import nominal_mib
from fenka.views import workloads
from fenka.views.node_rows import TOPOLOGY
from fenka.views.workloads import JobProcess, JobStatus, ServiceVersion, Trainer, TrainingJob


class PodCards:
    """The nodes of pods, and what the pods hold of their cards."""

    def __init__(self, nodes: Sequence[Node] | None, pods: Iterable[Pod]) -> None:
        """Args: nodes: None without the right to list them: a pod's host tells its node's address."""
        pods = [pod for pod in pods if not pod.finished]
        names = {pod.spec.node_name for pod in pods}
        self._addresses = (
            None if nodes is None else {node.metadata.name: node.address for node in nodes}
        )
        known = nodes or ()
        self._state = ClusterState((node for node in known if node.metadata.name in names), pods)
        self._any = next(iter(self._state.shared_nodes()), None) or _first_shared(known)

    def node_address(self, pod: TrainingPod) -> str:
        """Return the address of a pod's node; empty before there is a node, and when it is gone."""
        if self._addresses is None:
            return pod.status.host_ip
        return self._addresses.get(pod.spec.node_name, "")

    def requested(self, pod: Pod) -> float | None:
        """Return the cards that a pod requests, rounded to a tenth; None if that cannot be told.

        Shares of a pod without a node are those of some sharing node's first card.
        """
        demand = pod.demand()
        if not demand.requests_gpu:
            return pod.amount(TOPOLOGY)
        shared = self._state.shared_node(pod.spec.node_name) or self._any
        try:
            shares = [_share(part, shared) for part in demand.parts]
        except InvalidRecord:
            return None
        known = [share for share in shares if share is not None]
        return round(sum(known), 1) if len(known) == len(shares) else None

    def allocated(self, pod: Pod) -> float | None:
        """Return the cards that a pod holds, from the time at which it has a node until it ends.

        None if that cannot be told.
        """
        return self.requested(pod) if pod.spec.node_name and not pod.finished else 0

    def held(self, pod: Pod) -> tuple[workloads.CardUse, ...]:
        """Return the cards that are known to be a pod's, by index."""
        allocation = self._state.allocation(pod.metadata.uid)
        if allocation is None or allocation.error is not None:
            return ()
        held: dict[int, int] = {}
        for piece in allocation.slices:
            held[piece.card] = held.get(piece.card, 0) + piece.memory_mib
        return tuple(workloads.CardUse(index, total_mib=mib) for index, mib in sorted(held.items()))


def _first_shared(nodes: Iterable[Node]) -> SharedNode | None:
    for node in nodes:
        shared = ClusterState([node]).shared_node(node.metadata.name)
        if shared is not None:
            return shared
    return None


def _share(part: SliceRequest, shared: SharedNode | None) -> float | None:
    """Return what a container requests, in cards; None if no card's size is known."""
    request = part.request
    if request.whole:
        return request.cards
    if request.memory is None:
        return request.cards * request.compute / WHOLE_COMPUTE
    if shared is None:
        return None
    card = shared.node.cards[0]
    size = card_units(card.memory_mib, shared.unit_mib)
    units = mib_to_units(nominal_mib(request, shared.node, card), card.memory_mib, shared.unit_mib)
    return units / size * request.cards if size else 0


SUBMISSION_S = 60.0
"""A submission that has not resumed its root object after this time was interrupted."""

EXTERNAL_ADDRESS = "its Service has no external address yet"
"""Why a notebook that runs is not reached as its user has asked for."""

_PHASES: dict[str, workloads.Phase] = {phase: phase for phase in get_args(workloads.Phase)}
_ENDED: dict[str, JobStatus] = {
    "Failed": "FAILED",
    "Complete": "SUCCEEDED",
    "Completed": "SUCCEEDED",
    "Succeeded": "SUCCEEDED",
}
"""Statuses by the types of final conditions."""

_FOREIGN: dict[training_objects.ForeignKind, Trainer] = {
    "MPIJob": "mpijob",
    "TFJob": "tfjob",
    "PyTorchJob": "pytorchjob",
    "TrainJob": "trainjob",
}

Members = dict[tuple[str, int], TrainingPod]
"""The current pods of a job, by role and index."""

Queue = Mapping[tuple[str, str], int]
"""Positions in the queue by namespace and name, of a pod or its gang."""


def training_jobs(
    objects: TrainingObjects, now: float, queue: Queue | None = None
) -> list[TrainingJob]:
    """Return all jobs, the newest first.

    Args:
        objects: the objects.
        now: Unix seconds.
        queue: the cluster's queue. None if that is not known: then a job has the position that the
            scheduler has published on its pods, if it has.
    """
    cards = PodCards(objects.nodes, objects.pods)
    own, others = _group(objects)
    services: dict[tuple[str, str], list[training_objects.Service]] = {}
    for service in objects.services:
        key = service.metadata.namespace, service.metadata.labels.get(training_objects.JOB, "")
        services.setdefault(key, []).append(service)
    address = _cluster_address(objects)
    jobs = []
    for root in objects.roots:
        key = root.metadata.namespace, root.metadata.name
        run = objects.current(root)
        job = _own_job(root, run, own.get(key, []), cards, now, queue)
        if job.status == "PENDING":
            blocked = _blocked(run, objects.creation_failures, len(job.instances))
            job = replace(job, blocked=blocked, why=job.why or blocked)
        reach = _reach_notebook if job.trainer == "notebook" else _reach_tensorboard
        jobs.append(reach(job, own.get(key, []), services.get(key, []), address))
    for foreign in objects.foreign:
        meta = foreign.metadata
        job = _foreign_job(foreign, others.get(meta.uid, []), cards, queue)
        boards = [
            service
            for service in objects.tensorboards
            if service.metadata.namespace == meta.namespace
            and service.metadata.labels.get(training_objects.ARENAS_NAME) == meta.name
        ]
        jobs.append(_reach_tensorboard(job, (), boards, address))
    return sorted(jobs, key=lambda job: (-job.created, job.namespace, job.name))


def _group(
    objects: TrainingObjects,
) -> tuple[dict[tuple[str, str], list[TrainingPod]], dict[str, list[TrainingPod]]]:
    """Return the pods of fenka's jobs by namespace and name, and of other jobs by UID."""
    own: dict[tuple[str, str], list[TrainingPod]] = {}
    others: dict[str, list[TrainingPod]] = {}
    uids = {
        (job.metadata.namespace, label, job.metadata.name): job.metadata.uid
        for job in objects.foreign
        for label in training_objects.FOREIGN_NAME_LABELS[job.kind]
    }
    for pod in objects.pods:
        namespace, labels = pod.metadata.namespace, pod.metadata.labels
        if training_objects.JOB in labels:
            own.setdefault((namespace, labels[training_objects.JOB]), []).append(pod)
            continue
        keys = {(namespace, label, name) for label, name in labels.items()}
        for uid in {uids[key] for key in keys & uids.keys()}:
            others.setdefault(uid, []).append(pod)
    return own, others


# ---- fenka's own ----


def _own_job(
    root: Root,
    run: Root,
    pods: Iterable[TrainingPod],
    cards: PodCards,
    now: float,
    queue: Queue | None,
) -> TrainingJob:
    meta = root.metadata
    trainer = workloads.TRAINERS.get(meta.labels.get(training_objects.KIND, ""), "mpijob")
    members = _members(run, pods)
    status, end = _own_status(run, trainer, members), final_condition(run.status.conditions)
    instances = _own_instances(run, meta.name, trainer, members, cards)
    created = seconds(run.metadata.creation_timestamp) or 0
    return TrainingJob(
        meta.name,
        meta.namespace,
        meta.uid,
        status,
        trainer,
        created,
        ended=None if end is None else _ended_at(run, end, members.values()),
        instances=instances,
        absent=_absent(run.templates, instances, cards),
        priority=run.priority_class,
        position=_position(status, members.values(), queue),
        why=_why(status, end, members.values()),
        note=_note(run, status, now - created),
    )


def _own_instances(
    root: Root, job: str, trainer: Trainer, members: Members, cards: PodCards
) -> tuple[JobProcess, ...]:
    """Return the instances that are shown, the chief first."""
    order = [*root.roles]
    chief = workloads.chief_role(order)
    order.sort(key=lambda role: role != chief)
    if final_condition(root.status.conditions) is not None:
        # Pods that still run are about to be removed.
        members = {key: pod for key, pod in members.items() if pod.finished and not pod.gone}
    return tuple(
        _instance(
            members[role, index],
            cards,
            name=workloads.instance_name(job, trainer, role, index),
            role=role,
            index=index,
            chief=(role, index) == (chief, 0),
        )
        for role, index in sorted(members, key=lambda place: (order.index(place[0]), place[1]))
    )


def _members(root: Root, pods: Iterable[TrainingPod]) -> Members:
    """Return the newest pod of each role and index that the root declares."""
    declared = root.roles
    members: Members = {}
    for pod in sorted(pods, key=_generation):
        # A pod of a deleted job of the same name may still exist.
        if pod.metadata.creation_timestamp < root.metadata.creation_timestamp:
            continue
        role = pod.metadata.labels.get(training_objects.ROLE, "main")
        index = _number(pod.metadata.labels.get(training_objects.COMPLETION_INDEX, "0"))
        if index is not None and index < declared.get(role, 0):
            members[role, index] = pod
    return members


def _generation(pod: TrainingPod) -> tuple[int, bool, str]:
    attempt = _number(pod.metadata.labels.get(training_objects.RESTART_ATTEMPT, "0"))
    return attempt or 0, not pod.gone, pod.metadata.creation_timestamp


def _own_status(root: Root, trainer: Trainer, members: Members) -> JobStatus:
    end, restartable = final_condition(root.status.conditions), trainer == "notebook"
    if end is not None:
        status = _ENDED[end.type]
        return "STOPPED" if restartable and status == "SUCCEEDED" else status
    if root.suspended:
        return (
            "STOPPED"
            if restartable and training_objects.SUBMITTED in root.metadata.annotations
            else "QUEUING"
        )
    running = sum(_started(pod) and not pod.gone for pod in members.values())
    return "RUNNING" if running == sum(root.roles.values()) else "PENDING"


def _started(pod: TrainingPod) -> bool:
    """Return whether a pod's program runs or has succeeded. A crashing pod is `Running` to Kubernetes."""
    return pod.status.phase in ("Running", "Succeeded") and not pod.crashing


def _ended_at(job: Root | ForeignJob, end: Condition, pods: Iterable[TrainingPod]) -> float | None:
    """Return when a job ended; None if neither it nor its pods say so."""
    told = job.status.completion_time or end.last_transition_time
    return seconds(told or max((pod.ended_at for pod in pods), default=""))


def _absent(
    templates: Iterable[training_objects.RoleTemplate],
    instances: Iterable[JobProcess],
    cards: PodCards,
) -> tuple[float | None, ...]:
    """Return what each role's pods request that are no instances."""
    present = Counter(instance.role for instance in instances)
    amounts = list[float | None]()
    for role, replicas, template in templates:
        if replicas > present[role]:
            requested = cards.requested(template.pod)
            amounts.append(requested and requested * (replicas - present[role]))
    return tuple(amounts)


def _why(status: JobStatus, end: Condition | None, pods: Iterable[TrainingPod]) -> str:
    """Return why the job waits or has failed; empty if nothing says so."""
    if status == "FAILED":
        return end.message if end is not None else ""
    if status != "PENDING":
        return ""
    reasons = (pod.unschedulable or pod.crashing for pod in pods)
    return next(filter(None, reasons), "")


def _blocked(run: Root, failures: Iterable[training_objects.TrainingEvent], present: int) -> str:
    """Return why pods cannot be created, such as an exceeded quota; empty if they can."""
    if run.status.problem or present >= sum(run.roles.values()):
        return run.status.problem
    messages = [event.message for event in failures if event.concerns_jobs_of(run)]
    return messages[-1].removeprefix("Error creating: ") if messages else ""


def _position(status: JobStatus, pods: Iterable[TrainingPod], queue: Queue | None) -> int | None:
    """Return the first position in the queue of a job's pods."""
    if status != "PENDING":
        return None
    waiting = [pod for pod in pods if not (pod.spec.node_name or pod.finished)]
    if queue is None:
        published = (read_position(pod) for pod in waiting)
        return min((position for position in published if position is not None), default=None)
    names = {(pod.metadata.namespace, group_name(pod) or pod.metadata.name) for pod in waiting}
    return min((queue[name] for name in names & queue.keys()), default=None)


def _note(root: Root, status: JobStatus, age_s: float) -> str:
    meta = root.metadata
    if status == "STOPPED":
        return f"fenka start {meta.labels[training_objects.JOB]} starts it again"
    if (
        not root.suspended
        or training_objects.SUBMITTED in meta.annotations
        or training_objects.QUEUE_NAME in meta.labels
        or final_condition(root.status.conditions) is not None
    ):
        return ""
    if age_s < SUBMISSION_S:
        return "it is being submitted"
    return (
        "its submission was interrupted, and it will not start: delete it "
        f"(fenka delete {meta.name}) and submit it again"
    )


def _reach_tensorboard(
    job: TrainingJob,
    _: Sequence[TrainingPod],
    services: Iterable[training_objects.Service],
    address: str,
) -> TrainingJob:
    """Add the address of a job's TensorBoard."""
    url = next(filter(None, (service.url(address) for service in services)), "")
    return replace(job, tensorboard=url) if url else job


def _reach_notebook(
    job: TrainingJob,
    pods: Sequence[TrainingPod],
    services: Iterable[training_objects.Service],
    address: str,
) -> TrainingJob:
    """Add where a notebook answers, if it does."""
    chief = job.chief
    ready = chief is not None and any(
        pod.metadata.name == chief.pod and pod.ready and not pod.gone for pod in pods
    )
    service = next((service for service in services if service.metadata.name == job.name), None)
    if not ready or service is None:
        return job
    if service.external_address:
        return replace(job, address=f"http://{service.external_address}/lab")
    awaited = EXTERNAL_ADDRESS if service.spec.type == "LoadBalancer" else ""
    if service.node_port and address:
        return replace(job, address=f"http://{address}:{service.node_port}/lab", why=awaited)
    forward = f"kubectl port-forward -n {job.namespace} service/{job.name} 8888:80"
    return replace(job, address=f"http://localhost:8888/lab after {forward}", why=awaited)


def _cluster_address(objects: TrainingObjects) -> str:
    """Return the address of a node that is ready: a NodePort is open on all of them."""
    if objects.nodes is None:
        return next((pod.status.host_ip for pod in objects.pods if pod.status.host_ip), "")
    ready = sorted((node.metadata.name, node.address) for node in objects.nodes if node.ready)
    return next((address for _, address in ready), "")


# ---- other operators' ----


def _foreign_job(
    job: ForeignJob, pods: Sequence[TrainingPod], cards: PodCards, queue: Queue | None
) -> TrainingJob:
    meta = job.metadata
    status, end = _foreign_status(job, pods)
    places = [_foreign_place(pod) for pod in pods]
    chief = _foreign_chief(job, {role for role, _ in places}), 0
    instances = [
        _instance(
            pod,
            cards,
            name=pod.metadata.name,
            role=role,
            index=index,
            chief=(role, index) == chief or (not chief[0] and len(pods) == 1),
        )
        for pod, (role, index) in zip(pods, places, strict=True)
        if end is None or not pod.gone
    ]
    instances.sort(
        key=lambda instance: (not instance.chief, instance.role, instance.index, instance.name)
    )
    return TrainingJob(
        meta.name,
        meta.namespace,
        meta.uid,
        status,
        _FOREIGN[job.kind],
        seconds(meta.creation_timestamp) or 0,
        ended=None if end is None else _ended_at(job, end, pods),
        instances=tuple(instances),
        absent=_absent(job.templates, instances, cards),
        priority=next((pod.spec.priority_class_name for pod in pods), ""),
        position=_position(status, pods, queue),
        why=_why(status, end, pods),
        foreign=True,
    )


def _foreign_status(
    job: ForeignJob, pods: Sequence[TrainingPod]
) -> tuple[JobStatus, Condition | None]:
    conditions = job.status.conditions or ()
    end = final_condition(conditions)
    if end is None and job.status.launcher_status in ("Succeeded", "Failed"):
        end = Condition(type=job.status.launcher_status, status="True")
    if end is not None:
        return _ENDED[end.type], end
    current = {condition.type for condition in conditions if condition.status == "True"}
    alive = [pod for pod in pods if not pod.gone]
    # Queuing is kube-queue's, and may stay after the job has left its queue.
    if "Suspended" in current or ("Queuing" in current and not alive):
        return "QUEUING", None
    started = bool(alive) and all(_started(pod) for pod in alive)
    return "RUNNING" if started else "PENDING", None


def _foreign_chief(job: ForeignJob, present: set[str]) -> str:
    """Return the role of the chief, whose pod may not exist yet; empty if that is not known."""
    # The launcher is made when all workers run.
    declared = {"launcher"} if job.kind == "MPIJob" else {part.role for part in job.templates}
    return workloads.chief_role(declared | present)


def _foreign_place(pod: TrainingPod) -> tuple[str, int]:
    """Return the role and the index of a pod."""
    labels = pod.metadata.labels
    role = next(
        (labels[label] for label in training_objects.FOREIGN_ROLE_LABELS if label in labels), "main"
    )
    index = next(
        (labels[label] for label in training_objects.FOREIGN_INDEX_LABELS if label in labels), None
    )
    if index is None:
        # MPIJob v1alpha1's workers are a StatefulSet's; its launcher is a Job's only pod.
        suffix = pod.metadata.name.rpartition("-")[2]
        index = suffix if role != "launcher" else "0"
    return role.lower(), _number(index) or 0


# ---- both ----


def _instance(
    pod: TrainingPod, cards: PodCards, *, name: str, role: str, index: int, chief: bool
) -> JobProcess:
    return JobProcess(
        name,
        pod.metadata.name,
        role,
        index,
        chief,
        training_objects.status_word(pod),
        _PHASES.get(pod.status.phase, "Unknown"),
        seconds(pod.metadata.creation_timestamp) or 0,
        node=pod.spec.node_name,
        node_address=cards.node_address(pod),
        address=pod.status.pod_ip,
        requested=cards.requested(pod),
        allocated=cards.allocated(pod),
        cards=cards.held(pod),
        exit_code=pod.exit_code,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


_KINDS = {label: kind for kind, (label, _) in service_objects.TYPES.items()}
_PORTS = {"grpc-serving": "GRPC", "http-serving": "RESTFUL"}
"""arena's names of ports, in the order in which it prints them."""

Name = tuple[str, str]
"""Namespace and name of a service."""


def service_versions(objects: service_objects.ServiceObjects, now: float) -> list[ServiceVersion]:
    """Return all versions, by namespace, name and version."""
    cards = PodCards(objects.nodes, objects.pods)
    addresses = {_name(address): address for address in objects.addresses}
    pods: dict[tuple[Name, str], list[TrainingPod]] = {}
    for pod in objects.pods:
        key = _name(pod), pod.metadata.labels.get(service_objects.VERSION, "")
        pods.setdefault(key, []).append(pod)
    names: dict[Name, list[str]] = {}
    for deployment in objects.versions:
        names.setdefault(_name(deployment), []).append(deployment.version)
    divided = {name: _shares(addresses.get(name), versions) for name, versions in names.items()}
    versions = [
        _version(
            version,
            addresses.get(_name(version)),
            [_replica(pod, cards) for pod in pods.get((_name(version), version.version), ())],
            divided[_name(version)].get(version.version),
            now,
        )
        for version in objects.versions
    ]
    return sorted(versions, key=lambda shown: (shown.namespace, shown.name, shown.version))


def _name(
    item: service_objects.ServingDeployment | service_objects.AddressService | TrainingPod,
) -> Name:
    return item.metadata.namespace, item.metadata.labels.get(service_objects.SERVICE, "")


def _version(
    deployment: service_objects.ServingDeployment,
    address: service_objects.AddressService | None,
    replicas: Iterable[JobProcess],
    share: int | None,
    now: float,
) -> ServiceVersion:
    meta = deployment.metadata
    created = seconds(meta.creation_timestamp) or 0
    return ServiceVersion(
        meta.labels[service_objects.SERVICE],
        meta.namespace,
        meta.uid,
        _KINDS.get(meta.labels.get(service_objects.TYPE, ""), "custom"),
        deployment.version,
        deployment.spec.replicas,
        deployment.status.available_replicas,
        created,
        address=address.address if address else "",
        ports=_ports(address),
        share=share,
        instances=tuple(sorted(replicas, key=lambda replica: (replica.created, replica.name))),
        note=_service_note(deployment, now - created),
        rolled_out=deployment.rolled_out and not deployment.interrupted,
    )


def _ports(address: service_objects.AddressService | None) -> tuple[workloads.ServingPort, ...]:
    known = {port.name: port for port in address.spec.ports} if address else {}
    return tuple(
        workloads.ServingPort(word, known[name].port, known[name].node_port)
        for name, word in _PORTS.items()
        if name in known
    )


def _shares(
    address: service_objects.AddressService | None, versions: Iterable[str]
) -> Mapping[str, int]:
    """Return the percent of the requests that each version gets; nothing if they are not divided."""
    weights = service_objects.read_weights(address.metadata.annotations) if address else None
    return {} if weights is None else shares(weights, [*versions])


def _service_note(deployment: service_objects.ServingDeployment, age_s: float) -> str:
    if not deployment.interrupted:
        return deployment.status.problem
    if age_s < SUBMISSION_S:
        return "it is being deployed"
    service, version = deployment.metadata.labels[service_objects.SERVICE], deployment.version
    return (
        "its deployment was interrupted, and it will not start: delete it (fenka serve delete "
        f"{service} -v {version}) and deploy it again"
    )


def _replica(pod: TrainingPod, cards: PodCards) -> JobProcess:
    statuses = pod.status.container_statuses
    name = pod.metadata.name
    return replace(
        _instance(pod, cards, name=name, role=service_objects.REPLICA, index=0, chief=False),
        ready=sum(status.ready for status in statuses),
        containers=len(pod.spec.containers),
        restarts=sum(status.restart_count for status in statuses),
        why=pod.unschedulable or "",
        memory_units=pod.amount(gpushare.MEMORY),
        compute=pod.amount(ack.CORE),
        cpus=_cpus(pod),
    )


def _cpus(pod: TrainingPod) -> float:
    """Return the processors that a pod's containers request together."""
    amounts = (container.resources.requests.get("cpu", "0") for container in pod.spec.containers)
    return sum(map(parse_milli, amounts)) / 1000
