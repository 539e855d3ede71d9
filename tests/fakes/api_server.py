"""A fake API server: versions, watches, merge patches, 409, 410, bindings and evictions, over HTTP.

It behaves like the real one where these tests rely on it, and has nothing else. `test_contract.py` runs the
same tests against both, and against the client without HTTP (`in_process.py`). Tests inject faults.
"""

import asyncio
import contextlib
import json
import re
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from fenka.dialects import pod_records, resize_records
from fenka.dialects.registry import WITH_HAMI
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.kube_config import ApiServer

ON_BINDINGS = {
    *(name for dialect in WITH_HAMI for name in dialect.RECORDS),
    *resize_records.RECORDS,
    *pod_records.ON_BINDINGS,
}
"""The annotations that a binding may have. Names that end in "-" are one for each container."""
_NUMBER = re.compile(r"-[0-9]+$")

Json = dict[str, Any]
Key = tuple[str, str, str]
"""Kind in the plural, namespace and name."""
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


class Refusal(Exception):
    """An answer that is a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class Target:
    """What a path names."""

    kind: str
    namespace: str
    name: str
    subresource: str

    @classmethod
    def of(cls, path: str) -> "Target":
        """Parse a path. Raises Refusal."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise Refusal(404, "NotFound", "no such path")
        return cls(match["kind"], match["ns"] or "", match["name"] or "", match["sub"] or "")

    @property
    def key(self) -> Key:
        """Return the key of the object."""
        return self.kind, self.namespace, self.name


