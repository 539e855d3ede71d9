"""Starts the gateways and nginx, and counts the processor time and the memory of all their processes."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
GATEWAY, OLD, NGINX = "gateway", "gateway in Python", "nginx"
PROXY = """
upstream service {{ least_conn; server {replica}; keepalive 64; keepalive_requests 100000000; }}
server {{
  listen {address} backlog=1024;
  location / {{
    proxy_pass http://service; proxy_http_version 1.1; proxy_set_header Connection "";
    proxy_request_buffering off;
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
events {{ worker_connections 24000; }}
http {{
  access_log off; keepalive_requests 100000000; keepalive_timeout 3600s;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  {servers}
}}
"""


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy.

    Attributes:
        name: What it is.
        port: Where it listens.
        process: Its first process.
    """

    name: str
    port: int
    process: subprocess.Popen[bytes]

    def processor_s(self) -> float:
        """Return the processor time that all its processes and threads have had."""
        times = [
            int(path.read_text().split()[0])
            for process in self._processes()
            for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        ]
        return sum(times) / 1e9

    def memory_mib(self) -> float:
        """Return the memory of all its processes; what they share counts once."""
        return sum(process.memory_full_info().pss for process in self._processes()) / 2**20

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def proxies(
    root: Path, replica: int, old: Path | None, servers: str = PROXY
) -> Iterator[list[Running]]:
    """Run nginx if it is installed, the old gateway if its tree is given, and the gateway.

    Args:
        root: A directory for their files.
        replica: The port of the replica behind all.
        old: A tree with the gateway that was Python, and `.venv` with what it needs.
        servers: Nginx's configuration of its server.
    """
    with contextlib.ExitStack() as stack:
        running = list[Running]()
        if shutil.which("nginx"):
            running.append(
                stack.enter_context(nginx(root, servers, free_port(), f"{LOOPBACK}:{replica}"))
            )
        if old is not None:
            python = [str(old / ".venv/bin/python")]
            running.append(stack.enter_context(_gateway(OLD, root, replica, python, old / "src")))
        running.append(stack.enter_context(_gateway(GATEWAY, root, replica, [sys.executable])))
        yield running


@contextlib.contextmanager
def _gateway(
    name: str, root: Path, replica: int, python: list[str], sources: Path | None = None
) -> Iterator[Running]:
    """Run a gateway in front of a replica."""
    port = free_port()
    path = root / f"{port}.json"
    # Without the fields that the old gateway does not know.
    path.write_text(
        json.dumps(
            {
                "format": "fenka.gateway/1",
                "service": "bert",
                "versions": [
                    {
                        "name": "v1",
                        "weight": 100,
                        "replicas": [{"host": LOOPBACK, "ports": {"http": replica}}],
                    }
                ],
            }
        )
    )
    words = ["-m", "fenka", "gateway", "--table", str(path), "--listen", f"http={LOOPBACK}:{port}"]
    environment = {**os.environ, "PYTHONPATH": str(sources)} if sources else dict(os.environ)
    with _started(name, [*python, *words], port, environment) as running:
        yield running


@contextlib.contextmanager
def nginx(root: Path, servers: str, port: int, replica: str = "") -> Iterator[Running]:
    """Run nginx with one worker. replica: what replaces {replica} in the configuration of its servers."""
    filled = servers.format(address=f"{LOOPBACK}:{port}", replica=replica)
    configuration = root / f"{port}.conf"
    configuration.write_text(_NGINX.format(root=root, name=port, servers=filled))
    words = ["nginx", "-c", str(configuration)]
    with _started(NGINX, words, port, dict(os.environ)) as running:
        yield running


@contextlib.contextmanager
def _started(
    name: str, words: list[str], port: int, environment: dict[str, str]
) -> Iterator[Running]:
    process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{words[0]} does not answer on port {port}")
            time.sleep(0.05)
        yield Running(name, port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    """Return whether the program behind a port reads requests: the gateway's socket is open before that."""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 5) as trial:
        trial.settimeout(5)
        trial.sendall(b"nonsense\r\n\r\n")
        return bool(trial.recv(1))
    return False
