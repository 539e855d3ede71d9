"""Connections in a loop, and requests that wait: what one user does must not delay others."""

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from fenka.isolation import unix_client
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.workstation import accepting, protocol
from fenka.workstation.accepting import admit, hung_up
from fenka.workstation.admission import Admission, QuotaExceeded
from tests.workstation.test_admission import greeted, next_message, serving
from tests.workstation.users import place

__all__ = ["place"]


def listener(path: Path, backlog: int = 512) -> socket.socket:
    """A listening socket."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.fspath(path))
    server.listen(backlog)
    return server


async def test_closed_connections_are_dropped_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who connects and closes in a loop fills the queue, and an open connection is behind them."""
    monkeypatch.setattr(accepting, "MAX_ACCEPTED", 7)
    path = tmp_path / "socket"
    served, done = list[socket.socket](), asyncio.Event()

    def serve(connection: socket.socket) -> None:
        served.append(connection)
        done.set()

    with listener(path) as server:
        for _ in range(200):
            unix_client.connect(os.fspath(path), 5).close()
        with unix_client.connect(os.fspath(path), 5):
            with accepting.accepting(server, serve):
                await done.wait()
            assert len(served) == 1
            assert not hung_up(served[0])
        assert hung_up(served[0])
        served[0].close()


async def test_accepting_goes_on_when_there_was_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket stays readable meanwhile, which must not take all of the daemon's time."""
    monkeypatch.setattr(accepting, "RETRY_S", 0.01)
    path, done, failures = tmp_path / "socket", asyncio.Event(), iter([OSError(24, "none left")])

    class Server(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            for failure in failures:
                raise failure
            return super().accept()

    def serve(connection: socket.socket) -> None:
        connection.close()
        done.set()

    with (
        listener(path) as first,
        Server(fileno=os.dup(first.fileno())) as server,
        unix_client.connect(os.fspath(path), 5),
        accepting.accepting(server, serve),
    ):
        await done.wait()


def test_user_with_too_many_connections_is_refused_by_the_kernel_s_word_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is read of the process: its namespaces, its start and its user's name take time."""
    quotas = Admission(256 + 4 * 8, ())
    quotas.add_connection(os.geteuid())
    quotas.add_connection(os.geteuid())
    monkeypatch.setattr(accepting, "process", lambda _: pytest.fail("the process was looked up"))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs, pytest.raises(QuotaExceeded, match="you have 2 connections"):
        admit(ours, quotas)


def test_client_waits_when_the_queue_of_connections_is_full(tmp_path: Path) -> None:
    """A socket with a timeout of Python's would get EAGAIN at once."""
    path = tmp_path / "socket"
    with listener(path, 0) as server, unix_client.connect(os.fspath(path), 5):
        with socket.socket(socket.AF_UNIX) as hasty:
            hasty.settimeout(5)
            with pytest.raises(BlockingIOError):
                hasty.connect(os.fspath(path))
        connected = list[socket.socket]()
        client = threading.Thread(
            target=lambda: connected.append(unix_client.connect(os.fspath(path), 60))
        )
        client.start()
        for _ in range(2):
            server.accept()[0].close()
        client.join()
        assert connected[0].gettimeout() is None
        connected[0].close()


async def test_stop_with_too_many_names_is_refused(place: Path) -> None:
    """A message has room for ten thousand names, each of which would be looked up."""
    many = protocol.StopJob(["x"] * (protocol.MAX_STOPPED + 1))
    async with serving(place, Admission(1000, ())) as connect:
        reader, writer = await greeted(connect)
        writer.write(protocol.encode(many) + b"\n")
        assert "at most 64 jobs, not 65" in (await next_message(reader))["reason"]
        writer.write(protocol.encode(protocol.StopJob(["x"])) + b"\n")
        assert (await next_message(reader))["failures"]


async def test_stop_waits_for_its_user_s_share_of_time(place: Path) -> None:
    """Only the end of the programs is waited for outside of it."""
    quotas = Admission(1000, ())
    ask = protocol.SubmitJob(JobSpec(["x"], GpuResources("14"), name="train"))
    async with serving(place, quotas) as connect:
        pending, submitter = await greeted(connect)
        submitter.write(protocol.encode(ask) + b"\n")
        assert (await next_message(pending))["type"] == "job-queued"
        reader, writer = await greeted(connect)
        async with quotas.time_share(os.geteuid()):
            writer.write(protocol.encode(protocol.StopJob(["train"])) + b"\n")
            answer = asyncio.create_task(next_message(reader))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not answer.done()
        assert (await answer)["stopped"] == ["train"]
