"""Crashes of Envoy under an open socket, and what clients see of them."""

import asyncio
import contextlib
import os
import signal

from tests.gateway.harness import (
    ANSWER,
    GET,
    POST,
    FakeReplica,
    HeldReplica,
    Installation,
    installation,
)
from tests.waiting import until


async def crash(served: Installation) -> None:
    """Kill Envoy, and return when the gateway knows."""
    os.kill(served.gateway.envoy.pid, signal.SIGKILL)
    await until(lambda: not served.gateway.envoy.running)


async def test_connection_without_envoy_is_served_by_the_next_one() -> None:
    """The client waits, and its address reaches the replica although the connection is relayed."""
    replica = FakeReplica()
    async with installation(replica) as served:
        await crash(served)
        assert served.gateway.problem == "Envoy does not run"
        async with served.client() as client:
            await client.send(GET)
            assert await client.answer() == ANSWER
            # The relayed connection stays as any other.
            assert await client.fetch(POST) == ANSWER
            assert not served.gateway.problem
            assert await served.metric("connections") == 1
        async with served.client() as client:
            assert await client.fetch() == ANSWER
        await served.until_metric("connections", 0)
        assert await served.metric("envoy_starts_total") == 2
    assert [b"\r\nx-forwarded-for: 127.0.0.1\r\n" in head for head in replica.heads] == [True] * 3


async def test_large_bodies_pass_on_a_relayed_connection() -> None:
    """The relay passes bytes on as they come, both ways."""
    body = bytes(range(256)) * 20_000
    replica = FakeReplica(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    async with installation(replica) as served:
        await crash(served)
        async with served.client() as client:
            await client.send(
                b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            await client.send(body)
            assert (await client.answer()) == (200, body)
    assert replica.bodies == [body]


async def test_relayed_client_that_hangs_up_ends_its_request() -> None:
    """A replica sees it, as on any other connection."""
    replica = HeldReplica()
    async with installation(replica) as served:
        await crash(served)
        async with served.client() as client:
            await client.send(GET)
            await until(lambda: replica.heads)
        await served.until_metric("requests", 0)
        assert await served.metric("connections") == 0


async def test_many_clients_wait_for_the_next_envoy() -> None:
    """All that the kernel has accepted meanwhile."""
    async with installation(FakeReplica()) as served, contextlib.AsyncExitStack() as stack:
        await crash(served)
        clients = [await stack.enter_async_context(served.client()) for _ in range(200)]
        answers = await asyncio.gather(*(client.fetch() for client in clients))
    assert answers == [ANSWER] * 200


async def test_requests_at_replicas_end_with_envoy() -> None:
    """Their clients see the end of the connection, never a wrong answer, and the figures stay."""
    replica = HeldReplica()
    async with installation(replica) as served, served.client() as client, served.client() as other:
        replica.may_answer.set()
        assert await other.fetch() == ANSWER
        assert await served.metric("responses_total", version="v1", status="200") == 1
        replica.may_answer.clear()
        await client.send(POST)
        await until(lambda: len(replica.heads) == 2)
        await crash(served)
        # While no Envoy answers, the last figures are shown.
        assert await served.metric("responses_total", version="v1", status="200") == 1
        assert await served.metric("envoy_running") == 0
        assert await client.rest() == b""
        replica.may_answer.set()
        async with served.client() as again:
            assert await again.fetch() == ANSWER
    assert len(replica.heads) == 3


async def test_requests_that_wait_leave_with_envoy() -> None:
    """The next Envoy has its own."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served, served.client() as client:
        await client.send(GET)
        await served.waiting(1)
        await crash(served)
        assert await client.rest() == b""
        await served.waiting(0)
        await served.start(replica)
        async with served.client() as again:
            assert await again.fetch() == ANSWER
    assert len(replica.heads) == 1


async def test_next_envoy_has_the_newest_table() -> None:
    """Also one that came while there was none."""
    old, new = FakeReplica(), HeldReplica()
    new.may_answer.set()
    async with old.serve(), new.serve(), installation() as served:
        await served.start(old)
        await crash(served)
        await served.start(new)
        async with served.client() as client:
            assert await client.fetch() == ANSWER
    assert (len(old.heads), len(new.heads)) == (0, 1)
