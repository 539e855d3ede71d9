"""What an ordinary user may try against neighbours and the daemon: `hostile.py ATTACK [ARGUMENT…]`.

Each attack prints `ready` when it stands and waits for the end of its stdin, or `done: …` when it is over.
A line `won: …` is a breach. Runs as the attacker; only the standard library.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

RUNTIME = Path("/run/fenka")
SOCKET = str(RUNTIME / "daemon.sock")
CONNECTIONS = 300
DEPTH = 100_000


def in_own_run_directory(*commands: str) -> None:
    """A namespace of the attacker's own whose /run/fenka/lease is what the commands make of it."""
    script = "mount -t tmpfs tmpfs /run && mkdir -p /run/fenka/lease /run/fenka/account"
    steps = " && ".join([script, *commands, "echo ready", "read end"])
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", steps]
    subprocess.run(words, check=False)


def fifo() -> None:
    """A control page that blocks whoever opens it."""
    in_own_run_directory("mkfifo /run/fenka/lease/control")


def bind(lease: str) -> None:
    """Pretend to be a process of somebody's lease, by a mount of its own directory."""
    mount = f"mount --bind /proc/1/root{RUNTIME}/leases/{lease}/lease /run/fenka/lease"
    in_own_run_directory(f"({mount} || true)")


def claim_by_environment(lease: str) -> None:
    """Pretend to be a process of somebody's lease, by the environment."""
    environment = os.environ | {"FENKA_LEASE": f"{RUNTIME}/leases/{lease}"}
    subprocess.run(["sh", "-c", "echo ready; read end"], env=environment, check=False)


def account(lease: str) -> None:
    """Write somebody's account, read it, cut it short."""
    slots = RUNTIME / "leases" / lease / "account" / "slots"
    for flags, action in ((os.O_RDWR, "open"), (os.O_WRONLY | os.O_TRUNC, "cut short")):
        with contextlib.suppress(OSError):
            os.close(os.open(slots, flags))
            say(f"won: could {action} {slots}")
    say("done: account")


def connections() -> None:
    """Occupy the daemon's descriptors with connections that say nothing."""
    held = []
    with contextlib.suppress(OSError):
        for _ in range(CONNECTIONS):
            line = socket.socket(socket.AF_UNIX)
            line.setblocking(False)
            line.connect(SOCKET)
            held.append(line)
    say("ready")
    sys.stdin.read()


def garbage() -> None:
    """Lines that are deep, long, binary, or no protocol at all."""
    lines = [
        b"[" * DEPTH + b"]" * DEPTH,
        b"x" * (4 << 20),
        b"\xff\xfe\x00\x01",
        b'{"type":"ask","command":' + b"[" * DEPTH + b"}",
        b'{"type":"stop","name":"\\u001b]0;x\\u0007"}',
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
    say("done: garbage")


def squat() -> None:
    """Take the abstract names of all cards' locks, as they can be read from the kernel's list."""
    held = []
    for line in Path("/proc/net/unix").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if name.startswith("@") and "GPU-" in name:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                with contextlib.suppress(OSError):
                    taken = socket.socket(socket.AF_UNIX, kind)
                    taken.bind("\0" + name[1:])
                    held.append(taken)
    say("ready")
    sys.stdin.read()


def impostor(victim: str) -> None:
    """Be the daemon of another user: listen where that user's commands might look."""
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
        say("ready")
        end = os.dup(0)
        os.set_blocking(end, False)
        while True:
            with contextlib.suppress(TimeoutError):
                line, _ = server.accept()
                line.settimeout(2)
                with contextlib.suppress(OSError):
                    if line.recv(100):
                        say(f"won: user {victim} spoke to the impostor")
            with contextlib.suppress(BlockingIOError):
                if os.read(end, 1) == b"":
                    return


def names() -> None:
    """Ask with names and commands that a terminal would obey."""
    hello = None
    for name in ("\x1b[2Jx", "a\nb", "../../etc", "x" * 5000):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(SOCKET)
            hello = peer.recv(4096).splitlines()[0]
            ask = {
                "type": "ask",
                "command": ["\x1b[2J"],
                "gpu_mem": "1",
                "name": name,
                "wait": False,
            }
            peer.sendall(hello + b"\n" + json.dumps(ask).encode() + b"\n")
            if b'"granted"' in peer.recv(65536):
                say(f"won: a lease named {name[:20]!r}")
    say("done: names")


def say(line: str) -> None:
    """Print one line."""
    print(line, flush=True)


ATTACKS: dict[str, Callable[..., None]] = {
    attack.__name__: attack
    for attack in (
        fifo,
        bind,
        claim_by_environment,
        account,
        connections,
        garbage,
        squat,
        impostor,
        names,
    )
}

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](*sys.argv[2:])
