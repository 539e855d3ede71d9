"""One leader at a time, by the clocks of each."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.objects import ContainerStatus, seconds
from fenka.kubernetes.client import Api
from fenka.kubernetes.election import (
    FENCE_S,
    LAST_WRITE_S,
    LEASE_DURATION_S,
    RENEW_DEADLINE_S,
    Election,
)
from tests.kubernetes.api_server import ApiServer, Json, api_server


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def candidate(api: Api, name: str, clock: Clock) -> Election:
    """For the lease s in namespace n."""
    return Election(api, "n", "s", name, clock=clock)


def lease(server: ApiServer) -> Json:
    """Its spec."""
    spec: Json = server.get("leases", "s", "n")["spec"]
    return spec


def scenario(run: Callable[[ApiServer, Api], Awaitable[None]]) -> None:
    """With a server and a client."""

    async def go() -> None:
        async with api_server() as server, server.api() as api:
            await run(server, api)

    asyncio.run(go())


def test_the_first_takes_it_and_keeps_it() -> None:
    """The other waits however long, while it is renewed."""

    async def run(server: ApiServer, api: Api) -> None:
        clock = Clock()
        one, two = candidate(api, "one", clock), candidate(api, "two", clock)
        for _ in range(20):
            assert await one.attempt()
            assert not await two.attempt()
            assert two.leader == "one"
            clock.now += 2
        assert lease(server)["leaseTransitions"] == 0
        assert lease(server)["leaseDurationSeconds"] == LEASE_DURATION_S

    scenario(run)


def test_who_dies_is_followed_after_the_lease_ran_out() -> None:
    """Not before, by the follower's own clock since it saw the last renewal."""

    async def run(server: ApiServer, api: Api) -> None:
        clock = Clock()
        one, two = candidate(api, "one", clock), candidate(api, "two", clock)
        await one.attempt()
        await two.attempt()
        clock.now += LEASE_DURATION_S - 0.1
        assert not await two.attempt()
        clock.now += 0.1
        assert await two.attempt()
        assert lease(server)["holderIdentity"] == "two"
        assert lease(server)["leaseTransitions"] == 1
        assert not one.leading

    scenario(run)


def test_releasing_is_followed_at_once() -> None:
    """And nothing may be written afterwards."""

    async def run(server: ApiServer, api: Api) -> None:
        clock = Clock()
        one, two = candidate(api, "one", clock), candidate(api, "two", clock)
        await one.attempt()
        await two.attempt()
        await one.release()
        assert not one.leading
        assert one.time_left_s == 0
        assert await two.attempt()
        await one.release()
        assert lease(server)["holderIdentity"] == "two"

    scenario(run)


def test_leading_ends_by_time_when_the_server_is_silent() -> None:
    """10 s from the beginning of the last renewal; what was begun before ends by 13 s, taken at 15 s."""

    async def run(server: ApiServer, api: Api) -> None:
        clock = Clock()
        one = candidate(api, "one", clock)
        await one.attempt()

        async def broken(_: web.Request) -> web.StreamResponse:
            return web.Response(status=500)

        server.before = broken
        clock.now += RENEW_DEADLINE_S - 1
        assert await one.attempt()
        assert one.last_error
        assert one.time_left_s == FENCE_S - RENEW_DEADLINE_S + 1
        clock.now += 1
        assert not await one.attempt()
        assert one.time_left_s == 0
        server.before = None
        assert await one.attempt()
        assert one.last_error is None

    scenario(run)


def test_a_slow_renewal_counts_from_its_beginning() -> None:
    """The lease may have been written at once, and the answer have taken long."""

    async def run(server: ApiServer, api: Api) -> None:
        clock = Clock()
        one = candidate(api, "one", clock)

        async def slow(_: web.Request) -> None:
            clock.now += 3

        server.after = slow
        await one.attempt()
        assert one.time_left_s == FENCE_S - 6

    scenario(run)


