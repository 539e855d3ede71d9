"""Ports that tests listen on."""

import random
import socket

CHOSEN = range(12_000, 30_000)
"""Below the ports that the kernel gives to connections, which could take one before its test listens."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    while True:
        port = random.SystemRandom().choice(CHOSEN)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
