"""Runs a command in a container by the API server's `exec` over a websocket, as `kubectl exec` does.

Wire facts: the subprotocol v5.channel.k8s.io. Each message begins with a byte that names its channel; the
message 255, CHANNEL closes one. v4 is the same without closing.
"""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Self

import aiohttp
import msgspec

from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class _End(msgspec.Struct):
    """How the command ended. status: Success or Failure."""

    status: str = ""
    message: str = ""
    reason: str = ""
    details: _Details | None = None


class PodExec:
    """A command that runs in a container. `async with` ends the connection."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._end: _End | None = None

    @classmethod
    async def start(
        cls, api: Api, pod_path: str, container: str, command: Sequence[str], *, tty: bool
    ) -> Self:
        """Start a command with its standard input open. Raises ApiError, ApiUnreachable."""
        query = [("container", container), ("stdin", "true"), ("stdout", "true")]
        query += [("tty", "true")] if tty else [("stderr", "true")]
        query += [("command", word) for word in command]
        return cls(await api.websocket(f"{pod_path}/exec", query, PROTOCOLS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def send(self, data: bytes) -> None:
        """Send to the command's standard input."""
        await self._socket.send_bytes(bytes([STDIN]) + data)

    async def close_input(self) -> None:
        """End the command's standard input; version 4 of the protocol cannot."""
        if self._socket.protocol == PROTOCOLS[0]:
            await self._socket.send_bytes(bytes([CLOSE, STDIN]))

    async def resize(self, columns: int, lines: int) -> None:
        """Set the size of the command's terminal."""
        size = json.dumps({"Width": columns, "Height": lines}).encode()
        await self._socket.send_bytes(bytes([RESIZE]) + size)

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield STDOUT or STDERR with data until the command ends."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == ERROR:
                self._end = msgspec.json.decode(data, type=_End)
            elif channel in (STDOUT, STDERR) and data:
                yield channel, data

    @property
    def exit_code(self) -> int:
        """Return the command's exit code, after its output. Raises ApiError, ApiUnreachable."""
        end = self._end
        if end is None:
            raise ApiUnreachable("the connection to the container broke off")
        if end.status == "Success":
            return 0
        causes = (end.details.causes if end.details else None) or ()
        code = next((cause.message for cause in causes if cause.reason == "ExitCode"), "")
        if code.isdecimal():
            return int(code)
        raise ApiError(0, end.reason, end.message)
