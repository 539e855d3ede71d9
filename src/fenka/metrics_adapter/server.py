"""HTTP: the API for the API server, and probes for the kubelet on a port of their own."""

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from aiohttp import web

from fenka.kubernetes.http_listener import LISTENER
from fenka.metrics_adapter.front_proxy import FrontProxy
from fenka.metrics_adapter.values import Values
from fenka.metrics_adapter.wire import (
    FORBIDDEN,
    INTERNAL,
    NOT_FOUND,
    PATH,
    NoValue,
    failure,
    resource_list,
    value_list,
)

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0

Answer = Callable[[web.Request], Awaitable[bytes]]


def api_app(values: Values, front_proxy: Callable[[], FrontProxy]) -> web.Application:
    """Return the application with the API."""

    async def resources(_: web.Request) -> bytes:
        return resource_list()

    async def value(request: web.Request) -> bytes:
        place = request.match_info
        selector = request.query.get("labelSelector", "")
        result = await values.value(place["namespace"], place["metric"], selector)
        return value_list(place["metric"], result, datetime.now(UTC))

    async def nothing(_: web.Request) -> bytes:
        raise NoValue("the server could not find the requested resource", NOT_FOUND)

    def handler(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            with request.app[LISTENER].protect(request):
                try:
                    _check_caller(request, front_proxy())
                    return _json(await answer(request))
                except NoValue as error:
                    return _json(failure(error.code, str(error)), error.code)
                except Exception:
                    # A bug: this request fails, the next one is served.
                    log.exception("a request failed")
                    sentence = "the metrics adapter failed at this request: its log has the reason"
                    return _json(failure(INTERNAL, sentence), INTERNAL)

        return handle

    app = web.Application()
    app.router.add_get(PATH, handler(resources))
    app.router.add_get(PATH + "/namespaces/{namespace}/{metric}", handler(value))
    app.router.add_route("*", "/{path:.*}", handler(nothing))
    return app


def probe_app(problem: Callable[[], str]) -> web.Application:
    """Return the application with the probes. problem: why requests cannot be answered, empty if they can."""

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if reason := problem():
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", ready)
    return app


def _check_caller(request: web.Request, front_proxy: FrontProxy) -> None:
    """Raise NoValue unless the caller's certificate, which TLS has verified, is the front proxy's."""
    certificate = request.get_extra_info("peercert") or {}
    if not front_proxy.accepts(certificate.get("subject", ())):
        raise NoValue("only the API server may connect", FORBIDDEN)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
