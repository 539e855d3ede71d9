"""At most one replica may write at a time, by the clock of each."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.kubernetes.api_client import Api
from fenka.kubernetes.election import (
    LEADER_KNOWN_S,
    LEASE_DURATION_S,
    RENEW_DEADLINE_S,
    RENEW_PERIOD_S,
    RETRY_PERIOD_S,
    WRITE_DEADLINE_S,
    Election,
)
from tests.fakes.api_server import FakeApiServer, Json, api_server
from tests.fakes.clock import Clock


def candidate(api: Api, name: str, clock: Clock) -> Election:
    """Return a candidate for the lease s in namespace n."""
    return Election(api, "n", "s", name, clock=clock)


def lease(server: FakeApiServer) -> Json:
    """Return its spec."""
    spec: Json = server.get("leases", "s", "n")["spec"]
    return spec


async def fail(_: web.Request) -> web.StreamResponse:
    """Answer as a server that is ill."""
    return web.Response(status=503)


async def test_leader_keeps_the_lease_when_it_renews() -> None:
    """The other waits however long that goes on."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        first, second = candidate(api, "first", clock), candidate(api, "second", clock)
        for _ in range(20):
            assert await first.acquire_or_renew()
            assert not await second.acquire_or_renew()
            assert second.leader == "first"
            clock.now += RENEW_PERIOD_S
        assert lease(server)["leaseTransitions"] == 0
        assert lease(server)["leaseDurationSeconds"] == LEASE_DURATION_S


async def test_renewal_is_one_request_when_nobody_else_wrote() -> None:
    """It knows the version that it wrote. After a change by another it reads again in the same attempt."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        leader = candidate(api, "leader", clock)
        await leader.acquire_or_renew()
        server.requests.clear()
        assert await leader.acquire_or_renew()
        assert [it.split()[0] for it in server.requests] == ["PATCH"]
        server.put("leases", server.get("leases", "s", "n"))
        server.requests.clear()
        assert await leader.acquire_or_renew()
        assert [it.split()[0] for it in server.requests] == ["PATCH", "GET", "PATCH"]


async def test_standby_leads_when_the_lease_has_expired() -> None:
    """Not before, by its own clock since it saw the last renewal."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        first, second = candidate(api, "first", clock), candidate(api, "second", clock)
        await first.acquire_or_renew()
        await second.acquire_or_renew()
        clock.now += LEASE_DURATION_S - 0.1
        assert not await second.acquire_or_renew()
        clock.now += 0.1
        assert await second.acquire_or_renew()
        assert lease(server)["holderIdentity"] == "second"
        assert lease(server)["leaseTransitions"] == 1
        assert not first.leading


@settings(max_examples=25, deadline=None)
@given(st.floats(0, RENEW_PERIOD_S), st.floats(0, RETRY_PERIOD_S), st.integers(1, 5))
async def test_standby_leads_within_five_seconds_when_the_leader_is_killed(
    lives_s: float, offset_s: float, renewals: int
) -> None:
    """Each candidate waits as it says itself; the leader dies at any moment between two renewals."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        leader, standby = candidate(api, "leader", clock), candidate(api, "standby", clock)
        await leader.acquire_or_renew()
        renew_at, try_at = clock.now + leader.pause_s, clock.now + offset_s
        killed_at = clock.now + (renewals - 1) * RENEW_PERIOD_S + lives_s
        while not standby.leading:
            clock.now = min(try_at, renew_at)
            if renew_at <= try_at and renew_at <= killed_at:
                await leader.acquire_or_renew()
                renew_at = clock.now + leader.pause_s
            elif renew_at <= try_at:
                renew_at = float("inf")
            else:
                await standby.acquire_or_renew()
                try_at = clock.now + standby.pause_s
            assert not (leader.leading and standby.leading)
        assert clock.now - killed_at <= LEASE_DURATION_S + RETRY_PERIOD_S + 1e-6 < 5


async def test_standby_leads_at_once_when_the_lease_is_released() -> None:
    """And the one that released it may not write any more."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        first, second = candidate(api, "first", clock), candidate(api, "second", clock)
        await first.acquire_or_renew()
        await second.acquire_or_renew()
        await first.release()
        assert not first.leading
        assert first.time_left_s == 0
        assert await second.acquire_or_renew()
        await first.release()
        assert lease(server)["holderIdentity"] == "second"


