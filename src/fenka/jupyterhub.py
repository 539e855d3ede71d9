"""A spawner for JupyterHub: each user's server runs as this user, in a slice of this machine's cards.

    c.JupyterHub.spawner_class = "fenka"

The hub is root's. It starts `fenka run` as the user, which waits for the slice and then becomes the server in
the same process. So the user pays, and PID, signals and logs are the server's. Until then `fenka run` writes
its place in the queue to a pipe. Its user may write there, too, so the lines are only shown.

When a server has ended, nobody else may answer in its place: the hub's proxy would send the user's cookies.
So servers listen on Unix sockets (fenka.workstation.hub_sockets), if the proxy can reach these. Otherwise
they listen on ports, and the hub keeps a copy of each listening socket until the proxy has no route to it.
"""

import asyncio
import contextlib
import functools
import hashlib
import html
import ipaddress
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.spawner import LocalProcessSpawner
from sqlalchemy.orm import object_session
from tornado.web import HTTPError
from traitlets import Bool, Dict, Integer, List, Unicode, default, observe

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import ListenerCopy, copy_listener, listener_uid
from fenka.jobs.job_spec import NAME
from fenka.jobs.processes import FAILED, STARTED
from fenka.workstation import paths
from fenka.workstation.client import get_snapshot, stop_jobs
from fenka.workstation.hub_sockets import HubSocket
from fenka.workstation.protocol import MachineSnapshot

LINE_BYTES = 4096
"""At most, of a line that is shown while a server starts."""

POLL_S = 0.5
"""Between two looks at what has changed."""

GRANTED = "the slice is granted: the server starts"

HOUR_S = 3600

UNIX = "http+unix"
"""The scheme of URLs of Unix sockets in JupyterHub and its proxy."""

PROXY_WITH_UNIX = (5, 3)
"""The first configurable-http-proxy that reaches Unix sockets."""

JUPYTER_PORT = 8888
"""Jupyter's own default, which is the only port that it accepts beside a Unix socket."""


LISTEN_POLL_S = 0.1
"""Between two looks at whether a server listens."""

NOBODY = "http://127.0.0.1:1"
"""A port that only root could use."""

Address = str | tuple[str, int]
"""Where a server listens: the URL of a Unix socket, or IP and port."""


class SpawnRefused(HTTPError):
    """A server was not started. JupyterHub shows the sentence to its user, and counts no fault of its own."""

    def __init__(self, sentence: str) -> None:
        super().__init__(400, "%s", sentence)
        self.jupyterhub_message = sentence


