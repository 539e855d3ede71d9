"""What is known of the cloud while it does not answer."""

import asyncio

import pytest

from fenka.autoscaler import cloud_cache
from fenka.autoscaler.cloud_cache import CloudCache
from fenka.cloud.port import Instance
from tests.autoscaler.snapshots import instance
from tests.coroutines import synchronous
from tests.fakes.clock import Clock


class Cloud:
    """A provider whose lists hang if it is told to."""

    def __init__(self) -> None:
        self.hangs = False

    async def instances(self) -> list[Instance]:
        """As Provider's."""
        if self.hangs:
            await asyncio.Event().wait()
        return [instance()]

    async def offers(self) -> list[object]:
        """As Provider's."""
        return []


@synchronous
async def test_what_was_read_stays_when_the_cloud_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass goes on: nodes that are taken back must not wait for the cloud."""
    monkeypatch.setattr(cloud_cache, "TIMEOUT_S", 0.05)
    cloud, clock = Cloud(), Clock()
    cache = CloudCache(cloud, clock)  # type: ignore[arg-type]
    await cache.refresh(busy=True, spot=False)
    read_at = cache.instances_at
    cloud.hangs = True
    clock.now += cloud_cache.BUSY_S
    await cache.refresh(busy=True, spot=False)
    assert cache.problem == "the cloud does not answer within 0.05 s"
    assert list(cache.instances) == ["i-1"]
    assert cache.instances_at == read_at
    cloud.hangs = False
    clock.now += cloud_cache.RETRY_S
    await cache.refresh(busy=True, spot=False)
    assert not cache.problem
