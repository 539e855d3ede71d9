"""Reads a cluster once, by lists instead of watches."""

import asyncio

from fenka.cluster import scheduler_options
from fenka.cluster.objects import ConfigMap, Node, Pod
from fenka.cluster.scheduler_options import SchedulerOptions
from fenka.cluster.snapshot import ClusterSnapshot
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


async def read_cluster(
    api: Api,
    node: str | None = None,
    *,
    dialects: tuple[Dialect, ...] = DIALECTS,
    all_pods: bool = False,
) -> ClusterSnapshot:
    """Return the cluster, or one node of it.

    Args:
        all_pods: include pods that hold nothing: pending and finished ones.
    """
    selector = "" if all_pods else HOLDING if node is None else f"{HOLDING},spec.nodeName={node}"
    nodes, (pods, _), cards = await asyncio.gather(
        _list_nodes(api, node),
        api.list(
            "/api/v1/pods", Pod, limit=PAGE, **({"fieldSelector": selector} if selector else {})
        ),
        _list_unhealthy_cards(api),
    )
    return ClusterSnapshot.of(nodes, pods, cards, dialects)


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


async def _list_nodes(api: Api, name: str | None) -> list[Node]:
    if name is not None:
        return [await api.get(f"/api/v1/nodes/{name}", Node)]
    nodes, _ = await api.list("/api/v1/nodes", Node, limit=PAGE)
    return nodes


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
