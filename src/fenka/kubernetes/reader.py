"""Reads once, without watches: a cluster, training jobs, services, and what fenka's programs publish.

Each kind is one LIST, and all of them run at the same time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from fenka.cluster import objects, queue_snapshot, service_objects, training_objects
from fenka.cluster.pod_groups import POD_GROUPS_PATH, PodGroup, group_key, names_pod_group
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.core.inventory import Toleration
from fenka.dialects import gpushare, nodes
from fenka.dialects.base import Dialect, InvalidRecord
from fenka.dialects.registry import WITH_HAMI
from fenka.kubernetes.api_client import Api, ApiError, decoded, if_accepted
from fenka.kubernetes.election import CoordinationLease

PAGE = 2000
"""Objects a page: a round trip costs more than the server's memory for this many."""

MAX_NAMED = 5
"""Objects that an error names."""

HOLDING = "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="
"""Field selector of the pods that can hold anything."""

UNSTARTED = "status.phase=Pending,spec.nodeName!="
"""Field selector of the pods that have a node and have not started there."""

_NONE: Mapping[str, str | int] = MappingProxyType({})


class _Meta(objects.ObjectMeta):
    owner_references: tuple[objects.OwnerReference, ...] = msgspec.field(default=(), name="-owners")


class _Resources(objects.ResourceRequirements):
    requests: Mapping[str, str | int] = msgspec.field(default=_NONE, name="-requests")


class _Container(objects.Container):
    image: str = msgspec.field(default="", name="-image")
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Spec(objects.PodSpec):
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()


class _ListedStatus(objects.PodStatus):
    container_statuses: tuple[objects.ContainerStatus, ...] = msgspec.field(
        default=(), name="-containers"
    )


class _Listed(objects.Pod):
    """A pod with the fields that decide about cards.

    Renaming fields to names that no server sends leaves them empty. Not decoding them saves 5 % of a screen.
    """

    metadata: _Meta = msgspec.field(default_factory=_Meta)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _ListedStatus = msgspec.field(default_factory=_ListedStatus)


class _HolderSpec(_Spec):
    tolerations: tuple[Toleration, ...] = msgspec.field(default=(), name="-tolerations")


class _HolderStatus(_ListedStatus):
    conditions: tuple[objects.Condition, ...] = msgspec.field(default=(), name="-conditions")


class _Holder(_Listed):
    """A pod read only for what it holds."""

    spec: _HolderSpec = msgspec.field(default_factory=_HolderSpec)
    status: _HolderStatus = msgspec.field(default_factory=_HolderStatus)


T = TypeVar("T")
_COLLECTIONS: Mapping[type, tuple[str, str]] = {
    objects.Node: ("/api/v1", "nodes"),
    training_objects.TrainingPod: ("/api/v1", "pods"),
    training_objects.TrainingEvent: ("/api/v1", "events"),
    training_objects.Service: ("/api/v1", "services"),
    service_objects.AddressService: ("/api/v1", "services"),
    training_objects.BatchJob: (training_objects.JOBS_API, "jobs"),
    training_objects.JobSet: (training_objects.JOBSETS_API, "jobsets"),
    training_objects.Deployment: (training_objects.DEPLOYMENTS_API, "deployments"),
    service_objects.ServingDeployment: (training_objects.DEPLOYMENTS_API, "deployments"),
}
"""The API and the plural of each kind."""


def collection_path(api: str, namespace: str | None, kind: str) -> str:
    """Return the path of a collection; of all namespaces for None."""
    return f"{api}/namespaces/{namespace}/{kind}" if namespace else f"{api}/{kind}"


async def _list(
    api: Api, kind: type[T], namespace: str | None = None, labels: str = "", fields: str = ""
) -> list[T]:
    """Return the objects of a kind that selectors choose. Raises ApiError, ApiUnreachable."""
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    group, plural = _COLLECTIONS[kind]
    query = {name: text for name, text in selectors.items() if text}
    items, _ = await api.list(collection_path(group, namespace, plural), kind, limit=PAGE, **query)
    return items


