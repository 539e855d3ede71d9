"""Client and replica of HTTP/1.1: loops over epoll with messages of fixed size. The proxy is what costs."""

import select
import socket
import statistics
import time

from bench.gateway.proxies import LOOPBACK

CONNECTIONS = 32
REQUESTS = 30_000
SEQUENTIAL = 2_000

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
            try:
                data = connection.recv(65536)
            except ConnectionError:
                data = b""
            # Bodies that do not end are not kept.
            received += data
            del received[: -2 * len(REQUEST)]
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
        part = connection.recv(65536)
        assert part, "the connection has ended"
        received += part
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
