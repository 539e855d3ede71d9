"""The server of a device plugin."""

import asyncio
import contextlib
from pathlib import Path

import grpc.aio
import pytest

from fenka.node.kubelet.client import Kubelet
from fenka.node.kubelet.plugin import Plugin


class SlowServer:
    """A server whose start takes for ever."""

    def __init__(self) -> None:
        self.starting, self.stopped = asyncio.Event(), False

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Take no notice of the handlers."""

    def add_insecure_port(self, address: str) -> None:
        """Take no notice of the address."""

    async def start(self) -> None:
        """Never return."""
        self.starting.set()
        await asyncio.Event().wait()

    async def stop(self, grace: float | None) -> None:
        """Remember the call."""
        assert grace is None
        self.stopped = True


async def test_server_is_stopped_when_the_program_ends_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC writes into freed memory if a server that was started is dropped."""
    server = SlowServer()
    monkeypatch.setattr(grpc.aio, "server", lambda: server)
    kubelet = Kubelet(tmp_path, tmp_path / "pod-resources.sock")
    kubelet.socket.touch()
    plugin = Plugin("aliyun.com/gpu-mem", "fenka-gpu-mem", kubelet, None, lambda: None)
    await plugin.advertise([("0", True)])
    task = asyncio.create_task(plugin.run())
    await server.starting.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert server.stopped
