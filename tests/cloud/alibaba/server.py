"""A fake of Alibaba Cloud over HTTP, as a program and for tests.

    python -m tests.cloud.alibaba.server FOLDER [--host ADDRESS] [--port N] [--command COMMAND …]

FOLDER has `landscape.json` (state.py: Landscape), and may have `faults.json` and `clock`. They may change at
any time. COMMAND is run with `start ID GROUP TYPE ZONE` and with `end ID`, again if it failed. GROUP is the
tag fenka.io/group. The address is printed when calls are answered.

The metadata of an instance, which real ones ask 100.100.100.200 for, is below /metadata/ID.
"""

import argparse
import asyncio
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from aiohttp import web

from tests.cloud.alibaba import ecs, ess
from tests.cloud.alibaba.cloud import Cloud, second
from tests.cloud.alibaba.protocol import Call
from tests.cloud.alibaba.state import Fault, Folder

TICK_S = 1.0
assert ecs.VERSION != ess.VERSION  # importing them registers their actions


class Server:
    """Answers calls, and runs the command that starts and ends machines."""

    def __init__(self, folder: Path, command: Sequence[str] = ()) -> None:
        self.folder, self._command = Folder(folder), tuple(command)
        self._operations: dict[str, asyncio.Task[None]] = {}
        self._tokens: set[str] = set()
        self._closing = asyncio.Event()

    def application(self) -> web.Application:
        """Return what is served."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/", self._call),
                web.put("/metadata/{id}/latest/api/token", self._token),
                web.get(
                    "/metadata/{id}/latest/meta-data/instance/spot/termination-time",
                    self._termination,
                ),
            ]
        )
        return app

    def tick(self) -> None:
        """Let what is due happen, and start and end machines."""
        cloud = Cloud(self.folder, time.time())
        cloud.keep()
        self._operate(cloud)

    async def close(self) -> None:
        """Stop running commands, and answer what is held."""
        self._closing.set()
        for task in self._operations.values():
            task.cancel()
        await asyncio.gather(*self._operations.values(), return_exceptions=True)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        call = Call("POST", request.path, dict(request.query), headers, await request.read())
        fault = self.folder.take_fault(headers.get("x-acs-action", ""))
        if fault is not None and fault.kind in ("throttle", "error"):
            return _refusal(fault)
        if fault is not None and fault.kind == "lose-call":
            return _cut(request)
        cloud = Cloud(self.folder, time.time())
        status, answer = cloud.answer(call, time.time())
        cloud.keep()
        self._operate(cloud)
        if fault is not None and fault.kind == "lose-answer":
            return _cut(request)
        if fault is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), fault.seconds)
        return web.json_response(answer, status=status)

    # ---- machines ----

    def _operate(self, cloud: Cloud) -> None:
        waiting = [name for name, machine in cloud.machines.items() if not machine.started]
        for name in {*waiting, *cloud.state.cloud.gone}:
            if name not in self._operations:
                task = asyncio.ensure_future(self._start_or_end(name))
                self._operations[name] = task
                task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, _: asyncio.Task[None]) -> None:
        del self._operations[name]

    async def _start_or_end(self, name: str) -> None:
        """Run the command for one machine; what failed is run again at the next tick."""
        cloud = Cloud(self.folder, time.time())
        machine = cloud.machines.get(name)
        if machine is None:
            if await self._run("end", name):
                self._change(lambda cloud: cloud.state.cloud.gone.remove(name))
        elif not machine.started:
            key, tags = cloud.key(machine), cloud.state.details[name].tags
            if await self._run("start", name, tags.get("fenka.io/group", ""), key.type, key.zone):
                self._change(lambda cloud: _mark_started(cloud, name))

    def _change(self, change: Callable[[Cloud], None]) -> None:
        cloud = Cloud(self.folder, time.time())
        change(cloud)
        cloud.keep()

    async def _run(self, *words: str) -> bool:
        if not self._command:
            return True
        process = await asyncio.create_subprocess_exec(*self._command, *words)
        return await process.wait() == 0

    # ---- metadata of instances ----

    async def _token(self, request: web.Request) -> web.Response:
        if not request.headers.get("X-aliyun-ecs-metadata-token-ttl-seconds", "").isdigit():
            return web.Response(status=400)
        token = secrets.token_hex(16)
        self._tokens.add(token)
        return web.Response(text=token)

    async def _termination(self, request: web.Request) -> web.Response:
        if request.headers.get("X-aliyun-ecs-metadata-token", "") not in self._tokens:
            return web.Response(status=403)
        machine = Cloud(self.folder, time.time()).machines.get(request.match_info["id"])
        if machine is None or machine.taken_at is None:
            return web.Response(status=404)
        return web.Response(text=second(machine.taken_at))


def _mark_started(cloud: Cloud, name: str) -> None:
    """Do nothing if it ended while it was being started: then it is ended next."""
    if name in cloud.machines:
        cloud.machines[name].started = True


def _refusal(fault: Fault) -> web.Response:
    if fault.kind == "throttle":
        body = {
            "Code": "Throttling.User",
            "Message": "Request was denied due to user flow control.",
        }
        wait = {"x-acs-retry-after": str(int(fault.seconds * 1000))} if fault.seconds else {}
        return web.json_response(body | {"RequestId": "fake"}, status=429, headers=wait)
    body = {
        "Code": "InternalError",
        "Message": "The request processing has failed.",
        "RequestId": "fake",
    }
    return web.json_response(body, status=500)


def _cut(request: web.Request) -> web.Response:
    """Close the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@asynccontextmanager
async def serve(server: Server, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve until the block ends. Yields HOST:PORT."""
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    try:
        yield f"{host}:{runner.addresses[0][1]}"
    finally:
        await server.close()
        await runner.cleanup()


@contextmanager
def serve_in_thread(server: Server) -> Iterator[str]:
    """Serve on loopback in a thread. Yields HOST:PORT."""
    addresses: queue.Queue[str] = queue.Queue()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with serve(server) as address:
            addresses.put(address)
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        yield addresses.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def main() -> None:
    """Serve until the program is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--command", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    server = Server(given.folder, given.command)
    async with serve(server, given.port, given.host) as address:
        print(address, flush=True)
        while True:
            server.tick()
            await asyncio.sleep(TICK_S)


if __name__ == "__main__":
    asyncio.run(main())
