"""Pods that a foreign policy refuses: they keep no card, and nobody is preempted for them again and again."""

from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from fenka.cluster.objects import QUEUE_GATE
from fenka.cluster.refusals import REFUSED
from fenka.kubernetes.api_client import ApiError
from fenka.scheduler.refused_pods import is_foreign
from tests.builders import T4_MIB, node_json, on_card, pod_json
from tests.fakes.api_server import FakeApiServer, Json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import make
from tests.scheduler.harness import put_pod, scheduler
from tests.waiting import until

NODE = node_json("n", T4_MIB)


def policy(part: str, status: int = 403) -> Callable[[web.Request], Awaitable[web.Response | None]]:
    """Return what refuses the requests whose method and path end so."""

    async def refuse(request: web.Request) -> web.Response | None:
        if f"{request.method} {request.path}".endswith(part):
            return web.json_response({"message": "policy x: no card on Mondays"}, status=status)
        return None

    return refuse


def notes(server: FakeApiServer) -> list[str]:
    """Return the events of refused pods."""
    return [event["note"] for event in server.all("events") if event["reason"] == REFUSED]


async def test_pod_preempts_nobody_when_its_binding_is_always_refused() -> None:
    """From the second refusal on. Before, ten pods were preempted in 70 s."""

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 14, priority=5000)
        server.before = policy("POST /api/v1/namespaces/default/pods/p/binding")
        await until(lambda: one.knows(pod))
        for _ in range(2):
            assert (await one.filter(pod, "n"))["NodeNames"] == ["n"]
            assert "no card on Mondays" in await one.bind(pod, "n")
        other = put_pod(server, "other", 14, node="n", annotations=on_card(0, 14))
        await until(lambda: one.knows(other))
        answer = await one.filter(pod, "n")
        assert answer["NodeNames"] in ([], None)
        assert "refused its binding 2 times" in answer["FailedAndUnresolvableNodes"]["n"]
        victims = {"n": {"Pods": [{"UID": other["metadata"]["uid"]}], "NumPDBViolations": 0}}
        preempted = await one.post(
            "preempt", {"Pod": pod, "NodeNameToMetaVictims": victims, "NodeNameToVictims": None}
        )
        assert not preempted["NodeNameToMetaVictims"]
        await until(lambda: bool(notes(server)))
        assert "policy x" in notes(server)[0]


async def test_gate_stays_and_nothing_is_reserved_when_its_removal_is_refused() -> None:
    """The pod behind it has the card; an event names the policy."""

    async with scheduler(NODE) as (server, one):
        patches: list[str] = []

        async def refuse(request: web.Request) -> web.Response | None:
            answer = await policy("PATCH /api/v1/namespaces/default/pods/p")(request)
            patches.extend(["p"] if answer is not None else [])
            return answer

        server.before = refuse
        pod = pod_json("p", 14, uid="p")
        pod["spec"] |= {"schedulingGates": [{"name": QUEUE_GATE}]}
        server.put("pods", pod)
        await until(lambda: bool(patches))
        one.clock.now += 6
        await until(lambda: bool(notes(server)))
        assert "refused the removal of its scheduling gate 2 times" in notes(server)[0]
        second: Json = put_pod(server, "q", 14)
        await until(lambda: one.knows(second))
        assert (await one.filter(second, "n"))["NodeNames"] == ["n"]


@pytest.mark.parametrize("status", [409, 500])
async def test_card_is_kept_free_for_no_pod_that_is_too_large_to_be_bound(status: int) -> None:
    """A binding makes a pod larger: its author chooses how little room there is."""

    async def refuse(request: web.Request) -> web.Response | None:
        if request.path.endswith("/pods/p/binding"):
            message = "etcdserver: request is too large"
            return web.json_response({"message": message}, status=status)
        return None

    async with scheduler(NODE) as (server, one):
        pod = put_pod(server, "p", 14, priority=5000)
        server.before = refuse
        await until(lambda: one.knows(pod))
        for _ in range(2):
            assert (await one.filter(pod, "n"))["NodeNames"] == ["n"]
            await one.bind(pod, "n")
        await until(lambda: bool(notes(server)))
        assert "request is too large" in notes(server)[0]
        other = put_pod(server, "other", 14)
        await until(lambda: one.knows(other))
        assert (await one.filter(other, "n"))["NodeNames"] == ["n"]


def test_members_of_a_gang_keep_no_card_when_one_is_refused() -> None:
    """The gang is paused as a whole."""
    cluster = ExtenderHarness([NODE])
    members = cluster.gang("g", 2, 7)
    for _ in range(2):
        cluster.queue.refuse(members[1], "its binding", "policy")
    assert "refused its binding" in cluster.ask(members[0])["n"]
    assert cluster.gangs.reserved() == {}
    cluster.set(other := make("other", 14, 1))
    assert cluster.filter(other) == ["n"]


@pytest.mark.parametrize(
    ("status", "message", "foreign"),
    [
        (403, "denied by policy", True),
        (400, "admission webhook denied", True),
        (422, "invalid", True),
        (500, "failed calling webhook", True),
        (500, "etcdserver: request is too large", True),
        (409, "cannot be fulfilled on pods/binding: etcdserver: request is too large", True),
        (500, "etcdserver: request timed out", False),
        (503, "starting", False),
        (404, "not found", False),
        (409, "conflict", False),
        (429, "too many requests", False),
        (401, "expired", False),
    ],
)
def test_refusal_is_foreign_when_a_program_that_checks_requests_made_it(
    status: int, message: str, foreign: bool
) -> None:
    """Errors of the server, and answers about an object that is gone, concern no pod."""
    assert is_foreign(ApiError(status, "", message)) is foreign
