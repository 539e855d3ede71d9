"""A server of JupyterHub's in place of Jupyter: starts at once, and says who and where it is.

GET …           {uid, groups, directory, total, cards, environment}; total: MiB of the card, 0 without one
GET …/leave     starts a program that outlives it, and returns its PID
"""

import contextlib
import ctypes
import json
import os
import socketserver
import subprocess
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MIB = 1 << 20


def card() -> tuple[int, int]:
    """Return the number of cards, and the memory of the first one in MiB."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return 0, 0
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return count.value, total.value // MIB


CARDS, TOTAL = card()


class Handler(BaseHTTPRequestHandler):
    """Answers each GET."""

    def do_GET(self) -> None:
        """Answer with what this process is."""
        left = None
        if self.path.endswith("/leave"):
            left = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
        said = {
            "left": left,
            "pid": os.getpid(),
            "uid": os.getuid(),
            "groups": os.getgroups(),
            "directory": os.getcwd(),
            "cards": CARDS,
            "total": TOTAL,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "name": os.environ["JUPYTERHUB_USER"],
        }
        text = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", os.environ.get("HUB_VERSION", ""))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Write no log."""


class Server(ThreadingHTTPServer):
    """A server that looks up no names: there may be no resolver."""

    def server_bind(self) -> None:
        """Bind the address."""
        socketserver.TCPServer.server_bind(self)


class UnixServer(socketserver.ThreadingUnixStreamServer):
    """A server at a Unix socket."""

    def get_request(self) -> tuple[Any, Any]:
        """Return a connection, and an address as of ports."""
        return self.socket.accept()[0], ("", 0)


def main() -> None:
    """Listen where the hub says."""
    url = urllib.parse.urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
    if url.scheme == "http+unix":
        path = urllib.parse.unquote(url.netloc)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        UnixServer(path, Handler).serve_forever()
    else:
        Server((url.hostname or "", url.port or 0), Handler).serve_forever()


if __name__ == "__main__":
    main()
