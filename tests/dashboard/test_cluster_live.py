"""What a dashboard knows of a cluster: by watches, by the nodes' own figures, and when something is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from fenka.dashboard import cluster_live
from fenka.dashboard.cluster_live import NO_NAMESPACE, ClusterLive
from fenka.dashboard.node_questions import PROGRAM, period_s
from fenka.kubernetes.api_client import ApiUnreachable
from fenka.views.board import World
from fenka.views.node_figures import CardFigures, NodeFigures, SliceFigures
from tests.builders import T4_MIB, Json, node_json, on_card, pod_json
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.queue import UNSCHEDULABLE
from tests.scheduler.harness import briefly
from tests.waiting import until

UID = "5b0b1b1c-0000-4000-8000-000000000001"


def notebook() -> Json:
    """Return a pod that holds 4 units of card 0 of node n."""
    made = pod_json("notebook", 4, uid=UID, node="n", annotations=on_card(0, 4))
    made["metadata"]["namespace"] = "ada"
    made["status"] |= {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
    return made


def program() -> Json:
    """Return the pod of node n's program."""
    made = pod_json("fenka-node-x", 0, node="n", labels=PROGRAM)
    made["spec"]["containers"] = [{"name": "node"}]
    made["metadata"]["namespace"] = "fenka-system"
    made["status"] |= {"phase": "Running"}
    return made


def publish_namespace(server: FakeApiServer) -> None:
    """Publish where fenka's programs are, as the chart does."""
    metadata = {"name": "fenka", "namespace": "kube-public"}
    server.put("configmaps", {"metadata": metadata, "data": {"namespace": "fenka-system"}})


def answering(server: FakeApiServer, answer: web.Response) -> None:
    """Let the API server pass on this answer of nodes' programs."""

    async def before(request: web.Request) -> web.Response | None:
        if request.path.endswith("/pods/fenka-node-x/proxy/usage"):
            return web.Response(status=answer.status, body=answer.body)
        return None

    server.before = before


@asynccontextmanager
async def following(server: FakeApiServer) -> AsyncIterator[ClusterLive]:
    """Yield what follows this server, as long as the block runs."""
    async with server.api() as api:
        live = ClusterLive(api, "lab", sleep=briefly)
        task = asyncio.create_task(live.run())
        try:
            await until(lambda: live.encoded is not None)
            yield live
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def shown(live: ClusterLive) -> World:
    """Return what viewers were sent last."""
    assert live.encoded is not None
    return msgspec.json.decode(live.encoded, type=World)


def names(live: ClusterLive) -> list[str]:
    """Return the slices of all cards that viewers were sent last."""
    return [piece.name for card in shown(live).cards for piece in card.slices]


async def test_slices_come_and_go_with_their_pods() -> None:
    """A pod that is deleted takes its bar with it, and another one has its own."""
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        async with following(server) as live:
            await until(lambda: names(live) == ["notebook"])
            (card,) = shown(live).cards
            assert (card.id, card.free_units, card.used_mib) == ("n/0", 10, None)
            server.remove("pods", "notebook", "ada")
            await until(lambda: names(live) == [])
            assert shown(live).largest_mib == T4_MIB


async def test_program_is_running_when_its_pod_is() -> None:
    """A change that no verdict needs is shown, too."""
    starting = notebook()
    starting["status"]["phase"] = "Pending"
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", starting)
        async with following(server) as live:
            await until(lambda: [line.state for line in shown(live).programs] == ["starting"])
            server.put("pods", notebook())
            await until(lambda: [line.state for line in shown(live).programs] == ["running"])


async def test_figures_are_those_of_the_node_s_program() -> None:
    """What it answers through the API server: 4307 MiB in use, busy 40 % of the time, 49 degrees."""
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        server.put("pods", program())
        publish_namespace(server)
        uuid = "GPU-n-0"
        reading = NodeFigures(
            100.0, [CardFigures(uuid, 5000, 0.62, 49)], [SliceFigures(UID, uuid, 4307, 0.4)]
        )
        answering(server, web.Response(body=msgspec.json.encode(reading)))
        async with following(server) as live:
            await until(lambda: shown(live).cards[0].used_mib == 5000)
            (card,) = shown(live).cards
            assert (card.busy, card.temperature_c) == (0.62, 49)
            assert (card.slices[0].used_mib, card.slices[0].busy) == (4307, 0.4)


