"""The time reaches the cluster's state."""

import asyncio

import msgspec
import pytest

from fenka.cluster.node_admission import exclusion
from fenka.cluster.objects import Node
from fenka.cluster.state import ClusterState
from fenka.scheduler.controllers import SpotTimer
from tests.cluster.test_spot_nodes import SENTENCE, spot
from tests.coroutines import synchronous
from tests.fakes.queue import START, make


@synchronous
async def test_protection_ends_when_its_time_is_over() -> None:
    """No event of the API server says so."""
    state = ClusterState([msgspec.convert(spot("n", 100), Node)])
    times, seen = iter([START, START + 41]), list[str | None]()

    async def sleep(_: float) -> None:
        seen.append(exclusion(state, "n", make("p", 4, runs=60)))
        if len(seen) == 2:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await SpotTimer(state, now=lambda: next(times), sleep=sleep).run()
    assert seen == [None, SENTENCE]
