"""The extender over HTTP, at the paths of gpushare's.

kube-scheduler is always answered with 200, and trouble in `Error`; what is no request of the protocol gets
400. A replica that does not lead ends the connection with its answer, because kept connections would go on
coming to it, past the Service.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from fenka import __version__
from fenka.scheduler import wire
from fenka.scheduler.inspect import inspect
from fenka.scheduler.metrics import Metrics, State
from fenka.scheduler.replica import Replica
from fenka.scheduler.wire import NotUnderstood

log = logging.getLogger(__name__)

PREFIX = "/gpushare-scheduler"
LARGEST_BODY = 256 * 1024 * 1024
"""Thousands of whole nodes, where the scheduler was not told that this extender knows them."""
KEEP_ALIVE_S = 600.0
"""Longer than kube-scheduler keeps a connection: whoever closes it first loses no request."""

Verb = Callable[[bytes], Awaitable[Any]]


class Server:
    """Answers for one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        state = State(replica.world, replica.cluster, replica.binder, lambda: replica.ready)
        self._metrics = Metrics(state)

    def app(self) -> web.Application:
        """All routes."""
        slashes = web.normalize_path_middleware(
            append_slash=False, remove_slash=True, redirect_class=web.HTTPTemporaryRedirect
        )
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[slashes])
        verbs: dict[str, tuple[Verb, Any]] = {
            "filter": (self.filter, wire.Answer()),
            "prioritize": (self.prioritize, None),
            "bind": (self.bind, {"Error": ""}),
            "preempt": (self.preempt, None),
        }
        for name, (verb, empty) in verbs.items():
            app.router.add_post(f"{PREFIX}/{name}", self._handler(name, verb, empty))
        app.router.add_get(f"{PREFIX}/inspect", self._inspect)
        app.router.add_get(f"{PREFIX}/inspect/{{node}}", self._inspect)
        app.router.add_get("/version", _version)
        app.router.add_get("/healthz", _healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        return app

    # ---- verbs ----

    async def filter(self, body: bytes) -> wire.Answer:
        """Which nodes fit, and why the others do not."""
        asked = wire.read_nodes(body)
        if not self._replica.cluster.synced:
            return wire.Answer(error="fenka is still reading the cluster")
        self._replica.teller.asked(asked.pod)
        found = self._replica.judge.filter(asked.pod, asked.names)
        answer = wire.answer_nodes(asked, found.fitting)
        answer.failed_nodes = found.failed
        answer.failed_and_unresolvable_nodes = found.hopeless
        return answer

    async def prioritize(self, body: bytes) -> list[dict[str, Any]]:
        """A score for each node."""
        asked = wire.read_nodes(body)
        scores = self._replica.judge.prioritize(asked.pod, asked.names)
        return [{"Host": name, "Score": score} for name, score in scores]

    async def bind(self, body: bytes) -> dict[str, str]:
        """Bind one pod."""
        wanted = wire.read_binding(body)
        error = await self._replica.binder.bind(wanted)
        log.info("%s/%s to %s: %s", wanted.namespace, wanted.name, wanted.node, error or "bound")
        return {"Error": error}

    async def preempt(self, body: bytes) -> dict[str, Any]:
        """Whom to evict, on nodes where that helps."""
        asked = wire.read_preemption(body)
        pods = {**self._replica.cluster.pods.objects, **asked.pods}
        chosen = {
            node: uids
            for node, victims in asked.victims.items()
            if (uids := self._replica.judge.preempt(asked.pod, node, victims, pods))
        }
        return wire.answer_preemption(asked, chosen)

    # ---- HTTP ----

    def _handler(
        self, name: str, verb: Verb, empty: Any
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """empty: the answer into which an error is put; None for verbs whose answer has no place for one."""

        async def handle(request: web.Request) -> web.StreamResponse:
            begun = time.perf_counter()
            body = await request.read()
            try:
                answer = await self._answer(verb, empty, body)
            finally:
                self._metrics.requests.labels(name).observe(time.perf_counter() - begun)
            if not self._replica.ready:
                answer.force_close()
            return answer

        return handle

    async def _answer(self, verb: Verb, empty: Any, body: bytes) -> web.Response:
        if not body:
            return web.Response(status=400, text="Please send a request body")
        try:
            return _json(await verb(body))
        except NotUnderstood as why:
            return _error(empty, str(why))
        except Exception:
            # A bug: this pod is told so, the next one is served.
            log.exception("a request failed")
            return _error(empty, "fenka failed at this request: its log says why")

    async def _inspect(self, request: web.Request) -> web.Response:
        name = request.match_info.get("node")
        found = inspect(self._replica.world, name)
        if found is None:
            return _json({"nodes": [], "error": f'node "{name}" not found'}, status=404)
        return _json(found)

    async def _readyz(self, _: web.Request) -> web.Response:
        replica = self._replica
        if replica.ready:
            return web.Response(text="ok")
        why = "; ".join(replica.cluster.troubles) or replica.election.trouble or ""
        leader = replica.leader or "nobody"
        return web.Response(status=503, text=f"not ready: the leader is {leader}. {why}".strip())

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")


def _json(answer: Any, status: int = 200) -> web.Response:
    body = msgspec.json.encode(answer)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(empty: Any, sentence: str) -> web.Response:
    if empty is None:
        return web.Response(status=400, text=sentence)
    if isinstance(empty, wire.Answer):
        return _json(wire.Answer(error=sentence))
    return _json({"Error": sentence})


async def _version(_: web.Request) -> web.Response:
    return web.Response(text=__version__)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")
