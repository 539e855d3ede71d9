"""Reads what the autoscaler has published: its status and its orders."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from fenka.cluster.autoscaling import (
    ORDERS_MAP,
    STATUS_KEY,
    STATUS_MAP,
    OrderRecord,
    Status,
    decode_order,
    decode_status,
)
from fenka.cluster.objects import ConfigMap, Object, seconds
from fenka.kubernetes.client import Api, if_accepted
from fenka.kubernetes.service_reader import read_published

NAMESPACE, NAME = "autoscalerNamespace", "autoscalerName"
"""Keys of the chart's ConfigMap for users: where the autoscaler's objects are."""

DEFAULT_NAME = "fenka-autoscaler"

CONFIG_KEY = "config.yaml"
"""Key of the ConfigMap with the configuration."""


class _LeaseSpec(Object):
    renew_time: str | None = None


class _Lease(Object):
    spec: _LeaseSpec = msgspec.field(default_factory=_LeaseSpec)


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """What the autoscaler has published.

    Attributes:
        namespace: where its objects are.
        name: of its Lease, and the beginning of its configuration's name.
        status: None if it has published none yet.
        orders: by their names.
        renewed_at: when a leader last renewed its lease, None if that is not known.
    """

    namespace: str
    name: str = DEFAULT_NAME
    status: Status | None = None
    orders: Mapping[str, OrderRecord] = field(default_factory=dict)
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
        if_accepted(api.get(f"{maps}/{STATUS_MAP}", ConfigMap)),
        if_accepted(api.get(f"{maps}/{ORDERS_MAP}", ConfigMap)),
        if_accepted(api.get(f"{leases}/{name}", _Lease), (403, 404)),
    )
    text = status.data.get(STATUS_KEY) if status else None
    return AutoscalerState(
        namespace,
        name,
        decode_status(text) if text else None,
        {name: decode_order(name, text) for name, text in orders.data.items()} if orders else {},
        seconds((renewed.spec.renew_time if renewed else None) or ""),
    )


async def read_config_text(api: Api, state: AutoscalerState) -> str | None:
    """Return the configuration that the chart has installed, None if there is none.

    Raises ApiError, ApiUnreachable.
    """
    path = f"/api/v1/namespaces/{state.namespace}/configmaps/{state.name}-config"
    found = await if_accepted(api.get(path, ConfigMap))
    return found.data.get(CONFIG_KEY) if found else None
