"""Each fence of the dashboard alone: all others would let the request through."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator

import aiohttp
import pytest

from fenka.dashboard.guard import HEADERS, MAX_BODY_BYTES
from fenka.dashboard.page_server import MAX_STREAMS
from tests.dashboard.machines import TOKEN, machine, program, served

MACHINE = machine(program("a"))


async def test_request_is_answered_when_it_has_the_token() -> None:
    """Without this, refusals would prove nothing."""
    async with served(MACHINE) as page:
        own = {"Origin": f"http://127.0.0.1:{page.port}"}
        for headers in ({}, own):
            status, body, _ = await page.ask("api/world", headers=headers)
            assert (status, json.loads(body)["type"]) == (200, "world")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "127.0.0.2",
        "a@127.0.0.1",
        "",
        "[::1",
    ],
)
async def test_request_is_misdirected_when_its_host_is_foreign(host: str) -> None:
    """A name that was rebound to this machine is not served, with the token or without, the page neither."""
    async with served(MACHINE) as page:
        for path in ("api/world", ""):
            status, body, _ = await page.ask(path, headers={"Host": host})
            assert status == 421
            assert "--host NAME" in json.loads(body)["problem"]


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}", "127.0.0.1:9"]
)
async def test_request_is_answered_when_its_host_is_this_machine(host: str) -> None:
    """A tunnel may have any port."""
    async with served(MACHINE) as page:
        status, *_ = await page.ask("api/world", headers={"Host": host.format(port=page.port)})
        assert status == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "",
        "http://127.0.0.1:{other}",
        "http://localhost:{port}",
        "file://",
    ],
)
async def test_request_is_refused_when_its_origin_is_foreign(origin: str) -> None:
    """So is a page of another port of this machine, which has the same cookies, if there were any."""
    async with served(MACHINE) as page:
        headers = {"Origin": origin.format(port=page.port, other=page.port + 1)}
        assert (await page.ask("api/world", headers=headers))[0] == 403


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], f"{TOKEN}t", "ä", TOKEN.upper()])
async def test_request_is_refused_when_its_token_is_not_this_one(token: str) -> None:
    """None, a wrong one, and one of an earlier start."""
    async with served(MACHINE) as page:
        for path in ("api/world", "api/live", "api/program/id-a", "api/nothing"):
            status, body, _ = await page.ask(path, token="", headers=_header(token))
            assert status == 401
            assert b"fenka dashboard" in body


def _header(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}, {"Cookie": f"token={TOKEN}"}],
)
async def test_token_counts_only_as_a_bearer(headers: dict[str, str]) -> None:
    """Browsers send neither that header nor the address's fragment by themselves."""
    async with served(MACHINE) as page:
        assert (await page.ask("api/world", token="", headers=headers))[0] == 401
        assert (await page.ask(f"api/world?token={TOKEN}", token=""))[0] == 401


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
async def test_method_is_refused_when_it_is_neither_get_nor_post(method: str) -> None:
    """OPTIONS as well: no other site may ask for anything."""
    async with served(MACHINE) as page:
        for path in ("api/world", "api/stop/id-a", ""):
            status, _, headers = await page.ask(path, method)
            assert status == 405
            assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_post_is_refused_when_a_form_could_send_it(kind: str) -> None:
    """Only a page of the same origin can send application/json without being asked first."""
    async with served(MACHINE) as page:
        answer = await page.ask("api/stop/id-a", "POST", data=b"{}", headers={"Content-Type": kind})
        assert answer[0] == 415


@pytest.mark.parametrize("path", ["", "api/world", "api/live", "api/none", "none", "api/history"])
@pytest.mark.parametrize("token", ["", TOKEN])
async def test_every_answer_has_the_headers(path: str, token: str) -> None:
    """Also those that refuse: no answer may be framed, sniffed, or run anything of another origin."""
    async with served(MACHINE) as page:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{page.port}/{path}"
        async with page.session.get(url, headers=headers) as answer:
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            assert "Server" not in answer.headers
            assert "Set-Cookie" not in answer.headers


async def test_body_is_refused_when_it_is_too_large() -> None:
    """Whether it says so or not."""
    async with served(MACHINE) as page:
        large = b'{"end":["' + b"x" * MAX_BODY_BYTES + b'"]}'
        headers = {"Content-Type": "application/json"}
        assert (await page.ask("api/what-if", "POST", data=large, headers=headers))[0] == 413

        async def parts() -> AsyncGenerator[bytes]:
            for place in range(0, len(large), 1000):
                yield large[place : place + 1000]

        assert (await page.ask("api/what-if", "POST", data=parts(), headers=headers))[0] == 413


async def test_stream_is_refused_when_as_many_as_may_be_are_open() -> None:
    """The next one is told; one that ends makes room."""
    async with served(MACHINE) as page:
        url, headers = (
            f"http://127.0.0.1:{page.port}/api/live",
            {"Authorization": f"Bearer {TOKEN}"},
        )
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = [await session.get(url, headers=headers) for _ in range(MAX_STREAMS)]
            assert {stream.status for stream in streams} == {200}
            assert (await page.ask("api/live"))[0] == 429
            assert (await page.ask("api/world"))[0] == 200
            streams[0].close()
            while (again := await session.get(url, headers=headers)).status == 429:
                page.live.show(MACHINE)  # It is noticed at the next message.
                await asyncio.sleep(0)
            assert again.status == 200


async def test_name_stays_text_when_it_is_html() -> None:
    """It is JSON, by its type and in its quotes, and no browser takes it for a page."""
    name = "<img src=x onerror=alert(1)>"
    async with served(machine(program(name))) as page:
        status, body, headers = await page.ask("api/world")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(body)["programs"][0]["name"] == name


async def test_nothing_of_the_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither at answers nor at refusals."""
    caplog.set_level(logging.DEBUG)
    async with served(MACHINE) as page:
        await page.ask("api/world")
        await page.ask("api/world", token=TOKEN[:-1])
        await page.ask(f"api/world?token={TOKEN}", token="")
    assert TOKEN[:-1] not in caplog.text


async def test_server_proves_that_it_has_the_token_when_it_is_challenged() -> None:
    """Without being told the token: an HMAC of what the page has drawn."""
    challenge = "0123456789abcdef" * 2
    async with served(MACHINE) as page:
        status, body, _ = await page.ask(f"api/proof?challenge={challenge}", token="")
        expected = hmac.new(TOKEN.encode(), f"fenka dashboard {challenge}".encode(), "sha256")
        assert (status, json.loads(body)) == (200, {"proof": expected.hexdigest()})
        for wrong in ("", "0" * 31, "0" * 65, "G" * 32, "%00" * 32):
            assert (await page.ask(f"api/proof?challenge={wrong}", token=""))[0] == 400
        for path in ("api/proof/", "api/proofs", "api/proof/../world"):
            assert (await page.ask(path, token=""))[0] in (401, 404)