async def _permitted(listing: Awaitable[list[T]], refusals: tuple[int, ...] = (403,)) -> list[T]:
    """Return what is listed; nothing without the right to list it, or if the kind is not there."""
    return await if_accepted(listing, refusals) or []


async def read_cluster(
    api: Api,
    node: str | None = None,
    *,
    dialects: tuple[Dialect, ...] = WITH_HAMI,
    all_pods: bool = False,
) -> ClusterSnapshot:
    """Return the cluster, or one node of it.

    Args:
        dialects: by which pods' requests and records are read. Whether the scheduler reads HAMi's names, too,
            matters only for the order of pending pods.
        all_pods: include pods that hold nothing: pending and finished ones. Only then do pods have their
            tolerations and conditions. None has its owners and images, or its containers' states.
    """
    selector = HOLDING if node is None else f"{HOLDING},spec.nodeName={node}"
    state = ClusterState(dialects=dialects)
    state.set_time(time.time())
    nodes, pods, cards = await asyncio.gather(
        _read_nodes(api, node, state),
        _read_pods(api, _Listed, {}, state)
        if all_pods
        else _read_pods(api, _Holder, {"fieldSelector": selector}, state),
        _list_unhealthy_cards(api),
    )
    return ClusterSnapshot.of(nodes, pods, cards, state=state)


async def read_waiting_surroundings(api: Api, pod: objects.Pod) -> ClusterSnapshot:
    """Return the cluster with all that explains why a pod has no node. Raises ApiError, ApiUnreachable.

    Beside the pods that hold something it has the members of the pod's gang, which need not have nodes, and
    the states of containers that have not started. Only these pods have their owners.
    """
    snapshot, unstarted, members = await asyncio.gather(
        read_cluster(api),
        api.list("/api/v1/pods", objects.Pod, limit=PAGE, fieldSelector=UNSTARTED),
        _read_gang(api, pod),
    )
    pods = {known.metadata.uid: known for known in snapshot.pods}
    for known in (*unstarted[0], *members):
        pods[known.metadata.uid] = known
        if known.spec.node_name:
            snapshot.state.set_pod(known)
    groups = await read_pod_groups(api, pod.metadata.namespace) if names_pod_group(pod) else None
    return ClusterSnapshot.of(snapshot.nodes, pods.values(), state=snapshot.state, groups=groups)


async def _read_gang(api: Api, pod: objects.Pod) -> list[objects.Pod]:
    """Return the pods of the pod's gang; none if it names no gang."""
    key = group_key(pod)
    if key is None:
        return []
    path = collection_path("/api/v1", pod.metadata.namespace, "pods")
    pods, _ = await api.list(path, objects.Pod, limit=PAGE)
    return [other for other in pods if group_key(other) == key]


async def read_pod_groups(api: Api, namespace: str | None = None) -> dict[str, PodGroup] | None:
    """Return the PodGroups of a namespace or of all, by namespace/name; None if they may not be read.

    Raises ApiError, ApiUnreachable.
    """
    path = POD_GROUPS_PATH
    if namespace:
        group, _, plural = path.rpartition("/")
        path = collection_path(group, namespace, plural)
    try:
        groups, _ = await api.list(path, PodGroup)
    except ApiError as why:
        if why.status == 403:
            return None
        if why.status == 404:
            # A server that does not know the kind has none.
            return {}
        raise
    return {group.full_name: group for group in groups}


async def read_scheduler_options(api: Api) -> SchedulerOptions:
    """Return the options that the scheduler has published on its Lease; the defaults if it has not.

    Raises:
        ApiError: without the right to list Leases.
        InvalidRecord: if they are invalid, or several Leases have some. Without the chart's admission
            policies whoever may write Leases in a namespace can publish options there.
    """
    leases, _ = await api.list(
        "/apis/coordination.k8s.io/v1/leases", CoordinationLease, labelSelector=queue_snapshot.LABEL
    )
    name = queue_snapshot.ANNOTATION
    publishing = [lease.metadata for lease in leases if name in lease.metadata.annotations]
    if len(publishing) > 1:
        full_names = ", ".join(
            sorted(f"{meta.namespace}/{meta.name}" for meta in publishing)[:MAX_NAMED]
        )
        raise InvalidRecord(
            f"{len(publishing)} Leases have the annotation {name} ({full_names}): remove it where it is not "
            "the scheduler's"
        )
    if not publishing:
        return SchedulerOptions()
    return queue_snapshot.decode(publishing[0].annotations[name])


