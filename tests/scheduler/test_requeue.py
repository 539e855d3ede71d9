"""Pods that kube-scheduler is to try again: one label, and no more where that is not allowed."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from aiohttp import web

from fenka.cluster.objects import Pod
from fenka.scheduler.pod_patcher import REQUEUED_LABEL, PodPatcher, requeue_body
from tests.builders import a_pod
from tests.fakes.api_server import FakeApiServer, api_server, until
from tests.scheduler.replica_kit import briefly, put_pod


def label(server: FakeApiServer, name: str) -> str | None:
    """Of a pod that the server has."""
    (found,) = [it for it in server.all("pods") if it["metadata"]["name"] == name]
    said: str | None = found["metadata"].get("labels", {}).get(REQUEUED_LABEL)
    return said


def test_label_is_set_when_a_pod_is_due() -> None:
    """A deleted pod is skipped; nothing is patched while another replica leads."""

    async def go() -> None:
        async with api_server() as server, server.api() as api:
            put_pod(server, "p", 4, uid="p")
            batches = [[a_pod("gone", 4, uid="gone"), a_pod("p", 4, uid="p")]]
            leads = False

            def due(_: int) -> Sequence[Pod]:
                return batches.pop() if batches else ()

            requeuer = PodPatcher(api, requeue_body, due, lambda: leads, 0.1, sleep=briefly)
            task = asyncio.create_task(requeuer.run())
            await asyncio.sleep(0.02)
            assert label(server, "p") is None
            leads = True
            await until(lambda: label(server, "p") is not None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())


def test_error_is_logged_once_when_patching_is_forbidden(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else fails."""

    async def go() -> None:
        async def forbid(request: web.Request) -> None:
            if request.method == "PATCH":
                status = {"kind": "Status", "code": 403, "message": "forbidden"}
                raise web.HTTPForbidden(text=json.dumps(status), content_type="application/json")

        async with api_server() as server, server.api() as api:
            put_pod(server, "p", 4, uid="p")
            server.before = forbid
            patcher = PodPatcher(api, requeue_body, lambda _: (), lambda: True, 0.1, sleep=briefly)
            for _ in range(2):
                await patcher.patch(a_pod("p", 4, uid="p"))
            assert label(server, "p") is None
            assert len([it for it in caplog.messages if "cannot patch" in it]) == 1

    asyncio.run(go())
