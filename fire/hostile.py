"""Attack neighbours and the daemon as an ordinary user: `hostile.py ATTACK [ARGUMENT…]`.

A lasting attack prints `ready` and runs until its stdin ends; others print `done: …` at the end. A line
`succeeded: …` means that an invariant is violated. The program uses only the standard library.
"""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

RUNTIME = Path("/run/fenka")
SOCKET = str(RUNTIME / "daemon.sock")
CONNECTIONS, DEPARTED, LINGERING = 300, 100, 20
DEPTH = 100_000


def in_own_run_directory(*commands: str) -> None:
    """Run commands that prepare /run/fenka/lease in a mount namespace of the attacker, and keep it."""
    script = "mount -t tmpfs tmpfs /run && mkdir -p /run/fenka/lease /run/fenka/account"
    steps = " && ".join([script, *commands, "echo ready", "read end"])
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", steps]
    subprocess.run(words, check=False)


def fifo() -> None:
    """Offer a FIFO as control page, which blocks a reader."""
    in_own_run_directory("mkfifo /run/fenka/lease/control")


def claim_by_mount(lease: str) -> None:
    """Claim membership of another lease by mounting its directory."""
    mount = f"mount --bind /proc/1/root{RUNTIME}/leases/{lease}/lease /run/fenka/lease"
    in_own_run_directory(f"({mount} || true)")


def claim_by_environment(lease: str) -> None:
    """Claim membership of another lease by environment variables."""
    environment = os.environ | {"FENKA_LEASE": f"{RUNTIME}/leases/{lease}"}
    subprocess.run(["sh", "-c", "echo ready; read end"], env=environment, check=False)


def account(lease: str) -> None:
    """Open and truncate the account of another lease."""
    slots = RUNTIME / "leases" / lease / "account" / "slots"
    for flags, action in ((os.O_RDWR, "open"), (os.O_WRONLY | os.O_TRUNC, "truncate")):
        with contextlib.suppress(OSError):
            os.close(os.open(slots, flags))
            report(f"succeeded: could {action} {slots}")
    report("done: account")


def connections() -> None:
    """Occupy the daemon's file descriptors with idle connections."""
    sockets = []
    with contextlib.suppress(OSError):
        for _ in range(CONNECTIONS):
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            connection.connect(SOCKET)
            sockets.append(connection)
    report("ready")
    sys.stdin.read()


def garbage() -> None:
    """Send lines that are deeply nested, long, binary or not part of the protocol."""
    lines = [
        b"[" * DEPTH + b"]" * DEPTH,
        b"x" * (4 << 20),
        b"\xff\xfe\x00\x01",
        b'{"type":"submit-job","spec":{"command":' + b"[" * DEPTH + b"}",
        b'{"type":"stop-job","name":"\\u001b]0;x\\u0007"}',
        b'{"type":"shutdown","force":true}',
    ]
    for line in lines:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(SOCKET)
            hello = peer.recv(4096)
            peer.sendall(hello.splitlines()[0] + b"\n" + line + b"\n")
            while peer.recv(65536):
                pass
    report("done: garbage")


def squat() -> None:
    """Bind the abstract socket names of all card locks, which the kernel lists."""
    sockets = []
    for line in Path("/proc/net/unix").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if name.startswith("@") and "GPU-" in name:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                with contextlib.suppress(OSError):
                    occupied = socket.socket(socket.AF_UNIX, kind)
                    occupied.bind("\0" + name[1:])
                    sockets.append(occupied)
    report("ready")
    sys.stdin.read()


def impostor(victim: str) -> None:
    """Pose as another user's daemon: listen where that user's commands might connect."""
    directory = Path(f"/tmp/fenka-{victim}")
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    directory.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as server:
        path = directory / "daemon.sock"
        path.unlink(missing_ok=True)
        server.bind(str(path))
        path.chmod(0o777)
        server.listen()
        server.settimeout(0.2)
        report("ready")
        end = os.dup(0)
        os.set_blocking(end, False)
        while True:
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                connection.settimeout(2)
                with contextlib.suppress(OSError):
                    if connection.recv(100):
                        report(f"succeeded: user {victim} sent data to the false daemon")
            with contextlib.suppress(BlockingIOError):
                if os.read(end, 1) == b"":
                    return


def names() -> None:
    """Submit names and commands with escape sequences that a terminal would execute."""
    hello = None
    for name in ("\x1b[2Jx", "a\nb", "../../etc", "x" * 5000):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(SOCKET)
            hello = peer.recv(4096).splitlines()[0]
            request = {
                "type": "submit-job",
                "spec": {"command": ["\x1b[2J"], "gpu": {"memory": "1"}, "name": name},
                "wait": False,
            }
            peer.sendall(hello + b"\n" + json.dumps(request).encode() + b"\n")
            if b'"lease-granted"' in peer.recv(65536):
                report(f"succeeded: a lease named {name[:20]!r}")
    report("done: names")


