"""Names of fenka's certificates, and their pairs as data.

It imports nothing of fenka's extras, which only makers of certificates need.
"""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

from fenka.core.errors import FenkaError

AUTHORITY, SERVER, CLIENT, ADAPTER = "authority", "server", "client", "adapter"
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
