"""Evicts a pod as a drain does: its disruption budgets are respected."""

from typing import Any

from fenka.cluster.objects import Object, pod_path
from fenka.kubernetes.client import Api


async def evict(api: Api, namespace: str, name: str, uid: str) -> None:
    """Evict the pod with this UID, and no other of its name. Raises ApiError, ApiUnreachable."""
    body: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    }
    await api.create(f"{pod_path(namespace, name)}/eviction", Object, body)
