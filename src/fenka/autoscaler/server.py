"""The autoscaler's own port: probes and metrics."""

from collections.abc import Callable

from aiohttp import web


def probe_app(problem: Callable[[], str], metrics: Callable[[], bytes]) -> web.Application:
    """Return the application.

    Args:
        problem: returns why the replica is not ready, empty if it is.
        metrics: returns the metrics in Prometheus' format.
    """

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if reason := problem():
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ok\n")

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", show)
    return app
