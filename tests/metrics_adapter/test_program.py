"""Test whom the adapter answers, to whom the API belongs, and `fenka metrics-adapter` as a process."""

import asyncio
import base64
import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from fenka.core.errors import FenkaError
from fenka.kubernetes.api_client import Api
from fenka.metrics_adapter.exposition import PATH, resource_list
from fenka.metrics_adapter.main import Adapter, AdapterOptions
from fenka.metrics_adapter.scraper import Scraper
from fenka.metrics_adapter.server import NoFrontProxy, NotRegistered, api_app
from fenka.metrics_adapter.values import Values
from fenka.server.certificate_files import ADAPTER, AUTHORITY, InvalidCredentials, Pair
from fenka.server.certificates import Leaf, due, new_authority, new_leaf
from fenka.server.listener import HttpListener, listening_socket, serve_app
from tests.fakes.api_server import FakeApiServer, Json, in_thread
from tests.gateway.test_program import get
from tests.metrics_adapter.harness import LOOPBACK, OWN
from tests.ports import free_port
from tests.waiting import wait_until

HOST = f"fenka-metrics-adapter.{OWN}.svc"
NAME = "v1beta1.external.metrics.k8s.io"
KEDA = {"namespace": "keda", "name": "keda-operator-metrics-apiserver"}
OURS = {"namespace": OWN, "name": "fenka-metrics-adapter"}
FRONT_PROXY = "front-proxy-client"


def now() -> datetime:
    """Return the current time."""
    return datetime.now(UTC)


def client(authority: Pair, name: str = FRONT_PROXY) -> Pair:
    """Return a client's certificate of an authority."""
    return new_leaf(authority, Leaf(name, None, timedelta(days=1)), now())


def config_map(authority: Pair, names: str = f'["{FRONT_PROXY}"]') -> Json:
    """Return what the API server writes of itself."""
    return {
        "metadata": {
            "namespace": "kube-system",
            "name": "extension-apiserver-authentication",
        },
        "data": {
            "requestheader-client-ca-file": authority.certificate.decode(),
            "requestheader-allowed-names": names,
        },
    }


def api_service(service: Json | None) -> Json:
    """Return the registration of the API."""
    return {"metadata": {"name": NAME}, "spec": {"service": service} if service else {}}


@dataclass
class Installation:
    """Files and objects of an installation."""

    folder: Path
    server: FakeApiServer
    front: Pair
    authority: Pair

    @property
    def options(self) -> AdapterOptions:
        """Return the program's options."""
        return AdapterOptions(tls=self.folder, namespace=OWN)

    @property
    def bundle(self) -> str:
        """Return the registered authority."""
        text = self.server.get("apiservices", NAME)["spec"].get("caBundle", "")
        return base64.b64decode(text).decode()

    def caller(self, pair: Pair | None) -> ssl.SSLContext:
        """Return the context of a caller with this certificate."""
        context = ssl.create_default_context(cadata=self.authority.certificate.decode())
        if pair is not None:
            for name, content in (("c.crt", pair.certificate), ("c.key", pair.key)):
                (self.folder / name).write_bytes(content)
            context.load_cert_chain(self.folder / "c.crt", self.folder / "c.key")
        return context


def installed(folder: Path) -> Installation:
    """Return an installation whose API nobody else serves."""
    pairs = due({}, (), now(), (HOST,))
    for name, content in (
        ("ca.crt", pairs[AUTHORITY].certificate),
        ("server.crt", pairs[ADAPTER].certificate),
        ("server.key", pairs[ADAPTER].key),
    ):
        (folder / name).write_bytes(content)
    server, front = FakeApiServer(), new_authority(now())
    server.put("configmaps", config_map(front))
    server.put("apiservices", api_service(OURS))
    return Installation(folder, server, front, pairs[AUTHORITY])


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """Provide an installation."""
    return installed(tmp_path)


@contextlib.asynccontextmanager
async def connected(server: FakeApiServer) -> AsyncIterator[Api]:
    """Start the API server and connect to it."""
    await server.start()
    async with server.api() as api:
        yield api
    await server.stop()


@contextlib.asynccontextmanager
async def serving(installation: Installation) -> AsyncIterator[tuple[Adapter, int]]:
    """Serve the API on a port."""
    async with connected(installation.server) as api:
        adapter = Adapter(api, installation.options)
        await adapter.check()
        app = api_app(Values(api, Scraper(), OWN), adapter.front_proxy)
        listener = HttpListener(lambda: adapter.certificate.serving)
        listening = listening_socket(LOOPBACK, 0)
        port = listening.getsockname()[1]
        async with serve_app(app, listening, listener):
            yield adapter, port


async def call(port: int, context: ssl.SSLContext, path: str = PATH) -> tuple[int, bytes]:
    """Call the API as the API server does: by the name of the Service."""
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector) as session:
        url = f"https://{LOOPBACK}:{port}{path}"
        async with session.get(url, server_hostname=HOST) as answer:
            assert answer.content_type == "application/json"
            return answer.status, await answer.read()


async def test_front_proxy_is_answered(installation: Installation) -> None:
    """Paths that do not exist have a Status as well."""
    async with serving(installation) as (_, port):
        caller = installation.caller(client(installation.front))
        assert await call(port, caller) == (200, resource_list())
        status, body = await call(port, caller, "/apis")
        assert (status, b'"reason":"NotFound"' in body) == (404, True)
        path = f"{PATH}/namespaces/default/vllm:x?labelSelector=a%3Db"
        status, body = await call(port, caller, path)
        assert (status, b'"value":"0"' in body) == (200, True)
        status, body = await call(port, caller, f"{PATH}/namespaces/default/vllm:x")
        assert (status, b'"reason":"BadRequest"' in body) == (400, True)
        installation.server.forbidden = {"pods"}
        status, body = await call(port, caller, path)
        assert (status, b'"reason":"ServiceUnavailable"' in body) == (503, True)


