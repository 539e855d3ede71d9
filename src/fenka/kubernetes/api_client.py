"""Sends requests to the API server, and decodes its answers.

Objects are decoded into the fields that fenka reads (`cluster/objects.py`). Changes are patches: nothing is
written back whole, so that fields unknown here survive.
"""

import asyncio
import contextlib
import logging
import os
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from fenka.cluster.objects import ApiStatus, Object, ObjectMeta
from fenka.core.errors import FenkaError
from fenka.core.units import MIB
from fenka.kubernetes.kube_config import ApiServer, InvalidKubeConfig, api_server
from fenka.kubernetes.own_policies import OwnRefusals


@contextlib.contextmanager
def without_default_certificates() -> Iterator[None]:
    """Import aiohttp without loading the default certificates twice, which takes 0.04 s of each command.

    They are for connections without a TLS context of their own, and fenka makes none.
    """
    ssl.SSLContext.set_default_verify_paths = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths


with without_default_certificates():
    import aiohttp


_LOG = logging.getLogger(__name__)


class HasMeta(Protocol):
    """Any Kubernetes object."""

    @property
    def metadata(self) -> ObjectMeta:
        """Return its metadata."""


T = TypeVar("T")
M = TypeVar("M", bound=HasMeta)
Query = Mapping[str, str | int] | Sequence[tuple[str, str]]

TIMEOUT_S = 10.0
"""For one request, from connecting to its last byte. Watches have no such limit."""

MERGE = "application/merge-patch+json"
JSON = "application/json"

SILENCE_S = 90.0
"""A watch without data for this long is taken as broken: servers send a bookmark about every minute."""

HEARTBEAT_S = 30.0
"""Between pings on a websocket. A connection that does not answer them is closed."""

_PAGE = 500
PAGE_BYTES = 16 * MIB
"""A page that is larger is abandoned, and requested again with fewer objects. Two may be held at a time."""
_SMALLER = 8
"""By this factor fewer."""
_DECODING_S = 0.005
"""After this time of decoding one page other tasks run."""
_READ_BUFFER = 2**21
"""Bytes; an object has at most 1.5 MiB."""

_MAX_DEPTH = 10_000
"""Levels of nested values that Go decodes."""

_LIST_HEAD = re.compile(rb'\{(?:"(?:kind|apiVersion)":"[^"\\]*",)*"metadata":(\{[^{}]*\}),"items":')
"""The beginning of a list, as the API server writes it, with its metadata before its items."""

_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
"""A warning of the API server: its text is a quoted string of HTTP."""

_MAX_CONNECTIONS = 100


class ApiUnreachable(FenkaError):
    """The API server cannot be reached or found; the message says where it was looked for."""


class ApiError(FenkaError):
    """The API server says no.

    status: HTTP's. reason: Kubernetes's word for it ("Conflict", "NotFound", "Expired").
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


async def if_accepted(answer: Awaitable[T], refusals: tuple[int, ...] = (404,)) -> T | None:
    """Return the answer; None if the API server refuses with one of these codes.

    Raises ApiError, ApiUnreachable.
    """
    try:
        return await answer
    except ApiError as why:
        if why.status in refusals:
            return None
        raise


class ListMeta(Object):
    """The metadata of a list. continue_: the token for its next page, empty on the last one."""

    continue_: str = msgspec.field(default="", name="continue")
    resource_version: str = ""


class Page(msgspec.Struct, Generic[T]):
    """A list, or one page of it."""

    items: list[T] | None = None
    metadata: ListMeta = msgspec.field(default_factory=ListMeta)


class _Raw(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Identity(Object):
    uid: str = ""
    resource_version: str = ""


class _Versioned(msgspec.Struct):
    metadata: _Identity = msgspec.field(default_factory=_Identity)


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[T]):
    """An event of a watch. object: None for a bookmark."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: T | None
    version: str
    """The version from which a watch can continue."""


