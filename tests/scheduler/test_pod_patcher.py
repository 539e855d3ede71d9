"""Patches of pods: which are sent, when they are repeated, and what happens if they are refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
from aiohttp import web

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.queue_snapshot import POSITION
from fenka.scheduler.controllers import (
    REQUEUED_LABEL,
    RETRY_AFTER_S,
    PodPatcher,
    requeue_body,
    ungate_body,
)
from tests.builders import T4_MIB, a_pod, gang_labels, node_json, pod_json
from tests.fakes.api_server import FakeApiServer, api_server
from tests.scheduler.harness import put_pod, scheduler
from tests.waiting import until

GATED = {"schedulingGates": [{"name": QUEUE_GATE}]}


class Passes:
    """Replaces sleep: counts the passes of a patcher."""

    def __init__(self) -> None:
        self.count = 0

    async def sleep(self, _: float) -> None:
        """Begin a pass."""
        self.count += 1
        await asyncio.sleep(0)

    async def more(self) -> None:
        """Return after two more passes have begun: one of them is complete."""
        count = self.count + 2
        await until(lambda: self.count >= count)


@contextlib.asynccontextmanager
async def running(patcher: PodPatcher) -> AsyncIterator[None]:
    """Run the patcher while the block does."""
    task = asyncio.create_task(patcher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pod_of(server: FakeApiServer, name: str) -> dict[str, dict[str, object]]:
    """Return a pod of the server."""
    (pod,) = [it for it in server.all("pods") if it["metadata"]["name"] == name]
    return pod


def label(server: FakeApiServer, name: str) -> object:
    """Return the label that has kube-scheduler retry a pod."""
    labels = pod_of(server, name)["metadata"].get("labels", {})
    return labels.get(REQUEUED_LABEL) if isinstance(labels, dict) else None


def gates(server: FakeApiServer, name: str) -> object:
    """Return the scheduling gates of a pod."""
    return pod_of(server, name)["spec"].get("schedulingGates")


def forbid(*names: str) -> web.HTTPForbidden:
    """Return the API server's refusal."""
    status = {"kind": "Status", "code": 403, "message": f"not {', '.join(names)}"}
    return web.HTTPForbidden(text=json.dumps(status), content_type="application/json")


async def test_label_is_set_when_a_pod_is_due() -> None:
    """A deleted pod is skipped; nothing is patched while another replica leads."""

    async with api_server() as server, server.api() as api:
        put_pod(server, "p", 4, uid="p")
        batches, leads, passes = [[a_pod("gone", 4), a_pod("p", 4, uid="p")]], False, Passes()

        def due(_: int) -> Sequence[Pod]:
            return batches.pop() if batches else ()

        patcher = PodPatcher(
            api, requeue_body, due, lambda: leads, 0.1, retry_after_s=0, sleep=passes.sleep
        )
        async with running(patcher):
            await passes.more()
            assert label(server, "p") is None
            leads = True
            await until(lambda: label(server, "p") is not None)


async def test_gate_is_removed_only_when_the_replica_leads() -> None:
    """A standby leaves it."""

    async with api_server() as server, server.api() as api:
        server.put("pods", {**pod_json("p", 4, uid="p"), "spec": dict(GATED)})
        pods, leads, passes = [a_pod("p", 4, uid="p")], False, Passes()
        patcher = PodPatcher(
            api, ungate_body, lambda _: pods, lambda: leads, 0.1, sleep=passes.sleep
        )
        async with running(patcher):
            await passes.more()
            assert gates(server, "p") == GATED["schedulingGates"]
            leads = True
            await until(lambda: gates(server, "p") is None)


async def test_request_is_repeated_after_a_pause_when_it_is_refused() -> None:
    """One pod that cannot be changed costs one request in five seconds; others are patched."""

    patched: list[str] = []
    now, passes = 0.0, Passes()

    async def refuse_one(request: web.Request) -> None:
        if request.method == "PATCH":
            patched.append(request.path.rpartition("/")[2])
            if patched[-1] == "stuck":
                raise forbid("stuck")

    async with api_server() as server, server.api() as api:
        pods = [a_pod("stuck", 4, uid="stuck"), a_pod("p", 4, uid="p")]
        for pod in pods:
            put_pod(server, pod.metadata.name, 4, uid=pod.metadata.uid)
        server.before = refuse_one
        patcher = PodPatcher(
            api,
            ungate_body,
            lambda _: pods,
            lambda: True,
            0.1,
            sleep=passes.sleep,
            clock=lambda: now,
        )
        async with running(patcher):
            await passes.more()
            await passes.more()
            assert sorted(patched) == ["p", "stuck"]
            now = RETRY_AFTER_S
            await until(lambda: patched.count("stuck") == 2)


async def test_error_is_logged_once_when_patching_is_forbidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing else fails."""

    async def refuse(request: web.Request) -> None:
        if request.method == "PATCH":
            raise forbid("p")

    async with api_server() as server, server.api() as api:
        put_pod(server, "p", 4, uid="p")
        server.before = refuse
        patcher = PodPatcher(api, requeue_body, lambda _: (), lambda: True, 0.1)
        for _ in range(2):
            await patcher.patch(a_pod("p", 4, uid="p"))
        assert label(server, "p") is None
    assert len([it for it in caplog.messages if "cannot patch" in it]) == 1


async def test_replica_ungates_a_pod_when_the_informer_brings_it() -> None:
    """As it is wired: the gate is removed, and filter answers."""

    async with scheduler(node_json("n", T4_MIB)) as (server, one):
        pod = pod_json("p", 4, uid="p")
        pod["spec"] |= GATED
        server.put("pods", pod)
        await until(lambda: gates(server, "p") is None)
        assert (await one.filter(pod, "n"))["NodeNames"] == ["n"]


async def test_positions_of_pods_that_wait_are_published_until_they_are_served() -> None:
    """Users who may not read the queue see them on their own pods."""
    async with scheduler(node_json("n", T4_MIB)) as (server, one):
        for number in range(2):
            put_pod(server, f"p{number}", 14, created=f"2024-01-01T00:00:0{number}Z")
        await until(lambda: one.knows(*server.all("pods")))
        assert await one.bind(pod_of(server, "p0"), "n") == ""
        late = pod_of(server, "p1")
        assert (await one.filter(late, "n"))["NodeNames"] in ([], None)
        await until(lambda: pod_of(server, "p1")["metadata"].get("annotations") == {POSITION: "1"})


async def test_replica_has_members_retried_when_their_gang_has_grown() -> None:
    """As it is wired: the first was told of one pod, the second of two."""

    async with scheduler(node_json("n", T4_MIB)) as (server, one):
        members = [
            pod_json(name, 4, uid=name, labels=gang_labels("g", 3)) for name in ("g-0", "g-1")
        ]
        for present, pod in enumerate(members, 1):
            server.put("pods", pod)
            await until(partial(one.knows, pod))
            failed = (await one.filter(pod, "n"))["FailedAndUnresolvableNodes"]
            assert failed == {"n": f"gang g is incomplete: {present} of its 3 pods exist"}
        await until(lambda: label(server, "g-0") is not None)
        assert label(server, "g-1") is None