def test_of_two_at_once_one_wins() -> None:
    """The lease is free, both have read it."""

    async def run(_: ApiServer, api: Api) -> None:
        clock = Clock()
        many = [candidate(api, f"c{i}", clock) for i in range(8)]
        assert sum(await asyncio.gather(*(it.attempt() for it in many))) == 1
        (leader,) = [it for it in many if it.leading]
        clock.now += 1
        await asyncio.gather(*(it.attempt() for it in many))
        await leader.release()
        assert sum(await asyncio.gather(*(it.attempt() for it in many if it is not leader))) == 1

    scenario(run)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 9), st.sampled_from(["try", "cut", "release"])),
        max_size=40,
    )
)
def test_writes_of_two_never_overlap(steps: list[tuple[int, float, str]]) -> None:
    """Whoever may write may do so for time_left_s; nobody else may begin within it."""

    async def run(server: ApiServer, api: Api) -> None:
        clock = Clock()
        many = [candidate(api, f"c{i}", clock) for i in range(3)]
        # Until when each may be writing, if it began at the last moment that it could.
        until = [0.0] * 3

        async def cut(_: web.Request) -> web.StreamResponse:
            return web.Response(status=503)

        for who, passes, what in steps:
            for step in (passes / 2, passes / 2):
                for i, each in enumerate(many):
                    if each.leading:
                        until[i] = clock.now + each.time_left_s
                        assert all(until[j] <= clock.now for j in range(3) if j != i)
                clock.now += step
            if what == "release":
                # In order: nothing runs any more.
                await many[who].release()
                until[who] = min(until[who], clock.now)
            else:
                server.before = cut if what == "cut" else None
                await many[who].attempt()
                server.before = None

    scenario(run)


def test_who_has_certainly_ended_is_followed_when_its_last_write_is_over() -> None:
    """By the kubelet's word; a renewal in between shows that it was not so."""

    async def run(server: ApiServer, api: Api) -> None:
        clock, ended = Clock(), set[str]()
        one = candidate(api, "one", clock)
        asked: list[float] = []

        def has_ended(who: str, renewed: float) -> bool:
            asked.append(renewed)
            return who in ended

        two = Election(api, "n", "s", "two", ended=has_ended, clock=clock)
        await one.attempt()
        assert not await two.attempt()
        ended.add("one")
        assert not await two.attempt()
        clock.now += LAST_WRITE_S - 0.1
        assert not await two.attempt()
        # It lives after all.
        assert await one.attempt()
        clock.now += 0.1
        assert not await two.attempt()
        clock.now += LAST_WRITE_S
        assert await two.attempt()
        assert lease(server)["holderIdentity"] == "two"
        assert asked == sorted(asked)

    scenario(run)


def status(*, running: str = "", finished: str = "", last_finished: str = "") -> ContainerStatus:
    """Of a container, with times as the kubelet writes them."""
    ended = {"terminated": {"finishedAt": finished}} if finished else {}
    now = {"running": {"startedAt": running}} if running else ended
    last = {"terminated": {"finishedAt": last_finished}} if last_finished else {}
    return msgspec.convert({"name": "c", "state": now, "lastState": last}, ContainerStatus)


def test_a_container_has_ended_when_its_successor_runs_or_none_does() -> None:
    """Whole seconds against the moment when it was last alive."""
    moment = seconds("2026-01-01T00:01:00.700000Z")
    assert moment is not None
    early, same, later = (f"2026-01-01T00:0{it}Z" for it in ("0:50", "1:00", "1:05"))
    for told, expected in (
        (status(running=early), False),
        (status(running=early, last_finished=same), False),
        (status(last_finished=early), False),
        (status(finished=early), False),
        (status(), False),
        (status(finished=same), True),
        (status(finished=later), True),
        (status(last_finished=later), True),
        (status(running=later, last_finished=later), True),
        (status(running=same, last_finished=same), False),
        (status(finished="?"), False),
    ):
        assert told.ended_after(moment) is expected, told