async def _read_nodes(api: Api, name: str | None, state: ClusterState) -> list[objects.Node]:
    if name is None:
        nodes = await _list(api, objects.Node)
    else:
        nodes = [await api.get(objects.node_path(name), objects.Node)]
    for node in nodes:
        state.set_node(node)
    return nodes


async def _read_pods(
    api: Api, kind: type[objects.Pod], query: dict[str, str], state: ClusterState
) -> list[objects.Pod]:
    pods = list[objects.Pod]()
    async for page in api.pages("/api/v1/pods", kind, limit=PAGE, **query):
        # Meanwhile the server prepares the next page.
        for pod in page.items or ():
            state.set_pod(pod)
        pods += page.items or ()
    return pods


async def _list_unhealthy_cards(api: Api) -> dict[str, frozenset[int]]:
    """Return indexes of cards by node; nothing without the right to read ConfigMaps."""
    try:
        maps, _ = await api.list("/api/v1/namespaces/kube-system/configmaps", objects.ConfigMap)
    except ApiError:
        return {}
    return {
        node: nodes.parse_indexes(config_map.data.get("gpus", ""))
        for config_map in maps
        if (node := gpushare.node_of_config_map(config_map.metadata.name))
    }


OPERATORS = {
    "kubeflow.org": ("mpijobs", "tfjobs", "pytorchjobs"),
    "trainer.kubeflow.org": ("trainjobs",),
}
"""API groups of other operators, and their kinds of jobs."""


class _ApiGroup(msgspec.Struct):
    name: str
    versions: list[dict[str, str]] = []


class _Groups(msgspec.Struct):
    groups: list[_ApiGroup] = []


async def read_training_objects(
    api: Api, namespace: str | None, name: str | None = None, *, pods_only: bool = False
) -> training_objects.TrainingObjects:
    """Return the objects of all training jobs, or of those with this name.

    Args:
        namespace: None for all namespaces.
        pods_only: read neither Services nor nodes.

    Raises:
        ApiError: without the right to list Jobs, JobSets or pods.
        ApiUnreachable: if the API server does not answer.
    """
    own = f"{training_objects.JOB}={name}" if name else training_objects.JOB
    (roots, runs), pods, foreign, services, nodes = await asyncio.gather(
        read_roots(api, namespace, name),
        _list(api, training_objects.TrainingPod, namespace, own),
        read_foreign(api, namespace, name),
        _none() if pods_only else _permitted(_list(api, training_objects.Service, namespace, own)),
        _none() if pods_only else if_accepted(_list(api, objects.Node), (403,)),
    )
    own_jobs = training_objects.TrainingObjects(roots, pods=pods, runs=runs)
    others, tensorboards, failures = await asyncio.gather(
        _read_foreign_pods(api, namespace, name, {job.kind for job in foreign}),
        _read_tensorboards(api, namespace, name) if foreign and not pods_only else _none(),
        _read_creation_failures(api, namespace) if own_jobs.incomplete else _none(),
    )
    return training_objects.TrainingObjects(
        roots,
        foreign,
        [*pods, *others],
        services,
        None if pods_only else nodes,
        runs,
        tensorboards,
        failures,
    )


async def _none() -> list[Any]:
    return []


async def _read_creation_failures(
    api: Api, namespace: str | None
) -> list[training_objects.TrainingEvent]:
    """Return the events about Jobs whose pods cannot be created; none without the right to list them."""
    selector = f"involvedObject.kind=Job,reason={training_objects.CREATION_FAILED}"
    events = _list(api, training_objects.TrainingEvent, namespace, fields=selector)
    return sorted(await _permitted(events), key=lambda event: event.at)


