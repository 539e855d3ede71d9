"""Starts the gateway and nginx, each with one process that serves, and counts their processor time."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fenka.isolation.lease_files import write_atomically
from fenka.jobs.routing_table import ReplicaEntry, RoutingTable, VersionEntry, encode

LOOPBACK = "127.0.0.1"
PROXY = """
upstream service {{ least_conn; server {replica}; keepalive 64; keepalive_requests 100000000; }}
server {{
  listen {address};
  location / {{
    proxy_pass http://service; proxy_http_version 1.1; proxy_set_header Connection "";
    proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
  }}
}}
"""
GRPC_PROXY = """
upstream service {{ least_conn; server {replica}; keepalive 64; keepalive_requests 100000000; }}
server {{
  listen {address} http2;
  location / {{
    grpc_pass grpc://service; grpc_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
  }}
}}
"""
GRPC_REPLICA = """
server {{
  listen {address} http2;
  location / {{ default_type application/grpc; return 200 "{replica}"; }}
}}
"""
_NGINX = """
worker_processes 1; daemon off; pid {root}/{name}.pid; error_log {root}/{name}.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 100000000;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  {servers}
}}
"""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def processor_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time that the serving process has had: nginx's is a child."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pid = children[0] if children else process.pid
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def gateway(root: Path, replica: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway in front of a replica."""
    entry = ReplicaEntry(LOOPBACK, {"http": replica})
    table = RoutingTable("fenka.gateway/1", "bert", [VersionEntry("v1", 100, [entry])])
    path = root / f"{port}.json"
    write_atomically(path, encode(table))
    words = ["gateway", "--table", str(path), "--listen", f"http={LOOPBACK}:{port}"]
    with _running([sys.executable, "-m", "fenka", *words], port) as process:
        yield process


@contextlib.contextmanager
def nginx(
    root: Path, servers: str, port: int, replica: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run nginx with one worker. replica: what replaces {replica} in the configuration of its servers."""
    filled = servers.format(address=f"{LOOPBACK}:{port}", replica=replica)
    configuration = root / f"{port}.conf"
    configuration.write_text(_NGINX.format(root=root, name=port, servers=filled))
    with _running(["nginx", "-c", str(configuration)], port) as process:
        yield process


@contextlib.contextmanager
def _running(words: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words)
    try:
        end = time.monotonic() + 60
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{words[0]} does not listen on port {port}")
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex((LOOPBACK, port)) == 0
