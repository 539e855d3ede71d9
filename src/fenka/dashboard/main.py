"""Runs the dashboard: a client of this machine's daemon or of a cluster, with the rights of its user."""

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.cluster_pages import ClusterPages
from fenka.dashboard.guard import LOOPBACK_NAMES, Guard
from fenka.dashboard.live import Live
from fenka.dashboard.loss_curves import LossReaders
from fenka.dashboard.machine_pages import MachinePages
from fenka.dashboard.page_server import PageServer, page_files
from fenka.dashboard.prometheus import Prometheus
from fenka.dashboard.sign_in import OpenSignIn, ProxySignIn, SignIn, TokenSignIn
from fenka.dashboard.surroundings import look_around
from fenka.dashboard.usage_meter import CannotRecord, MeterOptions, UsageMeter
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.kube_config import ACCOUNT
from fenka.local.machine_board import Viewer
from fenka.server.listener import MAX_READERS, HttpListener, listening_socket, serve_app
from fenka.workstation import paths
from fenka.workstation.protocol import SIGNALS

FIRST_PORT = 8250
PORTS = 100
"""Ports that are tried from the first one on, if none is given."""

TOKEN_BYTES = 32

MIN_SECRET = 16
"""Characters of a proxy's secret."""

Auth = Literal["token", "none", "kubernetes", "proxy"]

NOT_METERED = MeterOptions()


