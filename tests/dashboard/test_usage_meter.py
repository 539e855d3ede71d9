"""A cluster's ledger of usage: over restarts, gaps, and an API server that is away; and who reads it."""

import asyncio
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.autoscaling import (
    GROUP,
    ORDER,
    AutoscalerStatus,
    OfferStatus,
    OrderRecord,
    node_prices,
)
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.core.errors import FenkaError
from fenka.core.metering import DAY_US, SECOND_US, LineKind
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.usage_meter import MeterOptions, UsageMeter
from fenka.history.recorder import MachineTimes
from fenka.history.series import UsageRecord
from fenka.server.listener import LISTENER, HttpListener
from fenka.views.usage_report import record_cost
from fenka.workstation.protocol import UsageRead
from tests.builders import T4_MIB, a_node, node_json, on_card
from tests.dashboard.test_cluster_live import notebook
from tests.fakes.api_server import api_server
from tests.fakes.queue import make
from tests.scheduler.harness import briefly

DAY = 20_700
OPTIONS = MeterOptions(price=["Tesla T4=0.35"], currency="EUR")
NODES = {"n": a_node("n", T4_MIB, T4_MIB), "elastic": a_node("elastic", T4_MIB)}
PAID = {"elastic": 0.9}


class Clocks:
    """The clocks of the machine on which the meter runs."""

    def __init__(self) -> None:
        self.at_s = 3600
        self.boot, self.booted_s = "a", 0

    def __call__(self) -> MachineTimes:
        """Return what they show."""
        at_us = DAY * DAY_US + self.at_s * SECOND_US
        return MachineTimes(at_us, (self.at_s - self.booted_s) * SECOND_US, self.boot)

    def reboot(self) -> None:
        """Move to a machine that was booted later."""
        self.boot, self.booted_s = f"{self.boot}a", self.at_s - 30


def holder(name: str, card: int, units: int, node: str = "n") -> Pod:
    """A pod that holds units of a card."""
    return make(name, units, started=0, node=node, annotations=on_card(card, units))


def observe(meter: UsageMeter, pods: Sequence[Pod], nodes: Sequence[Node]) -> None:
    """Observe a cluster."""
    meter.observe(ClusterSnapshot.of(nodes, pods).state, {}, PAID, changed=True)


async def records(meter: UsageMeter) -> list[UsageRecord]:
    """All that was recorded, by job."""
    return (await meter.read(0, DAY + 30, "job")).records


def seconds(found: Sequence[UsageRecord]) -> dict[str, float]:
    """The charged seconds by pod, or by kind."""
    sums: dict[str, float] = {}
    for record in found:
        name = record.holder.name or record.kind.value
        sums[name] = sums.get(name, 0) + record.amounts.card_us / SECOND_US
    return sums


async def test_ended_pods_stay_when_the_program_restarts(tmp_path: Path) -> None:
    """4 of 14 units of one of two cards for 50 s; 20 s without the program; then 30 s without the pod."""
    clocks, file = Clocks(), tmp_path / "usage.db"
    meter = UsageMeter(file, OPTIONS, clocks)
    for _ in range(11):
        observe(meter, [holder("a", 0, 4)], [NODES["n"]])
        clocks.at_s += 5
    await meter.close()
    clocks.at_s += 15
    meter = UsageMeter(file, OPTIONS, clocks)
    for _ in range(7):
        observe(meter, [], [NODES["n"]])
        clocks.at_s += 5
    found = seconds(await records(meter))
    assert found == {
        "a": pytest.approx(50 * 4308 / 15079, abs=1e-5),
        "idle": pytest.approx(2 * 50 - 50 * 4308 / 15079 + 2 * 30, abs=1e-5),
        "unobserved": 40,
    }
    assert sum(found.values()) == pytest.approx(2 * (50 + 20 + 30))
    await meter.close()


async def test_nothing_is_invented_when_the_cluster_was_not_observed_for_a_while(
    tmp_path: Path,
) -> None:
    """61 seconds without an observation are unobserved, though the pod was there before and after."""
    clocks = Clocks()
    meter = UsageMeter(tmp_path / "usage.db", OPTIONS, clocks)
    for step in (0, 60, 61):
        clocks.at_s += step
        observe(meter, [holder("a", 0, 14, "elastic")], [NODES["elastic"]])
    assert seconds(await records(meter)) == {"a": 60, "unobserved": 61}
    await meter.close()


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_costs_are_cards_and_time_when_programs_die_and_the_cluster_changes(
    data: st.DataObject,
) -> None:
    """To the microsecond: pods and nodes come and go, the program is killed or moved, nothing is observed."""

    async def live(folder: Path) -> None:
        clocks, file = Clocks(), folder / "first" / "usage.db"
        meter = UsageMeter(file, OPTIONS, clocks)
        expected = charged = Fraction(0)
        written: tuple[int, Fraction] | None = None
        last: tuple[int, Fraction] | None = None
        for number in range(data.draw(st.integers(1, 8))):
            clocks.at_s += data.draw(st.sampled_from([1, 7, 59, 61, 4000, 90_000]))
            what = data.draw(st.sampled_from(["observe", "observe", "write", "kill", "move"]))
            if what == "observe":
                nodes = data.draw(st.lists(st.sampled_from([*NODES]), unique=True))
                sizes = data.draw(st.lists(st.integers(1, 14), max_size=4))
                pods = [holder(f"p{number}-{n}", n % 2, size) for n, size in enumerate(sizes)]
                observe(meter, pods, [NODES[name] for name in nodes])
                if last is not None:
                    charged += (clocks.at_s - last[0]) * last[1]
                rates = {"n": 2 * Fraction(35, 100), "elastic": Fraction(9, 10)}
                last = clocks.at_s, sum((rates[name] for name in nodes), Fraction(0)) / 3600
            elif what == "write":
                await meter.write()
                expected, charged, written = expected + charged, Fraction(0), last
            else:
                # What was not written is lost, and was not observed. A kill leaves the files as they are.
                last, charged = written, Fraction(0)
                if what == "move":
                    clocks.reboot()
                left = folder / str(number)
                if file.parent.exists():
                    shutil.copytree(file.parent, left)
                await meter.close()
                file = left / file.name
                meter = UsageMeter(file, OPTIONS, clocks)
        await meter.write()
        expected += charged
        costs = [record_cost(record, {"Tesla T4": 350_000}) for record in await records(meter)]
        assert sum((cost for cost in costs if cost), Fraction(0)) == expected
        await meter.close()

    with TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder)))