class FenkaSpawner(LocalProcessSpawner):  # type: ignore[misc]  # JupyterHub has no types.
    """Starts servers in slices, of the size that their user has chosen."""

    cmd: list[str]
    popen_kwargs: dict[str, Any]

    profiles = Dict(
        value_trait=Unicode(),
        key_trait=Unicode(),
        default_value={
            "no card": "",
            "2 GiB of a card": "--gpu-mem 2",
            "4 GiB of a card": "--gpu-mem 4",
            "8 GiB of a card": "--gpu-mem 8",
        },
        help="The choices of users: for each its options of `fenka run`. Without options it has no card. "
        "The first one is the default.",
    ).tag(config=True)

    fenka_cmd = List(
        Unicode(),
        default_value=[sys.executable, "-Pm", "fenka"],
        help="The command that starts fenka. Ubuntu's AppArmor may demand /usr/bin/fenka.",
    ).tag(config=True)

    unix_sockets = Bool(
        None,
        allow_none=True,
        help="Whether servers listen on Unix sockets, which nobody else can take. By default they do if "
        "JupyterHub's proxy reaches these.",
    ).tag(config=True)

    socket_directory = Unicode(
        "/var/lib/fenka-jupyterhub", help="Where the Unix sockets of servers are."
    ).tag(config=True)

    start_ticks = Integer(help="When the process with this PID started, since PIDs are used again.")
    status = Unicode(help="What it waits for, on its user's page.")
    at_socket = False
    listener: ListenerCopy | None = None

    @default("start_timeout")
    def _longest_wait(self) -> int:
        return 12 * HOUR_S

    @property
    def job_name(self) -> str:
        """The name of its job, one for each server of a user."""
        name = "-".join(filter(None, ["jupyter", self.user.name, self.name]))
        if NAME.fullmatch(name):
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9._-]', '-', name)[:50]}-{digest}"

    # --- the choice ---------------------------------------------------------------------------------

    @default("options_form")
    def _default_form(self) -> object:
        return FenkaSpawner.render_form

    async def render_form(self) -> str:
        """Return the choices, and what is free now, for the page on which a user starts a server."""
        free = await asyncio.to_thread(_free_now)
        last = self.user_options.get("profile")
        choices = "".join(
            f'<option value="{html.escape(label)}"{" selected" if label == last else ""}>'
            f"{html.escape(label)}</option>"
            for label in self.profiles
        )
        return (
            '<label for="profile">Share of a card:</label> '
            f'<select id="profile" name="profile" class="form-control">{choices}</select>'
            f"<p>{html.escape(free)}</p>"
        )

    @default("options_from_form")
    def _options_from_form(self) -> object:
        def read(form: Mapping[str, Any]) -> dict[str, str]:
            values = form.get("profile", [])
            options = {"profile": values[0]} if values else {}
            self.run_options(options)
            return options

        return read

    @default("apply_user_options")
    def _apply_user_options(self) -> object:
        # Without it JupyterHub warns that nothing reads them.
        return lambda spawner, options: spawner.run_options(options)

    def run_options(self, user_options: Mapping[str, Any]) -> list[str]:
        """Return the options of `fenka run`; none for no card. Raises SpawnRefused.

        Args:
            user_options: As users send them to JupyterHub's API, of any type.
        """
        chosen = user_options.get("profile", next(iter(self.profiles), ""))
        if not isinstance(chosen, str) or chosen not in self.profiles:
            raise SpawnRefused(
                f"{str(chosen)[:40]!r} is not offered: choose one of {', '.join(self.profiles)}"
            )
        return shlex.split(self.profiles[chosen])

    # --- start --------------------------------------------------------------------------------------

    def get_env(self) -> dict[str, str]:
        """Return the server's environment. Without a slice it sees no card."""
        environment: dict[str, str] = super().get_env()
        if self.at_socket:
            environment["JUPYTERHUB_SERVICE_URL"] = (
                f"{_unix_url(self._socket().path)}{self.server.base_url}"
            )
        if self.run_options(self.user_options):
            # A daemon of the user's own would know nothing of the machine's cards.
            return environment | {"FENKA_RUNTIME": str(paths.current().root)}
        return environment | {"CUDA_VISIBLE_DEVICES": ""}

    async def start(self) -> Address:
        """Start the server, and return its address once it listens. Raises SpawnRefused."""
        self.status = ""
        options = self.run_options(self.user_options)
        self.at_socket = await self._choose_socket()
        if not options:
            address = await self._start_process()
            await self._until_listening(address)
            return address
        await self._end_job()  # Programs that an earlier server has left while the hub was down.
        receive, send = os.pipe()
        configured = self.cmd, self.popen_kwargs
        fenka = [*self.fenka_cmd, "run", *options, "--name", self.job_name]
        self.cmd = [*fenka, "--status-fd", str(send), "--", *self.cmd]
        inherited = *self.popen_kwargs.get("pass_fds", ()), send
        self.popen_kwargs = {**self.popen_kwargs, "pass_fds": inherited}
        with os.fdopen(receive, "rb", 0) as pipe:
            try:
                address = await self._start_process()
            finally:
                os.close(send)
                self.cmd, self.popen_kwargs = configured
            self._save(address)
            await self._until_started(pipe)
        await self._until_listening(address)
        return address

    async def _start_process(self) -> Address:
        address: tuple[str, int] = await super().start()
        return self._socket_url() if self.at_socket else address

    def _save(self, address: Address) -> None:
        """Let a hub that is killed while the server waits find it again."""
        if isinstance(address, str):
            self.server.proto, self.server.ip = address.split("://")
        else:
            self.server.ip, self.server.port = address
        self.orm_spawner.state = self.get_state()
        if session := object_session(self.orm_spawner):
            session.commit()

    async def _until_started(self, pipe: FileIO) -> None:
        """Show what `fenka run` reports, until it is replaced by the server. Raises SpawnRefused."""
        stream = asyncio.StreamReader(LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        line = ""
        with contextlib.closing(transport):
            async for line in _lines(stream):
                self.status = GRANTED if line == STARTED else line
        if line.startswith(FAILED):
            raise SpawnRefused(line.removeprefix(FAILED))
        if line != STARTED:
            raise SpawnRefused("the server was not started: the hub's log says why")

    async def progress(self) -> AsyncIterator[dict[str, object]]:
        """Yield the place in the queue and its reason, whenever they change."""
        shown = ""
        while True:
            if self.status != shown:
                shown = self.status
                yield {"progress": 50 if shown == GRANTED else 10, "message": shown}
            await asyncio.sleep(POLL_S)

    # --- where it listens --------------------------------------------------------------------------

    def get_args(self) -> list[str]:
        """Return the server's arguments."""
        args: list[str] = super().get_args()
        if not self.at_socket:
            return args
        path = self._socket().path
        # A port in the user's own settings would exclude the socket.
        return [*args, f"--ServerApp.sock={path}", f"--ServerApp.port={JUPYTER_PORT}"]

    @property
    def server(self) -> Any:
        """The server's address. JupyterHub keeps its parts only, which make no URL of a Unix socket."""
        server = super().server
        if server is not None and server.proto == UNIX:
            server.connect_url = f"{UNIX}://{server.ip}"
        return server

    @server.setter
    def server(self, server: Any) -> None:
        LocalProcessSpawner.server.fset(self, server)

    def _socket(self) -> HubSocket:
        identity = f"{self.user.name}\0{self.name}".encode()
        return HubSocket(
            Path(self.socket_directory),
            pwd.getpwnam(self.user.name).pw_uid,
            hashlib.sha256(identity).hexdigest()[:16],
        )

    def _socket_url(self) -> str:
        return _unix_url(self._socket().link)

    async def _choose_socket(self) -> bool:
        """Return whether the next server listens on a Unix socket, which is prepared. Raises SpawnRefused."""
        self._forget_listener()
        if self.unix_sockets is False:
            return False
        proxy = self.user.settings.get("proxy")
        obstacle = await asyncio.to_thread(_obstacle, proxy, self.internal_ssl)
        if not obstacle:
            try:
                self._socket().prepare()
            except (FenkaError, OSError) as why:
                raise SpawnRefused(
                    f"no server can listen in {self.socket_directory}: {why}"
                ) from why
        elif self.unix_sockets:
            raise SpawnRefused(f"{obstacle}, or set c.FenkaSpawner.unix_sockets = False")
        return not obstacle

    async def _until_listening(self, address: Address) -> None:
        """Wait until the server listens, and see to it that nobody else can. Raises SpawnRefused."""
        try:
            async with asyncio.timeout(self.http_timeout):
                while not self._is_listening(address):
                    if await self.poll() is not None:
                        raise SpawnRefused(
                            "the server ended before it listened: the hub's log says why"
                        )
                    await asyncio.sleep(LISTEN_POLL_S)
        except TimeoutError:
            raise SpawnRefused(
                f"the server has not listened for {self.http_timeout} s (c.Spawner.http_timeout): "
                "the hub's log says why"
            ) from None

    def _is_listening(self, address: Address) -> bool:
        """Return whether the server listens, and nobody else can from now on. Raises SpawnRefused."""
        if isinstance(address, str):
            return self._socket().publish()
        place = address[0] or "0.0.0.0", address[1]
        try:
            ipaddress.IPv4Address(place[0])
        except ValueError:
            return True  # The administrator's own address, not one that all users share.
        self._forget_listener()
        self.listener = copy_listener(place, self.pid)
        if self.listener is not None:
            return True
        uid = listener_uid(place)
        if uid is None:
            return False
        if uid != pwd.getpwnam(self.user.name).pw_uid:
            raise SpawnRefused(
                f"another user's program listens on port {place[1]}: start the server again"
            )
        self.log.warning(
            "%s: the server's socket cannot be copied: after its end another user can take port %s",
            self._log_name,
            place[1],
        )
        return True

    def run_post_stop_hook(self) -> Any:
        """Release the server's address. The proxy has forgotten the server by now."""
        self._forget_listener()
        with contextlib.suppress(OSError, KeyError):
            self._socket().remove()
        return super().run_post_stop_hook()

    def _forget_listener(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.listener = None

    # --- a server that runs, perhaps of an earlier hub ----------------------------------------------

    @observe("pid")
    def _remember_start(self, _: object) -> None:
        self.start_ticks = procfs.start_ticks(self.pid) or 0 if self.pid else 0

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the process from the hub's database."""
        super().load_state(state)
        self.start_ticks = state.get("start_ticks", self.start_ticks)

    def get_state(self) -> dict[str, Any]:
        """Return what another hub needs to find the process."""
        state: dict[str, Any] = super().get_state()
        return state | {"start_ticks": self.start_ticks} if self.pid else state

    async def get_url(self) -> str:
        """Return the server's URL, once it listens: the hub that started it was killed meanwhile."""
        while await asyncio.to_thread(_is_pending, self.pid):
            await asyncio.sleep(POLL_S)
        self.at_socket = self.server.proto == UNIX
        try:
            await self._until_listening(
                self._socket_url() if self.at_socket else (self.server.ip, self.server.port)
            )
        except SpawnRefused as why:
            self.log.warning("%s: %s", self._log_name, why.jupyterhub_message)
            await self.stop(now=True)
            # An exception would end the hub.
            return f"{NOBODY}{self.server.base_url}"
        url: str = await super().get_url()
        return url

    async def poll(self) -> int | None:
        """Return None while the server runs. After its end nothing of it keeps the slice."""
        pid = self.pid
        status: int | None = await super().poll()
        if status is not None and pid:
            await self._end_job()
        return status

    async def _signal(self, sig: int) -> bool:
        """Send a signal; return whether the server lives. After a boot another process may have its PID."""

        def is_meant() -> bool:
            return procfs.lives(self.pid, self.start_ticks)

        return procfs.send_signal(self.pid, sig, is_meant)

    async def _end_job(self) -> None:
        """End all programs of this server's job that are left, as of terminals and kernels."""
        try:
            uid = pwd.getpwnam(self.user.name).pw_uid
            await asyncio.to_thread(_end_jobs, uid, self.job_name)
        except (FenkaError, OSError, KeyError) as why:
            self.log.warning("whether %s has left programs is not known: %s", self._log_name, why)


def _unix_url(path: Path) -> str:
    # JupyterHub changes capitals of hosts to small letters.
    allowed = b"abcdefghijklmnopqrstuvwxyz0123456789._-"
    return f"{UNIX}://" + "".join(
        chr(byte) if byte in allowed else f"%{byte:02x}" for byte in os.fsencode(path)
    )


def _obstacle(proxy: object, internal_ssl: bool) -> str:
    """Return why servers cannot listen on Unix sockets, and what to do; empty if they can. Runs a command."""
    if find_spec("jupyterhub.httpclient") is None:
        return "this JupyterHub reaches no Unix sockets: install version 6 or newer"
    if internal_ssl:
        return "servers at Unix sockets have no TLS: leave out c.JupyterHub.internal_ssl"
    if not isinstance(proxy, ConfigurableHTTPProxy):
        return f"{type(proxy).__name__} reaches no Unix sockets: use ConfigurableHTTPProxy"
    version = _proxy_version(tuple(proxy.command))
    if tuple(map(int, version.split(".")[:2])) < PROXY_WITH_UNIX:
        wanted = ".".join(map(str, PROXY_WITH_UNIX))
        return (
            f"configurable-http-proxy {version} reaches no Unix sockets: install {wanted} or newer"
        )
    return ""


@functools.cache
def _proxy_version(command: tuple[str, ...]) -> str:
    """Return the version of the proxy; 0.0 if it does not say."""
    try:
        words = [*command, "--version"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return "0.0"
    found = re.search(r"\d+\.\d+[\w.-]*", said)
    return found[0] if found else "0.0"


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines until the writers have closed the pipe."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue  # Longer than any that fenka writes.
        if not line:
            return
        yield line.decode(errors="replace").strip()


def _snapshot() -> MachineSnapshot | None:
    """Return what the daemon knows now; None if it does not answer."""
    try:
        return get_snapshot(paths.current())
    except (FenkaError, OSError):
        return None


def _free_now() -> str:
    """Return a sentence about the cards for users."""
    snapshot = _snapshot()
    if snapshot is None:
        return "fenka does not answer now: servers with a card wait for it."
    free = ", ".join(
        f"{card.free_mib or 0} of {card.memory_mib} MiB of card {card.index} ({card.model})"
        for card in snapshot.cards
    )
    waiting = sum(job.state == "waiting" for job in snapshot.jobs)
    queue = f"; {waiting} waiting" if waiting else ""
    return f"Free now: {free or 'no card'}{queue}."


def _is_pending(pid: int) -> bool:
    """Return whether a process waits for its slice; False if the daemon does not answer."""
    snapshot = _snapshot()
    return snapshot is not None and any(
        job.pid == pid and job.state != "running" for job in snapshot.jobs
    )


def _end_jobs(uid: int, name: str) -> None:
    """End a user's job, if there is one. Raises FenkaError, OSError."""
    runtime = paths.current()
    jobs = get_snapshot(runtime).jobs
    if ids := [job.id for job in jobs if (job.uid, job.name) == (uid, name)]:
        stop_jobs(runtime, ids)
