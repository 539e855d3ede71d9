"""A replica takes over nodes of HAMi's with their pods, as docs/from/hami.md promises."""

import contextlib
from collections.abc import AsyncIterator

from fenka.dialects import hami
from fenka.scheduler.replica import Settings
from tests.builders import Json, node_json, pod
from tests.fakes.api_server import FakeApiServer, api_server
from tests.scheduler.harness import SchedulerHarness, extender
from tests.waiting import until

GIB = 1024
CARDS = (16 * GIB, 16 * GIB)


def placed_by_hami(name: str, card: int, mib: int, cores: int, **limits: int) -> Json:
    """Return a running pod with the annotations that HAMi leaves."""
    annotations = {
        hami.ALLOCATED: f"GPU-n-{card},NVIDIA,{mib},{cores}:;",
        hami.TO_ALLOCATE: ";",
        hami.NODE: "n",
        hami.TIME: "1700000000",
        "hami.io/bind-phase": "success",
    }
    made = pod(name, {hami.COUNT: 1, **limits}, node="n", annotations=annotations)
    made["spec"]["schedulerName"] = "hami-scheduler"
    return made


@contextlib.asynccontextmanager
async def taken_over() -> AsyncIterator[tuple[FakeApiServer, SchedulerHarness]]:
    """Provide a node whose cards have 12,000 and 8,192 MiB in use by pods of HAMi."""
    async with api_server() as server:
        server.put("nodes", node_json("n", *CARDS, labels={"gpushare": "true"}))
        memory = {hami.MEMORY: 12000, hami.CORES: 60}
        server.put("pods", placed_by_hami("old-memory", 0, 12000, 60, **memory))
        server.put("pods", placed_by_hami("old-percent", 1, 8 * GIB, 0, **{hami.PERCENT: 50}))
        async with extender(server, settings=Settings(hami_names=True)) as replica:
            await until(lambda: replica.replica.leadership.leading)
            yield server, replica


async def start(server: FakeApiServer, replica: SchedulerHarness, name: str, **limits: int) -> str:
    """Filter and bind a pod, and return HAMi's record of it."""
    asked = pod(name, {hami.COUNT: 1, **limits})
    server.put("pods", asked)
    await until(lambda: replica.knows(asked))
    answer = await replica.filter(asked, "n")
    assert answer["NodeNames"] == ["n"], answer
    assert await replica.bind(asked, "n") == ""
    record: str = server.get("pods", name, "default")["metadata"]["annotations"][hami.ALLOCATED]
    return record


async def test_pods_of_hami_keep_their_cards() -> None:
    """New pods are placed beside them, by memory and by compute, and wait where none is left."""
    async with taken_over() as (server, replica):
        assert (replica.held("n", 0), replica.held("n", 1)) == (12000, 8 * GIB)
        beside = await start(server, replica, "beside", **{hami.MEMORY: 4000})
        assert beside == "GPU-n-0,NVIDIA,4000,0:;"
        compute = await start(server, replica, "compute", **{hami.MEMORY: 100, hami.CORES: 50})
        assert compute == "GPU-n-1,NVIDIA,100,50:;"
        large = pod("large", {hami.COUNT: 1, hami.MEMORY: 9000})
        server.put("pods", large)
        await until(lambda: replica.knows(large))
        refused = await replica.filter(large, "n")
        assert "too little memory" in str(refused["FailedAndUnresolvableNodes"])
        server.remove("pods", "old-memory", "default")
        await until(lambda: replica.held("n", 0) == 4000)
        again = await replica.filter(large, "n")
        assert again["NodeNames"] == ["n"], again


async def test_choice_of_a_card_is_refused_with_a_sentence() -> None:
    """HAMi's users may name a card's type; fenka chooses nodes by labels."""
    async with taken_over() as (server, replica):
        chosen = pod(
            "chosen", {hami.COUNT: 1, hami.MEMORY: 10}, annotations={"nvidia.com/use-gputype": "T4"}
        )
        server.put("pods", chosen)
        await until(lambda: replica.knows(chosen))
        answer = await replica.filter(chosen, "n")
        assert "annotation nvidia.com/use-gputype is not served" in str(answer)
