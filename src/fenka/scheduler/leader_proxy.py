"""Forwards kube-scheduler's calls from a replica that does not lead to the one that does.

So the Service may pick any replica, and a node with any of them can be drained. A call is forwarded once: it
is answered where it arrives, whichever replica leads by then.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from fenka.core.errors import FenkaError
from fenka.server import certificate_files


class Credentials(certificate_files.CertificateFiles):
    """The certificates of one replica. Raises InvalidCredentials."""

    names = certificate_files.SERVER_FILE, certificate_files.CLIENT_FILE
    server: ssl.SSLContext
    """For calls to this replica: callers must have a certificate of the same authority."""
    client: ssl.SSLContext
    """For calls to another replica."""
    expires_at: dict[str, float]
    """When certificates expire, in seconds since 1970, by name."""

    def load(self, contents: Mapping[str, bytes]) -> None:
        """Make the contexts of TLS."""
        server = self.context(ssl.PROTOCOL_TLS_SERVER, certificate_files.SERVER_FILE)
        client = self.context(ssl.PROTOCOL_TLS_CLIENT, certificate_files.CLIENT_FILE)
        # kube-scheduler never resumes a session, so tickets would be a third of what a handshake costs.
        server.num_tickets = 0
        self.expires_at = self.expiries(contents)
        self.server, self.client = server, client


FORWARDED = "Fenka-Forwarded"
"""Header of a forwarded call; its value is the replica that forwarded it."""

TIMEOUT_S = 4.8
"""More than the leader takes, less than the 5 s that kube-scheduler waits."""
CONNECT_TIMEOUT_S = 1.0
"""A node that is gone does not even refuse connections, and kube-scheduler waits for filter meanwhile."""


class LeaderUnreachable(FenkaError):
    """The leader does not answer."""


class LeaderProxy:
    """Keeps connections to the leader open. `running` is for aiohttp's cleanup_ctx."""

    def __init__(self, identity: str, credentials: Credentials | None = None) -> None:
        """credentials: how this replica and the leader know each other; None for plain HTTP."""
        self._identity, self._credentials = identity, credentials
        self._session: aiohttp.ClientSession | None = None

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """Keep the connections while the server runs."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            yield

    async def post(self, url: str, body: bytes) -> web.Response:
        """The leader's answer, as it is. Raises Unreachable."""
        assert self._session is not None
        try:
            headers = {FORWARDED: self._identity}
            tls: dict[str, Any] = {}
            if self._credentials is not None:
                # The leader is called at its pod's address, which is in no certificate.
                tls = {
                    "ssl": self._credentials.client,
                    "server_hostname": certificate_files.SERVER_NAME,
                }
            async with self._session.post(url, data=body, headers=headers, **tls) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise LeaderUnreachable(str(why) or "no answer in time") from None
