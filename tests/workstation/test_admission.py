"""Quotas of connections and jobs, and messages of hostile clients."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from fenka.core.inventory import Card, DeviceId, Node
from fenka.hardware import card_lock
from fenka.hardware.nvml import Hardware, Reading
from fenka.hardware.peer_credentials import PeerProcess
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.mig.keeper import InstanceKeeper
from fenka.mig.manager import InstanceManager
from fenka.workstation import admission, files, protocol
from fenka.workstation.accepting import Caller, accepting
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.broker import Broker
from fenka.workstation.cards import CardObserver
from fenka.workstation.connections import Connections, RequestHandler
from fenka.workstation.controller import Client
from fenka.workstation.daemon import Daemon
from fenka.workstation.files import DaemonConfig
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime
from tests.builders import job
from tests.workstation.users import place

__all__ = ["place"]

CARD = Card(0, DeviceId("GPU-1"), "Tesla T4", 15079)
HELLO = protocol.encode(protocol.Hello()) + b"\n"
CONFIRM = protocol.encode(protocol.ConfirmLease()) + b"\n"
SOMEBODY = 61000

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


@contextlib.asynccontextmanager
async def serving(place: Path, bounds: Admission) -> AsyncIterator[Connect]:
    """Serve clients of a daemon whose card is lost; yield a function that connects."""
    driver = SimpleNamespace(simulated=False)
    hardware = SimpleNamespace(
        driver=driver, readings=dict, processes=tuple, busy_samples=lambda *_: None
    )
    runtime = Runtime(place / "run")
    runtime.create()
    broker = Broker(Node("here", (CARD,)), "binpack")
    instances = InstanceManager(
        cast("Hardware", hardware), InstanceKeeper(runtime.instances, "boot", {})
    )
    daemon = Daemon(runtime, cast("Hardware", hardware), broker, instances, place, DaemonConfig())
    connections = Connections(runtime, bounds, daemon.handler)
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.fspath(runtime.socket))
    server.listen(admission.BACKLOG)
    with server, accepting(server, connections.accept):
        yield lambda: asyncio.open_unix_connection(str(runtime.socket))


async def next_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message."""
    return cast("dict[str, Any]", msgspec.json.decode(await reader.readline()))


async def greeted(connect: Connect, line: bytes = HELLO) -> Streams:
    """Return a connection on which both sides have sent Hello."""
    reader, writer = await connect()
    assert (await next_message(reader))["type"] == "hello"
    writer.write(line)
    return reader, writer


