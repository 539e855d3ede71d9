"""Runs commands on another host of an MPI job, in place of ssh. It needs only Python 3.5.

`agent.py serve` listens on a worker; `agent.py HOST COMMAND...` runs a command there, as ssh does. Output
and exit code are passed on. When the caller is gone, the command is ended.

Both sides hold the job's key. Each sends a random number; all frames are JSON with a MAC of a key derived
from both numbers, so that nothing can be forged, repeated or reordered. Contents are not encrypted.

Environment: FENKA_AGENT_PORT; FENKA_AGENT_SOCKETS, a directory: host NAME is the Unix socket NAME in it, and
`serve NAME` listens there; FENKA_AGENT_KEY, the file with the key; without it, `key` beside this file;
FENKA_AGENT_GRACE, the seconds that a command has to end when its caller is gone.
"""

import base64
import binascii
import collections
import contextlib
import hashlib
import hmac
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

DEFAULT_PORT = 23457
MAX_FRAME = 4 * 1024 * 1024
MAX_FIRST_FRAME = 64 * 1024
"""Of a caller's first frame, which is in memory before its MAC shows who sent it."""
MAX_COMMAND = 1024 * 1024
"""Characters: more than the kernel accepts for a program's argument."""
COMMAND_PART = 8 * 1024
"""Characters of a command in a frame: JSON may write one as six."""
CHUNK = 64 * 1024
NONCE = 32
MAC = 32

HANDSHAKE_S = 30.0
"""A connection that has not sent a valid request by then is closed."""
MAX_UNKNOWN = 64
"""Connections without a valid request. When there are more, the oldest is closed."""
CONNECT_S = 60.0
"""Names of new pods take some seconds until they resolve."""
TERMINATE_S = float(os.environ.get("FENKA_AGENT_GRACE", "10"))
"""Between SIGTERM and SIGKILL for a command whose caller is gone."""
DRAIN_S = 1.0
"""How long output is awaited after a command's end, if other processes hold its pipes."""

FAILED = 255
"""ssh's exit code for failures of its own."""


class Refused(Exception):
    """The other side is not who it should be, or sends what it should not."""


