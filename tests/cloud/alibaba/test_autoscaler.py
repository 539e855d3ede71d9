"""The autoscaler with Alibaba Cloud's provider, over HTTP: one order is one set of machines."""

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fenka.cloud.alibaba.ess import EssProvider
from fenka.cloud.port import Order
from fenka.cloud.simulated_cloud import CloudState
from fenka.cluster.autoscaling import ORDER
from tests.autoscaler.harness import World, scenario
from tests.autoscaler.snapshots import T4, elastic_node
from tests.cloud.alibaba.harness import EXACT, AlibabaCloud, config
from tests.cloud.contract import ON_DEMAND
from tests.coroutines import synchronous
from tests.fakes.api_server import api_server

GROUPS: dict[str, dict[str, Any]] = {"exact": EXACT, "scaling group": {}}
STEP_S = 0.05
"""Of time, for each turn of the event loop: calls over HTTP take several turns."""


class AlibabaWorld(World):
    """A world whose cloud is the fake, with the time of the world."""

    def __init__(
        self, server: Any, folder: Path, cloud: AlibabaCloud, settings: Mapping[str, Any]
    ) -> None:
        """settings: of the groups."""
        made = config(cloud.address, settings, shape=T4)
        super().__init__(server, folder, scenario(), made)
        self.fake = cloud
        self.settings_of_groups = settings

    def provider(self) -> Any:
        """Return a provider that takes the world's steps."""
        return SteppingProvider(self, self.fake.open(self.settings_of_groups, shape=T4))

    def cloud(self) -> CloudState:
        """Return what the fake remembers."""
        return self.fake.state.cloud


class SteppingProvider:
    """Delegates to a provider. The cloud's clock is the world's."""

    def __init__(self, there: AlibabaWorld, provider: EssProvider) -> None:
        self._there, self._provider = there, provider

    async def launch(self, order: Order) -> Sequence[str]:
        """Launch an order."""
        await self._there.step("before launch")
        ids = await self._at_this_time().launch(order)
        await self._there.step("after launch")
        return ids

    async def end(self, ids: Collection[str]) -> None:
        """End instances."""
        await self._there.step("before end")
        await self._at_this_time().end(ids)
        await self._there.step("after end")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._at_this_time(), name)

    def _at_this_time(self) -> EssProvider:
        fake = self._there.fake
        fake.wait(self._there.time.now - fake.now)
        return self._provider


@contextlib.asynccontextmanager
async def alibaba_world(
    folder: Path, cloud: AlibabaCloud, settings: dict[str, Any]
) -> AsyncIterator[AlibabaWorld]:
    """Yield a cluster without nodes beside the fake."""
    async with api_server() as server:
        there = AlibabaWorld(server, folder, cloud, settings)
        try:
            yield there
        finally:
            there.over.set()


async def bought(there: AlibabaWorld, step: float = STEP_S) -> None:
    """Wait until a machine has come, and its node has joined and is labelled."""

    def joined() -> bool:
        for machine in there.machines():
            if ("nodes", "", f"node-{machine}") not in there.server.objects:
                provider_id = f"cn-beijing.{machine}"
                node = elastic_node(f"node-{machine}", provider_id=provider_id, inventory=False)
                there.server.put("nodes", node)
        return is_labelled(there)

    await there.passes(600, joined, step=step)


def is_labelled(there: AlibabaWorld) -> bool:
    """Whether a node is known as that of an order."""
    return any(ORDER in it["metadata"]["labels"] for it in there.server.all("nodes"))


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("activity_s", [0.0, 20.0])
@synchronous
async def test_pending_pod_gets_one_machine(
    cloud: AlibabaCloud, tmp_path: Path, kind: str, activity_s: float
) -> None:
    """Also if the scaling group takes long, and the first answer is lost."""
    cloud.change_group("asg-t4", activity_s=activity_s)
    cloud.lose_answer("launch")
    async with alibaba_world(tmp_path, cloud, GROUPS[kind]) as there, there.replica():
        there.pending("a")
        await bought(there)
        (record,) = there.live().values()
        assert [slot.instance for slot in record.slots] == there.machines()
        assert there.most <= 1


@pytest.mark.parametrize("kind", GROUPS)
@synchronous
async def test_order_is_tried_again_when_it_was_out_of_stock(
    cloud: AlibabaCloud, tmp_path: Path, kind: str
) -> None:
    """After the back-off, with a new token, since the old one repeats the old answer."""
    cloud.stock(ON_DEMAND, 0)
    async with alibaba_world(tmp_path, cloud, GROUPS[kind]) as there, there.replica():
        there.pending("a")
        await there.passes(600, lambda: there.orders() and not there.live(), step=STEP_S)
        (failed,) = there.orders().values()
        assert failed.failure == "out of stock"
        cloud.stock(ON_DEMAND, 1)
        await bought(there, step=0.5)
        assert len(there.machines()) == 1


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("step", range(1, 9))
@synchronous
async def test_one_machine_comes_when_the_autoscaler_is_killed(
    cloud: AlibabaCloud, tmp_path: Path, kind: str, step: int
) -> None:
    """At any step of the order's life."""
    async with alibaba_world(tmp_path, cloud, GROUPS[kind]) as there:
        there.pending("a")
        there.stop_at = step
        async with there.replica("first"):
            await there.passes(600, lambda: there.stopped or is_labelled(there), step=STEP_S)
        there.stop_at = None
        async with there.replica("second") as second:
            await there.takes_over(second)
            await bought(there)
        assert there.most <= len(there.machines()) == 1
