"""An API server with TLS that notes who asks, and kubeconfigs for it."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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


def plain_pairs() -> dict[str, Pair]:
    """Return certificates of an authority without the extension keyUsage, and of its server and client."""
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in (AUTHORITY, SERVER, CLIENT)}
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.now(UTC)

    def pair(name: str) -> Pair:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(issuer if name == AUTHORITY else subject)
            .issuer_name(issuer)
            .public_key(keys[name].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(name == AUTHORITY, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        )
        certificate = builder.sign(keys[AUTHORITY], hashes.SHA256())
        encoding = serialization.Encoding.PEM
        key = keys[name].private_bytes(
            encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(certificate.public_bytes(encoding), key)

    return {name: pair(name) for name in keys}


@contextlib.asynccontextmanager
async def tls_server(
    folder: Path, given: dict[str, Pair] | None = None
) -> AsyncIterator[TlsServer]:
    """Run a server. Its authority (ca.crt) and a client's certificate and key are in the folder."""
    made = given or pairs()
    (folder / "ca.crt").write_bytes(made[AUTHORITY].certificate)
    for name in (SERVER, CLIENT):
        (folder / f"{name}.crt").write_bytes(made[name].certificate)
        (folder / f"{name}.key").write_bytes(made[name].key)
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
