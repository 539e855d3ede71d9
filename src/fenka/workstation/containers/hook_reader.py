"""Reads what hooks send, by a process for each message: strangers' descriptors can hold that one only."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fenka.procfs import start_ticks
from fenka.workstation.containers import hook_receiver
from fenka.workstation.containers.container_request import InvalidContainer

TIMEOUT_S = 10.0
"""Until the process has read a message, which takes 20 ms."""

REAP_S = 2.0
"""Until the process of a user's last message has ended."""


@dataclass(frozen=True, slots=True)
class HookMessage:
    """The content of a hook's message.

    Attributes:
        device: The name of the device that the container has.
        state, config: The OCI state and config.json; one byte longer than allowed if there was more.
        pid, start_ticks: The container's first process.
        descriptor: Its pidfd, to be closed.
    """

    device: bytes
    state: bytes
    config: bytes
    pid: int
    start_ticks: int
    descriptor: int


class HookReader:
    """Reads the messages of one daemon's hooks. A user has one process for it, and root any number."""

    def __init__(self) -> None:
        self._ending: dict[int, asyncio.Task[None]] = {}
        """By process."""
        self._last: dict[int, int] = {}
        """The process of a user's last message."""

    async def read(self, connection: int, account: int) -> HookMessage:
        """Return the message that a connection's descriptor has.

        Raises InvalidContainer, OSError.
        """
        last = self._ending.get(self._last.get(account, 0))
        if account and last is not None and (await asyncio.wait({last}, timeout=REAP_S))[1]:
            raise InvalidContainer(
                "a file of an earlier request has not been closed yet: end the program that serves its "
                "file system"
            )
        process = subprocess.Popen(
            [sys.executable, "-IS", Path(hook_receiver.__file__)],
            stdin=connection,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        try:
            content = await _output(process)
        finally:
            process.kill()
            self._last[account] = process.pid
            task = asyncio.create_task(self._reap(process, account))
            self._ending[process.pid] = task
        return _decode(content)

    async def _reap(self, process: subprocess.Popen[bytes], account: int) -> None:
        """Wait for the end of a process, which an open file of a stranger's may delay for ever."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        process.wait()
        del self._ending[process.pid]
        if self._last.get(account) == process.pid:
            del self._last[account]


async def _output(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read()
    finally:
        transport.close()


def _decode(content: bytes) -> HookMessage:
    """Return a message. Raises InvalidContainer."""
    if len(content) < hook_receiver.HEADER.size:
        raise InvalidContainer("this is no request of fenka-hook")
    status, *sizes, pid, started = hook_receiver.HEADER.unpack_from(content)
    if status == hook_receiver.MALFORMED:
        raise InvalidContainer("this is no request of fenka-hook")
    if status == hook_receiver.NOT_SEALED:
        raise InvalidContainer("this is no request of fenka-hook: its files are not sealed")
    parts, at = list[bytes](), hook_receiver.HEADER.size
    for size in sizes:
        parts.append(content[at : at + size])
        at += size
    descriptor = _open_process(pid, started) if status == hook_receiver.OK else None
    if descriptor is None:
        raise InvalidContainer(
            "the container's process is gone, or outside of what the fenka daemon sees"
        )
    device, state, config = parts
    return HookMessage(device, state, config, pid, started, descriptor)


def _open_process(pid: int, started: int) -> int | None:
    """Return a pidfd; None if the process that was started then has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if start_ticks(pid) == started:
        return descriptor
    os.close(descriptor)
    return None
