"""A service's program that stops to listen, and listens again, as files tell it: `leaves_port.py DIRECTORY`.

It writes its port to `port`. While there is a file `away` in the directory it does not listen, which `left`
says. Before its first attempt it waits for `go`. If it cannot bind its port, it ends.
"""

import os
import socket
import sys
import time
from pathlib import Path

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nmine"

directory = Path(sys.argv[1])
port = int(os.environ.get("PORT") or os.environ["MASTER_PORT"])
(directory / "port.new").write_text(str(port))
(directory / "port.new").rename(directory / "port")
while not (directory / "go").exists():
    time.sleep(0.01)
if "PORT" not in os.environ:
    socket.create_server(("", port)).close()
    sys.exit()
while True:
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.01)
        while not (directory / "away").exists():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(5)
                if connection.recv(1 << 16):
                    connection.sendall(OK)
    (directory / "left").touch()
    while (directory / "away").exists():
        time.sleep(0.01)
