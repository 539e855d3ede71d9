"""Loads the certificates of kube-scheduler and the replicas, and reloads them when they are renewed.

The directory is a mounted Secret: the kubelet replaces its files while the program runs.
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
"""A name in every server certificate, whatever the installation is called."""

CHECK_INTERVAL_S = 30.0


class InvalidCredentials(FenkaError):
    """A certificate cannot be used."""


class Credentials:
    """The certificates of one replica. Raises InvalidCredentials."""

    server: ssl.SSLContext
    """For calls to this replica: callers must have a certificate of the same authority."""
    client: ssl.SSLContext
    """For calls to another replica."""
    expires_at: dict[str, float]
    """When certificates expire, in seconds since 1970, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = self._contents()
        self._load()

    async def run(self) -> None:
        """Look for renewed certificates until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.refresh()

    def refresh(self) -> bool:
        """Load the certificates if they have changed and can be used. Return whether they were loaded."""
        try:
            contents = self._contents()
            if contents == self._read:
                return False
            self._load()
        except InvalidCredentials as why:
            # The kubelet may be replacing them right now.
            log.warning("using the certificates that were loaded before: %s", why)
            return False
        self._read = contents
        log.info("loaded renewed certificates")
        return True

    def _contents(self) -> dict[str, bytes]:
        try:
            return {
                name: (self._directory / name).read_bytes() for name in (f"{AUTHORITY}.crt", *FILES)
            }
        except OSError as why:
            raise InvalidCredentials(
                f"the certificate file {why.filename} cannot be read: {why.strerror}; make it with "
                "`fenka certificates --make` (docs/scheduler.md)"
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
                pem = (self._directory / f"{name}.crt").read_bytes()
                certificate = x509.load_pem_x509_certificate(pem)
                expires[name] = certificate.not_valid_after_utc.timestamp()
        except (OSError, ValueError) as why:
            raise InvalidCredentials(
                f"the certificates in {self._directory} cannot be used: {why}"
            ) from None
        self.server, self.client, self.expires_at = server, client, expires