async def test_leading_ends_by_time_when_the_server_fails() -> None:
    """No write begins after RENEW_DEADLINE_S; what began before has ended by WRITE_DEADLINE_S."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        leader = candidate(api, "leader", clock)
        await leader.acquire_or_renew()
        term = leader.term
        server.before = fail
        clock.now += RENEW_DEADLINE_S - 1
        assert await leader.acquire_or_renew()
        assert leader.last_error
        assert leader.time_left_s == WRITE_DEADLINE_S - RENEW_DEADLINE_S + 1
        clock.now += 1
        assert not await leader.acquire_or_renew()
        assert leader.time_left_s == 0
        server.before = None
        assert await leader.acquire_or_renew()
        assert leader.last_error is None
        # Nobody else held the lease meanwhile: what was read before is still complete.
        assert leader.term == term


@pytest.mark.parametrize("answered", [True, False])
async def test_term_changes_when_another_held_the_lease_in_between(answered: bool) -> None:
    """Also where the answer to the request that took it back was lost."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        first, second = candidate(api, "first", clock), candidate(api, "second", clock)
        await first.acquire_or_renew()
        term = first.term
        await second.acquire_or_renew()
        clock.now += LEASE_DURATION_S
        await second.acquire_or_renew()
        await second.release()
        if not answered:
            server.after = fail
            await first.acquire_or_renew()
            await first.acquire_or_renew()
            server.after = None
        assert await first.acquire_or_renew()
        assert first.term is not None
        assert first.term != term


async def test_a_renewal_counts_from_its_beginning_when_the_answer_is_slow() -> None:
    """The lease may have been written at once."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        leader = candidate(api, "leader", clock)

        async def slow(_: web.Request) -> None:
            clock.now += 0.5

        server.after = slow
        await leader.acquire_or_renew()
        assert leader.time_left_s == WRITE_DEADLINE_S - 1


async def test_leader_is_unknown_when_the_lease_was_not_read_for_long() -> None:
    """A replica that only observes knows who leads, and until when."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        leader, standby = candidate(api, "leader", clock), candidate(api, "standby", clock)
        await standby.observe()
        assert not standby.has_leader
        await leader.acquire_or_renew()
        await standby.observe()
        assert (standby.has_leader, standby.leader, standby.leading) == (True, "leader", False)
        server.before = fail
        clock.now += LEADER_KNOWN_S
        await standby.observe()
        assert not standby.has_leader


async def test_one_candidate_wins_when_several_try_at_once() -> None:
    """The lease is free, and all have read it."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        many = [candidate(api, f"c{i}", clock) for i in range(8)]
        assert sum(await asyncio.gather(*(it.acquire_or_renew() for it in many))) == 1
        (leader,) = [it for it in many if it.leading]
        clock.now += 1
        await asyncio.gather(*(it.acquire_or_renew() for it in many))
        await leader.release()
        others = [it for it in many if it is not leader]
        assert sum(await asyncio.gather(*(it.acquire_or_renew() for it in others))) == 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 3), st.sampled_from(["try", "cut", "release"])),
        max_size=40,
    )
)
async def test_writes_of_two_replicas_never_overlap(steps: list[tuple[int, float, str]]) -> None:
    """A replica may write for time_left_s; no other may begin within it."""

    async with api_server() as server, server.api() as api:
        clock = Clock()
        many = [candidate(api, f"c{i}", clock) for i in range(3)]
        # Until when each may be writing, if it began at the last moment at which it could.
        until = [0.0] * 3

        for number, passes, action in steps:
            for step in (passes / 2, passes / 2):
                for i, each in enumerate(many):
                    if each.leading:
                        until[i] = clock.now + each.time_left_s
                        assert all(until[j] <= clock.now for j in range(3) if j != i)
                clock.now += step
            if action == "release":
                # In order: nothing runs any more.
                await many[number].release()
                until[number] = min(until[number], clock.now)
            else:
                server.before = fail if action == "cut" else None
                await many[number].acquire_or_renew()
                server.before = None
