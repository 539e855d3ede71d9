"""Two replicas, of which kube-scheduler calls the one that does not lead."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from fenka.kubernetes.election import ADDRESS, LEADER_KNOWN_S, RENEW_DEADLINE_S
from fenka.scheduler.leader_proxy import FORWARDED
from fenka.scheduler.main import url
from fenka.scheduler.server import PREFIX
from tests.builders import T4_MIB, node_json, on_card, pod_json, unschedulable
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.clock import Clock
from tests.scheduler.harness import SchedulerHarness, extender, put_pod
from tests.waiting import until

NODE = node_json("n", T4_MIB)
FOUR = T4_MIB * 4 // 14


@contextlib.asynccontextmanager
async def two_replicas(
    *, told: bool = True
) -> AsyncIterator[tuple[FakeApiServer, SchedulerHarness, SchedulerHarness]]:
    """Yield a server, the leader, and a replica that stands by and is ready."""
    clock = Clock()
    async with api_server() as server:
        server.put("nodes", NODE)
        async with extender(server, "one", clock, told=told) as one:
            await until(lambda: one.replica.leadership.leading)
            async with extender(server, "two", clock) as two:
                await until(lambda: two.replica.leadership.ready)
                yield server, one, two


async def post(
    one: SchedulerHarness, verb: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Return status and text."""
    where = f"{one.url}{PREFIX}/{verb}"
    async with one.session.post(where, json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_leader_answers_all_verbs_when_they_arrive_elsewhere() -> None:
    """Assumptions in the leader's memory count; both replicas are ready."""

    async with two_replicas() as (server, one, two):
        for it in (one, two):
            async with it.session.get(f"{it.url}/readyz") as answer:
                assert (answer.status, await answer.text()) == (200, "ok\n")
        pod = put_pod(server, "p", 4)
        assert (await two.filter(pod, "n"))["NodeNames"] == ["n"]
        scores = await two.post("prioritize", {"Pod": pod, "NodeNames": ["n"]})
        assert scores == [{"Host": "n", "Score": 10}]
        server.mute = True
        assert await two.bind(pod, "n") == ""
        assert (one.held("n"), two.held("n")) == (FOUR, 0)
        assert (await two.filter(pod_json("q", 12), "n"))["NodeNames"] == []
        low = put_pod(server, "low", 8, node="n", uid="l", priority=1, annotations=on_card(0, 8))
        await one.replica.informers.relist()
        victims = {"n": {"Pods": [{"UID": "l"}], "NumPDBViolations": 0}}
        body = {"Pod": pod_json("new", 9, priority=5), "NodeNameToMetaVictims": victims}
        assert await two.post("preempt", body) == {"NodeNameToMetaVictims": victims}
        assert low["metadata"]["uid"] == "l"
        # What is no request is told as the leader tells it.
        assert (await post(two, "prioritize", []))[0] == 400
        async with two.session.get(f"{two.url}/metrics") as answer:
            text = await answer.text()
        assert 'fenka_scheduler_forwarded_total{verb="filter"} 2.0' in text
        assert "fenka_scheduler_leading 0.0" in text


async def test_queue_is_shown_by_a_follower_when_the_leader_is_gone() -> None:
    """Each replica follows the cluster, so a viewer costs the leader nothing."""

    async with two_replicas() as (server, one, two):
        held = put_pod(server, "held", 10, node="n", annotations=on_card(0, 10))
        waits = put_pod(server, "waits", 12, status=unschedulable("no room"))
        await until(lambda: two.knows(held, waits))
        await until(lambda: bool(two.replica.queue.state.snapshot.entries))
        await one.die()
        async with two.session.get(f"{two.url}{PREFIX}/queue") as answer:
            (row,) = await answer.json()
        assert not two.replica.leadership.leading
        assert (row["name"], row["why"]) == ("waits", "no GPU fits: 1 of 1 has too little memory")


async def test_call_is_forwarded_once_when_replicas_disagree_about_the_leader() -> None:
    """A call is not passed back and forth."""

    async with two_replicas() as (_, one, two):
        for verb, body in (
            ("filter", {"Pod": pod_json("p", 4), "NodeNames": ["n"]}),
            ("bind", {"PodName": "p", "PodNamespace": "default", "Node": "n"}),
        ):
            status, text = await post(two, verb, body, {FORWARDED: "three"})
            assert (status, "not the leader: that is one" in text) == (200, True)
        status, text = await post(two, "preempt", {"Pod": pod_json("p", 4)}, {FORWARDED: "three"})
        assert (status, text) == (503, "not the leader: that is one")
        # The leader does not mind by whom it was passed on.
        body = {"Pod": pod_json("p", 4), "NodeNames": ["n"]}
        assert '"NodeNames":["n"]' in (await post(one, "filter", body, {FORWARDED: "two"}))[1]


async def test_error_names_the_leader_when_it_does_not_answer() -> None:
    """It is in the field that each verb's answer has for errors."""

    async with two_replicas() as (_, one, two):
        await one.die()
        answer = await two.filter(pod_json("p", 4), "n")
        assert answer["Error"].startswith("fenka: the leader one does not answer: ")
        assert answer["NodeNames"] is None
        status, text = await post(two, "prioritize", {"Pod": {}, "NodeNames": []})
        assert status == 503
        assert "the leader one does not answer" in text
        await two.takes_over()
        assert (await two.filter(pod_json("p", 4), "n"))["NodeNames"] == ["n"]


async def test_call_fails_when_the_leader_has_no_address() -> None:
    """It was started by hand, without an address to advertise."""

    async with two_replicas(told=False) as (server, _, two):
        answer = await two.filter(pod_json("p", 4), "n")
        assert answer["Error"] == "fenka: the leader one has not published its address"
        lease = server.get("leases", "fenka-scheduler", "kube-system")
        assert lease["metadata"]["annotations"][ADDRESS] == ""


async def test_late_call_is_forwarded_when_the_replica_ends() -> None:
    """It is not ready any more, but kube-proxy does not know yet. The connection is closed."""

    async with two_replicas() as (server, one, two):
        stopping = asyncio.create_task(one.replica.stop())
        await until(
            lambda: one.replica.leadership.leader == "two" and two.replica.leadership.leading
        )
        await stopping
        assert not one.replica.leadership.ready
        pod = put_pod(server, "p", 4)
        where = f"{one.url}{PREFIX}/filter"
        async with one.session.post(where, json={"Pod": pod, "NodeNames": ["n"]}) as answer:
            assert answer.headers["Connection"] == "close"
            assert (await answer.json())["NodeNames"] == ["n"]
        assert await one.bind(pod, "n") == ""
        async with one.session.get(f"{one.url}/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "it is ending\n")


async def test_replica_is_not_ready_when_it_cannot_read_the_lease() -> None:
    """It would forward calls to a replica that may not lead any more."""

    async with two_replicas() as (server, _, two):

        async def no_leases(request: web.Request) -> web.StreamResponse | None:
            return web.Response(status=503) if "leases" in request.path else None

        server.before = no_leases
        two.clock.now += LEADER_KNOWN_S
        async with two.session.get(f"{two.url}/readyz") as answer:
            assert answer.status == 503
        server.before = None
        await until(lambda: two.replica.leadership.ready)


def test_url_has_brackets_when_the_address_is_ipv6() -> None:
    """A pod's IP may be of either version."""
    assert url("10.0.0.1", 12345) == "http://10.0.0.1:12345"
    assert url("fd00::1", 12345) == "http://[fd00::1]:12345"


async def test_standby_binds_when_the_lease_of_a_killed_leader_has_expired() -> None:
    """It lists everything first, so that the last binding of the other counts."""

    async with two_replicas() as (server, one, two):
        server.mute = True
        assert await one.bind(put_pod(server, "p", 12), "n") == ""
        await one.die()
        await two.takes_over()
        assert two.held("n") == T4_MIB * 12 // 14
        assert "can't place" in await two.bind(put_pod(server, "q", 4), "n")


async def test_leader_lists_nothing_again_when_only_its_renewals_failed() -> None:
    """Nobody else held the lease, so nobody else bound anything."""

    async with two_replicas() as (server, one, _):

        async def no_leases(request: web.Request) -> web.StreamResponse | None:
            return web.Response(status=503) if "leases" in request.path else None

        server.before = no_leases
        one.clock.now += RENEW_DEADLINE_S
        assert not one.replica.leadership.leading
        server.before = None
        await until(lambda: one.replica.election.leading)
        assert one.replica.leadership.leading
