"""The API for the API server over HTTPS, whose requests alone are answered, and the API's registration."""

import base64
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from aiohttp import web

from fenka.cluster.objects import ConfigMap, Object, ObjectMeta
from fenka.core.errors import FenkaError
from fenka.kubernetes.api_client import Api, if_accepted
from fenka.metrics_adapter import exposition
from fenka.metrics_adapter.values import Values
from fenka.server.certificate_files import AUTHORITY_FILE, SERVER_FILE, CertificateFiles
from fenka.server.listener import LISTENER

CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
_AUTHORITY_KEY = "requestheader-client-ca-file"
_NAMES_KEY = "requestheader-allowed-names"


class NoFrontProxy(FenkaError):
    """The API server has no aggregation layer."""


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """The API server as a client.

    Each API server writes the ConfigMap kube-system/extension-apiserver-authentication, with the authority
    of its certificate and its common names as a JSON list. An empty list means any name.

    The API server authenticates and authorizes each request before it forwards it, by the same rules as for
    its own resources. So a request that has this certificate is authorized, and who sent it is not read.
    Requests without it are refused in the TLS handshake, whoever sends them.

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
        serving: For TLS with the front proxy only.
        authority: The certificate of the authority that signed it, in PEM.
    """

    names = (SERVER_FILE,)
    serving: ssl.SSLContext
    authority: bytes

    def __init__(self, directory: Path, front_proxy: FrontProxy) -> None:
        """Raises InvalidCredentials."""
        self.front_proxy = front_proxy
        super().__init__(directory)

    def load(self, contents: Mapping[str, bytes]) -> None:
        """Make the context of TLS."""
        self.serving = self.context(
            ssl.PROTOCOL_TLS_SERVER, SERVER_FILE, self.front_proxy.authority
        )
        self.authority = contents[f"{AUTHORITY_FILE}.crt"]


log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0

Answer = Callable[[web.Request], Awaitable[bytes]]


def api_app(values: Values, front_proxy: Callable[[], FrontProxy]) -> web.Application:
    """Return the application with the API."""

    async def resources(_: web.Request) -> bytes:
        return exposition.resource_list()

    async def value(request: web.Request) -> bytes:
        place = request.match_info
        selector = request.query.get("labelSelector", "")
        result = await values.value(place["namespace"], place["metric"], selector)
        return exposition.value_list(place["metric"], result, datetime.now(UTC))

    async def nothing(_: web.Request) -> bytes:
        raise exposition.NoValue(
            "the server could not find the requested resource", exposition.NOT_FOUND
        )

    def handler(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            with request.app[LISTENER].protect(request):
                try:
                    _check_caller(request, front_proxy())
                    return _json(await answer(request))
                except exposition.NoValue as error:
                    return _json(exposition.failure(error.code, str(error)), error.code)
                except Exception:
                    # A bug: this request fails, the next one is served.
                    log.exception("a request failed")
                    sentence = "the metrics adapter failed at this request: its log has the reason"
                    return _json(
                        exposition.failure(exposition.INTERNAL, sentence), exposition.INTERNAL
                    )

        return handle

    app = web.Application()
    app.router.add_get(exposition.PATH, handler(resources))
    app.router.add_get(exposition.PATH + "/namespaces/{namespace}/{metric}", handler(value))
    app.router.add_route("*", "/{path:.*}", handler(nothing))
    return app


def _check_caller(request: web.Request, front_proxy: FrontProxy) -> None:
    """Raise NoValue unless the caller's certificate, which TLS has verified, is the front proxy's."""
    certificate = request.get_extra_info("peercert") or {}
    if not front_proxy.accepts(certificate.get("subject", ())):
        raise exposition.NoValue("only the API server may connect", exposition.FORBIDDEN)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


NAME = f"{exposition.VERSION}.{exposition.GROUP}"
API_SERVICE = f"/apis/apiregistration.k8s.io/v1/apiservices/{NAME}"


class NotRegistered(FenkaError):
    """The API is not this program's; the sentence says whose it is."""


class ServiceReference(Object):
    """The Service that serves an API."""

    namespace: str = ""
    name: str = ""


class APIServiceSpec(Object):
    """The server of an API. ca_bundle: in base64."""

    service: ServiceReference | None = None
    ca_bundle: str = msgspec.field(default="", name="caBundle")


class APIService(Object):
    """The registration of an API."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: APIServiceSpec = msgspec.field(default_factory=APIServiceSpec)


async def register(api: Api, own: ServiceReference, authority: bytes) -> None:
    """Have the API server trust this authority for the API. Raises NotRegistered, ApiError, ApiUnreachable.

    Only one program of a cluster can serve the API. The chart creates the APIService if no other has it.
    This program adds its authority's certificate, and never changes one that refers to another Service.

    Args:
        api: The API server.
        own: This program's Service.
        authority: Certificates in PEM.
    """
    current = await if_accepted(api.get(API_SERVICE, APIService))
    if current is None:
        raise NotRegistered(
            f"APIService {NAME} does not exist: install the chart again with metricsAdapter.enabled=true"
        )
    if current.spec.service != own:
        owner = current.spec.service
        whose = f"Service {owner.namespace}/{owner.name}" if owner else "the API server itself"
        raise NotRegistered(
            f"APIService {NAME} belongs to {whose}, and only one program can serve it: use its metrics, or "
            "remove it and install the chart again"
        )
    bundle = base64.b64encode(authority).decode()
    if current.spec.ca_bundle != bundle:
        # Of this version only: another program may be taking the API over.
        version = current.metadata.resource_version
        change = {"metadata": {"resourceVersion": version}, "spec": {"caBundle": bundle}}
        await api.patch(API_SERVICE, APIService, change)