class Api:
    """A client of one API server, for one event loop. `async with` closes it."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self.on_warning: Callable[[str], None] = lambda _: None
        """Hears what the API server says of objects that it accepts nevertheless."""
        # By itself the session would read ~/.netrc and the environment for each request, in other threads.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, ssl=server.tls or True),
            proxy=server.proxy or _environment_proxy(server.url),
            read_bufsize=_READ_BUFFER,
        )

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, context: str | None = None) -> Self:
        """Use the kubeconfig given, else $KUBECONFIG, the pod's service account, or ~/.kube/config.

        No request is sent yet. Raises ApiUnreachable.
        """
        try:
            return cls(await api_server(kubeconfig, context))
        except (InvalidKubeConfig, OSError) as why:
            where = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            raise ApiUnreachable(f"no cluster can be reached by {where}: {why}") from None

    def as_user(self, token: str) -> "Api":
        """Return a client of the same server with another user's token, to be closed by the caller.

        A client certificate would remain, so this is only for servers without one.
        """

        async def authorization() -> str:
            return f"Bearer {token}"

        return Api(replace(self._server, authorization=authorization))

    @property
    def server(self) -> str:
        """Return its URL."""
        return self._server.url

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, path: str, kind: type[T], **query: str | int) -> T:
        """Return the object at this path. Raises ApiError, ApiUnreachable."""
        return decoded(await self._call("GET", path, query), kind)

    async def list(self, path: str, kind: type[T], **query: str | int) -> tuple[list[T], str]:
        """Return all objects of a collection, page by page, and the version to watch from.

        The list is current: the server reads its own store, no cache. Raises ApiError, ApiUnreachable.
        """
        items: list[T] = []
        async for page in self.pages(path, kind, **query):
            items += page.items or ()
        return items, page.metadata.resource_version

    async def pages(
        self, path: str, kind: type[T], known: Mapping[str, T] | None = None, /, **query: str | int
    ) -> AsyncIterator[Page[T]]:
        """Yield a collection as `list` returns it, page by page: at least one, all of the same version.

        Args:
            known: objects by UID. An object of the same version is not decoded again.
        """
        query.setdefault("limit", _PAGE)
        reader = _PageReader(self, path, query)
        following: asyncio.Task[bytes] | None = asyncio.create_task(reader.read())
        try:
            while following is not None:
                data, following = await following, None
                if token := _list_meta(data).continue_:
                    # The server prepares the next page while this one is decoded and used.
                    following = asyncio.create_task(reader.read(token))
                    await asyncio.sleep(0)
                yield await _page(data, kind, known)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def read_within(
        self, path: str, query: Mapping[str, str | int], limit: int | None
    ) -> bytes | None:
        """Return the body of a GET; None if it has more bytes than the limit.

        Raises ApiError, ApiUnreachable.
        """
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        with self._reachable():
            async with await self._send("GET", path, query, timeout) as answer:
                await _refuse(answer)
                body = bytearray()
                async for block in answer.content.iter_any():
                    body += block
                    if limit is not None and len(body) > limit:
                        # The connection is closed with what is left.
                        answer.close()
                        return None
                return bytes(body)

    async def watch(
        self, path: str, kind: type[M], version: str, *, seconds: int = 300, **query: str | int
    ) -> AsyncIterator[WatchEvent[M]]:
        """Yield what changes from this version on, until the server ends the watch.

        Raises ApiError (status 410: the version is too old, list again), ApiUnreachable.
        """
        query |= {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": seconds,
        }
        # A server that has gone silently must not be waited for indefinitely.
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=TIMEOUT_S, sock_read=min(float(seconds), SILENCE_S) + TIMEOUT_S
        )
        try:
            async with await self._send("GET", path, query, timeout) as answer:
                await _refuse(answer)
                async for line in _lines(answer.content):
                    yield decode_event(line, kind)
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise ApiUnreachable(f"the watch of {self.server}{path} broke off: {why}") from None

    async def stream(self, path: str, **query: str | int) -> AsyncIterator[bytes]:
        """Yield a text in blocks as they arrive, such as a log that grows, until the server ends it.

        Raises ApiError, ApiUnreachable.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        try:
            async with await self._send("GET", path, query, timeout, accept="*/*") as answer:
                await _refuse(answer)
                async for block in answer.content.iter_any():
                    yield block
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise ApiUnreachable(f"{self.server}{path} broke off: {why}") from None

    async def websocket(
        self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a websocket with one of these subprotocols. Raises ApiError, ApiUnreachable."""
        headers = await self._headers("*/*")
        try:
            return await self._session.ws_connect(
                self._url(path, query),
                protocols=protocols,
                headers=headers,
                heartbeat=HEARTBEAT_S,
                max_msg_size=0,
                server_hostname=self._server.server_name,
            )
        except aiohttp.WSServerHandshakeError as why:
            # The server's sentence is not read by the library.
            raise ApiError(why.status, "", f"the API server refuses {path}: {why.status}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise ApiUnreachable(f"the API server {self.server} does not answer: {why}") from None

    async def patch(self, path: str, kind: type[T], body: Mapping[str, Any]) -> T:
        """Change parts of an object; with metadata.resourceVersion, only of that version.

        Raises ApiError, ApiUnreachable.
        """
        return decoded(await self._call("PATCH", path, {}, body), kind)

    async def create(
        self,
        path: str,
        kind: type[T],
        body: Mapping[str, Any],
        within_s: float | None = None,
        *,
        dry_run: bool = False,
    ) -> T:
        """Add an object to a collection, or post to a subresource.

        within_s: afterwards nothing more happens. A quarter of it is for connecting, the rest for the server.
        dry_run: check whether the server would accept it, and create nothing.
        Raises ApiError, ApiUnreachable.
        """
        # The server counts from when it receives the request.
        query = {} if within_s is None else {"timeout": f"{max(int(within_s * 750), 1)}ms"}
        if dry_run:
            query["dryRun"] = "All"
        return decoded(await self._call("POST", path, query, body, within_s=within_s), kind)

    async def delete(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Remove an object; `body` may hold preconditions. Raises ApiError, ApiUnreachable."""
        await self._call("DELETE", path, {}, body)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int],
        body: Mapping[str, Any] | None = None,
        within_s: float | None = None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        if within_s is not None:
            timeout = aiohttp.ClientTimeout(total=within_s, connect=within_s / 4)
        with self._reachable():
            async with await self._send(method, path, query, timeout, body) as answer:
                await _refuse(answer)
                for header in answer.headers.getall("Warning", ()):
                    if match := _WARNING.match(header):
                        self.on_warning(re.sub(r"\\(.)", r"\1", match[1]))
                return await answer.read()

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            reason = str(why) or "no answer in time"
            raise ApiUnreachable(
                f"the API server {self.server} does not answer: {reason}"
            ) from None

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int],
        timeout: aiohttp.ClientTimeout,
        body: Mapping[str, Any] | None = None,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        headers = await self._headers(accept)
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else JSON
        begun, url = time.perf_counter(), self._url(path, query)
        answer = await self._session.request(
            method,
            url,
            headers=headers,
            data=None if body is None else msgspec.json.encode(body),
            timeout=timeout,
            server_hostname=self._server.server_name,
        )
        taken_ms = (time.perf_counter() - begun) * 1e3
        _LOG.debug("%s %s: %d after %.0f ms", method, url, answer.status, taken_ms)
        return answer

    async def _headers(self, accept: str = JSON) -> dict[str, str]:
        headers = {"Accept": accept}
        try:
            if authorization := await self._server.authorization():
                headers["Authorization"] = authorization
        except InvalidKubeConfig as why:
            raise ApiUnreachable(f"the API server {self.server} cannot be asked: {why}") from None
        return headers

    def _url(self, path: str, query: Query) -> str:
        return f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")


