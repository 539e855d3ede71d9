"""A small API server to test against: versions, watches, merge patches, 409, 410, bindings.

It does what these tests need as the real one does it, and nothing else; `test_contract.py` runs the same
tests against both. Faults are put in by the tests.
"""

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from fenka.kubernetes.client import Api
from fenka.kubernetes.kube_config import load

Json = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]

_PATH = re.compile(
    r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<ns>[^/]+))?/(?P<kind>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


@dataclass(frozen=True)
class Happened:
    """One entry of the history."""

    version: int
    kind: str
    type: str
    object: Json


class Trouble(Exception):
    """Becomes a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class ApiServer:
    """One server, on a port of its own."""

    version: int = 100
    oldest: int = 0
    """Watches from an older version are answered with 410."""
    objects: dict[tuple[str, str, str], Json] = field(default_factory=dict)
    history: list[Happened] = field(default_factory=list)
    watches: set[asyncio.Queue[Happened | None]] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    before: Fault | None = None
    """May answer instead of the server."""
    after: Fault | None = None
    """May answer after the server has done what was asked: so that the answer is lost."""
    mute: bool = False
    """Watches that run hear nothing any more."""
    port: int = 0
    runner: web.AppRunner | None = None

    # ---- what tests do to it ----

    def put(self, kind: str, thing: Json) -> Json:
        """Create or replace, as somebody else would."""
        meta = thing.setdefault("metadata", {})
        key = kind, meta.get("namespace", ""), meta["name"]
        known = self.objects.get(key)
        meta.setdefault("uid", known["metadata"]["uid"] if known else str(uuid.uuid4()))
        return self._keep(key, deepcopy(thing), "MODIFIED" if known else "ADDED")

    def get(self, kind: str, name: str, namespace: str = "") -> Json:
        """The object as it is."""
        return self.objects[kind, namespace, name]

    def all(self, kind: str) -> list[Json]:
        """The collection."""
        return [it for key, it in self.objects.items() if key[0] == kind]

    def remove(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete at once."""
        thing = deepcopy(self.objects.pop((kind, namespace, name)))
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self._say(Happened(self.version, kind, "DELETED", thing))

    def compact(self) -> None:
        """Forget the history: who watches from before must list again."""
        self.history.clear()
        self.oldest = self.version

    def send(self, kind: str, type_: str, thing: Json) -> None:
        """Say something in all watches that is in no store: duplicates, old news, ERROR, bookmarks."""
        happened = Happened(self.version, kind, type_, thing)
        for queue in self.watches:
            queue.put_nowait(happened)

    def end_watches(self) -> None:
        """As the server does after a while."""
        for queue in self.watches:
            queue.put_nowait(None)

    async def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self.runner = web.AppRunner(app, shutdown_timeout=0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """All connections break."""
        assert self.runner is not None
        self.end_watches()
        await self.runner.cleanup()

    def api(self) -> Api:
        """A client of it."""
        configuration = load().Configuration()
        configuration.host = f"http://127.0.0.1:{self.port}"
        return Api(configuration)

    # ---- serving ----

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.before is not None:
            answer = await self.before(request)
            if answer is not None:
                return answer
        try:
            answer = await self._answer(request)
        except Trouble as why:
            status = {
                "kind": "Status",
                "code": why.code,
                "reason": why.reason,
                "message": str(why),
            }
            answer = web.json_response(status, status=why.code)
        if self.after is not None:
            return await self.after(request) or answer
        return answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911
        match = _PATH.fullmatch(request.path)
        if match is None:
            raise Trouble(404, "NotFound", "no such path")
        kind, namespace, name = match["kind"], match["ns"] or "", match["name"] or ""
        body: Json = json.loads(await request.read() or b"{}")
        if request.method == "GET" and not name:
            if request.query.get("watch"):
                return await self._watch(request, kind)
            return web.json_response(self._list(kind, namespace, request))
        if request.method == "POST" and not name:
            return web.json_response(self._create(kind, namespace, body), status=201)
        key = kind, namespace, name
        if key not in self.objects:
            raise Trouble(404, "NotFound", f'{kind} "{name}" not found')
        if match["sub"] == "binding":
            return web.json_response(self._bind(key, body), status=201)
        if request.method == "DELETE":
            self.remove(kind, name, namespace)
            return web.json_response({"kind": "Status", "status": "Success"})
        if request.method in ("PATCH", "PUT"):
            return web.json_response(self._change(key, request.method, body))
        return web.json_response(self.objects[key])

    def _list(self, kind: str, namespace: str, request: web.Request) -> Json:
        found = [
            it
            for key, it in self.objects.items()
            if key[0] == kind and namespace in ("", key[1]) and _selected(it, request)
        ]
        start, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 0))
        end = start + limit if limit else len(found)
        more = {"continue": str(end)} if end < len(found) else {}
        return {
            "items": found[start:end],
            "metadata": {"resourceVersion": str(self.version), **more},
        }

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        queue: asyncio.Queue[Happened | None] = asyncio.Queue()
        for happened in self.history:
            if happened.version > since:
                queue.put_nowait(happened)
        self.watches.add(queue)
        try:
            if since < self.oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                queue = asyncio.Queue()
                queue.put_nowait(Happened(0, kind, "ERROR", gone))
                queue.put_nowait(None)
            await answer.prepare(request)
            while (happened_ := await queue.get()) is not None:
                if happened_.kind != kind or not _selected(happened_.object, request):
                    continue
                line = {"type": happened_.type, "object": happened_.object}
                await answer.write(json.dumps(line).encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self.watches.discard(queue)
        return answer

    def _create(self, kind: str, namespace: str, body: Json) -> Json:
        meta = body["metadata"]
        if namespace:
            meta["namespace"] = namespace
        if "name" not in meta:
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        key = kind, namespace, meta["name"]
        if key in self.objects:
            raise Trouble(409, "AlreadyExists", f'{kind} "{meta["name"]}" already exists')
        meta["uid"] = str(uuid.uuid4())
        return self._keep(key, body, "ADDED")

    def _change(self, key: tuple[str, str, str], method: str, body: Json) -> Json:
        known = self.objects[key]
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, known["metadata"]["resourceVersion"]):
            raise Trouble(409, "Conflict", "the object has been modified")
        changed = body if method == "PUT" else merged(known, body)
        changed["metadata"]["uid"] = known["metadata"]["uid"]
        return self._keep(key, changed, "MODIFIED")

    def _bind(self, key: tuple[str, str, str], body: Json) -> Json:
        pod = deepcopy(self.objects[key])
        uid = body["metadata"].get("uid")
        if uid not in (None, pod["metadata"]["uid"]):
            raise Trouble(409, "Conflict", f"Precondition failed: UID in precondition: {uid}")
        if pod["metadata"].get("deletionTimestamp"):
            raise Trouble(409, "Conflict", "pod is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            message = f'pod {key[2]} is already assigned to node "{pod["spec"]["nodeName"]}"'
            raise Trouble(409, "Conflict", message)
        pod["spec"]["nodeName"] = body["target"]["name"]
        annotations = {
            **pod["metadata"].get("annotations", {}),
            **body["metadata"].get("annotations", {}),
        }
        pod["metadata"]["annotations"] = annotations
        self._keep(key, pod, "MODIFIED")
        return {"kind": "Status", "status": "Success"}

    def _keep(self, key: tuple[str, str, str], thing: Json, type_: str) -> Json:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = thing
        self._say(Happened(self.version, key[0], type_, deepcopy(thing)))
        return thing

    def _say(self, happened: Happened) -> None:
        self.history.append(happened)
        for queue in () if self.mute else self.watches:
            queue.put_nowait(happened)


def merged(known: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = deepcopy(known) if isinstance(known, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _selected(thing: Json, request: web.Request) -> bool:
    selector = request.query.get("fieldSelector", "")
    for term in filter(None, selector.split(",")):
        path, value = term.split("=", 1)
        found: Any = thing
        for part in path.split("."):
            found = (found or {}).get(part)
        if (found or "") != value:
            return False
    return True


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """A server that runs while the block does."""
    server = ApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def until(truth: Callable[[], object], within_s: float = 10) -> None:
    """Give the event loop turns until it is so; the limit only ends a test that would never."""
    async with asyncio.timeout(within_s):
        while not truth():
            await asyncio.sleep(0.001)
