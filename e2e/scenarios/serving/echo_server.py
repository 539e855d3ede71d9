"""Answer each request by HTTP with the value of VERSION, and finish all requests after SIGTERM."""

import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers GET."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the version."""
        answer = os.environ["VERSION"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


server = ThreadingHTTPServer(("", int(os.environ["PORT"])), Handler)
# Not in the handler itself: shutdown() waits for the loop that the handler interrupts.
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
print("listens", flush=True)
server.serve_forever()
server.server_close()
