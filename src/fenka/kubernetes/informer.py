"""Keeps a collection of the API server in memory: lists it, watches it, lists it again if the watch is lost.

A list is read from the server's own store, so it replaces everything. Between lists an object is replaced
only by a newer version. A deleted object never comes back, because a UID is used once.

Listeners of informers that several programs have.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fenka.cluster.pod_groups import PodGroup
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable, HasMeta

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
WATCH_S = 300
"""The server ends a watch after this time, and another continues from there."""

UNKNOWN_KIND_RETRY_S = 60.0
"""Between lists of a kind that the server does not know."""

SLICE_S = 0.002
"""After this time of a burst of events other tasks run."""

_MAX_TOMBSTONES = 10_000
"""Deleted UIDs that are remembered between two lists."""


T = TypeVar("T", bound=HasMeta)
T_contra = TypeVar("T_contra", bound=HasMeta, contravariant=True)


class InformerListener(Protocol[T_contra]):
    """Receives changes, in the event loop's thread. Its methods must not raise."""

    def on_replace(self, objects: Sequence[T_contra]) -> None:
        """Take these as all objects that exist now."""

    def on_upsert(self, obj: T_contra) -> None:
        """Take this object, which is new or has changed."""

    def on_delete(self, obj: T_contra) -> None:
        """Drop this object, which is as it was last seen."""


