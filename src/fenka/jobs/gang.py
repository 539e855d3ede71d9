"""The environment of a gang's members: what torchrun sets for the only process of a node."""

import socket

LOOPBACK = "127.0.0.1"


def member_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of one member.

    Each member sees its own cards and no others. So its first card is card 0, and LOCAL_RANK, by which
    scripts choose a card, is 0.

    Args:
        rank: The member's number.
        size: The number of members.
        port: A free port for the members' rendezvous.
    """
    return {
        "FENKA_GANG_RANK": str(rank),
        "FENKA_GANG_SIZE": str(size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
