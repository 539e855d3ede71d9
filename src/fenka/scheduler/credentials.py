"""The certificates of kube-scheduler and the replicas, as TLS uses them."""

import ssl
from collections.abc import Mapping

from fenka.kubernetes.certificate_files import AUTHORITY, CLIENT, SERVER, CertificateFiles


class Credentials(CertificateFiles):
    """The certificates of one replica. Raises InvalidCredentials."""

    names = SERVER, CLIENT
    server: ssl.SSLContext
    """For calls to this replica: callers must have a certificate of the same authority."""
    client: ssl.SSLContext
    """For calls to another replica."""
    expires_at: dict[str, float]
    """When certificates expire, in seconds since 1970, by name."""

    def load(self, contents: Mapping[str, bytes]) -> None:
        """Make the contexts of TLS."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        # kube-scheduler never resumes a session, so tickets would be a third of what a handshake costs.
        server.num_tickets = 0
        for context, name in ((server, SERVER), (client, CLIENT)):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(self.path(AUTHORITY, "crt"))
            context.load_cert_chain(self.path(name, "crt"), self.path(name, "key"))
        self.expires_at = self.expiries(contents)
        self.server, self.client = server, client
