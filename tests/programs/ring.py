"""Adds up the ranks of a training of PyTorch over TCP, as torchrun's processes find each other."""

import os
import socket
import struct


def total(rank: int, size: int, master: tuple[str, int]) -> int:
    """Return the sum of all ranks, which rank 0 adds up."""
    if rank:
        with connected(master) as connection:
            connection.sendall(struct.pack("i", rank))
            return int(struct.unpack("i", connection.recv(4))[0])
    with socket.create_server(master) as server:
        others = [server.accept()[0] for _ in range(size - 1)]
        result = sum(struct.unpack("i", other.recv(4))[0] for other in others)
        for other in others:
            other.sendall(struct.pack("i", result))
            other.close()
        return int(result)


def connected(master: tuple[str, int]) -> socket.socket:
    """Return a connection to rank 0, which may not listen yet."""
    while True:
        try:
            return socket.create_connection(master)
        except ConnectionRefusedError:
            os.sched_yield()


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
print(f"rank {rank} of {size}: {total(rank, size, address)}", flush=True)