async def test_tenant_s_pod_with_the_program_s_labels_is_not_asked() -> None:
    """Anybody may label a pod of their own, and would tell what others use."""
    forged = program()
    forged["metadata"] |= {"name": "forged", "namespace": "mallory", "uid": "forged"}
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", program())
        server.put("pods", forged)
        publish_namespace(server)
        uuid = "GPU-n-0"
        reading = NodeFigures(100.0, [CardFigures(uuid, 5000)])
        answering(server, web.Response(body=msgspec.json.encode(reading)))
        async with following(server) as live:
            await until(lambda: shown(live).cards[0].used_mib == 5000)
            assert not any("/pods/forged/" in path for path in server.requests)


async def test_cluster_without_a_published_namespace_has_no_figures() -> None:
    """Its chart is older; nobody's pods are asked."""
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", program())
        async with following(server) as live:
            await until(lambda: NO_NAMESPACE in shown(live).problems)
            assert not any("/proxy/usage" in path for path in server.requests)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (web.Response(status=404), "what cards use is not known of node n: "),
        (web.Response(body=b"<html>"), "its program is of another release"),
        (web.Response(body=b"[" * 5000), "its program is of another release"),
    ],
)
async def test_node_without_figures_costs_a_sentence(answer: web.Response, sentence: str) -> None:
    """The slices stay, and the page says what it does not know."""
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        server.put("pods", program())
        publish_namespace(server)
        answering(server, answer)
        async with following(server) as live:
            await until(lambda: any(sentence in problem for problem in shown(live).problems))
            assert names(live) == ["notebook"]


async def test_api_server_that_is_away_costs_a_sentence() -> None:
    """What was known last stays."""
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        async with following(server) as live:
            await until(lambda: names(live) == ["notebook"])
            await server.stop()
            await until(lambda: any("not up to date" in text for text in shown(live).problems))
            assert names(live) == ["notebook"]
            await server.start()


async def test_it_ends_when_a_question_fails_at_the_moment_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`gather` raises the failure of one of two questions, and the cancellation is lost."""
    asked, gate = asyncio.Event(), asyncio.Event()

    async def fails(*_: object) -> None:
        asked.set()
        await gate.wait()
        raise ApiUnreachable("away")

    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster_live, "read_training_objects", hangs)
    monkeypatch.setattr(cluster_live, "read_services", fails)
    async with api_server() as server, server.api() as api:
        task = asyncio.create_task(ClusterLive(api, "lab", sleep=briefly).run())
        await until(asked.is_set)
        # In the loop's next turn the question fails, and then its task's parts are cancelled.
        gate.set()
        task.cancel()
        await until(task.done)


async def test_waiting_pod_has_its_reason() -> None:
    """Without a scheduler that serves the queue it is computed."""
    waiting = pod_json("next", 12)
    waiting["metadata"] |= {"namespace": "ben", "creationTimestamp": "2026-01-01T00:00:00Z"}
    waiting["status"] |= UNSCHEDULABLE
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        server.put("pods", waiting)
        async with following(server) as live:
            await until(lambda: bool(shown(live).waiting))
            (line,) = shown(live).waiting
            assert (line.name, line.user) == ("next", "ben")
            assert "too little memory" in line.why


async def test_many_cards_are_a_fleet_and_a_node_is_shown_on_demand() -> None:
    """Nine nodes of eight cards: 72 are not drawn one by one."""
    async with api_server() as server:
        for number in range(9):
            server.put("nodes", node_json(f"n{number}", *[T4_MIB] * 8))
        async with following(server) as live:
            await until(lambda: live.encoded is not None and "fleet" in live.fanout.latest)
            assert shown(live).cards == []
            assert [card.id for card in live.node("n3")] == [f"n3/{index}" for index in range(8)]
            assert [*live.node("nobody")] == []


def test_large_clusters_are_asked_less_often() -> None:
    """Of 10,000 nodes 40 are asked a second: all of them in 250 s."""
    assert [period_s(nodes) for nodes in (1, 600, 10_000)] == [15, 15, 250]
