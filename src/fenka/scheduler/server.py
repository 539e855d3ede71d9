"""The extender over HTTP, at the paths of gpushare's.

kube-scheduler is answered with 200, and trouble in `Error`; where a verb's answer has no place for that, with
503, or with 400 for what is no request of the protocol. The leader decides; others pass the verbs on to it.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from fenka import __version__
from fenka.scheduler import wire
from fenka.scheduler.forward import FORWARDED, Forwarder, Unreachable
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
        state = State(
            replica.world,
            replica.cluster,
            replica.binder,
            lambda: replica.order if replica.leading else None,
        )
        self._metrics = Metrics(state)
        self._forwarder = Forwarder(replica.election.identity)

    def app(self) -> web.Application:
        """All routes."""
        slashes = web.normalize_path_middleware(
            append_slash=False, remove_slash=True, redirect_class=web.HTTPTemporaryRedirect
        )
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[slashes])
        app.cleanup_ctx.append(self._forwarder.running)
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
        self._replica.teller.asked(asked.pod)
        found = self._replica.desk.filter(asked.pod, asked.names)
        answer = wire.answer_nodes(asked, found.fitting)
        answer.failed_nodes = found.failed
        answer.failed_and_unresolvable_nodes = found.hopeless
        return answer

    async def prioritize(self, body: bytes) -> list[dict[str, Any]]:
        """A score for each node."""
        asked = wire.read_nodes(body)
        scores = self._replica.desk.prioritize(asked.pod, asked.names)
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
            node: (found.uids, found.violations)
            for node, victims in asked.victims.items()
            if (found := self._replica.desk.preempt(asked.pod, node, victims, pods)) and found.uids
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
                if not body:
                    answer = web.Response(status=400, text="Please send a request body")
                elif self._replica.leading:
                    answer = await self._answer(verb, empty, body)
                elif FORWARDED in request.headers:
                    answer = _trouble(empty, f"not the leader: that is {self._leader()}")
                else:
                    answer = await self._pass_on(name, empty, body)
            finally:
                self._metrics.requests.labels(name).observe(time.perf_counter() - begun)
            if self._replica.ending:
                # The next call goes by the Service to a replica that stays.
                answer.force_close()
            return answer

        return handle

    def _leader(self) -> str:
        election = self._replica.election
        return "nobody yet" if election.leader in ("", election.identity) else election.leader

    async def _pass_on(self, name: str, empty: Any, body: bytes) -> web.Response:
        election, leader = self._replica.election, self._leader()
        if election.leader in ("", election.identity):
            return _trouble(empty, "fenka: no replica leads at the moment; one will in seconds")
        if not election.leader_address:
            return _trouble(empty, f"fenka: the leader {leader} does not say where it is reached")
        try:
            answer = await self._forwarder.post(f"{election.leader_address}{PREFIX}/{name}", body)
        except Unreachable as why:
            return _trouble(empty, f"fenka: the leader {leader} does not answer: {why}")
        self._metrics.forwarded.labels(name).inc()
        return answer

    async def _answer(self, verb: Verb, empty: Any, body: bytes) -> web.Response:
        try:
            return _json(await verb(body))
        except NotUnderstood as why:
            return _trouble(empty, str(why), status=400)
        except Exception:
            # A bug: this pod is told so, the next one is served.
            log.exception("a request failed")
            return _trouble(empty, "fenka failed at this request: its log says why")

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
        why = "; ".join(replica.cluster.troubles) or replica.election.trouble
        if replica.ending:
            why = "it is ending"
        elif not replica.cluster.synced:
            why = why or "the cluster is being read"
        text = f"not ready: {why or 'it is not known who leads'}"
        return web.Response(status=503, text=text)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")


def _json(answer: Any, status: int = 200) -> web.Response:
    body = msgspec.json.encode(answer)
    return web.Response(body=body, status=status, content_type="application/json")


def _trouble(empty: Any, sentence: str, status: int = 503) -> web.Response:
    """status: where the answer has no place for a sentence."""
    if empty is None:
        return web.Response(status=status, text=sentence)
    if isinstance(empty, wire.Answer):
        return _json(wire.Answer(error=sentence))
    return _json({"Error": sentence})


async def _version(_: web.Request) -> web.Response:
    return web.Response(text=__version__)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")
