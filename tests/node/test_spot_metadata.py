"""Metadata services on loopback: notices, none, tokens, and answers that no service should give."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fenka.cluster.autoscaling import decode_time
from fenka.node import spot
from fenka.node.spot import (
    ALIBABA,
    AWS,
    InvalidAddress,
    MetadataClient,
    MetadataService,
    MetadataUnavailable,
)

TIME = "2015-01-05T18:02:00Z"
AT = 1420480920.0
"""TIME: 16,440 days are 1,420,416,000 s, and 18 h 2 min are 64,920 s."""
ACTION = f'{{"action": "terminate", "time": "{TIME}"}}'
OK, ABSENT = "HTTP/1.1 200 OK\r\n", "HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nno!"


@dataclass
class Service:
    """A metadata service.

    Attributes:
        notice: the raw answer to requests with the current token.
        token: the raw answer to requests for one.
        requests: all that were received.
        handler: answers instead, if there is one.
    """

    notice: str | bytes = ABSENT
    token: str | bytes = f"{OK}Content-Length: 6\r\n\r\nsecret"
    requests: list[str] = field(default_factory=list)
    handler: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
    address: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        with contextlib.suppress(ConnectionError):
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            if self.handler is not None:
                await self.handler(writer)
            else:
                answer = self.token if request.startswith("PUT") else self._notice(request)
                writer.write(answer if isinstance(answer, bytes) else answer.encode())
                await writer.drain()
        writer.close()

    def _notice(self, request: str) -> str | bytes:
        if "-metadata-token: secret\r\n" in request:
            return self.notice
        return "HTTP/1.1 401 Unauthorized\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(notice: str | bytes = ABSENT) -> AsyncIterator[Service]:
    """Yield a service that runs."""
    service = Service(notice)
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    service.address = f"{host}:{port}"
    async with server:
        yield service


def answer(body: str) -> str:
    """Return an answer with status 200."""
    return f"{OK}Content-Length: {len(body.encode())}\r\n\r\n{body}"


async def refusal(service: Service, kind: MetadataService = ALIBABA) -> str:
    """Return why a client cannot use the service."""
    with pytest.raises(MetadataUnavailable) as raised:
        await MetadataClient(kind, service.address).reclaim_at()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "body", "at"),
    [
        (AWS, ACTION, AT),
        (AWS, ACTION.replace("terminate", "hibernate"), AT),
        (ALIBABA, TIME, AT),
        (ALIBABA, f"{TIME}\n", AT),
        (ALIBABA, "2015-01-05T20:02:00+02:00", AT),
        (ALIBABA, "", None),
        (AWS, " ", None),
    ],
)
async def test_notice_is_read_when_the_service_has_one(
    kind: MetadataService, body: str, at: float | None
) -> None:
    """Both clouds' forms; an empty answer is none."""
    async with serving(answer(body)) as service:
        assert await MetadataClient(kind, service.address).reclaim_at() == at
    token, notice = service.requests
    assert token.startswith("PUT /latest/api/token HTTP/1.0\r\n")
    assert f"{kind.header}-ttl-seconds: 21600\r\n" in token
    assert notice.startswith(f"GET {kind.path} HTTP/1.0\r\n")


async def test_notice_is_none_when_the_service_answers_404() -> None:
    """That is the usual answer."""
    async with serving() as service:
        assert await MetadataClient(AWS, service.address).reclaim_at() is None


async def test_body_is_read_to_the_end_when_it_has_no_length() -> None:
    """As services of HTTP/1.0 send it."""
    async with serving(f"HTTP/1.0 200 OK\r\n\r\n{TIME}") as service:
        assert await MetadataClient(ALIBABA, service.address).reclaim_at() == AT


async def test_token_is_used_again_until_it_is_refused() -> None:
    """An expired one is replaced within the same look."""
    async with serving(answer(TIME)) as service:
        client = MetadataClient(ALIBABA, service.address)
        await client.reclaim_at()
        await client.reclaim_at()
        assert [each[:3] for each in service.requests] == ["PUT", "GET", "GET"]
        client._token = b"expired"
        assert await client.reclaim_at() == AT
        assert [each[:3] for each in service.requests[3:]] == ["GET", "PUT", "GET"]