async def test_callers_are_refused_when_they_are_not_the_front_proxy(
    installation: Installation,
) -> None:
    """Without a certificate, with another authority's, or with another name of the same authority."""
    async with serving(installation) as (_, port):
        for pair in (None, client(new_authority(now())), client(installation.authority)):
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await call(port, installation.caller(pair))
        someone = installation.caller(client(installation.front, "kubelet"))
        status, body = await call(port, someone)
        assert (status, b"only the API server may connect" in body) == (403, True)


async def test_front_proxy_may_have_any_name_when_none_is_required(
    installation: Installation,
) -> None:
    """An empty list, as Kubernetes has it."""
    installation.server.put("configmaps", config_map(installation.front, "[]"))
    async with serving(installation) as (_, port):
        caller = installation.caller(client(installation.front, "anything"))
        assert (await call(port, caller))[0] == 200


async def test_new_front_proxy_is_answered_when_its_authority_changes(
    installation: Installation,
) -> None:
    """And the old one is not."""
    async with serving(installation) as (adapter, port):
        before = installation.caller(client(installation.front))
        renewed = new_authority(now())
        installation.server.put("configmaps", config_map(renewed))
        await adapter.check()
        after = installation.caller(client(renewed))
        assert (await call(port, after))[0] == 200
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await call(port, before)


async def test_authority_is_registered_when_the_api_is_ours(installation: Installation) -> None:
    """Once; and again after it has changed."""
    async with connected(installation.server) as api:
        adapter = Adapter(api, installation.options)
        await adapter.check()
        assert installation.bundle == installation.authority.certificate.decode()
        await adapter.check()
        assert len(installation.server.writes) == 1
        renewed = installed(installation.folder)
        await adapter.check()
        assert installation.bundle == renewed.authority.certificate.decode()


@pytest.mark.parametrize(
    ("service", "sentence"),
    [
        (KEDA, "belongs to Service keda/keda-operator-metrics-apiserver, and only one program"),
        (OURS | {"namespace": "another"}, "belongs to Service another/fenka-metrics-adapter"),
        (None, "belongs to the API server itself"),
    ],
)
async def test_api_is_left_to_its_owner_when_another_program_serves_it(
    installation: Installation, service: Json | None, sentence: str
) -> None:
    """The adapter is not ready, and says why. It is ready when the API becomes its own."""
    installation.server.put("apiservices", api_service(service))
    async with connected(installation.server) as api:
        adapter = Adapter(api, installation.options)
        with pytest.raises(NotRegistered, match=sentence):
            await adapter.check()
        assert not installation.server.writes
        installation.server.remove("apiservices", NAME)
        with pytest.raises(NotRegistered, match=f"{NAME} does not exist: install the chart again"):
            await adapter.check()
        installation.server.put("apiservices", api_service(OURS))
        await adapter.check()


@pytest.mark.parametrize("names", ["", "nonsense", "{}", "[1]"])
async def test_front_proxy_is_unknown_when_its_names_are_invalid(
    installation: Installation, names: str
) -> None:
    """Only a missing list means any name."""
    installation.server.put("configmaps", config_map(installation.front, names))
    async with connected(installation.server) as api:
        adapter = Adapter(api, installation.options)
        if not names:
            await adapter.check()
            return
        with pytest.raises(NoFrontProxy, match="requestheader-allowed-names of extension"):
            await adapter.check()


async def test_nothing_is_served_when_there_is_no_aggregation_layer(
    installation: Installation,
) -> None:
    """Or no certificate."""
    installation.server.put("configmaps", config_map(Pair(b"", b"")))
    async with connected(installation.server) as api:
        with pytest.raises(NoFrontProxy, match="has no aggregation layer: set its --requestheader"):
            await Adapter(api, installation.options).check()
        installation.server.put("configmaps", config_map(Pair(b"nonsense", b"")))
        with pytest.raises(InvalidCredentials, match="cannot be used"):
            await Adapter(api, installation.options).check()
        installation.server.put("configmaps", config_map(installation.front))
        (installation.folder / "server.key").unlink()
        with pytest.raises(FenkaError, match=r"server\.key cannot be read"):
            await Adapter(api, installation.options).check()


def test_program_is_ready_when_the_api_is_its_own(
    installation: Installation, tmp_path: Path
) -> None:
    """Until then its probe has the reason. It ends with 0 when it is told to."""
    server = installation.server
    server.put("apiservices", api_service(KEDA))
    port, probe_port = free_port(), free_port()
    with in_thread(server, tmp_path) as kubeconfig:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "fenka", "metrics-adapter", f"--tls={tmp_path}"),
                *(f"--address={LOOPBACK}", f"--port={port}", f"--probe-port={probe_port}"),
                f"--kubeconfig={kubeconfig}",
            ],
            env=os.environ | {"POD_NAMESPACE": OWN},
        )
        try:

            def probe(path: str = "/readyz") -> tuple[int, bytes]:
                with contextlib.suppress(ConnectionError):
                    return get(probe_port, path)
                return 0, b""

            wait_until(lambda: b"belongs to Service keda/" in probe()[1])
            assert (probe()[0], probe("/healthz")[0]) == (503, 200)
            server.put("apiservices", api_service(OURS))
            wait_until(lambda: probe()[0] == 200)
            caller = installation.caller(client(installation.front))
            assert asyncio.run(call(port, caller)) == (200, resource_list())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