class _PageReader:
    """Reads the pages of one collection, with as many objects as fit `PAGE_BYTES`."""

    def __init__(self, api: Api, path: str, query: Mapping[str, str | int]) -> None:
        self._api, self._path, self._query = api, path, query
        self._most = self._limit = int(query["limit"])

    async def read(self, token: str = "") -> bytes:
        """Return a page. token: of the one before. Raises ApiError, ApiUnreachable."""
        query = {**self._query, "continue": token} if token else self._query
        while True:
            # An object cannot be divided; the server limits its size.
            limit = PAGE_BYTES if self._limit > 1 else None
            body = await self._api.read_within(self._path, {**query, "limit": self._limit}, limit)
            if body is not None:
                fitting = self._limit * PAGE_BYTES // (2 * max(len(body), 1))
                self._limit = max(min(fitting, self._most, 2 * self._limit), 1)
                return body
            self._limit = max(self._limit // _SMALLER, 1)


def _environment_proxy(server: str) -> str | None:
    """Return the proxy that the environment gives for this URL."""
    url = urlsplit(server)
    return None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)


def decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Return an object, or a part of an answer. Raises ApiError."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except RecursionError:
            with _deep_recursion():
                return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as why:
        raise ApiError(
            0, "Unreadable", f"the API server's answer is not understood: {why}"
        ) from None


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Allow to decode, or skip, whatever the API server accepts: tenants nest fields that nobody reads."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 2 * _MAX_DEPTH)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _list_meta(data: bytes) -> ListMeta:
    """Return a list's metadata, without reading all of the list if the metadata comes first."""
    head = _LIST_HEAD.match(data)
    return decoded(head[1], ListMeta) if head else decoded(data, Page[msgspec.Raw]).metadata