@pytest.mark.parametrize(
    ("notice", "why"),
    [
        (f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n{TIME}", "status 302"),
        ("HTTP/1.1 500 Oh\r\n\r\n", "status 500"),
        ("", "not answer in HTTP"),
        ("SSH-2.0-OpenSSH\r\n\r\n", "not answer in HTTP"),
        (f"{OK}Content-Length: 30\r\n\r\n{TIME}", "not answer in HTTP"),
        (f"{OK}Content-Length: 5000\r\n\r\n{TIME}", "not answer in HTTP"),
        (f"{OK}{'x' * 9000}\r\n\r\n", "not answer in HTTP"),
        (f"{OK}\r\n{'x' * 100_000}", "not answer in HTTP"),
        (answer("x" * 4000), "'xxx"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe", "not answer in HTTP"),
        (answer("2015-01-05 18:02:00"), "is no time"),
        (answer("2015-01-05T18:02:00"), "is no time"),
        (answer("2015-13-05T18:02:00Z"), "is no time"),
        (answer("٢٠١٥-01-05T18:02:00Z"), "is no time"),
        (answer("soon"), "is no time"),
        (f"{OK}Transfer-Encoding: chunked\r\n\r\n14\r\n{TIME}\r\n0\r\n\r\n", "is no time"),
    ],
)
async def test_service_is_unavailable_when_its_answer_is_none(
    notice: str | bytes, why: str
) -> None:
    """The sentence names the service and says why; it is short whatever was sent."""
    async with serving(notice) as service:
        sentence = await refusal(service)
    assert why in sentence
    assert sentence.startswith(f"Alibaba Cloud's metadata service at {service.address} ")
    assert len(sentence) < 300


@pytest.mark.parametrize("body", ["{}", "[" * 3000, '{"time": 5}', "null", '{"time": "later"}'])
async def test_action_is_invalid_when_it_has_no_time(body: str) -> None:
    """AWS's form is JSON."""
    async with serving(answer(body)) as service:
        assert "invalid notice" in await refusal(service, AWS)


@pytest.mark.parametrize("token", ["", "a\r\nHost: other", "a b", "x" * 2000])
async def test_service_is_unavailable_when_its_token_is_no_token(token: str) -> None:
    """A token becomes part of the next request's head."""
    async with serving() as service:
        service.token = answer(token)
        assert "not answer in HTTP" in await refusal(service)
    assert len(service.requests) == 1


async def test_service_is_unavailable_when_nothing_listens() -> None:
    """As on machines of other clouds."""
    async with serving() as service:
        pass
    assert "cannot be reached: " in await refusal(service)


async def test_service_is_unavailable_when_it_sends_a_byte_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is that of the whole answer, not of a pause."""
    monkeypatch.setattr(spot, "TIMEOUT_S", 0.2)

    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving() as service:
        service.handler = drip
        assert "does not answer within 0.2 s" in await refusal(service)


@pytest.mark.parametrize("address", ["169.254.169.254", "127.0.0.1:8080", "[fd00:ec2::254]:80"])
def test_address_is_accepted_when_it_is_an_ip_address(address: str) -> None:
    """Names are not: whoever answers DNS could answer."""
    MetadataClient(AWS, address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "metadata",
        "http://1.2.3.4",
        "1.2.3.4:0",
        "1.2.3.4:70000",
        "1.2.3",
        "fd00::1",
        "a@1.2.3.4",
    ],
)
def test_address_is_rejected_when_it_is_no_ip_address(address: str) -> None:
    """The sentence says what is expected."""
    with pytest.raises(InvalidAddress, match="expected an IP address"):
        MetadataClient(AWS, address)


def test_times_are_utc_when_they_end_with_z() -> None:
    """The clouds write UTC."""
    assert decode_time(TIME) == AT


_IN_OTHER_NETWORK = f"""
import fcntl, http.server, socket, struct, sys

with socket.socket() as control:  # Set the loopback interface up.
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x1))

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = b"secret" if self.command == "PUT" else b"{TIME}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_PUT = answer
    def log_message(self, *_): pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root enters other network namespaces")
async def test_service_is_asked_in_the_machines_network() -> None:
    """A pod's own network does not lead there: at a hop limit of 1 the service gives it no token."""
    command = ["unshare", "--net", sys.executable, "-c", _IN_OTHER_NETWORK]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(await server.stdout.readline())}"
        network = Path(f"/proc/{server.pid}/ns/net")
        assert await MetadataClient(ALIBABA, address, network).reclaim_at() == AT
        with pytest.raises(MetadataUnavailable, match="cannot be reached"):
            await MetadataClient(ALIBABA, address).reclaim_at()
    finally:
        server.kill()
        await server.wait()