class Channel:
    """Frames over a connection. side: b"c" at the caller, b"s" at the server."""

    def __init__(self, connection: socket.socket, key: bytes, side: bytes) -> None:
        self.socket = connection
        self._key = key
        self._side = side
        self._other = b"s" if side == b"c" else b"c"
        self._sent = 0
        self._received = 0
        self._session = b""

    def agree(self, deadline: Optional[float]) -> None:
        """Exchange random numbers. Raises Refused, OSError."""
        own = os.urandom(NONCE)
        self._send(own)
        other = self._read(NONCE, deadline)
        numbers = own + other if self._side == b"c" else other + own
        self._session = hmac.new(self._key, b"fenka-agent-1" + numbers, hashlib.sha256).digest()

    def send(self, message: Dict[str, Any]) -> None:
        """Send a frame. Raises OSError."""
        payload = json.dumps(message).encode("ascii")
        mac = self._mac(self._side, self._sent, payload)
        self._sent += 1
        self._send(struct.pack(">I", len(payload)) + mac + payload)

    def receive(self, deadline: Optional[float] = None) -> Dict[str, Any]:
        """Return the next frame. Raises Refused, OSError."""
        (size,) = struct.unpack(">I", self._read(4, deadline))
        known = self._received or self._side == b"c"
        if size > (MAX_FRAME if known else MAX_FIRST_FRAME):
            raise Refused("a frame of {} bytes is too long".format(size))
        mac = self._read(MAC, deadline)
        payload = self._read(size, deadline)
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, payload)):
            raise Refused("the other side does not have the key of this job")
        self._received += 1
        message = json.loads(payload.decode("ascii"))
        if not isinstance(message, dict):
            raise Refused("a frame is not understood")
        return message

    def _mac(self, side: bytes, number: int, payload: bytes) -> bytes:
        text = side + struct.pack(">Q", number) + payload
        return hmac.new(self._session, text, hashlib.sha256).digest()

    def _send(self, data: bytes) -> None:
        # The timeout of a read that had a deadline must not hold for this.
        self.socket.settimeout(None)
        self.socket.sendall(data)

    def _read(self, size: int, deadline: Optional[float]) -> bytes:
        parts = []
        while size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Refused("the other side says nothing")
                self.socket.settimeout(left)
            else:
                self.socket.settimeout(None)
            try:
                part = self.socket.recv(min(size, CHUNK))
            except socket.timeout:
                raise Refused("the other side says nothing") from None
            if not part:
                raise Refused("the connection was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def read_key() -> bytes:
    """Return the job's key. Raises OSError, ValueError."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "key")
    with open(os.environ.get("FENKA_AGENT_KEY", beside)) as file:
        key = binascii.unhexlify(file.read().strip())
    if len(key) < 16:
        raise ValueError("the job's key is too short")
    return key


def notice_loss(connection: socket.socket) -> None:
    """Break the connection about a minute after its other host has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class AgentServer:
    """Runs commands for callers, each in a session of its own."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener = listener
        self._key = key
        self._lock = threading.Lock()
        self._unknown = collections.OrderedDict()  # type: collections.OrderedDict[int, socket.socket]
        self._commands = {}  # type: Dict[int, subprocess.Popen[bytes]]
        self._ending = False

    def serve(self) -> int:
        """Accept connections until SIGTERM; return the exit code."""
        receive, wake = socket.socketpair()
        wake.setblocking(False)
        signal.signal(signal.SIGTERM, lambda *_: wake.send(b"x"))
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(receive, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select(1.0)]
            if receive in ready:
                break
            if self._listener in ready:
                self._accept()
            self._reap()
        self._end_all()
        return 128 + signal.SIGTERM

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The caller is gone already, or there are too many open files.
            time.sleep(0.01)
            return
        with self._lock:
            self._unknown[connection.fileno()] = connection
            oldest = None
            if len(self._unknown) > MAX_UNKNOWN:
                _, oldest = self._unknown.popitem(last=False)
        if oldest is not None:
            shut_down(oldest)
        thread = threading.Thread(target=self._attend, args=(connection,))
        thread.daemon = True
        thread.start()

    def _attend(self, connection: socket.socket) -> None:
        number = connection.fileno()
        try:
            channel = Channel(connection, self._key, b"s")
            deadline = time.monotonic() + HANDSHAKE_S
            command = receive_command(channel, deadline)
            with self._lock:
                self._unknown.pop(number, None)
            notice_loss(connection)
            self._run(channel, command)
        except (Refused, OSError, ValueError):
            # Probes connect and say nothing, so this is no news.
            pass
        finally:
            with self._lock:
                self._unknown.pop(number, None)
            connection.close()

    def _run(self, channel: Channel, command: str) -> None:
        with self._lock:
            if self._ending:
                return
            process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._commands[process.pid] = process
        try:
            if not relay(channel, process):
                terminate(process)
                return
            code = process.wait()
            channel.send({"exit": code if code >= 0 else 128 - code})
        except (OSError, Refused):
            terminate(process)
        finally:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            with self._lock:
                self._commands.pop(process.pid, None)

    def _reap(self) -> None:
        """Wait for orphans, which the first process of a container inherits."""
        if os.getpid() != 1:
            return
        while True:
            with self._lock:
                try:
                    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:
                    return
                if ended is None or ended.si_pid in self._commands:
                    return
                os.waitpid(ended.si_pid, 0)

    def _end_all(self) -> None:
        """End all commands. The kubelet sends SIGKILL when the grace period is over."""
        self._listener.close()
        with self._lock:
            self._ending = True
            commands = list(self._commands.values())
        if os.getpid() == 1:
            # Daemons of MPI leave the session of the command that starts them.
            kill(-1, signal.SIGTERM, os.kill)
        for process in commands:
            kill(process.pid, signal.SIGTERM, os.killpg)
        while True:
            self._reap()
            with self._lock:
                if not self._commands and not has_children():
                    return
            time.sleep(0.05)


def receive_command(channel: Channel, deadline: float) -> str:
    """Return the command that a caller requests. Raises Refused, OSError, ValueError."""
    channel.agree(deadline)
    parts, size, more = [], 0, True
    while more:
        message = channel.receive(deadline)
        part, more = message.get("command"), message.get("more") is True
        if not isinstance(part, str) or "\0" in part:
            raise Refused("a request names no command")
        parts.append(part)
        size += len(part)
        if size > MAX_COMMAND:
            raise Refused("a command is too long")
    return "".join(parts)


def send_command(channel: Channel, command: str) -> None:
    """Request a command, in parts that the other side receives before it knows this one. Raises OSError."""
    starts = range(0, max(len(command), 1), COMMAND_PART)
    for start in starts:
        part = command[start : start + COMMAND_PART]
        channel.send({"command": part, "more": start + COMMAND_PART < len(command)})


def has_children() -> bool:
    """Return whether the first process of a container has children left."""
    if os.getpid() != 1:
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def relay(channel: Channel, process: "subprocess.Popen[bytes]") -> bool:
    """Send a command's output until its end. Return False if the caller is gone."""
    streams = {process.stdout: "out", process.stderr: "err"}
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ)
        selector.register(channel.socket, selectors.EVENT_READ)
        drained_at = None  # type: Optional[float]
        while len(selector.get_map()) > 1 or process.poll() is None:
            if process.poll() is not None:
                now = time.monotonic()
                drained_at = now + DRAIN_S if drained_at is None else drained_at
                if now > drained_at:
                    break
            for key, _ in selector.select(0.1):
                if key.fileobj is channel.socket:
                    # A caller sends nothing after its request.
                    return False
                data = os.read(key.fd, CHUNK)
                if data:
                    text = base64.b64encode(data).decode("ascii")
                    channel.send({"stream": streams[key.fileobj], "data": text})  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
    return True


