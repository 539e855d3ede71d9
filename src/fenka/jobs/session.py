"""What becomes of programs in the background when their user logs out, where systemd-logind manages sessions.

A session's processes are ended with it if logind.conf has KillUserProcesses=yes. Those of the user's service
manager end with the user's last session, unless the user lingers.
"""

import os
import re
import subprocess
from pathlib import Path

from fenka.hardware.peer_credentials import user_name

LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose service manager runs without a session."""

_BUS_TIMEOUT_S = 5.0

_LOGIND = (
    "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
)  # fmt: skip
_MANAGER = (
    "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
)  # fmt: skip

_WARNING = (
    "ends when you log out, as this machine is set up: `loginctl enable-linger` lets what you start "
    "in the background afterwards go on"
)


def outlive(pid: int) -> str:
    """Let a child that was just started go on after the logout, if that is allowed.

    Return an empty string; or why the child will end with the session, and what would change that.
    """
    groups = _groups()
    user = user_name(os.getuid())
    if f"/user@{os.getuid()}.service/" in groups:
        return "" if _lingers(user) else _WARNING
    if not re.search(r"/session-[^/]+\.scope$", groups, re.MULTILINE) or not _ends_with_session(
        user
    ):
        return ""
    return "" if _lingers(user) and _move_to_manager(pid) else _WARNING


def _groups() -> str:
    """Return this process's control groups."""
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _lingers(user: str) -> bool:
    return (LINGERING / user).exists()


def _ends_with_session(user: str) -> bool:
    """Return whether logind ends the processes of this user's sessions."""
    names = ("KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers")
    lines = _busctl("get-property", *_LOGIND, *names).splitlines()
    if len(lines) != len(names) or lines[0] != "b true":
        return False
    excluded, only = (re.findall(r'"([^"]*)"', line) for line in lines[1:])
    return user not in excluded and (not only or user in only)


def _move_to_manager(pid: int) -> bool:
    """Move a process from its session into a scope of the user's own service manager."""
    scope = (
        "ssa(sv)a(sa(sv))",
        f"fenka-{pid}.scope",
        "fail",
        "1",
        "PIDs",
        "au",
        "1",
        str(pid),
        "0",
    )
    return bool(_busctl("--user", "call", *_MANAGER, "StartTransientUnit", *scope))


def _busctl(*words: str) -> str:
    """Return the output of systemd's client of the message bus; nothing if it fails."""
    try:
        done = subprocess.run(
            ["busctl", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=_BUS_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
