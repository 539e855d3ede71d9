"""Which replica gets a request: weights, load, and replicas that come, end or leave."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from fenka.jobs.routing_table import ReplicaEntry
from tests.gateway.harness import GET, OK, FakeReplica, HeldReplica, Installation, installation
from tests.gateway.tables import LOOPBACK, version
from tests.waiting import until


def named(name: bytes) -> FakeReplica:
    """Return a replica that answers its name, of two letters."""
    return FakeReplica(OK.replace(b"ok", name))


def arrived(replicas: Sequence[FakeReplica], requests: int) -> bool:
    """Return whether this many requests have reached replicas."""
    return sum(len(replica.heads) for replica in replicas) == requests


async def answers(served: Installation, requests: int) -> list[bytes]:
    """Return what requests of one connection are answered."""
    async with served.client() as client:
        return [(await client.request())[-2:] for _ in range(requests)]


@pytest.mark.parametrize(
    ("weights", "expected"), [((90, 10), (90, 10)), ((2, 1), (67, 33)), ((1, 0), (100, 0))]
)
async def test_versions_get_their_weight(
    weights: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Of any hundred requests each version has its share, to within one."""
    stable, canary = named(b"v1"), named(b"v2")
    async with stable.serve(), canary.serve(), installation() as served:
        await served.update(
            version("v1", stable.entry(), weight=weights[0]),
            version("v2", canary.entry(), weight=weights[1]),
        )
        got = await answers(served, 100)
    assert abs(got.count(b"v1") - expected[0]) <= 1
    assert got.count(b"v1") + got.count(b"v2") == 100
    assert weights[1] or not canary.heads


async def test_shares_are_weights_under_concurrent_load() -> None:
    """Of 1,000 requests of 20 clients exactly a tenth go to the canary, however many replicas it has."""
    stable, canaries = FakeReplica(), [FakeReplica() for _ in range(3)]
    async with installation(stable, *canaries) as served:
        await served.update(
            version("v1", stable.entry(), weight=90),
            version("v2", *(canary.entry() for canary in canaries), weight=10),
        )
        await asyncio.gather(*(answers(served, 50) for _ in range(20)))
    assert (len(stable.heads), sum(len(canary.heads) for canary in canaries)) == (900, 100)


async def test_share_goes_to_others_when_version_has_no_replica() -> None:
    """A canary without a replica takes no request with it, nor does one whose replica ends."""
    stable, canary = named(b"v1"), named(b"v2")
    async with stable.serve(), canary.serve(), installation() as served:
        await served.update(version("v1", stable.entry(), weight=1), version("v2", weight=99))
        assert set(await answers(served, 20)) == {b"v1"}
        ending = version("v2", canary.entry(terminating=True), weight=99)
        await served.update(version("v1", stable.entry(), weight=1), ending)
        assert set(await answers(served, 20)) == {b"v1"}


async def test_version_has_its_share_when_one_of_many_replicas_accepts() -> None:
    """The share of a version does not shrink with those of its replicas that end."""
    stable, canary = named(b"v1"), named(b"v2")
    ending = [ReplicaEntry("127.0.0.9", {"http": port}, terminating=True) for port in range(1, 30)]
    async with stable.serve(), canary.serve(), installation() as served:
        await served.update(
            version("v1", stable.entry(), weight=50),
            version("v2", canary.entry(), *ending, weight=50),
        )
        assert (await answers(served, 100)).count(b"v2") == 50


async def test_request_waits_when_only_versions_without_weight_have_a_replica() -> None:
    """Weight 0 means no request, also if nothing else is there."""
    stable, other = named(b"v1"), named(b"v2")
    async with stable.serve(), other.serve(), installation() as served, served.client() as client:
        await served.update(version("v1", weight=100), version("v2", other.entry(), weight=0))
        await client.send(GET)
        await served.waiting(1)
        await served.update(version("v1", stable.entry()), version("v2", other.entry(), weight=0))
        assert (await client.response()).endswith(b"v1")
    assert not other.heads


async def test_table_without_weights_is_accepted() -> None:
    """All versions may have the weight 0: then all requests wait."""
    replica = FakeReplica()
    async with replica.serve(), installation() as served, served.client() as client:
        await served.update(version("v1", replica.entry(), weight=0))
        await client.send(GET)
        await served.waiting(1)
    assert not replica.heads