async def _read_tensorboards(
    api: Api, namespace: str | None, name: str | None
) -> list[training_objects.Service]:
    """Return the Services of arena's TensorBoards; none without the right to list them."""
    job = f"{training_objects.ARENAS_NAME}={name}" if name else training_objects.ARENAS_NAME
    return await _permitted(
        _list(api, training_objects.Service, namespace, f"role=tensorboard,{job}")
    )


async def read_roots(
    api: Api, namespace: str | None, name: str | None = None
) -> tuple[list[training_objects.Root], list[training_objects.BatchJob]]:
    """Return the root objects of fenka's jobs, and later runs of notebooks.

    Raises ApiError, ApiUnreachable.
    """
    own = f"{training_objects.JOB}={name}" if name else training_objects.JOB
    jobs, job_sets, notebooks = await asyncio.gather(
        # JobSet's child Jobs have the label too.
        _list(
            api,
            training_objects.BatchJob,
            namespace,
            f"{own},!{training_objects.JOBSET_NAME}",
        ),
        _permitted(_list(api, training_objects.JobSet, namespace, own), (404,)),
        # Rights of earlier releases do not include them.
        _permitted(
            _list(
                api,
                training_objects.Deployment,
                namespace,
                f"{own},{training_objects.KIND}=notebook",
            )
        ),
    )
    roots: list[training_objects.Root] = [*jobs, *job_sets, *notebooks]
    # The label alone does not make a root: its dependents have the label as well.
    named = [
        root for root in roots if root.metadata.labels[training_objects.JOB] == root.metadata.name
    ]
    return named, [job for job in jobs if job.metadata.owner_references]


async def read_events(
    api: Api, namespace: str, concerns: Callable[[training_objects.TrainingEvent], bool]
) -> list[training_objects.TrainingEvent]:
    """Return those events of a namespace, the oldest first. Raises ApiError, ApiUnreachable."""
    events = await _list(api, training_objects.TrainingEvent, namespace)
    return sorted(filter(concerns, events), key=lambda event: event.at)


async def read_foreign(
    api: Api, namespace: str | None, name: str | None
) -> list[training_objects.ForeignJob]:
    """Return the jobs of other operators whose kinds the cluster has, and which may be listed."""
    groups = await if_accepted(api.get("/apis", _Groups), (403, 404))
    paths = [
        collection_path(f"/apis/{group.name}/{version['version']}", namespace, kind)
        for group in (groups.groups if groups else ())
        for kind in OPERATORS.get(group.name, ())
        for version in group.versions
    ]
    selected = {"fieldSelector": f"metadata.name={name}"} if name else {}
    answers = await asyncio.gather(
        *(
            if_accepted(api.list(path, msgspec.Raw, limit=PAGE, **selected), (403, 404))
            for path in paths
        )
    )
    jobs: dict[str, training_objects.ForeignJob] = {}
    for answer in answers:
        for raw in answer[0] if answer else ():
            try:
                job = decoded(raw, training_objects.ForeignJob)
            except ApiError:
                # Some versions of these kinds accept any status.
                continue
            jobs.setdefault(job.metadata.uid, job)
    return [*jobs.values()]


async def _read_foreign_pods(
    api: Api, namespace: str | None, name: str | None, kinds: set[training_objects.ForeignKind]
) -> list[training_objects.TrainingPod]:
    """Return the pods of other operators' jobs of these kinds."""
    labels = dict.fromkeys(
        label for kind in kinds for label in training_objects.FOREIGN_NAME_LABELS[kind]
    )
    answers = await asyncio.gather(
        *(
            _list(
                api,
                training_objects.TrainingPod,
                namespace,
                f"{label}={name},!{training_objects.JOB}"
                if name
                else f"{label},!{training_objects.JOB}",
            )
            for label in labels
        )
    )
    return [*{pod.metadata.uid: pod for pods in answers for pod in pods}.values()]


PUBLISHED = "/api/v1/namespaces/kube-public/configmaps/fenka"
"""The chart's values for all users."""


