"""Measure the gateway between a client and a replica, against a direct connection and against nginx.

Client and replica are loops over epoll with messages of fixed size, so the proxy is what costs. Latency: one
connection, one request after the other. Capacity: requests of 32 connections per second of the proxy's own
processor time, which does not depend on what else the machine does at the moment.
"""

import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fenka.gateway.table import ReplicaEntry, RoutingTable, VersionEntry
from fenka.gateway.table_file import write_table

Start = Callable[[Path, int, int], subprocess.Popen[bytes]]
"""Starts a proxy, given a folder, the replica's port and its own port."""

LOOPBACK = "127.0.0.1"
CONNECTIONS = 32
REQUESTS = 30_000
SEQUENTIAL = 2_000
ROUNDS = 3
LATENCY_GOAL_MS, CAPACITY_GOAL, NGINX_GOAL = 0.5, 3000, 1 / 3

BODY = b'{"inputs": [' + b", ".join(b"0.%03d" % number for number in range(60)) + b"]}"
REQUEST = (
    b"POST /v1/models/bert:predict HTTP/1.1\r\nHost: bert.default\r\nUser-Agent: bench/1\r\n"
    b"Accept: application/json\r\nAccept-Encoding: gzip\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer 0123456789abcdef0123456789abcdef\r\nX-Request-Id: 0123456789\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
RESPONSE = (
    b"HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 12:00:00 GMT\r\nServer: model\r\n"
    b"Content-Type: application/json\r\nX-Model-Version: 7\r\nContent-Length: %d\r\n\r\n%s"
    % (len(BODY), BODY)
)
NGINX = """
worker_processes 1; daemon off; pid {root}/nginx.pid; error_log {root}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 100000000;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  upstream service {{ least_conn; server {replica}; keepalive 64; keepalive_requests 100000000; }}
  server {{
    listen {address};
    location / {{
      proxy_pass http://service; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    }}
  }}
}}
"""


def serve_replica(listening: socket.socket) -> None:
    """Answer each request with the same response, until killed."""
    poll = select.epoll()
    poll.register(listening, select.EPOLLIN)
    open_connections: dict[int, tuple[socket.socket, bytearray]] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == listening.fileno():
                connection, _ = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                open_connections[connection.fileno()] = connection, bytearray()
                poll.register(connection, select.EPOLLIN)
                continue
            connection, received = open_connections[descriptor]
            data = connection.recv(65536)
            received += data
            if not data:
                del open_connections[descriptor]
                connection.close()
            elif received.endswith(BODY):
                received.clear()
                connection.sendall(RESPONSE)


def connect(port: int) -> socket.socket:
    """Return a connection."""
    connection = socket.create_connection((LOOPBACK, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def request(connection: socket.socket) -> None:
    """Send a request and receive its response."""
    connection.sendall(REQUEST)
    received = b""
    while not received.endswith(BODY):
        received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


def latency_ms(port: int) -> float:
    """Return the median milliseconds of a request on one connection."""
    connection = connect(port)
    for _ in range(100):
        request(connection)
    times = []
    for _ in range(SEQUENTIAL):
        began = time.perf_counter()
        request(connection)
        times.append(time.perf_counter() - began)
    connection.close()
    return statistics.median(times) * 1000


def load(port: int) -> None:
    """Send REQUESTS requests over CONNECTIONS connections."""
    poll = select.epoll()
    connections = {}
    for _ in range(CONNECTIONS):
        connection = connect(port)
        connections[connection.fileno()] = connection, bytearray()
        poll.register(connection, select.EPOLLIN)
        connection.sendall(REQUEST)
    unsent, unanswered = REQUESTS - CONNECTIONS, REQUESTS
    while unanswered:
        for descriptor, _ in poll.poll():
            connection, received = connections[descriptor]
            received += connection.recv(65536)
            if received.endswith(BODY):
                received.clear()
                unanswered -= 1
                if unsent:
                    unsent -= 1
                    connection.sendall(REQUEST)
    for connection, _ in connections.values():
        connection.close()


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far, which the kernel counts in nanoseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def capacity(port: int, pid: int) -> float:
    """Return how many requests a process serves in a second of its processor time."""
    before = processor_s(pid)
    load(port)
    return REQUESTS / (processor_s(pid) - before)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until something listens on a port."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as trial:
            if trial.connect_ex((LOOPBACK, port)) == 0:
                return
        time.sleep(0.05)
    sys.exit(f"nothing listens on port {port} after 60 s")


def start_gateway(root: Path, replica: int, port: int) -> subprocess.Popen[bytes]:
    """Start a gateway with one process."""
    entry = ReplicaEntry(LOOPBACK, {"http": replica})
    table = RoutingTable("fenka.gateway/1", "bert", [VersionEntry("v1", 100, [entry])])
    write_table(root / "table.json", table)
    words = ["gateway", "--table", str(root / "table.json"), "--listen", f"http={LOOPBACK}:{port}"]
    return subprocess.Popen([sys.executable, "-m", "fenka", *words])


def start_nginx(root: Path, replica: int, port: int) -> subprocess.Popen[bytes]:
    """Start nginx with one worker."""
    configuration = root / "nginx.conf"
    configuration.write_text(
        NGINX.format(root=root, replica=f"{LOOPBACK}:{replica}", address=f"{LOOPBACK}:{port}")
    )
    return subprocess.Popen(["nginx", "-c", str(configuration)])


def worker_of(process: subprocess.Popen[bytes]) -> int:
    """Return the process that serves: nginx's is a child."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else process.pid


def measure(replica: int, starts: dict[str, Start]) -> bool:
    """Alternate all, and print a Markdown table. Return whether the goals are met."""
    ports = {name: free_port() for name in starts}
    direct: list[float] = []
    latencies: dict[str, list[float]] = {name: [] for name in starts}
    capacities: dict[str, list[float]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        processes = {name: start(root, replica, ports[name]) for name, start in starts.items()}
        try:
            for port in ports.values():
                wait_for(port)
            for _ in range(ROUNDS):
                direct.append(latency_ms(replica))
                for name, port in ports.items():
                    latencies[name].append(latency_ms(port))
                    capacities[name].append(capacity(port, worker_of(processes[name])))
        finally:
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
                process.wait()
    base = statistics.median(direct)
    print("| way to the replica | p50 ms | added ms | requests/s of one core |\n|---|---|---|---|")
    print(f"| direct (baseline) | {base:.3f} | | |")
    for name in starts:
        p50, served = statistics.median(latencies[name]), statistics.median(capacities[name])
        print(f"| {name} | {p50:.3f} | {p50 - base:.3f} | {served:,.0f} |")
    added = statistics.median(latencies["gateway"]) - base
    served = statistics.median(capacities["gateway"])
    met = added <= LATENCY_GOAL_MS and served >= CAPACITY_GOAL
    print(
        f"\nAdded {added:.3f} ms, goal {LATENCY_GOAL_MS} ms; {served:,.0f} requests/s of one core,"
    )
    print(f"goal {CAPACITY_GOAL:,}.", end=" ")
    if "nginx" in starts:
        share = served / statistics.median(capacities["nginx"])
        met = met and share >= NGINX_GOAL
        print(f"That is {share:.2f} of nginx, goal {NGINX_GOAL:.2f}.", end=" ")
    else:
        print("nginx is not installed, so it is not compared: apt install nginx-light.", end=" ")
    print("Goals met." if met else "Goals missed.")
    return met


def main() -> None:
    """Start the replica and measure."""
    listening = socket.create_server((LOOPBACK, 0), backlog=256)
    replica = os.fork()
    if replica == 0:
        serve_replica(listening)
    starts: dict[str, Start] = {"gateway": start_gateway}
    if shutil.which("nginx"):
        starts = {"nginx": start_nginx, **starts}
    try:
        met = measure(listening.getsockname()[1], starts)
    finally:
        os.kill(replica, signal.SIGKILL)
        os.waitpid(replica, 0)
    sys.exit(not met)


main()
