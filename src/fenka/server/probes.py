"""Each program's answers to its kubelet and to Prometheus: `/healthz`, `/readyz` and `/metrics`.

A node's program also answers the dashboard: `/usage`.
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from fenka.server.listener import MAX_READERS, HttpListener, ThrottledText, serve_app

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Metrics = Callable[[], Iterable[bytes]]
"""Returns the metrics in Prometheus' format, in parts."""

Refresh = Callable[[], Awaitable[None]]
"""Fetches what the metrics are made of."""


def add_probes(
    app: web.Application,
    problem: Callable[[], str],
    metrics: Metrics | None = None,
    refresh: Refresh | None = None,
) -> None:
    """Add the routes to an application.

    Args:
        app: the application.
        problem: returns why the program is not ready, empty if it is.
        metrics: returns the metrics; None for an application that does not show them.
        refresh: Fetches before what the metrics are made of.
    """

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = problem()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", ready)
    if metrics is None:
        return
    text = ThrottledText(metrics, refresh)

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=await text(), headers={"Content-Type": METRICS_TYPE})

    app.router.add_get("/metrics", show)


def serve_probes(
    listening: socket.socket,
    problem: Callable[[], str],
    metrics: Metrics | None = None,
    refresh: Refresh | None = None,
    usage: Callable[[], bytes] | None = None,
) -> contextlib.AbstractAsyncContextManager[None]:
    """Serve the routes to everybody on this socket while the block runs.

    Args:
        listening: the socket.
        problem, metrics, refresh: as of `add_probes`.
        usage: returns the JSON of `/usage`.
    """
    app = web.Application()
    add_probes(app, problem, metrics, refresh)
    if usage is not None:

        async def show_usage(_: web.Request) -> web.Response:
            return web.Response(body=usage(), content_type="application/json")

        app.router.add_get("/usage", show_usage)
    return serve_app(app, listening, HttpListener(max_connections=MAX_READERS))