async def test_shares_hold_when_weights_are_extreme() -> None:
    """The largest weight beside the least."""
    stable, canary = named(b"v1"), named(b"v2")
    async with stable.serve(), canary.serve(), installation() as served:
        await served.update(
            version("v1", stable.entry(), weight=1_000_000),
            version("v2", canary.entry(), weight=1),
        )
        assert (await answers(served, 100)).count(b"v1") >= 99


async def test_replica_with_the_fewest_requests_is_selected() -> None:
    """Replicas that are busy get a request only when all are as busy."""
    replicas = [HeldReplica() for _ in range(3)]
    async with installation(*replicas) as served:
        requests = list[asyncio.Task[list[bytes]]]()
        for number in range(6):
            requests.append(asyncio.create_task(answers(served, 1)))
            await until(partial(arrived, replicas, number + 1))
        assert [len(replica.heads) for replica in replicas] == [2, 2, 2]
        replicas[1].may_answer.set()
        await until(lambda: sum(request.done() for request in requests) == 2)
        await answers(served, 1)
        assert [len(replica.heads) for replica in replicas] == [2, 3, 2]
        for replica in replicas:
            replica.may_answer.set()
        await asyncio.gather(*requests)


async def test_new_table_holds_for_open_connections() -> None:
    """A client's connection outlives any number of tables."""
    first, second = named(b"v1"), named(b"v2")
    async with first.serve(), second.serve(), installation() as served, served.client() as client:
        for replica, answer in ((first, b"v1"), (second, b"v2"), (first, b"v1")):
            await served.start(replica)
            assert (await client.request()).endswith(answer)


async def test_terminating_replica_finishes_its_request_and_gets_no_other() -> None:
    """A replica that ends answers what it has, while others get what comes."""
    old, new = HeldReplica(), named(b"hi")
    async with installation(old) as served, new.serve(), served.client() as first:
        await first.send(GET)
        await until(lambda: old.heads)
        await served.update(version("v1", old.entry(terminating=True), new.entry()))
        assert await answers(served, 3) == [b"hi"] * 3
        old.may_answer.set()
        assert (await first.response()).endswith(b"ok")
        assert (await first.request()).endswith(b"hi")
    assert len(old.heads) == 1


async def test_replica_finishes_its_request_when_it_leaves_the_table() -> None:
    """A table without a replica does not end what the replica does."""
    old = HeldReplica()
    async with installation(old) as served, served.client() as client:
        await client.send(GET)
        await until(lambda: old.heads)
        await served.start()
        old.may_answer.set()
        assert (await client.response()).endswith(b"ok")
        await until(lambda: old.ended)


async def test_ports_have_replicas_of_their_own() -> None:
    """A request goes to the port of the name that it came to, and waits where no replica has one."""
    web, rpc, both = named(b"we"), named(b"rp"), named(b"bo")
    async with (
        web.serve(),
        rpc.serve(),
        both.serve(),
        installation(ports=("http", "grpc")) as served,
    ):
        ports = {"http": web.port, "grpc": rpc.port}
        await served.update(version("v1", ReplicaEntry(LOOPBACK, ports)))
        async with served.client("http") as first, served.client("grpc") as second:
            assert (await first.request()).endswith(b"we")
            assert (await second.request()).endswith(b"rp")
            await served.update(version("v1", web.entry()))
            assert (await first.request()).endswith(b"we")
            await second.send(GET)
            await served.waiting(1)
            assert served.gateway.held.ports() == {"grpc"}
            await served.update(version("v1", both.entry(port="grpc")))
            assert (await second.response()).endswith(b"bo")


async def test_replica_has_an_address_of_ipv6() -> None:
    """An address is not a name with a port."""
    replica = FakeReplica()
    async with replica.serve(host="::1"), installation() as served:
        await served.start(replica)
        assert await answers(served, 2) == [b"ok"] * 2
        assert await served.metric("responses_total", version="v1", status="200") == 2
        await served.until_metric("requests_in_flight", 0, version="v1")


async def test_replica_listens_at_a_unix_socket(tmp_path: Path) -> None:
    """Its path is that of the table, whatever Envoy's directory is."""
    replica = FakeReplica()
    async with replica.serve(path=str(tmp_path / "s")), installation() as served:
        await served.start(replica)
        assert await answers(served, 2) == [b"ok"] * 2
    assert replica.connections == 1
