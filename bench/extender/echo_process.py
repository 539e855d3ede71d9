"""The baseline: a bare aiohttp handler that decodes a request and returns its node names.

That is the cost of HTTP itself. ``echo_process.py`` prints its port once it serves.
"""

import asyncio
import gc
from typing import Any

import msgspec
from aiohttp import web


class Arguments(msgspec.Struct, rename="pascal"):
    """kube-scheduler's arguments."""

    pod: dict[str, Any] | None = None
    node_names: list[str] = []


async def echo(request: web.Request) -> web.Response:
    """Return all nodes as feasible."""
    arguments = msgspec.json.decode(await request.read(), type=Arguments)
    answer = {"NodeNames": arguments.node_names, "FailedNodes": {}, "Error": ""}
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def main() -> None:
    """Serve until killed."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/{path:.*}", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gc.freeze()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
