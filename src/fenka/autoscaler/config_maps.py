"""ConfigMaps in which the leader remembers: nothing is written over what another replica has written."""

from collections.abc import Mapping
from typing import Any

from fenka.cluster.objects import ConfigMap
from fenka.kubernetes.client import Api, ApiError, if_accepted


class WriteLost(Exception):
    """Another replica has changed the ConfigMap since it was read: read it again, and decide again."""


class StoredMap:
    """One ConfigMap. Attributes: data: as it was read or written last."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._collection = f"/api/v1/namespaces/{namespace}/configmaps"
        self._version: str | None = None
        self.data: dict[str, str] = {}

    async def load(self) -> None:
        """Read it. Raises ApiError, ApiUnreachable."""
        found = await if_accepted(self._api.get(f"{self._collection}/{self._name}", ConfigMap))
        self._version = found.metadata.resource_version if found is not None else None
        self.data = found.data if found is not None else {}

    async def write(self, changes: Mapping[str, str | None]) -> None:
        """Set these keys, remove those that are None. One that was deleted is made again, with all its keys.

        Raises:
            WriteLost: if another replica wrote it.
            ApiError, ApiUnreachable: if it may not have been written.
        """
        data = {key: text for key, text in {**self.data, **changes}.items() if text is not None}
        try:
            written = await self._send(changes, data)
        except ApiError as why:
            if why.status == 409:
                raise WriteLost(str(why)) from None
            raise
        self._version, self.data = written.metadata.resource_version, data

    async def _send(self, changes: Mapping[str, str | None], data: dict[str, str]) -> ConfigMap:
        if self._version is not None:
            body: dict[str, Any] = {
                "metadata": {"resourceVersion": self._version},
                "data": changes,
            }
            path = f"{self._collection}/{self._name}"
            written = await if_accepted(self._api.patch(path, ConfigMap, body))
            if written is not None:
                return written
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "data": data,
        }
        return await self._api.create(self._collection, ConfigMap, body)