class CannotServe(FenkaError):
    """The options cannot be met, or there is nothing to show."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """How the page is served.

    Attributes:
        port: None for the first free one.
        listen: the IP address; other machines reach the page only if it is not a loopback address.
        hosts: further names by which browsers may call this server, as behind a proxy.
        prefix: the path below which all is served, for proxies that do not remove it.
        read_only: whether nothing can be stopped or resized.
        auth: how viewers prove that they may look, as `--auth` has it.
        proxy_secret: the file with what only the proxy knows, for `proxy`.
        prometheus: the URL of a Prometheus with a cluster's figures over time; empty for none.
        prometheus_token: the file with its bearer token.
    """

    port: int | None = None
    listen: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    prefix: str = "/"
    read_only: bool = False
    auth: Auth = "token"
    proxy_secret: Path | None = None
    prometheus: str = ""
    prometheus_token: Path | None = None

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.listen)
        except ValueError:
            raise CannotServe(
                f"invalid --listen {self.listen[:80]!r}: expected an IP address of this machine, as 0.0.0.0"
            ) from None
        for host in self.hosts:
            if urlsplit(f"//{host}").hostname != host.lower():
                raise CannotServe(
                    f"invalid --host {host[:80]!r}: expected a name without port, as gpu.example.com"
                )
        if (self.auth == "proxy") != (self.proxy_secret is not None):
            raise CannotServe("--auth proxy and --proxy-secret FILE belong together")
        if urlsplit(self.prefix).path != self.prefix or "//" in f"/{self.prefix}/"[1:-1]:
            raise CannotServe(f"invalid --prefix {self.prefix[:80]!r}: expected a path, as /gpu/")

    @property
    def path(self) -> str:
        """Return the prefix with a slash at both ends."""
        inner = self.prefix.strip("/")
        return f"/{inner}/" if inner else "/"

    @property
    def names(self) -> frozenset[str]:
        """Return the names by which browsers may call this server."""
        own = {self.listen, *(host.lower() for host in self.hosts)}
        return LOOPBACK_NAMES | own


def serve(options: DashboardOptions, announce: Callable[[str], None]) -> None:
    """Serve this machine until a signal. Another dashboard of this user is announced instead.

    announce: is called with the URL, with its token, once browsers can connect.

    Raises CannotServe, OSError.
    """
    if options.auth == "none":
        raise CannotServe("--auth none shows this machine to all its users: leave it out")
    if options.auth != "token":
        raise CannotServe(f"--auth {options.auth} is for a cluster: leave it out")
    if options.prometheus:
        raise CannotServe(
            "--prometheus is of a cluster: this machine's daemon keeps its own history"
        )
    with _claim() as file:
        if file is None:
            announce(_url_of_other())
            return
        with _listen(options) as listening:
            token = secrets.token_urlsafe(TOKEN_BYTES)
            url = _url(options, listening, token)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{url}\n".encode(), 0)
            runtime = paths.current()
            look = partial(look_around, losses=LossReaders())
            shown = Live(runtime, Viewer(os.geteuid(), acts=not options.read_only), look)
            pages = MachinePages(runtime, shown, page_files(), acts=not options.read_only)
            ready = partial(announce, url)
            try:
                asyncio.run(_serve(options, listening.dup(), token, pages, shown.run(), ready))
            finally:
                os.ftruncate(file, 0)


def serve_cluster(
    options: DashboardOptions,
    kubeconfig: Path | None,
    context: str | None,
    announce: Callable[[str], None],
    metering: MeterOptions = NOT_METERED,
) -> None:
    """Serve a cluster until a signal, with the rights of the kubeconfig's user or the pod's account.

    announce: as of `serve`.

    Raises CannotServe, CannotRecord, ApiUnreachable, OSError.
    """

    prometheus = (
        Prometheus(options.prometheus, options.prometheus_token) if options.prometheus else None
    )

    if options.auth == "kubernetes" and (
        kubeconfig or context or "KUBECONFIG" in os.environ or not ACCOUNT.exists()
    ):
        # A kubeconfig's client certificate would be sent beside viewers' tokens, and count instead of them.
        raise CannotServe("--auth kubernetes works with a pod's service account: install the chart")

    async def run(listening: socket.socket) -> None:
        if prometheus is not None:
            await prometheus.check()
        async with await Api.connect(kubeconfig, context) as api:
            meter = UsageMeter(metering.usage_file, metering) if metering.usage_file else None
            shown = ClusterLive(api, context or api.server, meter=meter)
            token = secrets.token_urlsafe(TOKEN_BYTES) if options.auth == "token" else ""
            ready = partial(announce, _url(options, listening, token))
            pages = ClusterPages(shown, page_files(), prometheus, _sign_in(options, api))
            async with _serve_usage(meter, metering.usage_port):
                await _serve(options, listening.dup(), token, pages, shown.run(), ready)

    with _listen(options) as listening:
        asyncio.run(run(listening))


def _sign_in(options: DashboardOptions, api: Api) -> SignIn:
    """Return how viewers sign in. Raises CannotServe, OSError."""
    if options.auth == "kubernetes":
        return TokenSignIn(api)
    if options.proxy_secret is None:
        return OpenSignIn()
    secret = options.proxy_secret.read_text().strip()
    if len(secret) < MIN_SECRET:
        raise CannotServe(
            f"the secret in {options.proxy_secret} has less than {MIN_SECRET} characters: make a longer one, "
            "as with `openssl rand -hex 32`"
        )
    return ProxySignIn(api, secret)


@contextlib.asynccontextmanager
async def _serve_usage(meter: UsageMeter | None, port: int) -> AsyncIterator[None]:
    """Answer `fenka usage` while the block runs, on all addresses. Raises CannotRecord."""
    if meter is None:
        yield
        return
    try:
        listening = listening_socket(None, port)
    except OSError as why:
        raise CannotRecord(
            f"port {port} cannot be used ({os.strerror(why.errno or 0)}): name another --usage-port"
        ) from None
    async with serve_app(meter.app(), listening, HttpListener(max_connections=MAX_READERS)):
        yield


async def _serve(
    options: DashboardOptions,
    listening: socket.socket,
    token: str,
    pages: PageServer,
    following: Coroutine[Any, Any, None],
    ready: Callable[[], None],
) -> None:
    stopped = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    guard = Guard(token, options.names, f"{options.path}api/")
    task = asyncio.create_task(following)
    task.add_done_callback(lambda _: stopped.set())
    try:
        async with serve_app(pages.app(guard, options.path), listening, HttpListener()):
            ready()
            await stopped.wait()
            pages.source.fanout.close()
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def _claim() -> Iterator[int | None]:
    """Lock this user's file for the time that a dashboard runs; None if another one has it.

    Raises CannotServe, OSError.
    """
    path = paths.dashboard_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.check_parents(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise CannotServe(f"{path} is no file: remove it")
        os.fchmod(file, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file
    finally:
        os.close(file)


def _url_of_other() -> str:
    """Return the URL of the dashboard that runs. Raises CannotServe."""
    url = paths.dashboard_file().read_text().strip()
    if not url:
        raise CannotServe("another `fenka dashboard` starts or ends at this moment: try again")
    return url


@contextlib.contextmanager
def _listen(options: DashboardOptions) -> Iterator[socket.socket]:
    """Listen on the port, or on the first free one. Raises CannotServe."""
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if options.port is None else [options.port]
    for port in ports:
        try:
            listening = listening_socket(options.listen, port)
        except OSError as why:
            # asyncio's sentence has the address again.
            problem = os.strerror(why.errno or 0)
            continue
        with listening:
            yield listening
        return
    if options.port is None:
        raise CannotServe(
            f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is free on {options.listen} "
            f"({problem}): name one with --port"
        )
    raise CannotServe(
        f"port {options.port} of {options.listen} cannot be used ({problem}): name another --port, or none "
        "for a free one"
    )


def _url(options: DashboardOptions, listening: socket.socket, token: str) -> str:
    """Return the address that the user opens. Browsers never send the part after # to any server."""
    address = ipaddress.ip_address(options.listen)
    host = options.hosts[0] if options.hosts else str(address)
    if address.is_unspecified and not options.hosts:
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    fragment = f"#token={token}" if token else ""
    return f"http://{host}:{listening.getsockname()[1]}{options.path}{fragment}"


def write_launcher(url: str) -> Path:
    """Return a page that leads to the URL. A browser's arguments can be seen by every user; its files not.

    Raises OSError.
    """
    path = paths.dashboard_file().with_suffix(".html")
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n')
    return path
