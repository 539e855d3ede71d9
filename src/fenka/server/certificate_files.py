"""The certificates of programs: their names, their pairs as data, and the files of a mounted Secret.

It imports nothing of fenka's extras, which only makers of certificates need.
"""

import asyncio
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fenka.core.errors import FenkaError

log = logging.getLogger(__name__)

AUTHORITY_FILE, SERVER_FILE, CLIENT_FILE = "ca", "server", "client"

CHECK_INTERVAL_S = 30.0


class InvalidCredentials(FenkaError):
    """A certificate cannot be used."""


class CertificateFiles:
    """The files of one program. Subclasses have their names, and what is made of them.

    The directory is a mounted Secret: the kubelet replaces its files while the program runs.

    Raises InvalidCredentials.
    """

    names: tuple[str, ...]
    """The names of certificates with keys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read = self._contents()
        self._try(self._read)

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
            self._try(contents)
        except InvalidCredentials as why:
            # The kubelet may be replacing them right now.
            log.warning("using the certificates that were loaded before: %s", why)
            return False
        self._read = contents
        log.info("loaded renewed certificates")
        return True

    def load(self, contents: Mapping[str, bytes]) -> None:
        """Use the files. contents: by file name. Raises OSError, ValueError; nothing is changed then."""
        raise NotImplementedError

    def path(self, name: str, kind: str) -> Path:
        """Return the path of a certificate (crt) or its key."""
        return self.directory / f"{name}.{kind}"

    def context(self, protocol: int, name: str, authority: str | None = None) -> ssl.SSLContext:
        """Return a context that shows a certificate and requires one. Raises OSError, ValueError.

        Args:
            protocol: ssl.PROTOCOL_TLS_SERVER or ssl.PROTOCOL_TLS_CLIENT.
            name: the certificate that is shown.
            authority: certificates in PEM that sign what is required; None for those of the files.
        """
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        own = self.path(AUTHORITY_FILE, "crt") if authority is None else None
        context.load_verify_locations(own, cadata=authority)
        context.load_cert_chain(self.path(name, "crt"), self.path(name, "key"))
        return context

    def expiries(self, contents: Mapping[str, bytes]) -> dict[str, float]:
        """Return when certificates expire, in seconds since 1970, by name. Raises ValueError."""
        # The help of programs without certificates must not need it.
        from cryptography import x509

        return {
            name: x509.load_pem_x509_certificate(
                contents[f"{name}.crt"]
            ).not_valid_after_utc.timestamp()
            for name in (AUTHORITY_FILE, *self.names)
        }

    def _try(self, contents: Mapping[str, bytes]) -> None:
        try:
            self.load(contents)
        except (OSError, ValueError) as why:
            raise InvalidCredentials(
                f"the certificates in {self.directory} cannot be used: {why}"
            ) from None

    def _contents(self) -> dict[str, bytes]:
        files = [f"{AUTHORITY_FILE}.crt"]
        files += [f"{name}.{kind}" for name in self.names for kind in ("crt", "key")]
        try:
            return {file: (self.directory / file).read_bytes() for file in files}
        except OSError as why:
            raise InvalidCredentials(
                f"the certificate file {why.filename} cannot be read: {why.strerror}; make it with "
                "`fenka certificates --make` (docs/do/certificates.md)"
            ) from None


AUTHORITY, SERVER, CLIENT = "authority", "server", "client"
SERVER_NAME = "fenka-scheduler"
"""A name in every certificate of the extender, whatever the installation is called."""
CLIENT_NAME = "fenka-scheduler-client"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


class InvalidPair(FenkaError):
    """The data is not a certificate with its key."""


def authority_expiry(certificate: bytes) -> datetime | None:
    """Return when the certificate of an authority, in PEM, expires; None if it is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate.decode("ascii"))
    except (ssl.SSLError, ValueError):
        return None
    ends = [str(known["notAfter"]) for known in context.get_ca_certs()]
    return min(
        (datetime.fromtimestamp(ssl.cert_time_to_seconds(end), UTC) for end in ends), default=None
    )
