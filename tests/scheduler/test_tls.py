"""Who may decide: callers with a certificate of fenka's authority, and nobody else."""

import asyncio
import contextlib
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fenka.scheduler.leader_proxy import Credentials
from fenka.scheduler.main import http_server, url
from fenka.scheduler.server import PREFIX, Access
from fenka.server.certificate_files import InvalidCredentials
from fenka.server.certificates import due
from fenka.server.listener import serve_app
from tests.builders import T4_MIB, node_json
from tests.fakes.api_server import api_server
from tests.fakes.certificates import access, fresh, write
from tests.fakes.clock import Clock
from tests.scheduler.harness import extender, put_pod, scheduler
from tests.waiting import until

NODE = node_json("n", T4_MIB)


def anonymous(trusted: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """A caller without a certificate, who believes anybody."""
    context = trusted or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def bind(url: str, context: Any, pod: Any) -> str:
    """What a forged bind comes to."""
    meta = pod["metadata"]
    names = {"PodName": meta["name"], "PodNamespace": "default", "PodUID": meta["uid"], "Node": "n"}
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            async with session.post(f"{url}{PREFIX}/bind", json=names) as answer:
                return f"{answer.status}: {await answer.text()}"
        except aiohttp.ClientError as why:
            return type(why).__name__


async def test_connection_is_refused_when_the_certificate_is_not_of_the_authority(
    tmp_path: Path,
) -> None:
    """No certificate, another authority's, the server's own, plain HTTP: nothing is even read."""

    async with scheduler(NODE, access=access(tmp_path / "own")) as (server, one):
        pod = put_pod(server, "p", 4)
        as_server = anonymous()
        as_server.load_cert_chain(tmp_path / "own" / "server.crt", tmp_path / "own" / "server.key")
        strangers = fresh(tmp_path / "other").client
        for context in (anonymous(), anonymous(strangers), as_server):
            assert await bind(one.url, context, pod) in (
                "ClientOSError",
                "ServerDisconnectedError",
                "ClientConnectorSSLError",
                "ClientConnectorError",
            )
        plain = one.url.replace("https", "http")
        assert await bind(plain, True, pod) == "ServerDisconnectedError"
        assert not server.get("pods", "p", "default")["spec"].get("nodeName")
        assert await one.bind(pod, "n") == ""


@pytest.mark.parametrize("other", [False, True])
async def test_call_is_forwarded_only_when_the_leader_has_a_certificate_of_the_authority(
    tmp_path: Path, other: bool
) -> None:
    """A leader of another authority is not believed."""
    clock = Clock()
    own = access(tmp_path / "own")
    leaders = access(tmp_path / "other") if other else own
    async with api_server() as server:
        server.put("nodes", NODE)
        async with extender(server, "one", clock, access=leaders) as one:
            await until(lambda: one.replica.leadership.leading)
            async with extender(server, "two", clock, access=own) as two:
                await until(lambda: two.replica.leadership.ready)
                error = await two.bind(put_pod(server, "p", 4), "n")
                assert ("the leader one does not answer" in error) if other else error == ""


async def test_certificates_are_reloaded_when_they_are_renewed(tmp_path: Path) -> None:
    """Open connections stay; certificates that cannot be used are not loaded."""
    given = access(tmp_path / "own")

    async with scheduler(NODE, access=given) as (server, one):
        assert given.credentials
        first, second = put_pod(server, "a", 4), put_pod(server, "b", 4)
        assert await one.bind(first, "n") == ""
        assert not given.credentials.refresh()
        pairs = due({}, (), datetime.now(UTC))
        write(tmp_path / "own", pairs)
        (tmp_path / "own" / "server.key").write_bytes(b"half of it")
        assert not given.credentials.refresh()
        before = given.credentials.expires_at
        write(tmp_path / "own", pairs)
        assert given.credentials.refresh()
        assert given.credentials.expires_at.keys() == before.keys()
        assert await one.bind(second, "n") == ""
        renewed = Credentials(tmp_path / "own")
        assert "200" in await bind(one.url, renewed.client, second)


async def test_read_only_paths_need_no_certificate_when_they_are_open(tmp_path: Path) -> None:
    """On a port of its own."""

    async with scheduler(NODE, access=access(tmp_path / "own")) as (_, one):
        for closed in (False, True):
            allowed = Access(inspect=not closed, metrics=not closed, credentials=None)
            app = http_server(one.replica, allowed).readable()
            listening = socket.create_server(("127.0.0.1", 0))
            where = url("127.0.0.1", listening.getsockname()[1])
            async with serve_app(app, listening), aiohttp.ClientSession() as session:
                for path, status in (
                    (f"{PREFIX}/inspect", 404 if closed else 200),
                    (f"{PREFIX}/inspect/n", 404 if closed else 200),
                    ("/metrics", 404 if closed else 200),
                    ("/healthz", 200),
                    ("/readyz", 200),
                    (f"{PREFIX}/bind", 404),
                ):
                    async with session.get(where + path) as answer:
                        assert answer.status == status, path
                async with session.post(f"{where}{PREFIX}/bind", json={}) as answer:
                    assert answer.status == 404
        # kube-scheduler's own port has it all.
        async with one.session.get(f"{one.url}{PREFIX}/inspect") as answer:
            assert answer.status == 200
        async with one.session.get(f"{one.url}/metrics") as answer:
            text = await answer.text()
        for name in ("ca", "server", "client"):
            assert f'fenka_scheduler_certificate_expiry_timestamp_seconds{{name="{name}"}}' in text


def test_error_names_the_file_when_a_certificate_is_missing(tmp_path: Path) -> None:
    """It says what to do."""
    with pytest.raises(InvalidCredentials, match=r"ca\.crt cannot be read: .*fenka certificates"):
        Credentials(tmp_path)
    write(tmp_path, due({}, (), datetime.now(UTC)))
    (tmp_path / "client.crt").write_bytes(b"")
    with pytest.raises(InvalidCredentials, match="cannot be used"):
        Credentials(tmp_path)


async def test_kube_scheduler_is_answered_when_handshakes_are_silent(tmp_path: Path) -> None:
    """More connections than handshakes are allowed at a time."""

    async with scheduler(NODE, access=access(tmp_path / "own")) as (server, one):
        host, port = one.url.removeprefix("https://").split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        assert await one.bind(put_pod(server, "p", 4), "n") == ""
        # Those that came first were ended for those that came later.
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            with contextlib.suppress(ConnectionError):
                writer.close()