async def _page(data: bytes, kind: type[T], known: Mapping[str, T] | None) -> Page[T]:
    if known is None:
        return decoded(data, Page[kind])  # type: ignore[valid-type]
    page, items = decoded(data, Page[msgspec.Raw]), list[T]()
    resumed_at = time.monotonic()
    for raw in page.items or ():
        items.append((_known(raw, known) if known else None) or decoded(raw, kind))
        if time.monotonic() - resumed_at > _DECODING_S:
            await asyncio.sleep(0)
            resumed_at = time.monotonic()
    return Page(items, page.metadata)


def _known(listed: msgspec.Raw, objects: Mapping[str, T]) -> T | None:
    """Return the object that was known in the version that is listed."""
    identity = decoded(listed, _Versioned).metadata
    known: Any = objects.get(identity.uid)
    same = known is not None and known.metadata.resource_version == identity.resource_version
    return known if same else None


_OWN_REFUSALS = OwnRefusals()
"""Of this process, whose clients may be many."""


async def _refuse(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    why = _refusal(answer.status, await answer.read())
    _OWN_REFUSALS.heard(why.status, str(why))
    raise why


def _refusal(code: int, data: bytes | msgspec.Raw) -> ApiError:
    try:
        status = msgspec.json.decode(data, type=ApiStatus)
    except msgspec.MsgspecError:
        status = ApiStatus(message=bytes(data)[:200].decode(errors="replace"))
    return ApiError(
        code or status.code, status.reason, status.message or f"the API server answers {code}"
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: aiohttp's own line reader fails at its buffer's size."""
    rest = b""
    async for block in content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line:
                yield line


def decode_event(line: bytes, kind: type[M]) -> WatchEvent[M]:
    """Return the event of one line of a watch. Raises ApiError."""
    raw = decoded(line, _Raw)
    if raw.type == "ERROR":
        raise _refusal(0, raw.object)
    if raw.type == "BOOKMARK":
        version = decoded(raw.object, _Versioned).metadata.resource_version
        return WatchEvent(raw.type, None, version)
    obj = decoded(raw.object, kind)
    return WatchEvent(raw.type, obj, obj.metadata.resource_version)