class Backoff:
    """The pause after each failure in a row: it doubles up to a limit, with jitter."""

    def __init__(
        self,
        first_s: float = FIRST_BACKOFF_S,
        longest_s: float = MAX_BACKOFF_S,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first_s, self._longest_s, self._draw = first_s, longest_s, draw
        self._failures = 0

    def next_s(self) -> float:
        """Return the seconds to wait now. The next answer is longer."""
        # 2**20 exceeds any limit: without a cap the exponent grows while the server is away.
        limit = min(self._first_s * 2 ** min(self._failures, 20), self._longest_s)
        self._failures += 1
        return self._draw(limit / 2, limit)

    def reset(self) -> None:
        """Start again after a success."""
        self._failures = 0


def newer(version: str, known: str) -> bool:
    """Return whether a resourceVersion is not older than another of the same collection.

    Versions are numbers that can be compared (KEP-5504). Where they are not, the last one counts.
    """
    if version.isdecimal() and known.isdecimal():
        return int(version) >= int(known)
    return True


class Informer(Generic[T]):
    """A collection in memory.

    Args:
        path: the collection ("/api/v1/pods").
        query: selectors, such as fieldSelector="spec.nodeName=a".
        optional: treat a kind that the server does not know as an empty collection.

    Attributes:
        objects: the collection by UID. Read it, never change it.
        synced: set after the first list; `age_s` shows whether the collection is current.
        last_error: why the server did not answer the last time, None if it did.
    """

    def __init__(  # noqa: PLR0913
        self,
        api: Api,
        path: str,
        kind: type[T],
        listener: InformerListener[T],
        *,
        query: dict[str, str] | None = None,
        optional: bool = False,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._path, self._kind, self._listener = api, path, kind, listener
        self._query = query or {}
        self._optional = optional
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._clock = clock
        self._contact_at: float | None = None
        self._tombstones: dict[str, None] = {}
        self._lists_begun = self._lists_done = 0
        self._listed = asyncio.Condition()
        self._relist = asyncio.Event()
        self.objects: dict[str, T] = {}
        self.synced = asyncio.Event()
        self.last_error: str | None = None

    @property
    def age_s(self) -> float:
        """Return the seconds since the server last answered; infinity before the first list."""
        return float("inf") if self._contact_at is None else self._clock() - self._contact_at

    async def run(self) -> None:
        """Keep the collection current until cancelled."""
        while True:
            try:
                self._relist.clear()
                self._lists_begun += 1
                version = await self._list()
                await self._until_relist(self._watch(version))
            except (ApiError, ApiUnreachable) as error:
                if self._optional and isinstance(error, ApiError) and error.status == 404:
                    await self._wait_for_kind()
                else:
                    await self._pause(error)

    async def read(self) -> None:
        """List the collection once, without following it. Raises ApiError, ApiUnreachable."""
        try:
            await self._list()
        except ApiError as error:
            if not (self._optional and error.status == 404):
                raise

    async def _wait_for_kind(self) -> None:
        """Treat the collection as empty. The server may know the kind after an upgrade."""
        self._on_contact()
        await self._replace({})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNKNOWN_KIND_RETRY_S):
                await self._relist.wait()

    async def relist(self) -> None:
        """List again after this call, and return when the listener has the result."""
        number = self._lists_begun + 1
        self._relist.set()
        async with self._listed:
            await self._listed.wait_for(lambda: self._lists_done >= number)

    async def _until_relist(self, following: Coroutine[Any, Any, None]) -> None:
        tasks = asyncio.create_task(following), asyncio.create_task(self._relist.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _list(self) -> str:
        objects = dict[str, T]()
        async for page in self._api.pages(self._path, self._kind, self.objects, **self._query):
            self._on_contact()
            objects |= {obj.metadata.uid: obj for obj in page.items or ()}
        await self._replace(objects)
        return page.metadata.resource_version

    async def _replace(self, objects: dict[str, T]) -> None:
        self.objects = objects
        self._tombstones.clear()
        self._listener.on_replace(tuple(objects.values()))
        self.synced.set()
        async with self._listed:
            self._lists_done = self._lists_begun
            self._listed.notify_all()

    async def _watch(self, version: str) -> None:
        """Watch until the version is too old or the watch is refused. Reconnect if a connection breaks."""
        while True:
            try:
                changes = self._api.watch(
                    self._path, self._kind, version, seconds=WATCH_S, **self._query
                )
                resumed_at = self._clock()
                async for change in changes:
                    if self._clock() - resumed_at > SLICE_S:
                        await asyncio.sleep(0)
                        resumed_at = self._clock()
                    self._on_contact()
                    version = change.version or version
                    if change.object is not None:
                        self._apply(change.type, change.object)
                # A server that ends each watch at once must not be called without a pause.
                await self._sleep(self._backoff.next_s())
            except ApiUnreachable as error:
                await self._pause(error)

    def _apply(self, kind: str, obj: T) -> None:
        uid = obj.metadata.uid
        if kind == "DELETED":
            self._tombstones[uid] = None
            if len(self._tombstones) > _MAX_TOMBSTONES:
                del self._tombstones[next(iter(self._tombstones))]
            if self.objects.pop(uid, None) is not None:
                self._listener.on_delete(obj)
            return
        known = self.objects.get(uid)
        version = obj.metadata.resource_version
        if uid in self._tombstones or (
            known is not None and not newer(version, known.metadata.resource_version)
        ):
            return
        self.objects[uid] = obj
        self._listener.on_upsert(obj)

    def _on_contact(self) -> None:
        self._contact_at, self.last_error = self._clock(), None
        self._backoff.reset()

    async def _pause(self, error: Exception) -> None:
        self.last_error = str(error)
        await self._sleep(self._backoff.next_s())


class Informers:
    """Several informers that run together. Set `by_collection` before anything else.

    Attributes:
        by_collection: the informers by the names of what they follow, for errors and metrics.
    """

    by_collection: dict[str, Informer[Any]]

    @property
    def synced(self) -> bool:
        """Return whether every collection has been read."""
        return all(informer.synced.is_set() for informer in self.by_collection.values())

    @property
    def errors(self) -> list[str]:
        """Return why collections are not up to date."""
        return [
            f"{name}: {informer.last_error}"
            for name, informer in self.by_collection.items()
            if informer.last_error
        ]

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self.by_collection.values():
                group.create_task(informer.run())


class NullListener:
    """Ignores changes: the objects are looked up in the informer."""

    def on_replace(self, objects: Sequence[object]) -> None:
        """Ignore all objects."""

    def on_upsert(self, obj: object) -> None:
        """Ignore a new or changed object."""

    def on_delete(self, obj: object) -> None:
        """Ignore a deleted object."""


class PodGroupIndex:
    """Finds PodGroups by name. Attributes: by_name: the groups, by namespace/name."""

    def __init__(self) -> None:
        self.by_name: dict[str, PodGroup] = {}

    def on_replace(self, objects: Sequence[PodGroup]) -> None:
        """Replace all PodGroups."""
        self.by_name = {group.full_name: group for group in objects}

    def on_upsert(self, obj: PodGroup) -> None:
        """Set a PodGroup."""
        self.by_name[obj.full_name] = obj

    def on_delete(self, obj: PodGroup) -> None:
        """Remove a PodGroup, unless another one already has its name."""
        known = self.by_name.get(obj.full_name)
        if known is not None and known.metadata.uid == obj.metadata.uid:
            del self.by_name[obj.full_name]
