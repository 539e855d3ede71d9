"""The autoscaler beside an API server that stands in and a simulated cloud, whose machines become nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from fenka.autoscaler.inputs import AutoscalerOptions
from fenka.autoscaler.main import Autoscaler
from fenka.autoscaler.solver import available_solver
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.port import Offer, Order
from fenka.cloud.simulated_cloud import (
    CloudState,
    Prices,
    Scenario,
    SimulatedOffer,
    SimulatedProvider,
)
from fenka.cluster.autoscaling import (
    ORDERS_MAP,
    STATUS_KEY,
    STATUS_MAP,
    AutoscalerStatus,
    OrderRecord,
    decode_order,
    decode_status,
)
from fenka.core.nodes.case import PlanningCase
from fenka.core.nodes.plan import NodePlan, make_plan
from tests.autoscaler.snapshots import NOW, config, elastic_node
from tests.builders import T4_MIB, Json, pod_json, unschedulable
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.clock import Clock
from tests.waiting import until

NAMESPACE = "fenka-system"
SLOW_STEP_S = 0.01


async def briefly(_: float) -> None:
    """Instead of waiting for seconds."""
    await asyncio.sleep(0.002)


class DirectPlanner:
    """Plans in this process. during: is awaited while a plan is made."""

    def __init__(self) -> None:
        self.plans: list[NodePlan] = []
        self.during: Callable[[], Any] | None = None

    async def plan(self, case: PlanningCase, seconds: float) -> tuple[NodePlan, float]:
        """Return the plan."""
        if self.during is not None:
            await self.during()
        made = make_plan(case, lambda: seconds, available_solver(lambda _: None))
        self.plans.append(made)
        return made, 0.01


def scenario(*stock: int | None, price: float = 4.0, **fields: Any) -> Scenario:
    """Offers of type t4.x, in zones a, b, …, each with such a stock."""
    offers = [
        SimulatedOffer("t4", "t4.x", "abc"[number], (Prices(price + number, stock=each),))
        for number, each in enumerate(stock or (None,))
    ]
    return Scenario(tuple(offers), **fields)


class WatchedProvider(SimulatedProvider):
    """A provider that waits, before and after each call that changes anything, for what the test allows."""

    def __init__(self, there: "World") -> None:
        super().__init__(there.scenario, there.folder, lambda: there.time.now)
        self._there = there

    async def launch(self, order: Order) -> Sequence[str]:
        """Launch an order."""
        await self._there.step("before launch")
        if order.offer.group == self._there.silent:
            await self._there.over.wait()
        ids = await super().launch(order)
        await self._there.step("after launch")
        return ids

    async def offers(self) -> Sequence[Offer]:
        """Return the offers, without their stock if the test wants it so."""
        listed = await super().offers()
        return [replace(it, stock=None) for it in listed] if self._there.hides_stock else listed

    async def end(self, ids: Collection[str]) -> None:
        """End instances."""
        await self._there.step("before end")
        await super().end(ids)
        await self._there.step("after end")


class World:
    """A cluster, a cloud and replicas of the autoscaler."""

    def __init__(
        self, server: FakeApiServer, folder: Path, made: Scenario, settings: AutoscalerConfig
    ) -> None:
        self.server, self.folder, self.settings = server, folder, settings
        self.scenario = made
        self.clock, self.time = Clock(), Clock()
        self.began = self.time.now = NOW
        self.planner = DirectPlanner()
        self.hides_stock = False
        self.steps: list[str] = []
        self.stop_at: int | None = None
        """The step at which whoever takes it stops for ever, as a killed process does."""
        self.most = 0
        """The largest number of machines at any time."""
        self.over = asyncio.Event()
        self.silent = ""
        """A group: nothing that is launched of it is answered until the end."""
        server.before, server.after = self._before, self._after

    async def step(self, name: str) -> None:
        """Take a step of the replica."""
        self.steps.append(name)
        self.most = max(self.most, len(self.machines()))
        if self.stop_at is not None and len(self.steps) == self.stop_at:
            await self.over.wait()
            raise web.HTTPServiceUnavailable

    @property
    def stopped(self) -> bool:
        """Whether the step at which to stop was reached."""
        return self.stop_at is not None and len(self.steps) >= self.stop_at

    async def _before(self, request: web.Request) -> None:
        if _is_write(request):
            await self.step(f"before {request.method} {request.path}")

    async def _after(self, request: web.Request) -> None:
        if _is_write(request):
            await self.step(f"after {request.method} {request.path}")

    def provider(self) -> SimulatedProvider:
        """A provider of the one cloud."""
        return WatchedProvider(self)

    def cloud(self) -> CloudState:
        """What the cloud remembers."""
        path = self.folder / "cloud.json"
        if not path.exists():
            return CloudState(began_at=0)
        return msgspec.json.decode(path.read_bytes(), type=CloudState)

    def machines(self) -> list[str]:
        """The ids of the cloud's machines."""
        return sorted(self.cloud().machines)

    def zone(self, machine: str) -> str:
        """The zone of a machine."""
        return self.scenario.offers[self.cloud().machines[machine].offer].zone

    def orders(self) -> dict[str, OrderRecord]:
        """The orders as written."""
        found = self.server.objects.get(("configmaps", NAMESPACE, ORDERS_MAP))
        return (
            {name: decode_order(name, text) for name, text in found["data"].items()}
            if found
            else {}
        )

    def live(self) -> dict[str, OrderRecord]:
        """The orders that have not failed."""
        return {name: each for name, each in self.orders().items() if each.failure is None}

    def status(self) -> AutoscalerStatus:
        """The status as published."""
        found = self.server.objects.get(("configmaps", NAMESPACE, STATUS_MAP))
        return decode_status(found["data"][STATUS_KEY]) if found else AutoscalerStatus()

    def notes(self, reason: str) -> list[str]:
        """The notes of events with this reason."""
        return [each["note"] for each in self.server.all("events") if each["reason"] == reason]

    def pending(self, name: str, units: int = 4, **fields: Any) -> Json:
        """A pod that waits for a place."""
        status = unschedulable("0/0 nodes are available")
        made = pod_json(name, units, **fields)
        made["status"] |= status
        return self.server.put("pods", made)

    def join(self, machine: str, *cards: int, zone: str = "a", ready: bool = True) -> Json:
        """The machine becomes a node; with cards of these MiB it offers them at once."""
        node = elastic_node(
            f"node-{machine}",
            *cards,
            provider_id=f"simulated:///{zone}/{machine}",
            inventory=bool(cards),
            ready="True" if ready else "False",
        )
        return self.server.put("nodes", node)

    def stop_answering(self, machine: str) -> None:
        """The machine's kubelet is gone."""
        made = self.server.get("nodes", f"node-{machine}")
        made["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
        self.server.put("nodes", made)

    def node(self, machine: str) -> Json:
        """The metadata of the machine's node."""
        found: Json = self.server.get("nodes", f"node-{machine}")["metadata"]
        return found

    def annotations(self, kind: str, name: str) -> Json:
        """The annotations of an object in namespace default."""
        found: Json = self.server.get(kind, name, "default")["metadata"]["annotations"]
        return found

    def offer_cards(self, machine: str, *cards: int) -> None:
        """The node of a machine offers its cards; by default one T4."""
        name = f"node-{machine}"
        known = self.server.get("nodes", name)
        made = elastic_node(name, *(cards or (T4_MIB,)), provider_id=known["spec"]["providerID"])
        made["metadata"]["labels"] |= known["metadata"].get("labels", {})
        made["metadata"]["annotations"] |= known["metadata"].get("annotations", {})
        made["metadata"]["uid"] = known["metadata"]["uid"]
        self.server.put("nodes", made)

    def bind(self, pod: Json, machine: str) -> None:
        """The scheduler binds the pod to the first card of the machine's node."""
        bound = dict(pod)
        bound["spec"] = {**pod["spec"], "nodeName": f"node-{machine}"}
        bound["status"] = {"phase": "Running"}
        self.server.put("pods", bound)

    @contextlib.asynccontextmanager
    async def replica(self, name: str = "one", lease: str = "one") -> AsyncIterator[Autoscaler]:
        """A replica that runs while the block does, and dies at its end without a word.

        lease: replicas of different leases lead at the same time.
        """
        async with self.server.api() as api:
            autoscaler = Autoscaler(
                api,
                self.provider(),
                self.planner,
                self.settings,
                AutoscalerOptions(namespace=NAMESPACE, lease=lease),
                identity=name,
                clock=self.clock,
                now=lambda: self.time.now,
                sleep=briefly,
            )
            task = asyncio.create_task(autoscaler.run())
            try:
                yield autoscaler
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def takes_over(self, replica: Autoscaler) -> None:
        """Time passes until the replica leads."""

        def leads() -> bool:
            self.clock.now += 0.2
            return replica.leadership.leading

        await until(leads)

    async def passes(
        self, seconds: float, condition: Callable[[], object], *, step: float = 0.25
    ) -> None:
        """Time passes in steps until the condition holds; slowly once it is so much."""
        end = self.time.now + seconds

        def holds() -> bool:
            # A replica that was slow to see something must still find its window over.
            self.time.now += step if self.time.now < end else SLOW_STEP_S
            return bool(condition())

        await until(holds)


@contextlib.asynccontextmanager
async def world(
    folder: Path, made: Scenario | None = None, settings: AutoscalerConfig | None = None
) -> AsyncIterator[World]:
    """Yield a cluster without nodes, and a cloud."""
    async with api_server() as server:
        there = World(server, folder, made or scenario(), settings or config())
        try:
            yield there
        finally:
            # The server waits for all that it has begun.
            there.over.set()


def _is_write(request: web.Request) -> bool:
    ignored = ("/leases", "/events", "/fenka-autoscaler")
    return request.method != "GET" and not any(word in request.path for word in ignored)
