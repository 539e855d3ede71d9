"""Pods that kube-scheduler is to try again: one label, and no more where that is not allowed."""

import asyncio
import json
from collections.abc import Sequence

from aiohttp import web

from fenka.cluster.objects import Pod
from fenka.scheduler.requeue import LABEL, Requeuer
from tests.kubernetes.api_server import ApiServer, api_server, until
from tests.scheduler.objects_kit import a_pod
from tests.scheduler.replica_kit import briefly, put_pod


def label(server: ApiServer, name: str) -> str | None:
    """Of a pod that the server has."""
    (found,) = [it for it in server.all("pods") if it["metadata"]["name"] == name]
    said: str | None = found["metadata"].get("labels", {}).get(LABEL)
    return said


def test_the_label() -> None:
    """On the pods that are due; those that are gone are passed over; nothing where another leads."""

    async def go() -> None:
        async with api_server() as server, server.api() as api:
            put_pod(server, "p", 4, uid="p")
            batches = [[a_pod("gone", 4, uid="gone"), a_pod("p", 4, uid="p")]]
            leads = False

            def due(_: int) -> Sequence[Pod]:
                return batches.pop() if batches else ()

            requeuer = Requeuer(api, due, lambda: leads, briefly, now=lambda: 12.5)
            task = asyncio.create_task(requeuer.run())
            await asyncio.sleep(0.02)
            assert label(server, "p") is None
            leads = True
            await until(lambda: label(server, "p") == "12")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())


def test_where_it_may_not() -> None:
    """It ends, and nothing else does."""

    async def go() -> None:
        async def forbid(request: web.Request) -> None:
            if request.method == "PATCH":
                status = {"kind": "Status", "code": 403, "message": "forbidden"}
                raise web.HTTPForbidden(text=json.dumps(status), content_type="application/json")

        async with api_server() as server, server.api() as api:
            put_pod(server, "p", 4, uid="p")
            server.before = forbid
            pods = [a_pod("p", 4, uid="p")]
            async with asyncio.timeout(10):
                await Requeuer(api, lambda _: pods, lambda: True, briefly).run()
            assert label(server, "p") is None

    asyncio.run(go())
