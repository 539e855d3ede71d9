"""A stand-in for the API server: lists and objects from memory, over HTTP, paged as the real one pages.

It knows the few field selectors that the screens use, counts what was asked, and refuses on request.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

Json = dict[str, Any]

KINDS = ("nodes", "pods", "configmaps", "events")


class Server:
    """What there is, by kind; `forbidden` kinds are refused; `paths` were asked for."""

    def __init__(self, **objects: list[Json]) -> None:
        self.objects: dict[str, list[Json]] = {kind: objects.get(kind, []) for kind in KINDS}
        self.forbidden: set[str] = set()
        self.paths: list[str] = []
        self.most = 3
        """Objects a page, however many are asked for: continuing is the rule."""

    async def answer(self, request: web.Request) -> web.Response:
        """One request."""
        self.paths.append(request.path_qs)
        *scope, last = request.path.removeprefix("/api/v1/").split("/")
        parts = [*scope, last]
        kind = next((part for part in reversed(parts) if part in KINDS), "")
        if kind in self.forbidden:
            return _status(403, "Forbidden", f"{kind} is forbidden: User cannot list resource")
        namespace = parts[1] if parts[0] == "namespaces" else None
        found = [it for it in self.objects.get(kind, []) if _in(it, namespace)]
        if last not in KINDS:
            named = [it for it in found if it["metadata"]["name"] == last]
            return web.json_response(named[0]) if named else _not_found(kind, last)
        return self._page([it for it in found if _selected(it, request.query)], request.query)

    def _page(self, found: list[Json], query: Any) -> web.Response:
        start = int(query.get("continue", 0))
        end = start + min(self.most, int(query.get("limit", self.most)))
        more = {"continue": str(end)} if end < len(found) else {}
        return web.json_response(
            {"metadata": {"resourceVersion": "7", **more}, "items": found[start:end]}
        )


def _in(it: Json, namespace: str | None) -> bool:
    return namespace is None or it["metadata"].get("namespace") == namespace


def _selected(it: Json, query: Any) -> bool:
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, wanted = (term.split("!=") if "!=" in term else term.split("="))[:2]
        value: Any = it
        for step in path.split("."):
            value = value.get(step, {})
        if ((value or "") == wanted) is ("!=" in term):
            return False
    return True


def _status(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(status, status=code)


def _not_found(kind: str, name: str) -> web.Response:
    return _status(404, "NotFound", f'{kind} "{name}" not found')


class Answering(Protocol):
    """Any stand-in."""

    async def answer(self, request: web.Request, /) -> web.StreamResponse:
        """One request."""


@contextmanager
def serving(server: Answering, folder: Path) -> Iterator[Path]:
    """Serve on a port of this machine; the kubeconfig that leads there."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def begin() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(begin())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(ports[0]))
        yield kubeconfig
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _kubeconfig(port: int) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
            ],
            "current-context": "x",
        }
    )


# ---- objects ----


def node(name: str, **given: Any) -> Json:
    """A ready node. resources: allocatable; capacity: where that differs; more by Kubernetes' names."""
    resources = {key: str(value) for key, value in given.get("resources", {}).items()}
    capacity = {key: str(value) for key, value in given.get("capacity", {}).items()}
    ready = {"type": "Ready", "status": given.get("ready", "True")}
    return {
        "metadata": {
            "name": name,
            "labels": given.get("labels", {}),
            "annotations": given.get("annotations", {}),
        },
        "spec": {
            "unschedulable": given.get("unschedulable", False),
            "taints": given.get("taints", []),
        },
        "status": {
            "allocatable": resources,
            "capacity": {**resources, **capacity},
            "addresses": [{"type": "InternalIP", "address": given.get("address", "10.0.0.1")}],
            "conditions": [ready],
        },
    }


def pod(name: str, limits: Json | None = None, **given: Any) -> Json:
    """A pod of one container; on a `node` it runs."""
    namespace = given.get("namespace", "default")
    where = given.get("node", "")
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": given.get("uid", f"u-{namespace}-{name}"),
            "annotations": given.get("annotations", {}),
            "labels": given.get("labels", {}),
        },
        "spec": {
            "nodeName": where,
            "schedulerName": given.get("scheduler", "default-scheduler"),
            "containers": [
                {
                    "name": "main",
                    "resources": {
                        "limits": {key: str(value) for key, value in (limits or {}).items()}
                    },
                }
            ],
            **given.get("spec", {}),
        },
        "status": {
            "phase": given.get("phase", "Running" if where else "Pending"),
            **given.get("status", {}),
        },
    }


def units(count: int) -> Json:
    """Limits: units of GPU memory."""
    return {"aliyun.com/gpu-mem": count}


def on_card(index: int, count: int, total: int = 14) -> Json:
    """gpushare's first generation of annotations."""
    return {
        "ALIYUN_COM_GPU_MEM_IDX": str(index),
        "ALIYUN_COM_GPU_MEM_POD": str(count),
        "ALIYUN_COM_GPU_MEM_DEV": str(total),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    }


def sharing(name: str, card_units: int = 14, cards: int = 1, **given: Any) -> Json:
    """A node on which gpushare's own plugin runs."""
    resources = {"aliyun.com/gpu-mem": card_units * cards, "aliyun.com/gpu-count": cards}
    labels = {"gpushare": "true", **given.pop("labels", {})}
    return node(name, resources={**resources, **given.pop("resources", {})}, labels=labels, **given)
