"""Reports to systemd what a daemon does, for units with Type=notify (sd_notify(3))."""

import contextlib
import os
import socket

_VARIABLE = "NOTIFY_SOCKET"


def environment() -> dict[str, str]:
    """Return what a program that replaces this one needs to report in its place."""
    address = os.environ.get(_VARIABLE)
    return {_VARIABLE: address} if address else {}


def notify(state: str) -> None:
    """Send a state, as READY=1, if a service manager has started this process and wants to know."""
    address = os.environ.get(_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as report, contextlib.suppress(OSError):
        report.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        report.sendall(state.encode())
