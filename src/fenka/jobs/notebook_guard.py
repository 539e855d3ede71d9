"""An extension of a notebook's Jupyter server: it answers to one host name, which nobody can guess.

`fenka.jobs.notebook` has the server load this file, with the Python of the user's own Jupyter. So it needs
only Tornado, which Jupyter brings, and stands alone.
"""

import errno
import os
import random
import re
import socket
from typing import Any

MODULE = "fenka_notebook_guard"

NAME = ""
"""The host name; the settings of a notebook set it."""

SOCKET = ""
"""The path of a Unix socket, for `ssh -L`; likewise."""

RESOLVED = ("127.0.0.1", "::1", "localhost")
"""Addresses at which browsers find a server whose name ends with `.localhost`."""

MAX_DRAWN = 20
"""Ports that are tried until one is free at all loopback addresses."""

held: "list[socket.socket]" = []
"""Sockets that keep others from answering under the server's name. They end with the server."""

MAX_PATH_BYTES = 107
"""Of a Unix socket, as unix(7) has it."""


SWITCHES = ("ip", "allow_remote_access", "certfile", "sock")
"""Settings by which users have their server listen elsewhere: then it has no name of its own."""


def name_file(runtime_dir: str, pid: int) -> str:
    """Return the file with the name to which a server answers, or with the setting that forbids it one."""
    return os.path.join(runtime_dir, f"fenka-name-{pid}")


def _switch(app: Any) -> str:
    """Return the first setting by which the server has no name of its own; empty for none."""
    given = {name: getattr(app, name, None) for name in SWITCHES}
    given["ip"] = given["ip"] not in RESOLVED
    return next((name for name in SWITCHES if given[name]), "")


def _load_jupyter_server_extension(app: Any) -> None:
    """Refuse other names, unless the user's settings have the server listen elsewhere."""
    off = _switch(app)
    if not off:
        _hold_port(app)
        _answer_to_name(app)
    # A file that a program of the notebook has left there is replaced. A link is not followed.
    path = name_file(app.runtime_dir, os.getpid())
    if os.path.lexists(path):
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(off or NAME)


def _hold_port(app: Any) -> None:
    """Hold the server's port at all loopback addresses, or draw another port for it.

    Browsers look for the name at ::1 first, where any user may listen. fenka.server.loopback_name does so for
    other servers. A port that was asked for is not replaced: then the server ends.
    """
    if app.ip == "localhost":
        app.ip = RESOLVED[0]
    ports = [app.port]
    if app.port_retries:
        ports += [random.randint(23456, 32767) for _ in range(MAX_DRAWN)]
    for port in ports:
        try:
            held.extend(_held(app.ip, port))
        except OSError:
            continue
        # Jupyter would try other ports, which are not held.
        app.port, app.port_retries = port, 0
        return
    app.log.critical(
        "Another program has port %d at another loopback address, where browsers would find it under this "
        "notebook's name: name another port.",
        app.port,
    )
    app.exit(1)


def _held(ip: str, port: int) -> "list[socket.socket]":
    """Return sockets at the loopback address at which the server does not listen. Raises OSError."""
    family, other = (socket.AF_INET, "127.0.0.1") if ":" in ip else (socket.AF_INET6, "::1")
    place = trial = None
    try:
        trial = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind((ip, port))
        place = socket.socket(family)
        place.bind((other, port))
    except OSError as why:
        if place is not None:
            place.close()
        if why.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT):
            return []  # The machine has no such address, so nobody listens there.
        raise
    finally:
        if trial is not None:
            trial.close()
    return [place]


def _answer_to_name(app: Any) -> None:
    from tornado.web import RequestHandler

    class OtherName(RequestHandler):
        def prepare(self) -> None:
            self.set_status(421, "Misdirected Request")
            self.finish(
                "This notebook is not called that: open the address that `fenka ps` prints.\n"
            )

        def data_received(self, chunk: bytes) -> None:
            """Take no body."""

    app.web_app.add_handlers(f"(?!{re.escape(NAME)}$).*", [(".*", OtherName)])
    app.custom_display_url = f"http://{NAME}:{app.port}{app.base_url}lab"
    _listen_at_socket(app)


def _listen_at_socket(app: Any) -> None:
    from tornado.httpserver import HTTPServer
    from tornado.netutil import bind_unix_socket

    if len(os.fsencode(SOCKET)) <= MAX_PATH_BYTES:
        HTTPServer(app.web_app).add_socket(bind_unix_socket(SOCKET, mode=0o600))
