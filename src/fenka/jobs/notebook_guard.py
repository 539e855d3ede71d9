"""An extension of a notebook's Jupyter server: it answers to one host name, which nobody can guess.

`fenka.jobs.notebook` has the server load this file, with the Python of the user's own Jupyter. So it needs
only Tornado, which Jupyter brings, and stands alone.
"""

import os
import re
from typing import Any

MODULE = "fenka_notebook_guard"

NAME = ""
"""The host name; the settings of a notebook set it."""

SOCKET = ""
"""The path of a Unix socket, for `ssh -L`; likewise."""

RESOLVED = ("127.0.0.1", "::1", "localhost")
"""Addresses at which browsers find a server whose name ends with `.localhost`."""

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
        _answer_to_name(app)
    # A file that a program of the notebook has left there is replaced. A link is not followed.
    path = name_file(app.runtime_dir, os.getpid())
    if os.path.lexists(path):
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(off or NAME)


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
