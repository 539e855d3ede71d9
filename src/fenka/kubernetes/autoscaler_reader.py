"""Reads what the autoscaler publishes, and its configuration."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from fenka.cluster import autoscaling, objects
from fenka.kubernetes.api_client import Api, if_accepted
from fenka.kubernetes.election import CoordinationLease
from fenka.kubernetes.reader import read_published

NAMESPACE, NAME = "autoscalerNamespace", "autoscalerName"
"""Keys of the chart's ConfigMap for users: where the autoscaler's objects are."""


DEFAULT_NAME = "fenka-autoscaler"


CONFIG_KEY = "config.yaml"
"""Key of the ConfigMap with the configuration."""


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """The autoscaler's published status.

    Attributes:
        namespace: where its objects are.
        name: of its Lease, and the beginning of its configuration's name.
        status: None if it has published none yet.
        orders: by their names.
        renewed_at: when a leader last renewed its lease, None if that is not known.
    """

    namespace: str
    name: str = DEFAULT_NAME
    status: autoscaling.AutoscalerStatus | None = None
    orders: Mapping[str, autoscaling.OrderRecord] = field(default_factory=dict)
    renewed_at: float | None = None


async def read_autoscaler(api: Api, namespace: str = "") -> AutoscalerState | None:
    """Return what the autoscaler has published; None if none is installed.

    Args:
        api: the cluster.
        namespace: the autoscaler's, if the chart does not publish it.

    Raises:
        ApiError: without the right to read its ConfigMaps.
        ApiUnreachable: if the API server does not answer.
        InvalidRecord: if something else wrote the ConfigMaps.
    """
    name = DEFAULT_NAME
    if not namespace:
        published = await read_published(api)
        namespace, name = published.get(NAMESPACE, ""), published.get(NAME, name)
    if not namespace:
        return None
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    status, orders, renewed = await asyncio.gather(
        if_accepted(api.get(f"{maps}/{autoscaling.STATUS_MAP}", objects.ConfigMap)),
        if_accepted(api.get(f"{maps}/{autoscaling.ORDERS_MAP}", objects.ConfigMap)),
        if_accepted(api.get(f"{leases}/{name}", CoordinationLease), (403, 404)),
    )
    text = status.data.get(autoscaling.STATUS_KEY) if status else None
    return AutoscalerState(
        namespace,
        name,
        autoscaling.decode_status(text) if text else None,
        {name: autoscaling.decode_order(name, text) for name, text in orders.data.items()}
        if orders
        else {},
        objects.seconds((renewed.spec.renew_time if renewed else None) or ""),
    )


async def read_config_text(api: Api, state: AutoscalerState) -> str | None:
    """Return the configuration that the chart has installed, None if there is none.

    Raises ApiError, ApiUnreachable.
    """
    path = f"/api/v1/namespaces/{state.namespace}/configmaps/{state.name}-config"
    found = await if_accepted(api.get(path, objects.ConfigMap))
    return found.data.get(CONFIG_KEY) if found else None
