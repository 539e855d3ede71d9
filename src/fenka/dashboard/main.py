"""Runs the dashboard: a client of this machine's daemon or of a cluster, with the rights of its user."""

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.cluster_pages import ClusterPages
from fenka.dashboard.guard import ANY_LOCALHOST, LOOPBACK_NAMES, Guard
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
from fenka.server.loopback_name import RESOLVED, hold_other_address, new_name, release
from fenka.workstation import paths
from fenka.workstation.protocol import SIGNALS

TOKEN_BYTES = 32

_RESOLVED = frozenset({*RESOLVED, "0.0.0.0", "::"})
"""Addresses at which browsers find a server whose name ends with `.localhost`."""

_MAX_DRAWN = 20
"""Ports that are drawn until one is free at all loopback addresses."""

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
        port: None for a free one, drawn by the kernel.
        listen: the IP address; other machines reach the page only if it is not a loopback address.
        hosts: further names by which browsers may call this server, as behind a proxy.
        prefix: the path below which all is served, for proxies that do not remove it.
        read_only: whether nothing can be stopped or resized.
        auth: how viewers prove that they may look, as `--auth` has it.
        proxy_secret: the file with what only the proxy knows, for `proxy`.
        prometheus: the URL of a Prometheus with a cluster's figures over time; empty for none.
        prometheus_token: the file with its bearer token.
        cluster_name: the name of a cluster on the page; empty for its context or its API server's address.
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
    cluster_name: str = ""

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
    def has_own_name(self) -> bool:
        """Return whether browsers call this server by a name that nobody can guess, new at each start.

        A person's own dashboard has one. The others are called by their proxy's or their forwarder's name.
        """
        return self.auth == "token" and self.listen in _RESOLVED

    def names(self, own_name: str) -> frozenset[str]:
        """Return the names by which browsers may call this server.

        own_name: the one that nobody can guess; empty for none.
        """
        named = frozenset(host.lower() for host in self.hosts)
        if not own_name:
            return named | LOOPBACK_NAMES | {self.listen, ANY_LOCALHOST}
        # Browsers would keep cookies and pages of 127.0.0.1 for each server after this one.
        return named | {own_name}


Announce = Callable[[str, Path | None], None]
"""Is called with the URL, with its token, and the Unix socket, if there is one, once browsers can connect."""


def serve(options: DashboardOptions, announce: Announce) -> None:
    """Serve this machine until a signal. Another dashboard of this user is announced instead.

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
    if options.cluster_name:
        raise CannotServe("--cluster-name is of a cluster: leave it out")
    with _claim() as file:
        if file is None:
            announce(_url_of_other(), _socket_of_other())
            return
        with _listen(options) as listening, _listen_at(_socket_path()) as local:
            token, name = secrets.token_urlsafe(TOKEN_BYTES), _new_name(options)
            url = _url(options, listening, token, name)
            guard = Guard(token, options.names(name), f"{options.path}api/")
            os.ftruncate(file, 0)
            os.pwrite(file, f"{url}\n".encode(), 0)
            runtime = paths.current()
            look = partial(look_around, losses=LossReaders())
            shown = Live(runtime, Viewer(os.geteuid(), acts=not options.read_only), look)
            pages = MachinePages(runtime, shown, page_files(), acts=not options.read_only)
            ready = partial(announce, url, _socket_path() if local else None)
            sockets = [listening.dup(), *([local.dup()] if local else [])]
            try:
                asyncio.run(_serve(options, sockets, guard, pages, shown.run(), ready))
            finally:
                os.ftruncate(file, 0)


def serve_cluster(
    options: DashboardOptions,
    kubeconfig: Path | None,
    context: str | None,
    announce: Announce,
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
            shown = ClusterLive(api, options.cluster_name or context or api.server, meter=meter)
            token = secrets.token_urlsafe(TOKEN_BYTES) if options.auth == "token" else ""
            name = _new_name(options)
            ready = partial(announce, _url(options, listening, token, name), None)
            guard = Guard(token, options.names(name), f"{options.path}api/")
            pages = ClusterPages(shown, page_files(), prometheus, _sign_in(options, api))
            async with _serve_usage(meter, metering.usage_port):
                await _serve(options, [listening.dup()], guard, pages, shown.run(), ready)

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
    listening: Sequence[socket.socket],
    guard: Guard,
    pages: PageServer,
    following: Coroutine[Any, Any, None],
    ready: Callable[[], None],
) -> None:
    stopped = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    task = asyncio.create_task(following)
    task.add_done_callback(lambda _: stopped.set())
    try:
        app, first, others = pages.app(guard, options.path), listening[0], listening[1:]
        async with serve_app(app, first, HttpListener(), others=others):
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
    """Listen on the port, or on one that the kernel draws. Raises CannotServe."""
    try:
        listening, held = _listening_and_held(options)
    except OSError as why:
        # asyncio's sentence has the address again.
        problem = os.strerror(why.errno or 0)
        place = f"port {options.port} of {options.listen}" if options.port else options.listen
        helps = "another --port, or none for a free one" if options.port else "another --listen"
        raise CannotServe(f"{place} cannot be used ({problem}): name {helps}") from None
    try:
        with listening:
            yield listening
    finally:
        release(held)


def _listening_and_held(
    options: DashboardOptions,
) -> tuple[socket.socket, list[socket.socket]]:
    """Return the listening socket, and those that keep others from answering at its name.

    Raises CannotServe, OSError.
    """
    for _ in range(1 if options.port else _MAX_DRAWN):
        listening = listening_socket(options.listen, options.port or 0)
        if not options.has_own_name:
            return listening, []
        port = listening.getsockname()[1]
        try:
            return listening, hold_other_address(options.listen, port)
        except OSError:
            listening.close()
    raise CannotServe(
        f"another program has port {port} at another loopback address, where browsers would find it under "
        "this page's name: name another --port, or none for a free one"
    )


def _socket_path() -> Path:
    return paths.dashboard_file().with_suffix(".sock")


def _socket_of_other() -> Path | None:
    path = _socket_path()
    return path if path.is_socket() else None


@contextlib.contextmanager
def _listen_at(path: Path) -> Iterator[socket.socket | None]:
    """Listen on a Unix socket that only this user can enter; None where there can be none.

    Nobody else can take its place when the dashboard has ended, as its directory is this user's.
    """
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        mask = os.umask(0o177)
        try:
            path.unlink(missing_ok=True)
            listening.bind(str(path))
        except OSError:
            # The path is too long, or its file system has no sockets. The port is there in any case.
            yield None
            return
        finally:
            os.umask(mask)
        opened.callback(path.unlink, missing_ok=True)
        listening.listen()
        yield listening


def _new_name(options: DashboardOptions) -> str:
    return new_name() if options.has_own_name else ""


def _url(options: DashboardOptions, listening: socket.socket, token: str, own_name: str) -> str:
    """Return the address that the user opens. Browsers never send the part after # to any server."""
    address = ipaddress.ip_address(options.listen)
    host = "127.0.0.1" if address.is_unspecified else str(address)
    host = options.hosts[0] if options.hosts else own_name or host
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