def impersonate() -> None:
    """Listen on every port where others have listened, and wait for their clients' tokens."""
    servers: dict[int, socket.socket] = {}
    seen: set[int] = set()
    report("ready")
    end = os.dup(0)
    os.set_blocking(end, False)
    while True:
        seen |= others_ports()
        for port in seen - servers.keys():
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                server.close()
                continue
            server.listen()
            servers[port] = server
        for server in select.select(list(servers.values()), [], [], 0.02)[0]:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                if b"Authorization" in connection.recv(1 << 16):
                    report("succeeded: a client's token came to another user's program")
        with contextlib.suppress(BlockingIOError):
            if os.read(end, 1) == b"":
                return


def others_ports() -> set[int]:
    """Return the loopback ports of replicas of other users: those below the range of outgoing connections."""
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, _, _, _, uid, *_ = line.split()
        port = int(local.rpartition(":")[2], 16)
        if state == "0A" and int(uid) != os.getuid() and 20000 < port < 32768:
            ports.add(port)
    return ports


def knock() -> None:
    """Connect to the daemon's sockets and close again, as fast as possible."""
    kinds = {"daemon.sock": socket.SOCK_STREAM}
    kinds |= dict.fromkeys(("nodes.sock", "containers.sock"), socket.SOCK_SEQPACKET)
    report("ready")
    end = os.dup(0)
    os.set_blocking(end, False)
    while True:
        for name, kind in kinds.items():
            for _ in range(100):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as peer:
                    peer.setblocking(False)
                    peer.connect(str(RUNTIME / name))
        with contextlib.suppress(BlockingIOError):
            if os.read(end, 1) == b"":
                return


def stop_names() -> None:
    """Request the end of as many jobs as a message has room for."""
    names = [str(number) for number in range(10_000)]
    for _ in range(20):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(SOCKET)
            hello = peer.recv(4096).splitlines()[0]
            request = json.dumps({"type": "stop-job", "names": names}, separators=(",", ":"))
            peer.sendall(hello + b"\n" + request.encode() + b"\n")
            if b"jobs-stopped" in peer.recv(65536):
                report("succeeded: one request was about 10,000 jobs")
    report("done: stop_names")


def departed() -> None:
    """Keep connections of processes that have ended before the daemon asks who they are."""
    kept = list[socket.socket]()
    for _ in range(DEPARTED):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(10)
        child = os.fork()
        if not child:
            # The kernel notes the process that connects.
            with contextlib.suppress(OSError):
                peer.connect(SOCKET)
            os._exit(0)
        os.waitpid(child, 0)
        kept.append(peer)
    request = {
        "type": "submit-job",
        "spec": {"command": ["true"], "gpu": {"memory": "1"}, "name": "departed"},
        "wait": False,
    }
    for peer in kept:
        with contextlib.suppress(OSError):
            hello = peer.recv(4096).splitlines()
            peer.sendall(
                (hello[0] if hello else b"") + b"\n" + json.dumps(request).encode() + b"\n"
            )
            if b'"lease-granted"' in peer.recv(65536):
                report("succeeded: a lease for a process that has ended")
    report("done: departed")


def lingering() -> None:
    """Send descriptors of TCP connections whose close takes an hour, for the daemon to close."""
    kept = list[socket.socket]()
    kinds = {"daemon.sock": socket.SOCK_STREAM, "containers.sock": socket.SOCK_SEQPACKET}
    for name, kind in kinds.items():
        for _ in range(LINGERING):
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
                sender = socket.create_connection(server.getsockname())
                kept.append(server.accept()[0])
                sender.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        sender.send(b"x" * 65536)
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
                peer = socket.socket(socket.AF_UNIX, kind)
                kept.append(peer)
                peer.settimeout(10)
                peer.connect(str(RUNTIME / name))
                try:
                    socket.send_fds(peer, [b"x"], [sender.fileno()])
                except OSError:  # The kernel refuses it.
                    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                sender.close()
    report("ready")
    sys.stdin.read()


def report(line: str) -> None:
    """Print one line without buffering."""
    print(line, flush=True)


ATTACKS: dict[str, Callable[..., None]] = {
    attack.__name__: attack
    for attack in (
        fifo,
        claim_by_mount,
        claim_by_environment,
        account,
        connections,
        garbage,
        squat,
        impostor,
        names,
        impersonate,
        knock,
        stop_names,
        departed,
        lingering,
    )
}

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](*sys.argv[2:])
