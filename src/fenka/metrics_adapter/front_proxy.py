"""Whose requests are answered: the API server's, by its certificate as a front proxy.

Wire facts: each API server writes the ConfigMap kube-system/extension-apiserver-authentication. It has the
authority of that certificate, and its common names, as a JSON list. An empty list means any name.

The API server authenticates and authorizes each request before it forwards it, by the same rules as for its
own resources. So a request that has this certificate is authorized, and who sent it is not read. Requests
without it are refused in the TLS handshake, whoever sends them.
"""

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fenka.cluster.objects import ConfigMap
from fenka.core.errors import FenkaError
from fenka.kubernetes.certificate_files import AUTHORITY, SERVER, CertificateFiles

CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
_AUTHORITY_KEY = "requestheader-client-ca-file"
_NAMES_KEY = "requestheader-allowed-names"


class NoFrontProxy(FenkaError):
    """The API server has no aggregation layer."""


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """The API server as a client.

    Attributes:
        authority: Certificates in PEM that sign its certificate.
        names: The common names that it may have; empty for any.
    """

    authority: str
    names: frozenset[str]

    def accepts(self, subject: Iterable[Iterable[tuple[str, str]]]) -> bool:
        """Return whether a verified certificate is the front proxy's. subject: as in ssl's getpeercert."""
        pairs = {pair for part in subject for pair in part}
        return not self.names or any(("commonName", name) in pairs for name in self.names)


def read_front_proxy(config_map: ConfigMap) -> FrontProxy:
    """Return what the API server writes of itself. Raises NoFrontProxy."""
    authority = config_map.data.get(_AUTHORITY_KEY, "")
    if not authority.strip():
        raise NoFrontProxy(
            "the API server has no aggregation layer: set its --requestheader-client-ca-file and "
            "--proxy-client-cert-file"
        )
    try:
        names = msgspec.json.decode(config_map.data.get(_NAMES_KEY) or "[]", type=frozenset[str])
    except msgspec.DecodeError as error:
        raise NoFrontProxy(
            f"{_NAMES_KEY} of {CONFIG_MAP.rpartition('/')[2]} is invalid: {error}"
        ) from error
    return FrontProxy(authority, names)


class ServingCertificate(CertificateFiles):
    """The adapter's certificate.

    Attributes:
        context: For TLS with the front proxy only.
        authority: The certificate of the authority that signed it, in PEM.
    """

    names = (SERVER,)
    context: ssl.SSLContext
    authority: bytes

    def __init__(self, directory: Path, front_proxy: FrontProxy) -> None:
        """Raises InvalidCredentials."""
        self.front_proxy = front_proxy
        super().__init__(directory)

    def load(self, contents: Mapping[str, bytes]) -> None:
        """Make the context of TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.front_proxy.authority)
        context.load_cert_chain(self.path(SERVER, "crt"), self.path(SERVER, "key"))
        self.context, self.authority = context, contents[f"{AUTHORITY}.crt"]
