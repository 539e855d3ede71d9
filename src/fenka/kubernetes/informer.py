"""A collection of the API server, kept in memory: listed once, then watched, listed again when that is lost.

The list is the truth: it is read from the server's own store, so it replaces everything. Between lists an
object is replaced only by a newer one, and what was deleted never comes back, because a UID is used once.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fenka.cluster.objects import ObjectMeta
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
WATCH_S = 300
"""After so long the server ends a watch, and another goes on from there."""

LOOK_AGAIN_S = 60.0
"""For a kind that the server does not know."""

_GRAVES = 10_000
"""So many deleted UIDs are remembered between two lists."""


class HasMeta(Protocol):
    """Any of Kubernetes' objects."""

    @property
    def metadata(self) -> ObjectMeta:
        """Its metadata."""


T = TypeVar("T", bound=HasMeta)
T_contra = TypeVar("T_contra", bound=HasMeta, contravariant=True)


class InformerListener(Protocol[T_contra]):
    """Whoever wants to know. Called in the event loop's thread; must not raise."""

    def on_replace(self, objects: Sequence[T_contra]) -> None:
        """These are all objects there are now."""

    def on_upsert(self, obj: T_contra) -> None:
        """This object is new, or is so now."""

    def on_delete(self, obj: T_contra) -> None:
        """This object is gone; it is as it was last seen."""


class Backoff:
    """How long to wait after so many failures in a row: doubling, with jitter, never above the longest."""

    def __init__(
        self,
        first_s: float = FIRST_BACKOFF_S,
        longest_s: float = LONGEST_BACKOFF_S,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first_s, self._longest_s, self._draw = first_s, longest_s, draw
        self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait now; the next answer is longer."""
        # 2**20 is past any limit: the exponent must not grow with a night without a server.
        limit = min(self._first_s * 2 ** min(self._failures, 20), self._longest_s)
        self._failures += 1
        return self._draw(limit / 2, limit)

    def reset(self) -> None:
        """It worked."""
        self._failures = 0


def newer(version: str, known: str) -> bool:
    """Whether a resourceVersion is not older than another of the same collection.

    They are numbers that can be compared (KEP-5504). Where they are not, what comes last counts.
    """
    if version.isdecimal() and known.isdecimal():
        return int(version) >= int(known)
    return True


class Informer(Generic[T]):
    """A collection in memory.

    path: of the collection ("/api/v1/pods"). query: such as fieldSelector="spec.nodeName=a". optional: a
    server that does not know the kind has none of it.
    `objects` holds what there is, by UID; read it, never change it.
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
        self._contact: float | None = None
        self._graves: dict[str, None] = {}
        self._begun = self._done = 0
        self._listed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self.objects: dict[str, T] = {}
        self.synced = asyncio.Event()
        """Set once the first list is there; `age_s` says whether it is kept up."""
        self.last_error: str | None = None
        """Why the server was not heard the last time; None while all is well."""

    @property
    def age_s(self) -> float:
        """Seconds since the server was last heard; infinity before the first list."""
        return float("inf") if self._contact is None else self._clock() - self._contact

    async def run(self) -> None:
        """Keep the collection up until cancelled."""
        while True:
            try:
                self._wanted.clear()
                self._begun += 1
                version = await self._list()
                await self._until_wanted(self._follow(version))
            except (ApiError, ApiUnreachable) as why:
                if self._optional and isinstance(why, ApiError) and why.status == 404:
                    await self._do_without()
                else:
                    await self._wait(why)

    async def _do_without(self) -> None:
        """The server does not know the kind. It may after an upgrade."""
        self._heard()
        await self._take_all([])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._wanted.wait()

    async def relist(self) -> None:
        """Read everything anew, by a list that begins after this call; return when the listener has it."""
        number = self._begun + 1
        self._wanted.set()
        async with self._listed:
            await self._listed.wait_for(lambda: self._done >= number)

    async def _until_wanted(self, following: Coroutine[Any, Any, None]) -> None:
        tasks = asyncio.create_task(following), asyncio.create_task(self._wanted.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _list(self) -> str:
        objects, version = await self._api.list(self._path, self._kind, **self._query)
        self._heard()
        await self._take_all(objects)
        return version

    async def _take_all(self, objects: Sequence[T]) -> None:
        self.objects = {it.metadata.uid: it for it in objects}
        self._graves.clear()
        self._listener.on_replace(objects)
        self.synced.set()
        async with self._listed:
            self._done = self._begun
            self._listed.notify_all()

    async def _follow(self, version: str) -> None:
        """Until the version is too old or the watch is refused; a broken connection is taken up again."""
        while True:
            try:
                changes = self._api.watch(
                    self._path, self._kind, version, seconds=WATCH_S, **self._query
                )
                async for change in changes:
                    self._heard()
                    version = change.version or version
                    if change.object is not None:
                        self._take(change.type, change.object)
                # The end of a watch is a sign of life too, but not one to answer without a pause.
                await self._sleep(self._backoff.next_s())
            except ApiUnreachable as why:
                await self._wait(why)

    def _take(self, kind: str, obj: T) -> None:
        uid = obj.metadata.uid
        if kind == "DELETED":
            self._graves[uid] = None
            if len(self._graves) > _GRAVES:
                del self._graves[next(iter(self._graves))]
            if self.objects.pop(uid, None) is not None:
                self._listener.on_delete(obj)
            return
        known = self.objects.get(uid)
        version = obj.metadata.resource_version
        if uid in self._graves or (
            known is not None and not newer(version, known.metadata.resource_version)
        ):
            return
        self.objects[uid] = obj
        self._listener.on_upsert(obj)

    def _heard(self) -> None:
        self._contact, self.last_error = self._clock(), None
        self._backoff.reset()

    async def _wait(self, why: Exception) -> None:
        self.last_error = str(why)
        await self._sleep(self._backoff.next_s())
