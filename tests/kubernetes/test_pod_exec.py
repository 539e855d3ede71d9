"""Commands in containers over a websocket: streams, exit codes, and connections that break off."""

import json

import pytest
from aiohttp import web

from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.kubernetes.pod_exec import STDERR, STDOUT, PodExec
from tests.builders import Json
from tests.fakes.api_server import api_server

POD = "/api/v1/namespaces/default/pods/p"


def ended(status: Json) -> bytes:
    """Return the message with which a command ends."""
    return b"\x03" + json.dumps(status).encode()


def exited(code: int) -> bytes:
    """Return that of a command with this exit code."""
    cause = {"reason": "ExitCode", "message": str(code)}
    return ended({"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}})


async def test_exec_carries_both_outputs_and_the_exit_code() -> None:
    """Each message names its channel; an empty one is how the server begins."""
    received: list[bytes] = []

    async def program(socket: web.WebSocketResponse) -> None:
        received.append(await socket.receive_bytes())
        received.append(await socket.receive_bytes())
        received.append(await socket.receive_bytes())
        for message in (b"\x01", b"\x01out", b"\x02error", exited(7)):
            await socket.send_bytes(message)

    async with api_server() as server, server.api() as api:
        server.program = program
        async with await PodExec.start(api, POD, "main", ["sh", "-c", "a b"], tty=False) as command:
            await command.send(b"typed")
            await command.resize(80, 24)
            await command.close_input()
            output = [each async for each in command.output()]
        assert command.exit_code == 7
    assert output == [(STDOUT, b"out"), (STDERR, b"error")]
    assert received == [b"\x00typed", b'\x04{"Width": 80, "Height": 24}', b"\xff\x00"]
    (request,) = server.requests
    assert request.endswith("&command=sh&command=-c&command=a+b")
    assert "stderr=true" in request
    assert "tty" not in request


async def test_exec_asks_for_a_terminal_when_there_is_one() -> None:
    """A terminal has one output only."""

    async def program(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(ended({"status": "Success"}))

    async with api_server() as server, server.api() as api:
        server.program = program
        async with await PodExec.start(api, POD, "main", ["sh"], tty=True) as command:
            assert [each async for each in command.output()] == []
        assert command.exit_code == 0
    assert "tty=true" in server.requests[0]
    assert "stderr" not in server.requests[0]


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (None, ApiUnreachable),
        (
            ended({"status": "Failure", "reason": "InternalError", "message": "no sh there"}),
            ApiError,
        ),
    ],
)
async def test_exec_fails_when_the_command_does_not_end(
    last: bytes | None, error: type[Exception]
) -> None:
    """The connection breaks off, or the command cannot be started."""

    async def program(socket: web.WebSocketResponse) -> None:
        if last is not None:
            await socket.send_bytes(last)

    async with api_server() as server, server.api() as api:
        server.program = program
        async with await PodExec.start(api, POD, "main", ["sh"], tty=False) as command:
            assert [each async for each in command.output()] == []
        with pytest.raises(error):
            print(command.exit_code)


async def test_exec_is_an_error_when_the_api_server_refuses() -> None:
    """Without the right to it."""
    async with api_server() as server, server.api() as api:
        with pytest.raises(ApiError) as refused:
            await PodExec.start(api, POD, "main", ["sh"], tty=False)
    assert refused.value.status == 403
