"""Serve HTTP on $PORT, and leave the port for a moment again and again, until another program takes it.

While it is gone, other users' programs can listen there. The standard library is enough.
"""

import contextlib
import os
import socket
import time

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nmine"
SERVING_S, AWAY_S = 4.0, 0.5


def serve(seconds: float) -> None:
    """Answer requests on the port for this time. Raises OSError if another program has it."""
    end = time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", int(os.environ["PORT"]))) as server:
        server.settimeout(0.05)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(1)
                    if connection.recv(1 << 16):
                        connection.sendall(RESPONSE)


while True:
    serve(SERVING_S)
    time.sleep(AWAY_S)
