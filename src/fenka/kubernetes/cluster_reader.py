"""Reads a cluster once, by lists instead of watches."""

import asyncio
import time
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from fenka.cluster import scheduler_options
from fenka.cluster.objects import (
    Condition,
    ConfigMap,
    Container,
    ContainerStatus,
    Node,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
    Toleration,
    node_path,
)
from fenka.cluster.scheduler_options import SchedulerOptions
from fenka.cluster.snapshot import ClusterSnapshot
from fenka.cluster.state import ClusterState
from fenka.dialects import gpushare, node_inventory
from fenka.dialects.base import Dialect, InvalidRecord
from fenka.dialects.registry import DIALECTS
from fenka.kubernetes.client import Api, ApiError
from fenka.kubernetes.election import Lease

PAGE = 2000
"""Objects a page: a round trip costs more than the server's memory for this many."""

MAX_NAMED = 5
"""Objects that an error names."""

HOLDING = "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="
"""Field selector of the pods that can hold anything."""

_NONE: Mapping[str, str | int] = MappingProxyType({})


class _Meta(ObjectMeta):
    owner_references: tuple[OwnerReference, ...] = msgspec.field(default=(), name="-owners")


class _Resources(ResourceRequirements):
    requests: Mapping[str, str | int] = msgspec.field(default=_NONE, name="-requests")


class _Container(Container):
    image: str = msgspec.field(default="", name="-image")
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Spec(PodSpec):
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()


class _Status(PodStatus):
    container_statuses: tuple[ContainerStatus, ...] = msgspec.field(default=(), name="-containers")


class _Listed(Pod):
    """A pod with the fields that decide about cards.

    Renaming fields to names that no server sends leaves them empty. Not decoding them saves 5 % of a screen.
    """

    metadata: _Meta = msgspec.field(default_factory=_Meta)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _HolderSpec(_Spec):
    tolerations: tuple[Toleration, ...] = msgspec.field(default=(), name="-tolerations")


class _HolderStatus(_Status):
    conditions: tuple[Condition, ...] = msgspec.field(default=(), name="-conditions")


class _Holder(_Listed):
    """A pod read only for what it holds."""

    spec: _HolderSpec = msgspec.field(default_factory=_HolderSpec)
    status: _HolderStatus = msgspec.field(default_factory=_HolderStatus)


def collection_path(api: str, namespace: str | None, kind: str) -> str:
    """Return the path of a collection; of all namespaces for None."""
    return f"{api}/namespaces/{namespace}/{kind}" if namespace else f"{api}/{kind}"


async def read_cluster(
    api: Api,
    node: str | None = None,
    *,
    dialects: tuple[Dialect, ...] = DIALECTS,
    all_pods: bool = False,
) -> ClusterSnapshot:
    """Return the cluster, or one node of it.

    Args:
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


async def read_scheduler_options(api: Api) -> SchedulerOptions:
    """Return the options that the scheduler has published on its Lease; the defaults if it has not.

    Raises:
        ApiError: without the right to list Leases.
        InvalidRecord: if they are invalid, or several Leases have some. Without the chart's admission
            policies whoever may write Leases in a namespace can publish options there.
    """
    leases, _ = await api.list(
        "/apis/coordination.k8s.io/v1/leases", Lease, labelSelector=scheduler_options.LABEL
    )
    name = scheduler_options.ANNOTATION
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
    return scheduler_options.decode(publishing[0].annotations[name])


async def _read_nodes(api: Api, name: str | None, state: ClusterState) -> list[Node]:
    if name is None:
        nodes, _ = await api.list("/api/v1/nodes", Node, limit=PAGE)
    else:
        nodes = [await api.get(node_path(name), Node)]
    for node in nodes:
        state.set_node(node)
    return nodes


async def _read_pods(
    api: Api, kind: type[Pod], query: dict[str, str], state: ClusterState
) -> list[Pod]:
    pods = list[Pod]()
    async for page in api.pages("/api/v1/pods", kind, limit=PAGE, **query):
        # Meanwhile the server prepares the next page.
        for pod in page.items or ():
            state.set_pod(pod)
        pods += page.items or ()
    return pods


async def _list_unhealthy_cards(api: Api) -> dict[str, frozenset[int]]:
    """Return indexes of cards by node; nothing without the right to read ConfigMaps."""
    try:
        maps, _ = await api.list("/api/v1/namespaces/kube-system/configmaps", ConfigMap)
    except ApiError:
        return {}
    return {
        node: node_inventory.parse_indexes(config_map.data.get("gpus", ""))
        for config_map in maps
        if (node := gpushare.node_of_config_map(config_map.metadata.name))
    }
