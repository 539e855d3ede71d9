"""The client of the API server without HTTP: calls a FakeApiServer in the same event loop."""

from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any

import msgspec

from fenka.kubernetes.api_client import ApiError, Page, WatchEvent
from tests.fakes.api_server import FakeApiServer, Json, Refusal, Target


class ObjectsByPath(MutableMapping[str, Json]):
    """The server's objects by path. Changes are not reported to watches."""

    def __init__(self, server: FakeApiServer) -> None:
        self._server = server

    def __getitem__(self, path: str) -> Json:
        return self._server.objects[Target.of(path).key]

    def __setitem__(self, path: str, obj: Json) -> None:
        self._server.objects[Target.of(path).key] = obj

    def __delitem__(self, path: str) -> None:
        del self._server.objects[Target.of(path).key]

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._server.objects)


class FakeApi:
    """`fenka.kubernetes.api_client.Api`, as far as fenka's programs use it."""

    def __init__(self, server: FakeApiServer | None = None) -> None:
        self.server = server or FakeApiServer()
        self.objects = ObjectsByPath(self.server)

    # ---- what tests do ----

    def put(self, path: str, obj: Json) -> None:
        """Create or replace an object, as another client would."""
        target = Target.of(path)
        meta = obj.setdefault("metadata", {})
        meta["name"] = target.name
        if target.namespace:
            meta["namespace"] = target.namespace
        self.server.put(target.kind, obj)

    def drop(self, path: str) -> None:
        """Delete an object, as another client would."""
        target = Target.of(path)
        self.server.remove(target.kind, target.name, target.namespace)

    @property
    def events(self) -> list[Json]:
        """Return the events that were created."""
        return self.server.all("events")

    @property
    def patches(self) -> list[tuple[str, Json]]:
        """Return path and body of everything that was changed or evicted."""
        return [it for it in self.server.writes if Target.of(it[0]).name]

    # ---- as `Api` ----

    async def get(self, path: str, kind: type[Any], **query: Any) -> Any:
        """As `Api.get`."""
        return self._call("GET", path, kind, query)

    async def list(self, path: str, kind: type[Any], **query: Any) -> tuple[list[Any], str]:
        """As `Api.list`."""
        items: list[Any] = []
        async for page in self.pages(path, kind, **query):
            items += page.items
        return items, page.metadata.resource_version

    async def pages(
        self, path: str, kind: type[Any], _: Any = None, /, **query: Any
    ) -> AsyncIterator[Any]:
        """As `Api.pages`, which may return objects that are known."""
        while True:
            page = self._call("GET", path, Page[kind], query)  # type: ignore[valid-type]
            yield page
            if not page.metadata.continue_:
                return
            query["continue"] = page.metadata.continue_

    async def watch(
        self, path: str, kind: type[Any], version: str, **query: Any
    ) -> AsyncIterator[WatchEvent[Any]]:
        """As `Api.watch`."""
        async for happened in self.server.watch(path, {**query, "resourceVersion": version}):
            if happened.type == "ERROR":
                status = happened.object
                raise ApiError(status["code"], status.get("reason", ""), status["message"])
            version = happened.object["metadata"]["resourceVersion"]
            obj = None
            if happened.type != "BOOKMARK":
                obj = msgspec.convert(happened.object, kind)
            yield WatchEvent(happened.type, obj, version)

    async def patch(self, path: str, kind: type[Any], body: Json, *_: Any, **__: Any) -> Any:
        """As `Api.patch`."""
        return self._call("PATCH", path, kind, {}, body)

    async def create(self, path: str, kind: type[Any], body: Json, **_: Any) -> Any:
        """As `Api.create`."""
        return self._call("POST", path, kind, {}, body)

    async def delete(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """As `Api.delete`."""
        self._call("DELETE", path, Json, {}, dict(body or {}))

    def _call(
        self, method: str, path: str, kind: type[Any], query: Json, body: Json | None = None
    ) -> Any:
        try:
            answer = self.server.handle(method, path, query, deepcopy(body or {}))
        except Refusal as refusal:
            raise ApiError(refusal.code, refusal.reason, str(refusal)) from None
        return msgspec.convert(answer, kind)
