"""The extender over HTTP, at the paths of gpushare's.

kube-scheduler is answered with 200, and trouble in `Error`; where a verb's answer has no place for that, with
503, or with 400 for what is no request of the protocol. The leader decides; others pass the verbs on to it.

There are two applications: `app` has everything and is for kube-scheduler, `readable` has what changes
nothing and is for everybody.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from fenka import __version__
from fenka.kubernetes.http_listener import LISTENER, ThrottledText
from fenka.scheduler import extender_api
from fenka.scheduler.credentials import Credentials
from fenka.scheduler.extender_api import InvalidExtenderRequest
from fenka.scheduler.inspect import inspect
from fenka.scheduler.leader_proxy import FORWARDED, LeaderProxy, LeaderUnreachable
from fenka.scheduler.metrics import Metrics, StateCollector
from fenka.scheduler.replica import Replica
from fenka.scheduler.request_bodies import BodyLimits, BodyReader, BodyRejected

log = logging.getLogger(__name__)

PREFIX = "/gpushare-scheduler"
KEEP_ALIVE_S = 600.0
"""Longer than kube-scheduler keeps a connection: whoever closes it first loses no request."""

Verb = Callable[[bytes], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Access:
    """What a server lets its callers have.

    bounds: of the bodies of requests. inspect, metrics: whether those who have no certificate may read them.
    credentials: certificates with which calls are passed on; None for plain HTTP.
    """

    bounds: BodyLimits = field(default_factory=BodyLimits)
    inspect: bool = True
    metrics: bool = True
    credentials: Credentials | None = None


class Server:
    """Answers for one replica."""

    def __init__(self, replica: Replica, access: Access = Access()) -> None:
        self._replica, self._access = replica, access
        state = StateCollector(
            replica.world,
            replica.cluster,
            replica.binder,
            lambda: replica.order if replica.leading else None,
        )
        if (credentials := access.credentials) is not None:
            state.expiries = lambda: credentials.expires_at
        self._metrics = Metrics(state)
        self._forwarder = LeaderProxy(replica.election.identity, access.credentials)
        self._bodies = BodyReader(access.bounds)
        self._inspected = ThrottledText(lambda: _encoded(inspect(replica.world)))
        self._counted = ThrottledText(self._metrics.text)

    def app(self) -> web.Application:
        """Return an application with all routes. With certificates nobody else reaches it."""
        trusted = self._access.credentials is not None
        app = self._application(
            inspect=trusted or self._access.inspect, metrics=trusted or self._access.metrics
        )
        app.cleanup_ctx.append(self._forwarder.running)
        verbs: dict[str, tuple[Verb, Any]] = {
            "filter": (self.filter, extender_api.ExtenderFilterResult()),
            "prioritize": (self.prioritize, None),
            "bind": (self.bind, {"Error": ""}),
            "preempt": (self.preempt, None),
        }
        for name, (verb, empty) in verbs.items():
            app.router.add_post(f"{PREFIX}/{name}", self._handler(name, verb, empty))
        return app

    def readable(self) -> web.Application:
        """Return an application with the routes that change nothing."""
        return self._application(inspect=self._access.inspect, metrics=self._access.metrics)

    def _application(self, *, inspect: bool, metrics: bool) -> web.Application:
        slashes = web.normalize_path_middleware(
            append_slash=False, remove_slash=True, redirect_class=web.HTTPTemporaryRedirect
        )
        app = web.Application(middlewares=[slashes])
        if inspect:
            app.router.add_get(f"{PREFIX}/inspect", self._inspect)
            app.router.add_get(f"{PREFIX}/inspect/{{node}}", self._inspect)
        app.router.add_get("/version", _version)
        app.router.add_get("/healthz", _healthz)
        app.router.add_get("/readyz", self._readyz)
        if metrics:
            app.router.add_get("/metrics", self._serve_metrics)
        return app

    # ---- verbs ----

    async def filter(self, body: bytes) -> extender_api.ExtenderFilterResult:
        """Which nodes fit, and why the others do not."""
        asked = extender_api.read_args(body)
        pod = self._replica.known(asked.pod)
        if pod is None:
            found = self._replica.extender.look(asked.pod, asked.names)
        else:
            self._replica.event_reporter.asked(pod)
            found = self._replica.extender.filter(pod, asked.names)
        answer = extender_api.filter_result(asked, found.fitting)
        answer.failed_nodes = found.failed
        answer.failed_and_unresolvable_nodes = found.unresolvable
        return answer

    async def prioritize(self, body: bytes) -> list[dict[str, Any]]:
        """A score for each node."""
        asked = extender_api.read_args(body)
        pod = self._replica.known(asked.pod) or asked.pod
        scores = self._replica.extender.prioritize(pod, asked.names)
        return [{"Host": name, "Score": score} for name, score in scores]

    async def bind(self, body: bytes) -> dict[str, str]:
        """Bind one pod."""
        wanted = extender_api.read_binding(body)
        error = await self._replica.binder.bind(wanted)
        log.info("%s/%s to %s: %s", wanted.namespace, wanted.name, wanted.node, error or "bound")
        return {"Error": error}

    async def preempt(self, body: bytes) -> dict[str, Any]:
        """Whom to evict, on nodes where that helps."""
        asked = extender_api.read_preemption(body)
        pod = self._replica.known(asked.pod) or asked.pod
        pods = {**asked.pods, **self._replica.cluster.pods.objects}
        chosen = {
            node: (found.uids, found.violations)
            for node, victims in asked.victims.items()
            if (found := self._replica.extender.preempt(pod, node, victims, pods)) and found.uids
        }
        return extender_api.preemption_result(asked, chosen)

    # ---- HTTP ----

    def _handler(
        self, name: str, verb: Verb, empty: Any
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """empty: the answer into which an error is put; None for verbs whose answer has no place for one."""

        async def handle(request: web.Request) -> web.StreamResponse:
            begun = time.perf_counter()
            try:
                async with self._bodies.reading(request) as body:
                    with request.app[LISTENER].at_work(request):
                        passed_on = FORWARDED in request.headers
                        answer = await self._respond(name, verb, empty, body, passed_on)
            except BodyRejected as why:
                answer = _trouble(empty, f"fenka: {why}", status=why.status)
                answer.force_close()
            finally:
                self._metrics.requests.labels(name).observe(time.perf_counter() - begun)
            if self._replica.ending:
                # The next call goes by the Service to a replica that stays.
                answer.force_close()
            return answer

        return handle

    async def _respond(
        self, name: str, verb: Verb, empty: Any, body: bytes, passed_on: bool
    ) -> web.Response:
        if not body:
            return web.Response(status=400, text="Please send a request body")
        if self._replica.leading:
            return await self._answer(verb, empty, body)
        if passed_on:
            return _trouble(empty, f"not the leader: that is {self._leader()}")
        return await self._pass_on(name, empty, body)

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
        except LeaderUnreachable as why:
            return _trouble(empty, f"fenka: the leader {leader} does not answer: {why}")
        self._metrics.forwarded.labels(name).inc()
        return answer

    async def _answer(self, verb: Verb, empty: Any, body: bytes) -> web.Response:
        try:
            return _json(await verb(body))
        except InvalidExtenderRequest as why:
            return _trouble(empty, str(why), status=400)
        except Exception:
            # A bug: this pod is told so, the next one is served.
            log.exception("a request failed")
            return _trouble(empty, "fenka failed at this request: its log says why")

    async def _inspect(self, request: web.Request) -> web.Response:
        name = request.match_info.get("node")
        if name is None:
            return web.Response(body=self._inspected(), content_type="application/json")
        found = inspect(self._replica.world, name)
        if found is None:
            return _json({"nodes": [], "error": f'node "{name}" not found'}, status=404)
        return _json(found)

    async def _readyz(self, _: web.Request) -> web.Response:
        replica = self._replica
        if replica.ready:
            return web.Response(text="ok")
        why = "; ".join(replica.cluster.troubles) or replica.election.last_error
        if replica.ending:
            why = "it is ending"
        elif not replica.cluster.synced:
            why = why or "the cluster is being read"
        text = f"not ready: {why or 'it is not known who leads'}"
        return web.Response(status=503, text=text)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._counted(), content_type="text/plain", charset="utf-8")


def _encoded(answer: Any) -> bytes:
    return msgspec.json.encode(answer)


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoded(answer), status=status, content_type="application/json")


def _trouble(empty: Any, sentence: str, status: int = 503) -> web.Response:
    """status: where the answer has no place for a sentence."""
    if empty is None:
        return web.Response(status=status, text=sentence)
    if isinstance(empty, extender_api.ExtenderFilterResult):
        return _json(extender_api.ExtenderFilterResult(error=sentence))
    return _json({"Error": sentence})


async def _version(_: web.Request) -> web.Response:
    return web.Response(text=__version__)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")