@dataclass
class FakeApiServer:
    """One server, on a port of its own once it is started.

    Attributes:
        oldest: watches from an older version are answered with 410.
        requests: method and path of each request.
        writes: path and body of each request that changed anything.
        warnings: what it says of each object that is created.
        before: may answer instead of the server.
        after: may answer after the server has done what was requested: the answer is lost.
        forbidden: kinds that nobody may read.
        absent: kinds that the server does not know.
        logs: lines with their timestamps, by pod and container.
        program: what `exec` runs; None if it is forbidden.
        discovered: paths of API groups' versions that the server has.
        resources: names of what they serve, by path.
        groups: versions of the API groups that `/apis` lists, by name.
        max_page: objects of a page, however many are requested; 0: no limit.
        mute: running watches receive nothing any more.
    """

    version: int = 100
    oldest: int = 0
    objects: dict[Key, Json] = field(default_factory=dict)
    history: list[Happened] = field(default_factory=list)
    watches: set[asyncio.Queue[Happened | None]] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    writes: list[tuple[str, Json]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    before: Fault | None = None
    after: Fault | None = None
    forbidden: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    discovered: set[str] = field(default_factory=set)
    resources: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    logs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    program: Callable[[web.WebSocketResponse], Awaitable[None]] | None = None
    max_page: int = 0
    mute: bool = False
    port: int = 0
    runner: web.AppRunner | None = None

    @classmethod
    def of(cls, **objects: list[Json]) -> "FakeApiServer":
        """Return a server that has these objects, by kind, and whose pages are short."""
        server = cls(max_page=3)
        for kind, items in objects.items():
            for item in items:
                server.put(kind, item)
        return server

    # ---- what tests do to it ----

    def put(self, kind: str, obj: Json) -> Json:
        """Create or replace an object, as another client would."""
        meta = obj.setdefault("metadata", {})
        key = kind, meta.get("namespace", ""), meta["name"]
        known = self.objects.get(key)
        meta.setdefault("uid", known["metadata"]["uid"] if known else str(uuid.uuid4()))
        return self._keep(key, deepcopy(obj), "MODIFIED" if known else "ADDED")

    def get(self, kind: str, name: str, namespace: str = "") -> Json:
        """Return the object."""
        return self.objects[kind, namespace, name]

    def all(self, kind: str) -> list[Json]:
        """Return the collection, of all namespaces."""
        return [obj for key, obj in self.objects.items() if key[0] == kind]

    def remove(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete an object at once."""
        obj = deepcopy(self.objects.pop((kind, namespace, name)))
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._publish(Happened(self.version, kind, "DELETED", obj))

    def collect_garbage(self) -> None:
        """Delete objects whose owners are all gone, as the garbage collector does after a while."""
        while True:
            uids = {obj["metadata"]["uid"] for obj in self.objects.values()}
            orphans = [
                key
                for key, obj in self.objects.items()
                if (owners := obj["metadata"].get("ownerReferences"))
                and not any(owner["uid"] in uids for owner in owners)
            ]
            if not orphans:
                return
            for kind, namespace, name in orphans:
                self.remove(kind, name, namespace)

    def run_deployments(self) -> None:
        """Let all replicas of Deployments become available, as their controllers do after a while."""
        for deployment in self.all("deployments"):
            names = ("replicas", "updatedReplicas", "availableReplicas")
            status = dict.fromkeys(names, deployment["spec"]["replicas"])
            if deployment.get("status") != status:
                self.put("deployments", {**deployment, "status": status})

    def compact(self) -> None:
        """Forget the history: a watch from before must list again."""
        self.history.clear()
        self.oldest = self.version

    def send(self, kind: str, type_: str, obj: Json) -> None:
        """Send what is in no store to all watches: duplicates, old news, ERROR, bookmarks."""
        happened = Happened(self.version, kind, type_, obj)
        for queue in self.watches:
            queue.put_nowait(happened)

    def end_watches(self) -> None:
        """End all watches, as the server does after a while."""
        for queue in self.watches:
            queue.put_nowait(None)

    async def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        # For aiohttp 0 means no limit, and a watch that has just begun would never end.
        self.runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Break all connections."""
        assert self.runner is not None
        self.end_watches()
        await self.runner.cleanup()

    def api(self) -> Api:
        """Return a client of it."""
        return Api(ApiServer(f"http://127.0.0.1:{self.port}"))

    # ---- HTTP ----

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.before is not None:
            answer = await self.before(request)
            if answer is not None:
                self.requests.append(f"{request.method} {request.path}")
                return answer
        try:
            answer = await self._answer(request)
        except Refusal as refusal:
            status = {
                "kind": "Status",
                "code": refusal.code,
                "reason": refusal.reason,
                "message": str(refusal),
            }
            answer = web.json_response(status, status=refusal.code)
        if self.after is not None:
            return await self.after(request) or answer
        return answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and request.query.get("watch"):
            return await self._watch(request)
        if request.path in self.discovered:
            served = [{"name": name} for name in self.resources.get(request.path, ())]
            return web.json_response({"kind": "APIResourceList", "resources": served})
        if request.path == "/apis":
            return web.json_response(self._discovery())
        if request.path.endswith(("/log", "/exec")):
            if "*/*" not in request.headers.get("Accept", "*/*"):
                raise Refusal(406, "NotAcceptable", "only other media types are served")
            logs = request.path.endswith("/log")
            return await (self._log if logs else self._exec)(request)
        body: Json = msgspec.json.decode(await request.read() or b"{}")
        answer = self.handle(request.method, request.path, request.query, body)
        status = 201 if request.method == "POST" else 200
        response = web.Response(
            body=msgspec.json.encode(answer), status=status, content_type="application/json"
        )
        for text in self.warnings if request.method == "POST" else ():
            quoted = text.replace("\\", "\\\\").replace('"', '\\"')
            response.headers.add("Warning", f'299 - "{quoted}"')
        return response

    async def _log(self, request: web.Request) -> web.StreamResponse:
        """Send a container's log as it is now; a connection that follows breaks off then."""
        target, query = Target.of(request.path), request.query
        self.requests.append(f"GET {request.path_qs}")
        log = self.logs.get((target.name, query["container"]))
        if log is None:
            pod = self.handle("GET", request.path.removesuffix("/log"), {}, {})
            if not pod["spec"].get("nodeName"):
                return web.Response()
            message = f'container "{query["container"]}" in pod "{target.name}" is waiting to start'
            raise Refusal(400, "BadRequest", message)
        lines = [line for line in log if line[:19] >= query.get("sinceTime", "")[:19]]
        if "tailLines" in query:
            lines = lines[len(lines) - int(query["tailLines"]) :]
        if query.get("timestamps") != "true":
            lines = [line.partition(" ")[2] for line in lines]
        return web.Response(body="".join(f"{line}\n" for line in lines).encode())

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        """Run the test's program on a websocket."""
        self.requests.append(f"GET {request.path_qs}")
        if self.program is None:
            raise Refusal(403, "Forbidden", "pods/exec is forbidden")
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"])
        await socket.prepare(request)
        await self.program(socket)
        await socket.close()
        return socket

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        with contextlib.suppress(ConnectionError):
            await answer.prepare(request)
            async for happened in self.watch(request.path, request.query):
                line = {"type": happened.type, "object": happened.object}
                await answer.write(msgspec.json.encode(line) + b"\n")
        return answer

    # ---- requests ----

    def handle(self, method: str, path: str, query: Mapping[str, Any], body: Json) -> Json:
        """Answer any request but a watch. Raises Refusal."""
        self.requests.append(f"{method} {path}")
        target = Target.of(path)
        if target.kind in self.absent:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if target.kind in self.forbidden:
            verb = "create" if method == "POST" else "list"
            place = (
                f'in the namespace "{target.namespace}"'
                if target.namespace
                else "at the cluster scope"
            )
            raise Refusal(
                403,
                "Forbidden",
                f'{target.kind} is forbidden: User "alice" cannot {verb} resource "{target.kind}" in API '
                f'group "" {place}',
            )
        if not target.name:
            if method == "GET":
                return self._list(target, query)
            if query.get("dryRun") != "All" and target.kind != "selfsubjectaccessreviews":
                self.writes.append((path, body))
            return self._create(target, body, dry_run="dryRun" in query)
        if target.key not in self.objects:
            raise Refusal(404, "NotFound", f'{target.kind} "{target.name}" not found')
        if method == "GET":
            return self.objects[target.key]
        self.writes.append((path, body))
        if target.subresource == "binding":
            return self._bind(target.key, body)
        if target.subresource == "eviction" or method == "DELETE":
            if target.subresource != "eviction":
                self.remove(target.kind, target.name, target.namespace)
            return {"kind": "Status", "status": "Success"}
        return self._change(target.key, method, body)

    async def watch(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[Happened]:
        """Yield what happens from a version on, until the watches are ended."""
        self.requests.append(f"GET {path}")
        target, since = Target.of(path), int(query["resourceVersion"])
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            yield Happened(0, target.kind, "ERROR", gone)
            return
        queue: asyncio.Queue[Happened | None] = asyncio.Queue()
        for happened in self.history:
            if happened.version > since:
                queue.put_nowait(happened)
        self.watches.add(queue)
        try:
            while (happened_ := await queue.get()) is not None:
                if happened_.kind == target.kind and _selected(happened_.object, query):
                    yield happened_
        finally:
            self.watches.discard(queue)

    def _discovery(self) -> Json:
        groups = [
            {"name": name, "versions": [{"version": version} for version in versions]}
            for name, versions in self.groups.items()
        ]
        return {"groups": groups}

    def _list(self, target: Target, query: Mapping[str, Any]) -> Json:
        items = [
            obj
            for key, obj in self.objects.items()
            if key[0] == target.kind and target.namespace in ("", key[1]) and _selected(obj, query)
        ]
        start = int(query.get("continue", 0))
        limit = int(query.get("limit", 0)) or len(items)
        end = start + (min(limit, self.max_page) if self.max_page else limit)
        more = {"continue": str(end)} if end < len(items) else {}
        return {
            "kind": "List",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": str(self.version), **more},
            "items": items[start:end],
        }

    def _create(self, target: Target, body: Json, *, dry_run: bool = False) -> Json:
        obj = deepcopy(body)
        if target.kind == "selfsubjectaccessreviews":
            resource = body["spec"]["resourceAttributes"]["resource"]
            return {**body, "status": {"allowed": resource not in self.forbidden}}
        meta = obj["metadata"]
        if target.namespace:
            meta["namespace"] = target.namespace
        if "name" not in meta:
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        key = target.kind, target.namespace, meta["name"]
        if key in self.objects:
            message = f'{target.kind} "{meta["name"]}" already exists'
            raise Refusal(409, "AlreadyExists", message)
        if target.kind == "rolebindings":
            # Whose rights the creator must have.
            role = body["roleRef"]["name"]
            if ("roles", target.namespace, role) not in self.objects:
                raise Refusal(404, "NotFound", f'roles "{role}" not found')
        meta["uid"] = str(uuid.uuid4())
        return obj if dry_run else self._keep(key, obj, "ADDED")

    def _change(self, key: Key, method: str, body: Json) -> Json:
        known, meta = self.objects[key], body.get("metadata", {})
        for name in ("resourceVersion", "uid"):
            if meta.get(name) not in (None, known["metadata"][name]):
                raise Refusal(409, "Conflict", f"the object has another {name}")
        changed = deepcopy(body) if method == "PUT" else merged(known, body)
        changed["metadata"]["uid"] = known["metadata"]["uid"]
        return self._keep(key, changed, "MODIFIED")

    def _bind(self, key: Key, body: Json) -> Json:
        pod = deepcopy(self.objects[key])
        uid = body["metadata"].get("uid")
        if uid not in (None, pod["metadata"]["uid"]):
            raise Refusal(409, "Conflict", f"Precondition failed: UID in precondition: {uid}")
        if pod["metadata"].get("deletionTimestamp"):
            raise Refusal(409, "Conflict", "pod is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            message = f'pod {key[2]} is already assigned to node "{pod["spec"]["nodeName"]}"'
            raise Refusal(409, "Conflict", message)
        written = body["metadata"].get("annotations", {})
        if foreign := [name for name in written if _NUMBER.sub("-", name) not in ON_BINDINGS]:
            # As the chart's policy does.
            raise Refusal(403, "Forbidden", f"not a record of a pod's card: {foreign[0]}")
        pod["spec"]["nodeName"] = body["target"]["name"]
        pod["metadata"]["annotations"] = {**pod["metadata"].get("annotations", {}), **written}
        self._keep(key, pod, "MODIFIED")
        return {"kind": "Status", "status": "Success"}

    def _keep(self, key: Key, obj: Json, type_: str) -> Json:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = obj
        self._publish(Happened(self.version, key[0], type_, deepcopy(obj)))
        return obj

    def _publish(self, happened: Happened) -> None:
        self.history.append(happened)
        for queue in () if self.mute else self.watches:
            queue.put_nowait(happened)


def merged(known: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = deepcopy(known) if isinstance(known, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _selected(obj: Json, query: Mapping[str, Any]) -> bool:
    """Evaluate field selectors with `=` and `!=`, and label selectors with `=`, `KEY` and `!KEY`."""
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, sign, expected = re.split(r"(!=|=)", term, maxsplit=1)
        value: Any = obj
        for part in path.split("."):
            value = (value or {}).get(part)
        if ((value or "") == expected) is (sign == "!="):
            return False
    labels = obj["metadata"].get("labels", {}) if "metadata" in obj else {}
    terms = filter(None, query.get("labelSelector", "").split(","))
    return all(_has_label(labels, term) for term in terms)


def _has_label(labels: Mapping[str, str], term: str) -> bool:
    if term.startswith("!"):
        return term[1:] not in labels
    key, equals, value = term.partition("=")
    return labels.get(key) == value if equals else key in labels


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[FakeApiServer]:
    """A server that runs while the block does."""
    server = FakeApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.contextmanager
def in_thread(server: FakeApiServer, folder: Path) -> Iterator[Path]:
    """Serve in a thread of its own; yield the kubeconfig that leads there."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(server.stop())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        path = folder / "kubeconfig"
        path.write_text(json.dumps(kubeconfig(server.port)))
        yield path
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def kubeconfig(port: int) -> Json:
    """Return a kubeconfig that leads to a server on this port."""
    context = {"cluster": "c", "user": "u", "namespace": "team"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
