"""A service's program for the tests: answers at $PORT or $SOCKET with what it was started with, as JSON.

Paths: `/hold/FILE` answers when the file exists, `/crash` ends the process, `/ready` fails until the file
$READY exists. With `--crash` the program ends at once.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer, ThreadingUnixStreamServer

PORTS = ("PORT", "METRICS_PORT", "SOCKET")


class Handler(BaseHTTPRequestHandler):
    """Answers GET."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer, and print who was asked."""
        print("asked", self.path, flush=True)
        path, _, file = self.path.removeprefix("/").partition("/")
        if path == "crash":
            os._exit(7)
        while path == "hold" and not Path(f"/{file}").exists():
            time.sleep(0.01)
        ready = path != "ready" or Path(os.environ["READY"]).exists()
        body = json.dumps(
            {
                "arguments": sys.argv[1:],
                "pid": os.getpid(),
                "leased": Path("/run/fenka/lease/control").exists(),
                "ports": {name: os.environ.get(name) for name in PORTS},
                "directory": str(Path.cwd()),
                "mark": os.environ.get("MARK"),
            }
        ).encode()
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing more."""


if "--crash" in sys.argv:
    sys.exit("this version is broken")
server: BaseServer
if "SOCKET" in os.environ:
    server = ThreadingUnixStreamServer(os.environ["SOCKET"], Handler)
else:
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
with server:
    print("listening", flush=True)
    server.serve_forever()
