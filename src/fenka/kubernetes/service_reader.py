"""Reads the objects of services once: one LIST for each kind, all at the same time."""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from fenka.cluster.objects import Node, Object
from fenka.cluster.service_objects import (
    ADDRESS,
    GATEWAY,
    REPLICA,
    SERVICE,
    SERVICE_KIND,
    VERSION,
    AddressService,
    ServiceObjects,
    ServingDeployment,
)
from fenka.cluster.training_objects import DEPLOYMENTS_API, KIND, ROLE, TrainingPod
from fenka.kubernetes.client import Api, if_accepted
from fenka.kubernetes.cluster_reader import PAGE, collection_path

T = TypeVar("T")
PUBLISHED = "/api/v1/namespaces/kube-public/configmaps/fenka"
"""What the chart publishes for all users."""


class Published(Object):
    """The chart's ConfigMap for users."""

    data: Mapping[str, str] = {}


async def read_services(
    api: Api, namespace: str | None, name: str | None = None, *, pods: bool = True
) -> ServiceObjects:
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
    own = f"{KIND}={SERVICE_KIND}" + (f",{SERVICE}={name}" if name else f",{SERVICE}")
    (deployments, _), (addresses, _), (replicas, nodes) = await asyncio.gather(
        api.list(
            collection_path(DEPLOYMENTS_API, namespace, "deployments"),
            ServingDeployment,
            limit=PAGE,
            labelSelector=own,
        ),
        api.list(
            collection_path("/api/v1", namespace, "services"),
            AddressService,
            limit=PAGE,
            labelSelector=f"{own},{ROLE}={ADDRESS}",
        ),
        _read_pods(api, namespace, f"{own},{ROLE}={REPLICA}") if pods else _nothing(),
    )
    roles: dict[str, list[ServingDeployment]] = {REPLICA: [], GATEWAY: []}
    for each in deployments:
        labels, role = each.metadata.labels, each.metadata.labels.get(ROLE, "")
        # Labels alone do not make a version: whoever may create Deployments writes them.
        suffix = labels.get(VERSION, "") if role == REPLICA else GATEWAY
        if role in roles and suffix and each.metadata.name == f"{labels[SERVICE]}-{suffix}":
            roles[role].append(each)
    return ServiceObjects(
        roles[REPLICA],
        roles[GATEWAY],
        [each for each in addresses if each.metadata.name == each.metadata.labels[SERVICE]],
        replicas,
        nodes,
    )


async def read_published(api: Api) -> Mapping[str, str]:
    """Return what the chart publishes for users; nothing if it does not. Raises ApiError, ApiUnreachable."""
    published = await if_accepted(api.get(PUBLISHED, Published), (403, 404))
    return published.data if published else {}


async def read_screen(api: Api, screen: str, row: type[T]) -> list[T] | None:
    """Return the rows of a screen as the scheduler serves them, None if this user may not read them.

    Raises ApiError, ApiUnreachable.
    """
    namespace, _, service = (await read_published(api)).get("screens", "").partition("/")
    if not service:
        return None
    path = f"/api/v1/namespaces/{namespace}/services/{service}/proxy/gpushare-scheduler/{screen}"
    return await if_accepted(api.get(path, list[row]), (403, 404))  # type: ignore[valid-type]


async def _read_pods(
    api: Api, namespace: str | None, own: str
) -> tuple[list[TrainingPod], list[Node] | None]:
    (pods, _), nodes = await asyncio.gather(
        api.list(
            collection_path("/api/v1", namespace, "pods"),
            TrainingPod,
            limit=PAGE,
            labelSelector=own,
        ),
        if_accepted(api.list("/api/v1/nodes", Node, limit=PAGE), (403,)),
    )
    return pods, nodes[0] if nodes else None


async def _nothing() -> tuple[list[TrainingPod], list[Node] | None]:
    return [], None
