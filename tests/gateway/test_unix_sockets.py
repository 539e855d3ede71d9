"""Replicas that listen at Unix sockets."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fenka.jobs.routing_table import ListenAddress, replica_label
from tests.gateway.harness import GET, OK, FakeReplica, installation, table, version
from tests.gateway.test_http2 import Model, channel_to, unary
from tests.waiting import until
from tests.workstation.users import FIRST_UID


async def test_requests_of_http1_pass_on_one_connection(tmp_path: Path) -> None:
    """The program of the user whom the table names gets them."""
    replica = FakeReplica()
    async with replica.serve(path=str(tmp_path / "s")), installation() as served:
        entry = msgspec.structs.replace(replica.entry(), uid=os.geteuid())
        served.dispatcher.update(table(version("v1", entry)))
        async with served.client() as client:
            assert [await client.request(), await client.request()] == [OK, OK]
    assert replica.connections == 1


async def test_calls_of_http2_pass(tmp_path: Path) -> None:
    """A gRPC server at a Unix socket."""
    async with (
        Model().serve(str(tmp_path / "s")) as listening,
        installation() as served,
        channel_to(served) as channel,
    ):
        entry = msgspec.structs.replace(listening, uid=os.geteuid())
        served.dispatcher.update(table(version("v1", entry)))
        assert await unary(channel, "Infer")(b"1") == b"model1"


async def test_nothing_is_sent_when_another_user_listens(tmp_path: Path) -> None:
    """The request waits for a program of the user whom the table names."""
    replica = FakeReplica()
    async with replica.serve(path=str(tmp_path / "s")), installation() as served:
        entry = msgspec.structs.replace(replica.entry(), uid=FIRST_UID)
        served.dispatcher.update(table(version("v1", entry)))
        async with served.client() as client:
            await client.send(GET)
            await until(lambda: served.dispatcher.statistics.unreachable > 0)
            assert replica.heads == []
            served.dispatcher.update(table(version("v1", replica.entry())))
            assert await client.response() == OK


def stale_socket(path: str) -> list[socket.socket]:
    """Leave the file of a program that was killed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
        left.listen()
    return []


def full_socket(path: str) -> list[socket.socket]:
    """Return a socket whose program accepts nothing, and what fills its queue."""
    program = socket.socket(socket.AF_UNIX)
    program.bind(path)
    program.listen(0)
    sockets = [program]
    while True:
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].setblocking(False)
        try:
            sockets[-1].connect(path)
        except BlockingIOError:
            return sockets


@pytest.mark.parametrize("prepare", [stale_socket, full_socket])
async def test_another_replica_is_selected_when_a_socket_accepts_nothing(
    tmp_path: Path, prepare: Callable[[str], list[socket.socket]]
) -> None:
    """Also when the kernel would let a client wait: nothing was sent there."""
    replica, dead = FakeReplica(), FakeReplica()
    dead.path = str(tmp_path / "dead")
    sockets = prepare(dead.path)
    async with replica.serve(path=str(tmp_path / "s")), installation() as served:
        served.dispatcher.update(table(version("v1", dead.entry(), replica.entry())))
        for _ in range(4):
            async with served.client() as client:
                assert await client.request() == OK
        assert served.dispatcher.statistics.unreachable > 0
    assert len(replica.heads) == 4
    for each in sockets:
        each.close()


@pytest.mark.parametrize(
    ("ports", "label"),
    [
        ({"http": "/s"}, "/s"),
        ({"http": 2, "grpc": 3}, "10.0.0.1:3"),
        ({}, "10.0.0.1:0"),
    ],
)
def test_replica_is_called_by_its_first_address(
    ports: dict[str, ListenAddress], label: str
) -> None:
    """By the order of the ports' names."""
    assert replica_label("10.0.0.1", ports) == label
