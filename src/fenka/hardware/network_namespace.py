"""Calls functions in another network namespace: that of the machine, for a program in a container."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

MACHINE = Path("/proc/1/ns/net")
"""The machine's, for a program that sees its PIDs."""

_CLONE_NEWNET = 0x40000000

_Value = TypeVar("_Value")


def call_inside(network: Path, function: Callable[[], _Value]) -> _Value:
    """Call a function whose sockets belong to a network namespace, and return its result.

    A socket stays in the namespace in which it was made. Only a thread enters it, and then ends.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_enter, network).result()
        return thread.submit(function).result()


def _enter(network: Path) -> None:
    """Move this thread into a network namespace. Without the right to do so the thread stays: outside of a
    container its namespace is the machine's."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(network, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(network))
        finally:
            os.close(descriptor)
