"""An API server with TLS that notes who asks, and kubeconfigs for it."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from fenka.cluster.objects import ApiStatus
from fenka.kubernetes.api_client import Api
from fenka.server.certificate_files import AUTHORITY, CLIENT, SERVER, Pair
from fenka.server.certificates import due

NAME = "kubernetes.test"
"""In the server's certificate."""

Json = dict[str, Any]


class TlsServer:
    """Answers all requests. asked: the header Authorization and the client certificate's name of each."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.folder = port, folder
        self.asked: list[tuple[str, str]] = []

    @property
    def cluster(self) -> Json:
        """Return the server as a kubeconfig names it."""
        return {
            "server": f"https://127.0.0.1:{self.port}/",
            "certificate-authority": str(self.folder / "ca.crt"),
            "tls-server-name": NAME,
        }

    async def answer(self, request: web.Request) -> web.Response:
        """Note who asks."""
        assert request.transport is not None
        certificate = request.transport.get_extra_info("peercert") or {}
        names = {key: value for ((key, value),) in certificate.get("subject", ())}
        self.asked.append((request.headers.get("Authorization", ""), names.get("commonName", "")))
        return web.json_response({})


@cache
def pairs() -> dict[str, Pair]:
    """Return certificates of an authority, a server and a client."""
    return due({}, (NAME,), datetime.now(UTC))


@contextlib.asynccontextmanager
async def tls_server(folder: Path) -> AsyncIterator[TlsServer]:
    """Run a server. Its authority (ca.crt) and a client's certificate and key are in the folder."""
    (folder / "ca.crt").write_bytes(pairs()[AUTHORITY].certificate)
    for name in (SERVER, CLIENT):
        (folder / f"{name}.crt").write_bytes(pairs()[name].certificate)
        (folder / f"{name}.key").write_bytes(pairs()[name].key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_cert_chain(folder / f"{SERVER}.crt", folder / f"{SERVER}.key")
    server = TlsServer(0, folder)
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


def write(path: Path, cluster: Json, user: Json | None, **more: Any) -> Path:
    """Write a kubeconfig with one context, and return its path."""
    config: Json = {
        "apiVersion": "v1",
        "kind": "Config",
        "preferences": {},
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": user and [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u" if user else ""}}],
    }
    path.write_text(yaml.safe_dump(config | more))
    return path


async def ask(kubeconfig: Path | None, context: str | None = None) -> None:
    """Send one request."""
    async with await Api.connect(kubeconfig, context) as api:
        await api.get("/api/v1/nodes/n", ApiStatus)
