"""The certificates by which kube-scheduler and the replicas know each other, reloaded when they are renewed.

The directory is a mounted Secret: the kubelet exchanges its files while the program runs.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from cryptography import x509

from fenka.core.errors import FenkaError

log = logging.getLogger(__name__)

AUTHORITY, SERVER, CLIENT = "ca", "server", "client"
FILES = tuple(f"{name}.{kind}" for name in (SERVER, CLIENT) for kind in ("crt", "key"))
SERVER_NAME = "fenka-scheduler"
"""A name that every server certificate has, whatever the installation is called."""

LOOK_S = 30.0


class InvalidCredentials(FenkaError):
    """The certificates cannot be used; the message says which and why."""


class Credentials:
    """Those of one replica. Raises BadCredentials."""

    server: ssl.SSLContext
    """For callers: they must have a certificate of the same authority."""
    client: ssl.SSLContext
    """For calling another replica."""
    expires_at: dict[str, float]
    """Seconds since 1970, by certificate."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = self._contents()
        self._load()

    async def run(self) -> None:
        """Until cancelled: look for renewed certificates."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.refresh()

    def refresh(self) -> bool:
        """Load the certificates if they have changed; whether they have. What cannot be used is not taken."""
        try:
            found = self._contents()
            if found == self._read:
                return False
            self._load()
        except InvalidCredentials as why:
            # The kubelet may be exchanging them this moment.
            log.warning("the certificates in use are kept: %s", why)
            return False
        self._read = found
        log.info("certificates were renewed")
        return True

    def _contents(self) -> dict[str, bytes]:
        try:
            return {
                name: (self._directory / name).read_bytes() for name in (f"{AUTHORITY}.crt", *FILES)
            }
        except OSError as why:
            raise InvalidCredentials(
                f"the certificate file {why.filename} cannot be read: {why.strerror}; `fenka certificates "
                "--make` makes them, docs/scheduler.md says how"
            ) from None

    def _load(self) -> None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        expires = {}
        try:
            for context, name in ((server, SERVER), (client, CLIENT)):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_verify_locations(self._directory / f"{AUTHORITY}.crt")
                context.load_cert_chain(
                    self._directory / f"{name}.crt", self._directory / f"{name}.key"
                )
            for name in (AUTHORITY, SERVER, CLIENT):
                found = x509.load_pem_x509_certificate(
                    (self._directory / f"{name}.crt").read_bytes()
                )
                expires[name] = found.not_valid_after_utc.timestamp()
        except (OSError, ValueError) as why:
            raise InvalidCredentials(
                f"the certificates in {self._directory} cannot be used: {why}"
            ) from None
        self.server, self.client, self.expires_at = server, client, expires