def bought(name: str, order: str, capacity: str) -> Node:
    """A node of the group t4 that was bought."""
    return a_node(name, T4_MIB, labels={GROUP: "t4", ORDER: order, "capacity": capacity})


def order(capacity: Any, price: float) -> OrderRecord:
    """An order of one node."""
    return OrderRecord("t4", "g4dn", "a", capacity, (), "offering", price, 0)


def test_nodes_cost_what_is_paid_when_they_were_bought() -> None:
    """On demand by the order, spot by the market. Without an order or any price the list counts."""
    offers = [
        OfferStatus("t4", "g4dn", "a", "on-demand", 0.6, None, 1, 0, 9),
        OfferStatus("t4", "g4dn", "a", "spot", 0.21, 0.5, 1, 0, 9),
    ]
    orders = {
        "t4-1": order("on-demand", 0.5),
        "t4-2": order("spot", 0.2),
        "t4-3": order("on-demand", 0),
        "own-4": msgspec.structs.replace(order("on-demand", 0), group="own"),
    }
    nodes = [
        *(bought(f"n{number}", name, "") for number, name in enumerate([*orders, "forgotten"])),
        NODES["n"],
    ]
    assert node_prices(nodes, AutoscalerStatus(tuple(offers)), orders) == {
        "n0": 0.5,
        "n1": 0.21,
        "n2": 0.6,
    }
    assert node_prices(nodes, AutoscalerStatus(), orders) == {"n0": 0.5, "n1": 0.2}


async def test_cluster_is_metered_as_its_watches_tell(tmp_path: Path) -> None:
    """A pod has its share of the time, until the API server is away for 70 s."""
    clocks, start = Clocks(), Clocks().at_s
    meter = UsageMeter(tmp_path / "usage.db", OPTIONS, clocks)
    async with api_server() as server, server.api() as api:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        live = ClusterLive(api, "lab", lambda: float(clocks.at_s), briefly, meter)
        following = asyncio.create_task(live.run())

        async def metered(kind: str) -> float:
            """Let time pass until there is such time. Return all of it."""
            while kind not in (found := seconds(await records(meter))):
                clocks.at_s += 1
                await briefly(0)
            return sum(found.values())

        try:
            total = await metered("notebook")
            found = seconds(await records(meter))
            assert found["notebook"] == pytest.approx(total * 4308 / 15079, abs=1e-5)
            assert [*found] == ["notebook", "idle"]
            await server.stop()
            clocks.at_s += 70
            await briefly(0)
            await server.start()
            await metered("unobserved")
            found = seconds(await records(meter))
            assert 65 <= found["unobserved"] <= clocks.at_s - start - total
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_usage_is_answered_over_http(tmp_path: Path) -> None:
    """Sums by the query; what is no query is refused with its reason."""
    clocks = Clocks()
    meter = UsageMeter(tmp_path / "usage.db", OPTIONS, clocks)
    for _ in range(2):
        observe(meter, [holder("a", 0, 14, "elastic")], [NODES["elastic"]])
        clocks.at_s += 36
    app = meter.app()
    app[LISTENER] = HttpListener()
    async with TestClient(TestServer(app)) as client:
        question: dict[str, str | int] = {"since": DAY, "until": DAY + 1, "by": "namespace"}
        answer = await client.get("/usage", params=question)
        read = msgspec.json.decode(await answer.read(), type=UsageRead)
        (held,) = read.records
        assert (held.kind, held.paid, held.node) == (LineKind.HELD, 900_000, "")
        assert record_cost(held, read.prices) == Fraction(9, 1000)
        assert (read.currency, read.since_day, read.problem) == ("EUR", DAY, "")
        for name, value, why in (
            ("since", "-1", "Expected `int` >= 0 - at `$.since`"),
            ("until", "soon", "Expected `int`, got `str` - at `$.until`"),
            ("by", "card", "Invalid enum value 'card' - at `$.by`"),
        ):
            refused = await client.get("/usage", params=question | {name: value})
            assert (refused.status, await refused.text()) == (400, f"{why}\n")
    await meter.close()


async def test_options_are_refused_that_mean_nothing() -> None:
    """One sentence each."""
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"price": ["T4"]}, "is no price of a card's hour"),
        ({"currency": "euro"}, "is no currency"),
        ({"usage_size": "much"}, "much"),
    )
    for options, why in refused:
        with pytest.raises(FenkaError, match=why):
            MeterOptions(**options)