async def read_services(
    api: Api, namespace: str | None, name: str | None = None, *, pods: bool = True
) -> service_objects.ServiceObjects:
    """Return the objects of all services, or of the one with this name.

    Args:
        api: The cluster.
        namespace: None for all namespaces.
        name: None for all services.
        pods: Read the versions' pods and all nodes too.

    Raises:
        ApiError: Without the right to list Deployments, Services or pods.
        ApiUnreachable: The API server does not answer.
    """
    own = f"{training_objects.KIND}={service_objects.SERVICE_KIND}" + (
        f",{service_objects.SERVICE}={name}" if name else f",{service_objects.SERVICE}"
    )
    replica_label = f"{own},{training_objects.ROLE}={service_objects.REPLICA}"
    address_label = f"{own},{training_objects.ROLE}={service_objects.ADDRESS}"
    deployments, addresses, replicas, nodes = await asyncio.gather(
        _list(api, service_objects.ServingDeployment, namespace, own),
        _list(api, service_objects.AddressService, namespace, address_label),
        _list(api, training_objects.TrainingPod, namespace, replica_label) if pods else _none(),
        if_accepted(_list(api, objects.Node), (403,)) if pods else _none(),
    )
    by_role: dict[str, list[service_objects.ServingDeployment]] = {
        service_objects.REPLICA: [],
        service_objects.GATEWAY: [],
    }
    for deployment in deployments:
        role = deployment.metadata.labels.get(training_objects.ROLE, "")
        if role in by_role and _is_named(deployment, role):
            by_role[role].append(deployment)
    return service_objects.ServiceObjects(
        by_role[service_objects.REPLICA],
        by_role[service_objects.GATEWAY],
        [
            address
            for address in addresses
            if address.metadata.name == address.metadata.labels[service_objects.SERVICE]
        ],
        replicas,
        nodes if pods else None,
    )


def _is_named(deployment: service_objects.ServingDeployment, role: str) -> bool:
    """Return whether its name is that of its role. Every user who may create Deployments writes their
    labels."""
    suffix = deployment.version if role == service_objects.REPLICA else service_objects.GATEWAY
    service = deployment.metadata.labels[service_objects.SERVICE]
    return bool(suffix) and deployment.metadata.name == f"{service}-{suffix}"


async def read_published(api: Api) -> Mapping[str, str]:
    """Return what the chart publishes for users; nothing if it does not. Raises ApiError, ApiUnreachable."""
    published = await if_accepted(api.get(PUBLISHED, objects.ConfigMap), (403, 404))
    return published.data if published else {}


async def read_namespace(api: Api) -> str:
    """Return the namespace of fenka's programs; empty if the chart does not publish it.

    Raises ApiError, ApiUnreachable.
    """
    return (await read_published(api)).get("namespace", "")


async def read_screen(api: Api, screen: str, row: type[T]) -> list[T] | None:
    """Return the rows of a screen as the scheduler serves them, None if this user may not read them.

    Raises ApiError, ApiUnreachable.
    """
    namespace, _, service = (await read_published(api)).get("screens", "").partition("/")
    if not service:
        return None
    path = f"/api/v1/namespaces/{namespace}/services/{service}/proxy/gpushare-scheduler/{screen}"
    return await if_accepted(api.get(path, list[row]), (403, 404))  # type: ignore[valid-type]


MAX_USAGE_BYTES = 256 << 20
"""A year of a hundred thousand pods."""


async def read_usage(api: Api, kind: type[T], **query: str | int) -> T | None:
    """Return what the dashboard's pod has recorded of the cards' usage; None if none records it.

    Raises ApiError, ApiUnreachable, InvalidRecord.
    """
    namespace, _, service = (await read_published(api)).get("usage", "").partition("/")
    if not service:
        return None
    path = f"/api/v1/namespaces/{namespace}/services/{service}/proxy/usage"
    body = await api.read_within(path, query, MAX_USAGE_BYTES)
    try:
        return msgspec.json.decode(body or b"", type=kind)
    except msgspec.MsgspecError:
        raise InvalidRecord(
            f"{service} of namespace {namespace} does not answer as this fenka understands: use the same "
            "release on both sides"
        ) from None
