"""Creates objects of a cluster: their paths, owners, and dry runs."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from fenka.jobs.manifests.object_names import Manifest
from fenka.kubernetes.api_client import Api, ApiError

T = TypeVar("T")


_CONFLICTS = 10
"""Attempts to change an object that others change at the same time."""


_PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "Service": "services",
    "Deployment": "deployments",
    "Ingress": "ingresses",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "ScaledObject": "scaledobjects",
}


def collection(namespace: str, item: Manifest) -> str:
    """Return the path of the collection of an object's kind."""
    version = item["apiVersion"]
    api = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{api}/namespaces/{namespace}/{_PLURALS[item['kind']]}"


def owner_reference(root: Manifest, name: str, uid: str, *, controller: bool = True) -> Manifest:
    """Return the reference to an owner. An object has several owners, but one controller at most."""
    return {
        "apiVersion": root["apiVersion"],
        "kind": root["kind"],
        "name": name,
        "uid": uid,
        "controller": controller,
    }


async def check_by_dry_run(creations: Iterable[Awaitable[object]]) -> None:
    """Wait for dry runs. Raise the error of the first that is refused."""
    results = await asyncio.gather(*creations, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not _unsupported(result):
            raise result


def _unsupported(why: BaseException) -> bool:
    """Return whether a webhook of the cluster does not allow dry runs."""
    return isinstance(why, ApiError) and "does not support dry run" in str(why)


async def create_or_keep(api: Api, namespace: str, item: Manifest, kind: type[T]) -> T:
    """Create an object, or return the one of its name. Raises ApiError, ApiUnreachable."""
    path = collection(namespace, item)
    try:
        return await api.create(path, kind, item)
    except ApiError as why:
        if why.reason != "AlreadyExists":
            raise
    return await api.get(f"{path}/{item['metadata']['name']}", kind)


async def change(api: Api, path: str, changes: Callable[[Manifest], Manifest]) -> None:
    """Patch an object that others may change at the same time.

    Args:
        api: The cluster.
        path: The object's.
        changes: Returns the patch for the object as it is.

    Raises:
        ApiError, ApiUnreachable: The API server refused it or did not answer.
    """
    for attempt in range(_CONFLICTS):
        known = await api.get(path, dict[str, Any])
        patch = changes(known)
        version = {"resourceVersion": known["metadata"]["resourceVersion"]}
        try:
            await api.patch(
                path, msgspec.Raw, {**patch, "metadata": {**patch["metadata"], **version}}
            )
        except ApiError as why:
            if why.status != 409 or attempt == _CONFLICTS - 1:
                raise
        else:
            return


async def remove(api: Api, path: str, uid: str) -> bool:
    """Delete an object, and what it owns after it.

    Return False if it does not exist, or if another one has its name. Raises ApiError, ApiUnreachable.
    """
    body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
    try:
        await api.delete(path, body)
    except ApiError as why:
        if why.status not in (404, 409):
            raise
        return False
    return True


async def join_owner(
    api: Api,
    path: str,
    owner: Manifest,
    annotate: Callable[[Mapping[str, str]], dict[str, str]] = lambda _: {},
) -> None:
    """Add an owner to an object that several own, and annotations.

    Args:
        api: The cluster.
        path: The object's.
        owner: The reference to the owner.
        annotate: Returns annotations to set, by those that the object has.

    Raises:
        ApiError, ApiUnreachable: The API server refused it or did not answer.
    """

    def joined(known: Manifest) -> Manifest:
        meta = known["metadata"]
        others = [
            reference
            for reference in meta.get("ownerReferences", [])
            if reference["uid"] != owner["uid"]
        ]
        annotations = annotate(meta.get("annotations", {}))
        return {"metadata": {"ownerReferences": [*others, owner], "annotations": annotations}}

    await change(api, path, joined)