def terminate(process: "subprocess.Popen[bytes]") -> None:
    """End a command with all processes of its session's group."""
    kill(process.pid, signal.SIGTERM, os.killpg)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERMINATE_S)
    # Also those that outlive the first one.
    kill(process.pid, signal.SIGKILL, os.killpg)
    process.wait()


def kill(number: int, name: "signal.Signals", send: Any) -> None:
    """Send a signal to processes that may be gone."""
    with contextlib.suppress(OSError):
        send(number, name)


def shut_down(connection: socket.socket) -> None:
    """Break a connection that another thread reads from."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listen(name: str) -> socket.socket:
    """Return the socket on which callers find this host. Raises OSError."""
    directory = os.environ.get("FENKA_AGENT_SOCKETS")
    if directory:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(directory, name))
        listener.listen(128)
        return listener
    port = int(os.environ.get("FENKA_AGENT_PORT", DEFAULT_PORT))
    try:
        return listen_at(socket.AF_INET6, "::", port)
    except OSError:
        # No IPv6 here.
        return listen_at(socket.AF_INET, "0.0.0.0", port)


def listen_at(family: int, address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    return listener


def connect(host: str) -> socket.socket:
    """Return a connection to a host's agent. Raises OSError."""
    directory = os.environ.get("FENKA_AGENT_SOCKETS")
    port = int(os.environ.get("FENKA_AGENT_PORT", DEFAULT_PORT))
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            if directory:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.connect(os.path.join(directory, host))
                return connection
            return socket.create_connection((host, port), timeout=CONNECT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def call(host: str, command: str) -> int:
    """Run a command on another host and return its exit code. Raises Refused, OSError, ValueError."""
    channel = Channel(connect(host), read_key(), b"c")
    notice_loss(channel.socket)
    channel.agree(time.monotonic() + HANDSHAKE_S)
    send_command(channel, command)
    while True:
        message = channel.receive()
        if "exit" in message:
            return int(message["exit"])
        write_all(1 if message.get("stream") == "out" else 2, base64.b64decode(message["data"]))


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]


def parse(words: List[str]) -> Tuple[str, str]:
    """Return the host and the command of ssh's command line. Raises ValueError."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-l", "-p", "-o", "-i", "-F") and rest:
            rest.pop(0)
    if len(rest) < 2:
        raise ValueError("usage: agent HOST COMMAND...")
    return rest[0].rpartition("@")[2], " ".join(rest[1:])


def main(words: List[str]) -> int:
    """Serve, or run a command on another host."""
    host = "serve"
    try:
        if words[:1] == ["serve"]:
            server = AgentServer(listen("".join(words[1:2])), read_key())
            print("fenka: waiting for mpirun", flush=True)
            return server.serve()
        host, command = parse(words)
        return call(host, command)
    except KeyboardInterrupt:
        return 130
    except (Refused, OSError, ValueError, KeyError) as why:
        sys.stderr.write("fenka: agent {}: {}\n".format(host, why))
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
