"""`fenka metrics-adapter`: serves until the process is told to stop."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fenka.cluster.objects import ConfigMap
from fenka.core.errors import FenkaError
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.metrics_adapter import server
from fenka.metrics_adapter.scraper import Scraper
from fenka.metrics_adapter.values import Values
from fenka.server.listener import HttpListener, listening_socket, serve_app
from fenka.server.probes import serve_probes
from fenka.server.program import Kubeconfig, stop_requests, working_until

log = logging.getLogger(__name__)

CHECK_S = 30.0
"""Between two looks at the front proxy's authority, the APIService and the certificate."""
RETRY_S = 2.0
"""The same while requests cannot be answered."""


class AdapterOptions(msgspec.Struct, frozen=True):
    """Options of `fenka metrics-adapter`."""

    tls: Annotated[
        Path, Meta(title="DIRECTORY", description="ca.crt, server.crt and server.key to serve with")
    ]
    address: Annotated[str, Meta(description="address to listen on")] = "0.0.0.0"
    port: Annotated[int, Meta(description="port for the API server")] = 8443
    probe_port: Annotated[int, Meta(description="port for probes, without TLS")] = 8080
    namespace: Annotated[
        str,
        Meta(
            description="the namespace of this program and of the node programs",
            extra={"envvar": "POD_NAMESPACE"},
        ),
    ] = "fenka-system"
    service: Annotated[str, Meta(title="NAME", description="this program's Service")] = (
        "fenka-metrics-adapter"
    )
    kubeconfig: Kubeconfig = None


class Adapter:
    """The program's state. problem: why requests cannot be answered, empty if they can."""

    def __init__(self, api: Api, options: AdapterOptions) -> None:
        self._api, self._options = api, options
        self._certificate: server.ServingCertificate | None = None
        self._own = server.ServiceReference(namespace=options.namespace, name=options.service)
        self.problem = "the front proxy's certificate is not known yet"

    @property
    def certificate(self) -> server.ServingCertificate:
        """Return the certificate, which `first_certificate` waits for."""
        assert self._certificate is not None
        return self._certificate

    async def first_certificate(self) -> None:
        """Wait until there is a certificate, for which the front proxy must be known."""
        while self._certificate is None:
            await self._look()
            if self._certificate is None:
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Follow the front proxy, the APIService and the certificate until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(RETRY_S if self.problem else CHECK_S)

    async def check(self) -> None:
        """Look once. Raises FenkaError if requests cannot be answered."""
        front_proxy = server.read_front_proxy(await self._api.get(server.CONFIG_MAP, ConfigMap))
        current = self._certificate
        if current is None or current.front_proxy != front_proxy:
            self._certificate = server.ServingCertificate(self._options.tls, front_proxy)
        else:
            current.refresh()
        await server.register(self._api, self._own, self.certificate.authority)

    def front_proxy(self) -> server.FrontProxy:
        """Return the front proxy as it was seen last."""
        return self.certificate.front_proxy

    async def _look(self) -> None:
        try:
            await self.check()
            problem = ""
        except (ApiError, ApiUnreachable) as error:
            # The values of the last reading stay the best known.
            problem = self.problem and str(error)
        except FenkaError as error:
            problem = str(error)
        if problem != self.problem:
            log.log(logging.WARNING if problem else logging.INFO, "%s", problem or "ready")
        self.problem = problem


async def serve(options: AdapterOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises ApiUnreachable, and OSError if a port is in use."""
    stop = stop_requests()
    async with await Api.connect(options.kubeconfig) as api:
        adapter = Adapter(api, options)
        listening = listening_socket(options.address, options.probe_port)
        async with (
            serve_probes(listening, lambda: adapter.problem),
            working_until(stop, _serve(adapter, api, options)),
        ):
            pass


async def _serve(adapter: Adapter, api: Api, options: AdapterOptions) -> None:
    """Serve the API as soon as the front proxy is known: without its certificate nobody may connect."""
    await adapter.first_certificate()
    app = server.api_app(Values(api, Scraper(), options.namespace), adapter.front_proxy)
    listener = HttpListener(lambda: adapter.certificate.serving)
    listening = listening_socket(options.address, options.port)
    async with serve_app(app, listening, listener, keep_alive_s=server.KEEP_ALIVE_S):
        await adapter.run()