async def test_connection_is_closed_when_it_is_silent(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds without a Hello, with a part of one, and without a request after it."""
    monkeypatch.setattr(admission, "HELLO_TIMEOUT_S", 0.05)
    monkeypatch.setattr(admission, "IDLE_TIMEOUT_S", 0.05)

    async with serving(place, Admission(1000, ())) as connect:
        for words in (b"", HELLO[:5], HELLO, HELLO + CONFIRM[:5]):
            reader, _ = await greeted(connect, words)
            assert await reader.read() == b""


async def test_connection_is_kept_when_it_waits_for_a_slice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pending request may be silent for days."""
    monkeypatch.setattr(admission, "IDLE_TIMEOUT_S", 0.05)
    ask = protocol.SubmitJob(JobSpec(["x"], GpuResources("14")))

    async with serving(place, Admission(1000, ())) as connect:
        waiting, writer = await greeted(connect)
        writer.write(protocol.encode(ask) + b"\n")
        assert (await next_message(waiting))["type"] == "job-queued"
        idle, _ = await greeted(connect)
        assert await idle.read() == b""
        writer.write(CONFIRM)
        assert (await next_message(waiting))["type"] == "failure"


async def test_connection_is_rejected_when_its_user_has_too_many(place: Path) -> None:
    """Further connections get one sentence. Closing a connection makes room."""
    bounds = Admission(256 + 4 * 8, ())
    uid = os.geteuid()

    async with serving(place, bounds) as connect:
        first = await greeted(connect)
        second = await greeted(connect)
        refused, _ = await connect()
        assert (await next_message(refused))["type"] == "hello"
        assert "2 connections to the fenka daemon" in (await next_message(refused))["reason"]
        assert await refused.read() == b""
        for _, writer in (first, second):
            writer.close()
        await first[0].read()
        await second[0].read()
        while bounds._connections[uid]:
            await asyncio.sleep(0)
        reader, writer = await greeted(connect)
        writer.write(CONFIRM)
        assert (await next_message(reader))["type"] == "failure"


async def test_connection_is_closed_when_its_user_leaves_many_bytes_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer may have megabytes, and a user has a thousand connections. Root's stay."""
    monkeypatch.setattr(admission, "MAX_UNREAD_BYTES_PER_USER", 1_500_000)
    quotas = Admission(1000, {0})
    process = PeerProcess(os.getpid(), SOMEBODY, os.pidfd_open(os.getpid()), 1)
    answer = protocol.Failure("x" * 1_000_000)

    async def unread(account: int) -> tuple[Client, socket.socket]:
        theirs, ours = socket.socketpair(socket.AF_UNIX)
        _, writer = await asyncio.open_unix_connection(sock=ours)
        client = Client(writer, Caller(process, account), quotas)
        client.send(answer)
        return client, theirs

    opened = [await unread(account) for account in (SOMEBODY, SOMEBODY, SOMEBODY + 1, 0, 0)]
    assert [client.writer.is_closing() for client, _ in opened] == [False, True, *[False] * 3]
    opened[0][0].writer.transport.abort()
    opened.append(await unread(SOMEBODY))
    assert not opened[-1][0].writer.is_closing()
    for client, theirs in opened:
        client.writer.transport.abort()
        theirs.close()
    process.close()


def test_root_can_connect_when_other_users_have_all_connections() -> None:
    """Only the number of descriptors limits root and the daemon's owner."""
    bounds = Admission(256 + 4 * 8, {0, 1000})
    for uid in (1, 2, 3):
        bounds.add_connection(uid)
        bounds.add_connection(uid)
        with pytest.raises(QuotaExceeded, match="2 connections"):
            bounds.add_connection(uid)
    bounds.add_connection(1000)
    bounds.add_connection(1000)
    with pytest.raises(QuotaExceeded, match="no room for more"):
        bounds.add_connection(4)
    bounds.add_connection(0)
    bounds.remove_connection(3)
    bounds.remove_connection(3)
    bounds.add_connection(4)


def test_job_is_rejected_when_its_user_s_records_are_too_large() -> None:
    """A gang copies its command to each member. Root is limited by what the next daemon reads."""

    def gang(size: int, account: int, kib: int) -> list[Job]:
        spec = JobSpec(["x" * (kib << 10)], GpuResources("1"))
        return [job(str(number), spec=spec, account_uid=account) for number in range(size)]

    bounds = Admission(1000, {0})
    own, others = gang(20, SOMEBODY, 64), gang(20, 7, 64)
    bounds.check_records(SOMEBODY, gang(10, SOMEBODY, 64), [*own, *others])
    with pytest.raises(QuotaExceeded, match="2048 KiB for one user: shorten the command"):
        bounds.check_records(SOMEBODY, gang(13, SOMEBODY, 64), [*own, *others])
    with pytest.raises(QuotaExceeded, match="2048 KiB for one user"):
        bounds.check_records(SOMEBODY, gang(512, SOMEBODY, 60), [])
    bounds.check_records(0, gang(512, 0, 60), own)
    with pytest.raises(QuotaExceeded, match="no room to record more jobs"):
        bounds.check_records(0, gang(512, 0, 100), gang(200, 0, 100))
    assert 4 * admission.MAX_RECORDED_BYTES <= files.MAX_FILE_BYTES


def test_job_is_rejected_when_its_user_has_too_many() -> None:
    """Each member of a gang counts; other users' jobs do not."""
    jobs = [SimpleNamespace(account=SOMEBODY)] * 500 + [SimpleNamespace(account=7)] * 500
    bounds = Admission(1000, {0})
    bounds.check_jobs(SOMEBODY, 12, cast("Any", jobs))
    bounds.check_jobs(0, 1000, cast("Any", jobs))
    with pytest.raises(QuotaExceeded, match="500 jobs here; 13 more exceed the limit of 512"):
        bounds.check_jobs(SOMEBODY, 13, cast("Any", jobs))


async def test_requests_are_serialized_when_they_are_of_one_user() -> None:
    """Requests of different users are served concurrently."""

    bounds, order, go = Admission(1000, ()), list[str](), asyncio.Event()

    async def ask(uid: int, name: str) -> None:
        async with bounds.time_share(uid):
            order.append(name)
            if name == "first":
                await go.wait()

    first = asyncio.create_task(ask(1, "first"))
    second = asyncio.create_task(ask(1, "second"))
    await asyncio.create_task(ask(2, "other"))
    assert order == ["first", "other"]
    go.set()
    await asyncio.gather(first, second)
    assert order == ["first", "other", "second"]


@pytest.mark.parametrize(
    "words",
    [
        b'{"type":"hello","protocol":3,"version":"x","new":' + b"[" * 20000 + b"\n",
        b'{"type":"hello","new":' + b'{"a":' * 9000 + b"\n",
        HELLO + b'{"type":"submit-job","command":[],"x":' + b"[" * 20000 + b"\n",
        HELLO + b'{"type":"submit-job","spec":{"command":["\xed\xa0\x80"]}}\n',
        HELLO + b"x" * (1 << 17) + b"\n",
        b"x" * (1 << 17) + b"\n",
        b"\xff" * 100 + b"\n",
    ],
    ids=["hello", "objects", "ask", "surrogate", "long", "long hello", "bytes"],
)
async def test_other_connections_go_on_when_a_line_is_hostile(
    place: Path, words: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is logged, because clients could fill the disk."""

    async with serving(place, Admission(1000, ())) as connect:
        reader, writer = await greeted(connect, words)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            rest = await reader.read()
            assert not rest or msgspec.json.decode(rest)["type"] == "failure"
        again, writer = await greeted(connect)
        writer.write(CONFIRM)
        assert (await next_message(again))["type"] == "failure"
    assert capfd.readouterr().err == ""


async def test_log_has_one_line_when_a_request_fails_unexpectedly(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says what failed and where, and the daemon goes on."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(RequestHandler, "_confirm", fail)

    async with serving(place, Admission(1000, ())) as connect:
        for _ in range(2):
            reader, writer = await greeted(connect)
            writer.write(CONFIRM)
            assert "failed to do it" in (await next_message(reader))["reason"]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "ZeroDivisionError: two lines (test_admission.py:" in lines[0]


def test_queue_positions_are_dropped_when_the_client_does_not_read() -> None:
    """Positions change often; other messages are kept."""
    written: list[bytes] = []
    waiting = SimpleNamespace(get_write_buffer_size=lambda: 1)
    client = Client.__new__(Client)
    client.writer = cast("Any", SimpleNamespace(transport=waiting, write=written.append))
    client.account, client._quotas = SOMEBODY, Admission(1000, ())
    client.send(protocol.JobQueued("1", "a", 1, 1, "full"))
    client.send(protocol.JobRejected("stopped", final=True))
    assert [msgspec.json.decode(line)["type"] for line in written] == ["job-rejected"]


def test_log_keeps_its_end_when_it_is_too_long(place: Path) -> None:
    """The log stays below its limit while others append to it."""
    runtime = Runtime(place)
    files.trim_log(runtime.log)
    with runtime.log.open("ab") as log:
        log.write(b"line of the beginning\n" * 10)
        log.flush()
        files.trim_log(runtime.log)
        assert runtime.log.stat().st_size == 220
        log.write(b"some line of the log\n" * (files.MAX_LOG_BYTES // 20))
        log.flush()
        files.trim_log(runtime.log)
        log.write(b"the last\n")
    lines = runtime.log.read_text().splitlines()
    assert runtime.log.stat().st_size < files.MAX_LOG_BYTES // 3
    assert {*lines[:-1]} == {"some line of the log"}
    assert lines[-1] == "the last"


def test_card_is_unhealthy_when_root_has_locked_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The card is healthy again when root's daemon has ended. The log has one line."""
    hardware = SimpleNamespace(
        driver=SimpleNamespace(simulated=False),
        readings=lambda: {CARD.uuid: Reading(CARD.uuid, 0, None, None, None)},
        processes=tuple,
    )
    node = Node("here", (CARD,))
    cards = CardObserver(cast("Hardware", hardware), lambda _: None, lambda *_: 0, lambda _: 0)
    healthy = []
    for took in (False, True, True, False):
        monkeypatch.setattr(card_lock, "locked_by_root", lambda _, took=took: took)
        node, _ = cards.observe(node)
        healthy.append(node.cards[0].healthy)
    assert healthy == [True, False, False, True]
    assert len(capfd.readouterr().err.splitlines()) == 1
